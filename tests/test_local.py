"""Machines of the local provider are real processes with a real end, whoever dies first."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hotlap.cloud import guardian
from hotlap.cloud.local import LocalProvider
from hotlap.cloud.machine_files import MachineFolder
from hotlap.cloud.provider import Machine, Start, Tags
from hotlap.errors import NotCreated, ProviderFailed

pytestmark = pytest.mark.long

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.environ["SECOND"] = "1"
        print("forked away", os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0)
print("command", os.getpid(), flush=True)
time.sleep(600)
"""


def python(code: str, *args: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code, *args)


@pytest.fixture
def provider(home: Path) -> Iterator[LocalProvider]:
    provider = LocalProvider(home=home, grace_s=0.3)
    yield provider
    for machine in provider.machines().machines:
        provider.terminate(machine.machine_id)


def rent(provider: LocalProvider, argv: tuple[str, ...], ttl_s: float = 60.0, **start: object) -> Machine:
    tags = Tags("0123456789abcdef", "me", "n", int(time.time() + ttl_s))
    return provider.create(provider.offers()[0], tags, Start(argv, **start))  # type: ignore[arg-type]


def wait_until(is_so: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, "it did not come to be"
        time.sleep(0.02)


def pids_in(provider: LocalProvider, machine: Machine, num: int) -> list[int]:
    """Process ids that the command printed."""
    found: list[int] = []

    def has_all() -> bool:
        found[:] = [int(line.split()[-1]) for line in provider.logs(machine.machine_id).lines]
        return len(found) == num

    wait_until(has_all)
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_terminate_ends_what_ignores_signals_and_forked_away(provider: LocalProvider) -> None:
    machine = rent(provider, python(STUBBORN))
    pids = pids_in(provider, machine, 2)
    assert all(map(is_alive, pids))
    assert provider.terminate(machine.machine_id)
    assert not any(map(is_alive, pids)) and provider.machines().machines == ()


def test_a_machine_ends_at_its_time_though_nobody_is_there_any_more(provider: LocalProvider, home: Path) -> None:
    """The process that rented it is killed, and no reaper comes: the guardian keeps the date."""
    code = f"""
import sys, time
from pathlib import Path
from hotlap.cloud.local import LocalProvider
from hotlap.cloud.provider import Start, Tags
provider = LocalProvider(home=Path({str(home)!r}))
tags = Tags("0123456789abcdef", "me", "n", int(time.time()) + 8)
provider.create(provider.offers()[0], tags, Start((sys.executable, "-c", {STUBBORN!r})))
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run(python(code), timeout=60).returncode == -signal.SIGKILL
    (machine,) = provider.machines().machines
    pids = pids_in(provider, machine, 2)
    wait_until(lambda: not any(map(is_alive, pids)))
    assert machine.not_after_s is not None and time.time() - machine.not_after_s < 30.0
    wait_until(lambda: [each.state for each in provider.machines().machines] == ["exited"])
    assert provider.terminate(machine.machine_id) and provider.machines().machines == ()


def test_a_machine_whose_guardian_was_killed_is_told_and_still_ends(provider: LocalProvider, home: Path) -> None:
    machine = rent(provider, python(STUBBORN))
    pids = pids_in(provider, machine, 2)
    guardian_pid = MachineFolder(home / "machines" / machine.machine_id).guardian_pid()
    assert guardian_pid
    os.kill(guardian_pid, signal.SIGKILL)
    wait_until(lambda: provider.machines().machines[0].state == "error")
    assert "nothing ends it at its time" in provider.machines().machines[0].problems[0]
    assert provider.terminate(machine.machine_id)
    assert not any(map(is_alive, pids)) and provider.machines().machines == ()


def test_a_command_that_ends_leaves_nothing_running(provider: LocalProvider) -> None:
    machine = rent(provider, python(STUBBORN.replace('print("command"', 'time.sleep(0.5); print("command"') + "\n"))
    provider.terminate(machine.machine_id)
    child = "import subprocess, sys; print('a', subprocess.Popen(['sleep', '600']).pid, flush=True)"
    machine = rent(provider, python(child))
    (pid,) = pids_in(provider, machine, 1)
    wait_until(lambda: not is_alive(pid))
    wait_until(lambda: provider.machines().machines[0].state == "exited")
    assert not is_alive(pid)


def test_a_date_that_is_over_is_refused(provider: LocalProvider) -> None:
    with pytest.raises(NotCreated, match="may be over"):
        rent(provider, python("pass"), ttl_s=-5.0)
    assert provider.machines().machines == ()


def test_each_machine_has_a_volume_and_a_disk_of_its_own(provider: LocalProvider, home: Path) -> None:
    machine = rent(provider, python("import os; print(os.environ['HOTLAP_VOLUME'], os.getcwd(), flush=True)"))
    wait_until(lambda: bool(provider.logs(machine.machine_id).lines))
    folder = home / "machines" / machine.machine_id
    assert provider.logs(machine.machine_id).lines == (f"{folder / 'volume'} {folder / 'disk'}",)


def test_keys_of_this_environment_do_not_reach_a_machine(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    for name in ("RUNPOD_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "DATABASE_URL"):
        monkeypatch.setenv(name, "planted-secret-1")
    monkeypatch.setenv("WANTED", "planted-secret-2")
    show = python("import os; print(sorted(os.environ.items()), flush=True)")
    machine = rent(provider, show, secret_refs={"HF_TOKEN": "WANTED"}, env={"PLAIN": "yes"})
    wait_until(lambda: bool(provider.logs(machine.machine_id).lines))
    (line,) = provider.logs(machine.machine_id).lines
    assert "planted-secret-1" not in line and "('HF_TOKEN', 'planted-secret-2')" in line and "('PLAIN', 'yes')" in line
    files = (home / "machines" / machine.machine_id).glob("*.json")
    assert not any("planted-secret" in path.read_text() for path in files)


def test_a_name_that_is_a_path_is_refused(provider: LocalProvider) -> None:
    with pytest.raises(ProviderFailed, match="no local machine"):
        provider.terminate("local-/../../x")


def test_descendants_are_found_at_any_depth() -> None:
    code = "import subprocess; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        grandchild = int(child.stdout.readline())
        assert {child.pid, grandchild} <= set(guardian.descendants(os.getpid()))
        os.kill(grandchild, signal.SIGKILL)

"""The first program on a rented machine, as it is started there: `python -S -I`, without anything of ours beside it."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotlap.cloud import boot, guardian
from hotlap.cloud.provider import LINE_PREFIX, event_in
from hotlap.cloud.runpod_shapes import boot_argv
from hotlap.testing.fake_runpod import FakeRunpod
from hotlap.testing.routes import Account

pytestmark = pytest.mark.long

SOURCE = Path(boot.__file__)
PYTHON = [sys.executable, "-S", "-I"]


class Booted:
    """A boot that runs, and what it said so far."""

    def __init__(self, job: list[str], folder: Path, **env: str) -> None:
        self._out = folder / f"out-{time.monotonic_ns()}"
        orders = {
            "HOTLAP_LEASE": "lease1",
            "HOTLAP_NONCE": "nonce1",
            "HOTLAP_NOT_AFTER": str(int(time.time()) + 60),
            "HOTLAP_CAP_S": "20",
            "HOTLAP_VOLUME": str(folder),
            "PATH": os.environ["PATH"],
        }
        with self._out.open("wb") as out:
            self.process = subprocess.Popen(
                [*PYTHON, str(SOURCE), *job],
                cwd=folder,
                env={name: value for name, value in (orders | env).items() if value},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def lines(self) -> list[str]:
        return self._out.read_text().splitlines()

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        every = [event for line in self.lines() if (event := event_in(line))]
        return [event for event in every if kind in (None, event["event"])]

    def wait_for(self, kind: str, num: int = 1, timeout_s: float = 60.0) -> dict[str, Any]:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if len(found := self.events(kind)) >= num:
                return found[num - 1]
            assert self.process.poll() is None, self.lines()
            time.sleep(0.01)
        raise AssertionError(f"no {kind} within {timeout_s} s: {self.lines()}")

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=60)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    opened: list[Booted] = []

    def start(*job: str, **env: str) -> Booted:
        opened.append(Booted(list(job), tmp_path, **env))
        return opened[-1]

    yield start
    for booted in opened:
        booted.process.kill()
        booted.process.wait()


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_job_runs_once_and_boot_stays(started: Any) -> None:
    booted = started("sh", "-c", "echo hello; exit 3")
    result = booted.wait_for("result")
    assert (result["exit_code"], result["reason"]) == (3, "crash")
    (first,) = booted.events("boot")
    assert first["nonce"] == "nonce1" and first["lease"] == "lease1" and len(first["boot_id"]) == 16
    assert result["boot_id"] == first["boot_id"] and "hello" in booted.lines()
    time.sleep(0.3)
    assert booted.process.poll() is None
    assert booted.end() == 143


def test_the_job_s_own_result_comes_once_and_last(started: Any) -> None:
    told = LINE_PREFIX + json.dumps({"event": "result", "exit_code": 75, "reason": "slice_over", "step": 9})
    booted = started("sh", "-c", f"echo '{told}'; echo later; exit 75")
    result = booted.wait_for("result")
    assert (result["exit_code"], result["reason"], result["step"]) == (75, "slice_over", 9)
    assert len(booted.events("result")) == 1 and event_in(booted.lines()[-1]) == result
    assert "later" in booted.lines()


@pytest.mark.parametrize("times", [2, 4])
def test_a_restarted_container_does_not_run_the_job_again(times: int, started: Any, tmp_path: Path) -> None:
    count = tmp_path / "count"
    for number in range(times):
        booted = started("sh", "-c", f"echo x >> {count}; sleep 30")
        if number == 0:
            booted.wait_for("boot")
            while not count.exists():
                time.sleep(0.01)
        else:
            assert booted.wait_for("refused")["reason"] == "again"
        booted.process.kill()
        booted.process.wait()
    assert count.read_text() == "x\n"


def test_another_lease_on_the_same_volume_runs(started: Any) -> None:
    started("true").wait_for("result")
    assert started("true", HOTLAP_LEASE="lease2").wait_for("result")["exit_code"] == 0


def test_without_a_volume_the_container_s_disk_holds_the_marker(started: Any) -> None:
    started("true", HOTLAP_VOLUME="").wait_for("result")
    assert started("true", HOTLAP_VOLUME="").wait_for("refused")["reason"] == "again"


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"HOTLAP_NOT_AFTER": "1000"}, "late"),
        ({"HOTLAP_NOT_AFTER": "-5"}, "late"),
        ({"HOTLAP_NOT_AFTER": "soon"}, "undated"),
        ({"HOTLAP_NOT_AFTER": ""}, "undated"),
        ({"HOTLAP_CAP_S": ""}, "undated"),
        ({"HOTLAP_VOLUME": "/nowhere/at/all"}, "volume"),
    ],
)
def test_refuses(env: dict[str, str], reason: str, started: Any, tmp_path: Path) -> None:
    booted = started("sh", "-c", f"touch {tmp_path}/ran", **env)
    assert booted.wait_for("refused")["reason"] == reason
    time.sleep(0.2)
    assert not (tmp_path / "ran").exists() and booted.events("result") == [] and booted.process.poll() is None


def test_beats_while_the_job_runs(started: Any) -> None:
    booted = started("sleep", "30", HOTLAP_HEARTBEAT_S="0.2")
    beat = booted.wait_for("heartbeat", num=3)
    assert beat["boot_id"] == booted.events("boot")[0]["boot_id"]


def test_a_job_past_its_cap_is_warned_then_killed_with_all_it_started(started: Any, tmp_path: Path) -> None:
    """It ignores signals, left its session, and its child did so again."""
    code = f"""
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("warned", flush=True))
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))
        time.sleep(60)
    os._exit(0)
time.sleep(60)
while True: time.sleep(60)
"""
    began_s = time.monotonic()
    booted = started(*python(code), HOTLAP_CAP_S="1.5", HOTLAP_GRACE_S="0.7")
    result = booted.wait_for("result")
    assert (result["exit_code"], result["reason"]) == (124, "overran")
    assert "warned" in booted.lines() and 1.2 < time.monotonic() - began_s < 40.0
    escaped = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(escaped, 0)


def test_the_machine_s_own_time_bounds_the_cap(started: Any) -> None:
    booted = started("sleep", "30", HOTLAP_NOT_AFTER=str(int(time.time()) + 2), HOTLAP_GRACE_S="0.1")
    assert booted.wait_for("result")["reason"] == "overran"


def test_a_stop_is_passed_on_and_waited_for(started: Any) -> None:
    job = python(
        "import os, signal, sys, time\n"
        "def stop(*_): os.write(1, b'saved\\n'); os._exit(75)\n"
        "signal.signal(signal.SIGTERM, stop); print('ready', flush=True); time.sleep(60)"
    )
    booted = started(*job)
    while "ready" not in booted.lines():
        time.sleep(0.01)
    assert booted.end() == 143
    assert "saved" in booted.lines() and booted.events("result")[0]["exit_code"] == 75


def test_a_job_that_ignores_the_stop_is_killed_after_the_grace(started: Any) -> None:
    booted = started("sh", "-c", "trap '' TERM; echo ready; sleep 60; sleep 60", HOTLAP_GRACE_S="0.3")
    while "ready" not in booted.lines():
        time.sleep(0.01)
    began_s = time.monotonic()
    assert booted.end() == 143 and time.monotonic() - began_s < 20.0
    assert booted.events("result")[0]["reason"] == "crash"


def test_a_job_that_cannot_be_started_is_a_result(started: Any) -> None:
    assert started("no-such-program").wait_for("result")["exit_code"] == 127


def test_whatever_fails_in_boot_itself_is_a_result_and_boot_stays(tmp_path: Path) -> None:
    """One that dies is started again by the platform, and then its launcher hears of a second start only."""
    broken = "import sys; from hotlap.cloud import boot; boot._kill_orphans = lambda: 1 / 0; boot.main(sys.argv[1:])"
    env = {"HOTLAP_NOT_AFTER": str(int(time.time()) + 60), "HOTLAP_CAP_S": "20", "PATH": os.environ["PATH"]}
    process = subprocess.Popen(
        [sys.executable, "-c", broken, "true"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    try:
        events = [event_in(process.stdout.readline()) for _ in range(2)]
        assert events[1] and (events[1]["event"], events[1]["reason"]) == ("result", "unexpected"), events
        assert "ZeroDivisionError" in events[1]["message"] and process.poll() is None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_process_that_ends_while_all_are_listed_is_nobody_s_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment the kernel says of its folder that there is no such process, which `glob` takes for an error of
    its own. That ended boots before their result, and what looks after machines as well."""
    real = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"/proc/{os.getpid()}/"):
            raise ProcessLookupError(errno.ESRCH, "No such process")
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    if sys.version_info < (3, 13):
        with pytest.raises(ProcessLookupError):
            list(Path("/proc").glob("[0-9]*/stat"))
    assert os.getpid() in boot.process_ids()
    child = subprocess.Popen(["sleep", "60"], env={"MARK": "here"})
    try:
        assert child.pid in boot._children()
        assert child.pid in guardian.descendants(os.getpid()) and list(guardian.pids_with("MARK=here")) == [child.pid]
    finally:
        child.kill()
        child.wait()


def test_the_machine_s_key_is_neither_given_to_the_job_nor_said(started: Any) -> None:
    booted = started("sh", "-c", "env; echo leaked: pod-key-planted", RUNPOD_API_KEY="pod-key-planted")
    booted.wait_for("result")
    assert not any("pod-key-planted" in line for line in booted.lines())
    assert "leaked: [redacted]" in booted.lines()


# --- the ladder, against the emulator ---


@pytest.mark.parametrize(
    ("allows", "rungs", "status"),
    [
        ("terminate", [("delete", 204)], None),
        ("stop", [("delete", 403), ("stop", 200)], "RUNNING"),
        ("nothing", [("delete", 403), ("stop", 403)], "RUNNING"),
    ],
)
def test_the_ladder(allows: str, rungs: list[tuple[str, int]], status: str | None, started: Any) -> None:
    with FakeRunpod(folder=None, runtime=lambda birth: _Nothing(), timings=_instant()) as cloud:
        cloud.account = cloud._routes._account = Account(pod_key_allows=allows)
        pod_id, key = _a_machine(cloud)
        booted = started(
            "true",
            HOTLAP_LINGER_S="0.1",
            HOTLAP_RUNPOD_URL=cloud.url,
            RUNPOD_POD_ID=pod_id,
            RUNPOD_API_KEY=key,
        )
        booted.wait_for("self_end", num=len(rungs))
        assert [(event["rung"], event["status"]) for event in booted.events("self_end")] == rungs
        left = cloud.alive()
        assert [pod.status for pod in left] == ([status] if status else [])
        assert booted.process.poll() is None


def test_no_key_travels_in_the_clear(started: Any) -> None:
    url = "http://192.0.2.1/v2"
    booted = started("true", HOTLAP_LINGER_S="0.1", HOTLAP_RUNPOD_URL=url, RUNPOD_POD_ID="p", RUNPOD_API_KEY="k" * 9)
    assert booted.wait_for("self_end")["rung"] == "hold"


def test_an_answer_that_is_none_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"what?\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert boot._call("DELETE", f"http://127.0.0.1:{server.getsockname()[1]}/v2/pods/p", "k", None) is None
        thread.join()


class _Nothing:
    def until(self, at_s: float) -> list[Any]:
        return []

    def signal(self, number: int) -> None: ...

    def kill(self) -> None: ...


def _instant() -> Any:
    from hotlap.testing.machines import INSTANT

    return INSTANT


def _a_machine(cloud: FakeRunpod) -> tuple[str, str]:
    from hotlap.testing.faults import Active

    body = {"name": "hotlap-lease1", "image": "i", "gpu": {"id": "NVIDIA L40S"}, "env": {}, "disk": 20}
    pod = cloud.park.create(body, cloud.now_s(), 0.86, Active(()))
    cloud.settle()
    return pod.pod_id, pod.key


# --- decisions ---


def orders(**env: str) -> boot.Orders:
    return boot.orders_of({"HOTLAP_NOT_AFTER": "1000", "HOTLAP_CAP_S": "300", **env})


@pytest.mark.parametrize(("now_s", "reason"), [(0.0, None), (999.9, None), (1000.0, "late"), (1500.0, "late")])
def test_refusal_by_the_clock(now_s: float, reason: str | None) -> None:
    refused = boot.refusal(orders(), now_s)
    assert (refused[0] if refused else None) == reason


@pytest.mark.parametrize(("now_s", "seconds"), [(0.0, 300.0), (700.0, 300.0), (900.0, 100.0), (2000.0, 0.0)])
def test_the_time_to_run_is_the_smaller_of_two(now_s: float, seconds: float) -> None:
    assert boot.seconds_to_run(orders(), now_s) == seconds


def test_a_lease_s_name_cannot_leave_the_marker_s_folder() -> None:
    assert "/" not in boot.orders_of({"HOTLAP_LEASE": "../../etc/x"}).lease_id


@pytest.mark.parametrize(
    ("told", "returncode", "overran", "expected"),
    [
        (None, 0, False, (0, "done")),
        (None, 2, False, (2, "crash")),
        (None, -9, False, (6, "crash")),
        (None, -40, False, (6, "crash")),
        ({"exit_code": 75, "reason": "slice_over"}, 75, False, (75, "slice_over")),
        ({"exit_code": 0, "reason": "done"}, 1, False, (1, "crash")),
        ({"exit_code": 0, "reason": "done"}, -9, True, (124, "overran")),
    ],
)
def test_the_result_is_what_was_seen(
    told: dict[str, Any] | None, returncode: int, overran: bool, expected: tuple[int, str]
) -> None:
    result = boot.result_of(told, returncode, overran)
    assert (result["exit_code"], result["reason"]) == expected


def test_boot_and_provider_agree_on_the_line() -> None:
    assert boot.LINE_PREFIX == LINE_PREFIX
    assert event_in(boot.event_line("boot", boot_id="a")) == {"event": "boot", "boot_id": "a"}


def test_its_text_travels_in_a_request_and_runs_from_there(tmp_path: Path) -> None:
    argv = boot_argv(("sh", "-c", "echo from afar"))
    assert sum(map(len, argv)) < 60_000
    env = {"HOTLAP_NOT_AFTER": str(int(time.time()) + 30), "HOTLAP_CAP_S": "9", "PATH": os.environ["PATH"]}
    process = subprocess.Popen(
        [sys.executable, *argv[1:]], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout
    lines = [process.stdout.readline().strip() for _ in range(3)]
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=10) == 143
    process.stdout.close()
    assert lines[1] == "from afar" and "result" in lines[2]

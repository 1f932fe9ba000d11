"""The ssh provider, on a real sshd: the same boot and worker, an end without anybody, and broken connections."""

import random
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sshd import Box

from hotlap import clock, durable
from hotlap.cloud import rental
from hotlap.cloud.launcher import Launcher, Stops, World
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.proof import Patience
from hotlap.cloud.provider import Offer, Start, Tags
from hotlap.cloud.reaper import Reaper
from hotlap.cloud.ssh import BoxVolume, SshProvider
from hotlap.cloud.volume import CHUNK_BYTES, pull
from hotlap.config import CloudConfig, RunConfig
from hotlap.errors import AmbiguousCreate, NotCreated, ProviderFailed

pytestmark = pytest.mark.long

OFFER = Offer("ssh", "box", None, 360_000)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(CloudConfig(), f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    yield ledger
    ledger.close()


def test_boot_and_worker_run_there_and_the_machine_is_proven_dead(box: Box, ledger: Ledger) -> None:
    """The slice itself ends at once, for there is no such data: what is shown is the way there and back."""
    provider = SshProvider(box.settings)
    config = RunConfig(base_model="no-such-model", dataset="/no-such.jsonl", output_dir=str(box.home / "runs"), run="r")
    job = rental.box_job(config, provider)
    settings = CloudConfig(ssh=box.settings)
    words: list[str] = []
    end = Launcher(provider, ledger, settings, "me", Stops(), World(say=words.append)).launch(job, [OFFER])
    assert end.end and end.end.kind == "result" and end.end.result, (end, words)
    assert end.end.result["exit_code"] == 2 and "no-such" in end.end.message, end.end
    assert end.lease.state == "settled" and end.lease.provider == "ssh" and 0 < end.lease.usd_micros < 100_000
    assert provider.machines().find(end.lease.machine_id or "") is None


def test_the_machine_ends_at_its_time_though_nobody_is_connected(box: Box, tmp_path: Path) -> None:
    provider = SshProvider(box.settings)
    signs = tmp_path / "signs"
    stubborn = (
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nif os.fork() == 0: os.setsid()\n"
        "while True:\n    open(sys.argv[1], 'a').write(f'{os.getpid()}\\n')\n    time.sleep(0.05)\n"
    )
    tags = Tags("0a" * 8, "me", "nonce", int(clock.wall_s()) + 10)
    machine = provider.create(OFFER, tags, Start((sys.executable, "-c", stubborn, str(signs))))
    folder = box.home / "rented" / "machines" / machine.machine_id
    _wait_until((folder / "dead.json").exists)
    assert clock.wall_s() >= tags.not_after_s
    pids = {int(line) for line in signs.read_text().split("\n")[:-1]}
    assert len(pids) == 2 and not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    patience = Patience(60.0, clock.monotonic_s, clock.sleep_s)
    report = Reaper(provider, None, CloudConfig(), "me").reap(patience)
    # Machines of the tests before are on the same box, and may have come to their time as well.
    assert report.is_clean and machine.machine_id in [each.machine_id for each, _ in report.doomed]
    assert not folder.exists()


def _wait_until(is_so: Callable[[], bool], patience_s: float = 60.0) -> None:
    until_s = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < until_s, "it did not come to be"
        time.sleep(0.05)


GREETS = """echo '{"hotlap": "0", "python": "p", "boot": "b", "home": "h"}'; read order; """


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        ("echo No module named hotlap >&2; exit 1", NotCreated, "No module named hotlap"),
        ("echo welcome to the box", NotCreated, "must print nothing"),
        (GREETS + "exit 0", AmbiguousCreate, "was lost"),
        (GREETS + "echo torn", AmbiguousCreate, "was lost"),
        (GREETS + "kill -9 $PPID; kill -9 $$", AmbiguousCreate, "was lost"),
        (GREETS + """echo '{"error": "NotCreated", "message": "too late"}'""", NotCreated, "too late"),
    ],
)
def test_whether_the_order_was_sent_decides_between_no_and_perhaps(
    box: Box, tmp_path: Path, script: str, kind: type[ProviderFailed], words: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    provider = SshProvider(box.settings.model_copy(update={"python": str(python)}))
    with pytest.raises(kind, match=words) as raised:
        provider.create(OFFER, Tags("0b" * 8, "me", "n", int(clock.wall_s()) + 60), Start(("true",)))
    assert type(raised.value) is kind


def test_a_listing_waits_for_what_is_being_made(box: Box, tmp_path: Path) -> None:
    """A create that was cut off may go on there; a listing after it has it, or it does not come to be."""
    go = tmp_path / "go"
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import os, sys, time\nfrom hotlap.cloud import far, local\nmake = local.LocalProvider.create\n"
        f"def create(*args):\n    open({str(go) + '.began'!r}, 'w').close()\n"
        f"    while not os.path.exists({str(go)!r}): time.sleep(0.01)\n    return make(*args)\n"
        "local.LocalProvider.create = create\nfar.main(sys.argv[3:])\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {slow} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    slowly = SshProvider(box.settings.model_copy(update={"python": str(python)}))
    tags = Tags("0c" * 8, "me", "n", int(clock.wall_s()) + 60)
    maker = threading.Thread(target=slowly.create, args=(OFFER, tags, Start(("sleep", "60"))))
    maker.start()
    _wait_until(Path(f"{go}.began").exists)
    seen: list[bool] = []
    provider = SshProvider(box.settings)
    looker = threading.Thread(
        target=lambda: seen.append(any(m.name == tags.name for m in provider.machines().machines))
    )
    looker.start()
    looker.join(timeout=1.0)
    assert seen == []
    go.touch()
    looker.join(timeout=60.0)
    maker.join(timeout=60.0)
    assert seen == [True]


def test_files_go_to_the_box_and_come_back_whole(box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is pulled from it as from any volume; what was cut goes on."""
    there = BoxVolume(SshProvider(box.settings))
    (tmp_path / "adapter.bin").write_bytes(random.Random(5).randbytes(CHUNK_BYTES + 1000))
    whole = (tmp_path / "adapter.bin").read_bytes()
    (box.home / "runs" / "mine").mkdir(parents=True)
    sent_before = box.home / "runs" / "mine" / f".metrics.jsonl.{durable.sha256_bytes(whole)[:12]}.part"
    sent_before.write_bytes(whole[:5000])
    sent: list[bytes] = []
    ask = SshProvider.ask

    def counted(provider: SshProvider, what: str, order: Any, send: Iterable[bytes] = (), **more: Any) -> Any:
        return ask(provider, what, order, send=(sent.append(chunk) or chunk for chunk in send), **more)

    monkeypatch.setattr(SshProvider, "ask", counted)
    assert there.put(tmp_path / "adapter.bin", "runs/mine/metrics.jsonl")
    assert sum(map(len, sent)) == len(whole) - 5000 and not sent_before.exists()
    monkeypatch.undo()
    assert (box.home / "runs/mine/metrics.jsonl").read_bytes() == (tmp_path / "adapter.bin").read_bytes()
    digest = durable.sha256_file(tmp_path / "adapter.bin")
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    part = tmp_path / "runs" / "mine" / f".metrics.jsonl.{digest[:12]}.part"
    part.write_bytes((tmp_path / "adapter.bin").read_bytes()[:777])
    (found,) = pull(there, "mine", "runs", tmp_path / "runs", lambda _text: None)
    assert durable.sha256_file(found) == digest and not part.exists()
    assert not there.get("runs/mine/metrics.jsonl", found)
    with pytest.raises(ProviderFailed, match="leads out"):
        there.ls("../..")

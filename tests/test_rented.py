"""End to end in real time: the real boot, worker, launcher and reaper, on containers that run as processes here."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotlap import clock, runs
from hotlap.cloud import launcher, provider, runpod
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.proof import Patience
from hotlap.cloud.provider import Offer, Start, Tags, event_in
from hotlap.cloud.reaper import Reaper
from hotlap.cloud.runpod_shapes import boot_argv
from hotlap.config import CloudConfig, RunConfig
from hotlap.testing.containers import Birth, Job, Line, scripted
from hotlap.testing.fake_runpod import FakeRunpod

pytestmark = pytest.mark.long

QUICK = replace(runpod.TRAITS, poll_s=0.1, proof_gap_s=0.3, visibility_s=2.0)
OFFER = Offer("runpod", "NVIDIA L40S", None, 860_000, cloud="SECURE")
VOLUME = "/workspace"


class QuickRunpod(runpod.Runpod):
    """Asks more often than a real account would allow."""

    @property
    def traits(self) -> provider.Traits:
        return QUICK


class Ground:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cloud = FakeRunpod(folder=folder / "cloud", per_minute=100_000)
        self.client = QuickRunpod("full-key", self.cloud.url)
        self.settings = CloudConfig()
        self.ledger = Ledger(self.settings, f"sqlite:///{folder / 'ledger.sqlite'}")
        self.volume = folder / "cloud" / "volume"
        self.volume.mkdir(parents=True)
        self.events: list[dict[str, Any]] = []
        self.words: list[str] = []

    def start(self, job: tuple[str, ...], cap_s: float, **env: str) -> Start:
        more = {"HOTLAP_CAP_S": f"{cap_s:g}", "HOTLAP_VOLUME": VOLUME, "HOTLAP_LINGER_S": "0.2", **env}
        return Start(boot_argv(job), more, image="img")

    def launch(self, job: tuple[str, ...], cap_s: float, **env: str) -> launcher.LeaseEnd:
        world = launcher.World(on_event=self.events.append, say=self.words.append)
        lead = launcher.Launcher(self.client, self.ledger, self.settings, "me", launcher.Stops(), world)
        return lead.launch(launcher.Job("run", cap_s, self.start(job, cap_s, **env)), [OFFER])

    def create(self, job: tuple[str, ...], ttl_s: float, cap_s: float, **env: str) -> str:
        """A machine whose launcher is dead already."""
        tags = Tags("abcdabcdabcdabcd", "me", "n", int(self.client.machines().now_s + ttl_s))
        return self.client.create(OFFER, tags, self.start(job, cap_s, **env)).machine_id

    def log(self, machine_id: str) -> list[str]:
        self.cloud.settle()
        return [line.text for line in self.cloud.park.pods[machine_id].log]

    def wait_until(self, is_so: Callable[[], bool], patience_s: float = 60.0) -> None:
        until_s = time.monotonic() + patience_s
        while not is_so():
            assert time.monotonic() < until_s, [pod.log for pod in self.cloud.park.pods.values()]
            time.sleep(0.02)


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    ground = Ground(tmp_path)
    with ground.cloud:
        yield ground
    ground.client.close()
    ground.ledger.close()


@pytest.mark.torch
def test_a_real_slice_on_a_rented_machine(ground: Ground, make_config: Callable[..., RunConfig]) -> None:
    config = make_config(output_dir=Path(VOLUME) / "runs", train__max_steps=3)
    order = '{"cap_s": 60, "config": ' + config.model_dump_json() + "}"
    end = ground.launch(("python3", "-m", "hotlap.cloud.worker", order), 70.0, PATH=_path())
    assert end.end and end.end.result and end.end.result["exit_code"] == 0, (end, ground.words)
    assert any(event["event"] == "step" for event in ground.events)
    assert runs.is_finished(runs.RunFolder(ground.volume / "runs" / "tiny"))
    assert ground.cloud.alive() == []
    assert ground.cloud.usd_micros() <= end.lease.usd_micros < 100_000


def _path() -> str:
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def test_a_job_runs_once_though_its_container_is_killed_and_restarted(ground: Ground) -> None:
    machine_id = ground.create(("sh", "-c", f"echo x >> {VOLUME}/count; sleep 30"), ttl_s=60.0, cap_s=50.0)
    count = ground.volume / "count"
    pod = ground.cloud.park.pods[machine_id]
    ground.wait_until(count.exists)
    for number in (1, 2):
        assert pod.container
        pod.container.signal(signal.SIGKILL)
        ground.wait_until(lambda n=number: sum('"refused"' in line for line in ground.log(machine_id)) == n)
    boots = {
        event["boot_id"] for line in ground.log(machine_id) if (event := event_in(line)) if event["event"] == "boot"
    }
    assert len(boots) == 3 and count.read_text() == "x\n"


def test_without_any_launcher_the_machine_ends_itself(ground: Ground) -> None:
    machine_id = ground.create(("sleep", "30"), ttl_s=60.0, cap_s=0.5, HOTLAP_GRACE_S="0.1")
    ground.wait_until(lambda: ground.cloud.alive() == [])
    assert any('"overran"' in line for line in ground.log(machine_id))
    (delete,) = ground.cloud.calls("DELETE /v2/pods/{id}")
    assert delete.ident == machine_id and delete.status == 204


def test_two_emulators_of_one_seed_leave_each_other_s_machines_alone(tmp_path: Path) -> None:
    """They name their machines alike, and a machine's end looks for all of its processes on this computer."""
    one, other = Ground(tmp_path / "one"), Ground(tmp_path / "other")
    with one.cloud, other.cloud:
        ids = [ground.create(("sleep", "30"), ttl_s=60.0, cap_s=50.0) for ground in (one, other)]
        assert ids[0] == ids[1]
        for ground in (one, other):
            ground.wait_until(lambda g=ground: any('"boot"' in line for line in g.log(ids[0])))
        kept = other.cloud.park.pods[ids[1]].container
        assert kept is not None and kept.pid is not None
        one.client.terminate(ids[0])
        one.wait_until(lambda: one.cloud.alive() == [])
        os.kill(kept.pid, 0)
        assert len(other.cloud.alive()) == 1 and not any('"refused"' in line for line in other.log(ids[1]))
    for ground in (one, other):
        ground.client.close()
        ground.ledger.close()


RECEIPT = "receipts/abcdabcdabcdabcd.json"


@pytest.mark.parametrize(
    ("damaged", "code"), [("ledger.sqlite", 4), ("machines/local-0/guardian.json", 5), (RECEIPT, 0)]
)
def test_damage_at_home_spares_no_rented_machine(ground: Ground, damaged: str, code: int, home: Path) -> None:
    ground.cloud.account.pod_key_allows = "nothing"
    ground.create(("sleep", "30"), ttl_s=4.0, cap_s=0.5)  # a busy machine must have made it before that is over
    path = home / damaged
    path.parent.mkdir(parents=True)
    path.write_bytes(b"{ no file of ours " * 100)
    (home / "cloud.toml").write_text('[reaper]\nowner = "me"\n')
    env = {**os.environ, "RUNPOD_API_KEY": "full-key", "HOTLAP_RUNPOD_URL": ground.cloud.url}
    time.sleep(5.2)  # the provider tells its time in whole seconds
    assert ground.cloud.alive()
    done = subprocess.run([sys.executable, "-m", "hotlap", "reap"], env=env, capture_output=True, text=True)
    assert ground.cloud.alive() == [] and done.returncode == code, done.stderr


def test_what_cannot_end_itself_is_reaped_after_its_time(ground: Ground) -> None:
    """Its key may not delete it; its job ignores signals and leaves its session. One pass of the reaper ends it."""
    ground.cloud.account.pod_key_allows = "nothing"
    hide = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code = hide + f"open('{VOLUME}/pid', 'w').write(str(os.getpid())); time.sleep(60)"
    job = ("sh", "-c", f"trap '' TERM; setsid python3 -c \"$CODE\" & sleep 60; echo {VOLUME}")
    machine_id = ground.create(job, ttl_s=15.0, cap_s=50.0, CODE=code)
    ground.wait_until((ground.volume / "pid").exists)
    time.sleep(0.1)
    escaped = int((ground.volume / "pid").read_text())
    assert ground.cloud.alive()
    reaper = Reaper(ground.client, ground.ledger, ground.settings, "me")
    patience = Patience(10.0, clock.monotonic_s, clock.sleep_s)
    assert reaper.reap(patience).doomed == []
    ground.wait_until(lambda: bool(reaper.reap(patience).doomed))
    assert ground.cloud.alive() == [] and ground.client.machines().find(machine_id) is None
    with pytest.raises(ProcessLookupError):
        os.kill(escaped, 0)


def test_a_restart_loop_is_seen_and_ended(ground: Ground) -> None:
    """The command dies with its container, over and over; the launcher does not wait for the cap."""
    suicide = "kill -9 $PPID; sleep 1"
    end = ground.launch(("sh", "-c", suicide), 60.0, HOTLAP_VOLUME="")
    assert end.end and end.end.kind == "restarted"
    assert ground.cloud.alive() == [] and end.lease.state == "settled"


def test_the_scripted_boot_says_what_the_real_one_says(ground: Ground) -> None:
    """Fake time is only as good as the script that stands in for boot."""
    machine_id = ground.create(("true",), ttl_s=60.0, cap_s=50.0)
    ground.wait_until(lambda: ground.cloud.alive() == [])
    env = {"HOTLAP_NOT_AFTER": "9999999999", "HOTLAP_CAP_S": "50", "HOTLAP_NONCE": "n"}
    container = scripted(Job(seconds=0.0))(Birth("p", 1, 0.0, env, ()))
    ours = [happening.text for happening in container.until(60.0) if isinstance(happening, Line)]
    real, script = ([event for text in texts if (event := event_in(text))] for texts in (ground.log(machine_id), ours))
    assert [event["event"] for event in script] == [event["event"] for event in real] == ["boot", "result"]
    assert all(set(script_event) <= set(event) for script_event, event in zip(script, real, strict=True))


def test_it_serves_by_itself() -> None:
    argv = [sys.executable, "-m", "hotlap.testing.fake_runpod", "--port", "0"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    line = process.stdout.readline()
    client = runpod.from_environment(dict(word.split("=", 1) for word in line.split()))
    assert client.machines().machines == ()
    client.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 0
    process.stdout.close()

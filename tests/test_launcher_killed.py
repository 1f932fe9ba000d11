"""P3 with real processes: SIGKILL at every crash point, then one reaper from cron, and nothing is left or owed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dying_launcher import POINTS
from stage import CREATE, REAPER_PERIOD_S, Stage

from hotlap.cloud import receipts
from hotlap.testing.containers import Job
from hotlap.testing.faults import Active
from hotlap.testing.routes import Request

pytestmark = pytest.mark.long

TTL_S = 310
ROOT = Path(__file__).parent
IN_POST = ("in the create, before it is done", "in the create, after it is done")


def die(*orders: tuple[str, Path, str]) -> list[int]:
    """Exit codes of launchers that ran in turn."""
    rows = json.dumps([[url, str(home), point] for url, home, point in orders])
    argv = [sys.executable, str(ROOT / "dying_launcher.py"), rows]
    process = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=120, check=True)
    return [int(line) for line in process.stdout.split()]


def judge(stage: Stage, home: Path) -> None:
    os.environ["HOTLAP_HOME"] = str(home)
    stage.reap_until(max(stage.age_s(), TTL_S) + REAPER_PERIOD_S + 60.0)
    stage.require_sound()
    bound_s = TTL_S + REAPER_PERIOD_S + 60.0
    assert all(stage.cloud.meter.seconds(stage.clock.now_s(), pod.pod_id) <= bound_s for pod in stage.made())
    stage.reap_until(stage.age_s() + 3600.0 + REAPER_PERIOD_S)
    assert all(not lease.is_open for lease in stage.leases())
    stage.require_sound()
    for lease in stage.leases():
        settlement = receipts.open_receipt(lease.lease_id).facts["settlement"]
        assert (settlement["state"], settlement["usd_micros"]) == (lease.state, lease.usd_micros)


def test_killed_at_every_point(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: dict[str, tuple[Stage, Path]] = {}
    for point in POINTS:
        place = home / point.replace(" ", "-")
        place.mkdir(parents=True)
        stage = Stage(place, job=Job(seconds=60.0 if "settle" in point or "last" in point else 1e9))
        stage.cloud.account.pod_key_allows = "nothing"
        stages[point] = (stage.__enter__(), place)
    monkeypatch.setenv("HOTLAP_HOME", str(home))
    try:
        codes = die(*((stage.cloud.url, place, point) for point, (stage, place) in stages.items()))
        assert dict(zip(stages, codes, strict=True)) == dict.fromkeys(POINTS, -signal.SIGKILL)
        for stage, place in stages.values():
            judge(stage, place)
    finally:
        for stage, _ in stages.values():
            stage.__exit__(None, None, None)


@pytest.mark.parametrize("point", IN_POST)
def test_killed_in_the_create(point: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir()
    with Stage(home, job=Job(seconds=1e9)) as stage:
        stage.cloud.account.pod_key_allows = "nothing"
        take = stage.cloud.take

        def fatal(request: Request) -> Any:
            is_create = f"{request.method} {request.path}" == CREATE
            answer = None if is_create and point == IN_POST[0] else take(request)
            if is_create:
                os.kill(int(request.headers["x-pid"]), signal.SIGKILL)
            return answer or (None, Active(()))

        monkeypatch.setattr(stage.cloud, "take", fatal)
        assert die((stage.cloud.url, home, "elsewhere")) == [-signal.SIGKILL]
        assert len(stage.made()) == (point == IN_POST[1])
        judge(stage, home)

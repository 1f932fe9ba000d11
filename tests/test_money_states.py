"""P1 to P6 as one state machine: launchers that die, reapers, foreign machines and a lying provider, in any order.

P7, the quota, is held in `test_scenarios.py`: here rules follow each other faster than any launcher would.
"""

import os
import threading
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from schedules import OFFERS
from stage import CREATE, DELETE, REAPER_PERIOD_S, Killed, Life, Stage

from hotlap.errors import HotlapError
from hotlap.testing.containers import Job
from hotlap.testing.faults import Fault

pytestmark = pytest.mark.long

PLANTED = "planted-secret-value"
PASSING: list[tuple[Any, str, float]] = [
    ("status", "*", 503),
    ("drop_before", "*", 0),
    ("html", "GET /v2/pods", 502),
    ("no_effect", DELETE, 0),
    ("not_found", DELETE, 0),
    ("unknown_status", "*", 0),
    ("zero_cost", "*", 0),
    ("hides_env", "GET /v2/pods", 0),
]
CREATES: list[Fault] = [
    Fault("drop_after", CREATE),
    Fault("status_after", CREATE, value=500),
    Fault("truncate", CREATE),
    Fault("visible_late", CREATE, value=50.0),
    Fault("stuck_starting", CREATE),
    Fault("restarts", CREATE, value=20.0),
    Fault("goes_error", CREATE, value=60.0),
    Fault("capacity", CREATE),
]


class Money(RuleBasedStateMachine):
    """Every rule may be followed by any other; after the last, time passes and a reaper runs from cron."""

    @initialize(seed=st.integers(0, 2**20), seconds=st.sampled_from([5.0, 60.0, 1e9]), allows=st.booleans())
    def begin(self, seed: int, seconds: float, allows: bool) -> None:
        self.folder = TemporaryDirectory()
        self.before = dict(os.environ)
        os.environ |= {"HOTLAP_HOME": self.folder.name, "RUNPOD_API_KEY": PLANTED, "HF_TOKEN": PLANTED}
        job = Job(seconds=seconds)
        self.stage = Stage(Path(self.folder.name), job=job, seed=seed, per_minute=10_000).__enter__()
        self.pod_key = "terminate" if allows else "nothing"
        self.stage.cloud.account.pod_key_allows = self.pod_key
        self.foreign: list[str] = []
        self.num_runs = 0

    @rule(
        dies=st.sampled_from(["", "ledger.hold", "provider.create", "ledger.note_machine", "provider.logs"]),
        nth=st.integers(1, 4),
        at_s=st.one_of(st.none(), st.floats(0.0, 200.0)),
        fault=st.one_of(st.none(), st.sampled_from(CREATES)),
    )
    def launch(self, dies: str, nth: int, at_s: float | None, fault: Fault | None) -> None:
        self.stage.cloud.script.faults[:] = [each for each in self.stage.cloud.script.faults if each.route != CREATE]
        if fault:
            self.stage.cloud.add(fault)
        life = Life(dies, nth, float("inf") if at_s is None else self.stage.age_s() + at_s)
        try:
            self.stage.launch(OFFERS, life=life)
        except (Killed, HotlapError):
            return

    @rule(index=st.integers(0, len(PASSING) - 1), seconds=st.floats(5.0, 200.0))
    def something_goes_wrong(self, index: int, seconds: float) -> None:
        kind, route, value = PASSING[index]
        from_s = self.stage.age_s()
        self.stage.cloud.add(Fault(kind, route, from_s=from_s, until_s=from_s + seconds, value=value))

    @rule(seconds=st.floats(1.0, 400.0))
    def time_passes(self, seconds: float) -> None:
        self.stage.sleep_s(seconds)

    @rule()
    def reap(self) -> None:
        self.stage.reap()

    @rule()
    def two_reap_at_once(self) -> None:
        threads = [threading.Thread(target=self.stage.reap) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @rule(has_name=st.booleans())
    def somebody_else_rents(self, has_name: bool) -> None:
        name = f"hotlap-notours{len(self.foreign)}" if has_name else f"theirs-{len(self.foreign)}"
        env = {} if has_name else {"HOTLAP_LEASE": "x", "HOTLAP_OWNER": "me", "HOTLAP_NOT_AFTER": "1"}
        self.foreign.append(self.stage.plant(name, env).pod_id)
        self.stage.cloud.account.pod_key_allows = self.pod_key

    @invariant()
    def nothing_is_sent_twice(self) -> None:
        if hasattr(self, "stage"):
            assert max(Counter(self.stage.posts()).values(), default=0) <= 1

    @invariant()
    def foreign_machines_live(self) -> None:
        if hasattr(self, "stage"):
            killed = {call.ident for call in self.stage.cloud.calls(DELETE)}
            assert not killed & set(self.foreign)

    def teardown(self) -> None:
        if not hasattr(self, "stage"):
            return
        try:
            self._end()
        finally:
            self.stage.__exit__(None, None, None)
            os.environ.clear()
            os.environ.update(self.before)
            self.folder.cleanup()

    def _end(self) -> None:
        stage = self.stage
        quiet_s = max([0.0, *(each.until_s for each in stage.cloud.script.faults if each.until_s < 1e9)])
        deadline_s = max((lease.not_after_s - stage.began_s for lease in stage.leases()), default=0.0)
        bound_s = max(stage.age_s(), quiet_s, deadline_s)
        stage.reap_until(bound_s + REAPER_PERIOD_S + 60.0)
        ours = {pod.pod_id for pod in stage.made()}
        assert not ours & {pod.pod_id for pod in stage.cloud.alive()}
        assert stage.breaches + stage.overspent() + stage.double_creates() == []
        stage.reap_until(stage.age_s() + 3600.0 + REAPER_PERIOD_S)
        assert all(not lease.is_open for lease in stage.leases())
        kept = [path.read_bytes() for path in Path(self.folder.name).rglob("*") if path.is_file()]
        assert not any(PLANTED.encode() in data or b"full-key" in data for data in kept)
        assert PLANTED not in repr([pod.body for pod in stage.made()]) + repr(stage.words)


Money.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestMoney = Money.TestCase

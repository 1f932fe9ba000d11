"""P1 to P7 as a state machine: whatever launches, crashes, faults, strangers and sweeps follow one another."""

import contextlib
import json
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stage import CREATE, DELETE, LIST, LOGS, PROOF_S, REAPER_PERIOD_S, Killed, Life, Stage

from hotlap.config_cloud import BudgetConfig, CloudConfig, LimitsConfig
from hotlap.errors import HotlapError
from hotlap.testing.containers import Job
from hotlap.testing.faults import Fault
from hotlap.testing.machines import Pod

pytestmark = pytest.mark.long

SECRET = "full-key"
RICH = CloudConfig(
    limits=LimitsConfig(max_live_machines=8),
    budget=BudgetConfig(gpu_minutes_per_day=600, usd_per_day=60, gpu_minutes_per_run=600, usd_per_run=60),
)
ONCE = [
    Fault("drop_after", CREATE),
    Fault("drop_before", CREATE),
    Fault("truncate", CREATE),
    Fault("status_after", CREATE, value=500),
    Fault("commit_late", CREATE, value=90.0),
    Fault("visible_late", CREATE, value=45.0),
    Fault("capacity", CREATE),
    Fault("status", CREATE, value=402),
    Fault("price", CREATE, value=2.0),
    Fault("stuck_starting", CREATE),
    Fault("restarts", CREATE),
    Fault("no_effect", DELETE),
    Fault("status", DELETE, value=500),
    Fault("status", LIST, value=502),
    Fault("omit", LIST),
    Fault("cut", LOGS),
]
CALLS = (
    *("ledger.hold", "provider.machines", "provider.create", "ledger.note_machine", "provider.logs"),
    *("provider.terminate", "ledger.settle"),
)


class Money(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**20), seconds=st.sampled_from([5.0, 60.0, 1e9]))
    def open(self, seed: int, seconds: float) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="hotlap-money-"))
        self.before = os.environ.get("HOTLAP_HOME")
        os.environ["HOTLAP_HOME"] = str(self.home)
        self.stage = Stage(self.home, job=Job(seconds=seconds), settings=RICH, seed=seed).__enter__()
        self.strangers: list[Pod] = []
        self.num_runs = 0

    @rule(
        call=st.sampled_from(["", *CALLS]),
        nth=st.integers(1, 4),
        faults=st.lists(st.sampled_from(ONCE), max_size=2),
        is_same_run=st.booleans(),
    )
    def launch(self, call: str, nth: int, faults: list[Fault], is_same_run: bool) -> None:
        """A launcher that may meet faults, and may be killed right after any of its calls."""
        age_s = self.stage.age_s()
        for fault in faults:
            self.stage.cloud.add(Fault(fault.kind, fault.route, (), age_s, age_s + 40.0, 1.0, fault.value))
        self.num_runs += not is_same_run
        with contextlib.suppress(Killed, HotlapError):
            self.stage.launch(run=f"run-{self.num_runs}", cap_s=60.0, life=Life(call, nth))

    @rule(seconds=st.sampled_from([1.0, 30.0, 200.0, 400.0]))
    def wait(self, seconds: float) -> None:
        """A reaper comes from cron meanwhile, as the bound demands."""
        self.stage.reap_until(self.stage.age_s() + seconds)

    @rule(is_named=st.booleans())
    def a_stranger_rents(self, is_named: bool) -> None:
        if len(self.strangers) < 4:
            name = "hotlap-not-ours" if is_named else "web"
            self.strangers.append(self.stage.plant(f"{name}-{len(self.strangers)}", {}))

    @rule()
    def reap_twice(self) -> None:
        """P5: the second pass finds nothing that the first one proved."""
        first = self.stage.reap()
        second = self.stage.reap()
        if first.is_clean and second.is_clean:
            dead = {machine.machine_id for machine, _ in first.doomed}
            assert not dead & {machine.machine_id for machine, _ in second.doomed}

    @invariant()
    def money_is_ahead_of_the_meter(self) -> None:
        """P1 at every moment that was looked at, P2, P4."""
        if not hasattr(self, "stage"):
            return
        charges = {
            f"hotlap-{lease.lease_id}": lease.usd_micros
            + self.stage.ledger.overrun_of(lease, self.stage.clock.now_s()).usd_micros
            for lease in self.stage.ledger.leases_since("0")
        }
        self.stage.cloud.settle()
        cost: Counter[str] = Counter()
        for pod in self.stage.made():
            cost[pod.name] += self.stage.cloud.meter.usd_micros(self.stage.clock.now_s(), pod.pod_id)
        assert {name: micros for name, micros in cost.items() if micros > charges.get(name, 0)} == {}
        assert self.stage.double_creates() == []
        alive = {pod.pod_id for pod in self.stage.cloud.alive()}
        assert {pod.pod_id for pod in self.strangers} <= alive

    def teardown(self) -> None:
        """P3: a deadline and a reaper period later nothing of ours lives. P6: the key is nowhere. P7: the rate held."""
        if not hasattr(self, "stage"):
            return
        try:
            self.stage.reap_until(self.stage.age_s() + 270.0 + 120.0 + REAPER_PERIOD_S + PROOF_S)
            strangers = {pod.pod_id for pod in self.strangers}
            assert {pod.pod_id for pod in self.stage.cloud.alive()} == strangers
            self.money_is_ahead_of_the_meter()
            self.stage.reap_until(self.stage.age_s() + 3600.0 + REAPER_PERIOD_S)
            assert self.stage.ledger.open_leases() == []
            kept = [path for path in self.home.rglob("*") if path.is_file()]
            assert not [path for path in kept if SECRET.encode() in path.read_bytes()]
            assert SECRET not in json.dumps(self.stage.words)
            assert not [call for call in self.stage.cloud.requests if call.status == 429]
        finally:
            self.stage.__exit__(None, None, None)
            shutil.rmtree(self.home)
            if self.before is not None:
                os.environ["HOTLAP_HOME"] = self.before


Money.TestCase.settings = settings(
    max_examples=12,
    stateful_step_count=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestMoney = Money.TestCase

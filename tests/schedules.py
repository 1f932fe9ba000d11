"""Seeded fault schedules: what a provider does wrong, when the launcher dies, and whether everything ended well."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stage import CREATE, DELETE, LOGS, REAPER_PERIOD_S, Killed, Life, Stage

from hotlap.errors import HotlapError
from hotlap.testing.containers import Job
from hotlap.testing.faults import Fault

PROOF_S = 60.0
LATE_S = 3600.0
GET_LIST = "GET /v2/pods"
CALLS = (
    *("ledger.hold", "provider.create", "ledger.note_machine", "provider.logs", "provider.machines"),
    *("provider.terminate", "ledger.settle"),
)


@dataclass(frozen=True)
class Schedule:
    seed: int
    faults: tuple[Fault, ...]
    job: Job
    life: Life
    allows: str
    profile: str
    skew_s: float

    @property
    def quiet_s(self) -> float:
        """From when on the provider behaves."""
        ends = [fault.until_s for fault in self.faults if fault.until_s < float("inf")]
        late = [fault.value for fault in self.faults if fault.kind in ("commit_late", "visible_late")]
        return max([0.0, *ends, *late])


def draw(seed: int) -> Schedule:
    chance = random.Random(seed)
    made = _create_fault(chance)
    faults = [*([made] if made else []), *_passing_faults(chance)]
    is_late = made is not None and made.kind == "commit_late"
    return Schedule(
        seed=seed,
        faults=tuple(faults),
        job=Job(
            seconds=chance.choice([5.0, 60.0, 1e9]),
            exit_code=chance.choice([0, 0, 75, 6]),
            freezes_after_s=chance.choice([None, None, None, chance.uniform(0.0, 120.0)]),
            skew_s=chance.choice([0.0, 0.0, 600.0, -600.0]),
        ),
        life=_life(chance),
        # A machine that comes after its launcher gave up, and goes by itself before a reaper looks, is in no book.
        allows="nothing" if is_late else chance.choice(["terminate", "stop", "nothing"]),
        profile=chance.choice(["2026-08", "2026-10"]),
        skew_s=chance.choice([0.0, 600.0, -600.0]),
    )


def _create_fault(chance: random.Random) -> Fault | None:
    span = chance.uniform
    menu: list[Fault | None] = [
        *[None] * 8,
        Fault("drop_after", CREATE),
        Fault("drop_before", CREATE),
        Fault("status", CREATE, value=chance.choice([400, 402, 409, 422, 500])),
        Fault("status", CREATE, calls=(1,), value=429, retry_after_s=span(1.0, 60.0)),
        Fault("status_after", CREATE, value=500),
        Fault("html", CREATE, value=502),
        Fault("html_after", CREATE, value=504),
        Fault("truncate", CREATE),
        Fault("capacity", CREATE, calls=(1,)),
        Fault("commit_late", CREATE, value=span(5.0, 2000.0)),
        Fault("visible_late", CREATE, value=span(5.0, 100.0)),
        Fault("stuck_provisioning", CREATE),
        Fault("stuck_starting", CREATE),
        Fault("null_runtime", CREATE),
        Fault("goes_error", CREATE, value=span(1.0, 200.0)),
        Fault("goes_exited", CREATE, value=span(1.0, 200.0)),
        Fault("vanishes", CREATE, value=span(1.0, 200.0)),
        Fault("restarts", CREATE, value=span(0.0, 100.0)),
        Fault("price", CREATE, value=chance.choice([0.5, 1.04, 2.0])),
        Fault("locked", CREATE),
    ]
    return chance.choice(menu)


def _passing_faults(chance: random.Random) -> list[Fault]:
    def window(longest_s: float, kind: Any, route: str = "*", **more: Any) -> Fault:
        from_s = chance.uniform(5.0, 350.0)
        return Fault(kind, route, from_s=from_s, until_s=from_s + chance.uniform(5.0, longest_s), **more)

    menu = [
        window(240.0, "status", value=503),
        window(240.0, "html", value=502),
        window(240.0, "drop_before"),
        window(120.0, "drop_after", probability=0.3),
        window(120.0, "truncate", GET_LIST),
        window(120.0, "status", value=429, retry_after_s=chance.uniform(1.0, 40.0), probability=0.5),
        window(120.0, "status", value=chance.choice([401, 403])),
        window(60.0, "misses_pages", GET_LIST),
        window(120.0, "unknown_status"),
        window(300.0, "zero_cost"),
        window(300.0, "null_cost"),
        window(120.0, "hides_env", GET_LIST),
        window(300.0, "cut", LOGS),
        window(300.0, "duplicates", LOGS),
        window(300.0, "uptime_backwards"),
        # Two lies at once, gone from the list and not deleted, are no proof but look like one: one of them only.
        chance.choice(
            [
                window(60.0, "omit", GET_LIST),
                window(300.0, "no_effect", DELETE),
                window(60.0, "not_found", DELETE),
            ]
        ),
    ]
    return chance.sample(menu, chance.choice([0, 1, 2, 3]))


def _life(chance: random.Random) -> Life:
    how = chance.random()
    if how < 0.4:
        return Life()
    if how < 0.7:
        return Life(at_s=chance.uniform(0.0, 400.0))
    return Life(chance.choice(CALLS), chance.choice([1, 1, 2, 5]))


@dataclass
class Outcome:
    """`wrong` is what must not be; the rest is for the statistics."""

    schedule: Schedule
    ending: str = ""
    wrong: list[str] = field(default_factory=list[str])
    cost_usd_micros: int = 0
    charged_usd_micros: int = 0
    num_requests: int = 0


def play(schedule: Schedule, home: Path) -> Outcome:
    """Run one schedule to its end, with a reaper from cron, and judge it."""
    outcome = Outcome(schedule)
    with Stage(
        home,
        *schedule.faults,
        job=schedule.job,
        seed=schedule.seed,
        skew_s=schedule.skew_s,
        profile=schedule.profile,
    ) as stage:
        stage.cloud.account.pod_key_allows = schedule.allows
        try:
            end = stage.launch(offers=OFFERS, life=schedule.life)
            outcome.ending = end.end.kind if end.end else "stopped"
        except Killed:
            outcome.ending = "killed"
        except HotlapError as error:
            outcome.ending = type(error).__name__
        _judge(stage, outcome)
        outcome.num_requests = len(stage.cloud.requests)
    return outcome


def _judge(stage: Stage, outcome: Outcome) -> None:
    deadline_s = max((lease.not_after_s - stage.began_s for lease in stage.leases()), default=0.0)
    bound_s = max(deadline_s, outcome.schedule.quiet_s, stage.age_s()) + REAPER_PERIOD_S + PROOF_S
    stage.reap_until(bound_s)
    outcome.wrong += [f"{pod_id} is alive at {stage.age_s():.0f} s" for pod_id in stage.alive()]
    stage.reap_until(bound_s + LATE_S + REAPER_PERIOD_S)
    outcome.wrong += [f"{lease.lease_id} is {lease.state} for ever" for lease in stage.leases() if lease.is_open]
    # A price beyond the tolerance is in the book only once somebody who lived saw it; then the overrun is debt.
    is_dear = any(fault.kind == "price" and fault.value > 1.05 for fault in outcome.schedule.faults)
    outcome.wrong += stage.double_creates() + ([] if is_dear else stage.breaches[:3]) + stage.overspent()
    outcome.cost_usd_micros, outcome.charged_usd_micros = stage.cloud.usd_micros(), stage.charged()


def _offers() -> list[Any]:
    from hotlap.cloud.provider import Offer

    return [Offer("runpod", "NVIDIA L40S", None, 860_000, cloud="SECURE")]


OFFERS = _offers()

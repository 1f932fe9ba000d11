"""Leases, what they are charged, and whether another one fits: decisions about money, without a database."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal

from hotlap import clock
from hotlap.cloud.money import Amount, Rate, worst_rate
from hotlap.cloud.provider import Listing, Machine
from hotlap.config import CloudConfig, hotlap_home
from hotlap.errors import BudgetRefused, RunLocked, Survivors

LeaseState = Literal["held", "unresolved", "settled", "released"]
OPEN = ("held", "unresolved")
"""`unresolved`: the create was ambiguous and nothing was found yet. Both stay charged."""


@dataclass(frozen=True)
class Lease:
    """The right to one machine until a time, and what it is charged. While open, that is its worst case."""

    lease_id: str
    run: str
    owner: str
    provider: str
    gpu: str
    nonce: str
    usd_micros_per_hour: int
    num_gpus: int
    billing_unit_s: int
    began_s: float
    not_after_s: int
    gpu_s: int
    usd_micros: int
    day: str = ""
    state: LeaseState = "held"
    machine_id: str | None = None
    ended_s: float | None = None
    outcome: str | None = None
    note: str | None = None
    settings: str | None = None
    """Digest of what the run's name stood for. None: a job that has none, or a lease of an older hotlap."""

    @property
    def is_open(self) -> bool:
        return self.state in OPEN

    @property
    def amount(self) -> Amount:
        return Amount(self.gpu_s, self.usd_micros)

    @property
    def rate(self) -> Rate:
        return Rate(self.usd_micros_per_hour, self.num_gpus, self.billing_unit_s)

    def charge_at(self, now_s: float, overdue_s: float) -> Amount:
        """What it stands for at a moment. An open lease past its TTL may cost more than was held, until the reaper
        ends its machine: at most `overdue_s` later."""
        if not self.is_open:
            return self.amount
        until_s = min(now_s, self.not_after_s + overdue_s)
        return self.amount + worst_rate(self.rate).cost(until_s - self.began_s).beyond(self.amount)


@dataclass(frozen=True)
class Sum:
    """What a day or a run was charged, worst cases of open leases included. `debt` of it overran its hold."""

    name: str
    charged: Amount
    debt: Amount


def require_room(lease: Lease, today: Amount, of_run: Amount, open_leases: list[Lease], settings: CloudConfig) -> None:
    """
    Raises:
        BudgetRefused, RunLocked: why this lease may not be, what is left, and when or how that changes.
    """
    for other in open_leases:
        if other.run == lease.run and other.state == "held":
            raise RunLocked(
                f"{lease.run} has a machine that may be alive ({other.machine_id or 'being made'} of {other.provider}, "
                f"lease {other.lease_id}, at most until {clock.utc_text(other.not_after_s)}). "
                f"Run: hotlap stop {lease.run}, or wait until then and run: hotlap reap."
            )
    limit = settings.limits.max_live_machines
    if len(open_leases) >= limit:
        raise BudgetRefused(
            f"{len(open_leases)} machines may be alive, and {limit} is the limit. hotlap machines shows them; wait for "
            f"one to end, or edit limits.max_live_machines in {hotlap_home() / 'cloud.toml'}."
        )
    budget = settings.budget
    of_day = Amount(budget.gpu_s_per_day, budget.usd_micros_per_day)
    _require_left(lease, "Today", of_day, today, "_per_day")
    _require_left(lease, lease.run, Amount(budget.gpu_s_per_run, budget.usd_micros_per_run), of_run, "_per_run")


def _require_left(lease: Lease, whose: str, limit: Amount, used: Amount, keys: str) -> None:
    left = limit.beyond(used)
    if lease.amount.beyond(left) == Amount():
        return
    is_day = keys == "_per_day"
    hint = f"It resets at {clock.utc_text(next_day_s(lease.began_s))}" if is_day else "It does not reset"
    raise BudgetRefused(
        f"The worst case of this machine is {lease.amount.text()}. {whose} has {left.text()} left of {limit.text()}. "
        f"{hint}; to raise it, edit budget.gpu_minutes{keys} or budget.usd{keys} in {hotlap_home() / 'cloud.toml'}."
    )


def require_few(listing: Listing, owner: str, settings: CloudConfig) -> None:
    """
    Raises:
        BudgetRefused: the provider lists as many machines of this owner as may live, whatever the ledger says.
    """
    alive = _alive(listing, owner)
    if len(alive) >= settings.limits.max_live_machines:
        raise BudgetRefused(
            f"{len(alive)} machines of {owner} are alive ({', '.join(each.machine_id for each in alive)}), and "
            f"{settings.limits.max_live_machines} is the limit. Run: hotlap reap, or edit limits.max_live_machines in "
            f"cloud.toml."
        )


def require_none_overdue(listing: Listing, owner: str, settings: CloudConfig) -> None:
    """
    Raises:
        Survivors: a machine of this owner is alive that a reaper should have ended, so there seems to be none.
    """
    latest_s = listing.now_s - overdue_s(settings)
    overdue = {
        each.machine_id: each.not_after_s
        for each in _alive(listing, owner)
        if each.ended_at_s is None and each.not_after_s is not None and each.not_after_s < latest_s
    }
    if overdue:
        raise Survivors(
            f"{', '.join(overdue)} should be dead since {clock.utc_text(min(overdue.values()))}, and nobody ended it. "
            f"Nothing more is rented until it is: run hotlap reap, and hotlap reap --install-cron."
        )


def _alive(listing: Listing, owner: str) -> list[Machine]:
    return [each for each in listing.machines if each.is_ours and each.owner == owner and each.state != "terminated"]


def overdue_s(settings: CloudConfig) -> float:
    """How much longer than its TTL a machine may live if its launcher died: until the reaper comes and has proof."""
    return settings.reaper.period_minutes * 60.0 + LONGEST_PROOF_S


LONGEST_PROOF_S = 60.0


def day_of(at_s: float) -> str:
    """The UTC day of a moment."""
    return clock.utc_text(at_s)[:10]


def next_day_s(at_s: float) -> float:
    day = datetime.fromtimestamp(at_s, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return (day + timedelta(days=1)).timestamp()


def forecast(days: Iterable[Sum], settings: CloudConfig, today: str) -> dict[str, Any]:
    """What going on as since the first of these days costs: the mean day, those without spending included, and what a
    month of them would be."""
    spent = {day.name: day.charged.usd_micros for day in days}
    num_days = (date.fromisoformat(today) - date.fromisoformat(min(spent, default=today))).days + 1
    mean = -(-sum(spent.values()) // max(1, num_days))
    most = settings.budget.usd_micros_per_day
    return {
        "usd_micros_per_day": mean,
        "usd_micros_per_30_days": 30 * mean,
        "at_most_usd_micros_per_30_days": 30 * most,
    }

"""End a machine and prove it: terminate until accepted, then look until it is gone from full listings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hotlap.cloud.lease import Lease, overdue_s
from hotlap.cloud.money import worst_rate
from hotlap.cloud.provider import Listing, Machine, Provider, Traits
from hotlap.config import CloudConfig
from hotlap.errors import ProviderFailed, RateLimited

_BACK_OFF_S = (1.0, 2.0, 4.0, 8.0, 15.0)


@dataclass(frozen=True)
class Evidence:
    """What speaks for a machine's death; moments are the provider's."""

    accepted_at_s: float | None = None
    absent_at_s: tuple[float, ...] = ()
    """Full listings without it, since it was last seen."""

    was_listed: bool = False

    def as_json(self) -> dict[str, Any]:
        return {"accepted_at_s": self.accepted_at_s, "absent_at_s": list(self.absent_at_s)}


def look(evidence: Evidence, listing: Listing, machine_id: str, traits: Traits) -> Evidence:
    """Take a full listing in."""
    machine = listing.find(machine_id)
    if machine is not None and machine.state != "terminated":
        return replace(evidence, absent_at_s=(), was_listed=True)
    times = evidence.absent_at_s
    if times and listing.now_s - times[-1] < traits.proof_gap_s:
        return evidence
    return replace(evidence, absent_at_s=(*times, listing.now_s))


def is_proven(evidence: Evidence, traits: Traits, created_at_s: float) -> bool:
    """Whether the machine is dead. One that nobody ever saw may still appear, so its absence is not believed early."""
    times = evidence.absent_at_s
    if evidence.accepted_at_s is None and not evidence.was_listed:
        times = tuple(at_s for at_s in times if at_s >= created_at_s + traits.visibility_s)
    return len(times) >= traits.proof_listings


CLOCK_STEP_S = 1.0
"""A provider may tell its time in whole seconds, so a moment it names may lie so much later."""


def ended_s(dead: Mapping[str, Evidence], listed: Sequence[Machine] = ()) -> float:
    """By when all of them had ended: as the provider told before they were ended, else by the first listing without
    them. One that had ended long before anybody came is not paid for until then."""
    told = {each.machine_id: each.ended_at_s for each in listed}
    moments = ((told.get(ident), evidence.absent_at_s[0] + CLOCK_STEP_S) for ident, evidence in dead.items())
    return max(seen_s if told_s is None else min(told_s + CLOCK_STEP_S, seen_s) for told_s, seen_s in moments)


def last_bill(
    lease: Lease, dead: Mapping[str, Evidence], listed: Sequence[Machine], settings: CloudConfig
) -> tuple[float, int | None]:
    """Until when, and at which price, a lease is settled whose launcher is gone. Several machines are paid for
    together."""
    at_s = ended_s(dead, listed)
    victims = [each for each in listed if each.machine_id in dead]
    price = sum(each.running_price or lease.usd_micros_per_hour for each in victims) or None
    if any(evidence.was_listed or evidence.accepted_at_s for evidence in dead.values()):
        return at_s, price
    # It was gone before anybody looked, ended by itself or by another; it cannot have outlived the reaper's next pass.
    return min(at_s, lease.not_after_s + overdue_s(settings)), price or worst_rate(lease.rate).usd_micros_per_hour


@dataclass
class Patience:
    """How long to try, on which clock, and whether somebody wants to leave earlier."""

    seconds: float
    now_s: Callable[[], float]
    sleep_s: Callable[[float], None]
    is_over: Callable[[], bool] = lambda: False
    say: Callable[[str], None] = lambda _text: None


@dataclass
class _Victim:
    machine_id: str
    created_at_s: float
    evidence: Evidence = field(default_factory=Evidence)


def end_all(
    provider: Provider, victims: Sequence[tuple[str, float]], patience: Patience
) -> dict[str, tuple[Evidence, bool]]:
    """End machines, given as id and time of birth, and look until each is proven dead or patience ends.

    Returns for each the evidence, and whether it is a proof. A provider that fails is asked again.
    """
    rows = [_Victim(machine_id, created_at_s) for machine_id, created_at_s in victims]
    until_s = patience.now_s() + patience.seconds
    attempt = 0
    while True:
        wait_s = _BACK_OFF_S[min(attempt, len(_BACK_OFF_S) - 1)]
        alive = [row for row in rows if not is_proven(row.evidence, provider.traits, row.created_at_s)]
        try:
            _try_to_end(provider, alive)
        except RateLimited as error:
            wait_s = max(wait_s, error.retry_after_s)
        except ProviderFailed as error:
            patience.say(str(error))
        alive = [row for row in alive if not is_proven(row.evidence, provider.traits, row.created_at_s)]
        if not alive or patience.now_s() >= until_s or patience.is_over():
            return {
                row.machine_id: (row.evidence, is_proven(row.evidence, provider.traits, row.created_at_s))
                for row in rows
            }
        if any(row.evidence.absent_at_s for row in alive):
            wait_s = max(provider.traits.proof_gap_s, 0.05)
        patience.sleep_s(min(wait_s, max(0.05, until_s - patience.now_s())))
        attempt += 1


def _try_to_end(provider: Provider, alive: Sequence[_Victim]) -> None:
    """One round: ask for the end of those still listed, then look. One machine's trouble does not spare the others."""
    failures: list[ProviderFailed] = []
    accepted: list[_Victim] = []
    for row in alive:
        if not row.evidence.absent_at_s:
            try:
                accepted += [row] if provider.terminate(row.machine_id) else []
            except RateLimited:
                raise
            except ProviderFailed as error:
                failures.append(error)
    listing = provider.machines()
    for row in accepted:
        if row.evidence.accepted_at_s is None:
            row.evidence = replace(row.evidence, accepted_at_s=listing.now_s)
    for row in alive:
        row.evidence = look(row.evidence, listing, row.machine_id, provider.traits)
    if failures:
        raise failures[0]

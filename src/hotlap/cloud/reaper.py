"""Which machines must die and why; then the loop that ends them, proves it, and closes their leases.

Stateless: everything is read from the provider's listing and the ledger, so it may run from cron, twice at a time, on
any machine, after anything.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hotlap import durable
from hotlap.cloud import receipts
from hotlap.cloud.launcher import JOB_MARGIN_S
from hotlap.cloud.lease import Lease
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.money import ttl_s, usd, worst_rate
from hotlap.cloud.proof import Evidence, Patience, end_all, last_bill
from hotlap.cloud.provider import NAME_PREFIX, Listing, ListingBroken, Machine, Provider
from hotlap.config import CloudConfig, hotlap_home
from hotlap.errors import HotlapError, ProviderFailed, Survivors

LATE_CREATE_S = 3600.0
"""How long after its deadline a machine is still looked for whose create gave no clear answer."""


def doomed(
    machines: Iterable[Machine],
    leases: Mapping[str, float],
    now_s: float,
    max_ttl_s: float = 1800.0,
    over: Collection[str] = (),
    ceilings: Mapping[str, int] = MappingProxyType({}),
) -> list[tuple[Machine, str]]:
    """Which of these machines must die now, and why.

    `leases` has the deadline of each lease in the book, `ceilings` what its machine may cost in micro-dollars an hour,
    `over` the leases that ended, or whose create was given up. A machine without our tag and our name is never named,
    whatever its age.
    """
    found: list[tuple[Machine, str]] = []
    for machine in machines:
        lease_id = lease_of(machine, leases, over)
        if lease_id is not None and machine.state != "terminated":
            reason = _too_dear(machine, ceilings.get(lease_id)) or _reason(
                machine, lease_id, leases, now_s, max_ttl_s, over
            )
            if reason is not None:
                found.append((machine, reason))
    return found


def lease_of(machine: Machine, leases: Mapping[str, float], over: Collection[str] = ()) -> str | None:
    """The lease that a machine of ours belongs to. A name alone counts only if the book has it."""
    if machine.is_ours:
        return machine.lease_id
    by_name = machine.name.removeprefix(NAME_PREFIX)
    is_known = machine.name != by_name and machine.lease_id is None and (by_name in leases or by_name in over)
    return by_name if is_known else None


def _reason(
    machine: Machine,
    lease_id: str,
    leases: Mapping[str, float],
    now_s: float,
    max_ttl_s: float,
    over: Collection[str],
) -> str | None:
    if lease_id in over:
        return "its lease is over"
    dates = [date for date in (machine.not_after_s, leases.get(lease_id)) if date is not None]
    if not dates:
        late_s = now_s - machine.created_at_s - max_ttl_s
        return (
            f"{'; '.join(machine.problems) or 'it has no date'}, and it is {late_s:.0f} s too old"
            if late_s > 0
            else None
        )
    late_s = now_s - min(dates)
    return f"expired {late_s:.0f} s ago" if late_s > 0 else None


def _too_dear(machine: Machine, ceiling: int | None) -> str | None:
    price = machine.usd_micros_per_hour
    if ceiling is None or price is None or price <= ceiling:
        return None
    return f"it costs {usd(price)} an hour, and at most {usd(ceiling)} was agreed to"


def warnings_of(machines: Iterable[Machine], owner: str, all_owners: bool) -> list[str]:
    """What looks like ours and is left alone, and what is odd about what is ours."""
    found: list[str] = []
    for machine in machines:
        if machine.is_doubtful:
            found.append(f"{machine.machine_id} ({machine.name}) has our name or our tag, not both; it is left alone")
        elif machine.is_ours and machine.owner != owner and not all_owners:
            found.append(
                f"{machine.machine_id} ({machine.name}) belongs to {machine.owner}; --all-owners would judge it"
            )
        elif machine.is_ours:
            found += [f"{machine.machine_id}: {problem}" for problem in machine.problems]
    return found


def unseen(leases: Iterable[Lease], listed: Collection[str], now_s: float) -> list[Lease]:
    """Open leases past their deadline of which the listing shows nothing."""
    return [lease for lease in leases if now_s > lease.not_after_s and NAME_PREFIX + lease.lease_id not in listed]


@dataclass
class Report:
    """What one pass over one provider found and did."""

    provider: str
    now_s: float = 0.0
    doomed: list[tuple[Machine, str]] = field(default_factory=list[tuple[Machine, str]])
    survivors: list[str] = field(default_factory=list[str])
    closed: list[Lease] = field(default_factory=list[Lease])
    warnings: list[str] = field(default_factory=list[str])
    failure: str | None = None

    @property
    def is_clean(self) -> bool:
        return not self.survivors and self.failure is None

    def as_json(self) -> dict[str, Any]:
        return {
            "provider": self.provider,
            "doomed": [
                {"machine_id": machine.machine_id, "name": machine.name, "state": machine.state, "reason": reason}
                for machine, reason in self.doomed
            ],
            "survivors": self.survivors,
            "closed": [
                {"lease_id": lease.lease_id, "state": lease.state, "usd_micros": lease.usd_micros, "note": lease.note}
                for lease in self.closed
            ],
            "warnings": self.warnings,
            "failure": self.failure,
        }


class Reaper:
    """Without a ledger, which may be out of reach when it is needed most, machines are judged by their tags alone, and
    no lease is closed."""

    def __init__(
        self, provider: Provider, ledger: Ledger | None, settings: CloudConfig, owner: str, all_owners: bool = False
    ) -> None:
        self._provider, self._ledger, self._settings = provider, ledger, settings
        self._owner, self._all_owners = owner, all_owners

    def reap(self, patience: Patience, is_dry_run: bool = False) -> Report:
        """One pass. It never raises for what a provider does: the report says it."""
        report = Report(self._provider.traits.name)
        try:
            listing = self._provider.machines()
        except ListingBroken as error:
            listing = error.seen
            report.failure = str(error)
        except ProviderFailed as error:
            report.failure = f"{error} {self._at_stake()}"
            return report
        report.now_s = listing.now_s
        try:
            book = self._book(listing)
        except HotlapError as error:
            return self._without_the_book(error, patience, is_dry_run)
        machines = [each for each in listing.machines if self._all_owners or each.owner in (self._owner, None)]
        report.warnings = warnings_of(listing.machines, self._owner, self._all_owners)
        leases = [lease for lease in book.values() if lease.is_open]
        deadlines = {lease.lease_id: float(lease.not_after_s) for lease in leases}
        ceilings = {lease.lease_id: worst_rate(lease.rate).usd_micros_per_hour for lease in leases}
        over = {lease.lease_id for lease in book.values() if lease.state != "held"}
        traits = self._provider.traits
        longest_s = ttl_s(self._settings.limits.max_slice_minutes * 60.0 + JOB_MARGIN_S, traits)
        report.doomed = doomed(machines, deadlines, listing.now_s, longest_s, over, ceilings)
        if is_dry_run:
            return report
        # Others of a shared ledger may rent from another account, where this listing proves nothing.
        own = [each for each in book.values() if self._all_owners or each.owner == self._owner]
        gone = unseen(own, {machine.name for machine in listing.machines}, listing.now_s)
        self._end(report, patience, [lease for lease in gone if lease.is_open and lease.machine_id is not None])
        # The books come last: trouble with them must not spare a machine.
        if self._ledger is not None:
            if report.failure is None:
                nameless = [lease for lease in gone if lease.is_open and lease.machine_id is None]
                self._close_nameless(self._ledger, report, nameless)
            self._complete_receipts(self._ledger)
        return report

    def _without_the_book(self, error: HotlapError, patience: Patience, is_dry_run: bool) -> Report:
        """A book that opens and cannot be read must not spare a machine either."""
        by_tags = Reaper(self._provider, None, self._settings, self._owner, self._all_owners)
        report = by_tags.reap(patience, is_dry_run)
        said = f"{error} Machines were judged by their tags alone."
        report.failure = said if report.failure is None else f"{said} {report.failure}"
        return report

    def _book(self, listing: Listing) -> dict[str, Lease]:
        """Every open lease of this provider, and every lease whose machine is listed."""
        if self._ledger is None:
            return {}
        names = [each.name.removeprefix(NAME_PREFIX) for each in listing.machines if each.name.startswith(NAME_PREFIX)]
        leases = [*self._ledger.open_leases(), *self._ledger.leases(names)]
        return {lease.lease_id: lease for lease in leases if lease.provider == self._provider.traits.name}

    def _at_stake(self) -> str:
        if self._ledger is None:
            return "Which machines may be alive there, the ledger cannot tell."
        leases = [each for each in self._ledger.open_leases() if each.provider == self._provider.traits.name]
        if not leases:
            return "The ledger knows of no machine there."
        rows = ", ".join(f"hotlap-{lease.lease_id} (at most {lease.amount.text()})" for lease in leases)
        return f"These machines may be alive: {rows}."

    def _end(self, report: Report, patience: Patience, gone: Sequence[Lease]) -> None:
        """End the doomed, look twice for those that seem to be gone, and close the leases of what is proven dead."""
        for machine, reason in report.doomed:
            patience.say(f"ending {machine.machine_id} ({machine.name}): {reason}")
        victims = {machine.machine_id: machine.created_at_s for machine, _ in report.doomed}
        by_lease = {lease.lease_id: (lease.machine_id or "").split(",") for lease in gone}
        victims |= {ident: lease.began_s for lease in gone for ident in by_lease[lease.lease_id]}
        for machine, _ in report.doomed:
            lease_id = machine.lease_id or machine.name.removeprefix(NAME_PREFIX)
            by_lease.setdefault(lease_id, []).append(machine.machine_id)
        if not victims:
            return
        ends = end_all(self._provider, list(victims.items()), patience)
        report.survivors = [machine_id for machine_id, (_, is_dead) in ends.items() if not is_dead]
        for lease_id, idents in by_lease.items():
            if all(ends[ident][1] for ident in idents):
                self._settle(report, lease_id, {ident: ends[ident][0] for ident in idents})

    def _settle(self, report: Report, lease_id: str, dead: Mapping[str, Evidence]) -> None:
        lease = self._ledger.lease(lease_id) if self._ledger is not None else None
        if self._ledger is None or lease is None or not lease.is_open:
            return
        at_s, price = last_bill(lease, dead, [machine for machine, _ in report.doomed], self._settings)
        closed = self._ledger.settle(lease_id, at_s, price, outcome="reaped", note="closed by the reaper")
        self._note(report, closed, {ident: evidence.as_json() for ident, evidence in dead.items()})

    def _close_nameless(self, ledger: Ledger, report: Report, gone: Sequence[Lease]) -> None:
        """Leases of which no machine was ever seen, when none can appear any more."""
        late_s = LATE_CREATE_S if self._provider.traits.visibility_s > 0 else 0.0
        for lease in gone:
            if not receipts.may_be_sent(lease.lease_id):
                closed = ledger.release(lease.lease_id, report.now_s, "the create was never sent")
            elif report.now_s <= lease.not_after_s + late_s:
                continue
            elif lease.state == "unresolved":
                note = "its create gave no clear answer, and no machine appeared"
                closed = ledger.release(lease.lease_id, report.now_s, note)
            else:
                # Its launcher died in the create, so nobody looked: it may have come, run and ended itself.
                note = "nobody saw its machine, so its worst case is booked"
                price = worst_rate(lease.rate).usd_micros_per_hour
                closed = ledger.settle(lease.lease_id, float(lease.not_after_s), price, "lost", note)
            self._note(report, closed, None)

    def _note(self, report: Report, lease: Lease, proof: dict[str, Any] | None) -> None:
        report.closed.append(lease)
        receipts.open_receipt(lease.lease_id).settle(lease, proof)

    def _complete_receipts(self, ledger: Ledger) -> None:
        """A launcher that was killed behind the settlement left a receipt without it."""
        for lease in ledger.leases(receipts.without_settlement()):
            if not lease.is_open and lease.provider == self._provider.traits.name:
                receipt = receipts.open_receipt(lease.lease_id)
                receipt.settle(lease, receipt.facts.get("proof"))


def require_clean(reports: Sequence[Report]) -> None:
    """
    Raises:
        Survivors: something may still be alive whose time is over.
    """
    said = [f"{', '.join(each.survivors)} of {each.provider} is not proven dead" for each in reports if each.survivors]
    said += [each.failure for each in reports if each.failure is not None]
    if said:
        raise Survivors(f"{'; '.join(said)} Run hotlap reap again.")


# --- the sign of life that doctor looks for ---


_MISSED_PERIODS = 3


def is_watched(provider: str, settings: CloudConfig, now_s: float) -> bool:
    """Whether a pass of this home saw that provider's machines lately. One without a key to it leaves a sign too."""
    sign = last_sign()
    longest_s = _MISSED_PERIODS * settings.reaper.period_minutes * 60.0
    return sign is not None and provider in sign["providers"] and now_s - sign["at_s"] <= longest_s


def leave_sign(reports: Sequence[Report], at_s: float) -> None:
    durable.make_dirs(hotlap_home())
    fact = {
        "at_s": at_s,
        "providers": [each.provider for each in reports if each.failure is None],
        "is_clean": all(r.is_clean for r in reports),
    }
    durable.replace(hotlap_home() / "reaper.json", durable.canonical_json(fact).encode())


def last_sign() -> dict[str, Any] | None:
    path = hotlap_home() / "reaper.json"
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None

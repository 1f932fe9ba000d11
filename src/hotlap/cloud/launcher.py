"""Rent a machine for one job and give it back: hold, create, watch, terminate, prove, settle.

Killed at any line, it leaves an intent that says what may exist, and a machine that anybody can find by its name and
judge by its tags. A create is never sent twice: what its answer leaves open is looked up.
"""

import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hotlap import clock
from hotlap.cloud import receipts
from hotlap.cloud.lease import Lease, require_few, require_none_overdue
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.money import rate_of, ttl_s, worst_rate
from hotlap.cloud.proof import Patience, end_all, ended_s
from hotlap.cloud.provider import Machine, Offer, Provider, Start, Tags, Traits, event_in
from hotlap.cloud.watch import End, Plan, Seen, end_by_price, end_of, hear, over_by_s, see
from hotlap.config import CloudConfig
from hotlap.errors import (
    AmbiguousCreate,
    HotlapError,
    MachineLost,
    NoCapacity,
    NoPermission,
    NotCreated,
    ProviderFailed,
    RateLimited,
    StorageFailed,
    Survivors,
)

JOB_MARGIN_S = 10.0
"""Between the slice's cap, which its worker watches, and the job's, which boot watches."""

_RECONCILE_BACK_OFF_S = (1.0, 2.0, 4.0, 8.0, 15.0)
_LIST_EVERY_POLLS = 4
_LONGEST_NAP_S = 0.2
_RATE_LIMITED_TRIES = 3


@dataclass(frozen=True)
class Job:
    """What is to run on the machine, and for how long at most."""

    run: str
    cap_s: float
    start: Start
    settings: str | None = None
    """See `Lease.settings`."""


@dataclass
class Stops:
    """Whether somebody asked to stop: once to end in order, twice to leave even before the proof."""

    num_asked: int = 0

    def is_asked(self) -> bool:
        return self.num_asked > 0

    def is_pressed(self) -> bool:
        return self.num_asked > 1


@dataclass(frozen=True)
class World:
    """Clocks, chance and listeners, so that a test has its own."""

    now_s: Callable[[], float] = clock.monotonic_s
    wall_s: Callable[[], float] = clock.wall_s
    sleep_s: Callable[[float], None] = clock.sleep_s
    draw: Callable[[], str] = lambda: secrets.token_hex(8)
    on_event: Callable[[dict[str, Any]], None] = lambda _event: None
    say: Callable[[str], None] = lambda _text: None
    redact: Callable[[str], str] = lambda text: text


@dataclass(frozen=True)
class LeaseEnd:
    """How a lease ended. `end` is None when somebody asked to stop."""

    lease: Lease
    end: End | None


@dataclass
class _Rented:
    """A lease under way. `was_sent` is set before the create leaves."""

    lease: Lease
    tags: Tags
    offer: Offer
    receipt: receipts.Receipt
    sent_s: float = 0.0
    was_sent: bool = False
    no: HotlapError | None = None
    machine_ids: list[str] = field(default_factory=list[str])
    created_at_s: float = 0.0
    price: int | None = None
    outcome: str | None = None


class Launcher:
    def __init__(
        self, provider: Provider, ledger: Ledger, settings: CloudConfig, owner: str, stops: Stops, world: World
    ) -> None:
        self._provider, self._ledger, self._settings = provider, ledger, settings
        self._owner, self.stops, self._world = owner, stops, world

    def launch(self, job: Job, offers: Sequence[Offer]) -> LeaseEnd:
        """Run the job on the first of these offers that can be had. When it returns, the machine is proven dead.

        Raises:
            BudgetRefused, RunLocked: nothing was rented.
            Survivors: a machine is not proven dead; the hold stays. Or one from before is long overdue, and nothing was
                rented.
            NotCreated, NoPermission: nor here; every hold is given back.
            AmbiguousCreate: a machine may yet appear; the hold stays, and the reaper looks for it.
        """
        refusal: HotlapError | None = None
        for offer in offers:
            for _ in range(_RATE_LIMITED_TRIES):
                if refusal is not None and self.stops.is_asked():
                    raise refusal
                try:
                    return self._rent(job, offer)
                except NoCapacity as error:
                    refusal = error
                    break
                except RateLimited as error:
                    refusal = error
                    self._nap(error.retry_after_s)
        raise refusal or NoCapacity("There is no offer of this kind; hotlap machines --offers lists what there is.")

    def _rent(self, job: Job, offer: Offer) -> LeaseEnd:
        listing = self._provider.machines()
        require_none_overdue(listing, self._owner, self._settings)
        require_few(listing, self._owner, self._settings)
        plan = plan_of(job, self._provider.traits)
        rented = self._hold(job, offer, plan, listing.now_s)
        end: End | None = None
        try:
            self._create(rented, job)
            end = self._watch(rented, plan)
            rented.outcome = outcome_of(end)
        finally:
            lease = self._give_back(rented)
        return LeaseEnd(lease, end)

    def _hold(self, job: Job, offer: Offer, plan: Plan, now_s: float) -> _Rented:
        tags = Tags(self._world.draw(), self._owner, self._world.draw(), int(now_s + plan.ttl_s))
        worst = worst_rate(rate_of(offer)).cost(tags.not_after_s - now_s)
        lease = Lease(
            lease_id=tags.lease_id,
            run=job.run,
            owner=self._owner,
            provider=offer.provider,
            gpu=offer.gpu,
            nonce=tags.nonce,
            usd_micros_per_hour=offer.usd_micros_per_hour,
            num_gpus=offer.num_gpus,
            billing_unit_s=offer.billing_unit_s,
            began_s=now_s,
            not_after_s=tags.not_after_s,
            gpu_s=worst.gpu_s,
            usd_micros=worst.usd_micros,
            settings=job.settings,
        )
        lease = self._ledger.hold(lease)
        rented = _Rented(lease, tags, offer, receipts.open_receipt(lease.lease_id, self._world.redact))
        try:
            rented.receipt.note(
                at=("held", self._world.wall_s()), **intent_of(lease, offer, plan, job, self._provider.traits)
            )
        except HotlapError:
            self._ledger.release(lease.lease_id, now_s, "the intent could not be written, so nothing was rented")
            raise
        return rented

    # --- create ---

    def _create(self, rented: _Rented, job: Job) -> None:
        rented.was_sent, rented.sent_s = True, self._world.now_s()
        rented.receipt.note(at=("sent", self._world.wall_s()))
        try:
            machine = self._provider.create(rented.offer, rented.tags, job.start)
        except (NotCreated, NoPermission, RateLimited) as error:
            rented.no = error
            raise
        except ProviderFailed as error:
            self._world.say(self._world.redact(f"{error} Looking for {rented.tags.name} instead of asking again."))
            rented.receipt.note(ambiguous=str(error))
            machine = self._reconcile(rented)
        self._take(rented, [machine])

    def _take(self, rented: _Rented, machines: Sequence[Machine]) -> None:
        """Write down what is ours before anything else."""
        rented.machine_ids = [machine.machine_id for machine in machines]
        rented.created_at_s = min(machine.created_at_s for machine in machines)
        # Several are paid for together; a single one may say its price here and never again.
        quoted = rented.offer.usd_micros_per_hour
        rented.price = sum(machine.running_price or quoted for machine in machines)
        self._ledger.note_machine(rented.lease.lease_id, ",".join(rented.machine_ids))
        rented.receipt.note(at=("created", self._world.wall_s()), machine_id=",".join(rented.machine_ids))

    def _reconcile(self, rented: _Rented) -> Machine:
        """The one machine that the create made after all, by its exact name and nonce.

        Raises:
            AmbiguousCreate: there is none so far.
            MachineLost: there are several, or one that cannot be told to be ours; they are ended.
        """
        until_s = self._world.now_s() + self._provider.traits.visibility_s
        attempt = 0
        while True:
            try:
                listing = self._provider.machines()
                named = [each for each in listing.machines if each.name == rented.tags.name]
            except ProviderFailed:
                named = []
            if len(named) == 1 and named[0].nonce == rented.tags.nonce:
                return named[0]
            if named:
                self._take(rented, named)
                raise MachineLost(f"{len(named)} machines are named {rented.tags.name}; they are ended, not used.")
            if self._world.now_s() >= until_s or self.stops.is_pressed():
                raise AmbiguousCreate(
                    f"The create of {rented.tags.name} gave no clear answer, and no such machine was seen. "
                    f"Its worst case ({rented.lease.amount.text()}) stays held; hotlap reap goes on looking."
                )
            self._world.sleep_s(_RECONCILE_BACK_OFF_S[min(attempt, len(_RECONCILE_BACK_OFF_S) - 1)])
            attempt += 1

    # --- watch ---

    def _watch(self, rented: _Rented, plan: Plan) -> End | None:
        """Follow the machine until it is over. None: somebody asked to stop."""
        (machine_id,) = rented.machine_ids
        seen, cursor, num_polls = Seen(), "", 0
        while not self.stops.is_asked():
            wait_s = self._provider.traits.poll_s
            try:
                page = self._provider.logs(machine_id, cursor)
                cursor = page.cursor
                at_s = self._world.now_s() - rented.sent_s
                was_booted = seen.booted_s is not None
                seen = hear(seen, page.lines, rented.tags.nonce, at_s)
                self._forward(page.lines)
                if seen.booted_s is not None and not was_booted:
                    rented.receipt.note(at=("booted", self._world.wall_s()))
                if num_polls % _LIST_EVERY_POLLS == 0:
                    listing = self._provider.machines()
                    is_late = listing.now_s >= rented.tags.not_after_s
                    seen = see(seen, listing.find(machine_id), at_s, is_late)
                num_polls += 1
            except RateLimited as error:
                wait_s = max(wait_s, error.retry_after_s)
            except ProviderFailed as error:
                self._world.say(self._world.redact(str(error)))
            rented.price = (seen.machine and seen.machine.running_price) or rented.price
            end = end_by_price(rented.offer, rented.price) or end_of(seen, plan, self._world.now_s() - rented.sent_s)
            if end is not None:
                rented.receipt.note(
                    at=("ended", self._world.wall_s()), end={"kind": end.kind, "message": end.message}, talk=seen.talk
                )
                return end
            # However long a provider asks us to wait, its machine costs meanwhile.
            self._nap(min(wait_s, over_by_s(seen, plan) - (self._world.now_s() - rented.sent_s)))
        return None

    def _forward(self, lines: Sequence[str]) -> None:
        for line in lines:
            event = event_in(line)
            if event is None:
                self._world.say(self._world.redact(line))
            elif event["event"] not in ("boot", "heartbeat", "result", "self_end"):
                self._world.on_event(event)

    def _nap(self, seconds: float) -> None:
        until_s = self._world.now_s() + seconds
        while (left_s := until_s - self._world.now_s()) > 0 and not self.stops.is_asked():
            self._world.sleep_s(min(left_s, _LONGEST_NAP_S))

    # --- give back ---

    def _give_back(self, rented: _Rented) -> Lease:
        """On every way out: end what there is, prove it, settle; or say what stays open."""
        if rented.no is not None or not rented.was_sent:
            why = str(rented.no) if rented.no else "the create was never sent"
            lease = self._ledger.release(rented.lease.lease_id, rented.lease.began_s, self._world.redact(why))
            rented.receipt.settle(lease, None)
            return lease
        if not rented.machine_ids:
            return self._look_once_more(rented)
        return self._end_and_settle(rented)

    def _look_once_more(self, rented: _Rented) -> Lease:
        """An ambiguous create whose machine was not found: it is not given up, only left to the reaper."""
        try:
            named = [each for each in self._provider.machines().machines if each.name == rented.tags.name]
        except ProviderFailed:
            named = []
        if named:
            self._take(rented, named)
            return self._end_and_settle(rented)
        self._ledger.mark_unresolved(rented.lease.lease_id, "the create gave no clear answer")
        rented.receipt.note(unresolved=True)
        return replace(rented.lease, state="unresolved")

    def _end_and_settle(self, rented: _Rented) -> Lease:
        traits = self._provider.traits
        patience = Patience(
            seconds=2 * traits.proof_s,
            now_s=self._world.now_s,
            sleep_s=self._world.sleep_s,
            is_over=self.stops.is_pressed,
            say=lambda text: self._world.say(self._world.redact(text)),
        )
        victims = [(machine_id, rented.created_at_s) for machine_id in rented.machine_ids]
        ends = end_all(self._provider, victims, patience)
        proof = {machine_id: evidence.as_json() for machine_id, (evidence, _) in ends.items()}
        if not all(is_proven for _, is_proven in ends.values()):
            with contextlib.suppress(StorageFailed):  # a full disk must not hide that something is alive
                rented.receipt.note(proof_so_far=proof)
            raise Survivors(
                f"{', '.join(rented.machine_ids)} of {traits.name} is not proven dead; its worst case stays held. "
                f"Run: hotlap reap, which may end it from {clock.utc_text(rented.lease.not_after_s)} on, "
                f"or: hotlap stop {rented.lease.run}."
            )
        price = {"actual_usd_micros_per_hour": rented.price}
        at_s = ended_s({machine_id: evidence for machine_id, (evidence, _) in ends.items()})
        try:
            rented.receipt.note(at=("proven", self._world.wall_s()), proof=proof, price=price)
            lease = self._ledger.settle(rented.lease.lease_id, at_s, rented.price, rented.outcome)
        except StorageFailed:
            self._world.say(f"{', '.join(rented.machine_ids)} is proven dead; hotlap reap will book what it cost.")
            raise
        rented.receipt.settle(lease, proof)
        return lease


# --- decisions ---


def plan_of(job: Job, traits: Traits) -> Plan:
    job_s = job.cap_s + JOB_MARGIN_S
    return Plan(
        provisioning_s=traits.provisioning_s,
        cap_s=job_s,
        ttl_s=ttl_s(job_s, traits),
        visibility_s=traits.visibility_s,
    )


def outcome_of(end: End | None) -> str:
    """The lease's last word: a reason word of the job, or what befell its machine."""
    if end is None:
        return "stopped"
    return str(end.result.get("reason", "unexpected")) if end.result is not None else end.kind


def intent_of(lease: Lease, offer: Offer, plan: Plan, job: Job, traits: Traits) -> dict[str, Any]:
    """What a receipt says before anything exists. Of the environment the names only."""
    return {
        "lease_id": lease.lease_id,
        "run": lease.run,
        "owner": lease.owner,
        "intent": {
            "provider": traits.name,
            "gpu": offer.gpu,
            "num_gpus": offer.num_gpus,
            "region": offer.region,
            "machine_name": f"hotlap-{lease.lease_id}",
            "quoted_usd_micros_per_hour": offer.usd_micros_per_hour,
            "ttl_s": plan.ttl_s,
            "cap_s": plan.cap_s,
            "not_after_s": lease.not_after_s,
            "worst_case": {"gpu_s": lease.gpu_s, "usd_micros": lease.usd_micros},
            "image": job.start.image,
            "volume_id": job.start.volume_id,
            "env_names": sorted([*job.start.env, *job.start.secret_refs]),
        },
    }

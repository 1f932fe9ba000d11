"""What a machine's log and listing mean: is it ready, alive, done, or to be ended, and why. Decisions only."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hotlap.cloud.money import PRICE_TOLERANCE_PERCENT, usd
from hotlap.cloud.provider import LINE_PREFIX, PLATFORM_PREFIX, Machine, Offer, event_in

HEARTBEAT_S = 10.0
_MISSED_BEATS = 3
_NO_IMAGE = re.compile(r"manifest unknown|no such manifest|pull access denied|repository does not exist", re.I)
"""What a registry answers for good: no waiting brings such an image."""

EndKind = Literal["result", "refused", "provisioning", "silent", "overran", "restarted", "vanished", "ended", "price"]


@dataclass(frozen=True)
class Plan:
    """The moments of one machine, in seconds after its create was sent."""

    provisioning_s: float
    cap_s: float
    """The job's longest life, from its boot on."""

    ttl_s: float
    grace_s: float = 10.0
    """How long the job may take to tell its result after its cap."""

    visibility_s: float = 0.0


@dataclass(frozen=True)
class End:
    """Why a machine is over, and what its job told last."""

    kind: EndKind
    message: str
    result: dict[str, Any] | None = None


@dataclass(frozen=True)
class Seen:
    """All that was seen of a machine so far; each field a fold over observations."""

    boot_ids: tuple[str, ...] = ()
    booted_s: float | None = None
    heard_s: float | None = None
    """When the last line came, on a machine that booted."""

    answered_s: float | None = None
    """When the provider last gave the log: before that, silence says nothing."""

    was_listed: bool = False
    is_late: bool = False
    """Whether the provider's clock says that its time is over: ours may have stood still, as in a closed laptop."""

    machine: Machine | None = None
    missing_since_s: float | None = None
    result: dict[str, Any] | None = None
    refused: dict[str, Any] | None = None
    no_image: str | None = None
    """The platform's words, if there is no such image."""

    talk: tuple[str, ...] = field(default=())


_TALK_LINES = 20


def hear(seen: Seen, lines: Sequence[str], nonce: str, at_s: float) -> Seen:
    """Take in a page of the log."""
    seen = replace(seen, answered_s=at_s)
    for line in lines:
        event = event_in(line)
        if event is None:
            seen = replace(seen, talk=(*seen.talk, line.removeprefix(LINE_PREFIX))[-_TALK_LINES:])
            if line.startswith(PLATFORM_PREFIX) and _NO_IMAGE.search(line):
                seen = replace(seen, no_image=line.removeprefix(PLATFORM_PREFIX)[:200])
        elif event["event"] == "boot" and event.get("nonce") == nonce:
            boots = seen.boot_ids if event["boot_id"] in seen.boot_ids else (*seen.boot_ids, event["boot_id"])
            seen = replace(seen, boot_ids=boots, booted_s=at_s if seen.booted_s is None else seen.booted_s)
        elif event["event"] == "result":
            seen = replace(seen, result={key: value for key, value in event.items() if key != "event"})
        elif event["event"] == "refused" and len(seen.boot_ids) == 1:
            seen = replace(seen, refused=event)
        seen = replace(seen, heard_s=at_s)
    return seen


def see(seen: Seen, machine: Machine | None, at_s: float, is_late: bool = False) -> Seen:
    """Take in a full listing in which the machine is, or is not."""
    seen = replace(seen, is_late=is_late)
    if machine is None or machine.state == "terminated":
        since = at_s if seen.missing_since_s is None else seen.missing_since_s
        return replace(seen, machine=None, missing_since_s=since)
    return replace(seen, machine=machine, was_listed=True, missing_since_s=None)


def end_of(seen: Seen, plan: Plan, now_s: float) -> End | None:
    """Why the machine is over now, or None to go on watching it."""
    if seen.result is not None:
        return End("result", str(seen.result.get("message", "")), seen.result)
    if len(seen.boot_ids) > 1:
        return End("restarted", f"its command was started {len(seen.boot_ids)} times, so the job did not end in order")
    if seen.refused is not None:
        return End("refused", f"boot refused: {seen.refused.get('message')}")
    if seen.no_image is not None and seen.booted_s is None:
        way_out = "name another with --image, or correct it in cloud.toml"
        return End("provisioning", f"its image cannot be had ({seen.no_image}); {way_out}")
    return _end_by_listing(seen, plan, now_s) or _end_by_time(seen, plan, now_s)


def _end_by_listing(seen: Seen, plan: Plan, now_s: float) -> End | None:
    if seen.missing_since_s is not None and (seen.was_listed or now_s >= plan.visibility_s):
        # Listings lag: one gap after the machine was seen is not believed at once.
        if now_s - seen.missing_since_s >= min(plan.visibility_s, 30.0):
            return End("vanished", "the provider lists it no more")
    elif seen.machine is not None and seen.machine.state in ("exited", "error"):
        return End("ended", f"its state is {seen.machine.state} and its job gave no result")
    return None


def over_by_s(seen: Seen, plan: Plan) -> float:
    """When a machine is over as far as is known now, though nothing more is heard of it."""
    if seen.booted_s is None:
        return plan.provisioning_s
    return min(seen.booted_s + plan.cap_s + plan.grace_s, plan.ttl_s)


def _end_by_time(seen: Seen, plan: Plan, now_s: float) -> End | None:
    if seen.is_late:
        return End("overran", "its time is over by the provider's clock")
    if now_s >= over_by_s(seen, plan):
        if seen.booted_s is None:
            return End("provisioning", f"its job did not begin within {plan.provisioning_s:.0f} s")
        return End("overran", f"its job did not end by its cap of {plan.cap_s:.0f} s")
    if seen.booted_s is None:
        return None
    assert seen.heard_s is not None and seen.answered_s is not None
    if seen.answered_s - seen.heard_s >= _MISSED_BEATS * HEARTBEAT_S:
        return End("silent", f"it said nothing for {seen.answered_s - seen.heard_s:.0f} s")
    return None


def end_by_price(offer: Offer, price: int | None) -> End | None:
    limit = offer.usd_micros_per_hour * (100 + PRICE_TOLERANCE_PERCENT)
    if price is None or price * 100 <= limit:
        return None
    quoted = usd(offer.usd_micros_per_hour)
    return End("price", f"it costs {usd(price)} an hour, and {quoted} was offered")

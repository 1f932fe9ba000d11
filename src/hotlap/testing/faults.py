"""What goes wrong, when: a script of faults, matched to requests by route, number, time and chance."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

Kind = Literal[
    # the answer
    "drop_before",  # the connection is cut and nothing happened
    "drop_after",  # it happened, and the connection is cut
    "status",  # an error of that status instead; value: the status, for 429 also retry_after_s
    "status_after",  # it happened, and the answer is an error of that status
    "html",  # nothing happened, and a proxy answers with a page; value: the status
    "html_after",
    "truncate",  # it happened, and half of the answer arrives
    "slow",  # value: real seconds before the answer
    "capacity",  # a create's 400 without a machine-readable code
    # what a create makes; value: seconds or a factor where there is one
    "commit_late",
    "visible_late",
    "twice",
    "stuck_provisioning",
    "stuck_starting",
    "null_runtime",
    "goes_error",
    "goes_exited",
    "vanishes",
    "restarts",
    "price",
    # what a listing or a machine's own entry says
    "omit",
    "misses_pages",
    "repeats_cursor",
    "unknown_status",
    "zero_cost",
    "null_cost",
    "hides_env",
    "uptime_backwards",
    # deleting
    "no_effect",
    "not_found",
    "locked",
    "cluster",
    # logs
    "cut",
    "duplicates",
]


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    `route` is a method and a path with `{id}` for what varies, such as `DELETE /v2/pods/{id}`, or `*`. Of the calls of
    that route, `calls` chooses by number from 1 (empty: all), `from_s` and `until_s` by the seconds since the start of
    the emulator, and then chance decides.
    """

    kind: Kind
    route: str = "*"
    calls: tuple[int, ...] = ()
    from_s: float = 0.0
    until_s: float = float("inf")
    probability: float = 1.0
    value: float = 0.0
    retry_after_s: float = 5.0
    detail: str = ""


def fault_from(tree: dict[str, Any]) -> Fault:
    """A fault as the control plane takes it."""
    known = {field.name for field in fields(Fault)}
    unknown = sorted(set(tree) - known)
    if unknown:
        raise ValueError(f"a fault has no {unknown[0]!r}; it has {sorted(known)}")
    given: dict[str, Any] = {**tree, "calls": tuple(tree.get("calls", ()))}
    return Fault(**given)


class Active:
    """The faults that hold for one request."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._by_kind = {fault.kind: fault for fault in faults}

    def __contains__(self, kind: Kind) -> bool:
        return kind in self._by_kind

    def get(self, kind: Kind) -> Fault | None:
        return self._by_kind.get(kind)

    def value(self, kind: Kind, default: float) -> float:
        fault = self._by_kind.get(kind)
        return default if fault is None else fault.value


class FaultScript:
    def __init__(self, faults: Iterable[Fault], chance: random.Random) -> None:
        self.faults = list(faults)
        self._chance = chance
        self._num_calls: Counter[str] = Counter()

    def on(self, route: str, age_s: float) -> Active:
        """The faults that hold for the next call of a route."""
        self._num_calls[route] += 1
        number = self._num_calls[route]
        return Active(fault for fault in self.faults if self._holds(fault, route, number, age_s))

    def _holds(self, fault: Fault, route: str, number: int, age_s: float) -> bool:
        if fault.route not in ("*", route) or (fault.calls and number not in fault.calls):
            return False
        if not fault.from_s <= age_s < fault.until_s:
            return False
        return fault.probability >= 1.0 or self._chance.random() < fault.probability

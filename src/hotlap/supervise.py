"""Watch slices from outside: start one, end it at its cap, write down what was seen, and chain them.

Whoever starts a slice does it through here: the command line, a worker on a rented machine, a study's trial.
"""

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hotlap import child, clock, durable, runs
from hotlap.config import RunConfig
from hotlap.errors import INTERRUPTED, OVERRAN, SLICE_OVER, StorageFailed

OnEvent = Callable[[dict[str, Any]], None]
OnTalk = Callable[[str], None]


@dataclass(frozen=True)
class SliceEnd:
    """A slice as its parent saw it end. `result` is its own account, if it lived to give one."""

    number: int | None
    exit_code: int
    reason: str
    wall_s: float
    result: dict[str, Any] | None
    end: child.ChildEnd

    @property
    def goes_on(self) -> bool:
        """Whether another slice should follow: the time was up, and nobody asked to stop."""
        return self.exit_code == SLICE_OVER and self.reason == "slice_over"


def run_slice(
    config: RunConfig, on_event: OnEvent, on_talk: OnTalk, cap_began_s: float | None = None, module: str | None = None
) -> SliceEnd:
    """One slice, from now, or from `cap_began_s` on the monotonic clock, to its end or to its cap.

    `module` is what to run in place of `hotlap.train.slice`; it takes the same order.
    """
    deadline = clock.Deadline((cap_began_s or clock.monotonic_s()) + config.slice.cap_s)
    order = {"config": config.model_dump(mode="json"), "deadline_at_s": deadline.at_s}
    argv = [sys.executable, "-m", module or "hotlap.train.slice", durable.canonical_json(order)]
    end = child.run_child(argv, deadline, on_event, on_talk)
    run = runs.RunFolder(config.run_folder)
    reason = _reason(end)
    exit_code = SLICE_OVER if reason == "stopped" else end.exit_code
    number = _number_of(run, end.pid)
    if number is not None:
        account_s = end.result["timeline"]["elapsed_s"] if end.result else None
        seen = {"exit_code": exit_code, "reason": reason, "wall_s": end.wall_s, "account_s": account_s}
        try:
            runs.record_exit(run, number, seen)
        except StorageFailed as error:
            on_talk(f"The slice's end is not kept. {error}")
    return SliceEnd(number, exit_code, reason, end.wall_s, end.result, end)


def _reason(end: child.ChildEnd) -> str:
    if end.exit_code == OVERRAN:
        return "overran"
    if end.exit_code == INTERRUPTED:
        return "interrupted"
    if end.result is not None:
        return end.result["reason"]
    if end.was_asked_to_stop and end.exit_code == -signal.SIGTERM:  # before it could listen: nothing had begun
        return "stopped"
    return "killed" if end.exit_code < 0 else "unexpected"


def _number_of(run: runs.RunFolder, pid: int) -> int | None:
    """The slice that this child was, if it got as far as taking the lock."""
    newest = runs.newest_number(run)
    holder = runs.slice_state(run, newest).holder if newest else None
    is_it = holder is not None and holder.pid == pid and holder.is_local()
    return newest if is_it else None

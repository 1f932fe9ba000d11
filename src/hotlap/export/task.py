"""Work that needs torch, as a child process: one order in, events and one result out, an error of the same class."""

import json
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hotlap import child, clock, durable, errors
from hotlap.errors import DONE, INTERRUPTED, OVERRAN, ChildCrashed, HotlapError

Say = Callable[[str], None]


def run_task(module: str, order: dict[str, Any], what: str, say: Say, patience_s: float = 7200.0) -> dict[str, Any]:
    """The result of `python -m MODULE ORDER`. `what` names the work in messages.

    Raises:
        HotlapError: what the child ended with, of the same class.
        ChildCrashed: it was killed, ended without a word, or took longer than `patience_s`.
        KeyboardInterrupt: somebody asked to stop.
    """
    return run_program([sys.executable, "-m", module], order, what, say, patience_s)


def run_program(
    argv: Sequence[str], order: dict[str, Any], what: str, say: Say, patience_s: float = 7200.0
) -> dict[str, Any]:
    """The same of a program that takes the order as its last argument."""
    text = durable.canonical_json(order)
    end = child.run_child([*argv, text], clock.Deadline(clock.monotonic_s() + patience_s), lambda event: None, say)
    if end.exit_code in (INTERRUPTED, -signal.SIGTERM):
        raise KeyboardInterrupt
    if end.exit_code == OVERRAN:
        raise ChildCrashed(f"{what} was not over after {patience_s / 60:.0f} minutes, so it was ended.")
    end.raise_if_killed(what)
    if end.result is None:
        last_line = (end.last_words.splitlines() or ["it said nothing"])[-1]
        raise ChildCrashed(f"{what} ended with exit code {end.exit_code}: {last_line}")
    if end.exit_code == DONE:
        return end.result
    kind: type[HotlapError] = getattr(errors, end.result["error"])
    raise kind(end.result["message"])


def do_task(work: Callable[[dict[str, Any], Say], dict[str, Any]]) -> None:
    """The child's side: do the order in the first argument, and end the process with the result's exit code."""
    from hotlap.train.channel import events, say

    emit = events()
    child.die_with_parent()
    try:
        result = {**work(json.loads(sys.argv[1]), say), "exit_code": DONE}
    except HotlapError as error:
        result = {"exit_code": error.exit_code, "error": type(error).__name__, "message": str(error)}
    emit({"event": "result", **result})
    sys.exit(result["exit_code"])

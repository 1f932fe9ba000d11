"""What ties a child process to the parent that watches it: events for it, talk for people, and a common end."""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1


def events() -> Callable[[dict[str, Any]], None]:
    """Events on what was standard output; whatever a library prints goes to standard error from now on."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(event: dict[str, Any]) -> None:
        try:
            channel.write(json.dumps(event) + "\n")
            channel.flush()
        except BrokenPipeError:  # nobody listens any more; the run's files tell it all
            return

    return emit


def say(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        return


def die_with_parent() -> None:
    """Ask Linux for a SIGTERM when the watching parent dies, so that no child runs on unwatched."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        signal.raise_signal(signal.SIGTERM)

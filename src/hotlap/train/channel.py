"""What a child process says: events for the parent that watches it, talk for people."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


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

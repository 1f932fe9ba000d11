"""A verification that is asked to stop: no failure of anybody's, and the same command goes on."""

from hotlap.child import ChildEnd
from hotlap.errors import INTERRUPTED


class Stopped(Exception):
    """Somebody asked to stop, by SIGTERM or Ctrl-C. What was finished is kept."""


def require_not_stopped(end: ChildEnd) -> None:
    """
    Raises:
        Stopped: the child ended because this process was asked to stop.
        KeyboardInterrupt: for the second time.
    """
    if end.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    if end.was_asked_to_stop:
        raise Stopped

"""Stop signals, as a question the loop asks and, where an answer would come too late, as an interruption.

A first SIGTERM or Ctrl-C asks the slice to stop: the step under way is finished if it ends within the grace, less
the time a publish takes; else it is given up, which is safe because parameters and optimizer only change in
`apply`, outside of what may be given up. A second Ctrl-C exits at once; checkpoints appear by rename, so what was
published stays whole.
"""

import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

from hotlap import clock
from hotlap.errors import INTERRUPTED

_REPEAT_S = 0.5
EXIT_S = 0.5
"""Time to keep for what comes after the last save."""


class GivenUp(BaseException):
    """Raised in the middle of work that may be given up. Not an `Exception`, so that no library swallows it."""


class StopSignals:
    """Turns this process's stop signals into `is_requested`; install once, early, from the main thread."""

    def __init__(self, grace_s: float, tail_s: Callable[[], float] = lambda: EXIT_S) -> None:
        self._grace_s = grace_s
        self._tail_s = tail_s
        self._may_give_up = False
        self._deadline: clock.Deadline | None = None
        self._num_interrupts = 0

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGALRM, self._on_alarm)

    def measure_tail_with(self, tail_s: Callable[[], float]) -> None:
        """From now on keep `tail_s()` seconds of the grace for saving and leaving."""
        self._tail_s = tail_s

    @property
    def is_requested(self) -> bool:
        return self._deadline is not None

    @property
    def deadline(self) -> clock.Deadline | None:
        """When the grace ends, if a stop was asked for."""
        return self._deadline

    @contextmanager
    def may_give_up(self) -> Generator[None]:
        """Work in here may be cut short by `GivenUp` when a stop was asked for and the grace runs out."""
        if self._is_late():
            raise GivenUp
        self._may_give_up = True
        try:
            yield
        finally:
            self._may_give_up = False

    def _is_late(self) -> bool:
        return self._deadline is not None and self._deadline.remaining_s() <= self._tail_s()

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        self._num_interrupts += number == signal.SIGINT
        if self._num_interrupts > 1:
            os._exit(INTERRUPTED)
        if self._deadline is None:
            self._deadline = clock.Deadline(clock.monotonic_s() + self._grace_s)
            # Repeated, because an exception raised inside a destructor or a callback is swallowed.
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, self._grace_s - self._tail_s()), _REPEAT_S)

    def _on_alarm(self, _number: int, _frame: FrameType | None) -> None:
        if self._may_give_up:
            raise GivenUp

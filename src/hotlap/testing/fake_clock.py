"""A clock that tests move by hand, so that an hour of a machine's life takes a microsecond."""

import threading
from collections.abc import Callable


class FakeClock:
    """Seconds since 1970 that pass only when somebody sleeps on it."""

    def __init__(self, start_s: float = 1_800_000_000.0) -> None:
        self._now_s = start_s
        self._turn = threading.Lock()

    def now_s(self) -> float:
        return self._now_s

    def sleep_s(self, seconds: float) -> None:
        with self._turn:
            self._now_s += max(0.0, seconds)

    def skewed(self, by_s: float) -> Callable[[], float]:
        """The same clock as a machine sees it whose own is wrong by that much."""
        return lambda: self.now_s() + by_s

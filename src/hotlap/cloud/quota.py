"""How many requests may be sent: one bucket of tokens a process, the last of which only terminations may take."""

import re
import threading
from collections.abc import Callable, Mapping

from hotlap import clock

PER_MINUTE = 60
"""What an account may send, everything on it together; the provider's documented example."""

RESERVE = 10
"""Tokens that only terminations take, so that no amount of looking keeps a machine from being ended."""

_LEFT_THIS_MINUTE = re.compile(r'"?minute"?\s*;[^,]*?\br=(\d{1,9})')


class Quota:
    """Half of a minute's requests at once, then half of them a minute: no window of a minute holds more than all.

    Threads may share it. What other processes on the account use is seen in the answers (`learn`).
    """

    def __init__(
        self,
        now_s: Callable[[], float] = clock.monotonic_s,
        sleep_s: Callable[[float], None] = clock.sleep_s,
        per_minute: int = PER_MINUTE,
        reserve: int = RESERVE,
    ) -> None:
        self._now_s, self._sleep_s = now_s, sleep_s
        self._size = per_minute / 2
        self._per_s = per_minute / 2 / 60.0
        self._reserve = float(reserve)
        self._tokens = self._size
        self._at_s = now_s()
        self._turn = threading.Lock()

    def take(self, is_termination: bool = False) -> None:
        """Return when one more request may leave. A termination never waits: the server decides about it."""
        while (wait_s := self._try_take(is_termination)) > 0.0:
            self._sleep_s(wait_s)

    def _try_take(self, is_termination: bool) -> float:
        """Seconds until there may be a token; 0.0 with one taken."""
        with self._turn:
            now_s = self._now_s()
            self._tokens = min(self._size, self._tokens + (now_s - self._at_s) * self._per_s)
            self._at_s = now_s
            missing = 0.0 if is_termination else self._reserve + 1.0 - self._tokens
            # Below what a clock can tell apart nothing is missing, else the last wait would never end.
            if missing > 1e-6:
                return missing / self._per_s
            self._tokens = max(0.0, self._tokens - 1.0)
            return 0.0

    def learn(self, headers: Mapping[str, str]) -> None:
        """An answer tells what is left of the account's minute, whoever used the rest."""
        if found := _LEFT_THIS_MINUTE.search(headers.get("RateLimit", "")):
            with self._turn:
                self._tokens = min(self._tokens, float(found[1]))


SHARED = Quota()
"""Every client of this process draws from it."""

"""Where a slice's seconds went: phases that add up to its wall time, and the spread of its steps."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from hotlap import clock

PHASES = ("interpreter", "imports", "load", "data", "resume", "steps", "evaluation", "publish", "other")


class Timeline:
    """Seconds by phase since the operating system started this process. Phases do not nest."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._spent_s: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._spent_s["interpreter"] = clock.monotonic_s() - started_s
        self._steps_s: list[float] = []
        self._first_step_at_s: float | None = None

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        began_s = clock.monotonic_s()
        try:
            yield
        finally:
            self._spent_s[name] += clock.monotonic_s() - began_s

    @contextmanager
    def step(self) -> Generator[None]:
        """One finished step; one that raises counts as time, not as a step."""
        began_s = clock.monotonic_s()
        if self._first_step_at_s is None:
            self._first_step_at_s = began_s - self._started_s
        with self.phase("steps"):
            yield
        self._steps_s.append(clock.monotonic_s() - began_s)

    def elapsed_s(self) -> float:
        return clock.monotonic_s() - self._started_s

    def last_step_s(self) -> float:
        return self._steps_s[-1]

    def slowest_recent_step_s(self, num_recent: int = 20) -> float:
        """0 before the first step."""
        return max(self._steps_s[-num_recent:], default=0.0)

    def as_json(self) -> dict[str, Any]:
        """Phases in seconds, `other` being what no phase claimed; steps' p50 and p95; goodput, the share of the
        slice's wall time so far that was spent in finished steps."""
        elapsed_s = self.elapsed_s()
        phases_s = dict(self._spent_s)
        phases_s["other"] = max(0.0, elapsed_s - sum(self._spent_s.values()))
        ordered = sorted(self._steps_s)
        return {
            "elapsed_s": round(elapsed_s, 4),
            "phases_s": {name: round(spent_s, 4) for name, spent_s in phases_s.items()},
            "num_steps": len(ordered),
            "step_p50_s": _quantile(ordered, 0.50),
            "step_p95_s": _quantile(ordered, 0.95),
            "first_step_at_s": self._first_step_at_s,
            "goodput": round(sum(ordered) / elapsed_s, 4) if elapsed_s else 0.0,
        }


def _quantile(ordered: list[float], share: float) -> float | None:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) if ordered else None

"""What tests change in a slice process before it starts, by name: `patches:slow_steps`."""

import os
import time
from typing import Any

from hotlap import durable


def slow_steps() -> None:
    """Each step takes 0.2 s more."""
    from hotlap.train.step import Stepper

    forward_backward = Stepper.forward_backward

    def slowed(self: Stepper, step: int) -> Any:
        time.sleep(0.2)
        return forward_backward(self, step)

    Stepper.forward_backward = slowed  # type: ignore[method-assign]


def slower_disk() -> None:
    """Each sync takes 5 ms more."""
    durable.disk = _SlowDisk(5e-3)


class _SlowDisk(durable.Disk):
    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def sync(self, path: Any) -> None:
        time.sleep(self._delay_s)
        super().sync(path)


def phase_s(name: str) -> float:
    """A delay the test gave in the environment, in seconds."""
    return float(os.environ.get(f"TEST_{name.upper()}_S", "0"))

"""The order in which rows are trained: a pure function of (seed, step), so a resumed run reads on where it stopped."""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from hotlap.config import RunConfig
from hotlap.data.choose import permutation
from hotlap.errors import ConfigError


@dataclass(frozen=True)
class Order:
    """Which rows each step trains: the epochs' permutations one after another, cut into steps and at `total_rows`.

    Only the very last step may be smaller than the others; a step may reach into the next epoch.
    """

    seed: int
    num_rows: int
    rows_per_step: int
    num_steps: int
    total_rows: int
    tail_after: int | None = None
    """The steps after this one go `tail_passes` times over the rows of the first of them."""

    tail_passes: int = 1

    def source_of(self, step: int) -> int:
        """The step whose rows a step trains: its own, or the same of the tail's first pass."""
        if self.tail_after is None or step <= self.tail_after:
            return step
        return self.tail_after + 1 + (step - self.tail_after - 1) % self._steps_in_pass(self.tail_after)

    def is_repeated_after(self, step: int) -> bool:
        """Whether a later step trains the same rows as part of the tail."""
        if self.tail_after is None or step <= self.tail_after:
            return False
        return step + self._steps_in_pass(self.tail_after) <= self.num_steps

    @property
    def num_tail_rows(self) -> int:
        """Rows in one pass of the tail."""
        return 0 if self.tail_after is None else self.rows_per_step * self._steps_in_pass(self.tail_after)

    def _steps_in_pass(self, tail_after: int) -> int:
        return math.ceil((self.num_steps - tail_after) / self.tail_passes)

    def rows_of_step(self, step: int) -> npt.NDArray[np.int64]:
        """Row numbers of a step, counted from 1. Depends on nothing that was read before."""
        assert 1 <= step <= self.num_steps, step
        first = (self.source_of(step) - 1) * self.rows_per_step
        stop = min(first + self.rows_per_step, self.total_rows)
        pieces = [
            permutation(self.seed, epoch, self.num_rows)[
                max(first - epoch * self.num_rows, 0) : stop - epoch * self.num_rows
            ]
            for epoch in range(first // self.num_rows, (stop - 1) // self.num_rows + 1)
        ]
        return np.concatenate(pieces)


def plan_order(config: RunConfig, seed: int, num_rows: int) -> Order:
    """The run's order and its horizon: `train.max_steps` if given, else `train.epochs` times the rows.

    Raises:
        ConfigError: `techniques.staged` begins where the run is over.
    """
    rows_per_step = config.train.rows_per_step
    if config.train.max_steps is not None:
        num_steps = config.train.max_steps
        total_rows = num_steps * rows_per_step
    else:
        # The number as it was written: 0.1 of 30 rows is 3, and in binary a hair more.
        total_rows = math.ceil(Fraction(str(config.train.epochs)) * num_rows)
        num_steps = math.ceil(total_rows / rows_per_step)
    staged = config.techniques.staged
    if staged is None:
        return Order(seed, num_rows, rows_per_step, num_steps, total_rows)
    if staged.after_step >= num_steps:
        raise ConfigError(
            f"techniques.staged.after_step is {staged.after_step}, and the run has {num_steps} steps. Lower it, or "
            f"leave techniques.staged out."
        )
    return Order(seed, num_rows, rows_per_step, num_steps, total_rows, staged.after_step, staged.tail_passes)

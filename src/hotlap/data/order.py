"""The order in which rows are trained: a pure function of (seed, step), so a resumed run reads on where it stopped."""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from hotlap.config import RunConfig
from hotlap.data.choose import permutation


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

    def rows_of_step(self, step: int) -> npt.NDArray[np.int64]:
        """Row numbers of a step, counted from 1. Depends on nothing that was read before."""
        assert 1 <= step <= self.num_steps, step
        first = (step - 1) * self.rows_per_step
        stop = min(first + self.rows_per_step, self.total_rows)
        pieces = [
            permutation(self.seed, epoch, self.num_rows)[
                max(first - epoch * self.num_rows, 0) : stop - epoch * self.num_rows
            ]
            for epoch in range(first // self.num_rows, (stop - 1) // self.num_rows + 1)
        ]
        return np.concatenate(pieces)


def plan_order(config: RunConfig, seed: int, num_rows: int) -> Order:
    """The run's order and its horizon: `train.max_steps` if given, else `train.epochs` times the rows."""
    rows_per_step = config.train.rows_per_step
    if config.train.max_steps is not None:
        num_steps = config.train.max_steps
        return Order(seed, num_rows, rows_per_step, num_steps, num_steps * rows_per_step)
    # The number as it was written: 0.1 of 30 rows is 3, and in binary a hair more.
    total_rows = math.ceil(Fraction(str(config.train.epochs)) * num_rows)
    return Order(seed, num_rows, rows_per_step, math.ceil(total_rows / rows_per_step), total_rows)

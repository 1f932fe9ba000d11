"""What a session on a rented machine costs, told before it is rented: trials a slice, slices, micro-dollars."""

import math
from dataclasses import dataclass

import numpy as np

from hotlap.errors import ConfigError
from hotlap.research import acceptance, simulate
from hotlap.research.history import History
from hotlap.research.space import StudyConfig

_REPEATS = 2000


@dataclass(frozen=True)
class Price:
    """A session of so many changes: what is expected, and what it is at most."""

    num_trials: int
    num_runs: int
    """Baseline, changes, second runs and sentinels."""
    trial_s: float
    num_slices: int
    usd_micros: int
    most_slices: int
    """If every change needs its second run and every run is disturbed once and made again."""
    most_usd_micros: int

    @property
    def words(self) -> str:
        return (
            f"A full {self.num_trials}-iteration session costs about ${self.usd_micros / 1e6:.4f}: {self.num_runs} "
            f"runs of {self.trial_s:.0f} s in {self.num_slices} slices. At most: {self.most_slices} slices, "
            f"${self.most_usd_micros / 1e6:.4f}."
        )


def price_of(
    study: StudyConfig,
    history: History | None,
    num_trials: int,
    usd_micros_per_hour: int,
    slice_s: float,
    boot_s: float,
) -> Price:
    """The price of a session in slices of `slice_s`, each of which is paid for from its boot, which takes `boot_s`.

    Raises:
        ConfigError: not one trial fits a slice.
    """
    trial_s = min(simulate.seconds_of_a_trial(study, history), study.deadline_s)
    # As `--minutes` does: a trial is started while the longest one still ends in time.
    room_s = slice_s - boot_s - study.deadline_s
    if room_s < 0:
        raise ConfigError(
            f"A trial may take {study.deadline_s:.0f} s, and a slice of {slice_s:.0f} s has {slice_s - boot_s:.0f} s "
            f"after its start. Lower study.budget_s or study.setup_s."
        )
    rule = acceptance.RULES[study.acceptance]
    runs_each = simulate.anchor_moves(rule, 0.0, 4, _REPEATS, np.random.default_rng(0)).runs
    first = study.num_baseline_runs if history is None else max(0, study.num_baseline_runs - history.num_ended)

    def runs_of(runs_for_one: float, times: int) -> int:
        changes = num_trials * runs_for_one
        return times * (first + math.ceil(changes + changes / study.sentinel_every))

    def slices_of(num_runs: int, seconds_each: float) -> int:
        each = study.workers * (1 + math.floor(room_s / seconds_each))
        return max(1, math.ceil(num_runs / each))

    most = 2.0 if rule.confirm is not None else 1.0
    num_runs = runs_of(runs_each, 1)
    num_slices, most_slices = slices_of(num_runs, trial_s), slices_of(runs_of(most, 2), study.deadline_s)
    slice_micros = math.ceil(usd_micros_per_hour * slice_s / 3600)
    return Price(
        num_trials, num_runs, trial_s, num_slices, num_slices * slice_micros, most_slices, most_slices * slice_micros
    )

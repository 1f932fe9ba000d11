"""How much faster than the baseline, with an interval, and by what: fewer tokens, more tokens/s, smaller fixed cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hotlap.speedrun.compare import welch_interval


@dataclass(frozen=True)
class Work:
    """What a run does in its steps; the rest of its time is fixed cost."""

    num_tokens: float
    steps_s: float
    is_measured: bool
    """By hotlap's own trainer. Otherwise its author says so: a stranger's program measures nothing."""


@dataclass(frozen=True)
class Factors:
    """A ratio of two times as a product. The baseline takes three steps to become the other, in this order: it trains
    on as many tokens as that, then as fast, then with as little around. Each factor is what one step saves; in another
    order they would be others, with the same product."""

    tokens: float
    speed: float
    fixed: float


def factors(baseline_s: float, baseline: Work, time_s: float, work: Work) -> Factors | None:
    """None where more time is said to have gone into steps than there was."""
    fixed_s = baseline_s - baseline.steps_s
    if fixed_s < 0 or time_s < work.steps_s:
        return None
    with_its_tokens_s = fixed_s + work.num_tokens * baseline.steps_s / baseline.num_tokens
    with_its_speed_s = fixed_s + work.steps_s
    return Factors(baseline_s / with_its_tokens_s, with_its_tokens_s / with_its_speed_s, with_its_speed_s / time_s)


def ratio_interval(baseline: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the ratio of two geometric means, by Welch's test of the logarithms."""
    low, high = welch_interval(*([math.log(value) for value in values] for values in (baseline, times)))
    return math.exp(low), math.exp(high)

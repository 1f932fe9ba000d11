"""The verdict of a verification and the order of records: pure functions of what was measured.

A verdict is about a recipe, not about the runs that were lucky. It may be given at the track's looks only (3, 5 and 8
runs, say), and each look gets an equal share of `alpha`, so that asking for more runs cannot buy a pass. Times are
compared with Welch's test: what does not differ at 5 % shares a rank.

Sources: Student's t and Welch (1947) as in any textbook; the incomplete beta function by its continued fraction
(Abramowitz and Stegun 26.5.8), evaluated by Lentz's method.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["pass", "fail", "undecided"]
TIE_P = 0.05
_TINY = 1e-300


@dataclass(frozen=True)
class RunFacts:
    """What a verdict needs of one finished run."""

    score: float | None
    """None: there is no adapter that could be scored; `complaints` say why."""
    num_rows: int
    is_fresh: bool
    """Whether its test rows were drawn for this run alone."""
    wall_s: float
    complaints: tuple[str, ...]
    """Rules that it broke. Any one fails the submission."""
    adapter_sha256: str | None


@dataclass(frozen=True)
class Decision:
    verdict: Verdict
    reasons: tuple[str, ...]
    p_value: float | None
    """Chance of scores this good if the recipe's true mean were just at the target."""
    alpha_per_look: float
    more_runs: int
    """How many more until the next look, when undecided; 0 when there is none."""


def decide(
    runs: Sequence[RunFacts], target: float, higher_is_better: bool, looks: Sequence[int], alpha: float
) -> Decision:
    """`pass`: every run cleared the target and the mean does so with confidence. `fail`: a rule was broken, or a run
    missed the target, which the public contest demands of all. `undecided`: more runs are needed, or none is left."""
    share = alpha / len(looks)
    if broken := [f"run {number}: {why}" for number, run in enumerate(runs, 1) for why in run.complaints]:
        return Decision("fail", tuple(broken), None, share, 0)
    scores = [run.score for run in runs if run.score is not None]
    sign = 1.0 if higher_is_better else -1.0
    missed = [
        f"run {n}: {score:.4f} misses {target:g}" for n, score in enumerate(scores, 1) if sign * (score - target) < 0
    ]
    if missed:
        return Decision("fail", tuple(missed), None, share, 0)
    left = [look for look in looks if look > len(runs)]
    more = left[0] - len(runs) if left else 0
    if len(runs) not in looks:
        why = f"{len(runs)} runs; a verdict is given at {', '.join(map(str, looks))}"
        return Decision("undecided", (why,), None, share, more)
    if len({run.adapter_sha256 for run in runs}) < len(runs):
        why = "two seeds gave the same adapter: these are not independent runs"
        return Decision("undecided", (why,), None, share, more)
    p_value = p_at_target(runs, scores, target, sign, higher_is_better)
    if p_value <= share:
        return Decision("pass", (f"p = {p_value:.2g}, at most {share:.3g}",), p_value, share, 0)
    end = "more runs may decide it" if more else "no look is left"
    return Decision("undecided", (f"p = {p_value:.2g}, above {share:.3g}; {end}",), p_value, share, more)


def p_at_target(runs: Sequence[RunFacts], scores: Sequence[float], target: float, sign: float, is_share: bool) -> float:
    """The larger of two: Student's t over the runs, and, where each run had rows of its own, the binomial tail of all
    their answers, which does not believe in a spread of zero."""
    p_value = t_test_p([sign * score for score in scores], sign * target)
    if is_share and all(run.is_fresh for run in runs):
        num_right = sum(round(score * run.num_rows) for score, run in zip(scores, runs, strict=True))
        p_value = max(p_value, binomial_tail(num_right, sum(run.num_rows for run in runs), target))
    return p_value


def t_test_p(values: Sequence[float], target: float) -> float:
    """One-sided: the chance of a mean this far above `target` if it were the true mean."""
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    if spread == 0.0:
        return 0.0 if mean > target else 1.0
    return t_tail((mean - target) / (spread / math.sqrt(len(values))), len(values) - 1)


def welch_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided: the chance of means this far apart if both came from one mean."""
    error, freedom = welch_error(first, second)
    gap = abs(statistics.fmean(first) - statistics.fmean(second))
    if error == 0.0:
        return 1.0 if gap == 0.0 else 0.0
    return 2 * t_tail(gap / error, freedom)


def welch_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the first mean less the second."""
    error, freedom = welch_error(first, second)
    gap = statistics.fmean(first) - statistics.fmean(second)
    half = t_quantile(0.025, freedom) * error if error else 0.0
    return gap - half, gap + half


def welch_error(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """The standard error of the difference of two means, and its degrees of freedom (0 where nothing varies)."""
    errors = [statistics.variance(values) / len(values) for values in (first, second)]
    if sum(errors) == 0.0:
        return 0.0, 0.0
    freedom = sum(errors) ** 2 / sum(e**2 / (len(v) - 1) for e, v in zip(errors, (first, second), strict=True))
    return math.sqrt(sum(errors)), freedom


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Student's interval of the mean."""
    mean = statistics.fmean(values)
    half = t_quantile((1 - confidence) / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def ranks(times: Sequence[Sequence[float]]) -> list[int]:
    """The rank of each list of times: fastest mean first; who does not differ from the first of a rank shares it."""
    order = sorted(range(len(times)), key=lambda index: statistics.fmean(times[index]))
    found = [0] * len(times)
    leader = None
    for position, index in enumerate(order):
        if leader is None or welch_p(times[leader], times[index]) < TIE_P:
            leader = index
            found[index] = position + 1
        else:
            found[index] = found[leader]
    return found


# --- distributions ---


def t_tail(t: float, freedom: float) -> float:
    """P(T >= t)."""
    half = incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t)) / 2
    return half if t >= 0 else 1 - half


def t_quantile(tail: float, freedom: float) -> float:
    """The t beyond which `tail` (below one half) lies."""
    low, high = 0.0, 1.0
    while t_tail(high, freedom) > tail:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, freedom) > tail else (low, middle)
    return high


def binomial_tail(num_right: int, num_rows: int, share: float) -> float:
    """P(X >= num_right)."""
    return 1.0 if num_right == 0 else incomplete_beta(num_right, num_rows - num_right + 1, share)


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function I_x(a, b)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    front = math.exp(log_front)
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1.0 - front * _beta_fraction(b, a, 1 - x) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    c, d = 1.0, 1.0 / _away_from_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / _away_from_zero(1 + term * d)
            c = _away_from_zero(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            return value
    raise ArithmeticError((a, b, x))


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY

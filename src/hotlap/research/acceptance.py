"""What is kept and what is proven: decisions about losses, lower being better, as functions of numbers.

Two questions with two answers. *Search*: may the anchor move, so that the next proposals start elsewhere? Two runs
decide; a wrong yes costs little. *Claim*: is a configuration better than the record? Pairs of fresh runs, made for
this question alone, decide at two looks with an error of 5 % in all (O'Brien and Fleming's bounds).

Noise is the run-to-run standard deviation of one configuration's loss, pooled over all that ran more than once and
drawn towards a prior that counts as four more runs.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from statistics import NormalDist, fmean
from typing import Any, Literal

RULE_VERSION = 1

PRIOR_RUNS = 4
PRIOR_RATIO = {"cpu": 0.003, "cuda": 0.0008}
"""The prior's standard deviation as a share of the baseline's loss."""

NOISIEST_RATIO = 0.015
"""Above this share of the loss the machine is too noisy to find anything."""

LOOKS = {4: 2.373, 8: 1.678}
"""Pairs at which a verification is looked at, and the normal quantile that its t must exceed."""

NUM_PAIRS = max(LOOKS)
SENTINELS_KEPT = 6
_DRIFT_SIGMAS = 2.5
_SIZE_DIFFERS = 0.01

Outcome = Literal["reject_screen", "confirm", "provisional", "reject_confirm", "tie_kept", "tie_swapped"]


@dataclass(frozen=True)
class Noise:
    """Run-to-run standard deviation, and how many runs' worth of knowledge it stands on."""

    s: float
    df: int


@dataclass(frozen=True)
class Rule:
    """When the anchor moves. `screen` and `confirm` are in standard errors of the difference judged."""

    name: Literal["two_run", "naive"]
    screen: float
    confirm: float | None
    """None: one run is enough."""


TWO_RUN = Rule("two_run", screen=0.5, confirm=1.0)
NAIVE = Rule("naive", screen=0.0, confirm=None)
RULES: Mapping[str, Rule] = {rule.name: rule for rule in (TWO_RUN, NAIVE)}


def parameters(rule: Rule) -> dict[str, Any]:
    """All numbers that decisions depend on, for a study's first row."""
    return {
        **asdict(rule),
        "looks": {str(pairs): z for pairs, z in LOOKS.items()},
        "prior": {"runs": PRIOR_RUNS, "ratio": dict(PRIOR_RATIO)},
        "noisiest_ratio": NOISIEST_RATIO,
        "sentinels_kept": SENTINELS_KEPT,
        "drift_sigmas": _DRIFT_SIGMAS,
    }


@dataclass(frozen=True)
class Judged:
    """A decision with what it was made from. `delta` is the gain, positive when the candidate is better."""

    outcome: Outcome
    delta: float
    se: float

    @property
    def moves_anchor(self) -> bool:
        return self.outcome in ("provisional", "tie_swapped")


def pooled_noise(groups: Iterable[Sequence[float]], prior_s: float) -> Noise:
    """The noise of a cell from the losses of each of its configurations."""
    squares, df = PRIOR_RUNS * prior_s**2, PRIOR_RUNS
    for values in groups:
        if len(values) > 1:
            mean = fmean(values)
            squares += sum((value - mean) ** 2 for value in values)
            df += len(values) - 1
    return Noise(math.sqrt(squares / df), df)


# --- search ---


def judge_screen(rule: Rule, incumbent: Sequence[float], first: float, s: float) -> Judged:
    """One run of the candidate against the incumbent's."""
    delta, se = fmean(incumbent) - first, s * math.sqrt(1 + 1 / len(incumbent))
    if rule.confirm is None:
        # The founding rule: below the record, which is the luckiest run, not the mean.
        delta = min(incumbent) - first
        return Judged("provisional" if delta > 0 else "reject_screen", delta, se)
    return Judged("confirm" if delta > rule.screen * se else "reject_screen", delta, se)


def judge_confirm(
    rule: Rule,
    incumbent: Sequence[float],
    runs: tuple[float, float],
    s: float,
    breaks_tie: Callable[[], bool] = lambda: False,
) -> Judged:
    """Two runs of the candidate against the incumbent's. `breaks_tie` is asked when they differ by less than their
    standard error: whether the candidate is to be preferred all the same."""
    assert rule.confirm is not None
    delta, se = fmean(incumbent) - fmean(runs), s * math.sqrt(1 / 2 + 1 / len(incumbent))
    if delta > rule.confirm * se:
        return Judged("provisional", delta, se)
    if abs(delta) >= se:
        return Judged("reject_confirm", delta, se)
    return Judged("tie_swapped" if breaks_tie() else "tie_kept", delta, se)


def prefers_candidate(params: tuple[int | None, int | None], expected_gain: float) -> bool:
    """Who has a tie. `params`: sizes of candidate and incumbent; the smaller one wins, and among equals the one that
    all past runs together speak for (docs/decisions/0040)."""
    own, other = params
    if own is not None and other is not None and abs(own - other) > _SIZE_DIFFERS * other:
        return own < other
    return expected_gain > 0


def has_drifted(earlier: Sequence[float], sentinels: Sequence[float], s: float) -> bool:
    """Whether the last two sentinels both lie far from the anchor's earlier runs, on the same side.

    The bound allows for the error of the earlier mean, which may be that of one run.
    """
    if len(sentinels) < 2 or not earlier:
        return False
    bound = _DRIFT_SIGMAS * s * math.sqrt(1 + 1 / len(earlier))
    away = [value - fmean(earlier) for value in sentinels[-2:]]
    return all(value > bound for value in away) or all(value < -bound for value in away)


# --- claim ---


@dataclass(frozen=True)
class Proof:
    """What the pairs of a verification say so far. `effect` is the mean gain, `low` to `high` its 90 % interval."""

    verdict: Literal["verified", "not_verified"] | None
    """None: another pair is needed."""
    num_pairs: int
    effect: float
    se: float
    t: float
    p: float
    low: float
    high: float
    passed_at: int | None
    """The look at which the bound was first exceeded."""


def judge_pairs(gains: Sequence[float], s: float) -> Proof:
    """The incumbent's loss minus the candidate's, pair by pair in the order in which they were run.

    A pass at the first look stands, and the remaining pairs are run for an effect that early stopping has not
    flattered.
    """
    passed_at = next((look for look in LOOKS if len(gains) >= look and _exceeds(gains[:look], s, LOOKS[look])), None)
    effect, se, df = _effect(gains, s)
    half = t_at(0.05, df) * se
    verdict = None
    if len(gains) >= NUM_PAIRS:
        verdict = "verified" if passed_at is not None else "not_verified"
    t = effect / se
    return Proof(verdict, len(gains), effect, se, t, t_tail(t, df), effect - half, effect + half, passed_at)


def _exceeds(gains: Sequence[float], s: float, z: float) -> bool:
    effect, se, df = _effect(gains, s)
    return effect / se > t_at(1 - NormalDist().cdf(z), df)


def _effect(gains: Sequence[float], s: float) -> tuple[float, float, int]:
    """Mean, its standard error, and the degrees of freedom. The prior: two runs' noise, as in `pooled_noise`."""
    mean, df = fmean(gains), PRIOR_RUNS + len(gains) - 1
    variance = (PRIOR_RUNS * 2 * s**2 + sum((gain - mean) ** 2 for gain in gains)) / df
    return mean, math.sqrt(variance / len(gains)), df


def order_of(pair: int) -> tuple[str, str]:
    """Which arm of a pair runs first: incumbent, candidate; candidate, incumbent; and so on, so that drift cancels."""
    return ("I", "C") if pair % 2 == 0 else ("C", "I")


# --- Student's t, whole degrees of freedom ---


def t_tail(t: float, df: int) -> float:
    """P(T > t). Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(abs(t) / math.sqrt(df))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = df % 2 == 1
    term = cosine if is_odd else 1.0
    total = 0.0
    for step in range(df // 2):
        total += term
        term *= cosine**2 * ((2 * step + 2) / (2 * step + 3) if is_odd else (2 * step + 1) / (2 * step + 2))
    inside = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
    return (1 - inside) / 2 if t > 0 else (1 + inside) / 2


@lru_cache(maxsize=1024)
def t_at(tail: float, df: int) -> float:
    """The t above which `tail` lies, for tails below a half."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, df) > tail else (low, middle)
    return (low + high) / 2

"""How often a study's rules keep what is nothing and find what is something: a simulation with no code of theirs.

    python -m benchmarks.acceptance [--cases 100000]      the rules alone, written down anew: seconds
    python -m benchmarks.acceptance --searches 40         whole simulated searches by the real plan, ties included

Losses are in units of the true noise of one run. `prior` is what a study takes that noise for before it has seen any:
0.3 % of the loss on a processor. With a prior, the noise is estimated as a study does it, from the six runs of a
baseline; without one it is known.
"""

import argparse
import json
import math
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from hotlap.research import acceptance, simulate
from hotlap.research.space import StudyConfig

Array = NDArray[np.float64]

GAINS = (-1.0, 0.0, 0.5, 1.0, 2.0, 3.0)
PRIORS = (None, 1.0, 0.25, 0.5, 2.0, 4.0)
NUM_BASELINE, PRIOR_RUNS, NUM_PAIRS = 6, 4, 8
BOUNDS = {4: 0.00882, 8: 0.04667}
"""Tails of the normal distribution above 2.373 and 1.678, the looks of O'Brien and Fleming."""


def noise_of(runs_CN: Array, prior: float | None) -> Array:
    """Estimates (C, 1) of the noise, from N runs of one configuration in each of C cases."""
    if prior is None:
        return np.ones((len(runs_CN), 1))
    squares = runs_CN.var(axis=1, keepdims=True) * runs_CN.shape[1]
    return np.sqrt((PRIOR_RUNS * prior**2 + squares) / (PRIOR_RUNS + runs_CN.shape[1] - 1))


def search(gain: float, num_incumbent: int, prior: float | None, cases: int, source: np.random.Generator) -> Array:
    """Shares of candidates that get a second run, that move the anchor, and that end in a tie instead."""
    incumbent = source.standard_normal((cases, num_incumbent))
    s = noise_of(source.standard_normal((cases, NUM_BASELINE)), prior)[:, 0]
    first, second = source.standard_normal((2, cases)) - gain
    better = incumbent.mean(axis=1) - first > 0.5 * s * math.sqrt(1 + 1 / num_incumbent)
    delta, se = incumbent.mean(axis=1) - (first + second) / 2, s * math.sqrt(1 / 2 + 1 / num_incumbent)
    return np.array([better.mean(), (better & (delta > se)).mean(), (better & (abs(delta) < se)).mean()])


def verification(gain: float, prior: float | None, drift: float, cases: int, source: np.random.Generator) -> float:
    """Share of claims that are proven."""
    losses = source.standard_normal((cases, 2 * NUM_PAIRS)) + moods(drift, cases, source)
    ahead = losses[:, 0::2] - losses[:, 1::2]
    gains = gain + ahead * np.tile([1.0, -1.0], NUM_PAIRS // 2)  # ICCI
    s = noise_of(source.standard_normal((cases, NUM_BASELINE)), prior)
    passed = np.zeros(cases, dtype=bool)
    for look, tail in BOUNDS.items():
        own, df = gains[:, :look], PRIOR_RUNS + look - 1
        squares = own.var(axis=1) * look
        se = np.sqrt((PRIOR_RUNS * 2 * s[:, 0] ** 2 + squares) / df / look)
        passed |= own.mean(axis=1) / se > acceptance.t_at(tail, df)
    return float(passed.mean())


def moods(drift: float, cases: int, source: np.random.Generator) -> Array:
    """A machine's slow changes from run to run, of which nine tenths are left one run later."""
    mood = drift * source.standard_normal((cases, 1))
    steps = [mood]
    for _ in range(2 * NUM_PAIRS - 1):
        mood = 0.9 * mood + drift * math.sqrt(1 - 0.81) * source.standard_normal((cases, 1))
        steps.append(mood)
    return np.concatenate(steps, axis=1)


def rules(cases: int) -> dict[str, object]:
    source = np.random.default_rng(112)
    found: dict[str, object] = {"cases": cases, "largest_se": round(0.5 / math.sqrt(cases), 4)}
    found["anchor moves, four runs of it"] = {
        f"gain {gain:g}": named(search(gain, 4, None, cases, source)) for gain in GAINS
    }
    found["anchor moves by nothing"] = {
        f"{runs} runs of it, prior {prior or 'not needed'}": named(search(0.0, runs, prior, cases, source))
        for runs in (1, 2, 4, 6)
        for prior in PRIORS
    }
    found["proven, noise known"] = {
        f"gain {gain:g}, drift {drift:g}": round(verification(gain, None, drift, cases, source), 4)
        for gain in GAINS[1:]
        for drift in (0.0, 1.0)
    }
    found["nothing is proven, noise estimated"] = {
        f"prior {prior:g}": round(verification(0.0, prior, 0.0, cases, source), 4) for prior in PRIORS[1:] if prior
    }
    return found


def named(shares: Array) -> dict[str, float]:
    return dict(zip(("second run", "moved", "tied"), (round(float(share), 4) for share in shares), strict=True))


def searches(count: int) -> dict[str, object]:
    """Whole searches of 100 runs by the real plan, where one proposal in three is a placebo: what becomes of these."""
    found: dict[str, object] = {}
    for proposer in ("gp1", "random1"):
        study = StudyConfig(name=proposer, proposer=proposer, baseline_runs=NUM_BASELINE, placebo_every=3)
        outcomes: Counter[str] = Counter()
        for seed in range(count):
            history = simulate.search(study, simulate.draw_bowl(np.random.default_rng(seed)), 100, seed)
            outcomes.update(row["outcome"] for row in history.decisions if row["placebo"])
        judged = outcomes.total() - outcomes["not_judged"]
        moved = outcomes["provisional"] / judged
        found[proposer] = {
            "placebos": judged,
            **{outcome: round(num / judged, 4) for outcome, num in sorted(outcomes.items())},
            "se of provisional": round(math.sqrt(moved * (1 - moved) / judged), 4),
        }
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--searches", type=int)
    given = parser.parse_args()
    print(json.dumps(searches(given.searches) if given.searches else rules(given.cases), indent=1))

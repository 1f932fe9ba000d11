"""Proposers against each other on simulated searches: `python -m benchmarks.search [--repeats N]`.

Regret is the true loss of the anchor above the optimum, in standard deviations of one run, after so many runs of every
kind (baseline, repeats, sentinels and placebos count). Every repeat draws a bowl of its own, the same for all.
"""

import argparse
import json
import sys
import time

import numpy as np

from hotlap.research import simulate
from hotlap.research.space import StudyConfig

CHECKPOINTS = (12, 40, 100)
STUDIES = {
    "gp1": StudyConfig(name="gp1", proposer="gp1", baseline_runs=2),
    "random1": StudyConfig(name="random1", proposer="random1", baseline_runs=2),
    "random1 naive": StudyConfig(name="naive", proposer="random1", acceptance="naive"),
}


def main(num_repeats: int) -> None:
    regrets: dict[str, np.ndarray] = {}
    for name, study in STUDIES.items():
        began_s = time.monotonic()
        rows = [
            simulate.search_regrets(study, simulate.draw_bowl(np.random.default_rng(seed)), CHECKPOINTS, seed)
            for seed in range(num_repeats)
        ]
        regrets[name] = np.array(rows)
        print(f"{name}: {num_repeats} searches in {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    report = {
        name: {
            str(runs): {"mean": round(float(mean), 2), "se": round(float(sd) / num_repeats**0.5, 2)}
            for runs, mean, sd in zip(CHECKPOINTS, table.mean(axis=0), table.std(axis=0, ddof=1), strict=True)
        }
        for name, table in regrets.items()
    }
    ratios = {
        other: {
            str(runs): interval_of_ratio(regrets["gp1"][:, place], regrets[other][:, place])
            for place, runs in enumerate(CHECKPOINTS)
        }
        for other in ("random1", "random1 naive")
    }
    print(json.dumps({"repeats": num_repeats, "regret": report, "gp1 over": ratios}, indent=1))


def interval_of_ratio(ours: np.ndarray, theirs: np.ndarray) -> list[float]:
    """Ratio of the means with its 95 % interval: 2,000 bootstrap draws of the paired repeats."""
    source = np.random.default_rng(0)
    draws = source.integers(len(ours), size=(2000, len(ours)))
    ratios = ours[draws].mean(axis=1) / theirs[draws].mean(axis=1)
    return [round(float(value), 2) for value in (ours.mean() / theirs.mean(), *np.quantile(ratios, [0.025, 0.975]))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    main(parser.parse_args().repeats)

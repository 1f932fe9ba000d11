"""Proposers against each other on simulated searches: `python -m benchmarks.search [--repeats N] [--also tpe,cma]`.

`--also` adds Optuna's samplers, asked in this process.

Regret is the true loss of the anchor above the optimum, in standard deviations of one run, after so many runs of every
kind (baseline, repeats, sentinels and placebos count). Every repeat draws a bowl of its own, the same for all.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence

import numpy as np

from hotlap.research import asking, proposer, simulate
from hotlap.research.acceptance import Noise
from hotlap.research.history import History
from hotlap.research.space import StudyConfig

CHECKPOINTS = (12, 40, 100)
STUDIES = {
    "gp1": StudyConfig(name="gp1", proposer="gp1", baseline_runs=2),
    "random1": StudyConfig(name="random1", proposer="random1", baseline_runs=2),
    "random1 naive": StudyConfig(name="naive", proposer="random1", acceptance="naive"),
}


def main(num_repeats: int, also: Sequence[str]) -> None:
    regrets: dict[str, np.ndarray] = {}
    studies = {**STUDIES, **{name: StudyConfig(name=name, proposer=name, baseline_runs=2) for name in also}}
    for name, study in studies.items():
        began_s = time.monotonic()
        propose = optuna_proposal if name in also else proposer.propose
        rows = [
            simulate.search_regrets(study, simulate.draw_bowl(np.random.default_rng(seed)), CHECKPOINTS, seed, propose)
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
        for other in regrets
        if other != "gp1"
    }
    print(json.dumps({"repeats": num_repeats, "regret": report, "gp1 over": ratios}, indent=1))


def optuna_proposal(history: History, noise: Noise, source: random.Random) -> proposer.Proposal | None:
    """What the command `ask_optuna` answers, without a process for each."""
    import optuna

    from hotlap.research import ask_optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    kind, anchor = history.study.proposer, history.anchor.config
    answer = ask_optuna.answer(kind, asking.question(history, noise, source.getrandbits(31)))
    return proposer.proposal(anchor, {**anchor, answer["axis"]: answer["value"]}, kind) if answer["axis"] else None


def interval_of_ratio(ours: np.ndarray, theirs: np.ndarray) -> list[float]:
    """Ratio of the means with its 95 % interval: 2,000 bootstrap draws of the paired repeats."""
    source = np.random.default_rng(0)
    draws = source.integers(len(ours), size=(2000, len(ours)))
    ratios = ours[draws].mean(axis=1) / theirs[draws].mean(axis=1)
    return [round(float(value), 2) for value in (ours.mean() / theirs.mean(), *np.quantile(ratios, [0.025, 0.975]))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--also", type=lambda text: text.split(","), default=[])
    given = parser.parse_args()
    main(given.repeats, given.also)

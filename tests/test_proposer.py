"""Proposals and what they are drawn from: the Gaussian process against closed forms, one axis at a time, no repeats."""

import math
import random
from typing import Any

import numpy as np
import pytest

from hotlap.research import proposer, simulate
from hotlap.research.acceptance import Noise
from hotlap.research.history import History
from hotlap.research.space import StudyConfig
from hotlap.research.surrogate import Evidence, Surrogate, expected_improvement, feasibility


def matern(distance: float, length: float) -> float:
    root = math.sqrt(5) * distance / length
    return (1 + root + root**2 / 3) * math.exp(-root)


def test_posterior_of_two_points_by_hand() -> None:
    """Solved with Cramer's rule for whichever length and signal the fit chose."""
    points, losses, s = np.array([[0.0], [1.0]]), np.array([2.0, 3.0]), 0.5
    surrogate = Surrogate(Evidence(points, losses, np.array([1.0, 4.0]), np.zeros((0, 1))), s, np.array([0.0]))
    fit = surrogate._fitted  # pyright: ignore[reportPrivateUsage]
    a, d = fit.signal + s**2, fit.signal + s**2 / 4
    b = fit.signal * matern(1.0, fit.length)
    det = a * d - b * b
    inverse = np.array([[d, -b], [-b, a]]) / det
    mean = float(np.sum(inverse @ losses) / np.sum(inverse))
    here = fit.signal * np.array([matern(0.25, fit.length), matern(0.75, fit.length)])
    expected = mean + here @ inverse @ (losses - mean)
    variance = fit.signal - here @ inverse @ here
    found, sd = surrogate.predict(np.array([[0.25]]))
    assert found[0] == pytest.approx(expected) and sd[0] == pytest.approx(math.sqrt(variance))


def test_expected_improvement_by_integration() -> None:
    grid = np.linspace(-12, 12, 200_001)
    density = np.exp(-0.5 * grid**2) / math.sqrt(2 * math.pi)
    for mean, sd, best in ((1.0, 0.5, 1.2), (2.0, 0.3, 1.0), (0.0, 1.0, 0.0)):
        gains = np.maximum(best - (mean + sd * grid), 0.0)
        expected = float(np.sum(gains * density) * (grid[1] - grid[0]))
        found = expected_improvement(np.array([mean]), np.array([sd]), best)[0]
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_failures_repel_and_do_not_shift_the_scale() -> None:
    points, losses = np.array([[0.0], [0.2]]), np.array([2.0, 1.9])
    evidence = Evidence(points, losses, np.ones(2), np.array([[0.6]]))
    chance = feasibility(np.array([[0.1], [0.6]]), evidence)
    assert chance[0] > 0.9 and chance[1] < 0.6
    mean, _ = Surrogate(evidence, 0.05, points[0]).predict(np.array([[0.6]]))
    assert 1.9 < mean[0] < 2.2, "worst valid plus two standard deviations, never a huge penalty"


def searched(kind: str, num_runs: int = 40, placebo_every: int = 10, seed: int = 1) -> tuple[History, list[Any]]:
    """A simulated search, and the rows of its proposals."""
    bowl = simulate.draw_bowl(np.random.default_rng(seed))
    study = StudyConfig(name="s", proposer=kind, baseline_runs=2, placebo_every=placebo_every)  # type: ignore[arg-type]
    history = simulate.search(study, bowl, num_runs, seed)
    return history, [candidate.first for candidate in history.candidates.values()]


@pytest.mark.parametrize("kind", ["gp1", "random1", "sweep1"])
def test_one_axis_changes_and_nothing_comes_twice(kind: str) -> None:
    history, rows = searched(kind)
    assert len(rows) >= 12
    placebos = {row["proposal"] for row in history.decisions if row["placebo"]}
    names = [row["config_hash"] for row in rows if row["proposal"] not in placebos]
    assert len(set(names)) == len(names)
    for row in rows:
        parent = history.anchor_named(row["parent_hash"]).config
        assert [axis for axis in parent if parent[axis] != row["config"][axis]] == [row["axis"]]
        if kind != "sweep1":
            axis = history.space.axis(row["axis"])
            assert abs(axis.unit(row["new"]) - axis.unit(row["old"])) <= proposer.REACH + 0.01


def test_predictions_are_written_before_the_run_and_hold() -> None:
    """The actual loss lies within two predicted standard deviations, noise included, most of the time."""
    hits, total = 0, 0
    for seed in range(4):
        history, rows = searched("gp1", seed=seed)
        s = history.noise().s
        placebos = {row["proposal"] for row in history.decisions if row["placebo"]}
        for candidate, row in zip(history.candidates.values(), rows, strict=True):
            if candidate.number in placebos or not candidate.losses:
                continue
            spread = math.hypot(row["proposer"]["sd"], s)
            hits += abs(candidate.losses[0] - row["proposer"]["mu"]) < 2 * spread
            total += 1
    assert total > 60 and hits / total > 0.75


def test_placebos_are_one_in_so_many_and_not_foreseeable() -> None:
    for secret in (b"a", b"b", b"c"):
        flags = [proposer.is_placebo(secret, number, 12) for number in range(1200)]
        assert all(sum(flags[start : start + 12]) == 1 for start in range(0, 1200, 12))
    places = {tuple(proposer.is_placebo(bytes([key]), number, 12) for number in range(12)) for key in range(60)}
    assert len(places) == 12


def test_gp1_proposes_the_same_from_the_same_history() -> None:
    history, _ = searched("gp1", 20)
    noise = Noise(history.noise().s, 10)
    first = proposer.propose(history, noise, random.Random(1))
    assert first == proposer.propose(history, noise, random.Random(2))


@pytest.mark.long
def test_gp1_beats_random1_on_the_bowl() -> None:
    """Regret after 60 runs, mean of 12 bowls; benchmarks/search.py measures it well."""
    regrets = {
        kind: np.mean(
            [
                simulate.search_regrets(
                    StudyConfig(name="s", proposer=kind, baseline_runs=2),  # type: ignore[arg-type]
                    simulate.draw_bowl(np.random.default_rng(seed)),
                    [60],
                    seed,
                )
                for seed in range(12)
            ]
        )
        for kind in ("gp1", "random1")
    }
    assert regrets["gp1"] < 0.75 * regrets["random1"]

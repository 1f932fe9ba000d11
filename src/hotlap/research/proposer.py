"""What to try next: the anchor with exactly one axis changed.

`gp1` asks a small Gaussian process over all past runs where the expected improvement is largest. `random1` changes a
random axis at random, and `sweep1` goes through every axis in turn. None of them proposes what was tried already; a
move that was rejected comes back only with another anchor, which is another configuration.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotlap.research import seeds
from hotlap.research.acceptance import Noise
from hotlap.research.history import FAILED, Candidate, History, loss_of
from hotlap.research.space import Settings, Space, Value, config_hash
from hotlap.research.surrogate import Array, Evidence, Surrogate, expected_improvement, feasibility

VERSION = 1
REACH = 0.35
"""The farthest a change may go, as a share of an axis."""

_POINTS_EACH_SIDE = 6
_SWEEP_POINTS = 4
_RANDOM_TRIES = 200
_LAST_RESORT = 1.0

_WEIGHTS = {"lr": 1.5, "batch_size": 1.2, "width": 1.2, "depth": 1.2, "rank": 1.2}
"""How much an axis is expected to matter, before anything has run; 1 for all others."""


@dataclass(frozen=True)
class Proposal:
    """A change of one axis. `prediction` is what the proposer expects, written down before the run."""

    axis: str
    old: Value
    new: Value
    config: Settings
    prediction: dict[str, Any]


def propose(history: History, noise: Noise, source: random.Random) -> Proposal | None:
    """The next change of the anchor, or None when everything near it was tried."""
    return PROPOSERS[history.study.proposer](history, noise, source)


def is_placebo(secret: bytes, number: int, every: int) -> bool:
    """Whether a proposal is secretly no change: one in every so many, at a place nobody can foresee."""
    return number % every == seeds.number(secret, "placebo", number // every) % every


def expected_gain(history: History, candidate: Candidate, s: float) -> float:
    """How much lower than the anchor's a candidate's loss is expected to be after its own runs, by all past runs
    together; 0 from proposers that have no such expectation."""
    if history.study.proposer != "gp1":
        return 0.0
    center, place = _place(history.space, history.anchor.config), _place(history.space, candidate.first["config"])
    evidence, losses = evidence_of(history), candidate.losses
    loss, count = np.array([sum(losses) / len(losses)]), float(len(losses))
    surrogate = Surrogate(evidence.with_runs(place[None, :], loss, count), s, center)
    mean, _ = surrogate.predict(np.array([center, place]))
    return float(mean[0] - mean[1])


# --- the three ---


def _random1(history: History, noise: Noise, source: random.Random) -> Proposal | None:
    space, anchor = history.space, history.anchor.config
    tried = _tried(history)
    for _ in range(_RANDOM_TRIES):
        axis = source.choice(space.axes)
        if axis.is_ordered:
            new = axis.at(axis.unit(anchor[axis.name]) + source.uniform(-REACH, REACH))
        else:
            new = source.choice(axis.choices or ())
        config = {**anchor, axis.name: new}
        if new != anchor[axis.name] and config_hash(config) not in tried:
            return _proposal(anchor, axis.name, new, "random1")
    return None


def _sweep1(history: History, noise: Noise, source: random.Random) -> Proposal | None:
    anchor, tried = history.anchor.config, _tried(history)
    for axis in history.space.axes:
        count = len(axis.choices) if axis.choices is not None else _SWEEP_POINTS + 1
        for new in dict.fromkeys(axis.at(place / (count - 1)) for place in range(count)):
            config = {**anchor, axis.name: new}
            if new != anchor[axis.name] and config_hash(config) not in tried:
                return _proposal(anchor, axis.name, new, "sweep1")
    return None


def _gp1(history: History, noise: Noise, source: random.Random) -> Proposal | None:
    space, anchor = history.space, history.anchor.config
    moves = _moves(space, anchor, _tried(history), REACH) or _moves(space, anchor, _tried(history), _LAST_RESORT)
    if not moves:
        return None
    evidence = evidence_of(history)
    center = _place(space, anchor)
    surrogate = Surrogate(evidence, noise.s, center)
    in_flight = [candidate.first["config"] for candidate in history.in_progress]
    if in_flight:  # as if they had come out as expected, or all would go to one place
        there = np.array([_place(space, config) for config in in_flight])
        evidence = evidence.with_runs(there, surrogate.predict(there)[0], 1.0)
        surrogate = Surrogate(evidence, noise.s, center)
    points = np.array([_place(space, {**anchor, name: new}) for name, new in moves])
    mean, sd = surrogate.predict(points)
    best = float(surrogate.predict(center[None, :])[0][0])
    gain, chance = expected_improvement(mean, sd, best), feasibility(points, evidence)
    chosen = int(np.argmax(gain * chance))
    name, new = moves[chosen]
    return _proposal(
        anchor,
        name,
        new,
        "gp1",
        mu=float(mean[chosen]),
        sd=float(sd[chosen]),
        ei=float(gain[chosen]),
        p_feasible=float(chance[chosen]),
    )


PROPOSERS: Mapping[str, Callable[[History, Noise, random.Random], Proposal | None]] = {
    "gp1": _gp1,
    "random1": _random1,
    "sweep1": _sweep1,
}


def _proposal(
    anchor: Settings,
    axis: str,
    new: Value,
    name: str,
    mu: float | None = None,
    sd: float | None = None,
    ei: float | None = None,
    p_feasible: float | None = None,
) -> Proposal:
    prediction = {"name": name, "version": VERSION, "mu": mu, "sd": sd, "ei": ei, "p_feasible": p_feasible}
    return Proposal(axis, anchor[axis], new, {**anchor, axis: new}, prediction)


# --- what they look at ---


def _tried(history: History) -> set[str]:
    proposed = {
        candidate.first["config_hash"]
        for candidate in history.candidates.values()
        if candidate.decision is None or not candidate.decision["placebo"]
    }
    return proposed | {anchor.config_hash for anchor in history.anchors}


def _moves(space: Space, anchor: Settings, tried: set[str], reach: float) -> list[tuple[str, Value]]:
    """Every axis with every value that it may be changed to, the larger ones first."""
    return [
        (axis.name, new)
        for axis in space.axes
        for new in reversed(axis.near(anchor[axis.name], reach, _POINTS_EACH_SIDE))
        if config_hash({**anchor, axis.name: new}) not in tried
    ]


def evidence_of(history: History) -> Evidence:
    """All runs that tell something, by the configuration that really ran."""
    space, groups = history.space, list(history.groups.values())
    points = [_place(space, runs[0].config) for runs in groups]
    losses = [sum(loss_of(run.row) for run in runs) / len(runs) for runs in groups]
    failed = [_place(space, run.config) for run in history.runs if run.status in FAILED]
    shape = (len(failed), len(points[0]))
    counts = [float(len(runs)) for runs in groups]
    return Evidence(np.array(points), np.array(losses), np.array(counts), np.array(failed).reshape(shape))


def _place(space: Space, config: Settings) -> Array:
    """A configuration's coordinates (D,), those of weighty axes drawn apart."""
    weights = [
        _WEIGHTS.get(axis.name, 1.0)
        for axis in space.axes
        for _ in range(1 if axis.is_ordered else len(axis.choices or ()))
    ]
    return np.array(space.encode(config)) * np.array(weights)

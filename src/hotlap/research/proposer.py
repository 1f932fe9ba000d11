"""What to try next: the anchor with exactly one axis changed.

`gp1` asks a small Gaussian process over all past runs where the expected improvement is largest. `random1` changes a
random axis at random, and `sweep1` goes through every axis in turn. None of them proposes what was tried already; a
move that was rejected comes back only with another anchor, which is another configuration. Only when a dozen of its
proposals in a row have failed does `gp1` once change two axes that are known to hang together.

Commands that are asked instead are in `asking.py`.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from hotlap.research import seeds
from hotlap.research.acceptance import Noise
from hotlap.research.history import FAILED, Candidate, History, loss_of
from hotlap.research.space import Change, Settings, Space, config_hash
from hotlap.research.surrogate import Array, Evidence, Surrogate, expected_improvement, feasibility

VERSION = 2
REACH = 0.35
"""The farthest a change may go, as a share of an axis."""

JUMP_AFTER = 12
"""So many proposals in a row must have failed before two axes change at once."""

COUPLED = (
    *(("lr", "batch_size"), ("depth", "width"), ("lr", "warmdown"), ("lr", "weight_decay")),
    *(("lr", "rank"), ("lr", "grad_accumulation")),
)
"""Axes whose best values are known to move together."""

_POINTS_EACH_SIDE = 6
_SWEEP_POINTS = 4
_RANDOM_TRIES = 200
_RESPONSE_POINTS = 24
_LAST_RESORT = 1.0

_WEIGHTS = {"lr": 1.5, "batch_size": 1.2, "width": 1.2, "depth": 1.2, "rank": 1.2}
"""How much an axis is expected to matter, before anything has run; 1 for all others."""

Fits = Callable[[Sequence[Settings]], Sequence[bool]]
"""Which configurations keep to the study's caps on their size."""


@dataclass(frozen=True)
class Proposal:
    """A changed anchor. `prediction` is what the proposer expects, written down before the run."""

    config: Settings
    changes: tuple[Change, ...]
    prediction: dict[str, Any]


def all_fit(configs: Sequence[Settings]) -> Sequence[bool]:
    return [True] * len(configs)


def propose(history: History, noise: Noise, source: random.Random, fits: Fits = all_fit) -> Proposal | None:
    """The next change of the anchor, or None when everything near it was tried."""
    return PROPOSERS[history.study.proposer](history, noise, source, fits)


def proposal(anchor: Settings, config: Settings, name: str, **prediction: float) -> Proposal:
    """A configuration with how it differs from the anchor, and with what is expected of it."""
    changes = tuple((axis, anchor[axis], value) for axis, value in config.items() if value != anchor[axis])
    expected = dict.fromkeys(("mu", "sd", "ei", "p_feasible")) | prediction
    return Proposal(config, changes, {"name": name, "version": VERSION, **expected})


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


def responses(history: History) -> dict[str, list[list[Any]]]:
    """What all past runs say of every ordered axis, the others being as in the anchor: value, mean and standard
    deviation of the loss. Empty before the baseline has run."""
    if not history.groups:
        return {}
    space, anchor = history.space, history.anchor.config
    surrogate = Surrogate(evidence_of(history), history.noise().s, _place(space, anchor))
    found: dict[str, list[list[Any]]] = {}
    for axis in space.axes:
        if axis.is_ordered:
            values = list(dict.fromkeys(axis.at(place / _RESPONSE_POINTS) for place in range(_RESPONSE_POINTS + 1)))
            mean, sd = surrogate.predict(np.array([_place(space, {**anchor, axis.name: value}) for value in values]))
            found[axis.name] = [[value, float(m), float(d)] for value, m, d in zip(values, mean, sd, strict=True)]
    return found


# --- the three ---


def _random1(history: History, noise: Noise, source: random.Random, fits: Fits) -> Proposal | None:
    anchor = history.anchor.config

    def drawn() -> Settings:
        axis = source.choice(history.space.axes)
        if axis.is_ordered:
            return {**anchor, axis.name: axis.at(axis.unit(anchor[axis.name]) + source.uniform(-REACH, REACH))}
        return {**anchor, axis.name: source.choice(axis.choices or ())}

    found = _open(history, (drawn() for _ in range(_RANDOM_TRIES)), fits)
    return proposal(anchor, found[0], "random1") if found else None


def _sweep1(history: History, noise: Noise, source: random.Random, fits: Fits) -> Proposal | None:
    anchor, configs = history.anchor.config, list[Settings]()
    for axis in history.space.axes:
        count = len(axis.choices) if axis.choices is not None else _SWEEP_POINTS + 1
        configs += [{**anchor, axis.name: axis.at(place / (count - 1))} for place in range(count)]
    found = _open(history, configs, fits)
    return proposal(anchor, found[0], "sweep1") if found else None


def _gp1(history: History, noise: Noise, source: random.Random, fits: Fits) -> Proposal | None:
    space, anchor = history.space, history.anchor.config
    configs = _options(history, fits)
    if not configs:
        return None
    evidence = evidence_of(history)
    center = _place(space, anchor)
    surrogate = Surrogate(evidence, noise.s, center)
    in_flight = [candidate.first["config"] for candidate in history.in_progress]
    if in_flight:  # as if they had come out as expected, or all would go to one place
        there = np.array([_place(space, config) for config in in_flight])
        evidence = evidence.with_runs(there, surrogate.predict(there)[0], 1.0)
        surrogate = Surrogate(evidence, noise.s, center)
    points = np.array([_place(space, config) for config in configs])
    mean, sd = surrogate.predict(points)
    best = float(surrogate.predict(center[None, :])[0][0])
    gain, chance = expected_improvement(mean, sd, best), feasibility(points, evidence)
    chosen = int(np.argmax(gain * chance))
    return proposal(
        anchor,
        configs[chosen],
        "gp1",
        mu=float(mean[chosen]),
        sd=float(sd[chosen]),
        ei=float(gain[chosen]),
        p_feasible=float(chance[chosen]),
    )


PROPOSERS: Mapping[str, Callable[[History, Noise, random.Random, Fits], Proposal | None]] = {
    "gp1": _gp1,
    "random1": _random1,
    "sweep1": _sweep1,
}


# --- what they look at ---


def _open(history: History, configs: Iterable[Settings], fits: Fits) -> list[Settings]:
    """Those that have not been tried, each once, and that are not too large."""
    tried = tried_hashes(history)
    found = {name: config for config in configs if (name := config_hash(config)) not in tried}
    configs = list(found.values())
    return [config for config, does_fit in zip(configs, fits(configs), strict=True) if does_fit]


def tried_hashes(history: History) -> set[str]:
    """Configurations that are not proposed again: what was proposed, and what has been the anchor."""
    proposed = {
        candidate.first["config_hash"]
        for candidate in history.candidates.values()
        if candidate.decision is None or not candidate.decision["placebo"]
    }
    return proposed | {anchor.config_hash for anchor in history.anchors}


def _options(history: History, fits: Fits) -> list[Settings]:
    """What `gp1` chooses among: one axis near the anchor; when stuck, two coupled ones; in the end, one anywhere."""
    anchor = history.anchor.config
    names = {axis.name for axis in history.space.axes}
    pairs = [pair for pair in COUPLED if names.issuperset(pair)] if _is_stuck(history) else []
    jumps = (
        {**anchor, a: x, b: y} for a, b in pairs for x, y in product(*(_near(history, name, REACH) for name in (a, b)))
    )
    if found := _open(history, jumps, fits):
        return found
    for reach in (REACH, _LAST_RESORT):
        moves = [{**anchor, axis.name: new} for axis in history.space.axes for new in _near(history, axis.name, reach)]
        if found := _open(history, moves, fits):
            return found
    return []


def _near(history: History, name: str, reach: float) -> list[Any]:
    """Values that an axis may be changed to, the larger ones first."""
    axis = history.space.axis(name)
    return list(reversed(axis.near(history.anchor.config[name], reach, _POINTS_EACH_SIDE)))


def _is_stuck(history: History) -> bool:
    """Whether the last dozen proposals all failed, and none of them was a jump."""
    failed = [row for row in history.decisions if row["proposal"] is not None and not row["placebo"]][-JUMP_AFTER:]
    jumped = any(len(history.candidates[row["proposal"]].first["changes"]) > 1 for row in failed)
    return len(failed) == JUMP_AFTER and not jumped and not any(row["moves_anchor"] for row in failed)


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

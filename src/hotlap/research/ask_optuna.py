"""An Optuna sampler that is asked like any other command: `python -m hotlap.research.ask_optuna tpe < QUESTION.json`.

A process of its own, because Optuna's `gp` imports torch. The question tells all runs so far; the sampler is told them
and asked for a point, and of that point one axis is answered: the one on which it lies farthest from the anchor.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

# The Gaussian process is tiny, and threads that wait would slow down a trial beside it. Read when torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, TPESampler
from optuna.trial import TrialState, create_trial

from hotlap.research.space import Axis, Settings, Value

REACH = 0.35
_FAILURE_WORSE_SIGMAS = 2.0
_STARTUP_TRIALS = 10


def main(argv: Sequence[str]) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(json.dumps(answer(argv[0], json.load(sys.stdin))))


def answer(kind: str, question: dict[str, Any]) -> dict[str, Any]:
    """An axis and its value, near the anchor and not tried yet; both null where all of them were tried.

    `kind`: `tpe`, `gp` or `cma`.
    """
    axes = [
        Axis.model_validate({"name": name, "default": entry["value"], **entry["range"]})
        for name, entry in question["axes"].items()
    ]
    point = suggest(kind, question, axes)
    moves = [(axis, _near(axis, question["axes"][axis.name]["value"], point[axis.name])) for axis in axes]
    moves.sort(key=lambda move: -_distance(move[0], question["axes"][move[0].name]["value"], move[1]))
    refused = [entry["answer"].strip() for entry in question["refused"]]
    for axis, value in moves:
        entry, move = question["axes"][axis.name], {"axis": axis.name, "value": value}
        if value != entry["value"] and value not in entry["closed"] and json.dumps(move) not in refused:
            return move
    return {"axis": None, "value": None}


def suggest(kind: str, question: dict[str, Any], axes: Sequence[Axis]) -> Settings:
    """The sampler's next point after all runs that the question tells: a place in [0, 1] or a choice for every axis."""
    distributions: dict[str, BaseDistribution] = {
        axis.name: FloatDistribution(0.0, 1.0) if axis.is_ordered else CategoricalDistribution(axis.choices or ())
        for axis in axes
    }
    study = optuna.create_study(sampler=_sampler(kind, question["number"]))
    losses = [run["loss"] for run in question["runs"] if run["loss"] is not None]
    # A failure says "not here"; a huge penalty would bend the whole model.
    worst = max(losses, default=0.0) + _FAILURE_WORSE_SIGMAS * question["noise"]
    for run in question["runs"]:
        params = {axis.name: _coordinate(axis, run["config"][axis.name]) for axis in axes}
        loss = worst if run["loss"] is None else run["loss"]
        if kind == "cma":  # which generation a trial belongs to is written into it when it is asked for
            study.enqueue_trial(params)
            study.tell(study.ask(distributions), loss)
        else:
            study.add_trial(create_trial(params=params, distributions=distributions, value=loss))
    for config in question["in_flight"]:
        params = {axis.name: _coordinate(axis, config[axis.name]) for axis in axes}
        study.add_trial(create_trial(state=TrialState.RUNNING, params=params, distributions=distributions))
    return dict(study.ask(distributions).params)


def _sampler(kind: str, number: int) -> BaseSampler:
    if kind == "tpe":
        return TPESampler(seed=number, n_startup_trials=_STARTUP_TRIALS)
    if kind == "gp":
        return GPSampler(seed=number, n_startup_trials=_STARTUP_TRIALS)
    assert kind == "cma", kind
    return CmaEsSampler(seed=number, warn_independent_sampling=False)


def _coordinate(axis: Axis, value: Value) -> Value:
    return min(1.0, max(0.0, axis.unit(value))) if axis.is_ordered else value


def _near(axis: Axis, here: Value, there: Value) -> Value:
    """The suggested value, as far as one change may go."""
    if not axis.is_ordered:
        return there
    assert isinstance(there, float)
    start = axis.unit(here)
    return axis.at(min(start + REACH, max(start - REACH, there)))


def _distance(axis: Axis, here: Value, there: Value) -> float:
    """Between places of an ordered axis; a third between two names, as for `gp1`."""
    return abs(axis.unit(there) - axis.unit(here)) if axis.is_ordered else (here != there) / 3


if __name__ == "__main__":
    main(sys.argv[1:])

"""Proposals from a command that is asked: it reads what is known as JSON, and answers one axis and one value.

`llm` asks the command of the study's file, Optuna's samplers are a command of ours (`ask_optuna.py`), and both are held
to the same: an answer is a stranger's text, so it is checked like one. A bad answer is told why and asked for once
more; after that `gp1` proposes in its place, and the journal says so. A command that gives no usable answer three times
in a row ends the search (docs/decisions/0043).
"""

import json
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from hotlap import child, durable
from hotlap.errors import ChildCrashed, ConfigError
from hotlap.research import board, proposer
from hotlap.research.acceptance import Noise
from hotlap.research.history import FAILED, History, loss_of
from hotlap.research.proposer import Fits, Proposal
from hotlap.research.space import Axis, Settings, StudyConfig, Value, config_hash

OPTUNA = ("tpe", "gp", "cma")
TRIES = 2
_MAX_FALLBACKS = 3
_MAX_TEXT = 500
_MAX_ANSWER = 100_000


class Asker:
    """The command of one study. Raises ConfigError where it cannot be started at all."""

    def __init__(self, study: StudyConfig, stops: child.Stops, fits: Fits) -> None:
        if study.proposer in OPTUNA and find_spec("optuna") is None:
            raise ConfigError(f'study.proposer = "{study.proposer}" needs Optuna: pip install "hotlap[optuna]".')
        self._study, self._stops, self._fits = study, stops, fits
        self._num_fallbacks = 0

    def propose(self, history: History, noise: Noise, source: random.Random) -> Proposal | None:
        """What the command answers; what `gp1` proposes when its answers are no good.

        Raises:
            ChildCrashed: it gave no good answer several times in a row.
        """
        name = history.study.proposer
        asked = question(history, noise, source.getrandbits(31))
        refused: list[dict[str, str]] = []
        for _ in range(TRIES):
            said, complaint = self._ask({**asked, "refused": refused})
            answer = answer_in(said) if complaint is None else None
            complaint = complaint or complaint_about(answer, history, self._fits)
            if complaint is None:
                assert answer is not None
                self._num_fallbacks = 0
                return _proposal_of(answer, history, name, refused)
            refused.append({"answer": said[-_MAX_TEXT:], "why": complaint[:_MAX_TEXT]})
        self._num_fallbacks += 1
        if self._num_fallbacks >= _MAX_FALLBACKS:
            raise ChildCrashed(
                f'study.proposer = "{name}": its command gave no usable answer {TRIES * _MAX_FALLBACKS} times in a '
                f'row; the last time: {refused[-1]["why"]}. Mend study.llm_command, or set study.proposer = "gp1".'
            )
        instead = proposer.PROPOSERS["gp1"](history, noise, source, self._fits)
        if instead is None:
            return None
        return Proposal(instead.config, instead.changes, {**instead.prediction, "instead_of": name, "refused": refused})

    def _ask(self, asked: dict[str, Any]) -> tuple[str, str | None]:
        """What the command wrote, and what was wrong with how it ended, if anything was."""
        try:
            process = subprocess.Popen(
                command_of(self._study),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            return "", f"it cannot be started: {error}"
        self._stops.watch(process)
        with process:
            try:
                said, talk = process.communicate(durable.canonical_json(asked), timeout=self._study.llm_timeout_s)
            except subprocess.TimeoutExpired:
                return "", f"no answer within {self._study.llm_timeout_s:g} s (study.llm_timeout_s)"
            finally:
                child.kill_group(process.pid)
                self._stops.processes.discard(process)
        said = said[-_MAX_ANSWER:]
        if process.returncode != 0:
            code = process.returncode
            ending = f"exit code {code}" if code > 0 else child.signal_name(-code)
            return said, f"it ended with {ending}: {talk[-_MAX_TEXT:].strip()}"
        return said, None


def command_of(study: StudyConfig) -> list[str]:
    """What is started to be asked."""
    if study.proposer in OPTUNA:
        return [sys.executable, "-m", "hotlap.research.ask_optuna", study.proposer]
    assert study.llm_command is not None
    return list(study.llm_command)


# --- the question ---


def question(history: History, noise: Noise, number: int) -> dict[str, Any]:
    """All that is known, as JSON: docs/research.md has its fields. `number` is for whatever the command draws."""
    names = [axis.name for axis in history.space.axes]
    ledger = board.ledger(history)
    anchor = history.anchor
    return {
        "task": "Answer with one JSON object: axis, value, and in reason why. Exactly that axis of the anchor will be "
        "changed to that value. Lower loss is better.",
        "study": history.study.name,
        "budget_s": history.study.budget_s,
        "unit": "nats per byte",
        "noise": noise.s,
        "floors": board.floors(history),
        "anchor": {
            "config": anchor.config,
            "loss": sum(anchor.losses) / len(anchor.losses),
            "num_runs": len(anchor.runs),
        },
        "axes": {
            axis.name: {
                "value": anchor.config[axis.name],
                "range": axis.model_dump(mode="json", include={"kind", "low", "high", "choices"}),
                "closed": _closed(history, axis),
                "tried": ledger[axis.name],
            }
            for axis in history.space.axes
        },
        "runs": _runs(history, names),
        "in_flight": [_searched(candidate.first["config"], names) for candidate in history.in_progress],
        "number": number,
    }


def _runs(history: History, names: Sequence[str]) -> list[dict[str, Any]]:
    """Configurations in the order of their last run, with their mean loss; failures with none."""
    found: dict[str, dict[str, Any]] = {}
    for run in history.runs:
        if run.status in FAILED or run.config_hash in history.groups:
            losses = [loss_of(other.row) for other in history.groups.get(run.config_hash, [])]
            told = {"config": _searched(run.config, names), "status": run.status, "num_runs": len(losses)}
            found.pop(run.config_hash, None)
            found[run.config_hash] = told | {"loss": sum(losses) / len(losses) if losses else None}
    return list(found.values())


def _searched(config: Settings, names: Sequence[str]) -> Settings:
    return {name: config[name] for name in names}


def _closed(history: History, axis: Axis) -> list[Value]:
    """Values of an axis that are not tried again from this anchor."""
    anchor, tried = history.anchor.config, proposer.tried_hashes(history)
    known = dict.fromkeys(candidate.first["config"][axis.name] for candidate in history.candidates.values())
    known |= dict.fromkeys(other.config[axis.name] for other in history.anchors)
    return [value for value in known if config_hash({**anchor, axis.name: value}) in tried]


# --- the answer ---


def answer_in(said: str) -> dict[str, Any] | None:
    """The last JSON object with an axis in a text, whatever stands around it."""
    for found in reversed([said.strip(), *re.findall(r"\{[^{}]*\}", said)]):
        with suppress(ValueError):
            answer = json.loads(found)
            if isinstance(answer, dict) and {"axis", "value"} <= answer.keys():
                return answer
    return None


def complaint_about(answer: dict[str, Any] | None, history: History, fits: Fits) -> str | None:
    """Why an answer is no proposal, in words for who gave it, or None."""
    if answer is None:
        return 'there is no JSON object with "axis" and "value" in it'
    names = [axis.name for axis in history.space.axes]
    if answer["axis"] not in names:
        return f"there is no axis {str(answer['axis'])[:80]!r}; there are {', '.join(names)}"
    axis = history.space.axis(answer["axis"])
    if isinstance(answer["value"], list | dict):
        return f"{axis.name}: one value is wanted, not several"
    if complaint := axis.complaint(answer["value"]):
        return f"{axis.name}: {complaint[:_MAX_TEXT]}"
    value = axis.canonical(answer["value"])
    config = {**history.anchor.config, axis.name: value}
    if value == history.anchor.config[axis.name]:
        return f"{axis.name} is {value} already"
    if config_hash(config) in proposer.tried_hashes(history):
        return f"{axis.name} = {value} was tried from this anchor, or is being tried"
    if not fits([config])[0]:
        return f"{axis.name} = {value} makes the model larger than the study allows"
    return None


def _proposal_of(answer: dict[str, Any], history: History, name: str, refused: list[dict[str, str]]) -> Proposal:
    axis, anchor = history.space.axis(answer["axis"]), history.anchor.config
    made = proposer.proposal(anchor, {**anchor, axis.name: axis.canonical(answer["value"])}, name)
    reason = str(answer.get("reason") or "")[:_MAX_TEXT] or None
    return Proposal(made.config, made.changes, {**made.prediction, "reason": reason, "refused": refused})

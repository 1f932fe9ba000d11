"""What a study searches: its axes, their way to the unit interval and back, and its description in TOML.

A study's file has a table `[study]`, a table `[start]` with what the baseline has other than the trial's defaults, and
tables `[range.AXIS]` that narrow an axis. None of them can hold a seed: seeds are drawn by the study (`seeds.py`).
"""

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from hotlap import durable
from hotlap.config_base import Config
from hotlap.errors import ConfigError

Value = bool | int | float | str | None
Settings = dict[str, Value]
"""One configuration: a value for every axis of the trial, searched or not."""

Change = tuple[str, Value, Value]
"""An axis, what it was, and what it is."""

_DIGITS = 3
_APART = 0.25
"""Coordinate of a name that is chosen: two names are then as far from each other as a third of an ordered axis."""


class Axis(Config):
    """One dimension. `kind` fixes the way between its values and [0, 1]."""

    name: str
    kind: Literal["log", "linear", "integer", "choice"]
    default: Value
    low: float | None = None
    high: float | None = None
    choices: Annotated[tuple[Value, ...], Field(strict=False)] | None = None

    @property
    def is_ordered(self) -> bool:
        """Whether neighbors mean something: numbers do, names do not."""
        return self.choices is None or not any(isinstance(choice, str | bool | None) for choice in self.choices)

    @property
    def is_whole(self) -> bool:
        return isinstance(self.default, int) and not isinstance(self.default, bool)

    def unit(self, value: Value) -> float:
        """Where in [0, 1] a value lies."""
        if self.choices is not None:
            return self.choices.index(value) / max(1, len(self.choices) - 1)
        assert self.low is not None and self.high is not None and isinstance(value, int | float), self
        if self.kind == "log":
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def at(self, unit: float) -> Value:
        """The value at a place in [0, 1], beyond which it is clipped. Rounded, so that people can read it."""
        unit = min(1.0, max(0.0, unit))
        if self.choices is not None:
            return self.choices[round(unit * (len(self.choices) - 1))]
        assert self.low is not None and self.high is not None, self
        if self.kind == "log":
            raw = self.low * (self.high / self.low) ** unit
        else:
            raw = self.low + unit * (self.high - self.low)
        if self.is_whole:
            return int(min(self.high, max(self.low, round(raw))))
        return min(self.high, max(self.low, float(f"{raw:.{_DIGITS}g}")))

    def canonical(self, value: Value) -> Value:
        """A value without a complaint, as this axis writes it: 16 for 16.0 where whole numbers are meant."""
        if self.choices is not None:
            return self.choices[self.choices.index(value)]
        assert isinstance(value, int | float), self
        return int(value) if self.is_whole else float(value)

    def near(self, value: Value, reach: float, num_points: int) -> list[Value]:
        """Other values not farther than `reach`: evenly spread, at most `num_points` on each side."""
        if not self.is_ordered:
            assert self.choices is not None
            return [choice for choice in self.choices if choice != value]
        here = self.unit(value)
        places = [here + reach * step / num_points for step in range(-num_points, num_points + 1) if step]
        found = dict.fromkeys(self.at(place) for place in places if -1e-9 <= place <= 1 + 1e-9)
        return [other for other in found if other != value]

    def complaint(self, value: Value) -> str | None:
        """Why a value does not lie on this axis, in words, or None."""
        if self.choices is not None:
            is_one = any(
                value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in self.choices
            )
            return None if is_one else f"{value!r} is none of {list(self.choices)}"
        if not isinstance(value, int | float) or isinstance(value, bool):
            return f"{value!r} is no number"
        if self.is_whole and value != int(value):
            return f"{value!r} is no whole number"
        assert self.low is not None and self.high is not None, self
        return None if self.low <= value <= self.high else f"{value!r} is not within {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Space:
    """The searched axes, and the configuration from which the search starts."""

    axes: tuple[Axis, ...]
    start: Settings

    def encode(self, config: Settings) -> list[float]:
        """One coordinate for an ordered axis, one for each choice of an unordered one."""
        point: list[float] = []
        for axis in self.axes:
            value = config[axis.name]
            if axis.is_ordered:
                point.append(axis.unit(value))
            else:
                assert axis.choices is not None
                point += [_APART if choice == value else 0.0 for choice in axis.choices]
        return point

    def axis(self, name: str) -> Axis:
        return next(axis for axis in self.axes if axis.name == name)


def config_hash(config: Settings) -> str:
    """Names a configuration: the same for 1 and 1.0, whatever the order of its keys."""
    plain = {key: _as_float(value) for key, value in config.items()}
    return durable.sha256_bytes(durable.canonical_json(plain).encode())[:12]


def in_words(changes: Iterable[Sequence[Value]]) -> str:
    """Changes as people read them; nothing where there are none."""
    return ", ".join(f"{axis} {old} → {new}" for axis, old, new in changes)


def _as_float(value: Value) -> Value:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


# --- a study's description ---


class RangeConfig(Config):
    """A narrower or other range for one axis."""

    low: float | None = None
    high: float | None = None
    choices: Annotated[tuple[Value, ...], Field(strict=False, min_length=2)] | None = None


class StudyConfig(Config):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the study, and of its folder."""

    program: str = "hotlap.research.gpt"
    """What a trial runs: a Python module, or a .py file, that takes an ORDER.json (docs/research.md)."""

    data: str = "embedded"
    """A text file, or `embedded`. For `hotlap.research.lora`: the run's TOML file."""

    budget_s: float = Field(default=20.0, gt=0)
    """Charged seconds of training in every trial."""

    setup_s: float = Field(default=0.0, ge=0)
    """Seconds that the watchdog grants beyond 1.6 budgets and 5 s: to trials that start processes of their own."""

    device: Literal["cpu", "cuda"] = "cpu"

    workers: int = Field(default=1, ge=1)
    """Trials at a time. Every run of a study, the baseline's too, is made beside as many others."""

    threads: int | None = Field(default=None, ge=1)
    """Processor threads of a trial. Absent: this machine's cores, divided among the workers."""

    axes: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    """Axes to search. Absent: all that the trial has."""

    proposer: Literal["gp1", "random1", "sweep1", "tpe", "gp", "cma", "llm"] = "gp1"
    """`tpe`, `gp` and `cma` are Optuna's; `llm` is `llm_command`."""

    llm_command: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    """A program and its arguments, which reads JSON and answers an axis and a value (docs/research.md)."""

    llm_timeout_s: float = Field(default=120.0, gt=0)
    """Longest wait for an answer."""

    acceptance: Literal["two_run", "naive"] = "two_run"
    """`naive` keeps whatever scored lower once. It is there to show what that does."""

    baseline_runs: int | None = Field(default=None, ge=1)
    """Runs of the baseline before the search. Absent: 6 for short trials on a CPU, else 3, and 1 for `naive`."""

    max_params: int | None = Field(default=None, ge=1)
    """A configuration with more parameters is not proposed. The trial's program must tell sizes (docs/research.md)."""

    max_mem_mb: float | None = Field(default=None, gt=0)
    """The same for its expected memory."""

    executor: Literal["local", "ray"] = "local"
    """Where trials run: on this machine, or on the Ray cluster that RAY_ADDRESS names."""

    usd_per_hour: float | None = Field(default=None, ge=0)
    """What the machine costs: every run's row and the board then say what was spent."""

    trials_per_day: int | None = Field(default=None, ge=1)
    """Most child processes started in a day (UTC), baseline and repeats included."""

    placebo_every: int = Field(default=12, ge=2)
    """One proposal in so many is secretly no change at all. It measures how often noise is kept."""

    sentinel_every: int = Field(default=8, ge=2)
    """The anchor is run again after so many runs."""

    on_disturbed: Literal["quarantine", "use"] = "quarantine"
    """What becomes of a run on a machine that was busy with something else: left out and repeated, or used."""

    @model_validator(mode="after")
    def _has_a_command_to_ask(self) -> "StudyConfig":
        if (self.proposer == "llm") != (self.llm_command is not None):
            raise ValueError('proposer = "llm" and llm_command need each other')
        return self

    @property
    def num_baseline_runs(self) -> int:
        if self.baseline_runs is not None:
            return self.baseline_runs
        if self.acceptance == "naive":
            return 1
        return 6 if self.device == "cpu" and self.budget_s <= 60.0 else 3

    @property
    def deadline_s(self) -> float:
        """Wall seconds after which a trial is ended, whatever it is doing."""
        return 1.6 * self.budget_s + 5.0 + self.setup_s


class StudyFile(Config):
    """A study's whole TOML file."""

    study: StudyConfig
    start: dict[str, Value] = Field(default_factory=dict)
    range: dict[str, RangeConfig] = Field(default_factory=dict)


def load_study(path: Path) -> StudyFile:
    """A study from its file; its relative paths are relative to the file's folder.

    Raises:
        ConfigError: the file, a key or a value is wrong, or a seed stands in it.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None
    require_no_seed(tree, str(path))
    study = tree.get("study")
    if isinstance(study, dict):
        _anchor_paths(study, path.absolute().parent)
    try:
        return StudyFile.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_complaints(error)}.") from None


def _anchor_paths(study: dict[str, Any], folder: Path) -> None:
    """Make the file's own relative paths absolute where they name something that is there."""
    for key in ("data", "program"):
        value = study.get(key)
        if isinstance(value, str) and (folder / value).exists():
            study[key] = str(folder / value)
    if isinstance(study.get("llm_command"), list):
        study["llm_command"] = [
            str(folder / word) if isinstance(word, str) and (folder / word).is_file() else word
            for word in study["llm_command"]
        ]


def require_no_seed(tree: Mapping[str, Any], source: str) -> None:
    """
    Raises:
        ConfigError: a key anywhere names a seed, or an axis to be searched is one.
    """
    for key, value in tree.items():
        listed = [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
        for word in [key, *listed]:
            if "seed" in word.lower():
                raise ConfigError(
                    f"{source}: {word} is a seed. A lucky seed is no improvement, so the study draws all seeds itself; "
                    f"remove it."
                )
        if isinstance(value, Mapping):
            require_no_seed(value, source)


def space_of(file: StudyFile, axes_json: Mapping[str, Any]) -> Space:
    """The space of a study from what its trial says of its axes.

    Raises:
        ConfigError: the file names an axis or a value that the trial does not have.
    """
    require_no_seed(axes_json, file.study.program)
    axes = {name: _axis(name, entry, file) for name, entry in axes_json.items()}
    names = file.study.axes or tuple(axes)
    for place, wanted in (("study.axes", names), ("[start]", file.start), ("[range]", file.range)):
        for name in wanted:
            if name not in axes:
                raise ConfigError(f"{place}: the trial has no axis {name!r}; it has {', '.join(axes)}.")
    start: Settings = {name: axis.default for name, axis in axes.items()} | file.start
    searched = tuple(axes[name] for name in names)
    for axis in searched:
        if complaint := axis.complaint(start[axis.name]):
            raise ConfigError(f"The search starts at {axis.name} = {complaint}. Set it in [start] or [range].")
    return Space(searched, start)


def _axis(name: str, entry: Mapping[str, Any], file: StudyFile) -> Axis:
    narrowed = file.range.get(name, RangeConfig()).model_dump(exclude_none=True)
    try:
        axis = Axis.model_validate({"name": name, **entry, **narrowed})
    except ValidationError as error:
        raise ConfigError(f"Axis {name} of {file.study.program}: {_complaints(error)}.") from None
    has_range = axis.low is not None and axis.high is not None and axis.low < axis.high
    if axis.choices is None and (not has_range or (axis.kind == "log" and (axis.low or 0.0) <= 0.0)):
        raise ConfigError(f"Axis {name} of {file.study.program} has no range: {axis.low} to {axis.high}.")
    return axis


def space_json(space: Space) -> dict[str, Any]:
    """As the journal keeps it."""
    return {"axes": [axis.model_dump(mode="json") for axis in space.axes], "start": dict(space.start)}


def space_from_json(value: Mapping[str, Any]) -> Space:
    axes: Sequence[Mapping[str, Any]] = value["axes"]
    return Space(tuple(Axis.model_validate(axis) for axis in axes), dict(value["start"]))


def _complaints(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(str(part) for part in item['loc'])}: "
        + ("no such setting" if item["type"] == "extra_forbidden" else f"{item['msg']} (got {item['input']!r})")
        for item in error.errors()
    )

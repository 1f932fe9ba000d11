"""An ablation: what each difference between two recipes is worth, left out of the one and added alone to the other.

A difference is one setting that two recipes give other values: a switch of `[techniques]`, a way of packing, a number
of steps. All variants run in turn (see `rounds`), and each effect is that of pairs, with its interval. Effects need not
add up: a technique that only pays beside another shows by what leaving it out costs.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hotlap import clock, durable
from hotlap.config import RunConfig
from hotlap.errors import UsageError
from hotlap.speedrun import recipe, submission
from hotlap.speedrun.attempt import Say, Sources
from hotlap.speedrun.rounds import Result, paired, run_rounds
from hotlap.speedrun.submission import Submission
from hotlap.speedrun.track import Track
from hotlap.translate import to_toml

Settings = dict[str, Any]
WHOLE, PLAIN = "900-whole", "901-plain"
_TOP = ""
"""The table of the settings that stand in none."""


@dataclass(frozen=True)
class Factor:
    """A setting that the two recipes give other values. None: it is not set."""

    table: str
    key: str
    whole: Any
    plain: Any

    @property
    def name(self) -> str:
        return f"{self.table}.{self.key}" if self.table else self.key

    def put(self, settings: Settings, value: Any) -> Settings:
        table = {**settings.get(self.table, {})} if self.table else {**settings}
        table.pop(self.key, None)
        if value is not None:
            table[self.key] = value
        return {**settings, self.table: table} if self.table else table


def factors_of(whole: Settings, plain: Settings) -> list[Factor]:
    """In the order of the configuration."""
    full, bare = _complete(whole), _complete(plain)
    found: list[Factor] = []
    for name, value in full.items():
        pairs = [(name, key) for key in value] if isinstance(value, dict) else [(_TOP, name)]
        for table, key in pairs:
            one, other = _at(full, table, key), _at(bare, table, key)
            if one != other:
                found.append(Factor(table, key, one, other))
    return found


def _complete(settings: Settings) -> Settings:
    """With every default said."""
    return RunConfig.model_validate({**settings, "base_model": "m", "dataset": "d"}).model_dump(mode="json")


def _at(settings: Settings, table: str, key: str) -> Any:
    return settings[table][key] if table else settings[key]


def without_techniques(settings: Settings) -> Settings:
    """The recipe that a recipe is held against when none is named: the same, with no technique but the defaults."""
    return {name: value for name, value in settings.items() if name != "techniques"}


def ablate(
    entry: Submission, against: Settings, track: Track, num_rounds: int, folder: Path, sources: Sources, say: Say
) -> dict[str, Any]:
    """Every variant `num_rounds` times. `ablation.json`, and for the notes `ablation.md`, come to `folder`.

    Raises:
        UsageError: the submission is no recipe, or does not differ from `against`.
        And as `rounds.run_rounds`.
    """
    if entry.recipe is None:
        raise UsageError(f"{entry.name} is a program; only a recipe's techniques can be told apart and left out.")
    factors = factors_of(entry.recipe, against)
    if not factors:
        raise UsageError(f"{entry.name} does not differ from what it is held against: there is nothing to leave out.")
    variants, misfits = variants_of(entry.recipe, against, factors)
    say(f"{len(factors)} differences, {len(variants)} variants, {num_rounds * len(variants)} runs")
    entries = {name: _written(entry, name, settings, track, folder) for name, settings in variants.items()}
    done = run_rounds(entries, track, num_rounds, folder / "runs", sources, say)
    told: dict[str, Any] = {
        "format": 1,
        "track": track.name,
        "track_sha256": track.sha256,
        "date": clock.utc_text(clock.wall_s()),
        "submission": {"name": entry.name, "code_sha256": entry.code_sha256},
        "whole_against_plain": asdict(paired(done.runs[WHOLE], done.runs[PLAIN])),
        "factors": [_effects(number, factor, done.runs, misfits) for number, factor in enumerate(factors)],
        "machine": done.machine,
        "runs": done.runs,
    }
    durable.replace(folder / "ablation.md", to_markdown(told).encode())
    durable.replace(folder / "ablation.json", (json.dumps(told, indent=1, sort_keys=True) + "\n").encode())
    return told


def variants_of(
    whole: Settings, plain: Settings, factors: Sequence[Factor]
) -> tuple[dict[str, Settings], dict[str, str]]:
    """Settings by variant's name, and why a variant cannot be, by its name."""
    variants, misfits = {WHOLE: whole, PLAIN: plain}, dict[str, str]()
    seen = [_complete(whole), _complete(plain)]
    for number, factor in enumerate(factors):
        for name, settings in (
            (_without(number), factor.put(whole, factor.plain)),
            (_alone(number), factor.put(plain, factor.whole)),
        ):
            try:
                complete = _complete(settings)
            except ValueError as error:  # pydantic's, with our reasons in it
                misfits[name] = _reason(error)
                continue
            if complete in seen[:2]:
                misfits[name] = "it is the other recipe: there is only this one difference"
            else:
                variants[name] = settings
    return variants, misfits


def _without(number: int) -> str:
    return f"{number:03}-left-out"


def _alone(number: int) -> str:
    return f"{number:03}-alone"


def _reason(error: ValueError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"^Value error, | \[type=.*$", "", lines[1] if len(lines) > 1 else lines[0])


def _written(entry: Submission, name: str, settings: Settings, track: Track, folder: Path) -> Submission:
    """A variant as a submission of its own.

    Raises:
        UsageError: its settings cannot be said in a file.
    """
    place = folder / "variants" / name
    durable.make_dirs(place)
    for path in sorted(entry.folder.iterdir()):
        if path.is_file() and path.name != recipe.RECIPE:
            durable.replace(place / path.name, path.read_bytes())
    durable.replace(place / recipe.RECIPE, to_toml(_without_nones(settings)).encode())
    made = submission.load(place, track)
    if made.recipe is None or _complete(made.recipe) != _complete(settings):
        raise UsageError(f"{place / recipe.RECIPE} does not say what was meant: a setting that has no value in TOML.")
    return made


def _without_nones(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nones(each) for key, each in value.items() if each is not None}
    return [_without_nones(each) for each in value] if isinstance(value, list) else value


def _effects(
    number: int, factor: Factor, runs: Mapping[str, Sequence[Result]], misfits: Mapping[str, str]
) -> dict[str, Any]:
    """What a difference does, as the recipe with it against the recipe without it, in both surroundings."""
    without, alone = _without(number), _alone(number)
    return {
        "name": factor.name,
        "whole": factor.whole,
        "plain": factor.plain,
        "left_out": asdict(paired(runs[WHOLE], runs[without])) if without in runs else {"misfit": misfits[without]},
        "alone": asdict(paired(runs[alone], runs[PLAIN])) if alone in runs else {"misfit": misfits[alone]},
    }


def to_markdown(told: Mapping[str, Any]) -> str:
    """The table for a submission's notes."""
    lines = [
        f"Each difference on track {told['track']}, as time with it over time without it and score with it less score",
        "without it: beside all others (left out of the recipe), and beside none (added to the plain one). Pairs of",
        f"one round each, 95 % intervals. {told['machine']['processor']}, {told['date']}.",
        "",
        "| difference | time, beside all | score, beside all | time, alone | score, alone |",
        "| --- | --- | --- | --- | --- |",
    ]
    for each in told["factors"]:
        what = f"`{each['name']}` = `{json.dumps(each['whole'])}` for `{json.dumps(each['plain'])}`"
        cells = [*_cells(each["left_out"]), *_cells(each["alone"])]
        lines.append(f"| {what.replace('|', '&#124;')} | {' | '.join(cells)} |")
    lines.append(f"| all of them | | | {' | '.join(_cells(told['whole_against_plain']))} |")
    return "\n".join([*lines, ""])


def _cells(found: Mapping[str, Any]) -> tuple[str, str]:
    if "misfit" in found:
        return f"does not stand: {found['misfit']}", "-"
    if found["time_ratio"] is None:
        return "no pair was scored", "-"
    return (
        _with_interval(found["time_ratio"], found["time_ratio_interval"], ".3f"),
        _with_interval(found["score_difference"], found["score_difference_interval"], "+.4f"),
    )


def _with_interval(value: float, interval: Sequence[float] | None, form: str) -> str:
    if interval is None:
        return f"{value:{form}}, one pair"
    return f"{value:{form}} ({interval[0]:{form}} to {interval[1]:{form}})"

"""What an author says a submission does, against what a verification measured.

Claims are `self_reported` in `config.yaml`, under the public contest's names, and lines of `NOTES.md` that begin with
`Time:` (seconds), `Score:` (a share, or percent), `Tokens:` (that a run trains on, without padding) or `Steps:` (the
seconds it spends in them). A claim that is off costs nobody a record; a reader should know. Of a program, whose inside
nobody measures, tokens and steps are only known this way.
"""

import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hotlap.speedrun.ratio import Work

About = Literal["time", "score", "tokens", "steps"]
_LINE = re.compile(r"[\s>*_#-]*(time|score|tokens|steps)\W*:\W*?([0-9][0-9,]*(?:\.[0-9]+)?)\s*(%)?", re.IGNORECASE)
_MEASURED: dict[About, str] = {
    "time": "time_seconds_mean",
    "score": "score_mean",
    "tokens": "num_tokens_mean",
    "steps": "steps_s_mean",
}
_MAX_LINE = 200
_TIME_SHARE, _SCORE_POINTS = 0.10, 0.02


@dataclass(frozen=True)
class Claim:
    place: str
    about: About
    value: float


def claims(config: dict[str, Any], notes: str) -> list[Claim]:
    """Everything that an author claims and that can be held against a measured value."""
    said = config.get("self_reported") or {}
    found: list[Claim] = []
    if said.get("mean_train_seconds") is not None:
        found.append(Claim("config.yaml", "time", float(said["mean_train_seconds"])))
    if said.get("accuracies"):
        found.append(Claim("config.yaml", "score", statistics.fmean(said["accuracies"])))
    for number, line in enumerate(notes.splitlines(), start=1):
        # A claim is short, and a pattern should not be led through a quarter of a million signs.
        if match := _LINE.match(line[:_MAX_LINE]):
            about: About = next(each for each in _MEASURED if each == match[1].lower())
            found.append(
                Claim(f"NOTES.md:{number}", about, float(match[2].replace(",", "")) / (100 if match[3] else 1))
            )
    return found


def work_in(notes: str) -> Work | None:
    """What a submission does in its steps, by its author's words, if they say it."""
    said = {claim.about: claim.value for claim in claims({}, notes)}
    if not (said.get("tokens") and said.get("steps")):
        return None
    return Work(said["tokens"], said["steps"], is_measured=False)


def of_folder(folder: Path, config: dict[str, Any]) -> list[Claim]:
    return claims(config, (folder / "NOTES.md").read_text(encoding="utf-8", errors="replace"))


def disagreements(found: list[Claim], summary: dict[str, Any]) -> list[str]:
    """Claims that lie outside what was measured: its 95 % interval, and two points of the score or a tenth of anything
    else around its mean, since another machine measured them."""
    told: list[str] = []
    for claim in found:
        mean = summary[_MEASURED[claim.about]]
        if mean is None:
            continue
        room = _SCORE_POINTS if claim.about == "score" else _TIME_SHARE * mean
        low, high = mean - room, mean + room
        if claim.about == "time" and summary["time_seconds_interval"]:
            low, high = min(low, summary["time_seconds_interval"][0]), max(high, summary["time_seconds_interval"][1])
        if not low <= claim.value <= high:
            unit = " s" if claim.about in ("time", "steps") else ""
            what = f"a {claim.about}" if claim.about in ("time", "score") else claim.about
            told.append(f"{claim.place} claims {what} of {claim.value:.4g}{unit}; measured was {mean:.4g}{unit}")
    return told

"""What an author says a submission does, against what a verification measured.

Claims are `self_reported` in `config.yaml`, under the public contest's names, and lines of `NOTES.md` that begin with
`Time:` (seconds) or `Score:` (a share, or percent). A claim that is off costs nobody a record; a reader should know.
"""

import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_LINE = re.compile(r"[\s>*_#-]*(time|score)\W*:\W*?([0-9]+(?:\.[0-9]+)?)\s*(%)?", re.IGNORECASE)
_TIME_SHARE, _SCORE_POINTS = 0.10, 0.02


@dataclass(frozen=True)
class Claim:
    place: str
    about: Literal["time", "score"]
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
        if match := _LINE.match(line):
            about = "time" if match[1].lower() == "time" else "score"
            found.append(Claim(f"NOTES.md:{number}", about, float(match[2]) / (100 if match[3] else 1)))
    return found


def of_folder(folder: Path, config: dict[str, Any]) -> list[Claim]:
    return claims(config, (folder / "NOTES.md").read_text(encoding="utf-8", errors="replace"))


def disagreements(found: list[Claim], summary: dict[str, Any]) -> list[str]:
    """Claims that lie outside what was measured: its 95 % interval, and a tenth of the time or two points of the score
    around its mean, since another machine measured them."""
    told: list[str] = []
    for claim in found:
        mean = summary["time_seconds_mean"] if claim.about == "time" else summary["score_mean"]
        if mean is None:
            continue
        room = _TIME_SHARE * mean if claim.about == "time" else _SCORE_POINTS
        low, high = mean - room, mean + room
        if claim.about == "time" and summary["time_seconds_interval"]:
            low, high = min(low, summary["time_seconds_interval"][0]), max(high, summary["time_seconds_interval"][1])
        if not low <= claim.value <= high:
            unit = " s" if claim.about == "time" else ""
            told.append(
                f"{claim.place} claims a {claim.about} of {claim.value:.4g}{unit}; measured was {mean:.4g}{unit}"
            )
    return told

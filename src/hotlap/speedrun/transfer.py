"""A transfer: the recipe of one track run on another as it is, and what that says of it.

A recipe that only wins where it was tuned has learned its track. `transfers`: the other track's own rule lets it pass.
`partly`: runs reached the target there, but not all, or not with confidence. `no`: none did, or it broke a rule.
"""

import json
from pathlib import Path
from typing import Any, Literal

import yaml

from hotlap import durable
from hotlap.errors import UsageError
from hotlap.speedrun import submission
from hotlap.speedrun.attempt import Say, Sources
from hotlap.speedrun.report import Report
from hotlap.speedrun.submission import Submission
from hotlap.speedrun.track import Track
from hotlap.speedrun.verify import measure

Answer = Literal["transfers", "partly", "no"]


def transfer(
    entry: Submission, home: Track, away: Track, num_runs: int, folder: Path, sources: Sources, say: Say
) -> dict[str, Any]:
    """Measure a recipe of track `home` on track `away`, unchanged. Its report and `transfer.json` come to `folder`.

    Raises:
        UsageError: the submission is no recipe, or the tracks are one.
        And as `verify.measure`.
    """
    if entry.recipe is None:
        raise UsageError(f"{entry.name} is a program, written for one model and one form of rows; a recipe transfers.")
    if home.spec.id == away.spec.id:
        raise UsageError(f"{entry.name} is a submission to track {home.spec.id} already; name another with --to.")
    report = measure(_moved(entry, away, folder), away, num_runs, folder, sources, say)
    answer = answer_of(report)
    told: dict[str, Any] = {
        "format": 1,
        "answer": answer,
        "submission": {"name": entry.name, "code_sha256": entry.code_sha256},
        "from": {"track": home.name, "track_sha256": home.sha256},
        "to": {"track": away.name, "track_sha256": away.sha256, "target": away.spec.metric.target},
        "report": report,
    }
    durable.replace(folder / "transfer.json", (json.dumps(told, indent=1, sort_keys=True) + "\n").encode())
    return told


def answer_of(report: Report) -> Answer:
    if report["decision"]["verdict"] == "pass":
        return "transfers"
    if any(run["complaints"] for run in report["runs"]):
        return "no"
    rules = report["rules"]
    sign = 1.0 if rules["higher_is_better"] else -1.0
    reached = [sign * (run["score"] - rules["target"]) >= 0 for run in report["runs"] if run["score"] is not None]
    return "partly" if any(reached) else "no"


def _moved(entry: Submission, away: Track, folder: Path) -> Submission:
    """The same files, entered for another track."""
    place = folder / "entry" / entry.name
    durable.make_dirs(place)
    for path in sorted(path for path in entry.folder.iterdir() if path.is_file()):
        durable.replace(place / path.name, path.read_bytes())
    config = {**entry.config, "track": away.spec.id, "base_model": away.spec.base_model.name, "self_reported": {}}
    durable.replace(place / "config.yaml", yaml.safe_dump(config, allow_unicode=True, sort_keys=False).encode())
    return submission.load(place, away)

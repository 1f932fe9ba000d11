"""A duel: two submissions in turn on one machine, and the difference with its interval.

What two rows of a leaderboard differ by is also the machine, the day and the load; the two of a round share all that.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hotlap import clock, durable
from hotlap.errors import UsageError
from hotlap.speedrun.attempt import Say, Sources
from hotlap.speedrun.rounds import Paired, Result, paired, run_rounds
from hotlap.speedrun.submission import Submission
from hotlap.speedrun.track import Track


def duel(
    first: Submission, second: Submission, track: Track, num_pairs: int, folder: Path, sources: Sources, say: Say
) -> dict[str, Any]:
    """Both, `num_pairs` times, and what they differ by. `duel.json` and `duel.md` come to `folder`.

    Raises:
        UsageError: they have one name, or are the same code.
        And as `rounds.run_rounds`.
    """
    if first.name == second.name or first.code_sha256 == second.code_sha256:
        raise UsageError(f"{first.name} and {second.name} have one name or are the same code; a duel takes two.")
    done = run_rounds({first.name: first, second.name: second}, track, num_pairs, folder, sources, say)
    found = paired(done.runs[first.name], done.runs[second.name])
    told: dict[str, Any] = {
        "format": 1,
        "track": track.name,
        "track_sha256": track.sha256,
        "date": clock.utc_text(clock.wall_s()),
        "code_sha256": {entry.name: entry.code_sha256 for entry in (first, second)},
        "faster": None if found.faster is None else (first.name, second.name)[found.faster],
        "paired": asdict(found),
        "machine": done.machine,
        "runs": done.runs,
    }
    lines = [f"# {first.name} against {second.name} on track {track.name}", "", f"{in_words(first, second, found)}."]
    lines += ["", *pairs_table(done.runs), "", f"{told['date']}, {done.machine['processor']}.", ""]
    durable.replace(folder / "duel.md", "\n".join(lines).encode())
    durable.replace(folder / "duel.json", (json.dumps(told, indent=1, sort_keys=True) + "\n").encode())
    return told


def in_words(first: Submission, second: Submission, found: Paired) -> str:
    if found.time_ratio_interval is None or found.time_ratio is None:
        return f"{found.num_pairs} pairs were scored, which is too few for an interval"
    low, high = found.time_ratio_interval
    head = f"{first.name} takes {found.time_ratio:.3f} of the time of {second.name} ({low:.3f} to {high:.3f})"
    tail = {0: f"{first.name} is faster", 1: f"{second.name} is faster", None: "no difference is proven"}[found.faster]
    return f"{head} over {found.num_pairs} pairs: {tail}"


def pairs_table(runs: Mapping[str, Sequence[Result]]) -> list[str]:
    """A line a round, in Markdown: time and score of each, or why there is none."""
    lines = ["| round | seed | " + " | ".join(runs) + " |", "| --- " * (len(runs) + 2) + "|"]
    for number, row in enumerate(zip(*runs.values(), strict=True), start=1):
        cells = ["no score" if run["score"] is None else f"{run['wall_s']:.1f} s, {run['score']:.4f}" for run in row]
        lines.append(f"| {number} | {row[0]['seed']} | {' | '.join(cells)} |")
    return lines

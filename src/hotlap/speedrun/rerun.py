"""Run a verification again with the seeds and the test rows of its report, and say what came out otherwise."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotlap import durable
from hotlap.errors import MissingArtifact, PinMismatch, Refused
from hotlap.speedrun import submission, track, verify
from hotlap.speedrun.attempt import Say, Sources


def rerun(contest: Path, path: Path, out: Path, say: Say) -> dict[str, Any]:
    """The new report beside the old one, run by run. It is kept in `out`, where the same call goes on after a cut.

    Raises:
        MissingArtifact: the code that the report is about was not kept.
        PinMismatch: the code or the track is not what the report is about.
        Refused: `out` holds a verification with other seeds.
        And as `verify.measure`.
    """
    then = json.loads(path.read_bytes())
    chosen = track.find(contest, then["track"])
    if chosen.sha256 != then["track_sha256"]:
        raise PinMismatch(f"{path} was made under other rules of track {then['track']}. Take its version of the track.")
    folder = _code(contest, path, then["submission"])
    now = verify.measure(
        submission.load(folder, chosen), chosen, len(then["runs"]), out, _as_then(then["runs"], out), say
    )
    if [run["seed"] for run in now["runs"]] != [run["seed"] for run in then["runs"]]:
        raise Refused(f"{out} holds a verification with other seeds. Name an empty folder.")
    return {
        "verdict": now["decision"]["verdict"],
        "verdict_then": then["decision"]["verdict"],
        "runs": [
            {
                "run": new["run"],
                "seed": new["seed"],
                "score": new["score"],
                "score_then": old["score"],
                "wall_s": new["wall_s"],
                "wall_s_then": old["wall_s"],
                "is_same_adapter": new["adapter_sha256"] == old["adapter_sha256"],
            }
            for old, new in zip(then["runs"], now["runs"], strict=True)
        ],
    }


def _as_then(runs: Sequence[dict[str, Any]], out: Path) -> Sources:
    """The report's seed and entropy of the run that asks, whatever became of those before it, now or before a cut.
    Fresh entropy where a run was not scored then and is now."""

    def num_drawn() -> int:
        return len(durable.read_rows(out / "seeds.jsonl"))

    return Sources(
        seed=lambda: runs[num_drawn()]["seed"],
        entropy=lambda: runs[num_drawn() - 1].get("entropy") or os.urandom(16).hex(),
    )


def _code(contest: Path, path: Path, entry: dict[str, Any]) -> Path:
    """The submission's folder if it is still the same code."""
    folder = contest / "submissions" / entry["name"]
    if folder.is_dir() and submission.code_sha256(folder) == entry["code_sha256"]:
        return folder
    raise MissingArtifact(
        f"{folder} is not the code that {path} is about. Put it back from {path.parent / 'code'}, where it was kept."
    )

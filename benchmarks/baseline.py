"""The learning rate of a track's baseline, and the score that its target is made of.

`python -m benchmarks.baseline c1 [--minutes 60]`. One run with each rate, in turn, each verified as a submission is;
the best rate gets runs until there are three, and the target is their mean score less two points. A run takes half an
hour or so: none is begun when the minutes are over (exit 75), and the same command goes on where it stopped, on another
day or machine too, because everything is kept in `benchmarks/results/baseline-TRACK/`. Scores do not depend on what
else the machine does. Times do; they count only if it did nothing.
"""

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import spread
from hotlap import clock
from hotlap.errors import SLICE_OVER
from hotlap.speedrun import remote, submission, track, verify
from hotlap.speedrun.rounds import run_rounds
from hotlap.speedrun.stopping import Stopped

CONTEST = Path(__file__).resolve().parents[1]
RATES = ("1e-4", "2e-4", "4e-4", "8e-4")
NUM_RUNS = 3
POINTS_BELOW = 0.02
RATE = re.compile(r"^LEARNING_RATE = .*$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("track", choices=["c1", "c2"])
    parser.add_argument("--minutes", type=float, default=60.0)
    given = parser.parse_args()
    until = clock.Deadline(clock.monotonic_s() + 60.0 * given.minutes)
    chosen = track.find(CONTEST, given.track)
    folder = Path(__file__).parent / "results" / f"baseline-{given.track}"
    entries = {rate: submission.load(with_rate(folder / "entries", given.track, rate), chosen) for rate in RATES}
    try:
        one_each = run_rounds(entries, chosen, 1, folder / "rates", remote.sources(), say, until).runs
        best = best_of({rate: runs[0] for rate, runs in one_each.items()})
        for num_runs in range(2, NUM_RUNS + 1):
            if until.is_over():
                raise Stopped
            verify.measure(entries[best], chosen, num_runs, folder / "rates" / best, remote.sources(), say)
    except Stopped:
        say("stopped; the same command goes on")
        summarize(folder)
        return SLICE_OVER
    summarize(folder)
    return 0


def with_rate(folder: Path, track_id: str, rate: str) -> Path:
    """The shipped baseline with another learning rate, as a submission of its own."""
    name = f"{track_id}-000-baseline"
    target = folder / rate / name
    shutil.copytree(CONTEST / "submissions" / name, target, dirs_exist_ok=True)
    text = (target / submission.TRAIN).read_text(encoding="utf-8")
    if len(RATE.findall(text)) != 1:
        raise SystemExit(f"{target / submission.TRAIN} does not set one LEARNING_RATE.")
    (target / submission.TRAIN).write_text(RATE.sub(f"LEARNING_RATE = {rate}", text), encoding="utf-8")
    return target


def best_of(first_runs: dict[str, dict[str, Any]]) -> str:
    """The rate with the best score; of equals the lowest."""
    scored = {rate: run["score"] for rate, run in first_runs.items() if run["score"] is not None}
    if not scored:
        raise SystemExit(f"No run was scored: {[run['complaints'] for run in first_runs.values()]}")
    return max(scored, key=lambda rate: (scored[rate], -float(rate)))


def summarize(folder: Path) -> None:
    """Print, and keep beside the runs, what there is of them so far."""
    found: dict[str, Any] = {"rates": {}}
    for rate in RATES:
        paths = sorted((folder / "rates" / rate).glob("run-*/result.json"))
        if runs := [json.loads(path.read_bytes()) for path in paths]:
            found["rates"][rate] = {"scores": [run["score"] for run in runs], "wall_s": [run["wall_s"] for run in runs]}
    full = {rate: each for rate, each in found["rates"].items() if len(each["scores"]) == NUM_RUNS}
    for rate, each in full.items():
        scores: Sequence[float] = each["scores"]
        found |= {
            "learning_rate": rate,
            "target": round(sum(scores) / len(scores) - POINTS_BELOW, 3),
            "train_s": spread(each["wall_s"]),
        }
    text = json.dumps({**found, "load": os.getloadavg()[0]}, indent=1)
    (folder / "summary.json").write_text(text + "\n")
    print(text)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

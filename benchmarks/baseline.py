"""The learning rate of a track's baseline.

`python -m benchmarks.baseline c2 [--minutes 60]`. One run with each rate, from the lowest on, each verified as a
submission is, all with one seed and one set of test rows; of equal scores the lowest rate is best, so that nothing
follows one that answers every row. A run takes half an hour or so: none is begun when the minutes are over (exit 75),
and the same command goes on where it stopped, on another day or machine too, because everything is kept in
`benchmarks/results/baseline-TRACK/`. Scores do not depend on what else the machine does.

The target is then the mean score of three more runs less two points: `hotlap speedrun verify` of the baseline under
version 0, on a quiet machine, whose report version 1 takes over (docs/decisions/0129).
"""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from hotlap import clock
from hotlap.errors import SLICE_OVER
from hotlap.speedrun import remote, submission, track, verify
from hotlap.speedrun.attempt import Sources
from hotlap.speedrun.stopping import Stopped

CONTEST = Path(__file__).resolve().parents[1]
RATES = ("1e-4", "2e-4", "4e-4", "8e-4")
RATE = re.compile(r"^LEARNING_RATE = .*$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("track", choices=["c1", "c2"])
    parser.add_argument("--minutes", type=float, default=60.0)
    given = parser.parse_args()
    until = clock.Deadline(clock.monotonic_s() + 60.0 * given.minutes)
    chosen = track.find(CONTEST, given.track)
    folder = Path(__file__).parent / "results" / f"baseline-{given.track}"
    drawn_once = remote.sources()
    one = Sources(
        seed=lambda: verify.drawn(folder / "seeds.jsonl", "seed", 1, drawn_once.seed),
        entropy=lambda: verify.drawn(folder / "entropies.jsonl", "entropy", 1, drawn_once.entropy),
    )
    runs: dict[str, dict[str, Any]] = {}
    try:
        for rate in RATES:
            if until.is_over():
                raise Stopped
            entry = submission.load(with_rate(folder / "entries", given.track, rate), chosen)
            say(f"rate {rate}")
            (runs[rate],) = verify.measure(entry, chosen, 1, folder / "rates" / rate, one, say)["runs"]
            if runs[rate]["score"] == 1.0:
                break
    except Stopped:
        say("stopped; the same command goes on")
        return SLICE_OVER
    found = {"best": best_of(runs), "rates": {rate: runs[rate]["score"] for rate in runs}}
    text = json.dumps(found, indent=1)
    (folder / "summary.json").write_text(text + "\n")
    print(text)
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


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

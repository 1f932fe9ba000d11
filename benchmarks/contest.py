"""What a shipped baseline takes and scores on its track, verified for real: the figure that a target is made of.

`python -m benchmarks.contest c1 [--runs 3]`, on an otherwise idle machine. The first call builds the environment and
fetches the model, which is not timed. Nothing is written to the records: the folder that is printed holds it all, and
the same command with `--out` goes on in it. Prints one JSON object.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from benchmarks import spread
from hotlap.speedrun import remote, submission, track, verify

CONTEST = Path(__file__).resolve().parents[1]
POINTS_BELOW = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("track", choices=["c1", "c2"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--submission", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    chosen = track.find(CONTEST, given.track)
    folder = given.submission or CONTEST / "submissions" / f"{given.track}-000-baseline"
    out = (given.out or Path(tempfile.mkdtemp(prefix=f"contest-{given.track}-"))).absolute()
    print(f"results in {out}", file=sys.stderr)
    entry = submission.load(folder.absolute(), chosen)
    began = os.getloadavg()[0]
    report = verify.measure(entry, chosen, given.runs, out, remote.sources(), lambda text: print(text, file=sys.stderr))
    runs = report["runs"]
    scores = [run["score"] for run in runs if run["score"] is not None]
    print(json.dumps({
        "track": given.track, "submission": entry.name, "out": str(out),
        "train_s": spread([run["wall_s"] for run in runs]),
        "cpu_s": spread([run["cpu_s"] for run in runs]),
        "evaluation_s": spread([run["evaluation_s"] for run in runs if run["score"] is not None]) if scores else None,
        "scores": scores,
        "target_from_these": round(sum(scores) / len(scores) - POINTS_BELOW, 3) if scores else None,
        "complaints": [run["complaints"] for run in runs],
        "load_before": began, "load_after": os.getloadavg()[0],
    }))  # fmt: skip


if __name__ == "__main__":
    main()

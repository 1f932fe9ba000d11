"""A verification on a rented machine: `python -m hotlap.speedrun.remote SUBMISSION --track ID --runs N --out DIR`.

`SUBMISSION` lies in its contest's folder, beside `tracks/`; nothing is written there. Seeds, rows, predictions and the
report come to `DIR`, from which the same command goes on after a cut, and which `hotlap speedrun verify SUBMISSION
--measured DIR` takes into the records at home. Exit codes are those of `verify`: 0 pass, 8 fail or undecided, 75 asked
to stop, and those of the errors.
"""

import argparse
import json
import secrets
import sys
from pathlib import Path

from hotlap.errors import DONE, NOT_PROVEN, SLICE_OVER, HotlapError, Refused
from hotlap.speedrun import submission, track, verify
from hotlap.speedrun.attempt import Sources
from hotlap.speedrun.stopping import Stopped


def sources() -> Sources:
    """Chance from the operating system."""
    return Sources(seed=lambda: secrets.randbelow(2**31), entropy=lambda: secrets.token_hex(16))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("submission", type=Path)
    parser.add_argument("--track", required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(argv)
    try:
        code, reason, message = _measure(given.submission.absolute(), given.track, given.runs, given.out.absolute())
    except Stopped:
        code, reason, message = SLICE_OVER, "stopped", "the same command goes on from here"
    except HotlapError as error:
        code, reason, message = error.exit_code, error.reason, str(error)
    print(json.dumps({"event": "result", "exit_code": code, "reason": reason, "message": message}), flush=True)
    _say(f"hotlap: exit {code} {reason}: {' '.join(message.split())}")
    return code


def _measure(folder: Path, track_id: str, num_runs: int, out: Path) -> tuple[int, str, str]:
    contest = folder.parents[1]
    chosen = track.find(contest, track_id)
    if out.is_relative_to(contest / "records"):
        raise Refused(f"{out} lies in the records, which only `hotlap speedrun verify` writes. Name another --out.")
    report = verify.measure(submission.load(folder, chosen), chosen, num_runs, out, sources(), _say)
    verdict = report["decision"]["verdict"]
    why = "; ".join(report["decision"]["reasons"])
    return (
        (DONE if verdict == "pass" else NOT_PROVEN),
        verdict,
        f"{report['summary']['time_seconds_mean']:.2f} s; {why}",
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

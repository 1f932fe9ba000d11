"""Run a study with a known secret, made to be killed: `python dying_study.py FOLDER NUM_JUDGED [PROPOSAL]`.

With the number of a proposal it kills itself in the middle of that proposal's first trial.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from hotlap.research import plan, study
from hotlap.research.space import load_study


def main(folder: Path, num_judged: int, deadly: int | None = None) -> None:
    file = load_study(folder / "study.toml")
    begun: set[str] = set()

    def on_row(row: dict[str, Any], _history: object) -> None:
        if row["kind"] == "started" and row["proposal"] == deadly is not None:
            begun.add(row["run_id"])

    def on_progress(run_id: str, _fraction: float, _loss: float | None) -> None:
        if run_id in begun:
            os.kill(os.getpid(), signal.SIGKILL)

    listener = study.Listener(on_row, on_progress, print)
    with study.opened(file, study.find_folder(folder / "study.toml", folder), listener, lambda n: b"k" * n) as opened:
        print(opened.run(lambda history, secret: plan.next_in_search(history, secret, "2026-11-30", num_judged)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))

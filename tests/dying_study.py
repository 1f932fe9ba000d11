"""Run a study with a known secret, made to be killed: `python dying_study.py FOLDER NUM_JUDGED`."""

import sys
from pathlib import Path

from hotlap.research import plan, study
from hotlap.research.space import load_study


def main(folder: Path, num_judged: int) -> None:
    file = load_study(folder / "study.toml")
    listener = study.Listener(lambda _row, _history: None, lambda _run, _fraction, _loss: None, print)
    with study.opened(file, study.find_folder(folder / "study.toml", folder), listener, lambda n: b"k" * n) as opened:
        print(opened.run(lambda history, secret: plan.next_in_search(history, secret, "2026-11-30", num_judged)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

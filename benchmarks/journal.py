"""A journal of 10,000 runs: reading it, making its board anew, appending to it. `python -m benchmarks.journal`.

The runs are those of a simulated `random1` search of 2,000, five times under other names; each has a loss curve of
64 points, as real ones do. Prints JSON. Seconds are of the wall; `board_cpu_s` is the processor's.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hotlap import durable
from hotlap.research import board, simulate
from hotlap.research.history import History, Journal, Row, StudyFolder
from hotlap.research.space import StudyConfig

NUM_RUNS, COPIES, ROUNDS = 2_000, 5, 7
CURVE = [[round(place / 64, 4), round(3 - place / 64, 4)] for place in range(1, 65)]


def main() -> None:
    one: list[Row] = []
    study = StudyConfig(name="journal", proposer="random1", baseline_runs=6)
    simulate.search(study, simulate.draw_bowl(np.random.default_rng(0)), NUM_RUNS, 0, one.append)
    rows = one[:1] + [renamed(row, copy) for copy in range(COPIES) for row in one[1:]]
    for row in rows:
        if row["kind"] == "run":
            row["loss_curve"] = CURVE
    with tempfile.TemporaryDirectory() as name:
        folder = StudyFolder(Path(name))
        durable.append_rows(folder.journal, rows)
        history = folder.read()
        journal = Journal(folder, print)
        note = {"kind": "note", "text": "x" * 3000}
        report = {
            "runs": history.num_ended,
            "journal_mb": round(folder.journal.stat().st_size / 1e6, 1),
            "read_and_fold_s": timed(folder.read),
            "fold_s": timed(lambda: History.of(rows)),
            "board_rendered_s": timed(lambda: board.render(history)),
            "board_rendered_and_written_s": timed(lambda: board.write(folder, history)),
            "board_cpu_s": timed(lambda: board.render(history), now_s=time.process_time),
            "append_ms": 1000 * timed(lambda: journal.append(note), 50),
            "fsync_alone_ms": 1000 * timed(lambda: synced(folder.path / "bare", 3000), 50),
            "load": round(os.getloadavg()[0], 1),
        }
    print(json.dumps(report, indent=1))


def renamed(row: Row, copy: int) -> Row:
    """The same event of another run, another proposal."""
    row = dict(row)
    if "run_id" in row:
        row["run_id"] = f"r{copy}{row['run_id'][1:]}"
    for key in ("run_ids_candidate", "run_ids_incumbent"):
        if key in row:
            row[key] = [f"r{copy}{name[1:]}" for name in row[key]]
    if row["proposal"] is not None:
        row["proposal"] += copy * NUM_RUNS
    return row


def timed(act: Callable[[], object], rounds: int = ROUNDS, now_s: Callable[[], float] = time.monotonic) -> float:
    """Median seconds."""
    seconds: list[float] = []
    for _ in range(rounds):
        began_s = now_s()
        act()
        seconds.append(now_s() - began_s)
    return round(statistics.median(seconds), 5)


def synced(path: Path, num_bytes: int) -> None:
    with path.open("ab") as file:
        file.write(b"x" * num_bytes)
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    main()

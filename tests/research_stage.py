"""Studies for tests: files on disk, real child programs, in this process or in one of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from processes import command_lines

from hotlap import durable
from hotlap.clock import Deadline
from hotlap.research import claim, plan, study
from hotlap.research.history import History, Row, StudyFolder
from hotlap.research.space import load_study

PROGRAM = Path(__file__).with_name("trial_program.py")
DRIVER = Path(__file__).with_name("dying_study.py")
SECRET_BYTES = b"k"


def make_study(folder: Path, noise: float = 0.005, sleep_s: float = 0.0, start: str = "", **settings: Any) -> Path:
    """A study's TOML file in `folder`, over x0 to x3 unless told otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "world.json").write_text(json.dumps({"noise": noise, "sleep_s": sleep_s}))
    values = {
        "name": "bowl",
        "program": str(PROGRAM),
        "data": "world.json",
        "budget_s": 0.5,
        "setup_s": 20.0,
        "baseline_runs": 3,
        "axes": ["x0", "x1", "x2", "x3"],
        "threads": 1,
    } | settings
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    path = folder / "study.toml"
    path.write_text("[study]\n" + "\n".join(lines) + f"\n[start]\nx0 = 0.8\n{start}\n")
    return path


class Stage:
    """One study, searched and verified in this process with a known secret."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = study.find_folder(path, path.parent)
        self.said: list[str] = []
        self.progress: list[tuple[str, float]] = []

    def act(self, next_action: study.Plan, on_row: Callable[[Row, History], None] = lambda _row, _history: None) -> str:
        return self.opened(lambda opened: opened.run(next_action), on_row)

    def ask(self, num_trials: int, until: Deadline | None = None) -> str:
        """As the command line does, commands that are asked for proposals included."""
        return self.opened(lambda opened: opened.search(num_trials, until))

    def opened(
        self,
        act: Callable[[study.Study], str],
        on_row: Callable[[Row, History], None] = lambda _row, _history: None,
    ) -> str:
        def on_progress(run_id: str, fraction: float, _loss: float | None) -> None:
            self.progress.append((run_id, fraction))

        listener = study.Listener(on_row, on_progress, self.said.append)
        draw = lambda count: SECRET_BYTES * count  # noqa: E731
        with study.opened(load_study(self.path), self.folder, listener, draw) as opened:
            return act(opened)

    def search(self, num_judged: int, **listening: Any) -> str:
        return self.act(
            lambda history, secret: plan.next_in_search(history, secret, "2026-11-30", num_judged), **listening
        )

    def verify(self) -> str:
        return self.act(claim.next_in_verification)

    @property
    def history(self) -> History:
        return self.folder.read()

    @property
    def rows(self) -> list[Row]:
        return durable.read_rows(self.folder.journal)

    @property
    def secret(self) -> bytes:
        return self.folder.secret.read_bytes().strip()


def start_study(folder: Path, *numbers: int) -> "subprocess.Popen[str]":
    """The driver with its numbers, in a process of its own."""
    argv = [sys.executable, str(DRIVER), str(folder), *map(str, numbers)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def living_trials(folder: StudyFolder) -> list[str]:
    """Command lines of processes that work on a trial of this study."""
    place = str(folder.trials.absolute())
    return [" ".join(words) for _, words in command_lines() if any(word.startswith(place) for word in words)]


def essence(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """What was proposed, tried and decided, without times, names of runs, and runs that were lost."""
    found: list[tuple[Any, ...]] = []
    for row in rows:
        if row["kind"] == "run" and row["status"] != "killed":
            found.append((row["role"], row["axis"], row["new"], row["config_hash"], row["val_search_nats_per_byte"]))
        elif row["kind"] == "decision":
            names = ("outcome", "proposal", "delta", "s_pooled", "df", "placebo", "moves_anchor", "candidate_hash")
            found.append(tuple(row[name] for name in names))
    return found

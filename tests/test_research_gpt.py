"""A study on the real trial: two charged seconds of the single-file GPT on the embedded text, from the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotlap.research.executor import ask_axes
from hotlap.research.history import StudyFolder
from hotlap.research.space import load_study, space_of

pytestmark = pytest.mark.long

STUDY = """
[study]
name = "gpt"
budget_s = 2.0
setup_s = 90.0
threads = 1
acceptance = "naive"
on_disturbed = "use"
axes = ["lr", "warmup", "weight_decay", "batch_size", "width", "depth", "dropout", "schedule"]

[start]
lr = 1e-4
table_rows = 4096
input_ngram = 2
"""


@pytest.mark.torch
def test_the_search_raises_a_learning_rate_that_is_far_too_low(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    argv = [sys.executable, "-m", "hotlap", "research", "study.toml", "--trials", "1", "--json"]
    done = subprocess.run(
        argv, cwd=tmp_path, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    history = StudyFolder(tmp_path / "studies" / "gpt").read()
    assert [run.status for run in history.runs] == ["ok", "ok"]
    before, after = history.runs
    assert before.loss is not None and after.loss is not None
    assert after.row["axis"] == "lr" and after.config["lr"] > 1e-4
    assert after.loss < before.loss - 0.1, "far beyond what two seconds are noisy by"
    assert json.loads(done.stdout)["anchor"]["lr"] == after.config["lr"]
    board = (tmp_path / "studies" / "gpt" / "LEADERBOARD.md").read_text()
    assert "*trigram counts*" in board and "lr 0.0001 →" in board


@pytest.mark.torch
def test_every_axis_of_the_gpt_is_a_space(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text('[study]\nname = "all"\n')
    file = load_study(tmp_path / "study.toml")
    space = space_of(file, ask_axes(file.study.program))
    assert {"lr", "width", "depth", "schedule", "optimizer"} <= set(space.start)
    for axis in space.axes:
        assert axis.complaint(space.start[axis.name]) is None
        for value in axis.near(space.start[axis.name], 0.35, 6):
            assert axis.complaint(value) is None

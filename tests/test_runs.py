"""The run lock, and what a run's folder tells."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from zygote import Zygote

from hotlap import checkpoint, clock, durable, runs
from hotlap.config import RunConfig
from hotlap.errors import RunLocked, UsageError

MakeConfig = Callable[..., RunConfig]


def silent(text: str) -> None:
    """Nobody listens."""


@pytest.fixture
def run(tmp_path: Path) -> runs.RunFolder:
    return runs.RunFolder(tmp_path / "runs" / "one")


def test_one_of_many_racers_gets_the_lock(run: runs.RunFolder) -> None:
    """All in this living process, so whoever comes second meets a live holder."""
    barrier = threading.Barrier(8)
    got: list[runs.RunLock] = []
    refused: list[RunLocked] = []

    def race() -> None:
        barrier.wait()
        try:
            got.append(runs.acquire(run, 60.0, silent))
        except RunLocked as error:
            refused.append(error)

    racers = [threading.Thread(target=race) for _ in range(8)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert (len(got), len(refused)) == (1, 7)
    assert got[0].number == 1
    assert "being trained by slice 1" in str(refused[0]) and "hotlap stop one" in str(refused[0])


def test_naive_lock_file_lets_two_in(tmp_path: Path) -> None:
    """Look, then write: both see no lock. So the race above is one that can be lost."""
    barrier = threading.Barrier(2)
    got: list[int] = []

    def race(number: int) -> None:
        is_free = not (tmp_path / "lock").exists()
        barrier.wait()
        if is_free:
            (tmp_path / "lock").write_text(str(number))
            got.append(number)

    racers = [threading.Thread(target=race, args=(number,)) for number in range(2)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert len(got) == 2


def test_release_lets_the_next_in(run: runs.RunFolder) -> None:
    runs.acquire(run, 60.0, silent).release({"reason": "slice_over"})
    assert runs.acquire(run, 60.0, silent).number == 2


def test_dead_holder_on_this_machine_is_taken_over_at_once(run: runs.RunFolder) -> None:
    child = (
        "import sys; from pathlib import Path; from hotlap import runs;"
        "runs.acquire(runs.RunFolder(Path(sys.argv[1])), 3600.0, print)"
    )
    subprocess.run([sys.executable, "-c", child, str(run.path)], check=True)
    said: list[str] = []
    assert runs.acquire(run, 60.0, said.append).number == 2
    assert "died without a word" in said[0]


def test_holder_elsewhere_is_believed_until_its_lock_runs_out(
    run: runs.RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = runs.acquire(run, 60.0, silent)
    monkeypatch.setattr(runs, "machine_word", lambda: "another machine")
    with pytest.raises(RunLocked, match="for at most"):
        runs.acquire(run, 60.0, silent)
    now_s = clock.wall_s()
    monkeypatch.setattr(clock, "wall_s", lambda: now_s + 61.0)
    said: list[str] = []
    new = runs.acquire(run, 60.0, said.append)
    assert (new.number, "ran out" in said[0]) == (2, True)
    new.require()
    with pytest.raises(RunLocked, match="Slice 2 has taken over"):
        old.require()


def test_holder_that_lost_the_lock_cannot_publish(run: runs.RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes up in the middle of a publish: all files are written, only the rename is missing."""
    old = runs.acquire(run, 60.0, silent)
    store = checkpoint.CheckpointStore(run.checkpoints, old.number, 2, old.require)
    store.publish(1, lambda: [("weights", b"1")], {}, 10)

    def fall_asleep(_staged: Path) -> None:
        woken_at_s = clock.wall_s() + 61.0
        monkeypatch.setattr(clock, "wall_s", lambda: woken_at_s)
        runs.acquire(run, 60.0, silent)

    with pytest.raises(RunLocked):
        store.publish(2, lambda: [("weights", b"2")], {}, 10, inspect=fall_asleep)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000001-slice-0001"]


def test_what_a_loser_publishes_between_check_and_rename_never_outranks(run: runs.RunFolder) -> None:
    """No file system compares and renames in one go; the slice number in the name closes that gap."""
    late = checkpoint.CheckpointStore(run.checkpoints, 1, 9, lambda: None)
    heir = checkpoint.CheckpointStore(run.checkpoints, 2, 9, lambda: None)
    heir.publish(40, lambda: [("weights", b"heir")], {}, 10)
    late.publish(50, lambda: [("weights", b"late")], {}, 10)
    newest = checkpoint.CheckpointStore(run.checkpoints, 3, 9, lambda: None).newest(silent)
    assert newest is not None and (newest.slice_number, newest.step) == (2, 40)


@pytest.mark.torch
def test_two_slices_at_once_one_proceeds(zygote: Zygote, make_config: MakeConfig, tmp_path: Path) -> None:
    """The one that has the lock waits in the middle of its training until the other has ended."""
    config, go = make_config(), tmp_path / "go"
    both = [zygote.start(config, "patches:as_told", {"TEST_WAIT_BEFORE": f"3 {go}"}) for _ in range(2)]
    zygote.wait_for_any(both)
    go.touch()
    codes = sorted(process.wait() for process in both)
    assert codes == [0, 3]
    loser = next(process for process in both if process.status == 3)
    assert loser.result()["reason"] == "locked"


@pytest.mark.torch
def test_sleeping_holder_wakes_up_and_stops(zygote: Zygote, make_config: MakeConfig, tmp_path: Path) -> None:
    """A slice is frozen (as a suspended laptop freezes it) until its lock ran out and another finished the run."""
    config, go = make_config(), tmp_path / "go"
    frozen = zygote.start(config, "patches:as_told", {"TEST_LOCK_S": "1.0", "TEST_WAIT_BEFORE": f"3 {go}"})
    frozen.wait_for("step", step=2)
    frozen.kill(signal.SIGSTOP)
    time.sleep(1.2)
    assert zygote.run(config).status == 0
    run = runs.RunFolder(config.run_folder)
    metrics = run.metrics.read_bytes()
    names = sorted(path.name for path in run.checkpoints.iterdir())
    go.touch()
    frozen.kill(signal.SIGCONT)
    assert frozen.wait() == 3
    assert frozen.result()["reason"] == "locked"
    assert run.metrics.read_bytes() == metrics
    assert sorted(path.name for path in run.checkpoints.iterdir()) == names


@pytest.mark.torch
def test_finished_run_answers_0_and_trains_nothing(zygote: Zygote, make_config: MakeConfig) -> None:
    config = make_config(train__max_steps=2)
    assert zygote.run(config).status == 0
    run = runs.RunFolder(config.run_folder)
    before = durable.sha256_file(run.metrics), runs.newest_number(run)
    again = zygote.run(config)
    assert again.status == 0
    assert (durable.sha256_file(run.metrics), runs.newest_number(run)) == before
    assert zygote.run(make_config(train__max_steps=2, optim__lr=1.0)).status == 3


def test_states_of_runs(run: runs.RunFolder) -> None:
    lock = runs.acquire(run, 60.0, silent)
    assert runs.run_state(run).state == "running"
    lock.release({"reason": "slice_over"})
    assert runs.run_state(run).state == "paused"
    lock = runs.acquire(run, 60.0, silent)
    lock.release({"reason": "nan"})
    durable.append_rows(run.metrics, [{"step": 3, "loss": 2.5}, {"step": 3, "val_loss": 2.0}])
    state = runs.run_state(run)
    assert (state.state, state.step, state.loss, state.val_loss, state.num_slices) == ("nan", 3, 2.5, 2.0, 2)
    assert [found.name for found in runs.list_runs(run.path.parent)] == ["one"]
    assert runs.find_run("one", run.path.parent).path == run.path
    with pytest.raises(UsageError, match=r"no run 'two'.*there: one"):
        runs.find_run("two", run.path.parent)


def test_torn_holder_file_is_no_holder(run: runs.RunFolder) -> None:
    """Cannot come from our own publish; a copied or damaged folder may have one."""
    lock = runs.acquire(run, 60.0, silent)
    (lock.folder / "holder.json").write_text(json.dumps({"number": 1})[:7])
    assert runs.acquire(run, 60.0, silent).number == 2
    assert os.getpid() == runs.slice_state(run, 2).holder.pid  # type: ignore[union-attr]

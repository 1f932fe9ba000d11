"""What every executor promises, tried on all of them with a real trial program: this machine's, and a local Ray's."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from processes import command_lines
from research_stage import PROGRAM, Stage, living_trials, make_study
from trial_program import axes

from hotlap import child
from hotlap.research import plan, study
from hotlap.research.executor import NUMBERS, Ending, Executor, LocalExecutor, Trial
from hotlap.research.history import StudyFolder

pytestmark = pytest.mark.long

DEFAULTS = {name: axis["default"] for name, axis in axes().items()}


@pytest.fixture(scope="module")
def ray_of_two(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """One local Ray of two processors for all tests here: starting one takes seconds."""
    import ray

    before = os.environ.get("HOTLAP_HOME")
    os.environ["HOTLAP_HOME"] = str(tmp_path_factory.mktemp("nodes"))
    # As in the background of a shell, whose children ignore what Ray cancels with.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    signal.signal(signal.SIGINT, handler)
    yield
    ray.shutdown()
    os.environ.pop("HOTLAP_HOME") if before is None else os.environ.update(HOTLAP_HOME=before)


Make = Callable[[child.Stops], Executor]


@pytest.fixture(params=["local", "ray"])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param == "local":
        return lambda stops: LocalExecutor(2, stops, lambda _run_id, _fraction, _loss: None)
    request.getfixturevalue("ray_of_two")
    from hotlap.research.ray_executor import RayExecutor

    return RayExecutor


class Bench:
    """Trials in a folder, over a text that only this machine has."""

    def __init__(self, folder: Path) -> None:
        self.folder = StudyFolder(folder)
        (folder / "world.json").write_text(json.dumps({"noise": 0.0, "sleep_s": 0.3}))

    def trial(self, run_id: str, trick: str = "none", deadline_s: float = 60.0, pair: str | None = None) -> Trial:
        order: dict[str, Any] = {
            "config": {**DEFAULTS, "trick": trick},
            "budget_s": 0.5,
            "seed_init": 1,
            "seed_data": 2,
        }
        order |= {"data": str(self.folder.path / "world.json"), "threads": 1, "device": "cpu", "splits": ["search"]}
        return Trial(run_id, str(PROGRAM), order, deadline_s, self.folder.trial(run_id), pair)


def test_every_ending_has_its_status_and_all_its_fields(make: Make, tmp_path: Path) -> None:
    """Several at a time, in whatever order they end; and what a run leaves lies in its folder."""
    bench, executor = Bench(tmp_path), make(child.Stops())
    wanted = {"r1": ("ok", "none"), "r2": ("crash", "crash"), "r3": ("killed", "sigkill"), "r4": ("timeout", "hang")}
    endings: dict[str, Ending] = {}
    try:
        for run_id, (status, trick) in wanted.items():
            executor.submit(bench.trial(run_id, trick, 3.0 if status == "timeout" else 60.0, pair="same"))
        for _ in wanted:
            ending = executor.next_ended()
            endings[ending.run_id] = ending
    finally:
        executor.close()
    assert {run_id: ending.fields["status"] for run_id, ending in endings.items()} == {
        run_id: status for run_id, (status, _) in wanted.items()
    }
    for ending in endings.values():
        assert {*NUMBERS, "status", "exit_code", "error_class", "error_tail"} <= set(ending.fields)
        assert not ending.was_stopped
    good = endings["r1"].fields
    assert good["val_search_nats_per_byte"] == pytest.approx(2.118, abs=0.05) and good["total_s"] >= 0.3
    assert good["validity"]["throttled_us"] >= 0
    assert "this trial crashes" in endings["r2"].fields["error_tail"]
    result = json.loads((bench.folder.trial("r1") / "result.json").read_text())
    assert result["val_search_nats_per_byte"] == good["val_search_nats_per_byte"]


def test_closing_leaves_nothing_that_runs(make: Make, tmp_path: Path) -> None:
    bench, executor = Bench(tmp_path), make(child.Stops())
    executor.submit(bench.trial("r1", "hang"))
    wait_until(lambda: pids_of("r1", tmp_path))
    executor.close()
    wait_until(lambda: not pids_of("r1", tmp_path))
    assert not pids_of("r1", tmp_path)


def test_what_waits_for_room_is_never_begun_after_closing(tmp_path: Path) -> None:
    bench, executor = Bench(tmp_path), LocalExecutor(1, child.Stops(), lambda _run_id, _fraction, _loss: None)
    for number in range(3):
        executor.submit(bench.trial(f"r{number}", "hang"))
    executor.close()
    assert not living_trials(bench.folder) and not bench.folder.trial("r2").exists()


def test_a_stop_is_told_as_one(make: Make, tmp_path: Path) -> None:
    bench, stops = Bench(tmp_path), child.Stops()
    executor = make(stops)
    try:
        executor.submit(bench.trial("r1", "hang"))
        wait_until(lambda: pids_of("r1", tmp_path))
        stops.handle(signal.SIGTERM, None)
        ending = executor.next_ended()
    finally:
        executor.close()
    assert ending.was_stopped and ending.fields["status"] == "killed"


def pids_of(run_id: str, folder: Path) -> list[int]:
    """Processes that work on a run: in the test's folder here, or in the nodes' beside it."""
    place = str(folder.parent)
    return [
        pid for pid, words in command_lines() if any(word.startswith(place) and f"/{run_id}" in word for word in words)
    ]


def wait_until(holds: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_lost_worker_of_ray_is_a_killed_run_that_the_study_makes_again(ray_of_two: None, tmp_path: Path) -> None:
    """The task's process is killed, its child dies with it, and the study starts the run anew under other seeds."""
    import ray

    stage = Stage(make_study(tmp_path, sleep_s=2.0, executor="ray", baseline_runs=1, placebo_every=1000))

    def kill_worker(run_id: str) -> None:
        wait_until(lambda: pids_of(run_id, tmp_path))
        (pid,) = pids_of(run_id, tmp_path)
        os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)

    killers: list[threading.Thread] = []

    def on_row(row: dict[str, Any], _history: object) -> None:
        if row["kind"] == "started" and row["proposal"] == 0 and not killers:
            killers.append(threading.Thread(target=kill_worker, args=(row["run_id"],)))
            killers[0].start()

    def search(opened: study.Study) -> str:
        return opened.run(lambda history, secret: plan.next_in_search(history, secret, "2026-11-30", 1))

    assert stage.opened(search, on_row) == "trials"
    killers[0].join()
    rows = [row for row in stage.rows if row["kind"] == "run"]
    assert [row["status"] for row in rows if row["proposal"] == 0][:2] == ["killed", "ok"]
    first, second = [row for row in rows if row["proposal"] == 0][:2]
    assert first["error_class"] == "WorkerCrashedError" and first["seed_init"] != second["seed_init"]
    assert {row["executor"] for row in rows} == {"ray"}
    assert ray.is_initialized(), "a Ray that was there before is left alone"

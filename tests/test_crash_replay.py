"""Power loss anywhere: a run is recorded call by call, and resumed from every disk state a crash could have left.

Two slices are recorded, the first stopped half-way. In each state of the crash model (`crash_disk.py`) whatever was
told to be published is there and whole, and the same command finishes with the bits of the run that never crashed.
"""

import copy
import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crash_disk import RecordingDisk, crash_states
from test_golden import state_of

from hotlap import clock, durable, guard, runs
from hotlap.config import RunConfig
from hotlap.runs import RunFolder

pytestmark = pytest.mark.torch


@pytest.fixture
def new_process(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """All slices run in this process, which loads the base model once, and looks for no servers among all processes.
    Call this where a new process would start: from then on the one before counts as dead."""
    from hotlap.train import model

    base = model.load_base(tiny_model)
    births = itertools.count()
    monkeypatch.setattr(model, "load_base", lambda folder, *_: copy.deepcopy(base, {id(base.config): base.config}))
    monkeypatch.setattr(guard, "require_not_serving", lambda: None)

    def start() -> None:
        birth = f"{next(births)}"
        monkeypatch.setattr(clock, "process_birth", lambda pid: birth)

    return start


@pytest.fixture
def memory_disk() -> Iterator[Path]:
    """A folder in memory where there is one: each state costs a hundred syncs."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        yield Path(folder)


def run_slice(
    config: RunConfig, stop_after: int | None = None, on_published: Callable[[int], None] = lambda step: None
) -> dict[str, Any]:
    from hotlap.train.context import Context
    from hotlap.train.slice import run_slice
    from hotlap.train.stop import StopSignals
    from hotlap.train.timeline import Timeline

    stop = StopSignals(grace_s=5.0)

    def emit(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == stop_after:
            stop._deadline = clock.Deadline(clock.monotonic_s() + 60.0)
        elif event["event"] == "published":
            on_published(event["step"])

    now_s = clock.monotonic_s()
    context = Context(config, clock.Deadline(now_s + 300.0), stop, Timeline(now_s), emit, lambda text: None, lambda: 7)
    return run_slice(context)


def test_resumes_from_every_state_a_crash_may_leave(
    new_process: Callable[[], None],
    make_config: Callable[..., RunConfig],
    memory_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config(
        output_dir=memory_disk / "recorded" / "runs",
        lora__target_modules=("q_proj",),
        data__eval_examples=4,
        eval__every_steps=2,
        train__max_steps=4,
        train__grad_accumulation=1,
        checkpoint__keep=1,
    )
    new_process()
    assert run_slice(config.model_copy(update={"run": "to-fill-the-cache-of-packed-data"}))["reason"] == "done"
    shutil.rmtree(memory_disk / "recorded")
    (memory_disk / "recorded").mkdir()
    recorder = RecordingDisk()
    published: list[tuple[int, int]] = []

    def on_published(step: int) -> None:
        published.append((len(recorder.log), step))

    monkeypatch.setattr(durable, "disk", recorder)
    new_process()
    assert run_slice(config, stop_after=3, on_published=on_published)["reason"] == "stopped"
    new_process()
    assert run_slice(config, on_published=on_published)["reason"] == "done"
    monkeypatch.setattr(durable, "disk", durable.Disk())
    right = state_of(RunFolder(config.run_folder))

    resumed_at = Counter[int]()
    for number, state in enumerate(crash_states(recorder.log, memory_disk / "recorded")):
        place = state.materialize(memory_disk / f"state-{number}")
        again = config.model_copy(update={"output_dir": str(place / "runs")})
        run = RunFolder(again.run_folder)
        newest = runs.newest_checkpoint(run, lambda text: None)
        promised = max((step for point, step in published if point <= state.last_point), default=-1)
        assert (newest.step if newest else -1) >= promised, state.how
        new_process()
        result = run_slice(again)
        assert result["reason"] == "done", (state.how, result["message"])
        assert state_of(run) == right, state.how
        resumed_at[result.get("resumed_at", -1)] += 1
        shutil.rmtree(place)
    assert resumed_at.total() > 200
    assert {0, 2, 3, 4} <= set(resumed_at)

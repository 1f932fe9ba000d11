"""The golden property: where slices are cut does not change what is learned, bit for bit.

On one processor in float32 a chain of slices cut by a deadline, a stop signal or SIGKILL, anywhere, has the adapter,
the optimizer state and the metrics of the run that was never cut.
"""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from zygote import Zygote

from hotlap import durable, runs
from hotlap.config import RunConfig
from hotlap.runs import RunFolder

pytestmark = pytest.mark.torch

MakeConfig = Callable[..., RunConfig]
TOLD = "patches:as_told"


def state_of(run: RunFolder) -> dict[str, str]:
    """Hashes of all that a finished run must agree in."""
    newest = runs.newest_checkpoint(run, lambda text: None)
    assert newest is not None
    return {
        "adapter": durable.sha256_file(run.adapter / "adapter_model.safetensors"),
        "best": durable.sha256_file(run.best / "adapter_model.safetensors"),
        "optimizer": durable.sha256_file(newest.folder / "optimizer.safetensors"),
        "checkpoint": durable.sha256_file(newest.folder / "adapter_model.safetensors"),
        "metrics": durable.sha256_file(run.metrics),
    }


def finish(zygote: Zygote, config: RunConfig, num_slices: int = 50, **told: str) -> int:
    """Slices until the run is done; how many that took."""
    for number in range(1, num_slices + 1):
        process = zygote.run(config, TOLD, **told)
        if process.status == 0:
            return number
        assert process.status == 75, process.talk()
    raise AssertionError(f"not done after {num_slices} slices")


@pytest.fixture(scope="module")
def uncut(zygote: Zygote, tiny_model: Path, f3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from tiny import tiny_config

    folder = tmp_path_factory.mktemp("uncut")
    config = tiny_config(tiny_model, f3, folder / "runs", data__eval_examples=6, eval__every_steps=7)
    process = zygote.run(config, HOTLAP_HOME=str(folder / "home"))
    assert process.status == 0, process.talk()
    return state_of(RunFolder(config.run_folder))


@pytest.fixture
def config(make_config: MakeConfig) -> RunConfig:
    return make_config(data__eval_examples=6, eval__every_steps=7)


def test_same_command_twice_gives_the_same_bits(zygote: Zygote, config: RunConfig, uncut: dict[str, str]) -> None:
    assert finish(zygote, config) == 1
    assert state_of(RunFolder(config.run_folder)) == uncut


def test_cut_by_stop_signals(zygote: Zygote, config: RunConfig, uncut: dict[str, str], tmp_path: Path) -> None:
    for step in (3, 8, 20):
        go = tmp_path / f"after-{step}"
        process = zygote.start(config, TOLD, {"TEST_WAIT_BEFORE": f"{step + 1} {go}"})
        process.wait_for("step", step=step)
        process.kill(signal.SIGINT if step == 8 else signal.SIGTERM)
        go.touch()
        assert process.wait() == 75, process.talk()
        assert process.result()["reason"] == "stopped"
        assert process.result()["step"] >= step
    assert finish(zygote, config) == 1
    assert state_of(RunFolder(config.run_folder)) == uncut


def test_cut_by_deadlines(zygote: Zygote, make_config: MakeConfig, uncut: dict[str, str]) -> None:
    """Steps slowed, so that a cap of ten seconds ends in the middle."""
    config = make_config(data__eval_examples=6, eval__every_steps=7, slice__minutes=10 / 60)
    assert finish(zygote, config, TEST_STEP_S="0.4") > 1
    run = RunFolder(config.run_folder)
    assert {state.ending for state in runs.all_slices(run)} == {"slice_over", "done"}
    assert state_of(run) == uncut


def test_killed_15_times_anywhere(zygote: Zygote, make_config: MakeConfig, uncut: dict[str, str]) -> None:
    """SIGKILL at random moments, publishing all the time so that many kills hit a publish."""
    chance = random.Random(0)
    kills, num_runs = 0, 0
    while kills < 15:
        num_runs += 1
        changes = {"data__eval_examples": 6, "eval__every_steps": 7, "checkpoint__every_s": 0.02}
        config = make_config(run=f"killed-{num_runs}", **changes)
        while kills < 15:
            process = zygote.start(config, "patches:slower_disk")
            time.sleep(chance.uniform(0.0, 1.2))
            process.kill()
            if process.wait() == 0:
                break
            kills += 1
        finish(zygote, config)
        assert state_of(RunFolder(config.run_folder)) == uncut


def test_evaluation_and_publishing_do_not_change_the_training(
    zygote: Zygote, make_config: MakeConfig, uncut: dict[str, str]
) -> None:
    config = make_config(data__eval_examples=6, checkpoint__every_s=0.01, checkpoint__keep=5)
    finish(zygote, config)
    run = RunFolder(config.run_folder)
    state = state_of(run)
    assert {name: state[name] for name in ("adapter", "optimizer")} == {
        name: uncut[name] for name in ("adapter", "optimizer")
    }
    rows = [row for row in durable.read_rows(run.metrics) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 31))


def test_another_seed_gives_other_bits(zygote: Zygote, make_config: MakeConfig, uncut: dict[str, str]) -> None:
    """So that the comparisons above can fail."""
    config = make_config(data__eval_examples=6, eval__every_steps=7, seed=8)
    finish(zygote, config)
    assert not set(state_of(RunFolder(config.run_folder)).values()) & set(uncut.values())

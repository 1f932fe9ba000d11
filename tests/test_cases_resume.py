"""Bug reports B01, B06, B08 and B45: what a resumed run must have in common with one that was never cut."""

import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fixtures_data import f3_rows, write_jsonl
from tiny import tiny_config
from zygote import SliceProcess, Zygote

from hotlap import durable, runs
from hotlap.config import OptimConfig, RunConfig
from hotlap.runs import RunFolder

pytestmark = pytest.mark.torch

MakeConfig = Callable[..., RunConfig]
TOLD = "patches:as_told"


def finished(process: SliceProcess) -> dict[str, Any]:
    assert process.status == 0, process.talk()
    return process.result()


def stopped_at(process: SliceProcess, step: int) -> None:
    assert process.status == 75, process.talk()
    assert (process.result()["reason"], process.result()["step"]) == ("stopped", step)


def step_rows(config: RunConfig) -> list[dict[str, Any]]:
    rows = [row for row in durable.read_rows(RunFolder(config.run_folder).metrics) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return rows


def adapter_hash(config: RunConfig) -> str:
    return durable.sha256_file(config.run_folder / "adapter" / "adapter_model.safetensors")


# --- B01: the learning rate across a resume ---


@dataclass(frozen=True)
class LongRuns:
    """Two epochs of F3 over a cosine: one run that was never cut, and the same one stopped at step 40."""

    uncut: RunConfig
    at_40: RunConfig


@pytest.fixture(scope="module")
def long_runs(zygote: Zygote, tiny_model: Path, f3: Path, tmp_path_factory: pytest.TempPathFactory) -> LongRuns:
    folder = tmp_path_factory.mktemp("b01")
    uncut, at_40 = (
        tiny_config(
            tiny_model,
            f3,
            folder / name,
            data__seq_len=32,
            lora={"rank": 4, "target_modules": ["q_proj"]},
            train={"epochs": 2.0},
        )
        for name in ("uncut", "at-40")
    )
    whole = zygote.start(uncut, env={"HOTLAP_HOME": str(folder / "home")})
    cut = zygote.run(at_40, TOLD, TEST_STOP_AT="40", HOTLAP_HOME=str(folder / "home"))
    whole.wait()
    finished(whole)
    stopped_at(cut, 40)
    return LongRuns(uncut, at_40)


@pytest.fixture
def at_40(long_runs: LongRuns, tmp_path: Path) -> RunConfig:
    """A copy to go on with."""
    shutil.copytree(long_runs.at_40.output_dir, tmp_path / "runs")
    return long_runs.at_40.model_copy(update={"output_dir": str(tmp_path / "runs")})


def rebuilt_lr(step: int, num_steps: int, warmup_steps: int = 5) -> float:
    """What a scheduler does that is rebuilt on resume from today's settings: no clamp, no memory of the horizon."""
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup_steps) / (num_steps - warmup_steps)))


def refused(process: SliceProcess, was: int, would_be: int) -> str:
    assert process.status == 3, process.talk()
    assert process.result()["reason"] == "changed"
    message = process.result()["message"]
    assert f"horizon is {was} steps and would be {would_be}" in message
    return message


def with_train(config: RunConfig, **train: Any) -> RunConfig:
    return RunConfig.model_validate(config.model_dump() | {"train": train})


def test_b01_a_fewer_epochs_are_refused_with_both_horizons(zygote: Zygote, at_40: RunConfig):
    assert rebuilt_lr(41, 52) < 0.25 * rebuilt_lr(40, 104), "the rate drops"
    assert rebuilt_lr(80, 52) > rebuilt_lr(52, 52), "and climbs"
    message = refused(zygote.run(with_train(at_40, epochs=1.0)), 104, 52)
    assert "train.epochs is 2.0 in the run and 1.0 now" in message


def test_b01_b_deleted_rows_are_refused_with_both_horizons(zygote: Zygote, at_40: RunConfig, tmp_path: Path):
    assert abs(rebuilt_lr(41, 76) - rebuilt_lr(41, 104)) > 0.1, "the rate jumps"
    fewer = write_jsonl(tmp_path / "f3.jsonl", f3_rows(48))
    message = refused(zygote.run(at_40.model_copy(update={"dataset": str(fewer)})), 104, 76)
    assert "dataset: f3.jsonl" in message


def test_b01_c_more_steps_are_refused_with_both_horizons(zygote: Zygote, at_40: RunConfig):
    assert rebuilt_lr(41, 130) > rebuilt_lr(40, 104), "the rate rises"
    message = refused(zygote.run(with_train(at_40, max_steps=130)), 104, 130)
    assert "train.max_steps is None in the run and 130 now" in message


def test_b01_a_refused_run_goes_on_as_if_nothing_had_been_asked(zygote: Zygote, long_runs: LongRuns, at_40: RunConfig):
    refused(zygote.run(with_train(at_40, max_steps=130)), 104, 130)
    assert finished(zygote.run(at_40))["resumed_at"] == 40
    rates, uncut = ([row["lr"] for row in step_rows(config)] for config in (at_40, long_runs.uncut))
    assert len(rates) == len(uncut) == 104
    assert rates[40:] == pytest.approx(uncut[40:], rel=0, abs=1e-12)
    assert adapter_hash(at_40) == adapter_hash(long_runs.uncut)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_b01_past_the_horizon_the_rate_stays_where_it_ended(schedule: Any, ratio: float):
    from hotlap.train.optim import lr_at

    config = OptimConfig(lr=1.0, schedule=schedule, warmup_steps=5, final_lr_ratio=ratio)
    rates = [lr_at(step, 100, config) for step in range(1, 301)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[4:]))
    assert set(rates[100:]) == {1.0 if schedule == "constant" else ratio}


# --- B06: randomness across a resume ---


@pytest.fixture(scope="module")
def uncut_20(zygote: Zygote, tiny_model: Path, f3: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("b06")
    config = tiny_config(tiny_model, f3, folder / "runs", train__max_steps=20, lora__dropout=0.1)
    finished(zygote.run(config, HOTLAP_HOME=str(folder / "home")))
    return config


def dropped_by_a_restored_generator(num_steps: int, resumed_at: int | None = None) -> list[list[float]]:
    """One stream for everything: its state is put back and then used up again while seen batches are skipped."""
    import torch

    torch.manual_seed(7)
    dropped: list[list[float]] = []
    for step in range(num_steps):
        if step == resumed_at:
            state = torch.get_rng_state()
            torch.set_rng_state(state)
            torch.rand(resumed_at)
        dropped.append(torch.rand(4).tolist())
    return dropped


@pytest.mark.parametrize("step", [7, 13])
def test_b06_a_stopped_run_draws_what_the_uncut_one_drew(
    zygote: Zygote, make_config: MakeConfig, uncut_20: RunConfig, step: int
):
    """Whatever else has drawn from the global generators before."""
    uncut, resumed = dropped_by_a_restored_generator(20), dropped_by_a_restored_generator(20, resumed_at=step)
    assert uncut[:step] == resumed[:step] and uncut[step] != resumed[step], "losses differ from there on"
    config = make_config(train__max_steps=20, lora__dropout=0.1)
    stopped_at(zygote.run(config, TOLD, TEST_STOP_AT=str(step), TEST_RANDOM_NUMBERS="3"), step)
    assert finished(zygote.run(config, TOLD, TEST_RANDOM_NUMBERS="11"))["resumed_at"] == step
    assert adapter_hash(config) == adapter_hash(uncut_20)
    assert step_rows(config) == step_rows(uncut_20)


def test_b06_b_no_generator_is_stored_and_nothing_is_pickled(uncut_20: RunConfig):
    """So there is no file that the default loader of torch refuses, and none whose loss goes unseen."""
    newest = runs.newest_checkpoint(RunFolder(uncut_20.run_folder), lambda text: None)
    assert newest is not None
    files = sorted(newest.folder.iterdir())
    assert [path.name for path in files] == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
        "optimizer.safetensors",
    ]
    for path in files:
        data = path.read_bytes()
        header = data[8 : 8 + int.from_bytes(data[:8], "little")] if path.suffix == ".safetensors" else data
        assert isinstance(json.loads(header), dict)


# --- B08: the optimizer across a resume ---


@pytest.fixture(scope="module")
def uncut_30(zygote: Zygote, tiny_model: Path, f3: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("b08")
    config = tiny_config(tiny_model, f3, folder / "runs")
    finished(zygote.run(config, HOTLAP_HOME=str(folder / "home")))
    return config


def test_b08_a_losses_go_on_as_if_nothing_had_happened(zygote: Zygote, make_config: MakeConfig, uncut_30: RunConfig):
    config, naive = make_config(), make_config(run="naive")
    for each in (config, naive):
        stopped_at(zygote.run(each, TOLD, TEST_STOP_AT="15"), 15)
    finished(zygote.run(naive, TOLD, TEST_NAIVE="optimizer"))
    assert [row["loss"] for row in step_rows(naive)[15:]] != [row["loss"] for row in step_rows(uncut_30)[15:]]
    result = finished(zygote.run(config))
    assert (result["resumed_at"], result["step"], result["timeline"]["num_steps"]) == (15, 30, 15)
    assert step_rows(config) == step_rows(uncut_30)
    assert adapter_hash(config) == adapter_hash(uncut_30)


def test_b08_b_adapter_files_alone_are_no_checkpoint(zygote: Zygote, make_config: MakeConfig, uncut_30: RunConfig):
    config = make_config()
    checkpoints = config.run_folder / "checkpoints"
    published = uncut_30.run_folder / "adapter"
    shutil.copytree(published, checkpoints / "step-00000030-slice-0001")
    shutil.copytree(published, checkpoints / "step-00000015-slice-0001", ignore=shutil.ignore_patterns("manifest*"))
    newest_by_name = max(checkpoints.iterdir())
    assert (newest_by_name / "adapter_model.safetensors").exists(), "the naive choice finds something to load"
    process = zygote.run(config)
    result = finished(process)
    assert (result["resumed_at"], result["step"], result["timeline"]["num_steps"]) == (0, 30, 30)
    for name in ("step-00000030-slice-0001", "step-00000015-slice-0001"):
        assert f"{name} is passed over" in process.talk()
    assert step_rows(config) == step_rows(uncut_30)


# --- B45: the same tokens, cut into micro-batches differently ---


@dataclass(frozen=True)
class Rows:
    """Examples of some lengths, with the last so many tokens of each trained."""

    lengths: tuple[int, ...]
    num_targets: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.num_targets)


ALL_TRAINED = Rows((11, 101), (10, 100))
COMPLETION_ONLY = Rows((11, 101), (3, 90))


def packed_rows(rows: Rows, places: list[tuple[int, int]], seq_len: int) -> Any:
    """A data set of those examples, each at its (row, first position)."""
    import numpy as np

    from hotlap.data.facts import Facts
    from hotlap.data.packed import PackedDataset

    num_rows = 1 + max(row for row, _ in places)
    tokens_NT = np.full((num_rows, seq_len), 256, dtype=np.int32)
    segments_NT = np.zeros((num_rows, seq_len), dtype=np.uint16)
    is_trained_NT = np.zeros((num_rows, seq_len), dtype=np.bool_)
    chance = np.random.default_rng(0)
    for (row, first), length, num_targets in zip(places, rows.lengths, rows.num_targets, strict=True):
        tokens_NT[row, first : first + length] = chance.integers(0, 256, length)
        segments_NT[row, first : first + length] = segments_NT[row].max() + 1
        is_trained_NT[row, first + length - num_targets : first + length] = True
    facts = Facts(seq_len, num_rows, 2, 2, sum(rows.lengths), rows.total, max(rows.lengths), 256)
    return PackedDataset("b45", facts, tokens_NT, segments_NT, is_trained_NT, is_trained_NT.sum(axis=1))


@pytest.fixture(scope="module")
def adapted(tiny_model: Path) -> Iterator[Any]:
    """F1 with an adapter whose B is not zero, so that every tensor has a gradient."""
    import torch

    from hotlap.config import LoraConfig
    from hotlap.train import model

    adapted = model.attach_lora(model.load_base(tiny_model), LoraConfig(rank=4, alpha=8.0), 0, "tiny")
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.parameters.items():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield adapted
    torch.set_num_threads(num_threads)


def stepped(adapted: Any, dataset: Any, config: RunConfig) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of a step over the whole data set."""
    from hotlap.data.packed import Packing, plan_order
    from hotlap.train import optim
    from hotlap.train.opening import OpenedRun
    from hotlap.train.step import Stepper

    identity = runs.Identity({}, 7, {}, {}, {}, dataset.num_rows, 1, 1, "")
    opened = OpenedRun(identity, Path(), Packing(dataset, None), plan_order(config, 7, dataset.num_rows))
    optimizer = optim.build(adapted.parameters, config.optim)
    stepper = Stepper(adapted, optimizer, opened, config, on_out_of_memory=lambda step, rows: None)
    result = stepper.forward_backward(1)
    assert result.loss is not None
    return result.loss, {name: parameter.grad.clone() for name, parameter in adapted.parameters.items()}


def mean_of_means(adapted: Any, dataset: Any) -> dict[str, Any]:
    """The naive step: the mean over each micro-batch's tokens, then the mean over micro-batches."""
    import numpy as np

    from hotlap.train.step import batch_loss, num_targets, read_batch

    for parameter in adapted.parameters.values():
        parameter.grad = None
    for row in range(dataset.num_rows):
        batch = read_batch(dataset, np.array([row]))
        (batch_loss(adapted, batch) / num_targets(batch) / dataset.num_rows).backward()
    return {name: parameter.grad.clone() for name, parameter in adapted.parameters.items()}


def ways(rows: Rows, make_config: MakeConfig) -> Iterator[tuple[Any, RunConfig]]:
    """A padded batch of 2, two accumulated batches of 1, and both examples in one row."""
    apart, together = packed_rows(rows, [(0, 0), (1, 0)], 112), packed_rows(rows, [(0, 0), (0, 11)], 112)
    yield apart, make_config(train={"micro_batch_rows": 2, "max_steps": 1})
    yield apart, make_config(train={"grad_accumulation": 2, "max_steps": 1})
    yield together, make_config(train={"max_steps": 1})


@pytest.mark.parametrize("rows", [ALL_TRAINED, COMPLETION_ONLY], ids=["all trained", "completion only"])
def test_b45_every_trained_token_weighs_the_same(adapted: Any, make_config: MakeConfig, rows: Rows):
    import torch

    assert rows.total in (110, 93)
    results = [stepped(adapted, dataset, config) for dataset, config in ways(rows, make_config)]
    loss, gradients = results[0]
    assert all(bool(gradient.any()) for gradient in gradients.values())
    for other_loss, others in results[1:]:
        assert other_loss == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(others[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))
    naive = mean_of_means(adapted, packed_rows(rows, [(0, 0), (1, 0)], 112))
    for name, gradient in gradients.items():
        assert float((naive[name] - gradient).norm()) > 0.1 * float(gradient.norm()), name

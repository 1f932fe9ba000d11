"""A trial that fine-tunes: the real tiny model, real slices, scored on two splits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures_data import write_jsonl
from safetensors.numpy import load_file

from hotlap import durable
from hotlap.config import RunConfig
from hotlap.data.prepare import Places, prepare
from hotlap.errors import ConfigError
from hotlap.research import lora
from hotlap.research.executor import ask_axes

CONFIG = {name: axis["default"] for name, axis in lora.AXES.items()} | {"lr": 1e-2, "rank": 4, "seq_len": 64}


def rows(count: int, first: int = 0) -> list[dict[str, str]]:
    numbers = range(first, first + count)
    return [{"prompt": f"q{number}", "completion": "é" * (1 + number % 3)} for number in numbers]


@pytest.fixture
def order(tiny_model: Path, tmp_path: Path) -> dict[str, object]:
    write_jsonl(tmp_path / "train.jsonl", rows(24))
    write_jsonl(tmp_path / "held.jsonl", rows(7, first=24))
    (tmp_path / "run.toml").write_text(
        f'base_model = "{tiny_model}"\ndataset = "train.jsonl"\n[data]\neval_dataset = "held.jsonl"\n'
    )
    return {
        "config": CONFIG,
        "budget_s": 0.2,
        "seed_init": 1,
        "seed_data": 2,
        "data": str(tmp_path / "run.toml"),
        "threads": 1,
        "device": "cpu",
        "splits": ["search", "lock"],
        "out": str(tmp_path / "trial" / "result.json"),
    }


def run_trial(order: dict[str, object]) -> dict[str, object]:
    out = Path(str(order["out"]))
    out.parent.mkdir(exist_ok=True)
    (out.parent / "order.json").write_text(json.dumps(order))
    argv = [sys.executable, "-m", "hotlap.research.lora", str(out.parent / "order.json")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=170, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads(out.read_text())
    return json.loads(out.read_text())


@pytest.mark.torch
def test_one_model_scored_on_two_splits(order: dict[str, object], tmp_path: Path) -> None:
    result = run_trial(order)
    assert result["status"] == "ok"
    steps, charged_s = result["steps"], result["charged_s"]
    assert isinstance(steps, int) and isinstance(charged_s, float)
    assert charged_s <= 0.2 < charged_s * (steps + 1) / steps + 1e-9 or steps == 1
    trial = tmp_path / "trial"
    adapters = [trial / split / "adapter" / "adapter_model.safetensors" for split in ("search", "lock")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes(), "what is held out changes nothing that is trained"
    for split, numbers in (("search", (0, 2, 4, 6)), ("lock", (1, 3, 5))):
        num_bytes = sum(2 * (1 + number % 3) for number in numbers)
        num_targets = num_bytes + len(numbers)  # a byte a token, and the end of every turn
        val_loss = durable.read_rows(trial / split / "metrics.jsonl")[-1]["val_loss"]
        assert result[f"val_{split}_nats_per_byte"] == pytest.approx(val_loss * num_targets / num_bytes)
    assert (result["val_bytes"], result["val_tokens"]) == (14, 18)
    calibration = trial / "calibration"
    floor = durable.read_rows(calibration / "metrics.jsonl")[-1]["val_loss"] * 18 / 14
    assert result["floors"] == {"untrained": pytest.approx(floor)}
    moved = load_file(calibration / "adapter" / "adapter_model.safetensors")
    assert max(float(abs(moved[name]).max()) for name in moved if "lora_B" in name) < 1e-20, "the base model is scored"
    (size,) = lora.sizes(tmp_path / "run.toml", [CONFIG])
    assert size["params"] == sum(tensor.size for tensor in moved.values()) and size["expected_mem_mb"] > 380


@pytest.mark.torch
def test_a_run_that_diverges_is_a_status(order: dict[str, object]) -> None:
    result = run_trial(order | {"config": CONFIG | {"lr": 1e30, "warmup": 0.0}, "splits": ["search"]})
    assert result["status"] in ("nan", "diverged") and "slice ended" in str(result["error_tail"])
    assert "val_search_nats_per_byte" not in result


@pytest.mark.torch
def test_an_example_that_is_trained_and_held_out_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    train, held_out = write_jsonl(tmp_path / "train.jsonl", rows(8)), write_jsonl(tmp_path / "held.jsonl", rows(2, 7))
    config = RunConfig.model_validate({"base_model": "m", "dataset": "d", "data": {"eval_dataset": "h", "seq_len": 64}})
    packing = prepare(config, 1, Places(train, held_out), tiny_model, lambda _words: None)
    assert packing.held_out is not None
    packed = {"train": packing.train.fingerprint, "held_out": packing.held_out.fingerprint}
    with pytest.raises(ConfigError, match="1 of 2 held-out examples stand among the trained ones"):
        lora.require_unseen(packed)


def test_every_axis_reaches_the_run(tmp_path: Path) -> None:
    base = RunConfig(base_model="m", dataset="d")
    order = {"config": CONFIG | {"targets": "attention", "warmup": 0.1}, "threads": 2, "seed_data": 9}
    config = lora.config_of(base, order, tmp_path, "search", tmp_path / "search.jsonl", 40)
    assert (config.lora.rank, config.lora.alpha, config.optim.lr, config.optim.warmup_steps) == (4, 8.0, 1e-2, 4)
    assert config.lora.target_modules == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert (config.train.max_steps, config.seed, config.slice.num_threads) == (40, 9, 2)
    assert config.run_folder == tmp_path / "search" and config.data.eval_dataset == str(tmp_path / "search.jsonl")


def test_its_axes_are_a_space() -> None:
    assert ask_axes("hotlap.research.lora") == lora.AXES

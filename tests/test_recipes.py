"""The public records as recipes: they load, and give the records' numbers."""

import runpy
from pathlib import Path
from typing import Any

import pytest
from families import make_family
from fixtures_data import write_jsonl
from test_golden import finish
from zygote import Zygote

from hotlap import durable
from hotlap.config import RunConfig, load_run
from hotlap.data.estimate import Shape
from hotlap.data.packed import plan_order
from hotlap.runs import RunFolder

RECIPES = Path(__file__).parents[1] / "recipes"
GSM8K = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k" / "train.jsonl"
QWEN_1_5B = Shape(1536, 8960, 28, 151_936, 12 * 128, 2 * 128, is_tied=True)
SMOLLM2_1_7B = Shape(2048, 8192, 24, 49_152, 32 * 64, 32 * 64, is_tied=True)

# Rows that the record packed, or its examples where each has its own; updates; adapter parameters; adapter tensors
PUBLIC = {
    "t1-0": (7_473, 176, 18_464_768, 392),
    "t1-1": (1_510, 95, 18_464_768, 392),
    "t1-2": (1_376, 43, 18_464_768, 392),
    "t1-3": (484, 61, 18_464_768, 392),
    "t1-4": (454, 43, 13_762_560, 336),
    "t1-5": (454, 12, 13_762_560, 336),
    "t2-0": (20_000, 157, 18_087_936, 336),
    "t2-1": (454, 43, 14_155_776, 288),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_recipe_has_the_records_updates_and_adapter(name: str) -> None:
    num_rows, num_updates, num_parameters, num_tensors = PUBLIC[name]
    config = load_run(RECIPES / f"{name}.toml")
    shape = QWEN_1_5B if name.startswith("t1") else SMOLLM2_1_7B
    order = plan_order(config, 0, num_rows)
    assert order.num_steps == num_updates
    assert shape.num_adapter_parameters(config.lora) == num_parameters
    assert 2 * shape.num_layers * shape.num_target_ranks(config.lora) // config.lora.rank == num_tensors
    # Of half a row the record rounds down, we up.
    assert {"t1-4": 341, "t1-5": 96}.get(name, order.total_rows) == order.total_rows


def test_there_is_a_recipe_a_record() -> None:
    assert {path.stem for path in RECIPES.glob("*.toml")} == set(PUBLIC)


def stand_in(name: str, model: Path, data: Path, tmp_path: Path) -> RunConfig:
    """The recipe in float32 and with few, short rows."""
    tree = load_run(RECIPES / f"{name}.toml").model_dump(mode="json")
    tree["data"] |= {"seq_len": 128, "prune": None}
    tree["model"]["precision"] = "float32"
    tree["slice"]["num_threads"] = 1
    changes = {"base_model": str(model), "dataset": str(data), "output_dir": str(tmp_path / "runs"), "seed": 7}
    return RunConfig.model_validate({**tree, **changes, "run": name})


def prompts(kind: str, rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    write = runpy.run_path(str(RECIPES / "prompts.py"))[kind]
    return [write(row) for row in rows]


@pytest.mark.torch
@pytest.mark.parametrize(("name", "family"), [("t1-5", "qwen2"), ("t2-1", "llama")])
def test_the_latest_recipes_train_a_stand_in(zygote: Zygote, tmp_path: Path, name: str, family: str) -> None:
    from safetensors.torch import load_file

    questions = [
        {
            "context": f"Room {i} holds {i} chairs.",
            "question": f"How many chairs are in room {i}?",
            "answer": f"It is <<{i}={i}>>{i}.\n#### {i}",
            "answers": {"text": [str(i)], "answer_start": [0]},
        }
        for i in range(120)
    ]
    data = write_jsonl(tmp_path / "data.jsonl", prompts("gsm8k" if name == "t1-5" else "squad", questions))
    config = stand_in(name, make_family(tmp_path / "model", family), data, tmp_path)
    assert finish(zygote, config) == 1
    run = RunFolder(config.run_folder)
    rows = [row for row in durable.read_rows(run.metrics) if "loss" in row]
    assert len(load_file(run.adapter / "adapter_model.safetensors")) == 2 * 6 * 2  # layers, targets, A and B
    if name == "t1-5":
        rates = [2.0, 4.0, 6.0, 8.0, 8.0, 7.927, 7.711, 7.360, 8.0, 8.0, 8.0, 8.0]  # the record's own list, x 1e-4
        assert [row["lr"] * 1e4 for row in rows] == pytest.approx(rates, abs=5e-4)
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_gsm8k_in_the_contests_words() -> None:
    if not GSM8K.is_file():
        pytest.skip("needs GSM8K's train split, which is no part of the repository")
    rows = list(durable.read_rows(GSM8K))
    assert len(rows) == 7_473
    first = prompts("gsm8k", rows[:1])[0]
    assert first["prompt"].startswith("Question: Natalia sold clips") and first["prompt"].endswith("\nAnswer:")
    assert first["completion"].startswith(" Natalia") and first["completion"].endswith("#### 72")

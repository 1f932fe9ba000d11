"""Bug reports B53 and B55: memory that runs out, and numbers that are none."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fixtures_data import write_jsonl
from tiny import tiny_config
from zygote import SliceProcess, Zygote

from hotlap import checkpoint, durable, runs
from hotlap.config import RunConfig
from hotlap.runs import RunFolder

pytestmark = pytest.mark.torch

MakeConfig = Callable[..., RunConfig]
TOLD = "patches:as_told"


def finish(process: SliceProcess) -> dict[str, Any]:
    assert process.status == 0, process.talk()
    return process.result()


def failed(process: SliceProcess, code: int, reason: str) -> str:
    assert process.status == code, process.talk()
    result = process.result()
    assert (result["exit_code"], result["reason"]) == (code, reason)
    assert "Traceback" not in process.talk()
    return result["message"]


def rows_of(config: RunConfig) -> list[dict[str, Any]]:
    return durable.read_rows(RunFolder(config.run_folder).metrics)


def newest(config: RunConfig) -> checkpoint.Checkpoint:
    found = runs.newest_checkpoint(RunFolder(config.run_folder), pytest.fail)
    assert found is not None
    return found


# --- B53: out of memory ---

ROWS = 4
LONG_STEP = 14
NUM_STEPS = 20
MEMORY_TOKENS = 400


@pytest.fixture(scope="module")
def one_long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 examples of 66 tokens, each a row of its own, but for one of 125: four of these are 500 with the padding."""
    examples = [{"prompt": f"q{i:02}", "completion": "a" * 59} for i in range(NUM_STEPS * ROWS)]
    examples[LONG_ROW]["completion"] = "a" * 118
    return write_jsonl(tmp_path_factory.mktemp("b53") / "one-long.jsonl", examples)


def long_row() -> int:
    """The row that the seed of `tiny_config` puts into the long step."""
    from hotlap.data.packed import Order

    return int(Order(7, NUM_STEPS * ROWS, ROWS, NUM_STEPS, NUM_STEPS * ROWS).rows_of_step(LONG_STEP)[1])


LONG_ROW = long_row()
B53 = {
    "data__seq_len": 126,
    "lora": {"rank": 4, "dropout": 0.0},
    "train": {"micro_batch_rows": ROWS, "epochs": 1.0},
}


@pytest.fixture(scope="module")
def roomy(zygote: Zygote, tiny_model: Path, one_long: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """The run with memory enough."""
    folder = tmp_path_factory.mktemp("roomy")
    config = tiny_config(tiny_model, one_long, folder / "runs", **B53)
    assert finish(zygote.run(config, HOTLAP_HOME=str(folder / "home")))["step"] == NUM_STEPS
    return config


def training_restarted_at_half_the_batch(tokens_of_step: Callable[[int, int], int]) -> list[int]:
    """The naive search for a batch that fits wraps the whole training. Returns the steps it makes."""
    made: list[int] = []
    rows = ROWS
    while rows:
        for step in range(1, NUM_STEPS + 1):
            if tokens_of_step(step, rows) > MEMORY_TOKENS:
                break
            made.append(step)
        else:
            return made
        rows //= 2
    raise AssertionError("one row does not fit")


def test_b53_out_of_memory_in_the_middle_halves_the_micro_batch_and_nothing_else(
    zygote: Zygote, make_config: MakeConfig, one_long: Path, roomy: RunConfig
):
    """And the next slice keeps to what was found."""
    naive = training_restarted_at_half_the_batch(lambda step, rows: rows * (125 if step == LONG_STEP else 66))
    assert naive == [*range(1, LONG_STEP), *range(1, NUM_STEPS + 1)], "it begins again at step 1"

    config = make_config(data=one_long, **B53)
    memory = {"TEST_MEMORY": f"{MEMORY_TOKENS} training"}
    process = zygote.run(config, TOLD, TEST_STOP_AT=str(LONG_STEP + 2), **memory)
    assert process.status == 75, process.talk()
    assert f"Out of memory at step {LONG_STEP}: micro-batches of 2 rows from here on" in process.talk()
    assert newest(config).step == LONG_STEP + 2
    assert newest(config).facts["progress"]["micro_batch_rows"] == 2
    again = zygote.run(config, TOLD, **memory)
    assert finish(again)["resumed_at"] == LONG_STEP + 2
    assert "Out of memory" not in again.talk()
    assert newest(config).facts["progress"]["micro_batch_rows"] == 2
    halved = [row for row in rows_of(config) if "out_of_memory" in row]
    assert halved == [{"step": LONG_STEP, "out_of_memory": True, "micro_batch_rows": 2}]
    has_learned_the_same(config, roomy)


def has_learned_the_same(config: RunConfig, other: RunConfig) -> None:
    import torch

    from hotlap.train import model

    rows, others = ([row for row in rows_of(each) if "loss" in row] for each in (config, other))
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    for row, expected in zip(rows, others, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert row["num_trained_tokens"] == expected["num_trained_tokens"]
    tensors, expected = (
        model.load_tensors(each.run_folder / "adapter" / model.ADAPTER_FILE) for each in (config, other)
    )
    torch.testing.assert_close(tensors, expected, rtol=1e-3, atol=1e-4)


def test_b53_out_of_memory_in_the_evaluation_leaves_the_training_alone(
    zygote: Zygote, make_config: MakeConfig, one_long: Path, roomy: RunConfig
):
    config = make_config(data=one_long, **B53, data__eval_dataset=str(one_long), eval__micro_batch_rows=8)
    process = zygote.run(config, TOLD, TEST_MEMORY="200 evaluation")
    finish(process)
    assert "Out of memory in the evaluation: 4 rows at a time from here on." in process.talk()
    assert "Out of memory in the evaluation: 1 rows at a time from here on." in process.talk()
    assert newest(config).facts["progress"]["micro_batch_rows"] is None
    rows = rows_of(config)
    assert not [row for row in rows if "out_of_memory" in row]
    assert [row["step"] for row in rows if "val_loss" in row] == [NUM_STEPS]
    assert [row for row in rows if "loss" in row] == rows_of(roomy), "to the bit"


def test_b53_a_single_row_that_does_not_fit_stops_before_it(
    zygote: Zygote, make_config: MakeConfig, one_long: Path, roomy: RunConfig
):
    config = make_config(data=one_long, **B53)
    process = zygote.run(config, TOLD, TEST_MEMORY="100 training")
    message = failed(process, 6, "oom")
    assert f"One row does not fit into memory at step {LONG_STEP}" in message
    assert "Lower data.seq_len or lora.rank" in message
    assert process.result()["step"] == newest(config).step == LONG_STEP - 1
    assert finish(zygote.run(config))["resumed_at"] == LONG_STEP - 1
    has_learned_the_same(config, roomy)


def test_b53_a_model_that_does_not_fit_is_told_and_no_bug(
    zygote: Zygote, make_config: MakeConfig, one_long: Path, roomy: RunConfig
):
    config = make_config(data=one_long, **B53)
    message = failed(zygote.run(config, TOLD, TEST_MEMORY="0 loading"), 6, "oom")
    assert message.startswith("The base model and its adapter do not fit into memory (CUDA out of memory.")
    assert "Set model.quantization = 'nf4'" in message
    finish(zygote.run(config))
    has_learned_the_same(config, roomy)


# --- B55: losses that are no numbers ---


@dataclass(frozen=True)
class Bad:
    told: dict[str, str]
    reason: str
    words: str


BAD = {
    "nan": Bad({"TEST_LOSS": "nan@3"}, "nan", "Loss became nan at step 3; step 2 is intact"),
    "inf": Bad({"TEST_LOSS": "inf@3"}, "nan", "Loss became inf at step 3; step 2 is intact"),
    "minus inf": Bad({"TEST_LOSS": "-inf@3"}, "nan", "Loss became -inf at step 3; step 2 is intact"),
    "1e30": Bad({"TEST_LOSS": "1e30@3"}, "diverged", "far beyond that of random guessing; step 2 is intact"),
    "gradient": Bad({"TEST_GRADIENT": "nan@3"}, "nan", "The gradient became nan at step 3; step 2 is intact"),
    "infinite gradient": Bad({"TEST_GRADIENT": "inf@3"}, "nan", "The gradient became"),
}


def test_b55_naive_guard_lets_nan_pass():
    loss, limit = math.nan, 100.0
    assert not loss > limit, "the guard of the report"
    assert max(math.nan, 1.0) is math.nan and min(math.nan, 1.0) is math.nan, "which then ranks first, either way"


@pytest.fixture(scope="module")
def clean(zygote: Zygote, tiny_model: Path, f3: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("clean")
    config = tiny_config(tiny_model, f3, folder / "runs", train__max_steps=5)
    finish(zygote.run(config, HOTLAP_HOME=str(folder / "home")))
    return config


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_b55_the_step_is_not_applied_and_the_one_before_is_kept(
    zygote: Zygote, make_config: MakeConfig, clean: RunConfig, bad: Bad
):
    config = make_config(train__max_steps=5)
    message = failed(process := zygote.run(config, TOLD, **bad.told), 6, bad.reason)
    assert bad.words in message and "Lower optim.lr" in message
    assert process.result()["step"] == newest(config).step == 2
    assert runs.run_state(RunFolder(config.run_folder)).state == bad.reason
    assert rows_of(config) == rows_of(clean)[:2]
    result = finish(zygote.run(config))
    assert (result["resumed_at"], result["timeline"]["num_steps"]) == (2, 3)
    assert rows_of(config) == rows_of(clean), "as if it had never happened"


def test_b55_the_same_command_meets_it_again_from_the_kept_step(zygote: Zygote, make_config: MakeConfig):
    config = make_config(train__max_steps=5)
    for resumed_at in (0, 2):
        process = zygote.run(config, TOLD, **BAD["nan"].told)
        failed(process, 6, "nan")
        assert process.result()["resumed_at"] == resumed_at
        assert process.result()["timeline"]["num_steps"] == 2 - resumed_at


@pytest.mark.parametrize(("value", "reason"), [("nan", "nan"), ("-inf", "nan"), ("1e30", "diverged")])
def test_b55_a_bad_held_out_loss_is_never_the_best(zygote: Zygote, make_config: MakeConfig, value: str, reason: str):
    """The training's own loss was fine, so the step it was measured at is kept."""
    config = make_config(
        train__max_steps=6, data__eval_examples=4, eval__every_steps=2, checkpoint={"every_s": 1e3, "keep": 1}
    )
    told = {"TEST_VAL_LOSSES": f"3.0 {value}"}
    message = failed(process := zygote.run(config, TOLD, **told), 6, reason)
    assert message.startswith("Held-out loss ") and "at step 4" in message and "step 4 is intact" in message
    assert newest(config).step == 4
    assert newest(config).facts["best"] == process.result()["best"]
    assert (process.result()["best"]["step"], process.result()["best"]["val_loss"]) == (2, 3.0)
    assert [row["val_loss"] for row in rows_of(config) if "val_loss" in row] == [3.0]
    result = finish(zygote.run(config, TOLD, TEST_VAL_LOSSES="3.5 3.25"))
    assert result["resumed_at"] == 4
    assert durable.verify(config.run_folder / "best")["step"] == 2


def test_b55_a_loss_of_exactly_zero_is_said_to_be_suspicious(zygote: Zygote, make_config: MakeConfig):
    config = make_config(train__max_steps=5)
    process = zygote.run(config, TOLD, TEST_LOSS="0@")
    finish(process)
    assert "Loss is exactly 0 for 3 steps, which is suspicious" in process.talk()
    assert [row["loss"] for row in rows_of(config)] == [0.0] * 5


def test_b55_and_is_no_success_if_nothing_was_learned(zygote: Zygote, make_config: MakeConfig):
    config = make_config(train__max_steps=5)
    process = zygote.run(config, TOLD, TEST_LOSS="0*", TEST_PUBLISH_IN_STEP="1")
    assert "every LoRA B is zero after 5 updates" in failed(process, 4, "audit")
    assert "which is suspicious" in process.talk()
    assert newest(config).step == 0
    assert not (config.run_folder / "adapter").exists()

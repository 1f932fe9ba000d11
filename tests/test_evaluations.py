"""What happens at evaluations besides the held-out loss: stopping early, and samples. Neither changes a step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_golden import finish, state_of
from zygote import Zygote

from hotlap import durable
from hotlap.config import RunConfig
from hotlap.runs import RunFolder, run_state

pytestmark = pytest.mark.torch

MakeConfig = Callable[..., RunConfig]

LOSSES = "5 4 4.5 4 3.9 3.95 4.2 3.9 7 8"
"""Two in a row without a lower one after the fourth evaluation, three after the eighth."""


def rows_of(config: RunConfig) -> list[dict[str, Any]]:
    return durable.read_rows(RunFolder(config.run_folder).metrics)


@pytest.mark.parametrize(("patience", "last_step"), [(2, 8), (3, 16), (4, 18)])
def test_a_run_stops_early_after_its_patience(
    zygote: Zygote, make_config: MakeConfig, patience: int, last_step: int
) -> None:
    config = make_config(data__eval_examples=6, train__max_steps=40, eval={"every_steps": 2, "patience": patience})
    process = zygote.run(config, "patches:as_told", TEST_VAL_LOSSES=LOSSES)
    assert process.status == 0, process.talk()
    assert process.result()["step"] == last_step
    assert f"Stopped early at step {last_step} of 40: {patience} evaluations in a row" in process.talk()
    run = RunFolder(config.run_folder)
    assert rows_of(config)[-1] == {"step": last_step, "stopped_early": True}
    assert durable.verify(run.adapter)["step"] == last_step
    assert durable.verify(run.best)["step"] == (4 if patience == 2 else 10)
    assert run_state(run).state == "finished"
    again = zygote.run(config)
    assert (again.status, again.result()["step"]) == (0, last_step)


def test_a_cut_run_stops_early_at_the_step_of_the_uncut_one(zygote: Zygote, make_config: MakeConfig) -> None:
    """On losses that really come about: a learning rate that is too high ends in a rise."""
    changes: dict[str, Any] = {
        "data__eval_examples": 6,
        "optim__lr": 0.1,
        "train__max_steps": 60,
        "eval": {"every_steps": 3, "patience": 2},
    }
    whole, cut = make_config(run="whole", **changes), make_config(run="cut", **changes)
    assert finish(zygote, whole) == 1
    stopped = rows_of(whole)[-1]
    assert stopped["stopped_early"] and 9 <= stopped["step"] < 60
    for step in range(4, stopped["step"], 5):
        assert zygote.run(cut, "patches:as_told", TEST_STOP_AT=str(step)).status == 75
    assert finish(zygote, cut) == 1
    assert state_of(RunFolder(cut.run_folder)) == state_of(RunFolder(whole.run_folder))


def test_samples_are_the_model_s_answers_and_change_nothing(
    zygote: Zygote, make_config: MakeConfig, tiny_model: Path
) -> None:
    from hotlap.train.generate import Order, answers

    plain = make_config(run="plain", data__eval_examples=6, train__max_steps=12, eval__every_steps=4)
    prompts = ("q1", "who?")
    asking = {"every_steps": 4, "sample_prompts": prompts, "sample_tokens": 6}
    sampled = make_config(run="sampled", data__eval_examples=6, train__max_steps=12, eval=asking)
    assert finish(zygote, plain) == 1
    for step in (5, 9):
        assert zygote.run(sampled, "patches:as_told", TEST_STOP_AT=str(step)).status == 75
    assert finish(zygote, sampled) == 1
    assert state_of(RunFolder(sampled.run_folder)) == state_of(RunFolder(plain.run_folder))
    run = RunFolder(sampled.run_folder)
    rows = durable.read_rows(run.samples)
    assert [(row["step"], row["prompt"]) for row in rows] == [
        (step, prompt) for step in (0, 4, 8, 12) for prompt in prompts
    ]
    assert [row["text"] for row in rows[:2]] == [
        each["text"] for each in answers(Order(tiny_model, None, list(prompts), 6))
    ]
    told = answers(Order(tiny_model, run.adapter, list(prompts), 6))
    assert [row["text"] for row in rows[-2:]] == [each["text"] for each in told]


def test_samples_of_a_step_that_is_trained_again_are_written_once(
    zygote: Zygote, make_config: MakeConfig, tmp_path: Path
) -> None:
    """A kill takes steps back; their samples go with them."""
    asking = {"every_steps": 1, "sample_prompts": ("q1",), "sample_tokens": 3}
    settings: dict[str, Any] = {"data__eval_examples": 6, "train__max_steps": 8, "eval": asking}
    whole, killed = make_config(run="whole", **settings), make_config(run="killed", **settings)
    assert finish(zygote, whole) == 1
    process = zygote.start(killed, "patches:as_told", {"TEST_WAIT_BEFORE": f"7 {tmp_path / 'never'}"})
    process.wait_for("step", step=6)
    process.kill()
    process.wait()
    assert finish(zygote, killed) == 1
    rows = durable.read_rows(RunFolder(killed.run_folder).samples)
    assert rows == durable.read_rows(RunFolder(whole.run_folder).samples)
    assert [row["step"] for row in rows] == list(range(9))


@pytest.mark.parametrize("asking", [{"patience": 2}, {"sample_prompts": ["q1"]}])
def test_what_needs_evaluations_is_refused_without_them(
    zygote: Zygote, make_config: MakeConfig, asking: dict[str, Any]
) -> None:
    process = zygote.run(make_config(eval=asking))
    assert process.status == 2
    assert "need evaluations. Hold examples out with data.eval_examples" in process.result()["message"]

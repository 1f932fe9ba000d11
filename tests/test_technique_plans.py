"""What the techniques plan, without a model: rows of the tail, the records' targets, memory."""

from typing import Any

import numpy as np
import pytest

from hotlap.config import LoraConfig, RunConfig
from hotlap.data.estimate import Shape, memory_of
from hotlap.data.facts import Facts
from hotlap.data.packed import PackedDataset, plan_order
from hotlap.errors import ConfigError

QWEN_1_5B = Shape(1536, 8960, 28, 151_936, 12 * 128, 2 * 128, is_tied=True)
SIX = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")


def config_of(**techniques: Any) -> RunConfig:
    train = {"max_steps": 12, "micro_batch_rows": 8}
    return RunConfig.model_validate({"base_model": "m", "dataset": "d", "techniques": techniques, "train": train})


def test_the_tail_goes_over_its_rows_as_often_as_asked():
    plain = plan_order(config_of(), 3, 454)
    tail = plan_order(config_of(staged={"after_step": 8, "tail_passes": 2}), 3, 454)
    assert [tail.source_of(step) for step in range(1, 13)] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 9, 10]
    for step in range(1, 13):
        np.testing.assert_array_equal(tail.rows_of_step(step), plain.rows_of_step(tail.source_of(step)))
    assert [step for step in range(1, 13) if tail.is_repeated_after(step)] == [9, 10]
    assert tail.num_tail_rows == 16
    uneven = plan_order(config_of(staged={"after_step": 7, "tail_passes": 3}), 3, 454)
    assert [uneven.source_of(step) for step in range(8, 13)] == [8, 9, 8, 9, 8]
    once = plan_order(config_of(staged={"after_step": 8}), 3, 454)
    assert [once.source_of(step) for step in range(1, 13)] == list(range(1, 13))
    assert not any(once.is_repeated_after(step) for step in range(1, 13))


def test_a_tail_behind_the_end_is_refused():
    with pytest.raises(ConfigError, match="after_step is 12, and the run has 12 steps"):
        plan_order(config_of(staged={"after_step": 12}), 3, 454)


def test_the_records_targets_have_the_records_number_of_parameters():
    assert QWEN_1_5B.num_adapter_parameters(LoraConfig()) == 18_464_768
    assert QWEN_1_5B.num_adapter_parameters(LoraConfig(target_modules=SIX)) == 13_762_560


def test_preview_knows_what_the_techniques_save_and_keep():
    rows_NT = np.zeros((454, 1024), dtype=np.int32)
    facts = Facts(1024, 454, 454, 454, rows_NT.size, rows_NT.size, 1024, 9)
    data = PackedDataset("x", facts, rows_NT, rows_NT.astype(np.uint16), rows_NT == 0, np.full(454, 700))

    def peak_bytes(**techniques: Any) -> int:
        return memory_of(QWEN_1_5B, config_of(**techniques), data, "bfloat16").peak_bytes(8)

    plain = peak_bytes()
    assert plain - peak_bytes(chunked_loss=True) == 20 * 8 * 700 * 151_936 - 8 * 441 * 151_936
    assert plain - peak_bytes(adapter_precision="model") == 14 * 18_464_768
    staged = {"after_step": 8, "tail_passes": 4}
    assert peak_bytes(staged=staged) - plain == 8 * 1024 * 1536 * 2
    assert peak_bytes(staged={"after_step": 8}) == plain

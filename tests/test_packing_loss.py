"""Packing changes nothing that is learned: losses and gradients are those of the examples alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures_data import f4_conversations, write_byte_tokenizer, write_jsonl

from hotlap.config import LoraConfig, RunConfig
from hotlap.data.packed import PackedDataset
from hotlap.data.prepare import Places, prepare

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def adapted(tiny_model: Path) -> Iterator[Any]:
    """F1 with an adapter whose B is not zero, so that every tensor has a gradient."""
    import torch

    from hotlap.train import model

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    adapted = model.attach_lora(model.load_base(tiny_model), LoraConfig(rank=4, alpha=8.0), 0, "tiny")
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.parameters.items():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    yield adapted
    torch.set_num_threads(num_threads)


def packed(source: Path, tokenizer: Path, method: str, seq_len: int = 96) -> PackedDataset:
    tree = {"base_model": "m", "dataset": "d", "data": {"seq_len": seq_len}, "packing": {"method": method}}
    return prepare(RunConfig.model_validate(tree), 1, Places(source), tokenizer, lambda text: None).train


def mean_loss(adapted: Any, data: PackedDataset, is_open: bool = False) -> tuple[float, dict[str, Any], int]:
    """Nats per trained token over all rows, its gradients, and the trained tokens."""
    from hotlap.train.step import batch_loss, num_targets, read_batch

    for parameter in adapted.parameters.values():
        parameter.grad = None
    batches = [read_batch(data, np.array([row])) for row in range(data.num_rows)]
    total = sum(num_targets(batch) for batch in batches)
    nats = 0.0
    for batch in batches:
        loss = batch_loss(adapted, batch, is_open) / total
        loss.backward()
        nats += float(loss.detach())
    return nats, {name: parameter.grad.clone() for name, parameter in adapted.parameters.items()}, total


@pytest.mark.parametrize("method", ["next-fit", "best-fit"])
def test_b15_packed_loss_and_gradients_are_the_unpacked_ones(adapted: Any, tmp_path: Path, method: str) -> None:
    import torch

    tokenizer = write_byte_tokenizer(tmp_path / "t")
    source = write_jsonl(tmp_path / "x.jsonl", f4_conversations(12))
    alone, together = packed(source, tokenizer, "none"), packed(source, tokenizer, method)
    assert together.num_rows < alone.num_rows == 12
    loss, gradients, total = mean_loss(adapted, alone)
    packed_loss, packed_gradients, packed_total = mean_loss(adapted, together)
    assert packed_total == total == alone.num_trained_tokens
    assert packed_loss == pytest.approx(loss, abs=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(packed_gradients[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
    naive, _, _ = mean_loss(adapted, together, is_open=True)  # one causal mask over the whole row
    assert abs(naive - loss) > 1e-4


def test_b15_a_token_changes_only_its_own_example(adapted: Any) -> None:
    import torch

    lengths = (9, 5, 12)
    segments_1T = torch.tensor([[1] * 9 + [2] * 5 + [3] * 12 + [0] * 6])
    tokens_1T = torch.randint(0, 256, (1, 32), generator=torch.Generator().manual_seed(0))
    other_1T = tokens_1T.clone()
    other_1T[0, 3] = (other_1T[0, 3] + 1) % 256
    adapted.peft_model.eval()
    with torch.inference_mode():
        hidden = adapted.hidden(tokens_1T, segments_1T)
        changed = adapted.hidden(other_1T, segments_1T)
        assert torch.equal(hidden[0, 9:26], changed[0, 9:26]) and not torch.equal(hidden[0, :9], changed[0, :9])
        for first, length in zip((0, 9, 14), lengths, strict=True):
            part = slice(first, first + length)
            alone = adapted.hidden(tokens_1T[:, part], torch.ones(1, length, dtype=torch.int64))
            torch.testing.assert_close(hidden[:, part], alone, atol=1e-5, rtol=0)
        naive = adapted.hidden(tokens_1T, (segments_1T > 0).long())
        naive_changed = adapted.hidden(other_1T, (segments_1T > 0).long())
    assert not torch.allclose(naive[0, 9:26], naive_changed[0, 9:26], atol=1e-5)


def test_open_attention_is_a_setting_of_training_and_not_of_evaluation(
    adapted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotlap import runs
    from hotlap.data.packed import Packing, plan_order
    from hotlap.train import optim
    from hotlap.train.evaluate import Evaluator
    from hotlap.train.opening import OpenedRun
    from hotlap.train.step import Stepper

    tokenizer = write_byte_tokenizer(tmp_path / "t")
    data = packed(write_jsonl(tmp_path / "x.jsonl", f4_conversations(12)), tokenizer, "next-fit")
    losses: dict[str, float] = {}
    for attention in ("blocked", "open"):
        tree = {"base_model": "m", "dataset": "d", "packing": {"attention": attention}}
        config = RunConfig.model_validate({**tree, "train": {"micro_batch_rows": data.num_rows, "max_steps": 1}})
        identity = runs.Identity({}, 7, {}, {}, {}, data.num_rows, 1, 1, "")
        opened = OpenedRun(identity, Path(), Packing(data, None), plan_order(config, 7, data.num_rows))
        optimizer = optim.build(adapted.parameters, config.optim)
        result = Stepper(adapted, optimizer, opened, config, lambda step, rows: None).forward_backward(1)
        assert result.loss is not None
        losses[attention] = result.loss
    blocked, _, _ = mean_loss(adapted, data)
    assert losses["blocked"] == pytest.approx(blocked, abs=1e-5) and abs(losses["open"] - blocked) > 1e-4
    assert Evaluator(adapted, data, 1).val_loss(lambda: None, lambda rows: None) == pytest.approx(blocked, abs=1e-5)

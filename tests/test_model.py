"""The adapted model against stock transformers and PEFT, and the mathematics around it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from zygote import Zygote

from hotlap.config import LoraConfig, OptimConfig, RunConfig
from hotlap.errors import ConfigError
from hotlap.runs import RunFolder

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def trained(zygote: Zygote, tiny_model: Path, f3: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    from tiny import tiny_config

    folder = tmp_path_factory.mktemp("trained")
    config = tiny_config(tiny_model, f3, folder / "runs", train__max_steps=10, data__eval_examples=4)
    process = zygote.run(config, HOTLAP_HOME=str(folder / "home"))
    assert process.status == 0, process.talk()
    return RunFolder(config.run_folder)


@pytest.mark.parametrize("which", ["adapter", "best"])
def test_result_is_a_standard_adapter(trained: RunFolder, tiny_model: Path, which: str) -> None:
    """Stock PeftModel on the stock base gives our logits; the base alone does not."""
    import torch
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM

    from hotlap.train import model

    folder = trained.path / which
    assert {path.name for path in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    }
    tokens_BT = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.inference_mode():
        plain_BTV = base(tokens_BT).logits
        stock_BTV = PeftModel.from_pretrained(base, folder).eval()(tokens_BT).logits
        auto_BTV = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(tokens_BT).logits
    ours = model.attach_lora(model.load_base(tiny_model), LoraConfig(rank=4, alpha=8.0), 0, "base")
    model.load_parameters(ours.parameters, model.load_tensors(folder / model.ADAPTER_FILE), folder)
    ours.peft_model.eval()
    with torch.inference_mode():
        ours_BTV = ours.logits(ours.hidden(tokens_BT, torch.ones(2, 24, dtype=torch.int32)))
    torch.testing.assert_close(ours_BTV, stock_BTV, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(auto_BTV, stock_BTV, rtol=0, atol=0)
    assert not torch.allclose(ours_BTV, plain_BTV, atol=1e-3)


def test_every_checkpoint_is_a_standard_adapter_too(trained: RunFolder, tiny_model: Path) -> None:
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = max(trained.checkpoints.iterdir())
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, folder)
    saved = load_file(folder / "adapter_model.safetensors")
    state = {name.replace(".default.", "."): value for name, value in loaded.state_dict().items() if "lora_" in name}
    assert set(saved) == set(state)
    assert all(torch.equal(saved[name], state[name]) for name in saved)


def test_adapter_starts_as_nothing_and_from_its_seed(tiny_model: Path) -> None:
    import torch

    from hotlap.train import model

    def start(seed: int) -> model.AdaptedModel:
        return model.attach_lora(model.load_base(tiny_model), LoraConfig(rank=4), seed, "base")

    one, same, other = start(1), start(1), start(2)
    inner = [name for name in one.parameters if "lora_A" in name]
    assert all(torch.equal(one.parameters[name], same.parameters[name]) for name in inner)
    assert not any(torch.equal(one.parameters[name], other.parameters[name]) for name in inner)
    assert not any(one.parameters[name].any() for name in one.parameters if "lora_B" in name)
    assert len(one.parameters) == 2 * 2 * 7


def test_target_modules_by_name(tiny_model: Path) -> None:
    from hotlap.train import model

    few = model.attach_lora(model.load_base(tiny_model), LoraConfig(rank=4, target_modules=("q_proj",)), 0, "base")
    assert len(few.parameters) == 2 * 2
    with pytest.raises(ConfigError, match=r"lora\.target_modules"):
        model.attach_lora(model.load_base(tiny_model), LoraConfig(target_modules=("nonesuch",)), 0, "base")


def test_examples_in_a_row_do_not_see_each_other(tiny_model: Path) -> None:
    """Two examples packed into a row have the hidden states they have alone; one causal mask over both has others."""
    import torch

    from hotlap.train import masks, model

    ours = model.attach_lora(model.load_base(tiny_model), LoraConfig(rank=4), 0, "base")
    tokens_T = torch.randint(0, 256, (20,), generator=torch.Generator().manual_seed(2))
    segments_T = torch.tensor([1] * 9 + [2] * 7 + [0] * 4, dtype=torch.int32)
    with torch.inference_mode():
        packed_TD = ours.hidden(tokens_T[None], segments_T[None])[0]
        naive_TD = ours.hidden(tokens_T[None], torch.ones(1, 20, dtype=torch.int32))[0]
        for start, end in ((0, 9), (9, 16)):
            alone_TD = ours.hidden(tokens_T[None, start:end], torch.ones(1, end - start, dtype=torch.int32))[0]
            torch.testing.assert_close(packed_TD[start:end], alone_TD, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(packed_TD[9:16], naive_TD[9:16], atol=1e-3)
    assert masks.positions_of(segments_T[None]).tolist() == [[*range(9), *range(7), *range(4)]]


def test_first_token_of_an_example_is_never_a_target() -> None:
    import torch

    from hotlap.train import loss

    segments_BT = torch.tensor([[1, 1, 1, 2, 2, 0]])
    is_trained_BT = torch.tensor([[True, False, True, True, True, True]])
    predicts_BT, next_BT = loss.targets_of(torch.arange(6)[None], segments_BT, is_trained_BT)
    assert predicts_BT.tolist() == [[False, True, False, True, False, False]]
    assert next_BT[predicts_BT].tolist() == [2, 4]


def test_loss_of_no_targets_is_zero_with_a_gradient() -> None:
    import torch

    from hotlap.train import loss

    hidden_ND = torch.randn(4, 8, requires_grad=True)
    for chunk in (None, 2):
        nothing_N = torch.zeros(0, dtype=torch.long)
        value = loss.summed_loss(loss.Head(torch.nn.Linear(8, 5)), hidden_ND[:0], nothing_N, chunk)
        value.backward()
        assert value.item() == 0.0
        assert hidden_ND.grad is not None and not hidden_ND.grad.any()


def rows_with_targets(*targets: tuple[int, ...]) -> Any:
    """A packed data set of one example of 20 tokens a row, with these positions trained."""
    import numpy as np

    from hotlap.data.facts import Facts
    from hotlap.data.packed import PackedDataset

    tokens_NT = np.random.default_rng(0).integers(0, 256, (len(targets), 20)).astype(np.int32)
    is_trained_NT = np.zeros(tokens_NT.shape, dtype=np.bool_)
    for row, positions in enumerate(targets):
        is_trained_NT[row, list(positions)] = True
    num = len(targets)
    facts = Facts(20, num, num, num, 20 * num, int(is_trained_NT.sum()), 20, 255)
    segments_NT = np.ones(tokens_NT.shape, dtype=np.uint16)
    return PackedDataset("b47", facts, tokens_NT, segments_NT, is_trained_NT, is_trained_NT.sum(axis=1))


def stepper_over(adapted: Any, data: Any) -> Any:
    """Makes steps of all rows, one row a micro-batch."""
    from hotlap import runs
    from hotlap.data.packed import Packing, plan_order
    from hotlap.train import optim
    from hotlap.train.opening import OpenedRun
    from hotlap.train.step import Stepper

    tree = {"base_model": "m", "dataset": "d", "train": {"grad_accumulation": data.num_rows, "max_steps": 1}}
    config = RunConfig.model_validate(tree)
    identity = runs.Identity({}, 7, {}, {}, {}, data.num_rows, 1, 1, "")
    opened = OpenedRun(identity, Path(), Packing(data, None), plan_order(config, 7, data.num_rows))
    return Stepper(adapted, optim.build(adapted.parameters, config.optim), opened, config, lambda step, rows: None)


def test_b47_a_micro_batch_without_targets_contributes_exactly_nothing(tiny_model: Path) -> None:
    """Three micro-batches, one without a target and one with its last position only, against plain cross-entropy over
    all of them; the mean of each micro-batch's mean is no number."""
    import torch

    from hotlap.train import model

    ours = model.attach_lora(model.load_base(tiny_model), LoraConfig(rank=4), 0, "base")
    for name, parameter in ours.parameters.items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(1))
    data = rows_with_targets((4, 5, 6, 11), (), (19,))
    result = stepper_over(ours, data).forward_backward(1)
    found = {name: parameter.grad.clone() for name, parameter in ours.parameters.items()}  # pyright: ignore
    assert result.num_trained_tokens == 5

    stock: Any = ours.peft_model
    stock.zero_grad(set_to_none=True)
    tokens_BT = torch.from_numpy(data.tokens_NT.astype("int64"))
    labels_BT = torch.where(torch.from_numpy(data.is_trained_NT), tokens_BT, -100)
    logits_BTV = stock(input_ids=tokens_BT).logits
    pairs = (logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())
    plain = torch.nn.functional.cross_entropy(*pairs)
    plain.backward()
    assert result.loss == pytest.approx(float(plain.detach()), rel=1e-5)
    for name, parameter in ours.parameters.items():
        assert parameter.grad is not None
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5 * scale)
    with torch.no_grad():
        naive = torch.nn.functional.cross_entropy(logits_BTV[1, :-1], labels_BT[1, 1:])
    assert bool(naive.isnan())


def test_b47_a_step_without_targets_updates_nothing(tiny_model: Path) -> None:
    from hotlap.train import model
    from hotlap.train.step import StepLoss

    ours = model.attach_lora(model.load_base(tiny_model), LoraConfig(rank=4), 0, "base")
    assert stepper_over(ours, rows_with_targets((), ())).forward_backward(1) == StepLoss(None, 0, 40)
    assert all(parameter.grad is None for parameter in ours.parameters.values())


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_learning_rate_equals_transformers(schedule: str) -> None:
    """Warm-up 5 of 40 steps: transformers' schedule counts updates from 0 and starts at 0, ours from 1."""
    import torch
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    from hotlap.train.optim import lr_at

    config = OptimConfig(lr=1e-3, warmup_steps=5, schedule=schedule)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    make = get_cosine_schedule_with_warmup if schedule == "cosine" else get_linear_schedule_with_warmup
    theirs = make(optimizer, num_warmup_steps=5, num_training_steps=40)
    for step in range(6, 41):
        for _ in range(step - 1 - theirs.last_epoch):
            optimizer.step()
            theirs.step()
        assert lr_at(step, 40, config) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
    assert [lr_at(step, 40, config) for step in (1, 5)] == pytest.approx([2e-4, 1e-3])
    assert lr_at(41, 40, config) == lr_at(400, 40, config) == 0.0


def test_threads_and_versions_are_told(zygote: Zygote, make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Another number of threads goes on, and says that it is no longer bit for bit."""
    config = make_config(train__max_steps=6)
    process = zygote.start(config, "patches:as_told", {"TEST_WAIT_BEFORE": f"3 {tmp_path / 'never'}"})
    process.wait_for("published")  # behind the first steps, so it may take longer than they do
    process.kill()
    process.wait()
    again = zygote.run(make_config(train__max_steps=6, slice__num_threads=2))
    assert again.status == 0
    assert "threads: 1 before, 2 now" in again.talk() and "not promised bit for bit" in again.talk()


@pytest.mark.parametrize(
    ("words", "is_memory"),
    [
        ("[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: can't allocate memory: you tried", True),
        ("MPS backend out of memory (MPS allocated: 17.9 GB, other allocations: 1.2 MB, max allowed: 18.13 GB).", True),
        ("CUDA error: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", False),
    ],
)
def test_memory_runs_out_in_these_words(words: str, is_memory: bool) -> None:
    """Libraries say it with a plain RuntimeError, in which half the rows help; another's is a bug."""
    from hotlap.train.step import with_halving

    tried: list[int] = []

    def attempt(num_rows: int) -> int:
        tried.append(num_rows)
        if num_rows > 2:
            raise RuntimeError(words)
        return num_rows

    if is_memory:
        assert with_halving(attempt, 8, lambda _rows: None, "step 1") == 2 and tried == [8, 4, 2]
        return
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        with_halving(attempt, 8, lambda _rows: None, "step 1")
    assert tried == [8]

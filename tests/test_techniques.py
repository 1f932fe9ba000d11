"""Every technique, alone and in pairs: what it computes is what the plain way computes, a run that is cut in it ends
with the bits of the uncut one, and stock PEFT loads what comes out."""

import functools
from pathlib import Path
from typing import Any

import pytest
from families import make_family
from test_golden import finish, state_of
from tiny import make_tiny_model, tiny_config
from zygote import Zygote

from hotlap import durable
from hotlap.config import LoraConfig, ModelConfig, RunConfig
from hotlap.config_techniques import TechniquesConfig
from hotlap.runs import RunFolder

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


# --- the loss in chunks ---


@pytest.mark.parametrize("chunk", [1, 7, 24, 100])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("is_head_trained", [False, True])
def test_chunked_loss_and_gradients_are_the_plain_ones(
    chunk: int, soft_cap: float | None, is_head_trained: bool
) -> None:
    import torch

    from hotlap.train.loss import Head, summed_loss

    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 50).requires_grad_(is_head_trained)
    rows_seen: list[int] = []

    def uncapped(hidden_ND: Any) -> Any:
        rows_seen.append(len(hidden_ND))
        return 4.0 * linear(hidden_ND)

    head = Head(uncapped, tuple(linear.parameters()) if is_head_trained else (), soft_cap)
    hidden_ND, next_N = torch.randn(24, 16, requires_grad=True), torch.randint(0, 50, (24,))
    inputs = [hidden_ND, *head.trained]
    plain = summed_loss(head, hidden_ND, next_N)
    expected = torch.autograd.grad(3.0 * plain, inputs)
    rows_seen.clear()
    chunked = summed_loss(head, hidden_ND, next_N, chunk)
    found = torch.autograd.grad(3.0 * chunked, inputs)
    assert max(rows_seen) == min(chunk, 24)
    torch.testing.assert_close(chunked, plain, rtol=1e-5, atol=0.0)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-5
    with torch.inference_mode():
        torch.testing.assert_close(summed_loss(head, hidden_ND, next_N, chunk), plain, rtol=1e-5, atol=0.0)


HEADS: dict[str, dict[str, Any]] = {
    "tied, saved whole": {"modules_to_save": ("lm_head", "embed_tokens")},
    "lora on the head": {"target_modules": ("q_proj", "lm_head")},
    "rows of added tokens": {"new_rows": [298, 299]},
}


@pytest.mark.parametrize("name", HEADS)
def test_chunked_loss_trains_whatever_is_in_the_head(tmp_path: Path, name: str) -> None:
    from hotlap.train import model

    settings = dict(HEADS[name])
    new_rows = settings.pop("new_rows", None)
    base = model.load_base(make_tiny_model(tmp_path / "m", tied="lora" not in name))
    adapted = model.attach_lora(base, LoraConfig(rank=4, **settings), 0, "b", None, new_rows)
    plain, expected = loss_and_gradients(adapted)
    adapted.loss_chunk = 5
    chunked, found = loss_and_gradients(adapted)
    assert chunked == pytest.approx(plain, rel=1e-5)
    require_close(found, expected)


# --- fused projections ---

TARGETS: dict[str, Any] = {
    "all": "all-linear",
    "records' six": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"),
    "some": ("q_proj", "v_proj", "up_proj"),
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "gemma4"])
def test_fused_projections_give_the_plain_loss_and_gradients(tmp_path: Path, family: str) -> None:
    from hotlap.train import model

    folder = make_family(tmp_path, family)
    for targets in TARGETS.values() if family == "qwen2" else ["all-linear"]:
        both: list[tuple[float, dict[str, Any]]] = []
        for is_fused in (False, True):
            techniques = TechniquesConfig(fused_projections=is_fused)
            lora = LoraConfig(rank=4, target_modules=targets)
            adapted = model.attach_lora(model.load_base(folder), lora, 0, "b", techniques=techniques)
            moved(adapted)
            both.append(loss_and_gradients(adapted))
        (plain, expected), (fused, found) = both
        assert fused == pytest.approx(plain, rel=1e-5)
        require_close(found, expected)


def test_fusing_holds_no_weight_twice(tiny_model: Path) -> None:
    from hotlap.train import model

    def held(techniques: TechniquesConfig) -> int:
        adapted = model.attach_lora(model.load_base(tiny_model), LoraConfig(rank=4), 0, "b", techniques=techniques)
        loss_and_gradients(adapted)
        storages = [parameter.untyped_storage() for parameter in adapted.peft_model.parameters()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    assert held(TechniquesConfig(fused_projections=True)) == held(TechniquesConfig())


@pytest.mark.parametrize(
    "techniques", [{"fused_projections": True}, {"fused_projections": True, "prepacked_weights": True}]
)
@pytest.mark.parametrize("saved", ["mlp", "gate_proj", "k_proj"])
def test_modules_that_train_in_full_are_not_joined(tiny_model: Path, saved: str, techniques: dict[str, bool]) -> None:
    from hotlap.train import model

    found: list[tuple[float, dict[str, Any]]] = []
    for chosen in (TechniquesConfig(), TechniquesConfig(**techniques)):
        lora = LoraConfig(rank=4, target_modules=("q_proj", "v_proj"), modules_to_save=(saved,))
        adapted = model.attach_lora(model.load_base(tiny_model), lora, 0, "b", techniques=chosen)
        found.append(loss_and_gradients(adapted))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    require_close(found[1][1], found[0][1])


@pytest.mark.parametrize("is_prepacked", [False, True])
def test_a_pass_that_runs_out_of_memory_leaves_nothing_behind(tiny_model: Path, is_prepacked: bool) -> None:
    """Between gate and up, what is ready for up would keep all that the pass has computed, when memory is short."""
    import gc
    import weakref
    from types import SimpleNamespace

    import numpy as np
    import torch

    from hotlap.train import model, optim
    from hotlap.train.step import Stepper

    config = tiny_config(tiny_model, tiny_model, tiny_model, lora__dropout=0.0, train__micro_batch_rows=2)
    techniques = TechniquesConfig(fused_projections=True, prepacked_weights=is_prepacked)
    adapted = model.attach_lora(model.load_base(tiny_model), config.lora, 0, "b", techniques=techniques)
    tokens_NT = np.arange(32, dtype=np.int32).reshape(2, 16)
    dataset = SimpleNamespace(tokens_NT=tokens_NT, segments_NT=tokens_NT * 0 + 1, is_trained_NT=tokens_NT >= 0)
    opened: Any = SimpleNamespace(
        packing=SimpleNamespace(train=dataset),
        order=SimpleNamespace(rows_of_step=lambda step: np.arange(2), num_steps=1),
        identity=SimpleNamespace(seed=7, precision="float32"),
    )
    last: Any = adapted.layers[-1]
    act, held = last.mlp.act_fn.forward, list[Any]()

    def full(_gate: Any) -> Any:
        assert held[0]() is not None
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def on_out_of_memory(_step: int, _num_rows: int) -> None:
        gc.collect()
        assert held[0]() is None
        last.mlp.act_fn.forward = act

    adapted.layers[0].register_forward_hook(lambda _layer, _given, output: held.append(weakref.ref(output)))
    last.mlp.act_fn.forward = full
    optimizer = optim.build(adapted.parameters, config.optim)
    stepper = Stepper(adapted, optimizer, opened, config, on_out_of_memory)
    assert stepper.forward_backward(1).loss is not None
    assert stepper.micro_batch_rows == 1 and len(held) == 3


@pytest.mark.parametrize("target", ["q_proj", "k_proj"])
def test_a_linear_module_that_computes_otherwise_is_not_joined(tiny_model: Path, target: str) -> None:
    """With an adapter on it, and without."""
    import torch

    from hotlap.train import model

    class Doubling(torch.nn.Linear):
        def forward(self, input: Any) -> Any:
            return 2.0 * super().forward(input)

    found: list[tuple[float, dict[str, Any]]] = []
    for chosen in (TechniquesConfig(), TechniquesConfig(fused_projections=True, prepacked_weights=True)):
        base: Any = model.load_base(tiny_model)
        base.model.layers[0].self_attn.k_proj.__class__ = Doubling
        lora = LoraConfig(rank=4, target_modules=(target, "v_proj"))
        adapted = model.attach_lora(base, lora, 0, "b", techniques=chosen)
        moved(adapted)
        found.append(loss_and_gradients(adapted))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    require_close(found[1][1], found[0][1])


def test_a_fused_model_gives_the_same_answer(tiny_model: Path) -> None:
    """Token by token with a cache, as the samples at an evaluation are made."""
    import torch

    from hotlap.train import model

    answers: list[list[int]] = []
    for is_fused in (False, True):
        techniques = TechniquesConfig(fused_projections=is_fused)
        adapted = model.attach_lora(model.load_base(tiny_model), LoraConfig(rank=4), 0, "b", techniques=techniques)
        moved(adapted)
        adapted.peft_model.eval()
        with torch.inference_mode():
            given: Any = {"input_ids": torch.arange(40, 50)[None], "max_new_tokens": 12, "do_sample": False}
            answers.append(adapted.peft_model.generate(**given, pad_token_id=256).tolist())
    assert answers[0] == answers[1]


# --- prepacked weights ---


def has_bfloat16_units() -> bool:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags


needs_bfloat16_units = pytest.mark.skipif(not has_bfloat16_units(), reason="this processor has no bfloat16 units")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "gemma4"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_prepacked_weights_give_the_plain_loss_and_gradients(tmp_path: Path, family: str, is_fused: bool) -> None:
    import torch

    from hotlap.train import model, prepacked

    folder = make_family(tmp_path, family)
    plain_way = model.attach_lora(model.load_base(folder), LoraConfig(rank=4), 0, "b")
    both = TechniquesConfig(prepacked_weights=True, fused_projections=is_fused)
    packed = model.attach_lora(model.load_base(folder), LoraConfig(rank=4), 0, "b", techniques=both)
    moved(plain_way)
    moved(packed)
    (plain, expected), (found_loss, found) = loss_and_gradients(plain_way), loss_and_gradients(packed)
    assert found_loss == pytest.approx(plain, rel=1e-5)
    require_close(found, expected)
    calls: list[int] = []
    before = prepacked._times
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(prepacked, "_times", lambda *given: calls.append(1) or before(*given))
        packed.logits(packed.hidden(torch.arange(40, 60)[None], torch.ones(1, 20, dtype=torch.int32)))
    # Every frozen matrix of the decoder, and the head, once: joined ones count as one.
    assert len(calls) == num_products(plain_way, is_fused)


def num_products(adapted: Any, is_fused: bool) -> int:
    import torch

    from hotlap.train.fused import _groups_of

    decoder = adapted.peft_model.get_base_model().get_decoder()
    frozen = [
        module
        for module in decoder.modules()
        if type(module) is torch.nn.Linear and not any(each.requires_grad for each in module.parameters())
    ]
    saved = sum(len(modules) - 1 for modules in _groups_of(decoder)) if is_fused else 0
    return len(frozen) - saved + 1


@pytest.mark.parametrize(
    ("lora", "is_fused"),
    [
        ({"dora": True}, False),
        ({"dropout": 0.3}, False),
        ({"rslora": True, "alpha": 5.0}, True),
        ({"init": "pissa", "rslora": True}, True),
    ],
    ids=["dora", "dropout", "rslora", "pissa"],
)
def test_every_kind_of_adapter_is_added_to_what_is_laid_out(tiny_model: Path, lora: Any, is_fused: bool) -> None:
    import torch

    from hotlap.train import machine, model

    all_of_them = TechniquesConfig(prepacked_weights=True, chunked_loss=True, fused_projections=is_fused)
    found: list[tuple[float, dict[str, Any]]] = []
    for techniques in (TechniquesConfig(), all_of_them):
        base = model.load_base(tiny_model)
        adapted = model.attach_lora(base, LoraConfig(rank=4, **lora), 0, "b", techniques=techniques)
        with torch.no_grad():
            for parameter in adapted.parameters.values():
                parameter.add_(0.05 * torch.sin(torch.arange(parameter.numel())).view_as(parameter))
        adapted.peft_model.train()
        machine.seed(3)
        found.append(loss_and_gradients(adapted))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    require_close(found[1][1], found[0][1])


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_trains_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    from hotlap.train import model

    settings = dict(HEADS[name])
    new_rows = settings.pop("new_rows", None)
    found: list[tuple[float, dict[str, Any]]] = []
    for techniques in (TechniquesConfig(), TechniquesConfig(prepacked_weights=True, chunked_loss=True)):
        base = model.load_base(make_tiny_model(tmp_path / "m", tied="lora" not in name))
        adapted = model.attach_lora(base, LoraConfig(rank=4, **settings), 0, "b", None, new_rows, techniques)
        found.append(loss_and_gradients(adapted))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    require_close(found[1][1], found[0][1])


@needs_bfloat16_units
@pytest.mark.parametrize("precision", ["float32", "model"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_prepacked_weights_in_bfloat16_are_as_near_the_truth_as_plain_ones(
    tmp_path: Path, is_fused: bool, precision: Any
) -> None:
    """The truth is the same model in float32."""
    import torch

    from hotlap.train import model, prepacked

    folder = make_family(tmp_path, "qwen2")

    def gradient_of(kind: Any, **techniques: Any) -> torch.Tensor:
        base = model.load_base(folder, ModelConfig(precision=kind))
        assert prepacked.why_not(base) is None
        chosen = TechniquesConfig(adapter_precision=precision, **techniques)
        adapted = model.attach_lora(base, LoraConfig(rank=4), 0, "b", techniques=chosen)
        moved(adapted)
        _, gradients = loss_and_gradients(adapted)
        return torch.cat([gradient.float().flatten() for gradient in gradients.values()])

    truth = gradient_of("float32")
    plain, packed = gradient_of("bfloat16"), gradient_of("bfloat16", prepacked_weights=True, fused_projections=is_fused)
    assert 0.0 < float((plain - truth).norm()) < 0.1 * float(truth.norm())
    assert float((packed - truth).norm()) < 1.5 * float((plain - truth).norm())


def test_weights_that_oneDNN_cannot_take_are_told(
    zygote: Zygote, tiny_model: Path, f3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from hotlap.train import prepacked

    changes: dict[str, Any] = {"train__max_steps": 1, "model__precision": "bfloat16"}
    config = tiny_config(tiny_model, f3, tmp_path / "runs", techniques={"prepacked_weights": True}, **changes)
    process = zygote.run(config)
    assert process.status == 0, process.talk()
    told = "techniques.prepacked_weights: this processor has no bfloat16 units; goes on without."
    assert (told in process.talk()) == (not prepacked.has_bfloat16_units())
    monkeypatch.setattr(prepacked, "has_bfloat16_units", lambda: False)
    assert prepacked.why_not(torch.nn.Linear(2, 2).bfloat16()) == "this processor has no bfloat16 units"
    mixed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).bfloat16())
    for each in (torch.nn.Linear(2, 2).half(), mixed):
        assert prepacked.why_not(each) == "its layouts are for float32 or bfloat16 numbers"


# --- every pair, in runs ---

PAIRED: dict[str, dict[str, Any]] = {
    "chunked": {"chunked_loss": True},
    "16 bits": {"adapter_precision": "model"},
    "fused": {"fused_projections": True},
    "prepacked": {"prepacked_weights": True},
    "staged": {"staged": {"after_step": 4, "tail_passes": 2, "lr": 5e-3}},
    "integrated": {"integrated_lr": 0.05},
}
COMBINATIONS = [
    ("chunked", "16 bits", "fused", "staged", "integrated"),
    ("chunked", "integrated"),
    ("chunked", "prepacked"),
    ("16 bits", "staged"),
    ("chunked", "16 bits", "fused", "prepacked"),
    ("fused", "prepacked", "staged", "integrated"),
]
"""With the plain run of `test_switches.py`, every two switches are met in all four ways, but for prepacking in 16 bits,
which goes on without where the processor has no units for them."""


@functools.cache
def uncut(zygote: Zygote, model: Path, data: Path, scratch: Path, names: tuple[str, ...]) -> RunConfig:
    config = run_of(model, data, scratch / "-".join(names) / "runs", names)
    process = zygote.run(config, HOTLAP_HOME=str(scratch / "home"))
    assert process.status == 0, process.talk()
    return config


def run_of(model: Path, data: Path, output_dir: Path, names: tuple[str, ...]) -> RunConfig:
    techniques: dict[str, Any] = {}
    for name in names:
        techniques |= PAIRED[name]
    changes: dict[str, Any] = {"train__max_steps": 9, "data__eval_examples": 6, "eval__every_steps": 4}
    changes |= {"lora__dropout": 0.0, "model__precision": "bfloat16" if "16 bits" in names else "float32"}
    return tiny_config(model, data, output_dir, techniques=techniques, **changes)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("techniques")


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_a_cut_run_has_the_bits_of_the_uncut_one(
    zygote: Zygote, tiny_model: Path, f3: Path, tmp_path: Path, scratch: Path, names: tuple[str, ...]
) -> None:
    """Cut before the boundary of a staged run, and in its second pass, whose cache is then gone."""
    whole = state_of(RunFolder(uncut(zygote, tiny_model, f3, scratch, names).run_folder))
    config = run_of(tiny_model, f3, tmp_path / "runs", names)
    for step in (4, 7):
        process = zygote.run(config, "patches:as_told", TEST_STOP_AT=str(step))
        assert (process.status, process.result()["step"]) == (75, step), process.talk()
    assert finish(zygote, config) == 1
    assert state_of(RunFolder(config.run_folder)) == whole


BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "staged, 8-bit moments": (PAIRED["staged"], {"optim__kind": "adamw8bit", "lora__rank": 64}),
    "staged and chunked, dora, lora+": (
        PAIRED["staged"] | PAIRED["chunked"],
        {"lora__dora": True, "optim__lora_plus_ratio": 4.0, "slice__gradient_checkpointing": True},
    ),
    "fused and prepacked, pissa, a short last step": (
        PAIRED["fused"] | PAIRED["prepacked"],
        {"lora__init": "pissa", "lora__rslora": True, "train__max_steps": None, "train__epochs": 0.95},
    ),
    "prepacked and chunked, dropout, noise, head in full": (
        PAIRED["prepacked"] | PAIRED["chunked"],
        {"lora__dropout": 0.2, "train__neftune_alpha": 5.0, "lora__modules_to_save": ["lm_head"]},
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_beside_other_switches_a_cut_run_has_the_bits_of_the_uncut_one(
    zygote: Zygote, tiny_model: Path, f3: Path, tmp_path: Path, name: str
) -> None:
    techniques, changes = BESIDE[name]
    settings: dict[str, Any] = {"train__max_steps": 9, "data__eval_examples": 6, "eval__every_steps": 4}
    settings |= {"lora__dropout": 0.0, **changes}
    whole, cut = (
        tiny_config(tiny_model, f3, tmp_path / each, techniques=techniques, **settings) for each in ("whole", "cut")
    )
    assert finish(zygote, whole) == 1
    for step in (4, 7):
        process = zygote.run(cut, "patches:as_told", TEST_STOP_AT=str(step))
        assert (process.status, process.result()["step"]) == (75, step), process.talk()
    assert finish(zygote, cut) == 1
    assert state_of(RunFolder(cut.run_folder)) == state_of(RunFolder(whole.run_folder))


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_stock_peft_gives_our_logits(
    zygote: Zygote, tiny_model: Path, f3: Path, scratch: Path, names: tuple[str, ...]
) -> None:
    import torch
    from peft import PeftModel

    from hotlap.train import model
    from hotlap.train.base import load_base

    config = uncut(zygote, tiny_model, f3, scratch, names)
    adapter = config.run_folder / "adapter"
    tokens_BT = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    techniques = config.techniques
    if "16 bits" in names and not has_bfloat16_units():
        techniques = techniques.model_copy(update={"prepacked_weights": False})
    ours = model.attach_lora(load_base(tiny_model, config.model), config.lora, 7, "base", techniques=techniques)
    tensors = model.load_tensors(adapter / model.ADAPTER_FILE)
    model.load_parameters(ours.parameters, tensors, adapter)
    ours.peft_model.eval()
    with torch.inference_mode():
        stock = PeftModel.from_pretrained(load_base(tiny_model, config.model), adapter).eval()
        stock_BTV = stock(tokens_BT).logits.float()
        plain_BTV = load_base(tiny_model, config.model)(tokens_BT).logits.float()
        ours_BTV = ours.logits(ours.hidden(tokens_BT, torch.ones(2, 24, dtype=torch.int32)))
    tolerance = 5e-2 if "16 bits" in names else 1e-5
    torch.testing.assert_close(ours_BTV, stock_BTV, rtol=tolerance, atol=tolerance)
    assert float((ours_BTV - plain_BTV).abs().max()) > 2 * tolerance
    precision = torch.bfloat16 if "16 bits" in names else torch.float32
    assert {tensor.dtype for tensor in tensors.values()} == {precision}


def test_fusing_may_not_be_dropped_on_the_way(zygote: Zygote, tiny_model: Path, f3: Path, scratch: Path) -> None:
    """It rounds otherwise, so it is one of the run's own settings."""
    config = uncut(zygote, tiny_model, f3, scratch, COMBINATIONS[0])
    other = config.model_copy(update={"techniques": TechniquesConfig()})
    process = zygote.run(other, HOTLAP_HOME=str(scratch / "home"))
    assert (process.status, process.result()["reason"]) == (3, "changed")


# --- staged backward ---


def test_the_tail_trains_only_the_top_and_computes_the_rest_once(
    zygote: Zygote, tiny_model: Path, f3: Path, scratch: Path, tmp_path: Path
) -> None:
    """Against the naive way: everything is computed at every step, and the lower layers' parameters are frozen."""
    names = ("staged",)
    config = uncut(zygote, tiny_model, f3, scratch, names)
    naive = run_of(tiny_model, f3, tmp_path / "runs", names)
    process = zygote.run(naive, "patches:as_told", HOTLAP_HOME=str(scratch / "home"), TEST_NAIVE="stage")
    assert process.status == 0, process.talk()
    both = [
        [row for row in durable.read_rows(RunFolder(each.run_folder).metrics) if "loss" in row]
        for each in (config, naive)
    ]
    assert [row["num_tokens"] for row in both[0]] == [row["num_tokens"] for row in both[1]]
    for ours, theirs in zip(*both, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    tokens = [row["num_tokens"] for row in both[0]]
    assert tokens[4:7] == [*tokens[7:9], tokens[6]]
    assert both[0][8]["lr"] == 5e-3


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_the_boundary_is_where_it_belongs_in_every_family(tmp_path: Path, family: str) -> None:
    """Loss and gradients of the top layer in the first and the second pass against the whole model's."""
    import torch

    from hotlap.config_techniques import StagedConfig
    from hotlap.data.order import Order
    from hotlap.train import model
    from hotlap.train.staged import Stage

    adapted = model.attach_lora(model.load_base(make_family(tmp_path, family)), LoraConfig(rank=4), 0, "b")
    moved(adapted)
    plain, expected = loss_and_gradients(adapted)
    stage = Stage(adapted, StagedConfig(after_step=1, tail_passes=2), Order(0, 2, 1, 5, 5, 1, 2))
    stage.begin(torch.optim.AdamW([{"params": list(adapted.parameters.values())}]))
    lowest = adapted.layers[0].self_attn.q_proj  # pyright: ignore
    calls: list[int] = []
    lowest.register_forward_hook(lambda *_given: calls.append(1))  # pyright: ignore
    for step in (2, 4):
        staged, found = loss_and_gradients(adapted, stage.hidden_of(step, 1, 0))
        assert staged == pytest.approx(plain, rel=1e-5)
        require_close(found, {name: expected[name] for name in stage.active})
    assert len(calls) == 1
    assert 0 < len(stage.active) < len(expected)
    assert stage._kept == {}


def test_what_frozen_layers_give_is_left_to_no_chance(tiny_model: Path, tmp_path: Path) -> None:
    """Where the base model has dropout of its own, a slice that resumes in the second pass has no other numbers."""
    import json

    import torch

    from hotlap.config_techniques import StagedConfig
    from hotlap.data.order import Order
    from hotlap.train import machine, model
    from hotlap.train.staged import Stage

    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    fields = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "attention_dropout": 0.5}))
    found: list[tuple[float, dict[str, Any]]] = []
    for is_resumed in (False, True):
        adapted = model.attach_lora(model.load_base(tmp_path), LoraConfig(rank=4), 0, "b")
        moved(adapted)
        adapted.peft_model.train()
        stage = Stage(adapted, StagedConfig(after_step=1, tail_passes=2), Order(0, 2, 1, 5, 5, 1, 2))
        stage.begin(torch.optim.AdamW([{"params": list(adapted.parameters.values())}]))
        for step in (4,) if is_resumed else (2, 4):
            machine.seed(step)
            last = loss_and_gradients(adapted, stage.hidden_of(step, 1, 0))
        found.append(last)
        assert adapted.peft_model.training
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[1][1][name], gradient) for name, gradient in found[0][1].items())
    machine.seed(5)
    assert loss_and_gradients(adapted, stage.hidden_of(4, 1, 0))[0] != found[1][0]  # the layers above have it still


def test_fused_and_staged_layers_may_be_recomputed(tiny_model: Path) -> None:
    """Gradient checkpointing runs a layer twice, and stops the second time as soon as it has what it needs."""
    import torch

    from hotlap.config_techniques import StagedConfig
    from hotlap.data.order import Order
    from hotlap.train import model
    from hotlap.train.staged import Stage

    both = TechniquesConfig(fused_projections=True, chunked_loss=True)
    adapted = model.attach_lora(model.load_base(tiny_model), LoraConfig(rank=4), 0, "b", techniques=both)
    moved(adapted)
    adapted.peft_model.train()
    plain, expected = loss_and_gradients(adapted)
    adapted.recompute_activations()
    recomputed, found = loss_and_gradients(adapted)
    assert recomputed == plain
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    stage = Stage(adapted, StagedConfig(after_step=1, tail_passes=2), Order(0, 2, 1, 5, 5, 1, 2))
    stage.begin(torch.optim.AdamW([{"params": list(adapted.parameters.values())}]))
    for step in (2, 4):
        staged, found = loss_and_gradients(adapted, stage.hidden_of(step, 1, 0))
        assert staged == plain
        assert all(torch.equal(found[name], expected[name]) for name in stage.active)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")  # peft's word for GPT-2
def test_what_cannot_be_staged_is_refused(tmp_path: Path) -> None:
    from hotlap.config_techniques import StagedConfig
    from hotlap.data.order import Order
    from hotlap.errors import ConfigError
    from hotlap.train import model
    from hotlap.train.staged import Stage

    order = Order(0, 2, 1, 5, 5, 1, 1)
    both = (("llama", 2, "2 layers"), ("gemma4", 1, "share keys and values"), ("gpt2", 1, "finds no layers"))
    for family, top_layers, reason in both:
        adapted = model.attach_lora(model.load_base(make_family(tmp_path / family, family)), LoraConfig(), 0, "b")
        with pytest.raises(ConfigError, match=reason):
            Stage(adapted, StagedConfig(after_step=1, top_layers=top_layers), order)


# --- learning rates, and kernels of others ---


def test_the_learning_rates_of_record_5_can_be_said() -> None:
    from hotlap.config import OptimConfig
    from hotlap.config_techniques import StagedConfig
    from hotlap.train.optim import Schedule

    told = OptimConfig(lr=8e-4, warmup_steps=4, schedule_steps=20, final_lr_ratio=0.05)
    schedule = Schedule(told, TechniquesConfig(staged=StagedConfig(after_step=8, lr=8e-4)), 12)
    rates = [1e4 * schedule.at(step) for step in range(1, 13)]
    expected = [2.0, 4.0, 6.0, 8.0, 8.0, 7.927, 7.711, 7.360, 8.0, 8.0, 8.0, 8.0]
    assert rates == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("num_steps", [10, 40])
def test_the_integrated_learning_rate_is_the_same_for_every_length(num_steps: int) -> None:
    from hotlap.config import OptimConfig
    from hotlap.train.optim import Schedule, lr_at

    config = OptimConfig(lr=123.0, warmup_steps=3)
    schedule = Schedule(config, TechniquesConfig(integrated_lr=0.02), num_steps)
    rates = [schedule.at(step) for step in range(1, num_steps + 1)]
    assert sum(rates) == pytest.approx(0.02)
    shape = [lr_at(step, num_steps, config) for step in range(1, num_steps + 1)]
    assert [rate / rates[2] for rate in rates] == pytest.approx([rate / shape[2] for rate in shape])


def test_kernels_that_are_not_there_are_said(tiny_model: Path) -> None:
    from hotlap.train.base import load_base
    from hotlap.train.kernels import use_kernels

    words: list[str] = []
    assert not use_kernels(load_base(tiny_model), words.append)
    assert "this machine trains on cpu; goes on without" in words[0]


# --- what the tests above share ---


def moved(adapted: Any) -> None:
    """Away from its start, so that every parameter has a gradient."""
    import torch

    torch.manual_seed(1)
    for parameter in adapted.parameters.values():
        parameter.data.copy_(0.1 * torch.randn(parameter.shape))


def loss_and_gradients(adapted: Any, hidden_of: Any = None) -> tuple[float, dict[str, Any]]:
    """Of two rows of two examples each, with two thirds of the tokens trained."""
    import torch

    from hotlap.train.step import Batch, batch_loss

    chance = torch.Generator().manual_seed(3)
    tokens_BT = torch.randint(0, 300, (2, 18), generator=chance)
    segments_BT = torch.tensor([[1] * 7 + [2] * 11, [1] * 9 + [2] * 6 + [0] * 3], dtype=torch.int32)
    is_trained_BT = (torch.rand(2, 18, generator=chance) < 0.7) & (segments_BT > 0)
    for parameter in adapted.parameters.values():
        parameter.grad = None
    nats = batch_loss(adapted, Batch(tokens_BT, segments_BT, is_trained_BT), False, hidden_of)
    nats.backward()
    gradients = {name: parameter.grad for name, parameter in adapted.parameters.items() if parameter.requires_grad}
    return float(nats.detach()), gradients


def require_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm()) <= 1e-4 * float(gradient.norm()) + 1e-7, name

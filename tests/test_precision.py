"""Precision and quantization: what is loaded how, that nothing but training changes it, and what this machine lacks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny_model
from zygote import Zygote

from hotlap import runs
from hotlap.config import LoraConfig, ModelConfig, OptimConfig, RunConfig, load_run
from hotlap.errors import ConfigError
from hotlap.runs import RunFolder

pytestmark = pytest.mark.torch

MakeConfig = Callable[..., RunConfig]

NF4 = ModelConfig(precision="float32", quantization="nf4")


def load(folder: Path, settings: ModelConfig) -> Any:
    from hotlap.train import base

    return base.load_base(folder, settings)


def linears(model: Any) -> dict[str, Any]:
    import torch

    return {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


# --- quantization ---


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """F1 with hidden 64: rows of whole blocks."""
    return make_tiny_model(tmp_path_factory.mktemp("wide"), hidden=64)


@pytest.mark.parametrize("double", [True, False])
def test_nf4_quantizes_the_decoder_and_leaves_the_head(wide_model: Path, double: bool) -> None:
    import bitsandbytes
    import torch

    model = load(wide_model, NF4.model_copy(update={"double_quantization": double}))
    found = linears(model)
    head = found.pop("lm_head")
    assert type(head) is torch.nn.Linear and head.weight.dtype == torch.float32
    assert len(found) == 14
    for module in found.values():
        assert isinstance(module, bitsandbytes.nn.Linear4bit)
        assert module.weight.dtype == torch.uint8 and module.weight.quant_state.quant_type == "nf4"
        assert module.weight.numel() == module.in_features * module.out_features // 2
        assert module.weight.quant_state.nested is double


def test_nf4_weights_are_those_of_the_sixteen_levels(wide_model: Path) -> None:
    """Blocks of 64, each scaled by its largest value and rounded to the nearest level, computed here by hand."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, get_4bit_type

    name = "model.layers.1.mlp.up_proj"
    plain = load(wide_model, ModelConfig(precision="float32")).get_submodule(name).weight
    quantized = load(wide_model, NF4.model_copy(update={"double_quantization": False})).get_submodule(name).weight
    levels = get_4bit_type("nf4", device="cpu")
    blocks = plain.detach().reshape(-1, 64)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    nearest = (blocks / scales).unsqueeze(-1).sub(levels).abs().argmin(dim=-1)
    expected = (levels[nearest] * scales).reshape(plain.shape)
    torch.testing.assert_close(dequantize_4bit(quantized, quantized.quant_state), expected, rtol=1e-5, atol=1e-6)


def test_int8_quantizes_the_decoder_and_leaves_the_head(wide_model: Path) -> None:
    import torch

    found = linears(load(wide_model, ModelConfig(precision="float32", quantization="int8")))
    assert type(found.pop("lm_head")) is torch.nn.Linear
    assert {module.weight.dtype for module in found.values()} == {torch.int8}


def test_an_evaluation_does_not_touch_quantized_weights(wide_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to itself on a processor with bfloat16 units, bitsandbytes rounds the scales for good at the first pass
    without gradients."""
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    from hotlap.train import base

    def weight_after_a_pass(layer: Any) -> Any:
        layer.eval()
        with torch.inference_mode():
            layer(torch.ones(1, layer.in_features))
        assert not getattr(layer.weight.quant_state, "packing_format_for_cpu", False)
        return dequantize_4bit(layer.weight, layer.weight.quant_state)

    model = load(wide_model, NF4)
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    before = dequantize_4bit(layer.weight, layer.weight.quant_state)
    assert torch.equal(weight_after_a_pass(layer), before)

    naive = Linear4bit(64, 32, bias=False, quant_type="nf4")
    naive.weight = type(naive.weight)(torch.randn(32, 64), requires_grad=False, quant_type="nf4").to("cpu")
    naive.support_avx512bf16_for_cpu = True
    base._keep_as_quantized(naive)
    weight_after_a_pass(naive)


def test_the_adapter_on_quantized_weights_is_float32(wide_model: Path) -> None:
    import torch

    from hotlap.train import model

    for settings in (NF4, ModelConfig(precision="bfloat16", quantization="nf4"), ModelConfig(precision="bfloat16")):
        lora = LoraConfig(rank=4, modules_to_save=("lm_head",))
        ours = model.attach_lora(load(wide_model, settings), lora, 0, "base")
        assert {parameter.dtype for parameter in ours.parameters.values()} == {torch.float32}


def test_nf4_of_rows_that_are_no_whole_blocks_is_refused_on_a_processor(tiny_model: Path) -> None:
    """The naive way: bitsandbytes computes on, with the scales of other blocks."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.linspace(-1.0, 1.0, 64 * 32).reshape(64, 32)
    naive = dequantize_4bit(*quantize_4bit(weight, quant_type="nf4"))
    right = dequantize_4bit(*quantize_4bit(weight.reshape(32, 64), quant_type="nf4")).reshape(64, 32)
    is_wrong = float((naive - weight).abs().max()) > 0.16
    # Its kernels for AVX-512 do that; a run may go on on another processor, so it is refused on all of them.
    assert float((right - weight).abs().max()) < 0.16
    assert is_wrong or "avx512_bf16" not in Path("/proc/cpuinfo").read_text()
    with pytest.raises(ConfigError, match="it has 32 inputs, no multiple of 64"):
        load(tiny_model, NF4)


def test_pissa_on_quantized_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.quantization has rounded"):
        load_run(None, ["model.quantization=nf4", "lora.init=pissa"], base_model="m", dataset="d")


# --- precision ---


@pytest.mark.parametrize(("bfloat16_s", "expected"), [(0.1, "bfloat16"), (0.23, "bfloat16"), (40.0, "float32")])
def test_auto_takes_what_this_machine_computes_well(
    monkeypatch: pytest.MonkeyPatch, bfloat16_s: float, expected: str
) -> None:
    from hotlap.train import base, probe

    said: list[str] = []
    monkeypatch.setattr(probe, "measure", lambda device: {"float32_s": 0.2, "bfloat16_s": bfloat16_s})
    assert base.choose_precision(ModelConfig(), said.append) == expected
    assert said[0].startswith(f"Precision: {expected}, measured on this machine") and "bfloat16: " in said[0]
    assert base.choose_precision(ModelConfig(precision="float16"), said.append) == "float16"
    assert said[1] == "Precision: float16, as model.precision says."


def test_the_precision_of_a_run_is_that_of_its_first_slice(zygote: Zygote, make_config: MakeConfig) -> None:
    """Chosen once: a later slice may run where another one would be chosen."""
    config = make_config(model__precision="auto", train__max_steps=4)
    first = zygote.run(config, "patches:as_told", TEST_BFLOAT16_S="0.001", TEST_STOP_AT="2")
    assert first.status == 75, first.talk()
    assert "Precision: bfloat16, measured on this machine" in first.talk()
    second = zygote.run(config, "patches:as_told", TEST_BFLOAT16_S="1000")
    assert second.status == 0 and "Precision" not in second.talk()
    whole = make_config(model__precision="bfloat16", train__max_steps=4, run="whole")
    assert zygote.run(whole).status == 0
    found = [RunFolder(each.run_folder) for each in (config, whole)]
    identities = [runs.read_identity(run) for run in found]
    assert [identity and identity.precision for identity in identities] == ["bfloat16", "bfloat16"]
    adapters = [(run.adapter / "adapter_model.safetensors").read_bytes() for run in found]
    assert adapters[0] == adapters[1]


def test_float16_keeps_gradients_that_are_too_small_for_it(tiny_model: Path) -> None:
    """A gradient of 1e-8 in float16 is 0; scaled up by a power of two and down again in float32, it is not."""
    import torch

    from hotlap.train.step import _FLOAT16_LOSS_SCALE

    small = torch.tensor(1e-8)
    assert float(small.half()) == 0.0
    assert float((small * _FLOAT16_LOSS_SCALE).half().float() / _FLOAT16_LOSS_SCALE) == pytest.approx(1e-8, rel=2e-2)
    assert torch.frexp(torch.tensor(_FLOAT16_LOSS_SCALE)).mantissa == 0.5


def test_float16_learns_what_float32_learns(zygote: Zygote, make_config: MakeConfig) -> None:
    from hotlap import durable

    losses: dict[str, list[float]] = {}
    for precision in ("float32", "float16", "bfloat16"):
        config = make_config(run=precision, model__precision=precision, train__max_steps=6, lora={"rank": 4})
        assert zygote.run(config).status == 0
        losses[precision] = [row["loss"] for row in durable.read_rows(RunFolder(config.run_folder).metrics)]
    assert losses["float16"] == pytest.approx(losses["float32"], rel=5e-3)
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=2e-2)
    assert losses["float16"] != losses["float32"] != losses["bfloat16"]


# --- optimizers ---


@pytest.mark.parametrize(("kind", "instead"), [("paged_adamw", "'adamw'"), ("paged_adamw8bit", "'adamw8bit'")])
def test_paged_optimizers_are_refused_where_there_is_no_gpu(tiny_model: Path, kind: Any, instead: str) -> None:
    import torch

    from hotlap.train import model, optim

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ours = model.attach_lora(load(tiny_model, ModelConfig(precision="float32")), LoraConfig(rank=4), 0, "base")
    with pytest.raises(ConfigError, match=f"trains on cpu. Take {instead}"):
        optim.build(ours.parameters, OptimConfig(kind=kind))


def test_adamw8bit_has_8_bit_moments_that_are_saved(zygote: Zygote, make_config: MakeConfig) -> None:
    """Of the large tensors; those under 4,096 values keep float32 ones. Steps are counted in each."""
    import torch

    from hotlap.train import model

    config = make_config(optim__kind="adamw8bit", lora={"rank": 64}, train__max_steps=3)
    assert zygote.run(config).status == 0
    newest = runs.newest_checkpoint(RunFolder(config.run_folder), pytest.fail)
    assert newest is not None
    state = model.load_tensors(newest.folder / "optimizer.safetensors")
    adapter = model.load_tensors(newest.folder / "adapter_model.safetensors")
    for name, value in adapter.items():
        is_large = value.numel() >= 4096
        assert state[f"state1.{name}"].dtype == (torch.uint8 if is_large else torch.float32)
        assert state[f"step.{name}"].item() == 3
        assert (f"absmax1.{name}" in state) == is_large
    assert {value.numel() >= 4096 for value in adapter.values()} == {True, False}

"""The base model mapped from its files, and imports without the compiler: the same as without, and told where not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, make_family

from hotlap.config import ModelConfig

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make_family(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def tensors_of(model: Any) -> dict[str, Any]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def assert_same_model(one: Any, other: Any) -> None:
    import torch

    ours, theirs = tensors_of(one), tensors_of(other)
    assert set(ours) == set(theirs)
    odd = [
        name for name in theirs if ours[name].dtype != theirs[name].dtype or not torch.equal(ours[name], theirs[name])
    ]
    assert odd == []
    assert one.config.to_diff_dict() == other.config.to_diff_dict()
    assert one.config._attn_implementation == other.config._attn_implementation
    tied = [model.get_input_embeddings().weight is model.get_output_embeddings().weight for model in (one, other)]
    assert tied[0] == tied[1]
    assert not one.training


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_are_those_of_from_pretrained(families: dict[str, Path], family: str, precision: Any) -> None:
    import torch

    from hotlap.train import base, direct

    folder = families[family]
    ours = direct.load(folder, getattr(torch, precision), torch.device("cpu"))
    theirs = base.load_base(folder, ModelConfig(precision=precision), is_direct=False)
    assert_same_model(ours, theirs)


def test_shards_are_mapped_without_a_copy(families: dict[str, Path], tmp_path: Path) -> None:
    import torch

    from hotlap.train import base, direct

    whole = base.load_base(families["qwen2"], is_direct=False)
    whole.save_pretrained(tmp_path, max_shard_size="100KB")  # pyright: ignore
    assert len(direct.weight_files(tmp_path)) > 1
    ours = direct.load(tmp_path, torch.float32, torch.device("cpu"))
    assert_same_model(ours, whole)
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line}
    assert mapped == {str(path) for path in direct.weight_files(tmp_path)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "phi3"}, "models of type 'phi3' are not known"),
        ({"quantization_config": {}}, "quantized already"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "is not LlamaForCausalLM"),
        ({"num_hidden_layers": 3}, "its files and its class differ in 10 tensors"),
        ({"vocab_size": 301}, "differ in 2 tensors"),
    ],
)
def test_what_is_not_known_is_left_to_from_pretrained(
    families: dict[str, Path], tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    import torch

    from hotlap.train import direct

    for file in families["llama"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change, "tie_word_embeddings": False}))
    with pytest.raises(direct.NotDirect, match=reason):
        direct.load(tmp_path, torch.float32, torch.device("cpu"))


def test_a_model_that_is_not_whole_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """transformers' own loader draws what is missing at random, anew in every process, and goes on."""
    from safetensors.torch import load_file, save_file

    from hotlap.errors import ConfigError, CorruptFile
    from hotlap.train import base

    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights, config = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_bytes())
    whole, tensors = weights.read_bytes(), load_file(weights)

    def refused(kind: type[Exception], words: str, **changes: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        for is_direct in (False, True):
            with pytest.raises(kind, match=words):
                base.load_base(tmp_path, is_direct=is_direct)

    lacking = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(lacking, weights, {"format": "pt"})
    refused(CorruptFile, "1 tensors are not there in the model's size, as lm_head.weight")
    weights.write_bytes(whole)
    refused(CorruptFile, "6 tensors are not there in the model's size, as model.layers.0.mlp", intermediate_size=96)
    refused(ConfigError, "makes no language model of .*model type `new9`", model_type="new9", architectures=["New"])
    refused(ConfigError, "makes no language model of .*T5Config", model_type="t5")
    weights.write_bytes(whole[:-100])
    refused(CorruptFile, "cannot be read: .* Fetch or copy the model again")
    weights.write_bytes(whole)
    (tmp_path / "config.json").write_text(json.dumps(config))
    base.load_base(tmp_path)


def test_a_head_saved_beside_what_it_is_tied_to_is_told_and_loaded(families: dict[str, Path], tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from hotlap.train import base

    for file in families["llama"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    head = torch.randn(300, 64)
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    said: list[str] = []
    loaded: Any = base.load_base(tmp_path, say=said.append)
    assert len(said) == 1 and "differ in 1 tensors, as lm_head.weight" in said[0]
    assert_same_model(loaded, base.load_base(tmp_path, is_direct=False))


_LEAN = """
import json, sys
from pathlib import Path
# As in a first slice: a tokenizer asks transformers, which looks for SciPy and remembers.
from transformers.utils.import_utils import is_scipy_available
assert is_scipy_available()
import torch
from hotlap.train.lean import is_tried, lean_imports
assert is_tried()
with lean_imports():
    import hotlap.train.loop
from hotlap.config import LoraConfig, OptimConfig
from hotlap.train import base, direct, model, optim
from hotlap.train.machine import use_threads

use_threads(1)
folder = Path(sys.argv[1])
ours = model.attach_lora(base.load_base(folder), LoraConfig(rank=4), 0, "base")
optimizer = optim.build(ours.parameters, OptimConfig())
tokens_BT = torch.arange(24)[None]
hidden_BTD = ours.hidden(tokens_BT, torch.ones_like(tokens_BT))
ours.logits(hidden_BTD).logsumexp(-1).sum().backward()
optimizer.step()
optimizer.zero_grad(set_to_none=True)
heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "bitsandbytes", "boto3", "scipy", "sympy")
found = {"loaded": [name for name in heavy if name in sys.modules]}
# Afterwards, everything can be imported and does what it does.
stock = base.load_base(folder, is_direct=False)
again = direct.load(folder, torch.float32, tokens_BT.device)
found["stock"] = torch.equal(stock(tokens_BT).logits, again(tokens_BT).logits)
found["generated"] = stock.generate(tokens_BT, max_new_tokens=2, do_sample=False).shape[1]
optim.build(ours.parameters, OptimConfig(kind="adamw8bit"))
found["shapes"] = list(torch.nn.functional.silu(torch.empty(3, 4, device="meta")).shape)
found["compiled"] = float(torch.compile(lambda x: x.sin() + 1, backend="aot_eager")(torch.zeros(2)).sum())
import torch._dynamo, torch.distributed.fsdp
found["compiler"] = hasattr(torch._dynamo, "optimize") and torch.distributed.is_available()
print(json.dumps(found))
"""


def test_a_step_imports_neither_compiler_nor_bitsandbytes_and_both_work_afterwards(families: dict[str, Path]) -> None:
    argv = [sys.executable, "-W", "ignore", "-c", _LEAN, str(families["llama"])]
    process = subprocess.run(argv, env={**os.environ}, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    expected = {
        "loaded": [],
        "stock": True,
        "generated": 26,
        "shapes": [3, 4],
        "compiled": 2.0,
        "compiler": True,
    }
    assert found == expected


def test_the_optimizer_is_torchs_number_for_number() -> None:
    import torch

    from hotlap.config import OptimConfig
    from hotlap.train import optim

    def trained(make: Any) -> torch.Tensor:
        draw = torch.Generator().manual_seed(3)
        parameter = torch.nn.Parameter(torch.randn(7, 5, generator=draw))
        optimizer = make({"a": parameter})
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            assert parameter.grad is None
            (parameter * torch.randn(7, 5, generator=draw)).sum().backward()
            optimizer.step()
        return parameter.detach()

    settings = OptimConfig(lr=0.1, weight_decay=0.01)
    stock = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "fused": True}
    ours = trained(lambda named: optim.build(named, settings))
    assert torch.equal(ours, trained(lambda named: torch.optim.AdamW(named.values(), **stock)))
    assert not torch.equal(ours, trained(lambda named: torch.optim.AdamW(named.values(), lr=0.1)))


@pytest.mark.real
def test_the_real_model_is_mapped_and_computes_the_same(smollm2: Path) -> None:
    import torch

    from hotlap.train import base, direct

    ours: Any = direct.load(smollm2, torch.float32, torch.device("cpu"))
    theirs: Any = base.load_base(smollm2, is_direct=False)
    assert_same_model(ours, theirs)
    assert str(smollm2 / "model.safetensors") in Path("/proc/self/maps").read_text()
    tokens_BT = torch.arange(100, 132)[None]
    with torch.inference_mode():
        assert torch.equal(ours(tokens_BT).logits, theirs(tokens_BT).logits)

"""A merge: every change of an adapter in its place, everything else as it was, proven before it is published."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import make_family
from fixtures_data import write_byte_tokenizer
from tiny import make_tiny_model

from hotlap import durable, errors
from hotlap.config import LoraConfig
from hotlap.export import folders, tensors

pytestmark = pytest.mark.torch

Say = list[str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A family's model folder in a precision, its weights in several files if so wanted; made once."""
    made: dict[tuple[str, str, bool], Path] = {}

    def get(family: str, precision: str = "float32", is_sharded: bool = False) -> Path:
        key = (family, precision, is_sharded)
        if key not in made:
            made[key] = in_precision(
                make_family(tmp_path_factory.mktemp("model"), family), precision, is_sharded, tmp_path_factory
            )
        return made[key]

    return get


def in_precision(folder: Path, precision: str, is_sharded: bool, place: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    target = place.mktemp("rewritten")
    whole = json.loads((folder / "config.json").read_text())
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision))
    model.save_pretrained(target, max_shard_size="60KB" if is_sharded else "1GB")
    assert whole["model_type"] == json.loads((target / "config.json").read_text())["model_type"]
    return write_byte_tokenizer(target)


def make_adapter(folder: Path, base: Path, lora: LoraConfig, num_tokens: int = 0, strength: float = 0.2) -> Path:
    """A standard PEFT folder in which everything that can be trained has been moved."""
    import torch

    from hotlap.train import model
    from hotlap.train.base import grow, load_base

    loaded: Any = load_base(base)
    rows = grow(loaded, num_tokens) or None
    ours = model.attach_lora(loaded, lora, 0, "base", new_rows=rows)
    chance = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in ours.parameters.values():
            parameter.add_(strength * torch.randn(parameter.shape, generator=chance))
    durable.make_dirs(folder)
    saved = {name: value.detach().clone() for name, value in ours.saved.items()}
    (folder / model.ADAPTER_FILE).write_bytes(model.save_tensors(saved))
    (folder / model.ADAPTER_CONFIG_FILE).write_bytes(ours.adapter_config_json())
    return folder


def merged(base: Path, adapter: Path, target: Path, precision: str = "base") -> tuple[Any, dict[str, Any]]:
    from hotlap.export import merge, proof

    said: Say = []
    done = merge.merge(base, adapter, target, precision, None, said.append)
    return done, proof.prove(base, adapter, target, None, {}, said.append)


CASES: dict[str, tuple[str, str, LoraConfig]] = {
    "tied": ("llama", "float32", LoraConfig(rank=4)),
    "biases and rsLoRA": ("qwen2", "float32", LoraConfig(rank=4, rslora=True)),
    "DoRA in bfloat16": ("qwen3", "bfloat16", LoraConfig(rank=4, dora=True)),
    "float16": ("llama", "float16", LoraConfig(rank=4, target_modules=("q_proj", "down_proj"))),
    "embedding and head": ("qwen3", "float32", LoraConfig(rank=4, modules_to_save=("embed_tokens", "lm_head"))),
    "tied embedding in full": ("llama", "bfloat16", LoraConfig(rank=4, modules_to_save=("embed_tokens",))),
    "embedding by LoRA": ("qwen3", "float32", LoraConfig(rank=4, target_modules=("embed_tokens", "lm_head", "q_proj"))),
    "other towers": ("gemma4", "bfloat16", LoraConfig(rank=4)),
}


@pytest.mark.parametrize("case", CASES)
def test_merged_says_what_base_and_adapter_say(case: str, models: Callable[..., Path], tmp_path: Path) -> None:
    """Against PEFT's own arithmetic, for several files; what is untouched keeps its bytes."""
    family, precision, lora = CASES[case]
    base = models(family, precision, is_sharded=True)
    adapter = make_adapter(tmp_path / "adapter", base, lora)
    done, evidence = merged(base, adapter, tmp_path / "merged")
    assert evidence["error_to_exact_merge"] <= (1e-6 if precision == "float32" else 1e-4)
    assert evidence["adapter_effect"] > 0.1
    assert done.num_adapter_tensors == len(tensors.entries_of(adapter / "adapter_model.safetensors")[0])
    before, after = tensors.all_entries(base), tensors.all_entries(tmp_path / "merged")
    assert {name: (e.dtype, e.shape) for name, e in before.items()} == {
        name: (e.dtype, e.shape) for name, e in after.items()
    }
    changed = {name for name in before if list(before[name].pieces()) != list(after[name].pieces())}
    assert len(changed) == sum(done.kinds.values()) < len(before)
    others = {path.name for path in base.iterdir() if path.suffix != ".safetensors"}
    assert all((base / name).read_bytes() == (tmp_path / "merged" / name).read_bytes() for name in others)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_for_added_tokens_are_part_of_the_merged_model(tmp_path: Path, tied: bool) -> None:
    base = make_tiny_model(tmp_path / "base", tied=tied)
    write_byte_tokenizer(base, num_entries=304)
    adapter = make_adapter(tmp_path / "adapter", base, LoraConfig(rank=4), num_tokens=304)
    _, evidence = merged(base, adapter, tmp_path / "merged")
    assert evidence["error_to_exact_merge"] < 1e-6
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["vocab_size"] == 304
    embedding = tensors.all_entries(tmp_path / "merged")["model.embed_tokens.weight"]
    was = tensors.all_entries(base)["model.embed_tokens.weight"]
    assert embedding.shape == (304, 32) and b"".join(embedding.pieces()).startswith(b"".join(was.pieces()))


def test_b33_a_merge_that_forgets_the_modules_trained_in_full_is_not_proven(
    models: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The naive way adds the low-rank updates and leaves out what was trained whole."""
    from hotlap.export import changes, merge

    base = models("qwen3")
    lora = LoraConfig(rank=4, modules_to_save=("embed_tokens", "lm_head"))
    adapter = make_adapter(tmp_path / "adapter", base, lora)
    whole = {name: change for name, change in changes.changes_of(adapter).items() if change.kind == "full"}
    assert set(whole) == {"model.embed_tokens.weight", "lm_head.weight"}
    right, _ = merged(base, adapter, tmp_path / "merged")
    assert right.kinds == {"lora": 14, "full": 2} and right.num_adapter_tensors == 30
    monkeypatch.setattr(
        merge, "changes_of", lambda folder: {n: c for n, c in changes.changes_of(folder).items() if n not in whole}
    )
    with pytest.raises(errors.ProofFailed, match="Nothing is published"):
        merged(base, adapter, tmp_path / "naive")


def test_b36_the_sum_is_rounded_once_and_never_overflows(models: Callable[..., Path], tmp_path: Path) -> None:
    """A base in bfloat16 with a value that float16 cannot hold."""
    import torch
    from safetensors.torch import load_file, save_file

    base = tmp_path / "base"
    shutil.copytree(models("llama", "bfloat16"), base)
    weights = load_file(base / "model.safetensors")
    name = "model.layers.0.mlp.gate_proj.weight"
    weights[name][0, 0] = 70_000.0
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    adapter = make_adapter(tmp_path / "adapter", base, LoraConfig(rank=4))
    done, _ = merged(base, adapter, tmp_path / "merged")
    assert set(done.precisions) == {"BF16"}
    trained = load_file(adapter / "adapter_model.safetensors")
    a, b = (trained[f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.weight"] for x in "AB")
    expected = (weights[name].float() + LoraConfig().alpha / 4 * (b @ a)).bfloat16()
    assert torch.equal(load_file(tmp_path / "merged" / "model.safetensors")[name], expected)
    with pytest.raises(errors.AuditFailed, match=r"reaches 70\d\d\d.*cannot hold.*--precision bfloat16"):
        merged(base, adapter, tmp_path / "half", "float16")
    done, _ = merged(base, adapter, tmp_path / "single", "float32")
    assert set(done.precisions) == {"F32"}
    assert json.loads((tmp_path / "single" / "config.json").read_text())["dtype"] == "float32"


def test_b37_never_into_4_bit_and_what_that_costs_is_measured(
    models: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was trained is an adapter on NF4; merged is the unquantized base, and both losses are in the record."""
    from safetensors.torch import load_file, save_file

    from hotlap.export import merge, proof

    base = models("llama")
    adapter = make_adapter(tmp_path / "adapter", base, LoraConfig(rank=4))
    said: Say = []
    merge.merge(base, adapter, tmp_path / "merged", "base", None, said.append)
    settings = {"quantization": "nf4", "double_quantization": True, "precision": "float32"}
    monkeypatch.setattr(proof, "LOSS_NATS", -9.0)
    found = proof.prove(base, adapter, tmp_path / "merged", settings, {}, said.append)
    assert (found["trained_on"], found["merged_into"]) == ("nf4", "unquantized")
    assert 0.0 < abs(found["val_loss_as_trained"] - found["val_loss_merged"]) < 1.0
    assert "Loss on the frozen prompts" in said[-2] and "is worse by more than" in said[-1]

    four_bit = tmp_path / "four-bit"
    shutil.copytree(base, four_bit)
    weights = load_file(four_bit / "model.safetensors")
    weights = {name: value.byte() if "q_proj" in name else value for name, value in weights.items()}
    save_file(weights, four_bit / "model.safetensors")
    with pytest.raises(errors.ConfigError, match="is U8: a quantized base cannot take an adapter without loss"):
        merge.merge(four_bit, adapter, tmp_path / "naive", "base", None, said.append)


def test_an_adapter_of_another_model_has_no_place(models: Callable[..., Path], tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", models("qwen3"), LoraConfig(rank=4, target_modules=("q_proj",)))
    with pytest.raises(errors.AuditFailed, match="trained on another model"):
        merged(make_tiny_model(tmp_path / "other"), adapter, tmp_path / "merged")
    odd = np.zeros((2, 2), dtype=np.float32)
    from safetensors.numpy import load_file, save_file

    path = adapter / "adapter_model.safetensors"
    save_file({**load_file(path), "base_model.model.model.layers.0.mlp.up_proj.hada_w1": odd}, path)
    with pytest.raises(errors.AuditFailed, match="hada_w1, and what it does to the model is not known"):
        merged(models("qwen3"), adapter, tmp_path / "merged")


def test_files_that_call_their_tensors_otherwise(models: Callable[..., Path], tmp_path: Path) -> None:
    """A checkpoint of the decoder alone has no `model.` before its names; loading puts it there."""
    from safetensors.torch import load_file, save_file

    base = tmp_path / "base"
    shutil.copytree(models("llama"), base)
    weights = load_file(base / "model.safetensors")
    save_file({name.removeprefix("model."): value for name, value in weights.items()}, base / "model.safetensors")
    adapter = make_adapter(tmp_path / "adapter", base, LoraConfig(rank=4))
    done, evidence = merged(base, adapter, tmp_path / "merged")
    assert done.kinds == {"lora": 14} and evidence["error_to_exact_merge"] < 1e-6


# --- publishing ---


def test_an_export_is_reused_until_it_is_damaged_or_of_another_step(tmp_path: Path) -> None:
    built: list[Path] = []
    said: Say = []

    def build(staged: Path) -> dict[str, Any]:
        built.append(staged)
        durable.make_dirs(staged)
        durable.write_synced(staged / "model", b"weights")
        return {"event": "result", "exit_code": 0, "error": 0.0}

    final = tmp_path / "run" / "export" / "merged"
    first = folders.published(final, {"step": 1}, build, said.append)
    assert first == folders.Exported(final, {"step": 1, "error": 0.0}) == folders.Exported(final, durable.verify(final))
    folders.published(final, {"step": 1}, build, said.append)
    assert len(built) == 1 and "verified" in said[-1]
    (final / "model").write_bytes(b"weightz")
    folders.published(final, {"step": 1}, build, said.append)
    folders.published(final, {"step": 2}, build, said.append)
    assert len(built) == 3 and durable.verify(final)["step"] == 2


def test_what_is_not_proven_is_not_published_and_a_dead_export_leaves_nothing(tmp_path: Path) -> None:
    final = tmp_path / "export" / "merged"
    dead = final.with_name(".merged.1-0")
    durable.make_dirs(dead)

    def build(staged: Path) -> dict[str, Any]:
        assert not dead.exists()
        durable.make_dirs(staged)
        raise errors.ProofFailed("no")

    with pytest.raises(errors.ProofFailed):
        folders.published(final, {"step": 1}, build, lambda line: None)
    assert list(final.parent.iterdir()) == []

"""The frozen base without transformers' loader: a model without values, and its weights mapped from their files.

On a processor, in the precision that the files have, no second copy is made. Whatever is not plainly a model that we
know, in files that hold exactly its weights, is left to `from_pretrained`.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"

FAMILIES = {
    "llama": ("llama", "LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralConfig", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3Config", "Qwen3ForCausalLM"),
    "gemma3_text": ("gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gemma4": ("gemma4", "Gemma4Config", "Gemma4ForConditionalGeneration"),
}
"""Module, configuration and model class by `model_type`, as transformers' auto classes choose them."""


class NotDirect(Exception):
    """Why a model is left to `from_pretrained`."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder; empty if it has none by the usual names."""
    index = folder / INDEX_FILE
    if index.is_file():
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        return sorted(folder / name for name in names)
    return [folder / WEIGHTS_FILE] if (folder / WEIGHTS_FILE).is_file() else []


def load(folder: Path, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """The model in evaluation mode, with the weights that `from_pretrained` gives it.

    Raises:
        NotDirect: it is no model that we know, or its files hold other tensors than it has.
    """
    whole = json.loads((folder / "config.json").read_bytes())
    if whole.get("model_type") not in FAMILIES:
        raise NotDirect(f"models of type {whole.get('model_type')!r} are not known")
    if "quantization_config" in whole:
        raise NotDirect("the weights are quantized already")
    module, config_name, class_name = FAMILIES[whole["model_type"]]
    if whole.get("architectures") not in (None, [class_name]):
        raise NotDirect(f"{whole['architectures']} is not {class_name}")
    # Of this family only: the auto classes import what they would choose from.
    package = f"transformers.models.{module}"
    config_class = getattr(importlib.import_module(f"{package}.configuration_{module}"), config_name)
    model_class = getattr(importlib.import_module(f"{package}.modeling_{module}"), class_name)
    config = config_class.from_pretrained(folder, local_files_only=True)
    initialization = importlib.import_module("transformers.initialization")
    # Memory that nothing is written to is none. On the meta device, buffers that no file holds would have no values,
    # and torch would import its compiler.
    with initialization.no_init_weights():
        model = model_class._from_config(config, dtype=dtype)
    _require_plain(model, dtype)
    _assign(model, _tensors(folder, dtype, device))
    _make_buffers(model)
    return model.to(device).eval()


def _require_plain(model: Any, dtype: torch.dtype) -> None:
    kept = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    if kept and dtype != torch.float32:
        raise NotDirect(f"{sorted(kept)} stay in float32")


def _tensors(folder: Path, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Mapped, not read; in another precision or on another device a copy."""
    files = weight_files(folder)
    if not files:
        raise NotDirect(f"there is neither {WEIGHTS_FILE} nor {INDEX_FILE}")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        for name, tensor in load_file(file).items():
            tensors[name] = tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
    return tensors


def _assign(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    wanted = model.state_dict()
    tied = set(model.all_tied_weights_keys)
    odd = sorted((set(wanted) - tied) ^ set(tensors))
    odd += sorted(name for name in set(wanted) & set(tensors) if wanted[name].shape != tensors[name].shape)
    if odd:
        raise NotDirect(f"its files and its class differ in {len(odd)} tensors, as {odd[0]}")
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()


def _make_buffers(model: Any) -> None:
    """Buffers that no file holds, rotary frequencies and scales, computed once more as transformers does after loading:
    in a model of 16 bits some were made in 16 bits."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # else it would be drawn anew
    model.initialize_weights()

"""Base model, adapter and optimizer of a run, put together as its identity and its configuration say."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from hotlap import artifacts
from hotlap.data.render import Renderer
from hotlap.errors import AuditFailed, ConfigError, OutOfMemory
from hotlap.train import attention, direct, model, optim, prepacked
from hotlap.train.context import Context
from hotlap.train.kernels import use_kernels
from hotlap.train.opening import OpenedRun
from hotlap.train.step import is_out_of_memory

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""What the result needs besides if its base model has to grow: stock PEFT looks there for how many rows that are."""


def assemble(opened: OpenedRun, context: Context) -> tuple[model.AdaptedModel, torch.optim.Optimizer]:
    """The adapter as it is before the first step.

    Raises:
        ConfigError: the settings do not fit the model, the machine, or the adapter of a warm start.
        OutOfMemory: the model does not fit into memory.
    """
    try:
        return _assembled(opened, context)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        words = str(error).partition("\n")[0]
    raise OutOfMemory(
        f"The base model and its adapter do not fit into memory ({words}). Set model.quantization = 'nf4' or "
        f"model.precision = 'bfloat16', which start a run of their own, or take a machine with more."
    )


def _assembled(opened: OpenedRun, context: Context) -> tuple[model.AdaptedModel, torch.optim.Optimizer]:
    config, identity = context.config, opened.identity
    num_tokens = num_tokens_needed(opened)
    settings = config.model.model_copy(update={"precision": identity.precision})
    base: Any = model.load_base(opened.model_folder, settings, num_tokens, context.say, config.techniques.direct_load)
    new_rows = _new_rows(opened, num_tokens)
    if new_rows:
        context.say(
            f"The tokenizer has {len(new_rows)} tokens more than the model has embedding rows. They get rows that are "
            f"trained and saved with the adapter; its folder has the tokenizer, from which PEFT sees how many."
        )
    if config.techniques.kernels:
        use_kernels(base, context.say)
    techniques = config.techniques
    if techniques.prepacked_weights and (reason := prepacked.why_not(base)):
        context.say(f"techniques.prepacked_weights: {reason}; goes on without.")
        techniques = techniques.model_copy(update={"prepacked_weights": False})
    name = artifacts.base_name(config.base_model, opened.model_folder)
    adapted = model.attach_lora(
        base, config.lora, identity.seed, name, config.train.neftune_alpha, new_rows, techniques
    )
    if config.lora.init_from is not None:
        _warm_start(adapted, Path(config.lora.init_from))
    _choose_attention(adapted, identity.precision, context)
    if base.config.model_type not in direct.FAMILIES:
        adapted.require_stock_logits()
    if config.slice.gradient_checkpointing:
        adapted.recompute_activations()
    return adapted, optim.build(adapted.parameters, config.optim)


def _choose_attention(adapted: model.AdaptedModel, precision: str, context: Context) -> None:
    wanted = context.config.slice.attention_kernel
    kernel, why = attention.kernel_here(wanted, precision, adapted.device)
    if kernel != "mask":
        try:
            adapted.use_kernel(kernel)
        except ConfigError as error:
            if wanted != "auto":
                raise
            kernel, why = "mask", f"{error} A mask blocks attention between packed examples now."
    if kernel == "mask":
        adapted.require_mask()
    if why is not None:
        context.say(why)


def num_tokens_needed(opened: OpenedRun) -> int:
    """Embedding rows that the run needs: as many as the tokenizer has tokens, if the data has one beyond the model's
    own rows. 0: the model's own are enough."""
    both = (opened.packing.train, opened.packing.held_out)
    largest = max(dataset.facts.largest_token_id for dataset in both if dataset is not None)
    if largest < _num_rows(opened.model_folder):
        return 0
    return Renderer(opened.model_folder).num_tokens


def _new_rows(opened: OpenedRun, num_tokens: int) -> list[int]:
    return list(range(_num_rows(opened.model_folder), num_tokens)) if num_tokens else []


def _num_rows(model_folder: Path) -> int:
    whole = json.loads((model_folder / "config.json").read_bytes())
    return whole.get("text_config", whole)["vocab_size"]


def _warm_start(adapted: model.AdaptedModel, folder: Path) -> None:
    path = folder / model.ADAPTER_FILE
    try:
        model.load_parameters(adapted.saved, model.load_tensors(path), path)
        scale, ours = _scale_of(folder / model.ADAPTER_CONFIG_FILE), adapted.scale
    except AuditFailed as error:
        raise ConfigError(
            f"lora.init_from: {error} Its rank, target modules and kind must be those of this run's lora settings."
        ) from None
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(
            f"lora.init_from: {folder} cannot be read: {error}. Give the folder of a PEFT adapter."
        ) from None
    if not math.isclose(scale, ours, rel_tol=1e-6):
        raise ConfigError(
            f"lora.init_from: the adapter in {folder} was trained at a scale of {scale:g}, and lora.alpha and "
            f"lora.rslora of this run make {ours:g}: it would begin with another update than the one that was learned."
        )


def _scale_of(path: Path) -> float:
    fields = json.loads(path.read_bytes())
    if fields.get("alpha_pattern"):
        raise ValueError("its modules have scales of their own (alpha_pattern)")
    return fields["lora_alpha"] / (math.sqrt(fields["r"]) if fields.get("use_rslora") else fields["r"])

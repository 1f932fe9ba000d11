"""The base model with its adapter: load, attach LoRA, name its parameters, save as standard PEFT."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from hotlap.config import LoraConfig
from hotlap.errors import AuditFailed, ConfigError
from hotlap.train.optim import Named

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"

# B rows, T positions, D model width


def load_base(folder: Path) -> torch.nn.Module:
    """The frozen base model in float32, from an ordinary model folder, offline."""
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, attn_implementation="sdpa"
    )
    return model.requires_grad_(False)


class AdaptedModel:
    """A base model with LoRA, its trainable parameters under the names they have in the saved adapter."""

    def __init__(self, peft_model: PeftModel) -> None:
        self.peft_model = peft_model
        causal_lm: Any = peft_model.get_base_model()
        self._decoder: torch.nn.Module = causal_lm.get_decoder()
        self.lm_head: torch.nn.Module = causal_lm.get_output_embeddings()
        self.parameters: Named = _named_as_saved(peft_model)

    def hidden(self, tokens_BT: torch.Tensor, segments_BT: torch.Tensor) -> torch.Tensor:
        """Last hidden states `[B, T, D]`. A token sees only earlier ones of its own example; positions restart."""
        return self._decoder(
            input_ids=tokens_BT,
            attention_mask=block_mask(segments_BT),
            position_ids=positions_of(segments_BT),
            use_cache=False,
        ).last_hidden_state

    def adapter_config_json(self) -> bytes:
        """PEFT's `adapter_config.json`, sets in order so that the same adapter gives the same bytes."""
        fields = self.peft_model.peft_config["default"].to_dict()
        fields["inference_mode"] = True
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in fields.items()}
        return (json.dumps(plain, indent=2, sort_keys=True, default=str) + "\n").encode()


def attach_lora(base: torch.nn.Module, config: LoraConfig, seed: int, base_name: str) -> AdaptedModel:
    """A new adapter: A drawn from `seed`, B zero, so that nothing changes before the first step.

    Raises:
        ConfigError: a name in `target_modules` is no linear module of this model.
    """
    targets = config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules)
    peft_config = PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=config.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    base.name_or_path = base_name  # type: ignore[assignment]  (where peft takes it from)
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings():
            # peft 0.21 asks transformers 5.24 by a name that is going away; the user can do nothing about it.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            model = get_peft_model(base, peft_config)  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise ConfigError(f"lora.target_modules = {config.target_modules!r} does not fit this model: {error}") from None
    assert isinstance(model, PeftModel)
    return AdaptedModel(model)


def positions_of(segments_BT: torch.Tensor) -> torch.Tensor:
    """Positions that restart at 0 with every example of a row."""
    num_T = segments_BT.shape[1]
    index_BT = torch.arange(num_T, device=segments_BT.device).expand_as(segments_BT)
    begins_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    begins_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    return index_BT - torch.where(begins_BT, index_BT, 0).cummax(dim=1).values


def block_mask(segments_BT: torch.Tensor) -> torch.Tensor:
    """`[B, 1, T, T]`, true where a query may look at a key: earlier or itself, and of the same example."""
    num_T = segments_BT.shape[1]
    causal_TT = torch.ones(num_T, num_T, dtype=torch.bool, device=segments_BT.device).tril()
    same_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
    return (same_BTT & causal_TT)[:, None]


def _named_as_saved(model: PeftModel) -> Named:
    """Trainable parameters by their saved names. PEFT's own saving leaves the adapter's name out of them."""
    # Left to itself, PEFT asks the hub whether the embeddings were resized; ours never are.
    saved = set(get_peft_model_state_dict(model, save_embedding_layers=False))
    named = {name.replace(".default.", "."): value for name, value in model.named_parameters() if value.requires_grad}
    if set(named) != saved:
        raise AuditFailed(f"PEFT would save other tensors than are trained: {sorted(set(named) ^ saved)[:4]}.")
    return named


def save_tensors(tensors: dict[str, torch.Tensor]) -> bytes:
    """safetensors bytes; the same tensors give the same bytes."""
    return save({name: tensors[name].contiguous() for name in sorted(tensors)}, metadata={"format": "pt"})


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path)


def load_parameters(parameters: Named, tensors: dict[str, torch.Tensor], source: Path) -> None:
    """Copy saved values into the parameters.

    Raises:
        AuditFailed: the names or shapes are not exactly those of the parameters.
    """
    audit_names(parameters, tensors, source)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def audit_names(parameters: Named, tensors: dict[str, torch.Tensor], source: Path) -> None:
    """
    Raises:
        AuditFailed: a tensor is missing, surplus or of another shape.
    """
    if odd := sorted(set(parameters) ^ set(tensors)):
        raise AuditFailed(
            f"{source} holds {len(tensors)} tensors where the adapter has {len(parameters)}; "
            f"the first that differs is {odd[0]}."
        )
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise AuditFailed(f"{source}: {name} has shape {tuple(tensors[name].shape)}, not {tuple(parameter.shape)}.")


def audit_adapter(parameters: Named, tensors: dict[str, torch.Tensor], num_updates: int, source: Path) -> None:
    """What must be true of every saved adapter: all its tensors, all finite, and some B moved after an update.

    Raises:
        AuditFailed: it is not.
    """
    audit_names(parameters, tensors, source)
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise AuditFailed(f"{source}: {name} holds a value that is not finite.")
    outer = [tensor for name, tensor in tensors.items() if "lora_B" in name]
    if num_updates > 0 and outer and not any(bool(tensor.any()) for tensor in outer):
        raise AuditFailed(f"{source}: every LoRA B is zero after {num_updates} updates, so nothing was learned.")

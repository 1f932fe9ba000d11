"""Which modules of a base model an adapter changes, trains in full, or trains single rows of: by PEFT's settings."""

from typing import Any

import torch

from hotlap.config import LoraConfig
from hotlap.errors import ConfigError
from hotlap.train.base import decoder_linears, is_linear


def modules_of(base: Any, config: LoraConfig) -> str | list[str]:
    """As the user wrote them; of a model with other towers beside the text decoder, the decoder's own by full name."""
    inside = decoder_linears(base)
    head = base.get_output_embeddings()
    outside = [module for name, module in base.named_modules() if is_linear(module) and name not in set(inside)]
    names = config.target_modules
    if not isinstance(names, str) and (found := sorted(tied_names(base) & set(names))):
        raise ConfigError(
            f"lora.target_modules names {found[0]}, and this model's input embedding and output head are one "
            f"tensor: merging would change both. Leave it out, or train it in full with lora.modules_to_save."
        )
    if all(module is head for module in outside):
        return names if isinstance(names, str) else list(names)
    chosen = [name for name in inside if isinstance(names, str) or any(_ends_in(name, each) for each in names)]
    if not chosen:
        raise ConfigError(f"lora.target_modules = {names!r}: the text decoder has no linear module of that name.")
    return chosen


def saved_whole(base: torch.nn.Module, config: LoraConfig) -> list[str] | None:
    for wanted in config.modules_to_save:
        if not any(_ends_in(name, wanted) for name, _ in base.named_modules()):
            raise ConfigError(f"lora.modules_to_save names {wanted}, and the model has no such module.")
    return list(config.modules_to_save) or None


def trained_rows(base: Any, rows: list[int]) -> dict[str, list[int]]:
    # PEFT gives tied tensors one set of trained rows by itself.
    return dict.fromkeys(_embedding_names(base)[: 1 if tied_names(base) else 2], rows)


def tied_names(base: Any) -> set[str]:
    """Names of input embedding and output head if they are one tensor, else none."""
    is_tied = base.get_input_embeddings().weight is base.get_output_embeddings().weight
    return set(_embedding_names(base)) if is_tied else set()


def _embedding_names(base: Any) -> list[str]:
    modules = (base.get_input_embeddings(), base.get_output_embeddings())
    return [_name_in(base, module).rpartition(".")[2] for module in modules]


def _name_in(base: torch.nn.Module, wanted: torch.nn.Module) -> str:
    return next(name for name, module in base.named_modules() if module is wanted)


def _ends_in(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")

"""What an adapter does to a base model's tensors, a block of rows at a time, in float32.

`W` is a base tensor's rows `[N, K]`, `A` `[rank, K]` and `B` `[N, rank]` LoRA's factors, `m` `[N]` DoRA's magnitudes.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.utils.other import get_pattern_key

from hotlap.errors import AuditFailed, ConfigError
from hotlap.train.model import ADAPTER_CONFIG_FILE, ADAPTER_FILE, load_tensors

Tensor = torch.Tensor
Rows = Callable[[int, Tensor], Tensor]
"""From a first row's number and the base's rows from there on, the rows of the merged tensor. Rows that the base does
not have are given as zeros."""

_PREFIX = "base_model.model."
_SUFFIXES = (
    "lora_A.weight",
    "lora_B.weight",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
    "token_adapter.trainable_tokens_delta",
)
_WHOLE = ("weight", "bias")


@dataclass(frozen=True)
class Change:
    """What becomes of one tensor of the model. `kind` is `lora`, `dora`, `embedding`, `full` or `rows`; `num_tensors`
    of the adapter are in it."""

    name: str
    kind: str
    num_tensors: int
    rows: Rows
    num_rows: int | None = None
    """If it may differ from the base's."""
    shape: tuple[int, ...] | None = None
    """That the base's tensor must have, if the adapter alone tells."""
    whole: Tensor | None = None
    """Of a tensor that was trained in full."""


def changes_of(folder: Path) -> dict[str, Change]:
    """Every change that an adapter makes, by the tensor's name in the model.

    Raises:
        AuditFailed: it holds a tensor of which we do not know what it does.
        ConfigError: it is no LoRA adapter, or one with biases.
    """
    fields: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG_FILE).read_bytes())
    if fields.get("peft_type") != "LORA" or fields.get("bias", "none") != "none" or fields.get("fan_in_fan_out"):
        raise ConfigError(f"{folder} is no plain LoRA adapter (type, bias or layout of weights): it cannot be merged.")
    if fields.get("init_lora_weights") == "pissa":
        raise ConfigError(f"{folder} is a checkpoint of PiSSA, which fits a changed base only. Finish the run first.")
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_tensors(folder / ADAPTER_FILE).items():
        path, suffix = _split(name, folder)
        parts.setdefault(path, {})[suffix] = tensor.float()
    found = [change for path, part in parts.items() for change in _changes(path, part, fields, folder)]
    return {change.name: change for change in found}


def _split(name: str, folder: Path) -> tuple[str, str]:
    bare = name.removeprefix(_PREFIX)
    for suffix in _SUFFIXES:
        for ending in (f".{suffix}", f".{suffix}.weight"):
            if bare.endswith(ending):
                return bare.removesuffix(ending), suffix
    path, _, last = bare.rpartition(".")
    if last not in _WHOLE or "lora_" in bare:
        raise AuditFailed(f"{folder} holds {name}, and what it does to the model is not known here. Serve it unmerged.")
    return path, last


def _changes(path: str, part: dict[str, Tensor], fields: dict[str, Any], folder: Path) -> list[Change]:
    name = f"{path}.weight"
    kinds = set(part)
    if kinds <= set(_WHOLE):
        return [_full(f"{path}.{last}", tensor) for last, tensor in part.items()]
    if kinds == {"token_adapter.trainable_tokens_delta"}:
        indices = fields["trainable_token_indices"]
        wanted: list[int] = indices if isinstance(indices, list) else indices[path.rpartition(".")[2]]
        return [_trained_rows(name, wanted, part["token_adapter.trainable_tokens_delta"])]
    if kinds == {"lora_A.weight", "lora_B.weight"}:
        a_RK, b_NR = part["lora_A.weight"], part["lora_B.weight"]
        return [_lora(name, a_RK, b_NR, _scale(path, a_RK.shape[0], fields))]
    if kinds == {"lora_A.weight", "lora_B.weight", "lora_magnitude_vector"}:
        a_RK, b_NR = part["lora_A.weight"], part["lora_B.weight"]
        return [_dora(name, a_RK, b_NR, part["lora_magnitude_vector"], _scale(path, a_RK.shape[0], fields))]
    if kinds == {"lora_embedding_A", "lora_embedding_B"}:
        # Of an embedding [V, D] the factors are kept transposed: A [rank, V], B [D, rank].
        a_RV, b_DR = part["lora_embedding_A"], part["lora_embedding_B"]
        change = _lora(name, b_DR.T, a_RV.T, _scale(path, a_RV.shape[0], fields))
        return [Change(change.name, "embedding", 2, change.rows, shape=change.shape)]
    raise AuditFailed(f"{folder} has {sorted(kinds)} for {path}, which together make nothing known. It is damaged.")


def _scale(path: str, rank: int, fields: dict[str, Any]) -> float:
    pattern: dict[str, float] = fields.get("alpha_pattern") or {}
    alpha: Any = pattern.get(get_pattern_key(list(pattern), path), fields["lora_alpha"])
    return alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)


def _lora(name: str, a_RK: Tensor, b_NR: Tensor, scale: float) -> Change:
    def rows(start: int, w_NK: Tensor) -> Tensor:
        return (b_NR[start : start + len(w_NK)] @ a_RK).mul_(scale).add_(w_NK)

    return Change(name, "lora", 2, rows, shape=(b_NR.shape[0], a_RK.shape[1]))


def _dora(name: str, a_RK: Tensor, b_NR: Tensor, m_N: Tensor, scale: float) -> Change:
    plain = _lora(name, a_RK, b_NR, scale)

    def rows(start: int, w_NK: Tensor) -> Tensor:
        sum_NK = plain.rows(start, w_NK)
        return sum_NK * (m_N[start : start + len(w_NK)] / torch.linalg.norm(sum_NK, dim=1))[:, None]

    return Change(name, "dora", 3, rows, shape=plain.shape)


def _full(name: str, whole: Tensor) -> Change:
    def rows(start: int, w_NK: Tensor) -> Tensor:
        return whole[start : start + len(w_NK)]

    return Change(name, "full", 1, rows, num_rows=whole.shape[0], whole=whole)


def _trained_rows(name: str, indices: list[int], values_MK: Tensor) -> Change:
    place = {index: number for number, index in enumerate(indices)}

    def rows(start: int, w_NK: Tensor) -> Tensor:
        here = [index for index in indices if start <= index < start + len(w_NK)]
        merged_NK = w_NK.clone()
        merged_NK[[index - start for index in here]] = values_MK[[place[index] for index in here]]
        return merged_NK

    return Change(name, "rows", 1, rows, num_rows=max(indices) + 1)

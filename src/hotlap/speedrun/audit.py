"""The audit of produced weights: read by us, byte by byte, before any library loads them.

An adapter is `adapter_config.json` and `adapter_model.safetensors`, and nothing else but the `README.md` that PEFT
writes beside them and nobody reads. Its header is parsed here, its tensors are held against the base model's shapes,
and its configuration may only say what a LoRA on this base needs, DoRA included where the track takes it.
"""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotlap import durable
from hotlap.speedrun.track import Limits

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 16
_MAX_HEADER_BYTES = 1 << 22
_MAX_ALPHA = 1e6
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_NAME_START = "base_model.model."
_UNREAD = "README.md"
MAGNITUDE = ".lora_magnitude_vector"
"""How the name of a DoRA magnitude ends."""

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")

# What a configuration may hold besides names and numbers of a plain LoRA must be off.
_FREE = {"base_model_name_or_path", "inference_mode", "peft_version", "revision", "lora_dropout"}
_KNOWN = {
    *("peft_type", "task_type", "r", "lora_alpha", "target_modules", "bias"),
    *("use_rslora", "use_dora", "fan_in_fan_out"),
}


@dataclass(frozen=True)
class Audit:
    complaints: tuple[str, ...]
    """Empty: the adapter is what it should be."""
    num_params: int
    sha256: dict[str, str]


def max_bytes(limits: Limits) -> dict[str, int]:
    """The two files of an adapter, and the most bytes each may have."""
    return {CONFIG: MAX_CONFIG_BYTES, WEIGHTS: 8 + _MAX_HEADER_BYTES + 4 * limits.adapter_params}


def audit(folder: Path, output: Sequence[dict[str, Any]], base_model: Path, limits: Limits) -> Audit:
    """Inspect collected files against what lay in the output folder and against the base model."""
    complaints = [
        f"{entry['name']!a} ({entry['kind']}) has no place in an adapter"
        for entry in output
        if entry["name"] not in (CONFIG, WEIGHTS, _UNREAD) or entry["kind"] != "file"
    ]
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        return Audit((*complaints, *(f"{name} is missing, no plain file, or too large" for name in missing)), 0, {})
    hashes = {name: durable.sha256_file(folder / name) for name in (CONFIG, WEIGHTS)}
    try:
        rank, has_magnitudes = _check_config(folder / CONFIG, limits)
        tensors = _read_header(folder / WEIGHTS)
        _check_values(folder / WEIGHTS, tensors)
        _check_shapes(tensors, rank, has_magnitudes, linear_shapes(base_model))
        num_params = sum(tensor.num_values for tensor in tensors)
        if num_params > limits.adapter_params:
            complaints.append(f"{num_params:,} parameters, and {limits.adapter_params:,} are allowed")
    except _Complaint as complaint:
        return Audit((*complaints, str(complaint)), 0, hashes)
    return Audit(tuple(complaints), num_params, hashes)


class _Complaint(Exception):
    pass


@dataclass(frozen=True)
class _Tensor:
    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


def _check_config(path: Path, limits: Limits) -> tuple[int, bool]:
    """The adapter's rank, and whether it is one of DoRA."""
    config = _json(path.read_bytes(), CONFIG)
    if config.get("peft_type") != "LORA":
        raise _Complaint(f"{CONFIG}: peft_type is {config.get('peft_type')!r}, not 'LORA'")
    if config.get("task_type") not in (None, "CAUSAL_LM") or config.get("bias", "none") != "none":
        raise _Complaint(f"{CONFIG}: only a causal model's LoRA without bias is read")
    if str(config.get("init_lora_weights", "")).lower().startswith(_CHANGES_BASE):
        raise _Complaint(
            f"{CONFIG}: init_lora_weights = {str(config['init_lora_weights'])[:60]!a} changes the base's weights when "
            f"the adapter is loaded. Save it as a plain LoRA of twice the rank: PEFT's save_pretrained does that when "
            f"it is given path_initial_model_for_weight_conversion, and hotlap's trainer by itself"
        )
    for key, value in config.items():
        is_off = value in (None, False) or value == [] or value == {}
        if key not in _FREE | _KNOWN and not is_off and not _is_harmless(key, value):
            raise _Complaint(f"{CONFIG}: {key!a} = {str(value)[:60]!a} is not read here; leave it out")
    alpha, modules = config.get("lora_alpha"), config.get("target_modules")
    # Compared and not converted: an integer of JSON may be larger than any float.
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= _MAX_ALPHA:
        raise _Complaint(f"{CONFIG}: lora_alpha is no number up to {_MAX_ALPHA:,.0f}")
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        raise _Complaint(f"{CONFIG}: target_modules is no list of names")
    if any(not isinstance(config.get(key, False), bool) for key in ("use_rslora", "use_dora", "fan_in_fan_out")):
        raise _Complaint(f"{CONFIG}: use_rslora, use_dora and fan_in_fan_out are true or false")
    has_magnitudes = config.get("use_dora", False)
    if has_magnitudes and not limits.dora:
        raise _Complaint(f"{CONFIG}: this track takes no DoRA")
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= limits.max_lora_rank:
        raise _Complaint(f"{CONFIG}: r is {str(rank)[:60]!a}, and 1 to {limits.max_lora_rank} is allowed")
    return rank, has_magnitudes


def _is_harmless(key: str, value: Any) -> bool:
    # Defaults that PEFT writes for methods which these settings leave switched off.
    defaults = {"qalora_group_size": 16, "megatron_core": "megatron.core"}
    starts = (True, "gaussian")
    return (key in defaults and value == defaults[key]) or (key == "init_lora_weights" and value in starts)


def _json(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise _Complaint(f"{what} is not JSON: {str(error)[:80]}") from None
    if not isinstance(value, dict):
        raise _Complaint(f"{what} is not an object")
    return value


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key stands there twice")
    return dict(pairs)


def _read_header(path: Path, is_adapter: bool = True) -> list[_Tensor]:
    """The tensors of a safetensors file, which must fill it without a gap."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise _Complaint(f"{WEIGHTS}: its header's length is wrong")
        header = _json(file.read(length), WEIGHTS)
    header.pop("__metadata__", None)
    tensors = [_tensor(name, entry) for name, entry in header.items()]
    at = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        width = _BYTES.get(tensor.kind)
        if is_adapter and (width is None or tensor.end - tensor.start != width * tensor.num_values):
            raise _Complaint(f"{WEIGHTS}: {tensor.name!a} has kind {tensor.kind!a} or a size that does not fit it")
        if tensor.start != at or tensor.end < at:
            raise _Complaint(f"{WEIGHTS}: bytes that belong to no tensor, or to two")
        at = tensor.end
    if at != size - 8 - length:
        raise _Complaint(f"{WEIGHTS}: bytes after the last tensor")
    return tensors


def _tensor(name: str, entry: Any) -> _Tensor:
    try:
        kind, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise _Complaint(f"{WEIGHTS}: the entry of {name!a} is incomplete") from None
    numbers = [start, end, *shape]
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers) or not isinstance(kind, str):
        raise _Complaint(f"{WEIGHTS}: the entry of {name!a} holds no proper numbers")
    return _Tensor(name, kind, tuple(shape), start, end)


def _check_values(path: Path, tensors: Sequence[_Tensor]) -> None:
    if not tensors:
        raise _Complaint(f"{WEIGHTS} holds no tensor")
    with path.open("rb") as file:
        base = 8 + struct.unpack("<Q", file.read(8))[0]
        for tensor in tensors:
            file.seek(base + tensor.start)
            if not _are_finite(file.read(tensor.end - tensor.start), tensor.kind):
                raise _Complaint(f"{WEIGHTS}: {tensor.name!a} holds a value that is not finite")


def _are_finite(data: bytes, kind: str) -> bool:
    if kind == "BF16":  # numpy has no such type; all eight exponent bits set is infinity or NaN
        return not bool(np.any((np.frombuffer(data, "<u2") & 0x7F80) == 0x7F80))
    return bool(np.isfinite(np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[kind])).all())


def linear_shapes(base_model: Path) -> dict[str, tuple[int, ...]]:
    """Every two-dimensional weight of a base model by its module's name, from the headers of its files.

    Raises:
        ValueError: it has no readable safetensors file.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(base_model.glob("*.safetensors")):
        try:
            tensors = _read_header(path, is_adapter=False)
        except _Complaint as complaint:
            raise ValueError(f"{path}: {complaint}") from None
        for tensor in tensors:
            if len(tensor.shape) == 2 and tensor.name.endswith(".weight"):
                shapes[tensor.name.removesuffix(".weight")] = tensor.shape
    if not shapes:
        raise ValueError(f"{base_model} has no safetensors file.")
    return shapes


def _check_shapes(
    tensors: Sequence[_Tensor], rank: int, has_magnitudes: bool, linear: dict[str, tuple[int, ...]]
) -> None:
    """Each tensor is a part of the update of a module that the base model has, in its shape, and each update is whole:
    its A and its B, and with DoRA the magnitudes of the module's rows."""
    parts: dict[str, set[str]] = {}
    for tensor in tensors:
        module, part = _part_of(tensor.name)
        if module not in linear:
            raise _Complaint(f"{WEIGHTS}: {tensor.name!a} is no LoRA weight of a module of the base model")
        out_width, in_width = linear[module]
        expected = {"A": (rank, in_width), "B": (out_width, rank), "magnitude": (out_width,)}[part]
        if tensor.shape != expected:
            raise _Complaint(f"{WEIGHTS}: {tensor.name!a} has shape {list(tensor.shape)}, not {list(expected)}")
        parts.setdefault(module, set()).add(part)
    whole = {"A", "B", "magnitude"} if has_magnitudes else {"A", "B"}
    for module, found in sorted(parts.items()):
        if lacking := whole - found:
            raise _Complaint(f"{WEIGHTS}: {module!a} lacks {' and '.join(sorted(lacking))} of its update")
        if found != whole:
            raise _Complaint(f"{WEIGHTS}: {module!a} has magnitudes, and {CONFIG} says nothing of use_dora")


def _part_of(name: str) -> tuple[str, str]:
    """A module's name and which part of its update a tensor is; two empty texts when it is none."""
    for end, part in ((".lora_A.weight", "A"), (".lora_B.weight", "B"), (MAGNITUDE, "magnitude")):
        if name.startswith(_NAME_START) and name.endswith(end):
            return name.removeprefix(_NAME_START).removesuffix(end), part
    return "", ""

"""The audit of produced weights: read by us, byte by byte, before any library loads them.

An adapter is `adapter_config.json` and `adapter_model.safetensors`, and nothing else. Its header is parsed here, its
tensors are held against the base model's shapes, and its configuration may only say what a LoRA on this base needs.
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
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_NAME_START = "base_model.model."

# What a configuration may hold besides names and numbers of a plain LoRA must be off.
_FREE = {"base_model_name_or_path", "inference_mode", "peft_version", "revision", "lora_dropout"}
_KNOWN = {"peft_type", "task_type", "r", "lora_alpha", "target_modules", "bias", "use_rslora", "fan_in_fan_out"}


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
        if entry["name"] not in (CONFIG, WEIGHTS) or entry["kind"] != "file"
    ]
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        return Audit((*complaints, *(f"{name} is missing, no plain file, or too large" for name in missing)), 0, {})
    hashes = {name: durable.sha256_file(folder / name) for name in (CONFIG, WEIGHTS)}
    try:
        rank = _check_config(folder / CONFIG, limits)
        tensors = _read_header(folder / WEIGHTS)
        _check_values(folder / WEIGHTS, tensors)
        _check_shapes(tensors, rank, linear_shapes(base_model))
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


def _check_config(path: Path, limits: Limits) -> int:
    """The adapter's rank."""
    config = _json(path.read_bytes(), CONFIG)
    if config.get("peft_type") != "LORA":
        raise _Complaint(f"{CONFIG}: peft_type is {config.get('peft_type')!r}, not 'LORA'")
    if config.get("task_type") not in (None, "CAUSAL_LM") or config.get("bias", "none") != "none":
        raise _Complaint(f"{CONFIG}: only a causal model's LoRA without bias is read")
    for key, value in config.items():
        is_off = value in (None, False) or value == [] or value == {}
        if key not in _FREE | _KNOWN and not is_off and not _is_harmless(key, value):
            raise _Complaint(f"{CONFIG}: {key!a} = {str(value)[:60]!a} is not read here; leave it out")
    alpha, modules = config.get("lora_alpha"), config.get("target_modules")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise _Complaint(f"{CONFIG}: lora_alpha is no number")
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        raise _Complaint(f"{CONFIG}: target_modules is no list of names")
    if any(not isinstance(config.get(key, False), bool) for key in ("use_rslora", "fan_in_fan_out")):
        raise _Complaint(f"{CONFIG}: use_rslora and fan_in_fan_out are true or false")
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= limits.max_lora_rank:
        raise _Complaint(f"{CONFIG}: r is {str(rank)[:60]!a}, and 1 to {limits.max_lora_rank} is allowed")
    return rank


def _is_harmless(key: str, value: Any) -> bool:
    # Defaults that PEFT writes for methods which these settings leave switched off.
    defaults = {"qalora_group_size": 16, "megatron_core": "megatron.core"}
    # Other ways of starting, such as PiSSA, change the base weights when the adapter is loaded.
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


def _check_shapes(tensors: Sequence[_Tensor], rank: int, linear: dict[str, tuple[int, ...]]) -> None:
    """Each tensor is the A or the B of a module that the base model has, in its shape, and each A has its B."""
    halves: dict[str, set[str]] = {}
    for tensor in tensors:
        module, _, half = tensor.name.removeprefix(_NAME_START).removesuffix(".weight").rpartition(".lora_")
        if tensor.name != f"{_NAME_START}{module}.lora_{half}.weight" or half not in ("A", "B") or module not in linear:
            raise _Complaint(f"{WEIGHTS}: {tensor.name!a} is no LoRA weight of a module of the base model")
        out_width, in_width = linear[module]
        expected = (rank, in_width) if half == "A" else (out_width, rank)
        if tensor.shape != expected:
            raise _Complaint(f"{WEIGHTS}: {tensor.name!a} has shape {list(tensor.shape)}, not {list(expected)}")
        halves.setdefault(module, set()).add(half)
    if lonely := sorted(module for module, found in halves.items() if len(found) != 2):
        raise _Complaint(f"{WEIGHTS}: {lonely[0]!a} has only one half of its update")

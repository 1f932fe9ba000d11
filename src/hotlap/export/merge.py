"""An adapter merged into its base model's files, tensor by tensor.

In memory are the adapter and a block of rows, however large the model is. What the adapter does not touch is copied
byte for byte.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hotlap import durable, hub
from hotlap.errors import AuditFailed, ConfigError, storage_errors
from hotlap.export import names, tensors
from hotlap.export.changes import Change, changes_of
from hotlap.export.task import Say
from hotlap.export.tensors import Entry, NewTensor

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_WORDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_BLOCK_BYTES = 1 << 25
_LEGAL = ("LICENSE", "NOTICE", "USE_POLICY")


@dataclass(frozen=True)
class Merged:
    """What was written. `kinds` counts changed tensors by kind of change."""

    kinds: dict[str, int]
    num_adapter_tensors: int
    num_tensors: int
    num_bytes: int
    precisions: dict[str, int]
    """Tensors by safetensors' word for their type."""


def merge(base: Path, adapter: Path, target: Path, precision: str, template: Path | None, say: Say) -> Merged:
    """Write the merged model into the new folder `target`, each file synced. Nothing is proven by that.

    Raises:
        AuditFailed: a tensor of the adapter has no place in the base, or a sum cannot be kept in `precision`.
        ConfigError: the base is quantized.
        StorageFailed: it cannot be written.
    """
    shards = {path: tensors.entries_of(path) for path in tensors.shards_of(base)}
    entries = {entry.name: entry for found, _ in shards.values() for entry in found}
    changes = names.placed(changes_of(adapter), base, set(entries))
    for name, change in changes.items():
        _require_fits(change, entries[name], adapter)
    needs = sum(_num_bytes(entry, changes.get(entry.name), precision) for entry in entries.values())
    durable.require_free(target.parent, needs)
    durable.make_dirs(target)
    for number, (path, (found, metadata)) in enumerate(shards.items(), start=1):
        say(f"{path.name}, {number} of {len(shards)}")
        _write_shard(target / path.name, path, found, metadata, changes, precision)
    _copy_others(base, target, set(shards), template)
    _describe(base, target, entries, changes, precision)
    written = tensors.all_entries(target)
    return Merged(
        _counted(change.kind for change in changes.values()),
        sum(change.num_tensors for change in changes.values()),
        len(written),
        sum(entry.num_bytes for entry in written.values()),
        _counted(entry.dtype for entry in written.values()),
    )


def _counted(words: Iterator[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for word in words:
        found[word] = found.get(word, 0) + 1
    return found


def _require_fits(change: Change, entry: Entry, adapter: Path) -> None:
    if entry.dtype not in _DTYPES:
        raise ConfigError(
            f"{entry.name} of {entry.path} is {entry.dtype}: a quantized base cannot take an adapter without loss. "
            f"Merge into the unquantized model."
        )
    whole = None if change.whole is None else tuple(change.whole.shape)
    fits = change.shape in (None, entry.shape) and (whole is None or whole[1:] == entry.shape[1:])
    if not fits:
        raise AuditFailed(
            f"{adapter} changes {entry.name} of shape {change.shape or whole}, and the base has {entry.shape}. "
            f"It was trained on another model."
        )


# --- a shard ---


def _write_shard(
    target: Path,
    source: Path,
    found: list[Entry],
    metadata: dict[str, str],
    changes: dict[str, Change],
    precision: str,
) -> None:
    if precision == "base" and not any(entry.name in changes for entry in found):
        tensors.copy_file(source, target)
        return
    new = [_new_tensor(entry, changes.get(entry.name), precision) for entry in found]
    tensors.write_file(target, new, metadata)


def _new_tensor(entry: Entry, change: Change | None, precision: str) -> NewTensor:
    dtype = _new_dtype(entry, precision)
    if change is None and dtype == entry.dtype:
        return NewTensor(entry.name, dtype, entry.shape, entry.num_bytes, entry.pieces())
    shape = _new_shape(entry, change)
    return NewTensor(
        entry.name, dtype, shape, _num_bytes(entry, change, precision), _pieces(entry, shape, change, dtype)
    )


def _new_dtype(entry: Entry, precision: str) -> str:
    return entry.dtype if precision == "base" or entry.dtype not in _DTYPES else _WORDS[precision]


def _new_shape(entry: Entry, change: Change | None) -> tuple[int, ...]:
    if change is None or change.num_rows is None:
        return entry.shape
    # Trained rows are never fewer than the base's; a tensor trained in full is what it is.
    return (change.num_rows if change.kind == "full" else max(change.num_rows, entry.shape[0]), *entry.shape[1:])


def _num_bytes(entry: Entry, change: Change | None, precision: str) -> int:
    if change is None and _new_dtype(entry, precision) == entry.dtype:
        return entry.num_bytes
    return math.prod(_new_shape(entry, change)) * _DTYPES[_new_dtype(entry, precision)].itemsize


def _pieces(entry: Entry, shape: tuple[int, ...], change: Change | None, dtype: str) -> Iterator[bytes]:
    """The merged tensor's bytes, a block of rows at a time."""
    num_rows, *inner = shape or (1,)
    row_numbers = max(1, math.prod(inner))
    at_once = max(1, _BLOCK_BYTES // (row_numbers * torch.float32.itemsize))
    for start in range(0, num_rows, at_once):
        base = _rows(entry, start, min(start + at_once, num_rows), row_numbers).view(-1, *inner)
        merged = base if change is None else change.rows(start, base)
        rounded = merged.to(_DTYPES[dtype])
        if not _is_finite(rounded) and _is_finite(merged):
            raise AuditFailed(
                f"{entry.name} reaches {float(merged.abs().max()):.6g}, which {_DTYPES[dtype]} cannot hold. "
                f"Export it with --precision bfloat16 or float32."
            )
        if change is not None and not _is_finite(rounded):
            raise AuditFailed(f"{entry.name} would hold a value that is not finite: base or adapter is damaged.")
        yield rounded.contiguous().view(torch.uint8).numpy().tobytes()


def _is_finite(values: torch.Tensor) -> bool:
    """Whether all are: a sum in float64 has room for any finite ones, and no infinity leaves it again."""
    return math.isfinite(values.sum(dtype=torch.float64))


def _rows(entry: Entry, start: int, stop: int, row_numbers: int) -> torch.Tensor:
    """Rows of a base tensor in float32, flat; zeros for those that it does not have."""
    dtype = _DTYPES[entry.dtype]
    row_bytes = row_numbers * dtype.itemsize
    have = max(start, min(stop, entry.num_bytes // row_bytes))
    held = torch.empty((have - start) * row_numbers, dtype=dtype)
    tensors.read_into(held.view(torch.uint8).numpy().data, entry.path, entry.start + start * row_bytes)
    missing = (stop - have) * row_numbers
    return torch.cat([held.float(), torch.zeros(missing)]) if missing else held.float()


# --- the files beside the weights ---


def _copy_others(base: Path, target: Path, weights: set[Path], template: Path | None) -> None:
    for path in sorted(base.rglob("*")):
        name = path.relative_to(base).as_posix()
        is_wanted = hub.is_model_file(name) or name.upper().startswith(_LEGAL)
        if not path.is_file() or path in weights or not is_wanted:
            continue
        durable.make_dirs((target / name).parent)
        tensors.copy_file(path, target / name)
    if template is not None:
        durable.replace(target / "chat_template.jinja", template.read_bytes())


def _describe(base: Path, target: Path, entries: dict[str, Entry], changes: dict[str, Change], precision: str) -> None:
    """Configuration and index, where the weights differ from what they say; otherwise they stay as they were."""
    config: dict[str, Any] = json.loads((base / "config.json").read_bytes())
    text = config.get("text_config", config)
    grown = {_new_shape(entries[name], change)[0] for name, change in changes.items() if _grows(entries[name], change)}
    if grown:
        text["vocab_size"] = max(grown)
    if precision != "base":
        for part in (config, text):
            part.pop("torch_dtype", None)
            part["dtype"] = precision
    if grown or precision != "base":
        _write_json(target / "config.json", config)
        if (target / tensors.INDEX).exists():
            index: dict[str, Any] = json.loads((base / tensors.INDEX).read_bytes())
            total = sum(_num_bytes(entry, changes.get(name), precision) for name, entry in entries.items())
            index["metadata"] = {**index.get("metadata", {}), "total_size": total}
            _write_json(target / tensors.INDEX, index)


def _grows(entry: Entry, change: Change) -> bool:
    return _new_shape(entry, change) != entry.shape


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with storage_errors(path):
        durable.replace(path, (json.dumps(value, indent=2) + "\n").encode())

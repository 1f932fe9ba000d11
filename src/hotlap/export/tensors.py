"""Safetensors files tensor by tensor: what is in them, and writing one of which no more than a piece is in memory."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotlap import durable
from hotlap.errors import CorruptFile, storage_errors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_CHUNK_BYTES = 1 << 24
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class Entry:
    """A tensor in a file. `dtype` in safetensors' words, `start` in bytes from the file's beginning."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    num_bytes: int

    def pieces(self) -> Iterator[bytes]:
        """Its bytes, read a piece at a time."""
        yield from read_pieces(self.path, self.start, self.num_bytes)


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written; `pieces` are made when its turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    pieces: Iterable[bytes]


def read_pieces(path: Path, start: int, num_bytes: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        left = num_bytes
        while left:
            piece = file.read(min(left, _CHUNK_BYTES))
            if not piece:
                raise CorruptFile(f"{path} ends {left:,} bytes too early. Copy it again.")
            left -= len(piece)
            yield piece


def read_into(buffer: memoryview, path: Path, start: int) -> None:
    """As many of a file's bytes as the buffer has."""
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while buffer:
            num_bytes = file.readinto(buffer)
            if not num_bytes:
                raise CorruptFile(f"{path} ends {len(buffer):,} bytes too early. Copy it again.")
            buffer = buffer[num_bytes:]


def entries_of(path: Path) -> tuple[list[Entry], dict[str, str]]:
    """The tensors of a safetensors file in the order of their bytes, and its metadata.

    Raises:
        CorruptFile: its header cannot be read, or speaks of more than there is.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > min(size, _MOST_HEADER_BYTES):
                raise ValueError(f"a header of {length:,} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
        metadata: dict[str, str] = header.pop("__metadata__", {})
        base = _LENGTH_BYTES + length
        entries = [_entry(path, name, fields, base) for name, fields in header.items()]
        if any(entry.start + entry.num_bytes > size for entry in entries):
            raise ValueError("tensors beyond its end")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFile(f"{path} is damaged ({error}). Copy it again.") from None
    return sorted(entries, key=lambda entry: entry.start), metadata


def _entry(path: Path, name: str, fields: dict[str, Any], base: int) -> Entry:
    start, end = fields["data_offsets"]
    return Entry(name, fields["dtype"], tuple(fields["shape"]), path, base + start, end - start)


def shards_of(folder: Path) -> list[Path]:
    """The weight files of a model folder, in order.

    Raises:
        CorruptFile: its index cannot be read.
    """
    if not (folder / INDEX).exists():
        return [folder / SINGLE]
    try:
        names = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CorruptFile(f"{folder / INDEX} is damaged: it lists no weights. Copy the whole folder again.") from None
    return [folder / name for name in sorted(names)]


def all_entries(folder: Path) -> dict[str, Entry]:
    """Every tensor of a model folder by its name in the files."""
    return {entry.name: entry for path in shards_of(folder) for entry in entries_of(path)[0]}


def write_file(path: Path, tensors: Sequence[NewTensor], metadata: dict[str, str]) -> None:
    """A safetensors file, synced.

    Raises:
        StorageFailed: it cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.num_bytes],
        }
        at += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # tensors begin at a multiple of eight
    with storage_errors(path):
        durable.disk.create(path, len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for tensor in tensors:
            num_bytes = 0
            for piece in tensor.pieces:
                durable.disk.append(path, piece)
                num_bytes += len(piece)
            assert num_bytes == tensor.num_bytes, (tensor.name, num_bytes, tensor.num_bytes)
        durable.disk.sync(path)


def copy_file(source: Path, target: Path) -> None:
    """The same bytes, synced.

    Raises:
        StorageFailed: it cannot be written.
    """
    with storage_errors(target):
        durable.disk.create(target, b"")
        for piece in read_pieces(source, 0, source.stat().st_size):
            durable.disk.append(target, piece)
        durable.disk.sync(target)

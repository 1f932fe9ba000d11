"""Pins: what the files of an artifact were, byte by byte, and what is different now."""

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hotlap import durable
from hotlap.errors import CorruptFile, MissingArtifact

Stamp = tuple[int, int, int, int]


@dataclass(frozen=True)
class FilePin:
    sha256: str
    num_bytes: int
    stamp: Stamp
    """Size, mtime_ns, ctime_ns and inode when it was hashed; as long as they stay, so did the bytes."""


Pins = dict[str, FilePin]


def pin(path: Path) -> Pins:
    """The hash of a file, or of every file in a folder, by relative name. Only a manifest of ours is left out.

    Raises:
        MissingArtifact: there is nothing there, or it cannot be read.
    """
    files = _files(path)
    if not files:
        raise MissingArtifact(f"{path} cannot be pinned: there is no file. Check the name.")
    return {name: _pin_file(file) for name, file in files.items()}


def changed(path: Path, pins: Pins) -> list[str]:
    """How the files differ from their pins, in words; empty if they do not. Only a file whose stamp moved is read."""
    present = _files(path)
    differences = [f"{name} is gone" for name in pins if name not in present]
    for name, file in present.items():
        if name not in pins:
            differences.append(f"{name} is new")
        elif stamp_of(file) != pins[name].stamp and (now := _pin_file(file)).sha256 != pins[name].sha256:
            differences.append(f"{name} has other content ({pins[name].num_bytes:,} bytes then, {now.num_bytes:,} now)")
    return differences


def pins_to_json(pins: Pins) -> dict[str, Any]:
    return {name: {**asdict(entry), "stamp": list(entry.stamp)} for name, entry in pins.items()}


def pins_from_json(value: dict[str, Any]) -> Pins:
    return {
        name: FilePin(entry["sha256"], entry["num_bytes"], _asstamp_of(entry["stamp"])) for name, entry in value.items()
    }


def _files(path: Path) -> dict[str, Path]:
    if path.is_file():
        return {path.name: path}
    files = {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*")) if file.is_file()}
    if durable.MANIFEST in files:
        with suppress(CorruptFile):
            durable.read_manifest(path)
            del files[durable.MANIFEST]
    return files


def _pin_file(path: Path) -> FilePin:
    try:
        stamp = stamp_of(path)  # before the bytes, so that a change in between is seen next time
        return FilePin(durable.sha256_file(path), stamp[0], stamp)
    except OSError as error:
        raise MissingArtifact(f"{path} cannot be read: {error.strerror}. Check its owner and mode.") from error


def stamp_of(path: Path) -> Stamp:
    status = path.stat()
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _asstamp_of(numbers: list[int]) -> Stamp:
    size, mtime_ns, ctime_ns, inode = numbers
    return (size, mtime_ns, ctime_ns, inode)

"""The one seam through which hotlap changes a disk: publish by rename, hashes, append-only JSONL.

`disk` makes every changing call, so a test can record them, replay each disk state a crash may leave, or fail any
one of them. Nothing else in the package creates, renames or removes a file of ours (`tests/test_layers.py` checks).

A published directory carries `manifest.json`, written last: size and SHA-256 of every file, and a SHA-256 of the
manifest itself. A directory whose manifest does not verify does not exist.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hotlap.errors import CorruptFile, DiskFull, UsageError, storage_errors

MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 22


class Disk:
    """The calls that change a disk. Each either happened or raised; only `sync` makes it survive a power loss."""

    def create(self, path: Path, data: bytes) -> None:
        """A new file with these bytes; one that exists is an error."""
        with path.open("xb") as file:
            file.write(data)

    def append(self, path: Path, data: bytes) -> None:
        with path.open("ab") as file:
            file.write(data)

    def truncate(self, path: Path, num_bytes: int) -> None:
        os.truncate(path, num_bytes)

    def make_dir(self, path: Path) -> None:
        path.mkdir()

    def rename(self, source: Path, target: Path) -> None:
        """Atomic. A file replaces a file; a directory never replaces one that holds something."""
        source.rename(target)

    def remove(self, path: Path) -> None:
        """A file, or an empty directory."""
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    def sync(self, path: Path) -> None:
        """Make a file's bytes, or a directory's names, survive a power loss."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


disk = Disk()


def make_dirs(path: Path) -> None:
    """The directory and its parents, each synced into the one above."""
    if path.is_dir():
        return
    make_dirs(path.parent)
    with storage_errors(path):
        try:
            disk.make_dir(path)
        except FileExistsError:
            if not path.is_dir():
                raise UsageError(f"{path} is a file where a folder is needed: move it, or choose another.") from None
        # Also when another process was faster: it may die before its own sync.
        disk.sync(path.parent)


def remove_tree(path: Path) -> None:
    """Remove a directory; its manifest first, so that a crash half-way leaves nothing that verifies."""
    with storage_errors(path):
        for child in sorted(path.iterdir(), key=lambda child: (child.name != MANIFEST, child.name)):
            if child.is_dir() and not child.is_symlink():
                remove_tree(child)
            else:
                disk.remove(child)
        disk.remove(path)


def write_synced(path: Path, data: bytes) -> None:
    """A new file whose bytes are on the disk; its name is once the directory is synced."""
    with storage_errors(path):
        disk.create(path, data)
        disk.sync(path)


def replace(path: Path, data: bytes) -> None:
    """Put a whole new file in the place of an old one, or change nothing. Of several at once the last one stays."""
    # Not the process's number: threads share it, and so may two machines on one volume.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with storage_errors(path):
        try:
            disk.create(temporary, data)
            disk.sync(temporary)
            disk.rename(temporary, path)
        except BaseException:
            if temporary.exists():
                disk.remove(temporary)
            raise
        disk.sync(path.parent)


def canonical_json(value: Any) -> str:
    """The same text for the same value everywhere; NaN and infinity are errors."""
    return json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False)


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- published directories ---


def publish(
    staged: Path, final: Path, facts: dict[str, Any] | None = None, before_rename: Callable[[], None] | None = None
) -> None:
    """Make a fully written directory visible under its final name, or not at all.

    Every file in `staged` must be synced already (`write_synced`). `facts` go into the manifest. `before_rename` is
    the last chance to refuse, by raising. Exclusive: `final` may not exist.

    Raises:
        FileExistsError: somebody else published `final`.
    """
    _write_manifest(staged, facts or {})
    rename_exclusively(staged, final, before_rename)


def rename_exclusively(staged: Path, final: Path, before_rename: Callable[[], None] | None = None) -> None:
    """Give a directory that holds something its final name, unless somebody else has it: of two, one wins.

    Raises:
        FileExistsError: `final` is there already.
    """
    with storage_errors(final):
        for folder in [*(path for path in sorted(staged.rglob("*")) if path.is_dir()), staged]:
            disk.sync(folder)
        if before_rename:
            before_rename()
        if final.exists():
            raise FileExistsError(final)
        try:
            disk.rename(staged, final)
        except OSError as error:
            if final.exists():
                raise FileExistsError(final) from error
            raise
        disk.sync(final.parent)


def _write_manifest(staged: Path, facts: dict[str, Any]) -> None:
    files = {
        name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)} for name, path in _files_in(staged).items()
    }
    write_synced(staged / MANIFEST, _sealed({"format": 1, "facts": facts, "files": files}))


def _sealed(body: dict[str, Any]) -> bytes:
    seal = sha256_bytes(canonical_json(body).encode())
    return (canonical_json({**body, "seal": seal}) + "\n").encode()


def _files_in(folder: Path) -> dict[str, Path]:
    """Every file at any depth by its name below the folder, but for the folder's own manifest."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path for name, path in files.items() if name != MANIFEST}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a published directory: `facts`, and `files` with `bytes` and `sha256` each. Files unread.

    Raises:
        CorruptFile: there is none, or it is damaged.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
        manifest = json.loads(text)
        del manifest["seal"]
        # Compared as bytes: a flipped bit can leave the same value, as in 1e-05 and 1E-05.
        is_whole = text == _sealed(manifest)
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptFile(f"{folder} has no {MANIFEST}: it was never completed.") from None
    except (ValueError, KeyError, TypeError, RecursionError, IsADirectoryError):
        raise CorruptFile(f"{path} is damaged: it cannot be read.") from None
    if not is_whole or manifest.get("format") != 1:
        raise CorruptFile(f"{path} is damaged: its own hash does not match.")
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """The manifest's facts, after every file was re-hashed.

    Raises:
        CorruptFile: a file is missing, has another size or other bytes, or stands in no manifest.
    """
    manifest = read_manifest(folder)
    expected: dict[str, dict[str, Any]] = manifest["files"]
    for name, entry in expected.items():
        path = folder / name
        if not path.is_file():
            raise CorruptFile(f"{folder} is damaged: {name} is missing.")
        if path.stat().st_size != entry["bytes"]:
            raise CorruptFile(f"{folder} is damaged: {name} has {path.stat().st_size} bytes, not {entry['bytes']}.")
        if sha256_file(path) != entry["sha256"]:
            raise CorruptFile(f"{folder} is damaged: {name} has other bytes than were written.")
    if extra := sorted(set(_files_in(folder)) - set(expected)):
        raise CorruptFile(f"{folder} is damaged: {extra[0]} was not written by hotlap.")
    return manifest["facts"]


def free_bytes(folder: Path) -> int:
    with storage_errors(folder):
        status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def require_free(folder: Path, needs_bytes: int) -> None:
    """
    Raises:
        DiskFull: the volume says that `needs_bytes` do not fit. (A quota may still refuse later.)
    """
    free = free_bytes(folder)
    if free < needs_bytes:
        raise DiskFull(
            f"{folder} needs {needs_bytes:,} bytes and has {free:,} free. "
            f"Free some space and run the same command again; whatever was published before is intact."
        )


# --- append-only JSONL ---


def append_rows(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Append rows, each a line, and return their bytes. A torn last line, the crash we expect, is cut off first.
    Not synced: `sync_file` is."""
    data = "".join(canonical_json(row) + "\n" for row in rows).encode()
    with storage_errors(path):
        if not path.exists():
            disk.create(path, data)
            disk.sync(path.parent)
            return len(data)
        whole = end_of_last_row(path)
        if whole != path.stat().st_size:
            disk.truncate(path, whole)
        disk.append(path, data)
    return len(data)


def sync_file(path: Path) -> None:
    with storage_errors(path):
        disk.sync(path)


def cut_to(path: Path, num_bytes: int) -> None:
    """Take a log back to an earlier length.

    Raises:
        CorruptFile: it is shorter than that, so rows are lost.
    """
    size = path.stat().st_size if path.exists() else 0
    if size < num_bytes:
        raise CorruptFile(f"{path} has {size} bytes, but its first {num_bytes} were published.")
    if size > num_bytes:
        with storage_errors(path):
            disk.truncate(path, num_bytes)
            disk.sync(path)


def end_of_last_row(path: Path) -> int:
    """Length in bytes up to and with the last newline."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _CHUNK_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a log. A torn last line is skipped.

    Raises:
        CorruptFile: a line before the last cannot be read.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            raise CorruptFile(f"{path} line {number} is damaged: it is not JSON.") from None
    return rows

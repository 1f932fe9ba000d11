"""What was exported of a run, as published folders in `runs/NAME/export/`: built aside, proven, and then there."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotlap import clock, durable
from hotlap.errors import CorruptFile, StorageFailed, UsageError, storage_errors
from hotlap.export.task import Say, run_task


@dataclass(frozen=True)
class Tuned:
    """A run's model in its parts: a base model, and the adapter that was trained on it."""

    run: Path
    base_ref: str
    base: Path
    adapter: Path
    step: int
    model: dict[str, Any]
    """The run's settings of `[model]`."""
    chat_template: Path | None
    """The run's own, if it was trained with one."""
    packed: dict[str, str]
    """Fingerprints of its rows."""

    @property
    def quantization(self) -> dict[str, Any] | None:
        return self.model if self.model.get("quantization") else None

    def identity(self) -> dict[str, Any]:
        """What an export depends on."""
        adapter = durable.read_manifest(self.adapter)["files"]["adapter_model.safetensors"]["sha256"]
        return {"base": self.base_ref, "step": self.step, "adapter_sha256": adapter}


@dataclass(frozen=True)
class Exported:
    """A published folder and what its manifest says of it."""

    folder: Path
    facts: dict[str, Any]


def merged(tuned: Tuned, precision: str, say: Say) -> Exported:
    """The run's adapter merged into its base, in the base's precision unless another is given.

    Raises:
        ProofFailed: the merged model does not say what base and adapter say.
        AuditFailed: the adapter does not fit the base.
        StorageFailed: it cannot be written.
    """
    identity = {**tuned.identity(), "kind": "merged", "precision": precision}
    order = {
        "base": str(tuned.base),
        "adapter": str(tuned.adapter),
        "precision": precision,
        "quantization": tuned.quantization,
        "chat_template": tuned.chat_template and str(tuned.chat_template),
        "packed": tuned.packed,
    }

    def build(staged: Path) -> dict[str, Any]:
        return run_task("hotlap.export.merge_task", {**order, "target": str(staged)}, "The merge", say)

    name = "merged" if precision == "base" else f"merged-{precision}"
    return published(folder_of(tuned.run, name), identity, build, say)


def folder_of(run: Path, kind: str) -> Path:
    return run / "export" / kind


def published(final: Path, identity: dict[str, Any], build: Callable[[Path], dict[str, Any]], say: Say) -> Exported:
    """The export with this identity: the one that is here if it is whole, else a new one in its place. `build` fills a
    folder that does not exist yet, every file synced, and gives the report."""
    if (found := _present(final)) is not None:
        if {name: found.get(name) for name in identity} == identity:
            say(f"{final} is here and verified.")
            return Exported(final, found)
        say(f"{final} is of another adapter, step or precision. It is made anew.")
    durable.make_dirs(final.parent)
    _remove_leftovers(final)
    staged = final.with_name(f".{final.name}.{os.getpid()}-{clock.process_birth(os.getpid())}")
    try:
        report = {name: value for name, value in build(staged).items() if name not in ("event", "exit_code")}
        facts = {**identity, **report}
        if final.exists():
            durable.remove_tree(final)
        try:
            durable.publish(staged, final, facts)
        except FileExistsError:
            raise UsageError(f"Another process has just made {final}. Run the same command again.") from None
    finally:
        _remove_quietly(staged)
    return Exported(final, facts)


def facts_of(folder: Path) -> dict[str, Any]:
    """What a published folder's manifest says.

    Raises:
        CorruptFile: it cannot be read.
    """
    return durable.read_manifest(folder)["facts"]


def _present(final: Path) -> dict[str, Any] | None:
    try:
        return durable.verify(final)
    except CorruptFile:
        return None


def _remove_leftovers(final: Path) -> None:
    """Remove what killed exports left behind; a living one has its process in the name."""
    for staged in final.parent.glob(f".{final.name}.*-*"):
        pid, _, birth = staged.name.removeprefix(f".{final.name}.").partition("-")
        try:
            is_alive = clock.process_birth(int(pid)) == birth
        except (ProcessLookupError, ValueError):
            is_alive = False
        if not is_alive:
            _remove_quietly(staged)


def _remove_quietly(staged: Path) -> None:
    with suppress(OSError, StorageFailed):
        durable.remove_tree(staged)


def sync_all(folder: Path, like: Path) -> None:
    """What another program has written is on the disk, and may be read by whoever may read `like`."""
    mode = (like / "config.json").stat().st_mode
    with storage_errors(folder):
        for path in folder.rglob("*"):
            if path.is_file():
                path.chmod(mode)
            durable.disk.sync(path)
        if (folder / durable.MANIFEST).exists():
            durable.disk.remove(folder / durable.MANIFEST)

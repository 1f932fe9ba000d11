"""The checkpoint store: stage, publish, newest that verifies, prune.

A checkpoint is a published directory `step-00000040-slice-0007`: step 40, as slice 7 saved it. Newest means the
highest slice, then the highest step, both recorded in the manifest and never taken from file times. The slice's
number is the run lock's fencing number, so what a slice that lost the lock still manages to publish never outranks
its successor's.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotlap import durable
from hotlap.errors import CorruptFile, DiskFull, StorageFailed

_NAME = re.compile(r"step-(\d{8,})-slice-(\d{4,})")
_STAGING = ".staging-"


@dataclass(frozen=True)
class Checkpoint:
    """A directory that verified when it was made or read; `facts` are the caller's, from the manifest."""

    folder: Path
    slice_number: int
    step: int
    facts: dict[str, Any]


class CheckpointStore:
    """The checkpoints of one run, as one slice sees them. Only the holder of the run lock may publish or prune."""

    def __init__(self, folder: Path, slice_number: int, keep: int, require_lock: Callable[[], None]) -> None:
        self.folder = folder
        self._slice_number = slice_number
        self._keep = keep
        self._require_lock = require_lock
        self._newest: Checkpoint | None = None
        self._damaged: set[Path] = set()

    def newest(self, say: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that verifies, or None. Each one passed over is told, with the reason."""
        for path in sorted(_candidates(self.folder), key=_rank, reverse=True):
            try:
                checkpoint = read(path)
            except CorruptFile as error:
                say(f"Checkpoint {path.name} is passed over: {error}")
                self._damaged.add(path)
                continue
            self._newest = checkpoint
            return checkpoint
        return None

    def newest_facts(self) -> dict[str, Any]:
        """Of the newest checkpoint that this slice read or published; empty if there is none."""
        return self._newest.facts if self._newest else {}

    def name_of(self, step: int) -> str:
        """The name under which this slice publishes a step."""
        return f"step-{step:08d}-slice-{self._slice_number:04d}"

    def publish(
        self,
        step: int,
        files: Callable[[], Iterable[tuple[str, bytes]]],
        facts: dict[str, Any],
        needs_bytes: int,
        inspect: Callable[[Path], None] = lambda _staged: None,
        check_cancelled: Callable[[], None] = lambda: None,
    ) -> Checkpoint:
        """Save a step, or change nothing. Older checkpoints go only after this one was read back and verified,
        unless the disk is so full that the choice is between them and this one; the newest always stays.

        `files` gives names and bytes, one by one. `inspect` may refuse the written files by raising, before they
        become visible; `check_cancelled` may give up by raising between files.

        Raises:
            DiskFull: it does not fit, even after the checkpoints that may go have gone.
            RunLocked: another slice took the run over.
        """
        final = self.folder / self.name_of(step)
        staged = self.folder / f"{_STAGING}{final.name}"

        def before_rename() -> None:
            check_cancelled()
            self._require_lock()

        def attempt() -> None:
            self._require_lock()
            durable.make_dirs(self.folder)
            if final.exists() and self._is_published_or_removed(final):
                return
            durable.require_free(self.folder, needs_bytes)
            try:
                self._stage(staged, files(), check_cancelled)
                inspect(staged)
                manifest_facts = {**facts, "step": step, "slice_number": self._slice_number}
                durable.publish(staged, final, manifest_facts, before_rename)
            except BaseException:
                _remove_quietly(staged)
                raise

        try:
            attempt()
        except DiskFull:
            self._prune(1)
            try:
                attempt()
            except DiskFull as error:
                raise DiskFull(
                    f"{self.folder} cannot take checkpoint {final.name}: it needs {needs_bytes:,} bytes and "
                    f"{durable.free_bytes(self.folder):,} are free (a quota may allow less). Earlier checkpoints are "
                    f"intact. Free some space and run the same command again."
                ) from error
        self._newest = read(final)
        self._damaged.discard(final)
        self._prune(self._keep)
        return self._newest

    @staticmethod
    def _is_published_or_removed(final: Path) -> bool:
        """A publish that failed after its rename is a publish; what does not verify stands in the way."""
        try:
            read(final)
        except CorruptFile:
            durable.remove_tree(final)
            return False
        with durable.storage_errors(final):
            durable.disk.sync(final.parent)
        return True

    @staticmethod
    def _stage(staged: Path, files: Iterable[tuple[str, bytes]], check_cancelled: Callable[[], None]) -> None:
        if staged.exists():
            durable.remove_tree(staged)
        with durable.storage_errors(staged):
            durable.disk.make_dir(staged)
        for name, data in files:
            check_cancelled()
            durable.write_synced(staged / name, data)
        check_cancelled()

    def clean(self) -> None:
        """Remove what killed slices left half-written. Only for the holder of the run lock."""
        if self.folder.is_dir():
            for path in self.folder.glob(f"{_STAGING}*"):
                durable.remove_tree(path)

    def _prune(self, keep: int) -> None:
        """Remove all but the newest `keep` that are not known to be damaged and the best so far, which the newest
        that verified names in its facts (`facts["best"]["checkpoint"]`)."""
        if self._newest is None:
            return
        best = self.newest_facts().get("best")
        newest_rank = _rank(self._newest.folder)
        ranked = sorted((path for path in _candidates(self.folder) if _rank(path) <= newest_rank), key=_rank)
        # Without its manifest it is one whose removal was cut short.
        whole = [path for path in ranked if path not in self._damaged and (path / durable.MANIFEST).exists()]
        kept = {path.name for path in whole[-keep:]} | ({best["checkpoint"]} if best else set())
        for path in ranked:
            if path.name not in kept:
                durable.remove_tree(path)


def read(folder: Path) -> Checkpoint:
    """
    Raises:
        CorruptFile: it does not verify, or is not what its name says.
    """
    facts = durable.verify(folder)
    step, slice_number = facts.get("step"), facts.get("slice_number")
    if _rank(folder) != (slice_number, step):
        raise CorruptFile(f"{folder} is damaged: its manifest speaks of step {step} of slice {slice_number}.")
    return Checkpoint(folder, _rank(folder)[0], _rank(folder)[1], facts)


def _candidates(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []


def _rank(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    assert match, path
    return int(match[2]), int(match[1])


def _remove_quietly(staged: Path) -> None:
    """The error that is under way matters more than one met while tidying up; `clean` comes later."""
    try:
        if staged.exists():
            durable.remove_tree(staged)
    except (OSError, StorageFailed):
        return

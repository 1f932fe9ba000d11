"""A cache of published directories, each built by one of the processes that want it while the others wait.

The turn to build is a kernel lock on an empty file, so a killed builder loses it at once. What it leaves behind has
its process in the name, and is removed by the next builder when that process is gone.
"""

import errno
import fcntl
import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from hotlap import clock, durable
from hotlap.errors import CorruptFile, storage_errors

_STAGING = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)-(?P<birth>\w+)\.staging")

# What a volume answers that has no locks. Builders then work side by side, and the first to publish wins.
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF}


def facts_if_whole(folder: Path) -> dict[str, Any] | None:
    """The facts of a published directory, or None if a file is missing or has another length. Reads no contents."""
    try:
        manifest = durable.read_manifest(folder)
    except CorruptFile:
        return None
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            return None
    return manifest["facts"]


def drop_if_damaged(folder: Path, say: Callable[[str], None]) -> bool:
    """Read a published directory through and remove it if a byte is not what was written. Whether it is gone."""
    if not folder.exists():
        return True
    try:
        durable.verify(folder)
    except CorruptFile as error:
        say(f"{error} It is made anew.")
        durable.remove_tree(folder)
        return True
    return False


def build_once(final: Path, build: Callable[[Path], dict[str, Any]], say: Callable[[str], None]) -> None:
    """Publish `final` with what `build` writes (and syncs) into a new directory, unless it is whole by then.

    `build` returns the manifest's facts. If it raises, nothing is left.
    """
    durable.make_dirs(final.parent)
    with _turn(final, say) as is_exclusive:
        if facts_if_whole(final) is not None:
            return
        if is_exclusive:
            _remove_leftovers(final)
        if final.exists():
            say(f"{final} is damaged and is built anew.")
            durable.remove_tree(final)
        staged = final.with_name(f".{final.name}.{os.getpid()}-{_birth(os.getpid())}.staging")
        with storage_errors(staged):
            durable.disk.make_dir(staged)
        try:
            durable.publish(staged, final, build(staged))
        except FileExistsError:
            durable.remove_tree(staged)
        except BaseException:
            durable.remove_tree(staged)
            raise


@contextmanager
def _turn(final: Path, say: Callable[[str], None] | None = None) -> Generator[bool]:
    """Yields whether this process alone may build `final`. Given `say`, it waits until it may."""
    path = final.with_name(f".{final.name}.lock")
    with storage_errors(path), suppress(FileExistsError):
        durable.disk.create(path, b"")
    with path.open("rb") as file:
        yield _locks(file, say)


def _locks(file: IO[bytes], say: Callable[[str], None] | None) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if say is None:
            return False
        say("Another process is preparing the same data; waiting for it.")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _remove_leftovers(final: Path) -> None:
    """Remove what killed builders left. One that cannot be seen from here still holds its turn if it lives."""
    for path in sorted(final.parent.glob(".*.staging")):
        match = _STAGING.fullmatch(path.name)
        if match is None or _lives(int(match["pid"]), match["birth"]):
            continue
        if match["name"] == final.name:
            durable.remove_tree(path)
            continue
        with _turn(final.with_name(match["name"])) as is_free:
            if is_free and path.exists():
                durable.remove_tree(path)


def _lives(pid: int, birth: str) -> bool:
    try:
        return _birth(pid) == birth
    except ProcessLookupError:
        return False


def _birth(pid: int) -> str:
    """`clock.process_birth`, fit for a file's name."""
    return re.sub(r"\W", "_", clock.process_birth(pid))

"""A file that the user named, written whole: its folder is made, and what is no file is left alone."""

from pathlib import Path

from hotlap import durable
from hotlap.errors import UsageError


def require_a_file(path: Path) -> None:
    """
    Raises:
        UsageError: there is something else of that name. A rename over a device, which an administrator may do, would
            take it from every process.
    """
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is there, and is no file. Name a file that may be written.")


def write(path: Path, data: bytes) -> None:
    """
    Raises:
        UsageError: as `require_a_file`.
        StorageFailed: it cannot be written.
    """
    require_a_file(path)
    target = path.resolve()  # behind a link
    durable.make_dirs(target.parent)
    durable.replace(target, data)

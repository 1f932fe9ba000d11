"""The processes of this machine, for tests that look for what must not run any more."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hotlap.cloud import boot


def command_lines() -> Iterator[tuple[int, list[str]]]:
    """Each process with the words of its command; one that ends meanwhile is left out."""
    for pid in boot.process_ids():
        with contextlib.suppress(OSError):
            yield pid, Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")

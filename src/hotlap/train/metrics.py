"""A run's metrics: one row per step and per evaluation, written at once. Rows that a full disk refuses wait in
memory for the next row or the next publish, so that a full disk costs no step."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotlap import durable
from hotlap.errors import DiskFull


class MetricsLog:
    """Used by two threads: training appends, the publisher makes durable."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._turn = threading.Lock()
        self._written_bytes = 0
        self._waiting: list[dict[str, Any]] = []

    def begin_at(self, num_bytes: int) -> None:
        """Take the log back to where a checkpoint saw it.

        Raises:
            CorruptFile: it is shorter than that.
        """
        durable.cut_to(self._path, num_bytes)
        self._written_bytes = num_bytes

    def begin_at_end(self) -> int:
        """Go on after the last whole row. Returns its end."""
        self._written_bytes = durable.end_of_last_row(self._path) if self._path.exists() else 0
        return self._written_bytes

    def append(self, row: dict[str, Any]) -> int:
        """Returns the row's bytes, which are in the log from now on, or will be before the next checkpoint is."""
        with self._turn:
            was_full = bool(self._waiting)
            self._waiting.append(row)
            try:
                self._write()
            except DiskFull as error:
                if not was_full:
                    self._say(f"{error} Training goes on; its metrics wait in memory.")
        return len(f"{durable.canonical_json(row)}\n".encode())

    def make_durable(self) -> None:
        """
        Raises:
            DiskFull: rows still wait.
        """
        with self._turn:
            self._write()
        if self._path.exists():
            durable.sync_file(self._path)

    def _write(self) -> None:
        if not self._waiting:
            return
        # A full disk may have taken a part of them, whole rows included.
        durable.cut_to(self._path, self._written_bytes)
        self._written_bytes += durable.append_rows(self._path, self._waiting)
        self._waiting.clear()

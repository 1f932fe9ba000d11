"""Examples of a data set, in order, read as they are asked for; what is no example is yielded as a bad row.

`places` finds the files and what they are, `records` and `tables` read their rows, `forms` makes examples of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hotlap.config_data import DataConfig, MixConfig
from hotlap.data.examples import BadRow, Example, Message, NoExample
from hotlap.data.forms import Reader
from hotlap.data.places import DataFile, files_of
from hotlap.data.records import MAX_LINE_BYTES
from hotlap.errors import BadData

__all__ = ["MAX_LINE_BYTES", "BadRow", "Example", "Message", "Source", "read_examples"]


@dataclass(frozen=True)
class Source:
    """A data set as it is to be read: a file or folder, and the settings that decide what examples it has."""

    place: Path
    settings: DataConfig = field(default_factory=DataConfig)
    mix: MixConfig | None = None

    @property
    def weight(self) -> float:
        return self.mix.weight if self.mix else self.settings.weight

    @cached_property
    def files(self) -> list[DataFile]:
        """
        Raises:
            MissingArtifact, BadData: as `files_of`.
        """
        return files_of(self.place, self.mix.files if self.mix else self.settings.files)

    @property
    def reading(self) -> dict[str, Any]:
        """The settings' share in a fingerprint."""
        settings, form = self.settings, self.mix.format if self.mix else self.settings.format
        return {
            "format": form,
            "columns": settings.columns and settings.columns.model_dump() if self.mix is None else None,
            "clean": [item.model_dump() for item in settings.clean],
            "system": settings.system,
        }

    def rows(self) -> Iterator[Example | BadRow]:
        """
        Raises:
            BadData: a file cannot be read as what it is, or there is no row.
            MissingArtifact: there is no such file.
        """
        settings = self.settings
        columns = settings.columns if self.mix is None else None
        reader = Reader(self.reading["format"], columns, settings.system, settings.clean)
        is_empty = True
        for file in self.files:
            for row in file.container.rows(file.path):
                is_empty = False
                if isinstance(row, BadRow):
                    yield BadRow(row.line, row.kind, row.reason, str(file.path), row.unit)
                    continue
                try:
                    yield reader.example(row.value, row.line, str(file.path), row.unit)
                except NoExample as reason:
                    yield BadRow(row.line, reason.kind, str(reason), str(file.path), row.unit)
        if is_empty:
            self._refuse_empty()

    def _refuse_empty(self) -> None:
        size = sum(file.path.stat().st_size for file in self.files)
        what = "is empty" if size == 0 else f"has no rows ({size:,} bytes)"
        if size and self.files[0].container.words == "JSON lines":
            what = f"has only blank lines ({size:,} bytes)"
        raise BadData(f"{self.place} {what}: there is nothing to train on. Write one JSON object a line.")


def read_examples(path: Path) -> Iterator[Example]:
    """The examples of a file, which may have no bad row.

    Raises:
        BadData: a row is no example, or there is none; names the file, the line and the reason.
        MissingArtifact: there is no such file.
    """
    for row in Source(path).rows():
        if isinstance(row, BadRow):
            raise BadData(f"{row.place}: {row.reason}")
        yield row

"""What is in no row, counted by reason and listed by place."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from hotlap.data.examples import BadRow, place_of

LISTED_LINES = 20

TOO_LONG = "too long"
NO_ANSWER = "no answer"


@dataclass(frozen=True)
class LeftOut:
    """Rows of one source that were left out for one reason. `reason` is the first one's, in sentences; `lines` are the
    first few line numbers; a file beside the rows lists all."""

    kind: str
    reason: str
    source: str
    unit: str
    count: int
    lines: tuple[int, ...]
    fewest_tokens: int = 0

    @property
    def where(self) -> str:
        more = ", ..." if self.count > len(self.lines) else ""
        return f"{self.unit}{'s' if self.count > 1 else ''} {', '.join(map(str, self.lines))}{more}"

    @property
    def first_place(self) -> str:
        return place_of(self.source, self.lines[0], self.unit)

    @property
    def is_bad(self) -> bool:
        """Whether the row is no example, which is for `data.bad_rows` to decide."""
        return self.kind not in (TOO_LONG, NO_ANSWER)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.source, self.unit

    def plus(self, other: "LeftOut") -> "LeftOut":
        fewest = min((tokens for tokens in (self.fewest_tokens, other.fewest_tokens) if tokens), default=0)
        lines = (self.lines + other.lines)[:LISTED_LINES]
        return replace(self, count=self.count + other.count, lines=lines, fewest_tokens=fewest)


class Tally:
    """Counts what is left out, in memory that does not grow with it."""

    def __init__(self, begin_with: Iterable[LeftOut] = ()) -> None:
        self._found: dict[tuple[str, str, str], LeftOut] = {}
        for entry in begin_with:
            self.add(entry)

    def add(self, entry: LeftOut) -> None:
        before = self._found.get(entry.key)
        self._found[entry.key] = before.plus(entry) if before else entry

    def add_bad(self, row: BadRow) -> None:
        self.add(of_bad_row(row))

    @property
    def entries(self) -> tuple[LeftOut, ...]:
        """The most frequent first."""
        return tuple(sorted(self._found.values(), key=lambda entry: -entry.count))


def of_bad_row(row: BadRow) -> LeftOut:
    return LeftOut(re.sub(r"\[\d+\]", "[n]", row.kind), row.reason, row.source, row.unit, 1, (row.line,))


def left_out_from_json(entries: list[dict[str, Any]]) -> tuple[LeftOut, ...]:
    return tuple(replace(LeftOut(**entry), lines=tuple(entry["lines"])) for entry in entries)


def table(entries: Iterable[LeftOut]) -> str:
    """A sentence a reason: how many, the first place, and what is wrong there."""
    return " ".join(f"{entry.count:,} x {entry.kind}, first {entry.first_place}: {entry.reason}" for entry in entries)

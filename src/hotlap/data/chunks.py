"""A chunk of a tokenized set: pieces in memory until they are written, and what is known of them."""

# E pieces of a chunk

from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hotlap import durable
from hotlap.data.examples import BadRow, Example
from hotlap.data.left_out import NO_ANSWER, LeftOut, Tally, left_out_from_json, of_bad_row
from hotlap.data.placeholders import placeholder_in
from hotlap.data.render import Rendered

TOKENS = "tokens.bin"
IS_TRAINED = "is_trained.bin"
INDEX = "index.bin"
LEFT_OUT = "left_out.jsonl"

INDEX_DTYPE = np.dtype(
    [
        ("num_tokens", "<i4"),
        ("num_trained", "<i4"),
        ("first_trained", "<i4"),
        ("row", "<i8"),
        ("line", "<i8"),
        ("file", "<u2"),
    ]
)
"""A piece: its tokens, how many are trained and which is the first, its example's number in the source, and where
that begins."""

_CHUNK_TOKENS = 1 << 20
_CHUNK_PIECES = 1 << 14

Batch = list[Example | BadRow]
Outcomes = list[list[Rendered] | BadRow]
"""The pieces of each example of a batch, or why it has none."""


@dataclass(frozen=True)
class TokenizedFacts:
    num_read: int
    num_pieces: int
    num_tokens: int
    num_rewritten: int
    """Conversations that became several pieces, because the chat template rewrites their earlier answers."""

    forms: dict[str, int]
    files: tuple[str, ...]
    unit: str
    left_out: tuple[LeftOut, ...]
    pad_token_id: int
    num_with_placeholder: int = 0
    placeholder: str | None = None
    """The first one that an example's text holds, such as `{{name}}`."""

    def plus(self, other: "TokenizedFacts") -> "TokenizedFacts":
        return replace(
            self,
            num_read=self.num_read + other.num_read,
            num_pieces=self.num_pieces + other.num_pieces,
            num_tokens=self.num_tokens + other.num_tokens,
            num_rewritten=self.num_rewritten + other.num_rewritten,
            forms=dict(Counter(self.forms) + Counter(other.forms)),
            left_out=Tally((*self.left_out, *other.left_out)).entries,
            num_with_placeholder=self.num_with_placeholder + other.num_with_placeholder,
            placeholder=self.placeholder or other.placeholder,
        )


def facts_from_json(written: dict[str, Any]) -> TokenizedFacts:
    facts: dict[str, Any] = {
        **written,
        "files": tuple(written["files"]),
        "left_out": left_out_from_json(written["left_out"]),
    }
    return TokenizedFacts(**facts)


class Chunk:
    """Pieces in memory until they are written."""

    def __init__(self, files: tuple[str, ...], first_row: int) -> None:
        self._file_numbers = {name: number for number, name in enumerate(files)}
        self._next_row = first_row
        self._pieces: list[Rendered] = []
        self._index: list[tuple[int, ...]] = []
        self._tally = Tally()
        self._listed: list[dict[str, Any]] = []
        self._forms: Counter[str] = Counter()
        self._files = files
        self._first_row = first_row
        self._num_tokens = self._num_rewritten = self._num_with_placeholder = 0
        self._placeholder: str | None = None

    @property
    def is_full(self) -> bool:
        return self._num_tokens >= _CHUNK_TOKENS or len(self._pieces) >= _CHUNK_PIECES

    @property
    def facts(self) -> TokenizedFacts:
        return TokenizedFacts(
            num_read=self._next_row - self._first_row,
            num_pieces=len(self._pieces),
            num_tokens=self._num_tokens,
            num_rewritten=self._num_rewritten,
            forms=dict(self._forms),
            files=self._files,
            unit="",
            left_out=self._tally.entries,
            pad_token_id=0,
            num_with_placeholder=self._num_with_placeholder,
            placeholder=self._placeholder,
        )

    def add(self, batch: Batch, outcomes: Outcomes) -> BadRow | None:
        """Take the batch's examples as they were rendered. Returns its first bad row."""
        rendered = iter(outcomes)
        first_bad: BadRow | None = None
        for row in batch:
            outcome = row if isinstance(row, BadRow) else next(rendered)
            if isinstance(row, Example):
                self._forms[row.form] += 1
            if isinstance(outcome, BadRow):
                first_bad = first_bad or outcome
                self._leave_out(of_bad_row(outcome))
            elif isinstance(row, Example):
                self._add_pieces(row, outcome)
            self._next_row += 1
        return first_bad

    def _add_pieces(self, example: Example, pieces: list[Rendered]) -> None:
        kept = [piece for piece in pieces if piece.is_trainable]
        if not kept:
            num_tokens = sum(len(piece.tokens_L) for piece in pieces)
            reason = "It has no assistant's message that is to be trained."
            entry = LeftOut(NO_ANSWER, reason, example.source, example.unit, 1, (example.line,), num_tokens)
            self._leave_out(entry)
        self._num_rewritten += len(kept) > 1
        if kept and (placeholder := placeholder_in(example)) is not None:
            self._num_with_placeholder += 1
            self._placeholder = self._placeholder or placeholder
        for piece in kept:
            first = int(np.argmax(piece.is_trained_L))
            num_tokens, num_trained = len(piece.tokens_L), int(np.count_nonzero(piece.is_trained_L))
            file = self._file_numbers[example.source]
            self._index.append((num_tokens, num_trained, first, self._next_row, example.line, file))
            self._pieces.append(piece)
            self._num_tokens += num_tokens

    def _leave_out(self, entry: LeftOut) -> None:
        self._tally.add(entry)
        row = {"source": entry.source, entry.unit: entry.lines[0], "kind": entry.kind, "reason": entry.reason}
        self._listed.append(row)

    def write(self, staged: Path) -> dict[str, Any]:
        tokens = [piece.tokens_L for piece in self._pieces] or [np.empty(0, dtype=np.int32)]
        is_trained = [piece.is_trained_L for piece in self._pieces] or [np.empty(0, dtype=np.bool_)]
        durable.write_synced(staged / TOKENS, np.concatenate(tokens).astype("<i4").tobytes())
        durable.write_synced(staged / IS_TRAINED, np.concatenate(is_trained).tobytes())
        durable.write_synced(staged / INDEX, np.array(self._index, dtype=INDEX_DTYPE).tobytes())
        listed = "".join(durable.canonical_json(row) + "\n" for row in self._listed)
        durable.write_synced(staged / LEFT_OUT, listed.encode())
        return asdict(self.facts)

"""Writing packed rows: examples in, fixed-length lines of tokens out, in memory that does not grow with the data.

Next-fit in the order given: an example goes behind the one before it or, if it does not fit there, into a new row. No
example is split; one longer than a row is dropped, counted and listed.
"""

# N rows, T positions in a row, L tokens of an example, B rows of a block in memory

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotlap import clock, durable
from hotlap.data.readers import Example
from hotlap.data.render import Rendered, Renderer
from hotlap.errors import storage_errors

TOKENS = "tokens.bin"
SEGMENTS = "segments.bin"
IS_TRAINED = "is_trained.bin"
NUM_TRAINED = "num_trained.bin"
DTYPES = {TOKENS: "<i4", SEGMENTS: "<u2", IS_TRAINED: "|b1", NUM_TRAINED: "<i8"}
_DROPPED = "dropped.jsonl"

_BATCH_EXAMPLES = 1000
_BATCH_CHARACTERS = 1 << 20
_BLOCK_TOKENS = 1 << 19
_LISTED_LINES = 20
_MOST_SEGMENTS = np.iinfo(np.uint16).max
_PROGRESS_EVERY_S = 1.0


@dataclass(frozen=True)
class Dropped:
    """Examples that are in no row. `lines` are the first few line numbers; `dropped.jsonl` beside the rows has all."""

    count: int
    fewest_tokens: int
    lines: tuple[int, ...]

    @property
    def where(self) -> str:
        more = ", ..." if self.count > len(self.lines) else ""
        return f"line{'s' if self.count > 1 else ''} {', '.join(map(str, self.lines))}{more}"


@dataclass(frozen=True)
class Facts:
    """What there is to say about packed rows without reading them."""

    seq_len: int
    num_rows: int
    num_read: int
    num_examples: int
    num_tokens: int
    num_trained_tokens: int
    longest_tokens: int
    """Tokens of the longest example that is in a row."""

    largest_token_id: int
    """Padding included: a model with no more embedding rows than this cannot be trained on these."""

    too_long: Dropped
    no_answer: Dropped

    @property
    def fill(self) -> float:
        """Share of the positions that hold a token."""
        return self.num_tokens / max(1, self.num_rows * self.seq_len)

    def in_words(self) -> list[str]:
        """A sentence on what is trained, and one on each reason for which something is not."""
        sentences = [
            f"{self.num_examples:,} of {self.num_read:,} examples in {self.num_rows:,} rows of {self.seq_len:,} tokens "
            f"({self.fill:.0%} filled); {self.num_trained_tokens:,} of {self.num_tokens:,} tokens are trained."
        ]
        if self.too_long.count:
            sentences.append(
                f"Dropped {self.too_long.count:,} of {self.num_read:,} examples for being longer than data.seq_len, "
                f"{self.seq_len:,} tokens ({self.too_long.where})."
            )
        if self.no_answer.count:
            sentences.append(
                f"Dropped {self.no_answer.count:,} of {self.num_read:,} examples for having no assistant's message "
                f"({self.no_answer.where})."
            )
        return sentences


def facts_from_json(written: dict[str, Any]) -> Facts:
    """The facts that `dataclasses.asdict` and JSON made of `Facts`."""
    facts = dict(written)
    for reason in ("too_long", "no_answer"):
        entry = written[reason]
        facts[reason] = Dropped(entry["count"], entry["fewest_tokens"], tuple(entry["lines"]))
    return Facts(**facts)


def write_rows(
    folder: Path, examples: Iterable[Example], renderer: Renderer, seq_len: int, say: Callable[[str], None]
) -> Facts:
    """Render and pack the examples into new files in `folder`, synced. `say` gets progress once a second.

    Raises:
        BadData: an example cannot be rendered.
    """
    rows = _Rows(folder, seq_len, renderer.pad_token_id)
    drops = _Drops(folder / _DROPPED)
    num_read = 0
    said_at_s = clock.monotonic_s()
    for batch in _batches(examples):
        for example, rendered in zip(batch, renderer.render(batch), strict=True):
            if not rendered.is_trainable:
                drops.add("no_answer", example, rendered)
            elif len(rendered.tokens_L) > seq_len:
                drops.add("too_long", example, rendered)
            else:
                rows.add(rendered)
        drops.write()
        num_read += len(batch)
        if clock.monotonic_s() - said_at_s >= _PROGRESS_EVERY_S:
            said_at_s = clock.monotonic_s()
            say(f"Packed {num_read:,} examples so far.")
    rows.close()
    drops.close()
    return Facts(
        seq_len=seq_len,
        num_rows=rows.num_rows,
        num_read=num_read,
        num_examples=rows.num_examples,
        num_tokens=rows.num_tokens,
        num_trained_tokens=rows.num_trained_tokens,
        longest_tokens=rows.longest_tokens,
        largest_token_id=rows.largest_token_id,
        too_long=drops.of("too_long"),
        no_answer=drops.of("no_answer"),
    )


def _batches(examples: Iterable[Example]) -> Iterator[list[Example]]:
    """Enough examples to keep the tokenizer's threads busy, and no more characters than memory is meant to hold."""
    batch: list[Example] = []
    num_characters = 0
    for example in examples:
        batch.append(example)
        num_characters += sum(len(message.content) for message in example.messages)
        if len(batch) == _BATCH_EXAMPLES or num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


class _Rows:
    """A block of rows in memory that is filled, appended to the files and cleared."""

    def __init__(self, folder: Path, seq_len: int, pad_token_id: int) -> None:
        self._folder = folder
        self._seq_len = seq_len
        self._pad_token_id = pad_token_id
        num_block_rows = max(1, _BLOCK_TOKENS // seq_len)
        self._tokens_BT = np.empty((num_block_rows, seq_len), dtype=DTYPES[TOKENS])
        self._segments_BT = np.empty((num_block_rows, seq_len), dtype=DTYPES[SEGMENTS])
        self._is_trained_BT = np.empty((num_block_rows, seq_len), dtype=DTYPES[IS_TRAINED])
        self.num_rows = self.num_examples = self.num_tokens = self.num_trained_tokens = 0
        self.longest_tokens = self.largest_token_id = 0
        for name in DTYPES:
            _create(folder / name)
        self._clear()

    def add(self, rendered: Rendered) -> None:
        length = len(rendered.tokens_L)
        assert 0 < length <= self._seq_len, length
        if self._used + length > self._seq_len or self._segment == _MOST_SEGMENTS:
            self._next_row()
        here = (self._row, slice(self._used, self._used + length))
        self._segment += 1
        self._tokens_BT[here] = rendered.tokens_L
        self._segments_BT[here] = self._segment
        self._is_trained_BT[here] = rendered.is_trained_L
        self._used += length
        self.num_examples += 1
        self.num_tokens += length
        self.longest_tokens = max(self.longest_tokens, length)

    def close(self) -> None:
        """Write what is left, the last row however empty it is, and sync."""
        if self._used:
            self._next_row()
        self._write()
        for name in DTYPES:
            durable.sync_file(self._folder / name)

    def _next_row(self) -> None:
        self._row += 1
        self._used = self._segment = 0
        if self._row == len(self._tokens_BT):
            self._write()

    def _write(self) -> None:
        num_trained_B = self._is_trained_BT[: self._row].sum(axis=1, dtype=DTYPES[NUM_TRAINED])
        blocks = {
            TOKENS: self._tokens_BT[: self._row],
            SEGMENTS: self._segments_BT[: self._row],
            IS_TRAINED: self._is_trained_BT[: self._row],
            NUM_TRAINED: num_trained_B,
        }
        for name, block in blocks.items():
            _append(self._folder / name, block.tobytes())
        self.num_rows += self._row
        self.num_trained_tokens += int(num_trained_B.sum())
        self.largest_token_id = max(self.largest_token_id, int(self._tokens_BT[: self._row].max(initial=0)))
        self._clear()

    def _clear(self) -> None:
        self._tokens_BT.fill(self._pad_token_id)
        self._segments_BT.fill(0)
        self._is_trained_BT.fill(False)
        self._row = self._used = self._segment = 0


class _Drops:
    """Counts what is dropped, keeps a few line numbers in memory and writes all of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._dropped: dict[str, Dropped] = {}
        self._unwritten: list[str] = []
        _create(path)

    def add(self, reason: str, example: Example, rendered: Rendered) -> None:
        num_tokens = len(rendered.tokens_L)
        before = self.of(reason)
        self._dropped[reason] = Dropped(
            before.count + 1,
            min(before.fewest_tokens or num_tokens, num_tokens),
            (*before.lines, example.line)[:_LISTED_LINES],
        )
        row = {"line": example.line, "reason": reason, "tokens": num_tokens}
        self._unwritten.append(durable.canonical_json(row) + "\n")

    def of(self, reason: str) -> Dropped:
        return self._dropped.get(reason, Dropped(0, 0, ()))

    def write(self) -> None:
        if self._unwritten:
            _append(self._path, "".join(self._unwritten).encode())
            self._unwritten.clear()

    def close(self) -> None:
        self.write()
        durable.sync_file(self._path)


def _create(path: Path) -> None:
    with storage_errors(path):
        durable.disk.create(path, b"")


def _append(path: Path, data: bytes) -> None:
    with storage_errors(path):
        durable.disk.append(path, data)

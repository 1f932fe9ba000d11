"""Packed rows on disk: fixed-length lines of tokens, written in memory that does not grow with the data.

`next-fit` puts a piece behind the one before it or, if it does not fit there, into a new row. `best-fit` looks among
the rows in memory for the one it fills best. `none` gives each piece a row of its own. No piece is split.
"""

# N rows, T positions in a row, L tokens of a piece, B rows of a block in memory

import bisect
import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotlap import durable
from hotlap.config_data import PackingConfig
from hotlap.data.render import Rendered
from hotlap.errors import storage_errors

TOKENS = "tokens.bin"
SEGMENTS = "segments.bin"
IS_TRAINED = "is_trained.bin"
NUM_TRAINED = "num_trained.bin"
DIGESTS = "digests.bin"
DTYPES = {TOKENS: "<i4", SEGMENTS: "<u2", IS_TRAINED: "|b1", NUM_TRAINED: "<i8", DIGESTS: "<u8"}
"""Of every row; `DIGESTS` of every example, in the order in which they came: equal tokens, equal digest."""

_BLOCK_TOKENS = 1 << 19
_MOST_SEGMENTS = np.iinfo(np.uint16).max
_HISTOGRAM_BINS = 16


@dataclass(frozen=True)
class RowFacts:
    num_rows: int
    num_examples: int
    num_tokens: int
    num_trained_tokens: int
    longest_tokens: int
    largest_token_id: int
    num_cut: int
    num_cut_trained_tokens: int
    histogram: tuple[int, ...]


def write_rows(
    folder: Path, pieces: Iterable[Rendered], seq_len: int, pad_token_id: int, method: str = PackingConfig().method
) -> RowFacts:
    """Pack the pieces into new files in `folder`, synced. One that is longer than a row is cut to it."""
    rows = _Rows(folder, seq_len, pad_token_id, method)
    for piece in pieces:
        rows.add(piece)
    return rows.close()


def histogram_edges(seq_len: int) -> list[int]:
    """The longest piece, in tokens, that each bin of the histogram counts."""
    return [-(-seq_len * (number + 1) // _HISTOGRAM_BINS) for number in range(_HISTOGRAM_BINS)]


class _Rows:
    """A block of rows in memory that is filled, appended to the files and cleared."""

    def __init__(self, folder: Path, seq_len: int, pad_token_id: int, method: str) -> None:
        self._folder = folder
        self._seq_len = seq_len
        self._pad_token_id = pad_token_id
        self._method = method
        num_block_rows = max(1, _BLOCK_TOKENS // seq_len)
        self._tokens_BT = np.empty((num_block_rows, seq_len), dtype=DTYPES[TOKENS])
        self._segments_BT = np.empty((num_block_rows, seq_len), dtype=DTYPES[SEGMENTS])
        self._is_trained_BT = np.empty((num_block_rows, seq_len), dtype=DTYPES[IS_TRAINED])
        self._counts: Counter[str] = Counter()
        self._longest_tokens = self._largest_token_id = 0
        self._edges = histogram_edges(seq_len)
        self._histogram = [0] * len(self._edges)
        for name in DTYPES:
            with storage_errors(folder / name):
                durable.disk.create(folder / name, b"")
        self._clear()

    def add(self, piece: Rendered) -> None:
        length = len(piece.tokens_L)
        assert length > 0
        if length > self._seq_len:
            self._counts["cut"] += 1
            self._counts["cut_trained"] += int(np.count_nonzero(piece.is_trained_L[self._seq_len :]))
            length = self._seq_len
        row = self._row_for(length)
        here = (row, slice(self._used[row], self._used[row] + length))
        self._segments[row] += 1
        self._tokens_BT[here] = piece.tokens_L[:length]
        self._segments_BT[here] = self._segments[row]
        self._is_trained_BT[here] = piece.is_trained_L[:length]
        self._used[row] += length
        self._counts["examples"] += 1
        self._counts["tokens"] += length
        self._longest_tokens = max(self._longest_tokens, length)
        self._histogram[bisect.bisect_left(self._edges, length)] += 1
        self._digests.append(hashlib.blake2b(piece.tokens_L[:length].tobytes(), digest_size=8).digest())
        self._leave_open(row)

    def close(self) -> RowFacts:
        """Write what is left, the last row however empty it is, and sync."""
        self._write()
        for name in DTYPES:
            durable.sync_file(self._folder / name)
        return RowFacts(
            num_rows=self._counts["rows"],
            num_examples=self._counts["examples"],
            num_tokens=self._counts["tokens"],
            num_trained_tokens=self._counts["trained"],
            longest_tokens=self._longest_tokens,
            largest_token_id=self._largest_token_id,
            num_cut=self._counts["cut"],
            num_cut_trained_tokens=self._counts["cut_trained"],
            histogram=tuple(self._histogram),
        )

    def _row_for(self, length: int) -> int:
        """An open row with room, taken out of the open ones, or a new one."""
        at = bisect.bisect_left(self._open, (length, -1))
        if at < len(self._open):
            return self._open.pop(at)[1]
        if self._method == "next-fit":
            self._open.clear()
        if len(self._used) == len(self._tokens_BT):
            self._write()
        self._used.append(0)
        self._segments.append(0)
        return len(self._used) - 1

    def _leave_open(self, row: int) -> None:
        room = self._seq_len - self._used[row]
        if self._method != "none" and room and self._segments[row] < _MOST_SEGMENTS:
            bisect.insort(self._open, (room, row))

    def _write(self) -> None:
        num_B = len(self._used)
        num_trained_B = self._is_trained_BT[:num_B].sum(axis=1, dtype=DTYPES[NUM_TRAINED])
        blocks = {
            TOKENS: self._tokens_BT[:num_B],
            SEGMENTS: self._segments_BT[:num_B],
            IS_TRAINED: self._is_trained_BT[:num_B],
            NUM_TRAINED: num_trained_B,
        }
        written = {name: block.tobytes() for name, block in blocks.items()} | {DIGESTS: b"".join(self._digests)}
        for name, data in written.items():
            with storage_errors(self._folder / name):
                durable.disk.append(self._folder / name, data)
        self._counts["rows"] += num_B
        self._counts["trained"] += int(num_trained_B.sum())
        self._largest_token_id = max(self._largest_token_id, int(self._tokens_BT[:num_B].max(initial=0)))
        self._clear()

    def _clear(self) -> None:
        self._tokens_BT.fill(self._pad_token_id)
        self._segments_BT.fill(0)
        self._is_trained_BT.fill(False)
        self._used: list[int] = []
        self._segments: list[int] = []
        self._open: list[tuple[int, int]] = []
        self._digests: list[bytes] = []

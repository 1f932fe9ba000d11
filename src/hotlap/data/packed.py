"""Packed token rows: built once, cached under their fingerprint, and memory-mapped.

A row holds whole examples one after another and is filled up with padding. Opening needs the fingerprint alone, and
takes the same time however many rows there are.
"""

# N rows, T positions in a row, M examples in rows

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotlap.config import hotlap_home
from hotlap.data.cache import facts_if_whole
from hotlap.data.facts import Facts, facts_from_json
from hotlap.data.order import Order, permutation, plan_order
from hotlap.data.rows import DIGESTS, DTYPES, IS_TRAINED, NUM_TRAINED, SEGMENTS, TOKENS

__all__ = ["Order", "PackedDataset", "Packing", "folder_of", "open_packed", "permutation", "plan_order"]


_BLOCK = 1 << 16


@dataclass(frozen=True, eq=False)
class PackedDataset:
    """Rows on disk, memory-mapped and read-only."""

    fingerprint: str
    facts: Facts
    tokens_NT: npt.NDArray[np.int32]
    segments_NT: npt.NDArray[np.uint16]
    """Which example of its row a position belongs to, from 1; 0 is padding."""

    is_trained_NT: npt.NDArray[np.bool_]
    _num_trained_N: npt.NDArray[np.int64]
    digests_M: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    """Equal for examples of equal tokens."""

    @property
    def num_rows(self) -> int:
        return self.facts.num_rows

    @property
    def seq_len(self) -> int:
        return self.facts.seq_len

    @property
    def num_examples(self) -> int:
        return self.facts.num_examples

    @property
    def num_trained_tokens(self) -> int:
        return self.facts.num_trained_tokens

    def trained_tokens_per_row(self) -> npt.NDArray[np.int64]:
        """Trained tokens in each of the N rows, counted when they were built."""
        return self._num_trained_N

    def examples(self) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]]:
        """Tokens of every packed example, and which of them are trained, row by row."""
        for row in range(self.num_rows):
            segments_T = self.segments_NT[row]
            for segment in range(1, int(segments_T.max()) + 1):
                here_T = segments_T == segment
                yield self.tokens_NT[row][here_T], self.is_trained_NT[row][here_T]


@dataclass(frozen=True)
class Packing:
    train: PackedDataset
    held_out: PackedDataset | None

    @cached_property
    def num_also_trained(self) -> int:
        """Examples that are held out and stand, token for token, among the trained ones as well."""
        if self.held_out is None:
            return 0
        held_out_M = np.array(self.held_out.digests_M)
        is_trained_M = np.zeros(len(held_out_M), dtype=np.bool_)
        for first in range(0, self.train.num_examples, _BLOCK):
            is_trained_M |= np.isin(held_out_M, self.train.digests_M[first : first + _BLOCK])
        return int(np.count_nonzero(is_trained_M))

    def leak_in_words(self) -> str | None:
        """What there is to say of them, if there is one."""
        if self.held_out is None or not self.num_also_trained:
            return None
        return (
            f"{self.num_also_trained:,} of {self.held_out.num_examples:,} held-out examples stand among the trained "
            f"ones as well, token for token, so val_loss is too good by what was learned by heart. "
            f"Remove the duplicates."
        )


def open_packed(fingerprint: str) -> PackedDataset | None:
    """The packed data set from the cache, or None if it is not there whole. Reads neither rows nor sources."""
    folder = folder_of(fingerprint)
    written = facts_if_whole(folder)
    if written is None:
        return None
    facts = facts_from_json(written)
    shape = (facts.num_rows, facts.seq_len)
    return PackedDataset(
        fingerprint,
        facts,
        _mapped(folder / TOKENS, *shape),
        _mapped(folder / SEGMENTS, *shape),
        _mapped(folder / IS_TRAINED, *shape),
        _mapped(folder / NUM_TRAINED, facts.num_rows),
        _mapped(folder / DIGESTS, facts.num_examples),
    )


def _mapped(path: Path, *shape: int) -> npt.NDArray[Any]:
    return np.memmap(path, dtype=DTYPES[path.name], mode="r", shape=shape)


def folder_of(fingerprint: str) -> Path:
    return hotlap_home() / "packed" / fingerprint

"""Which examples are trained, how often, and which are held out: decided from lengths and a seed, without a token.

An example that the template made several pieces of is held out or trained as one; over-long pieces count alone.
"""

# E pieces, some of a source at a time; U examples that can be used, of a source or of all

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from hotlap.config_data import DataConfig, PruneConfig
from hotlap.errors import BadData

# Which streams of the seed's are for what; epochs count from 0 and never get here.
HELD_OUT_STREAM = 2**63
PRUNE_STREAM = 2**63 + 1
_WEIGHT_STREAM = 2**63 + 2


Index = Callable[[], Iterable[npt.NDArray[Any]]]
"""A source's pieces, as `chunks.INDEX_DTYPE` describes them, some at a time. An example's are never apart."""

_BLOCK = 1 << 16
_DIGIT_BITS = 16


@dataclass(frozen=True, eq=False)
class Choice:
    """For each source's examples that can be used, in order: how often it is trained, and whether it is held out."""

    copies: tuple[npt.NDArray[np.uint16], ...]
    is_held_out: tuple[npt.NDArray[np.bool_], ...]
    num_held_out: int
    num_pruned: int
    """Usable examples that `data.prune` leaves out."""

    num_unweighted: int
    """Usable examples that a weight below 1 leaves out."""


def choose(indexes: Sequence[Index], weights: Sequence[float], settings: DataConfig, seed: int, where: str) -> Choice:
    """The choice among the pieces of some sources, in memory of three bytes an example.

    Raises:
        BadData: as many or more examples are to be held out than there are.
    """
    sizes = [sum(len(lengths) for lengths in _lengths(index, settings)) for index in indexes]
    is_held_out_U = _held_out(settings, seed, sum(sizes), where)
    is_trained_U = ~is_held_out_U
    if settings.prune:
        is_trained_U = _pruned(settings.prune, indexes, settings, is_trained_U, seed)
    num_pruned = int(np.count_nonzero(~is_held_out_U)) - int(np.count_nonzero(is_trained_U))
    cuts = np.cumsum(sizes)[:-1]
    trained = np.split(is_trained_U, cuts)
    copies = tuple(
        _copies(mine_U, weight, seed, number)
        for number, (mine_U, weight) in enumerate(zip(trained, weights, strict=True))
    )
    num_unweighted = sum(
        int(np.count_nonzero(mine_U & (copies_U == 0))) for mine_U, copies_U in zip(trained, copies, strict=True)
    )
    num_held_out = int(np.count_nonzero(is_held_out_U))
    return Choice(copies, tuple(np.split(is_held_out_U, cuts)), num_held_out, num_pruned, num_unweighted)


def too_long(index_E: npt.NDArray[Any], settings: DataConfig) -> npt.NDArray[np.bool_]:
    """Pieces that do not fit; where they are cut, only those of which nothing to train would be left."""
    if settings.too_long == "cut":
        return index_E["first_trained"] >= settings.seq_len
    return index_E["num_tokens"] > settings.seq_len


def spread(index: Index, settings: DataConfig, values_U: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """Every piece gets the value of its example, and 0 if it is too long, for as many as `index` gives at a time."""
    num_before = 0
    for index_E in index():
        is_usable_E = ~too_long(index_E, settings)
        is_first = _is_first(index_E["row"][is_usable_E])
        values_E = np.zeros(len(index_E), dtype=values_U.dtype)
        values_E[is_usable_E] = values_U[num_before - 1 + np.cumsum(is_first)]
        num_before += int(np.count_nonzero(is_first))
        yield values_E


def _is_first(rows_E: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    return np.diff(rows_E, prepend=-1) != 0  # pieces come in the order of their examples


def _lengths(index: Index, settings: DataConfig) -> Iterator[npt.NDArray[np.uint64]]:
    """Tokens of the examples that can be used."""
    for index_E in index():
        usable_E = index_E[~too_long(index_E, settings)]
        first = np.flatnonzero(_is_first(usable_E["row"]))
        if len(first):
            yield np.add.reduceat(usable_E["num_tokens"], first, dtype=np.uint64)


def _held_out(settings: DataConfig, seed: int, num_U: int, where: str) -> npt.NDArray[np.bool_]:
    if settings.eval_examples and settings.eval_examples >= num_U:
        raise BadData(
            f"data.eval_examples is {settings.eval_examples:,}, and {where} has {num_U:,} examples that can be used, "
            f"so none would be left to train on. Lower it."
        )
    return _drawn(seed, HELD_OUT_STREAM, num_U, settings.eval_examples)


def _pruned(
    prune: PruneConfig, indexes: Sequence[Index], settings: DataConfig, is_left_U: npt.NDArray[np.bool_], seed: int
) -> npt.NDArray[np.bool_]:
    num_left = int(np.count_nonzero(is_left_U))
    kept_U = np.zeros(len(is_left_U), dtype=np.bool_)

    def lengths() -> Iterator[npt.NDArray[np.uint64]]:
        first = 0
        for index in indexes:
            for lengths_U in _lengths(index, settings):
                yield lengths_U[is_left_U[first : first + len(lengths_U)]]
                first += len(lengths_U)

    match prune.by:
        case "first":
            kept_U[is_left_U] = np.arange(num_left, dtype=np.int32) < prune.keep
        case "shortest":
            kept_U[is_left_U] = smallest(lengths, num_left, prune.keep)
        case "seed":
            kept_U[is_left_U] = _drawn(seed, PRUNE_STREAM, num_left, prune.keep)
    return kept_U


def _copies(is_trained_U: npt.NDArray[np.bool_], weight: float, seed: int, number: int) -> npt.NDArray[np.uint16]:
    """`weight` copies of each example on average: the whole part of all, the rest of those that the seed draws."""
    exact = Fraction(str(weight))
    copies_U = is_trained_U * np.uint16(int(exact))
    if exact != int(exact):
        num_trained = int(np.count_nonzero(is_trained_U))
        num_more = round((exact - int(exact)) * num_trained)
        copies_U[is_trained_U] += _drawn(seed, _WEIGHT_STREAM + number, num_trained, num_more)
    return copies_U


# --- a few of many, in little memory ---


def _drawn(seed: int, stream: int, num_rows: int, num_drawn: int) -> npt.NDArray[np.bool_]:
    """Which rows stand first in `permutation(seed, stream, num_rows)`."""

    def raw() -> Iterator[npt.NDArray[np.uint64]]:
        bits = _bits(seed, stream)
        for first in range(0, num_rows, _BLOCK):
            yield bits.random_raw(min(_BLOCK, num_rows - first))

    return smallest(raw, num_rows, num_drawn)


def smallest(
    blocks: Callable[[], Iterable[npt.NDArray[np.uint64]]], num_values: int, num_wanted: int
) -> npt.NDArray[np.bool_]:
    """Which of the values are the `num_wanted` smallest, of equal ones the first. Holds a block of them at a time."""
    if num_wanted >= num_values:
        return np.ones(num_values, dtype=np.bool_)
    largest, num_equal = _threshold(blocks, num_wanted) if num_wanted else (np.uint64(0), 0)
    is_wanted = np.zeros(num_values, dtype=np.bool_)
    first = 0
    for block in blocks():
        mine = is_wanted[first : first + len(block)]
        mine[:] = block < largest
        equal = np.flatnonzero(block == largest)[:num_equal]
        mine[equal] = True
        num_equal -= len(equal)
        first += len(block)
    return is_wanted


def _threshold(blocks: Callable[[], Iterable[npt.NDArray[np.uint64]]], num_wanted: int) -> tuple[np.uint64, int]:
    """The largest value that is wanted, digit by digit from the left, and how many of that value are."""
    found = np.uint64(0)
    for shift in range(64 - _DIGIT_BITS, -1, -_DIGIT_BITS):
        counts = np.zeros(1 << _DIGIT_BITS, dtype=np.int64)
        for block in blocks():
            digits = block >> np.uint64(shift)
            begins = digits >> np.uint64(_DIGIT_BITS) == found
            counts += np.bincount((digits[begins] & np.uint64(0xFFFF)).astype(np.int64), minlength=len(counts))
        up_to = np.cumsum(counts)
        digit = int(np.searchsorted(up_to, num_wanted))
        num_wanted -= int(up_to[digit] - counts[digit])
        found = found << np.uint64(_DIGIT_BITS) | np.uint64(digit)
    return found, num_wanted


def uses_seed(settings: DataConfig, weights: Sequence[float]) -> bool:
    """Whether the choice depends on the seed."""
    draws_rest = any(weight != int(weight) for weight in weights)
    return bool(settings.eval_examples) or draws_rest or (settings.prune is not None and settings.prune.by == "seed")


@functools.lru_cache(maxsize=4)
def permutation(seed: int, stream: int, num_rows: int) -> npt.NDArray[np.int64]:
    """An order of so many rows, read-only, the same on every machine and in every version of numpy.

    numpy promises that a bit generator's raw stream never changes; it promises no such thing of `shuffle`.
    """
    order_N = np.argsort(_bits(seed, stream).random_raw(num_rows), kind="stable").astype(np.int64)
    order_N.setflags(write=False)
    return order_N


def _bits(seed: int, stream: int) -> np.random.Philox:
    return np.random.Philox(key=np.array([seed, stream], dtype=np.uint64))

"""Which examples are trained, how often, and which are held out: decided from lengths and a seed, without a token.

An example that the template made several pieces of is held out or trained as one; over-long pieces count alone.
"""

# E pieces of a source, U examples of all sources

import functools
from collections.abc import Sequence
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


@dataclass(frozen=True, eq=False)
class Choice:
    """For each source: how often a piece is trained, whether it is held out, and whether it is too long for a row."""

    copies: tuple[npt.NDArray[np.int32], ...]
    is_held_out: tuple[npt.NDArray[np.bool_], ...]
    is_too_long: tuple[npt.NDArray[np.bool_], ...]
    num_held_out: int
    num_pruned: int
    """Usable examples that `data.prune` leaves out."""

    num_unweighted: int
    """Usable examples that a weight below 1 leaves out."""


def choose(
    indexes: Sequence[npt.NDArray[Any]], weights: Sequence[float], settings: DataConfig, seed: int, where: str
) -> Choice:
    """The choice among the pieces that `tokenized.INDEX_DTYPE` describes, source by source.

    Raises:
        BadData: as many or more examples are to be held out than there are.
    """
    is_too_long = tuple(too_long(index, settings) for index in indexes)
    usable = [_units(index, ~bad) for index, bad in zip(indexes, is_too_long, strict=True)]
    held_out, num_pruned, trained = _split(usable, settings, seed, where)
    copies: list[npt.NDArray[np.int32]] = []
    is_held_out: list[npt.NDArray[np.bool_]] = []
    num_unweighted = 0
    for number, (index, bad, weight) in enumerate(zip(indexes, is_too_long, weights, strict=True)):
        rows = index["row"]
        copies_U = _copies(trained[number], weight, seed, number)
        num_unweighted += int(np.count_nonzero(trained[number] & (copies_U == 0)))
        copies_E = _spread(rows, usable[number].rows, copies_U)
        copies_E[bad] = 0
        copies.append(copies_E)
        is_held_out.append(_spread(rows, usable[number].rows, held_out[number]) & ~bad)
    num_held_out = sum(int(part.sum()) for part in held_out)
    return Choice(tuple(copies), tuple(is_held_out), is_too_long, num_held_out, num_pruned, num_unweighted)


def too_long(index: npt.NDArray[Any], settings: DataConfig) -> npt.NDArray[np.bool_]:
    """Pieces that do not fit; where they are cut, only those of which nothing to train would be left."""
    if settings.too_long == "cut":
        return index["first_trained"] >= settings.seq_len
    return index["num_tokens"] > settings.seq_len


@dataclass(frozen=True, eq=False)
class _Units:
    """The examples of a source that can be used: their row numbers, in order, and their tokens."""

    rows: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]


def _units(index: npt.NDArray[Any], is_usable_E: npt.NDArray[np.bool_]) -> _Units:
    rows = index["row"][is_usable_E]
    first = np.flatnonzero(np.diff(rows, prepend=-1))  # pieces come in the order of their examples
    if len(first) == 0:
        return _Units(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    return _Units(rows[first], np.add.reduceat(index["num_tokens"][is_usable_E], first, dtype=np.int64))


def _spread(rows_E: npt.NDArray[Any], rows_U: npt.NDArray[np.int64], values_U: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Every piece gets the value of its example; 0 where that is not used."""
    if len(rows_U) == 0:
        return np.zeros(len(rows_E), dtype=values_U.dtype)
    at = np.minimum(np.searchsorted(rows_U, rows_E), len(rows_U) - 1)
    return np.where(rows_U[at] == rows_E, values_U[at], values_U.dtype.type(0))


def _split(
    usable: Sequence[_Units], settings: DataConfig, seed: int, where: str
) -> tuple[list[npt.NDArray[np.bool_]], int, list[npt.NDArray[np.bool_]]]:
    """Of each source's examples: which are held out, how many are pruned in all, which stay to be trained."""
    sizes = [len(units.rows) for units in usable]
    num_U = sum(sizes)
    if settings.eval_examples and settings.eval_examples >= num_U:
        raise BadData(
            f"data.eval_examples is {settings.eval_examples:,}, and {where} has {num_U:,} examples that can be used, "
            f"so none would be left to train on. Lower it."
        )
    is_held_out_U = np.zeros(num_U, dtype=np.bool_)
    if settings.eval_examples:
        is_held_out_U[permutation(seed, HELD_OUT_STREAM, num_U)[: settings.eval_examples]] = True
    is_trained_U = ~is_held_out_U
    if settings.prune:
        num_tokens_U = np.concatenate([units.num_tokens for units in usable]) if usable else np.empty(0)
        is_trained_U = _pruned(settings.prune, num_tokens_U, is_trained_U, seed)
    num_pruned = int((~is_held_out_U).sum() - is_trained_U.sum())
    cuts = np.cumsum(sizes)[:-1]
    return np.split(is_held_out_U, cuts), num_pruned, np.split(is_trained_U, cuts)


def _pruned(
    prune: PruneConfig, num_tokens_U: npt.NDArray[Any], is_left_U: npt.NDArray[np.bool_], seed: int
) -> npt.NDArray[np.bool_]:
    left = np.flatnonzero(is_left_U)
    match prune.by:
        case "first":
            order = left
        case "shortest":
            order = left[np.argsort(num_tokens_U[left], kind="stable")]
        case "seed":
            order = left[permutation(seed, PRUNE_STREAM, len(left))]
    kept_U = np.zeros(len(is_left_U), dtype=np.bool_)
    kept_U[order[: prune.keep]] = True
    return kept_U


def _copies(is_trained_U: npt.NDArray[np.bool_], weight: float, seed: int, number: int) -> npt.NDArray[np.int32]:
    """`weight` copies of each example on average: the whole part of all, the rest of those that the seed draws."""
    exact = Fraction(str(weight))
    copies_U = is_trained_U * np.int32(int(exact))
    if exact != int(exact):
        trained = np.flatnonzero(is_trained_U)
        num_more = round((exact - int(exact)) * len(trained))
        copies_U[trained[permutation(seed, _WEIGHT_STREAM + number, len(trained))[:num_more]]] += 1
    return copies_U


def uses_seed(settings: DataConfig, weights: Sequence[float]) -> bool:
    """Whether the choice depends on the seed."""
    draws_rest = any(weight != int(weight) for weight in weights)
    return bool(settings.eval_examples) or draws_rest or (settings.prune is not None and settings.prune.by == "seed")


@functools.lru_cache(maxsize=4)
def permutation(seed: int, stream: int, num_rows: int) -> npt.NDArray[np.int64]:
    """An order of so many rows, read-only, the same on every machine and in every version of numpy.

    numpy promises that a bit generator's raw stream never changes; it promises no such thing of `shuffle`.
    """
    raw = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64))
    order_N = np.argsort(raw.random_raw(num_rows), kind="stable").astype(np.int64)
    order_N.setflags(write=False)
    return order_N

"""Packed token rows: built once, cached under their fingerprint, memory-mapped, and read in an exact order.

A row holds whole examples one after another and is filled up with padding. The order in which rows are trained is a
pure function of (seed, step), so a resumed run reads on where it stopped without looking at what lies before.
"""

# N rows, T positions in a row, E examples of a source

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotlap import durable
from hotlap.config import RunConfig, hotlap_home
from hotlap.data.cache import build_once, facts_if_whole
from hotlap.data.readers import Example, count_examples, read_examples
from hotlap.data.render import Renderer
from hotlap.data.rows import DTYPES, IS_TRAINED, NUM_TRAINED, SEGMENTS, TOKENS, Facts, facts_from_json, write_rows
from hotlap.errors import BadData

# Part of every fingerprint: raise it when the same input gives other rows or other files.
_FORMAT = 1

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*",
)

# Which stream of the seed's the held-out examples are drawn from; epochs count from 0 and never get here.
_HELD_OUT_STREAM = 2**63


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


@dataclass(frozen=True)
class Packing:
    train: PackedDataset
    held_out: PackedDataset | None


def open_packed(fingerprint: str) -> PackedDataset | None:
    """The packed data set from the cache, or None if it is not there whole. Reads neither rows nor sources."""
    folder = _folder(fingerprint)
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
    )


def _mapped(path: Path, *shape: int) -> npt.NDArray[Any]:
    return np.memmap(path, dtype=DTYPES[path.name], mode="r", shape=shape)


def _folder(fingerprint: str) -> Path:
    return hotlap_home() / "packed" / fingerprint


# --- preparing ---


def prepare(
    config: RunConfig,
    seed: int,
    source: Path,
    held_out_source: Path | None,
    tokenizer_folder: Path,
    say: Callable[[str], None],
) -> Packing:
    """The run's packed data, from the cache or built now. `seed` draws the `data.eval_examples` to hold out.

    Raises:
        BadData: a line of a source cannot be used, or nothing is left to train on or to evaluate.
        MissingArtifact: a source or the tokenizer is not there.
    """
    assert (held_out_source is not None) == (config.data.eval_dataset is not None), held_out_source
    parts = [_Part("train", source, config.data.eval_examples, seed)]
    if held_out_source is not None:
        parts.append(_Part("held-out", held_out_source))
    elif config.data.eval_examples:
        parts.append(_Part("held-out", source, config.data.eval_examples, seed, is_held_out=True))
    get_renderer = functools.cache(lambda: Renderer(tokenizer_folder))
    hash_of = functools.cache(durable.sha256_file)
    tokenizer = _tokenizer_hashes(tokenizer_folder)
    packed: list[PackedDataset] = []
    for part in parts:
        settings = {"source": hash_of(part.source), "tokenizer": tokenizer, "seq_len": config.data.seq_len}
        packed.append(_open_or_build(part, part.settings | settings, get_renderer, say))
    return Packing(packed[0], packed[1] if len(packed) > 1 else None)


@dataclass(frozen=True)
class _Part:
    """What becomes one packed data set: all of a source, or those drawn to be held out of it, or the rest."""

    name: str
    source: Path
    num_held_out: int = 0
    seed: int = 0
    is_held_out: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The choice's share in the fingerprint. Where nothing is drawn the seed has none."""
        if self.num_held_out == 0:
            return {}
        return {"num_held_out": self.num_held_out, "seed": self.seed, "is_held_out": self.is_held_out}

    def examples(self) -> Iterator[Example]:
        if self.num_held_out == 0:
            yield from read_examples(self.source)
            return
        is_held_out_E = self._draw(count_examples(self.source))
        for index, example in enumerate(read_examples(self.source)):
            if bool(is_held_out_E[index]) == self.is_held_out:
                yield example

    def _draw(self, num_examples: int) -> npt.NDArray[np.bool_]:
        if self.num_held_out >= num_examples:
            raise BadData(
                f"data.eval_examples is {self.num_held_out:,}, and {self.source} has {num_examples:,} examples, so "
                f"none would be left to train on. Lower it."
            )
        is_held_out_E = np.zeros(num_examples, dtype=np.bool_)
        is_held_out_E[permutation(self.seed, _HELD_OUT_STREAM, num_examples)[: self.num_held_out]] = True
        return is_held_out_E


def _tokenizer_hashes(folder: Path) -> dict[str, str]:
    paths = sorted({path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()})
    return {path.relative_to(folder).as_posix(): durable.sha256_file(path) for path in paths}


def _open_or_build(
    part: _Part, settings: dict[str, Any], get_renderer: Callable[[], Renderer], say: Callable[[str], None]
) -> PackedDataset:
    text = durable.canonical_json({**settings, "format": _FORMAT})
    fingerprint = durable.sha256_bytes(text.encode())

    def build(staged: Path) -> dict[str, Any]:
        say(f"Packing the {part.name} examples of {part.source}.")
        facts = write_rows(staged, part.examples(), get_renderer(), settings["seq_len"], say)
        _require_rows(part, facts)
        if durable.sha256_file(part.source) != settings["source"]:
            raise BadData(f"{part.source} changed while it was read. Run the same command again when it is complete.")
        return asdict(facts)

    packed = open_packed(fingerprint)
    if packed is None:
        build_once(_folder(fingerprint), build, say)
        packed = open_packed(fingerprint)
        assert packed is not None, fingerprint
    for sentence in packed.facts.in_words():
        say(f"{part.name.capitalize()}: {sentence}")
    return packed


def _require_rows(part: _Part, facts: Facts) -> None:
    """
    Raises:
        BadData: there is none; names how many examples were dropped for which reason.
    """
    if facts.num_rows:
        return
    reasons: list[str] = []
    if facts.too_long.count:
        reasons.append(
            f"{facts.too_long.count:,} of {facts.num_read:,} are longer than data.seq_len, {facts.seq_len:,} tokens; "
            f"the shortest has {facts.too_long.fewest_tokens:,}, so set data.seq_len to that at least"
        )
    if facts.no_answer.count:
        reasons.append(
            f"{facts.no_answer.count:,} of {facts.num_read:,} have no assistant's message ({facts.no_answer.where}), "
            f"so give them one"
        )
    raise BadData(f"No {part.name} example of {part.source} can be used: {'; '.join(reasons)}.")


# --- order ---


@functools.lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, num_rows: int) -> npt.NDArray[np.int64]:
    """The rows' order in an epoch (from 0), read-only, the same on every machine and in every version of numpy.

    numpy promises that a bit generator's raw stream never changes; it promises no such thing of `shuffle`.
    """
    stream = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))
    order_N = np.argsort(stream.random_raw(num_rows), kind="stable").astype(np.int64)
    order_N.setflags(write=False)
    return order_N


@dataclass(frozen=True)
class Order:
    """Which rows each step trains: the epochs' permutations one after another, cut into steps and at `total_rows`.

    Only the very last step may be smaller than the others; a step may reach into the next epoch.
    """

    seed: int
    num_rows: int
    rows_per_step: int
    num_steps: int
    total_rows: int

    def rows_of_step(self, step: int) -> npt.NDArray[np.int64]:
        """Row numbers of a step, counted from 1. Depends on nothing that was read before."""
        assert 1 <= step <= self.num_steps, step
        first = (step - 1) * self.rows_per_step
        stop = min(first + self.rows_per_step, self.total_rows)
        pieces = [
            permutation(self.seed, epoch, self.num_rows)[
                max(first - epoch * self.num_rows, 0) : stop - epoch * self.num_rows
            ]
            for epoch in range(first // self.num_rows, (stop - 1) // self.num_rows + 1)
        ]
        return np.concatenate(pieces)


def plan_order(config: RunConfig, seed: int, num_rows: int) -> Order:
    """The run's order and its horizon: `train.max_steps` if given, else `train.epochs` times the rows."""
    rows_per_step = config.train.rows_per_step
    if config.train.max_steps is not None:
        num_steps = config.train.max_steps
        return Order(seed, num_rows, rows_per_step, num_steps, num_steps * rows_per_step)
    # The number as it was written: 0.1 of 30 rows is 3, and in binary a hair more.
    total_rows = math.ceil(Fraction(str(config.train.epochs)) * num_rows)
    return Order(seed, num_rows, rows_per_step, math.ceil(total_rows / rows_per_step), total_rows)

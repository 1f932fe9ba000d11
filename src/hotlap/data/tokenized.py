"""A source's examples as tokens, made once for every tokenizer, template and form, and kept under their fingerprint.

It is written in chunks, each of them published when it is whole. So making one may take longer than a slice: whoever
comes next goes on behind the last whole chunk. Neither row length nor seed play a part here; choosing and packing
from tokens takes a fraction of the time.
"""

# E pieces of a chunk, L tokens of one

import gc
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hotlap import clock, durable
from hotlap.config import hotlap_home
from hotlap.data.cache import build_once, drop_if_damaged, facts_if_whole
from hotlap.data.chunks import (
    INDEX,
    INDEX_DTYPE,
    IS_TRAINED,
    LEFT_OUT,
    TOKENS,
    Batch,
    Chunk,
    Outcomes,
    TokenizedFacts,
    facts_from_json,
)
from hotlap.data.left_out import LeftOut, Tally, of_bad_row, table
from hotlap.data.readers import BadRow, Example, Source
from hotlap.data.render import Rendered, Renderer
from hotlap.errors import BadData

_BATCH_EXAMPLES = 500
_BATCH_CHARACTERS = 1 << 20
_PROGRESS_EVERY_S = 1.0

_NUM_RENDERING = 2

Say = Callable[[str], None]
_RenderedBatch = tuple[Batch, Outcomes]


class Watch(Protocol):
    """Whether a source is still what its fingerprint says."""

    def is_untouched(self) -> bool:
        """Whether no file was written to, by what the file system says. Costs nothing, so a chunk asks it."""
        ...

    def is_unchanged(self) -> bool:
        """Whether the bytes are the same."""
        ...


@dataclass(frozen=True, eq=False)
class Tokenized:
    fingerprint: str
    facts: TokenizedFacts
    chunks: tuple[Path, ...]

    def index(self) -> Iterator[npt.NDArray[Any]]:
        """An `INDEX_DTYPE` entry for each of the pieces, a chunk's at a time."""
        for chunk in self.chunks:
            yield np.fromfile(chunk / INDEX, dtype=INDEX_DTYPE)

    def pieces(self, are_wanted: Iterable[npt.NDArray[np.bool_]]) -> Iterator[Rendered]:
        """The pieces that are wanted of each chunk, in order, a chunk in memory at a time."""
        for chunk, index_E, is_wanted_E in zip(self.chunks, self.index(), are_wanted, strict=True):
            wanted = np.flatnonzero(is_wanted_E)
            if len(wanted) == 0:
                continue
            # Read, not mapped: pages of a map stay in the process's memory after their use.
            tokens = np.fromfile(chunk / TOKENS, dtype="<i4")
            is_trained = np.fromfile(chunk / IS_TRAINED, dtype="|b1")
            ends = np.cumsum(index_E["num_tokens"], dtype=np.int64)
            begins = ends - index_E["num_tokens"]
            for at in wanted:
                yield Rendered(tokens[begins[at] : ends[at]], is_trained[begins[at] : ends[at]])

    def left_out_rows(self) -> Iterator[dict[str, Any]]:
        for chunk in self.chunks:
            yield from durable.read_rows(chunk / LEFT_OUT)


def tokenize(
    source: Source,
    fingerprint: str,
    get_renderer: Callable[[], Renderer],
    watch: Watch,
    say: Say,
    deadline: clock.Deadline | None = None,
) -> Tokenized:
    """The source's examples as tokens, from the cache or made now.

    Raises:
        BadData: the source cannot be read, changed meanwhile, or has a bad row and `data.bad_rows` is `refuse`.
        OutOfTime: the deadline came first.
    """
    final = _folder(fingerprint)
    tokenized = _opened(fingerprint, say)
    if tokenized is None:
        build = _Build(source, final, get_renderer, watch, say, deadline)

        def build_all(staged: Path) -> dict[str, Any]:
            facts = build.run()
            if not watch.is_unchanged():
                build.remove_chunks()
                raise _changed(source)
            durable.write_synced(staged / "README", b"The chunks lie in the folder of the same name.\n")
            return asdict(facts)

        build_once(final, build_all, say)
        tokenized = _opened(fingerprint, say)
        assert tokenized is not None, fingerprint
    if source.settings.bad_rows == "refuse":
        require_good(source, tokenized.facts.left_out, tokenized.facts.num_read)
    return tokenized


def _changed(source: Source) -> BadData:
    return BadData(f"{source.place} changed while it was read. Run the same command again when it is done.")


def require_good(source: Source, left_out: Iterable[LeftOut], num_read: int) -> None:
    """
    Raises:
        BadData: a row is no example; a table of reasons.
    """
    bad = [entry for entry in left_out if entry.is_bad]
    if bad:
        count = sum(entry.count for entry in bad)
        raise BadData(
            f"{count:,} of {num_read:,} rows of {source.place} cannot be used. {table(bad)} "
            f'To train without them, set data.bad_rows = "drop".'
        )


def _folder(fingerprint: str) -> Path:
    return hotlap_home() / "tokenized" / fingerprint


def _chunk_folder(final: Path, number: int) -> Path:
    return final.with_name(f"{final.name}.chunks") / f"{number:05}"


def _opened(fingerprint: str, say: Say) -> Tokenized | None:
    """Read through: what is packed from a damaged chunk would be damaged for good."""
    final = _folder(fingerprint)
    written = facts_if_whole(final)
    if written is None:
        return None
    facts = facts_from_json(written)
    chunks, num_read = [], 0
    while num_read < facts.num_read:
        chunk = _chunk_folder(final, len(chunks))
        if drop_if_damaged(chunk, say):
            return _not_whole(final)
        chunks.append(chunk)
        num_read += durable.read_manifest(chunk)["facts"]["num_read"]
    return Tokenized(fingerprint, facts, tuple(chunks))


def _not_whole(final: Path) -> None:
    """A chunk is damaged: it is made again, and the rest is found."""
    durable.remove_tree(final)


# --- making ---


class _Build:
    """Writes chunks behind those that are there."""

    def __init__(
        self,
        source: Source,
        final: Path,
        get_renderer: Callable[[], Renderer],
        watch: Watch,
        say: Say,
        deadline: clock.Deadline | None,
    ) -> None:
        self._watch = watch
        self._source, self._final, self._say, self._deadline = source, final, say, deadline
        self._get_renderer = get_renderer
        self._files = tuple(str(file.path) for file in source.files)
        self._said_at_s = clock.monotonic_s()

    def run(self) -> TokenizedFacts:
        facts, number = self._found_chunks()
        if facts.num_read:
            self._say(f"{facts.num_read:,} examples of {self._source.place} are tokenized already; going on there.")
        batches = _batches(islice(self._source.rows(), facts.num_read, None))
        renderer = self._get_renderer()
        with _loaded_is_no_garbage(), closing(_rendered(batches, renderer)) as rendered:
            while True:
                chunk = Chunk(self._files, facts.num_read)
                is_last = self._fill(chunk, rendered, facts)
                if not self._watch.is_untouched():
                    raise _changed(self._source)
                if chunk.facts.num_read:
                    build_once(_chunk_folder(self._final, number), chunk.write, self._say)
                    facts, number = facts.plus(chunk.facts), number + 1
                if is_last:
                    return replace(facts, unit=self._unit(), pad_token_id=renderer.pad_token_id)
                if self._is_over():
                    raise clock.OutOfTime(f"{facts.num_read:,} examples of {self._source.place} are tokenized so far")

    def remove_chunks(self) -> None:
        folder = _chunk_folder(self._final, 0).parent
        if folder.exists():
            durable.remove_tree(folder)

    def _found_chunks(self) -> tuple[TokenizedFacts, int]:
        facts = TokenizedFacts(0, 0, 0, 0, {}, self._files, self._unit(), (), 0)
        number = 0
        while not drop_if_damaged(chunk := _chunk_folder(self._final, number), self._say):
            facts, number = facts.plus(facts_from_json(durable.read_manifest(chunk)["facts"])), number + 1
        return facts, number

    def _unit(self) -> str:
        return self._source.files[0].container.unit

    def _fill(self, chunk: Chunk, rendered: Iterator[_RenderedBatch], facts: TokenizedFacts) -> bool:
        """Add batches until the chunk is full or the time over. Returns whether they are at their end."""
        for batch, outcomes in rendered:
            bad = chunk.add(batch, outcomes)
            if bad is not None and self._source.settings.bad_rows == "refuse":
                self._refuse(bad)
            self._tell(facts.num_read + chunk.facts.num_read)
            if chunk.is_full or self._is_over():
                return False
        return True

    def _refuse(self, first: BadRow) -> None:
        """Read on without tokenizing, to tell all at once."""
        tally, num_read = Tally(), 0
        for row in self._source.rows():
            num_read += 1
            if isinstance(row, BadRow):
                tally.add_bad(row)
        require_good(self._source, tally.entries or (of_bad_row(first),), num_read)

    def _is_over(self) -> bool:
        return self._deadline is not None and self._deadline.is_over()

    def _tell(self, num_read: int) -> None:
        if clock.monotonic_s() - self._said_at_s >= _PROGRESS_EVERY_S:
            self._said_at_s = clock.monotonic_s()
            self._say(f"Tokenized {num_read:,} examples so far.")


@contextmanager
def _loaded_is_no_garbage() -> Generator[None]:
    """Spare what is loaded by now from being looked through again and again: that took 8 % of the time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _batches(rows: Iterable[Example | BadRow]) -> Iterator[Batch]:
    """Enough examples to keep the tokenizer's threads busy, and no more characters than memory is meant to hold."""
    batch: Batch = []
    num_characters = 0
    for row in rows:
        batch.append(row)
        if isinstance(row, Example):
            num_characters += sum(len(message.content) for message in row.messages)
        if len(batch) == _BATCH_EXAMPLES or num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _rendered(batches: Iterable[Batch], renderer: Renderer) -> Generator[_RenderedBatch]:
    """The batches in their order, with what each was rendered to. While one is in the tokenizer's native code, which
    leaves the interpreter free, the next is written by the chat template."""
    executor = ThreadPoolExecutor(_NUM_RENDERING)
    try:
        waiting: deque[tuple[Batch, Future[Outcomes]]] = deque()
        for batch in batches:
            examples = [row for row in batch if isinstance(row, Example)]
            waiting.append((batch, executor.submit(renderer.render_each, examples)))
            if len(waiting) > _NUM_RENDERING:
                batch, future = waiting.popleft()
                yield batch, future.result()
        for batch, future in waiting:
            yield batch, future.result()
    finally:
        executor.shutdown(wait=False, cancel_futures=True)

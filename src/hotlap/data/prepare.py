"""From sources to packed rows: tokenize each, choose, pack; each step cached under the hash of what it depends on."""

# E pieces of a chunk, U examples of a source that can be used

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from hotlap import artifacts, clock, durable
from hotlap.config import RunConfig
from hotlap.config_data import DataConfig, MixConfig
from hotlap.data.cache import build_once, drop_if_damaged
from hotlap.data.choose import Choice, choose, spread, too_long, uses_seed
from hotlap.data.facts import Facts
from hotlap.data.left_out import TOO_LONG, LeftOut, Tally, table
from hotlap.data.packed import PackedDataset, Packing, folder_of, open_packed
from hotlap.data.readers import Source
from hotlap.data.render import DAY_FUNCTION, Rendered, Renderer, read_template
from hotlap.data.rows import write_rows
from hotlap.data.tokenized import Tokenized, tokenize
from hotlap.errors import BadData
from hotlap.pins import Stamp, stamp_of

# Part of every fingerprint: raise it when the same input gives other tokens, rows or files.
_FORMAT = 4

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*",
)
_LEFT_OUT = "left_out.jsonl"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Places:
    """Where the data of a run lies on this machine."""

    dataset: Path
    eval_dataset: Path | None = None
    mix: tuple[Path, ...] = ()
    chat_template: Path | None = None

    @property
    def named(self) -> dict[str, Path]:
        """Each under the name by which a run remembers its content."""
        named = {"dataset": self.dataset, "eval_dataset": self.eval_dataset, "chat_template": self.chat_template}
        named |= {f"mix.{number}": path for number, path in enumerate(self.mix)}
        return {name: path for name, path in named.items() if path is not None}


def locate(config: RunConfig) -> Places:
    """
    Raises:
        MissingArtifact: a data set or the chat template is not on this machine.
    """
    data = config.data
    return Places(
        artifacts.locate_dataset(config.dataset),
        artifacts.locate_dataset(data.eval_dataset) if data.eval_dataset else None,
        tuple(artifacts.locate_dataset(item.dataset) for item in data.mix),
        Path(data.chat_template) if data.chat_template else None,
    )


@dataclass(frozen=True)
class _Plan:
    """What is asked for, and what was found out about it."""

    config: RunConfig
    seed: int
    say: Say
    get_renderer: Callable[[], Renderer]
    rendering: dict[str, Any]
    deadline: clock.Deadline | None
    hashes: dict[Path, str] = field(default_factory=dict)
    stamps: dict[Path, Stamp] = field(default_factory=dict)
    """What the file system said of a file before it was hashed."""

    @property
    def settings(self) -> DataConfig:
        return self.config.data

    def content_of(self, source: Source) -> dict[str, str]:
        """What every file is read as, and its hash, under the place it has in the data set."""
        root = source.place if source.place.is_dir() else source.place.parent
        for file in source.files:
            if file.path not in self.hashes:
                self.stamps[file.path] = stamp_of(file.path)
                self.hashes[file.path] = durable.sha256_file(file.path)
        return {
            file.path.relative_to(root).as_posix() if source.place.is_dir() else "": (
                f"{file.container.words}: {self.hashes[file.path]}"
            )
            for file in source.files
        }


def prepare(
    config: RunConfig,
    seed: int,
    places: Places,
    tokenizer_folder: Path,
    say: Say,
    deadline: clock.Deadline | None = None,
) -> Packing:
    """The run's packed data, from the cache or built now. `seed` draws what the settings leave to it.

    Raises:
        BadData: a row of a source cannot be used, or nothing is left to train on or to evaluate.
        MissingArtifact: a source or the tokenizer is not there.
        OutOfTime: the deadline came first; what is tokenized is kept, and the next call goes on there.
    """
    settings = config.data
    assert (places.eval_dataset is not None) == (settings.eval_dataset is not None), places.eval_dataset
    plan = _Plan(
        config,
        seed,
        say,
        functools.cache(lambda: _renderer(tokenizer_folder, settings, places.chat_template, say)),
        {
            "tokenizer": _tokenizer_hashes(tokenizer_folder),
            "chat_template": places.chat_template
            and durable.sha256_bytes(read_template(places.chat_template).encode()),
            "tools": settings.tools,
            "turns": settings.turns,
            "append_end": settings.append_end,
            "day": _today() if _reads_the_day(tokenizer_folder, places.chat_template) else None,
        },
        deadline,
    )
    sources = [Source(places.dataset, settings), *_mixed(places.mix, settings)]
    train = _Part("train", sources, settings, is_trained=True)
    packed = [_open_or_build(plan, train)]
    if places.eval_dataset is not None:
        alone = settings.model_copy(update={"eval_examples": 0, "prune": None, "weight": 1.0})
        packed.append(_open_or_build(plan, _Part("held-out", [Source(places.eval_dataset, alone)], alone, True)))
    elif settings.eval_examples:
        packed.append(_open_or_build(plan, _Part("held-out", sources, settings, is_trained=False)))
    packing = Packing(packed[0], packed[1] if len(packed) > 1 else None)
    if (leak := packing.leak_in_words()) is not None:
        say(leak)
    return packing


def _renderer(folder: Path, settings: DataConfig, chat_template: Path | None, say: Say) -> Renderer:
    renderer = Renderer(folder, settings, chat_template)
    for doubt in renderer.doubts():
        say(doubt)
    return renderer


def _reads_the_day(tokenizer_folder: Path, chat_template: Path | None) -> bool:
    """Whether the chat template writes the date, so that tokens made on another day are others."""
    if chat_template is not None:
        return DAY_FUNCTION in read_template(chat_template)
    patterns = ("tokenizer_config.json", "chat_template*", "additional_chat_templates/*")
    paths = [path for pattern in patterns for path in tokenizer_folder.glob(pattern) if path.is_file()]
    return any(DAY_FUNCTION.encode() in path.read_bytes() for path in paths)


def _today() -> str:
    """As the template's function sees it: in this machine's time zone."""
    return datetime.fromtimestamp(clock.wall_s()).date().isoformat()


def _mixed(places: tuple[Path, ...], settings: DataConfig) -> list[Source]:
    items: tuple[MixConfig, ...] = settings.mix
    return [Source(place, settings, item) for place, item in zip(places, items, strict=True)]


def _tokenizer_hashes(folder: Path) -> dict[str, str]:
    paths = sorted({path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()})
    return {path.relative_to(folder).as_posix(): durable.sha256_file(path) for path in paths}


@dataclass(frozen=True)
class _Part:
    """What becomes one packed data set: what is trained of some sources, or what is held out of them."""

    name: str
    sources: list[Source]
    settings: DataConfig
    is_trained: bool

    @property
    def where(self) -> str:
        return " and ".join(str(source.place) for source in self.sources)

    @property
    def weights(self) -> list[float]:
        return [source.weight for source in self.sources]

    def choosing(self, seed: int) -> dict[str, Any]:
        """The choice's share in the fingerprint. Where nothing is drawn the seed has none."""
        settings = self.settings
        return {
            "is_trained": self.is_trained,
            "weights": self.weights if self.is_trained else None,
            "num_held_out": settings.eval_examples,
            "prune": settings.prune and settings.prune.model_dump(),
            "seed": seed if uses_seed(settings, self.weights) else None,
            "seq_len": settings.seq_len,
            "too_long": settings.too_long,
        }


def _open_or_build(plan: _Plan, part: _Part) -> PackedDataset:
    # Not by their places: two sources may be two parts, or two forms, of one folder.
    fingerprints = [
        _fingerprint(source=plan.content_of(source), reading=source.reading, rendering=plan.rendering)
        for source in part.sources
    ]
    fingerprint = _fingerprint(
        tokens=fingerprints,
        choosing=part.choosing(plan.seed),
        packing=plan.config.packing.method,
    )
    # Whoever prepares reads what is there through; later slices open it by its fingerprint alone.
    packed = None if drop_if_damaged(folder_of(fingerprint), plan.say) else open_packed(fingerprint)
    if packed is None or _must_refuse(part, packed.facts):
        tokenized = [_tokenize(plan, *each) for each in zip(part.sources, fingerprints, strict=True)]

        def build(staged: Path) -> dict[str, Any]:
            plan.say(f"Packing the {part.name} examples of {part.where}.")
            return asdict(_Build(plan, part, tokenized).write(staged))

        build_once(folder_of(fingerprint), build, plan.say)
        packed = open_packed(fingerprint)
        assert packed is not None, fingerprint
    for sentence in packed.facts.in_words():
        plan.say(f"{part.name.capitalize()}: {sentence}")
    return packed


def _must_refuse(part: _Part, facts: Facts) -> bool:
    """Rows that were packed when bad ones might be dropped are no rows for who wants them refused."""
    return part.settings.bad_rows == "refuse" and bool(facts.bad)


def _fingerprint(**settings: Any) -> str:
    return durable.sha256_bytes(durable.canonical_json({**settings, "format": _FORMAT}).encode())


def _tokenize(plan: _Plan, source: Source, fingerprint: str) -> Tokenized:
    words = sorted({file.container.words for file in source.files})
    plan.say(f"{source.place} is {' and '.join(words)}.")
    for file in source.files:
        if file.path.stat().st_size == 0:
            plan.say(f"{file.path} is empty: it has 0 bytes and gives no examples.")
    return tokenize(source, fingerprint, plan.get_renderer, _Watch(plan, source), plan.say, plan.deadline)


@dataclass(frozen=True)
class _Watch:
    plan: _Plan
    source: Source

    def is_untouched(self) -> bool:
        return all(stamp_of(file.path) == self.plan.stamps[file.path] for file in self.source.files)

    def is_unchanged(self) -> bool:
        return all(durable.sha256_file(file.path) == self.plan.hashes[file.path] for file in self.source.files)


class _Build:
    """Chooses among tokenized pieces and writes rows of them."""

    def __init__(self, plan: _Plan, part: _Part, tokenized: list[Tokenized]) -> None:
        self._plan, self._part, self._tokenized = plan, part, tokenized
        indexes = [each.index for each in tokenized]
        self._choice: Choice = choose(indexes, part.weights, part.settings, plan.seed, part.where)

    def write(self, staged: Path) -> Facts:
        seq_len = self._part.settings.seq_len
        left_out = self._left_out()
        if self._part.settings.too_long == "refuse":
            _refuse_too_long([entry for entry in left_out if entry.kind == TOO_LONG], self._part, self._longest())
        pad_token_id = self._tokenized[0].facts.pad_token_id
        rows = write_rows(staged, self._pieces(), seq_len, pad_token_id, self._plan.config.packing.method)
        num_read = sum(each.facts.num_read for each in self._tokenized)
        num_held_out = self._choice.num_held_out
        is_trained = self._part.is_trained
        facts = Facts(
            seq_len=seq_len,
            num_read=num_read - num_held_out if is_trained else num_held_out,
            num_pruned=self._choice.num_pruned if is_trained else 0,
            num_unweighted=self._choice.num_unweighted if is_trained else 0,
            num_rewritten=sum(each.facts.num_rewritten for each in self._tokenized),
            num_with_placeholder=sum(each.facts.num_with_placeholder for each in self._tokenized) if is_trained else 0,
            placeholder=next((each.facts.placeholder for each in self._tokenized if each.facts.placeholder), None),
            forms=dict(sum((Counter(each.facts.forms) for each in self._tokenized), Counter[str]())),
            left_out=left_out,
            **asdict(rows),
        )
        _require_rows(self._part, facts)
        self._list_left_out(staged)
        return facts

    def _pieces(self) -> Iterator[Rendered]:
        settings = self._part.settings
        for each, copies_U, is_held_out_U in zip(
            self._tokenized, self._choice.copies, self._choice.is_held_out, strict=True
        ):
            if not self._part.is_trained:
                yield from each.pieces(spread(each.index, settings, is_held_out_U))
                continue
            for copy in range(int(copies_U.max(initial=0))):
                yield from each.pieces(copies_E > copy for copies_E in spread(each.index, settings, copies_U))

    def _left_out(self) -> tuple[LeftOut, ...]:
        """What is in no row, for which reason. What is held out of the same sources is told with what is trained."""
        if not self._part.is_trained:
            return ()
        tally = Tally()
        for each in self._tokenized:
            for entry in each.facts.left_out:
                tally.add(entry)
            for entry in self._too_long(each):
                tally.add(entry)
        return tally.entries

    def _too_long(self, each: Tokenized) -> Iterator[LeftOut]:
        for index_E in each.index():
            for piece in index_E[too_long(index_E, self._part.settings)]:
                num_tokens = int(piece["num_tokens"])
                reason = f"It has {num_tokens:,} tokens."
                file = each.facts.files[int(piece["file"])]
                yield LeftOut(TOO_LONG, reason, file, each.facts.unit, 1, (int(piece["line"]),), num_tokens)

    def _longest(self) -> int:
        return max(int(index_E["num_tokens"].max(initial=0)) for each in self._tokenized for index_E in each.index())

    def _list_left_out(self, staged: Path) -> None:
        """Every row that is left out, in a file beside the rows."""
        path = staged / _LEFT_OUT
        durable.append_rows(path, [])
        for each in self._tokenized if self._part.is_trained else []:
            durable.append_rows(path, each.left_out_rows())
            rows = (
                {"source": entry.source, entry.unit: entry.lines[0], "kind": entry.kind, "tokens": entry.fewest_tokens}
                for entry in self._too_long(each)
            )
            durable.append_rows(path, rows)
        durable.sync_file(path)


def _refuse_too_long(too_long: list[LeftOut], part: _Part, longest: int) -> None:
    if too_long:
        count = sum(entry.count for entry in too_long)
        raise BadData(
            f"{count:,} examples of {part.where} are longer than data.seq_len, {part.settings.seq_len:,} tokens "
            f"(first {too_long[0].first_place}), and the longest has {longest:,}. "
            f'Raise data.seq_len, or set data.too_long to "drop" or "cut".'
        )


def _require_rows(part: _Part, facts: Facts) -> None:
    """
    Raises:
        BadData: there is none; names how many examples were left out for which reason.
    """
    if facts.num_rows:
        return
    reasons: list[str] = []
    if facts.too_long:
        count, fewest = sum(entry.count for entry in facts.too_long), min(e.fewest_tokens for e in facts.too_long)
        way_out = (
            "the shortest" if part.settings.too_long == "drop" else "cut, none keeps a token to train; the shortest"
        )
        reasons.append(
            f"{count:,} of {facts.num_read:,} are longer than data.seq_len, {facts.seq_len:,} tokens; "
            f"{way_out} has {fewest:,}, so set data.seq_len to that at least"
        )
    if facts.num_unweighted:
        reasons.append(f"weights below 1 leave out {facts.num_unweighted:,}, so raise data.weight or that of data.mix")
    for entry in facts.no_answer:
        reasons.append(
            f"{entry.count:,} of {facts.num_read:,} have no assistant's message to train ({entry.where}), "
            f"so give them one"
        )
    if facts.bad:
        reasons.append(table(facts.bad).removesuffix("."))
    raise BadData(f"No {part.name} example of {part.where} can be used: {'; '.join(reasons)}.")

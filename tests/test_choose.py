"""Choosing examples: held out, pruned, repeated, too long; as pure decisions, and through a whole preparation."""

import json
import os
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures_data import conversation, f3_rows, text_of, write_byte_tokenizer, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from hotlap import clock
from hotlap.config import RunConfig
from hotlap.config_data import DataConfig, PruneConfig
from hotlap.data import tokenized
from hotlap.data.choose import HELD_OUT_STREAM, Index, choose, permutation, smallest, spread, too_long, uses_seed
from hotlap.data.chunks import INDEX_DTYPE, TOKENS
from hotlap.data.packed import PackedDataset, Packing
from hotlap.data.prepare import Places, prepare
from hotlap.errors import BadData


@pytest.fixture(scope="module")
def f4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("f4"))


def pack(
    source: Path, tokenizer: Path, seed: int = 1, mix: tuple[Path, ...] = (), said: list[str] | None = None, **data: Any
) -> Packing:
    data = {name.removeprefix("data."): value for name, value in data.items()}
    config = RunConfig.model_validate({"base_model": "m", "dataset": "d", "data": data})
    return prepare(config, seed, Places(source, mix=mix), tokenizer, (said if said is not None else []).append)


def texts(data: PackedDataset | None) -> Counter[str]:
    assert data is not None
    return Counter(text_of(tokens) for tokens, _ in data.examples())


def index_of(lengths: list[int], rows: list[int] | None = None) -> Any:
    index = np.zeros(len(lengths), dtype=INDEX_DTYPE)
    index["num_tokens"], index["num_trained"], index["first_trained"] = lengths, 1, 1
    index["row"] = rows if rows is not None else range(len(lengths))
    return index


def in_parts(index: Any, examples: int = 3) -> Index:
    """As a tokenized set gives it: a few examples at a time."""
    cuts = np.flatnonzero(np.diff(index["row"] // examples)) + 1
    return lambda: iter(np.split(index, cuts))


def spread_over(index: Any, values_U: Any, settings_: DataConfig | None = None) -> Any:
    return np.concatenate([np.empty(0, values_U.dtype), *spread(in_parts(index), settings_ or DataConfig(), values_U)])


# --- pure ---


@pytest.mark.parametrize(
    ("by", "keep", "expected"), [("first", 2, [1, 1, 0, 0, 0]), ("shortest", 2, [0, 1, 0, 0, 1]), ("first", 9, [1] * 5)]
)
def test_pruning_keeps_what_it_says(by: Any, keep: int, expected: list[int]) -> None:
    settings_ = DataConfig(prune=PruneConfig(by=by, keep=keep))
    chosen = choose([in_parts(index_of([9, 3, 8, 7, 2]))], [1.0], settings_, seed=1, where="x")
    assert chosen.copies[0].tolist() == expected and chosen.num_pruned == 5 - min(keep, 5)


def test_pruning_by_seed_is_another_choice_with_another_seed() -> None:
    settings_ = DataConfig(prune=PruneConfig(by="seed", keep=10))
    parts = [in_parts(index_of([5] * 100))]
    kept = [choose(parts, [1.0], settings_, seed, "x").copies[0].tolist() for seed in (1, 1, 2)]
    assert kept[0] == kept[1] != kept[2] and sum(kept[0]) == 10
    assert uses_seed(settings_, [1.0]) and not uses_seed(DataConfig(), [2.0]) and uses_seed(DataConfig(), [0.5])


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    weights=st.lists(st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 0.1]), min_size=3, max_size=3),
    num_held_out=st.integers(0, 4),
    seed=st.integers(0, 9),
    pieces=st.integers(1, 3),
)
def test_every_example_is_trained_or_held_out_never_both(
    sizes: list[int], weights: list[float], num_held_out: int, seed: int, pieces: int
) -> None:
    indexes = [index_of([10] * (size * pieces), [row // pieces for row in range(size * pieces)]) for size in sizes]
    parts, settings_ = [in_parts(index) for index in indexes], DataConfig(eval_examples=num_held_out)
    if num_held_out > 0 and num_held_out >= sum(sizes):
        with pytest.raises(BadData, match="eval_examples"):
            choose(parts, weights[: len(sizes)], settings_, seed, "x")
        return
    chosen = choose(parts, weights[: len(sizes)], settings_, seed, "x")
    assert chosen.num_held_out == num_held_out == sum(int(held_U.sum()) for held_U in chosen.is_held_out)
    for index, copies_U, held_U, weight in zip(indexes, chosen.copies, chosen.is_held_out, weights, strict=False):
        copies, held = spread_over(index, copies_U), spread_over(index, held_U)
        assert not (copies[held] > 0).any()
        for row in set(index["row"].tolist()):  # the pieces of an example stay together
            here = index["row"] == row
            assert len(set(copies[here].tolist())) == len(set(held[here].tolist())) == 1
        num_trained = int((~held).sum()) // pieces
        assert int(copies.sum()) // pieces == pytest.approx(weight * num_trained, abs=0.5001)
        assert copies[~held].min(initial=99) >= int(weight) and copies.max(initial=0) <= int(weight) + 1


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 3), max_size=40), wanted=st.integers(0, 45))
def test_the_smallest_are_those_that_a_stable_sort_puts_first(values: list[int], wanted: int) -> None:
    array = np.array(values, dtype=np.uint64)
    found = smallest(lambda: iter(np.array_split(array, 4)), len(array), wanted)
    assert np.flatnonzero(found).tolist() == sorted(np.argsort(array, kind="stable")[:wanted].tolist())


def test_what_is_held_out_stands_first_in_the_seed_s_permutation() -> None:
    """Drawn in blocks, and without sorting: 150,000 are more than two blocks."""
    index = index_of([5] * 150_000)
    chosen = choose([lambda: iter(np.split(index, 10))], [1.0], DataConfig(eval_examples=1000), 7, "x")
    expected = permutation(7, HELD_OUT_STREAM, len(index))[:1000]
    assert np.flatnonzero(chosen.is_held_out[0]).tolist() == sorted(expected.tolist())


@pytest.mark.parametrize("by", ["shortest", "seed"])
def test_choosing_takes_a_few_bytes_an_example(by: Any) -> None:
    """An index is 30 bytes an example, a permutation 16: neither may be in memory whole."""

    part = index_of([5 + at % 7 for at in range(10_000)])

    def peak_bytes(num_examples: int) -> int:
        def index() -> Iterator[Any]:
            for first in range(0, num_examples, len(part)):
                moved = part.copy()
                moved["row"] += first
                yield moved

        settings_ = DataConfig(eval_examples=100, prune=PruneConfig(by=by, keep=num_examples // 2))
        tracemalloc.start()
        try:
            chosen = choose([index], [1.5], settings_, 1, "x")
            sums = [int(copies_E.sum()) for copies_E in spread(index, settings_, chosen.copies[0])]
            assert sum(sums) == num_examples * 3 // 4
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    grown_bytes = peak_bytes(170_000) - peak_bytes(70_000)
    assert grown_bytes < 12 * 100_000


def test_too_long_is_judged_by_the_policy() -> None:
    index = index_of([10, 100, 100])
    index["first_trained"] = [1, 20, 80]
    for policy, expected in (
        ("drop", [False, True, True]),
        ("refuse", [False, True, True]),
        ("cut", [False, False, True]),
    ):
        settings_ = DataConfig(seq_len=64, too_long=policy)  # type: ignore[arg-type]
        assert too_long(index, settings_).tolist() == expected
        chosen = choose([in_parts(index)], [1.0], settings_, 1, "x")
        assert spread_over(index, chosen.copies[0], settings_).tolist() == [not bad for bad in expected]


# --- through a preparation ---


def test_mixed_data_sets_stand_as_often_as_they_weigh(f4: Path, tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "one.jsonl", f3_rows(8))
    two = write_jsonl(tmp_path / "two.jsonl", [{"question": f"Q{i}", "answer": "A"} for i in range(10)])
    said: list[str] = []
    mix = [{"dataset": str(two), "weight": 0.5, "format": "question-answer"}]
    both = pack(one, f4, mix=(two,), weight=2.0, said=said, eval_examples=2, **{"data.mix": mix})
    trained = texts(both.train)
    ours = {text: count for text, count in trained.items() if "<user>q" in text}
    theirs = {text: count for text, count in trained.items() if "<user>Q" in text}
    held = texts(both.held_out)
    assert set(ours.values()) == {2} and set(theirs.values()) == {1} and not set(trained) & set(held)
    num_ours, num_theirs = 8 - sum("<user>q" in text for text in held), 10 - sum("<user>Q" in text for text in held)
    assert len(ours) == num_ours and len(theirs) == round(num_theirs / 2)
    assert both.train.facts.forms == {"completion": 8, "question-answer": 10}
    again = pack(one, f4, seed=2, mix=(two,), weight=2.0, eval_examples=2, **{"data.mix": mix})
    assert again.train.fingerprint != both.train.fingerprint


def test_what_a_weight_leaves_out_is_told(f4: Path, tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "one.jsonl", f3_rows(8))
    two = write_jsonl(tmp_path / "two.jsonl", f3_rows(3))
    said: list[str] = []
    both = pack(one, f4, mix=(two,), said=said, weight=0.75, **{"data.mix": [{"dataset": str(two), "weight": 0.1}]})
    assert both.train.num_examples == 6 and both.train.facts.num_unweighted == 2 + 3
    assert "Train: Left out 5 examples by weights below 1." in said
    with pytest.raises(BadData, match="can be used: weights below 1 leave out 3, so raise"):
        pack(two, f4, weight=0.1)


def test_two_parts_of_one_folder_are_two_sources(f4: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "one.jsonl", f3_rows(1))
    write_jsonl(folder / "two.jsonl", [{"question": f"Q{i}", "answer": "A"} for i in range(2)])
    mix = [{"dataset": str(folder), "files": "two.jsonl"}]
    both = pack(folder, f4, mix=(folder,), files="one.jsonl", **{"data.mix": mix})
    assert set(texts(both.train)) == {
        "<user>q0<turn_end><assistant>a0<turn_end>",
        "<user>Q0<turn_end><assistant>A<turn_end>",
        "<user>Q1<turn_end><assistant>A<turn_end>",
    }
    alone = pack(folder, f4, files="two.jsonl")
    assert len(texts(alone.train)) == 2 and not any("<user>q" in text for text in texts(alone.train))


def test_b16_the_policy_for_long_examples_is_the_same_packed_and_unpacked(f4: Path, tmp_path: Path) -> None:
    rows = [conversation("user: qqqq", "assistant: aaaaa"), conversation("user: qqqqqqqqq", "assistant: a")]
    source = write_jsonl(tmp_path / "x.jsonl", [*rows, conversation("user: q", "assistant: ab")])
    for method in ("next-fit", "best-fit", "none"):
        config = {"base_model": "m", "dataset": "d", "packing": {"method": method}}
        said: list[str] = []

        def packed(too_long: str, config: dict[str, Any] = config, said: list[str] = said) -> PackedDataset:
            made = RunConfig.model_validate({**config, "data": {"seq_len": 10, "too_long": too_long}})
            return prepare(made, 1, Places(source), f4, said.append).train

        assert texts(packed("drop")) == {"<user>q<turn_end><assistant>ab<turn_end>": 1}
        cut = packed("cut")
        assert set(texts(cut)) == {"<user>q<turn_end><assistant>ab<turn_end>", "<user>qqqq<turn_end><assistant>aaa"}
        assert (cut.facts.num_cut, cut.facts.num_cut_trained_tokens) == (1, 3)
        assert any("Cut 1 examples" in text and "3 trained tokens are lost" in text for text in said)
        with pytest.raises(
            BadData, match=r"2 examples of .* are longer than data\.seq_len, 10 tokens .*the longest has 14"
        ):
            packed("refuse")


def test_b27_cutting_never_leaves_an_example_that_trains_nothing(f4: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", [{"prompt": "u" * 200, "completion": "a" * 5}] * 8)
    with pytest.raises(BadData, match=r"8 of 8 are longer .* none keeps a token to train; the shortest has 209"):
        pack(source, f4, seq_len=64, too_long="cut")
    assert pack(source, f4, seq_len=206, too_long="cut").train.facts.num_cut_trained_tokens == 8 * 3


# --- resuming ---


def test_tokenizing_goes_on_where_the_time_was_over(f4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenized, "_BATCH_EXAMPLES", 10)
    source = write_jsonl(tmp_path / "x.jsonl", f3_rows())
    config = RunConfig.model_validate({"base_model": "m", "dataset": "d", "data": {"seq_len": 64}})
    over = clock.Deadline(0.0, lambda: 1.0)
    for num_done in (10, 20, 30):
        with pytest.raises(clock.OutOfTime, match=f"{num_done} examples of .* are tokenized so far"):
            prepare(config, 1, Places(source), f4, lambda text: None, over)
    said: list[str] = []
    resumed = prepare(config, 1, Places(source), f4, said.append).train
    assert any("30 examples of" in text and "going on there" in text for text in said)
    monkeypatch.setenv("HOTLAP_HOME", str(tmp_path / "other"))
    whole = prepare(config, 1, Places(source), f4, lambda text: None).train
    assert whole.fingerprint == resumed.fingerprint and whole.facts == resumed.facts
    assert (whole.tokens_NT == resumed.tokens_NT).all() and (whole.is_trained_NT == resumed.is_trained_NT).all()


def test_a_damaged_chunk_is_made_again(f4: Path, tmp_path: Path, home: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", f3_rows())
    before = texts(pack(source, f4, seq_len=64).train)
    (chunk,) = (home / "tokenized").glob("*.chunks/00000")
    os.truncate(chunk / TOKENS, 8)
    assert texts(pack(source, f4, seq_len=80).train) == before


def test_another_length_or_seed_tokenizes_nothing_anew(
    f4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", f3_rows())
    pack(source, f4, seq_len=64)
    monkeypatch.setattr("hotlap.data.prepare.Renderer", None)
    assert pack(source, f4, seq_len=80, eval_examples=4, seed=3).train.num_examples == 60


MEMORY = """
import resource, sys
from pathlib import Path
from hotlap.config import RunConfig
from hotlap.data.prepare import Places, prepare
config = RunConfig.model_validate({"base_model": "m", "dataset": "d", "data": {"seq_len": 64}})
print(prepare(config, 1, Places(Path(sys.argv[1])), Path(sys.argv[2]), lambda text: None).train.num_examples)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.long
def test_peak_memory_does_not_grow_with_the_rows(f4: Path, tmp_path: Path) -> None:
    peaks: list[int] = []
    small = "from hotlap.data import chunks, tokenized\nchunks._CHUNK_PIECES = tokenized._BATCH_EXAMPLES = 200\n"
    for count in (800, 5_000):
        source = tmp_path / f"{count}.jsonl"
        source.write_text("".join(json.dumps({"prompt": f"q{i}", "completion": "a" * 20}) + "\n" for i in range(count)))
        argv = [sys.executable, "-c", small + MEMORY, str(source), str(f4)]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        num_examples, peak = map(int, done.stdout.split())
        assert num_examples == count
        peaks.append(peak)
    assert peaks[1] < 1.1 * peaks[0], peaks

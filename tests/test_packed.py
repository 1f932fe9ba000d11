"""Packed rows and their order: nothing split, lost or doubled; built once; read exactly where a run stopped."""

import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from fixtures_data import (
    ASSISTANT,
    END,
    F4_BEGIN,
    PAD,
    USER,
    conversation,
    f3_rows,
    f4_conversations,
    text_of,
    write_byte_tokenizer,
    write_jsonl,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hotlap import clock, durable
from hotlap.config import RunConfig
from hotlap.data import render, rows
from hotlap.data.cache import build_once
from hotlap.data.left_out import LeftOut
from hotlap.data.packed import Order, PackedDataset, Packing, folder_of, open_packed, permutation, plan_order
from hotlap.data.prepare import Places, prepare
from hotlap.data.readers import Example, Source, read_examples
from hotlap.data.render import Rendered, Renderer
from hotlap.data.rows import write_rows
from hotlap.errors import BadData


def silent(text: str) -> None:
    """A `say` nobody listens to."""


@pytest.fixture(scope="module")
def f4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("f4"))


def config_of(**sections: dict[str, object]) -> RunConfig:
    return RunConfig.model_validate({"base_model": "m", "dataset": "d", **sections})


def pack(
    source: Path,
    tokenizer: Path,
    say: Callable[[str], None] = silent,
    seed: int = 1,
    held_out: Path | None = None,
    packing: dict[str, object] | None = None,
    **data: object,
) -> Packing:
    if held_out is not None:
        data["eval_dataset"] = str(held_out)
    config = config_of(data=data, packing=packing or {})
    mix = tuple(Path(item.dataset) for item in config.data.mix)
    template = Path(config.data.chat_template) if config.data.chat_template else None
    return prepare(config, seed, Places(source, held_out, mix, template), tokenizer, say)


def count_of(entries: Sequence[LeftOut]) -> int:
    return sum(entry.count for entry in entries)


def segments(data: PackedDataset) -> list[tuple[list[int], list[bool]]]:
    """Every packed example's tokens and which of them are trained, in order."""
    found: list[tuple[list[int], list[bool]]] = []
    for tokens_T, segments_T, is_trained_T in zip(data.tokens_NT, data.segments_NT, data.is_trained_NT, strict=True):
        for segment in range(1, int(segments_T.max()) + 1):
            here_T = segments_T == segment
            found.append((tokens_T[here_T].tolist(), is_trained_T[here_T].tolist()))
    return found


# --- rows ---


PADDING = 7


def piece_of(length: int, number: int) -> Rendered:
    """So many tokens, numbered through, every third trained."""
    tokens_L = (np.arange(length) + 1000 * number).astype(np.int32)
    return Rendered(tokens_L, np.arange(length) % 3 == 1)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 32), min_size=1, max_size=80),
    seq_len=st.integers(8, 32),
    num_block_tokens=st.integers(1, 200),
    method=st.sampled_from(["next-fit", "best-fit", "none"]),
)
def test_b18_packing_splits_loses_and_doubles_nothing(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int, num_block_tokens: int, method: str
) -> None:
    alone = [piece_of(min(length, seq_len), number) for number, length in enumerate(lengths, start=1)]
    folder = tmp_path_factory.mktemp("rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_BLOCK_TOKENS", num_block_tokens)
        facts = write_rows(folder, alone, seq_len, PADDING, method)
    files = {name: np.fromfile(folder / name, dtype=dtype) for name, dtype in rows.DTYPES.items()}
    tokens_NT, segments_NT, is_trained_NT = (
        files[name].reshape(facts.num_rows, seq_len) for name in list(rows.DTYPES)[:3]
    )
    found = [
        (tokens_T[segments_T == segment].tolist(), is_trained_T[segments_T == segment].tolist())
        for tokens_T, segments_T, is_trained_T in zip(tokens_NT, segments_NT, is_trained_NT, strict=True)
        for segment in range(1, int(segments_T.max()) + 1)
    ]
    expected = [(each.tokens_L.tolist(), each.is_trained_L.tolist()) for each in alone]
    assert sorted(found) == sorted(expected) and (found == expected or method == "best-fit")
    assert facts.num_trained_tokens == sum(int(each.is_trained_L.sum()) for each in alone)
    assert files[rows.NUM_TRAINED].tolist() == is_trained_NT.sum(axis=1).tolist()
    padding = segments_NT == 0
    assert (tokens_NT[padding] == PADDING).all() and not is_trained_NT[padding].any()
    assert facts.num_tokens == int((~padding).sum()) and sum(facts.histogram) == facts.num_examples == len(lengths)
    assert (segments_NT[:, 0] == 1).all() and facts.num_cut == 0
    used = (segments_NT > 0).sum(axis=1).tolist()
    firsts = [int((row == 1).sum()) for row in segments_NT]
    if method == "next-fit":
        assert all(now + first > seq_len for now, first in zip(used[:-1], firsts[1:], strict=True))
    if method == "none":
        assert facts.num_rows == len(lengths)
    if method == "best-fit" and num_block_tokens < seq_len:
        assert facts.num_rows <= len(lengths)


def test_best_fit_fills_rows_that_next_fit_leaves(tmp_path: Path) -> None:
    pieces = [piece_of(length, number) for number, length in enumerate([20, 30, 12, 2, 20], start=1)]
    num_rows = {}
    for method in ("next-fit", "best-fit", "none"):
        (tmp_path / method).mkdir()
        num_rows[method] = write_rows(tmp_path / method, pieces, 32, PADDING, method).num_rows
    assert num_rows == {"next-fit": 4, "best-fit": 3, "none": 5}


def test_b18_trained_tokens_are_the_same_packed_and_unpacked(f4: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", f4_conversations(10))
    data = pack(source, f4, seq_len=64).train
    unpacked: Counter[tuple[int, int]] = Counter()
    for index, each in enumerate(Renderer(f4).render(list(read_examples(source)))):
        unpacked.update((index, token) for token in each.tokens_L[each.is_trained_L].tolist())
    repacked: Counter[tuple[int, int]] = Counter()
    for index, (tokens, is_trained) in enumerate(segments(data)):
        repacked.update((index, token) for token, flag in zip(tokens, is_trained, strict=True) if flag)
    assert repacked == unpacked and repacked.total() == data.num_trained_tokens
    assert data.num_rows < 10
    naive = int((data.tokens_NT != PAD).sum())  # the mask is lost on the way: all that is no padding is trained
    assert naive > data.num_trained_tokens


def test_b15_examples_of_a_row_are_told_apart_and_padding_is_none_of_them(tmp_path: Path) -> None:
    tokenizer = write_byte_tokenizer(tmp_path / "t", chat_template=None)
    texts = {"x": 9, "y": 5, "z": 12}
    examples = [{"prompt": name, "completion": name.upper() * (length - 2)} for name, length in texts.items()]
    data = pack(write_jsonl(tmp_path / "x.jsonl", examples), tokenizer, seq_len=32).train
    assert data.segments_NT.tolist() == [[1] * 9 + [2] * 5 + [3] * 12 + [0] * 6]
    assert data.is_trained_NT.tolist() == [
        ([False] + [True] * 8 + [False] + [True] * 4 + [False] + [True] * 11) + [False] * 6
    ]
    assert data.num_trained_tokens == 8 + 4 + 11
    naive = (
        int((data.tokens_NT != PAD).sum()) - 1
    )  # one text: each example's first token is the target of another's last
    assert naive == data.num_trained_tokens + 2


def test_b16_no_piece_begins_inside_an_answer(f4: Path, tmp_path: Path) -> None:
    long_rows = [conversation("user: qqqq", "assistant: aaaaa"), conversation("user: qqqqqq", "assistant: a")]
    source = write_jsonl(tmp_path / "x.jsonl", [*long_rows, conversation("user: q", "assistant: ab")])
    said: list[str] = []
    data = pack(source, f4, said.append, seq_len=10).train
    assert [text_of(tokens) for tokens, _ in segments(data)] == ["<user>q<turn_end><assistant>ab<turn_end>"]
    assert count_of(data.facts.too_long) == 2 and data.facts.too_long[0].lines == (1, 2)
    assert any("Dropped 2 of 3 examples" in text and "lines 1, 2" in text for text in said)
    listed = [json.loads(line) for line in (folder_of(data.fingerprint) / "left_out.jsonl").read_text().splitlines()]
    assert listed == [
        {"line": 1, "kind": "too long", "source": str(source), "tokens": 13},
        {"line": 2, "kind": "too long", "source": str(source), "tokens": 11},
    ]
    rendered = Renderer(f4).render(list(read_examples(source)))
    naive = [piece for each in rendered for piece in np.split(each.tokens_L, range(10, len(each.tokens_L), 10))]
    assert any(piece[0] not in (USER, ASSISTANT) for piece in naive)


@pytest.mark.parametrize(("num_read", "num_held_out"), [(100, 5), (20, 1)])
def test_b20_small_parts_are_used_in_full(f4: Path, tmp_path: Path, num_read: int, num_held_out: int) -> None:
    texts = [conversation(f"user: {i:04}", "assistant: " + "a" * 12) for i in range(num_read)]
    source = write_jsonl(tmp_path / "x.jsonl", texts)  # 20 tokens each
    both = pack(source, f4, seq_len=512, eval_examples=num_held_out)
    assert both.held_out is not None and both.held_out.facts.longest_tokens == 20
    assert (both.train.num_examples, both.held_out.num_examples) == (num_read - num_held_out, num_held_out)
    assert both.train.num_rows == math.ceil((num_read - num_held_out) / 25) and both.held_out.num_rows == 1
    order = plan_order(config_of(train={"micro_batch_rows": 4}), 1, both.train.num_rows)
    assert order.num_steps == 1 and len(order.rows_of_step(1)) == both.train.num_rows
    naive = num_held_out * 20 // 512 // 4  # estimated and rounded down
    assert naive == 0
    tokens = sorted(text_of(t) for part in (both.train, both.held_out) for t, _ in segments(part))
    assert len(set(tokens)) == num_read


def test_b20_a_part_without_rows_is_an_early_error(f4: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", f3_rows(4))
    with pytest.raises(BadData, match=r"eval_examples is 4, and .* has 4 examples"):
        pack(source, f4, eval_examples=4)
    long_one = write_jsonl(tmp_path / "y.jsonl", [conversation("user: q", "assistant: " + "a" * 100)])
    with pytest.raises(BadData, match="No held-out example"):
        pack(source, f4, held_out=long_one, seq_len=64)


def test_b27_examples_whose_prompt_fills_a_row_stop_the_run_or_are_counted(f4: Path, tmp_path: Path) -> None:
    long_rows = [{"prompt": "u" * (200 + i), "completion": "a" * 5} for i in range(8)]
    source = write_jsonl(tmp_path / "long.jsonl", long_rows)
    with pytest.raises(BadData, match=r"8 of 8 are longer than data\.seq_len, 64 tokens; the shortest has 209"):
        pack(source, f4, seq_len=64)
    assert pack(source, f4, seq_len=209).train.num_examples == 1
    mixed = write_jsonl(tmp_path / "mixed.jsonl", [*long_rows[:6], *f3_rows(2)])
    data = pack(mixed, f4, seq_len=64).train
    assert data.num_examples == 2 and count_of(data.facts.too_long) == 6
    assert data.num_trained_tokens == len("a0") + len("a1a1") + 2
    cut = [each.is_trained_L[:64] for each in Renderer(f4).render(list(read_examples(source)))]
    assert not any(is_trained.any() for is_trained in cut)  # the naive way: rows that train on nothing


def test_b24_an_example_without_an_answer_is_dropped_and_told(f4: Path, tmp_path: Path) -> None:
    rows_ = [conversation("user: q", "assistant: a"), conversation("user: q")]
    said: list[str] = []
    data = pack(write_jsonl(tmp_path / "x.jsonl", rows_), f4, said.append).train
    assert data.num_examples == 1 and data.facts.no_answer[0].lines == (2,)
    assert any("for having no assistant's message to train (x.jsonl line 2)" in text for text in said)
    with pytest.raises(BadData, match="1 of 1 have no assistant's message to train"):
        pack(write_jsonl(tmp_path / "y.jsonl", rows_[1:]), f4)


def test_b29_padding_with_the_end_token_leaves_each_end_trained(tmp_path: Path) -> None:
    tokenizer = write_byte_tokenizer(tmp_path / "t", chat_template=None, pad_token="<end>")
    source = write_jsonl(
        tmp_path / "x.jsonl", [{"prompt": "q", "completion": "a" * 8}, {"prompt": "q", "completion": "b" * 18}]
    )
    data = pack(source, tokenizer, seq_len=32).train
    for tokens, is_trained in segments(data):
        assert tokens.count(END) == 1 and tokens[-1] == END and is_trained[-1]
    is_end = data.tokens_NT == END
    assert (data.is_trained_NT & is_end).sum() == 2 and is_end.sum() > 2
    naive = data.is_trained_NT & (data.tokens_NT != END)  # every padding id is masked
    assert not (naive & is_end).any()


# --- the cache ---


def test_an_opened_data_set_is_what_was_built(f4: Path, tmp_path: Path) -> None:
    said: list[str] = []
    source = write_jsonl(tmp_path / "x.jsonl", f3_rows())
    built = pack(source, f4, said.append, seq_len=64).train
    assert any("64 of 64 examples" in text and "tokens are trained" in text for text in said)
    source.unlink()
    opened = open_packed(built.fingerprint)
    assert opened is not None and opened.facts == built.facts
    assert (opened.tokens_NT == built.tokens_NT).all() and not opened.tokens_NT.flags.writeable
    assert (opened.num_rows, opened.seq_len) == opened.tokens_NT.shape
    assert opened.facts.largest_token_id == 262 and 0.5 < opened.facts.fill <= 1.0
    durable.verify(folder_of(built.fingerprint))
    assert open_packed("0" * 64) is None


def test_opening_needs_no_tokenizer(f4: Path, tmp_path: Path, home: Path) -> None:
    fingerprint = pack(write_jsonl(tmp_path / "x.jsonl", f3_rows()), f4).train.fingerprint
    script = (
        "import sys; from hotlap.data.packed import open_packed\n"
        f"data = open_packed({fingerprint!r}); assert data.num_examples == 64\n"
        "print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", ["missing", "short", "manifest", "flipped", "flipped chunk"])
def test_a_damaged_data_set_is_built_anew(f4: Path, tmp_path: Path, home: Path, harm: str) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", f3_rows())
    first = pack(source, f4, seq_len=64).train
    before = first.tokens_NT.copy()
    folder = folder_of(first.fingerprint)
    if harm == "missing":
        (folder / "segments.bin").unlink()
    elif harm == "short":
        os.truncate(folder / "tokens.bin", 8)
    elif harm == "manifest":
        (folder / "manifest.json").write_text("{}")
    else:  # sizes do not show it
        (chunk,) = (home / "tokenized").glob("*.chunks/00000")
        _flip_a_bit(chunk / "tokens.bin" if harm == "flipped chunk" else folder / "is_trained.bin")
        if harm == "flipped chunk":  # and the rows must be made from it again
            durable.remove_tree(folder)
    assert "flipped" in harm or open_packed(first.fingerprint) is None
    said: list[str] = []
    again = pack(source, f4, said.append, seq_len=64).train
    assert (again.tokens_NT == before).all() and any("damaged" in text for text in said)


def test_b43_whatever_changes_tokens_changes_the_fingerprint(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", f3_rows())
    tokenizer = write_byte_tokenizer(tmp_path / "t")
    base = pack(source, tokenizer, seq_len=64).train
    seen = {base.fingerprint}

    def is_new(data: PackedDataset) -> bool:
        is_seen = data.fingerprint in seen
        seen.add(data.fingerprint)
        return not is_seen

    status = source.stat()
    source.write_bytes(source.read_bytes().replace(b'q1"', b'Q1"'))
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    naive = (source.name, source.stat().st_size, source.stat().st_mtime_ns)
    assert naive == (source.name, status.st_size, status.st_mtime_ns)
    changed = pack(source, tokenizer, seq_len=64).train
    assert is_new(changed) and (changed.tokens_NT != base.tokens_NT).any()

    assert is_new(pack(source, tokenizer, seq_len=65).train)
    assert is_new(pack(source, write_byte_tokenizer(tmp_path / "t2", F4_BEGIN), seq_len=64).train)
    assert is_new(pack(source, write_byte_tokenizer(tmp_path / "t3", num_entries=300), seq_len=64).train)
    assert is_new(pack(source, tokenizer, seq_len=64, eval_examples=4).train)
    assert is_new(pack(source, tokenizer, seq_len=64, eval_examples=4, seed=2).train)
    assert is_new(pack(source, tokenizer, seq_len=64, eval_examples=5).train)


@pytest.mark.parametrize(("names", "text"), [
    (("x.jsonl", "x.txt"), '{"text": "hello there"}\n'),
    (("x.csv", "x.tsv"), "prompt,completion,\tprompt\tcompletion\t,z\na,b,\tc\td\t,z\n"),
])  # fmt: skip
def test_the_same_bytes_read_as_something_else_are_another_data_set(
    names: tuple[str, str], text: str, tmp_path: Path
) -> None:
    tokenizer = write_byte_tokenizer(tmp_path / "t", chat_template=None)
    expected = {
        "x.jsonl": "hello there<end>",
        "x.txt": '{"text": "hello there"}<end>',
        "x.csv": "ab<end>",
        "x.tsv": "cd<end>",
    }
    for name in names:
        (tmp_path / name).write_text(text)
        ((tokens, _),) = segments(pack(tmp_path / name, tokenizer).train)
        assert text_of(tokens) == expected[name]


@pytest.mark.parametrize(("template", "doubt"), [
    (F4_BEGIN, None),
    ("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}", "ends an answer with no special token"),
    ("{{ strftime_now('%Y') }}" + F4_BEGIN, "writes the date of the day"),
])  # fmt: skip
def test_a_template_to_be_doubted_is_told(template: str, doubt: str | None, tmp_path: Path) -> None:
    source, said = write_jsonl(tmp_path / "x.jsonl", f3_rows(2)), list[str]()
    pack(source, write_byte_tokenizer(tmp_path / "t", template), said.append)
    assert [text for text in said if "data.chat_template" in text] == [text for text in said if doubt and doubt in text]
    assert sum("data.chat_template" in text for text in said) == (doubt is not None)


def test_b43_what_changes_no_token_keeps_the_fingerprint(tmp_path: Path, f4: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", f3_rows())
    base = pack(source, f4, seq_len=64).train.fingerprint
    other = RunConfig.model_validate(
        {"base_model": "m", "dataset": "d", "output_dir": "elsewhere", "data": {"seq_len": 64}, "lora": {"rank": 3}}
    )
    moved = write_jsonl(tmp_path / "moved.jsonl", f3_rows())
    copied = write_byte_tokenizer(tmp_path / "copied")
    assert prepare(other, 99, Places(moved), copied, silent).train.fingerprint == base
    with_own_file = pack(source, f4, held_out=moved, seq_len=64)
    assert with_own_file.held_out is not None
    assert with_own_file.train.fingerprint == with_own_file.held_out.fingerprint == base


def test_b39_encodings_give_the_same_content(f4: Path, tmp_path: Path) -> None:
    plain = write_jsonl(
        tmp_path / "x.jsonl", [{"prompt": "你好", "completion": "😀"}, {"prompt": "é", "completion": "b"}]
    )
    other = tmp_path / "y.jsonl"
    other.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes().replace(b"\n", b"\r\n").removesuffix(b"\r\n"))
    one, two = (durable.read_manifest(folder_of(pack(path, f4).train.fingerprint)) for path in (plain, other))
    assert one["files"] == two["files"] and one["facts"] == two["facts"]


def test_a_source_that_changes_while_it_is_read_is_refused(
    f4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", f3_rows())

    render_each = render.Renderer.render_each

    def append_and_render(self: render.Renderer, examples: Sequence[Example]) -> object:
        with source.open("ab") as file:
            file.write(b'{"prompt": "late", "completion": "row"}\n')
        return render_each(self, examples)

    monkeypatch.setattr(render.Renderer, "render_each", append_and_render)
    with pytest.raises(BadData, match="changed while it was read"):
        pack(source, f4)


def test_a_source_that_was_other_for_a_while_is_refused(
    f4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are those of the fingerprint before and after, and may not have been when they were read."""
    source = write_jsonl(tmp_path / "x.jsonl", f3_rows())
    right = source.read_bytes()
    render_each, its_rows = render.Renderer.render_each, Source.rows

    def other_rows(self: Source) -> object:
        source.write_bytes(right.replace(b"q1", b"Q1"))
        return its_rows(self)

    def restore_and_render(self: render.Renderer, examples: Sequence[Example]) -> object:
        source.write_bytes(right)
        return render_each(self, examples)

    with monkeypatch.context() as patch:
        patch.setattr(Source, "rows", other_rows)
        patch.setattr(render.Renderer, "render_each", restore_and_render)
        with pytest.raises(BadData, match="changed while it was read"):
            pack(source, f4)
    assert source.read_bytes() == right
    data = pack(source, f4).train
    assert not any("Q1" in text_of(tokens) for tokens, _ in data.examples()) and data.num_examples == 64


def test_the_day_that_a_template_writes_is_part_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run opens its rows by fingerprint on any day; made anew on another day, they are other rows and seen to be."""
    source = write_jsonl(tmp_path / "x.jsonl", f3_rows(3))
    dated = write_byte_tokenizer(tmp_path / "dated", "{{ strftime_now('%Y-%m-%d') }}" + F4_BEGIN)
    undated = write_byte_tokenizer(tmp_path / "undated", F4_BEGIN)
    now_s, day_s = clock.wall_s(), 86400.0
    today = [pack(source, tokenizer).train for tokenizer in (dated, undated)]
    assert pack(source, dated).train.fingerprint == today[0].fingerprint
    monkeypatch.setattr(clock, "wall_s", lambda: now_s + day_s)
    tomorrow = [pack(source, tokenizer).train.fingerprint for tokenizer in (dated, undated)]
    assert tomorrow[0] != today[0].fingerprint and tomorrow[1] == today[1].fingerprint
    reopened = open_packed(today[0].fingerprint)
    assert reopened is not None and (reopened.tokens_NT == today[0].tokens_NT).all()
    template = tmp_path / "own.jinja"
    template.write_text(F4_BEGIN)  # a template without takes the dated one's place
    config = RunConfig.model_validate({"base_model": "m", "dataset": "d", "data": {"chat_template": str(template)}})
    places = Places(source, chat_template=template)
    own = [prepare(config, 1, places, dated, silent).train.fingerprint]
    monkeypatch.setattr(clock, "wall_s", lambda: now_s)
    assert prepare(config, 1, places, dated, silent).train.fingerprint == own[0]


def test_an_empty_part_is_told(f4: Path, tmp_path: Path) -> None:
    folder, said = tmp_path / "parts", list[str]()
    folder.mkdir()
    write_jsonl(folder / "one.jsonl", f3_rows(2))
    (folder / "two.jsonl").write_bytes(b"")
    assert pack(folder, f4, said.append).train.num_examples == 2
    assert [text for text in said if "is empty" in text] == [
        f"{folder / 'two.jsonl'} is empty: it has 0 bytes and gives no examples."
    ]


def test_an_example_on_both_sides_is_told(f4: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", f3_rows(9))
    said = list[str]()
    apart = pack(source, f4, said.append, held_out=write_jsonl(tmp_path / "apart.jsonl", f3_rows(12)[9:]))
    assert apart.num_also_trained == 0 and not any("as well" in text for text in said)
    held_out = write_jsonl(tmp_path / "leaky.jsonl", [*f3_rows(12)[7:], f3_rows(9)[8]])
    leaky = pack(source, f4, said.append, held_out=held_out, packing={"method": "best-fit"})
    assert leaky.num_also_trained == 3  # rows 7 and 8, and 8 again
    assert said[-1].startswith("3 of 6 held-out examples stand among the trained ones as well, token for token")
    doubled = write_jsonl(tmp_path / "doubled.jsonl", f3_rows(6) * 2)
    split = pack(doubled, f4, eval_examples=4)
    assert split.held_out is not None
    trained = {text_of(tokens) for tokens, _ in split.train.examples()}
    assert split.num_also_trained == sum(text_of(tokens) in trained for tokens, _ in split.held_out.examples()) > 0


def test_examples_that_are_alone_in_their_rows_have_no_filling(f4: Path, tmp_path: Path) -> None:
    source, said = write_jsonl(tmp_path / "x.jsonl", f3_rows(4)), list[str]()
    pack(source, f4, said.append, packing={"method": "none"}, seq_len=64)
    assert any("4 of 4 examples, each in a row of its own, of 64 tokens at most; " in text for text in said)


def test_a_refused_build_leaves_nothing(f4: Path, tmp_path: Path, home: Path) -> None:
    source = tmp_path / "x.jsonl"
    source.write_text('{"prompt": "q", "completion": "a"}\n{"prompt": "q"}\n')
    with pytest.raises(BadData, match="line 2"):
        pack(source, f4)
    assert not (home / "packed").exists()
    assert [path.suffix for path in (home / "tokenized").iterdir()] == [".lock"]


# --- one builder at a time ---

BUILD = """
import sys, time
from pathlib import Path
from hotlap import durable
from hotlap.data.cache import build_once
final, log, pause_s = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
def build(staged):
    with log.open("a") as file:
        file.write("built\\n")
    durable.write_synced(staged / "rows", b"rows")
    time.sleep(pause_s)
    return {"num_rows": 1}
build_once(final, build, print)
print("done", (final / "rows").read_bytes(), flush=True)
"""


def start_build(final: Path, log: Path, pause_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILD, str(final), str(log), str(pause_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = clock.Deadline(clock.monotonic_s() + 30.0)
    while not is_so():
        assert not deadline.is_over()
        clock.sleep_s(0.01)


def test_several_processes_build_once(tmp_path: Path) -> None:
    children = [start_build(tmp_path / "packed" / "x", tmp_path / "log", 0.5) for _ in range(3)]
    outputs = [child.communicate(timeout=60)[0] for child in children]
    assert all("done b'rows'" in output for output in outputs)
    assert (tmp_path / "log").read_text() == "built\n"
    assert not list((tmp_path / "packed").glob("*.staging"))


def test_a_killed_builder_is_cleaned_up_and_a_live_one_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    log = tmp_path / "log"
    killed, lives = start_build(folder / "killed", log, 60.0), start_build(folder / "lives", log, 60.0)
    wait_until(lambda: log.exists() and log.read_text().count("\n") == 2)
    wait_until(lambda: len(list(folder.glob(".*.staging/rows"))) == 2)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()

    def build(staged: Path) -> dict[str, int]:
        durable.write_synced(staged / "rows", b"other rows")
        return {}

    build_once(folder / "other", build, silent)
    (left,) = folder.glob(".*.staging")
    assert left.name.startswith(f".lives.{lives.pid}-")
    build_once(folder / "killed", build, silent)
    assert (folder / "killed" / "rows").read_bytes() == b"other rows"
    lives.kill()
    lives.communicate()


def test_a_volume_without_locks_still_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    final = tmp_path / "packed" / "x"

    def build_while_another_publishes(staged: Path) -> dict[str, int]:
        durable.write_synced(staged / "rows", b"mine")
        rival = tmp_path / "rival"
        rival.mkdir()
        durable.write_synced(rival / "rows", b"theirs")
        durable.publish(rival, final)
        return {}

    build_once(final, build_while_another_publishes, silent)
    assert (final / "rows").read_bytes() == b"theirs"
    assert not list(final.parent.glob(".*.staging"))


# --- order ---


def stream(order: Order, first_step: int = 1) -> list[int]:
    return [row for step in range(first_step, order.num_steps + 1) for row in order.rows_of_step(step).tolist()]


def test_b02_order_after_a_stop_goes_on_in_every_epoch() -> None:
    order = plan_order(config_of(train={"micro_batch_rows": 8, "epochs": 3}), 5, 64)
    whole = stream(order)
    assert len(whole) == 192 and order.num_steps == 24
    epochs = [whole[at : at + 64] for at in range(0, 192, 64)]
    assert all(sorted(epoch) == list(range(64)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    for stop in (3, 11, 21):
        resumed = whole[: stop * 8] + stream(order, stop + 1)
        assert resumed == whole
        # The naive way: the loader of the resumed process counts its epochs from 0 again.
        rest = stop * 8 % 64
        naive = permutation(5, 0, 64)[rest : rest + 8].tolist()
        assert (naive == order.rows_of_step(stop + 1).tolist()) == (stop == 3)


@pytest.mark.parametrize(("accumulation", "first_micro_batch"), [(4, 13), (3, 10)])
def test_b04_order_counts_micro_batches_not_steps(accumulation: int, first_micro_batch: int) -> None:
    train = {"micro_batch_rows": 2, "grad_accumulation": accumulation, "epochs": 2}
    order = plan_order(config_of(train=train), 5, 64)
    whole = stream(order)
    micro_batches = [whole[at : at + 2] for at in range(0, len(whole), 2)]
    assert order.rows_of_step(4).tolist()[:2] == micro_batches[first_micro_batch - 1]
    assert whole[: 3 * accumulation * 2] + stream(order, 4) == whole
    naive = micro_batches[3]  # as many micro-batches skipped as steps were made
    assert naive != order.rows_of_step(4).tolist()[:2]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    num_rows=st.integers(1, 50),
    rows_per_step=st.integers(1, 70),
    total_rows=st.integers(1, 200),
)
def test_order_is_epochs_of_permutations_cut_anywhere(
    seed: int, num_rows: int, rows_per_step: int, total_rows: int
) -> None:
    order = Order(seed, num_rows, rows_per_step, math.ceil(total_rows / rows_per_step), total_rows)
    steps = [order.rows_of_step(step).tolist() for step in range(1, order.num_steps + 1)]
    whole = [row for step in steps for row in step]
    assert len(whole) == total_rows and all(len(step) == rows_per_step for step in steps[:-1])
    for at in range(0, total_rows, num_rows):
        epoch = whole[at : at + num_rows]
        assert len(set(epoch)) == len(epoch) and set(epoch) <= set(range(num_rows))
    for step in reversed(range(1, order.num_steps + 1)):
        assert order.rows_of_step(step).tolist() == steps[step - 1]


def test_permutations_are_the_same_for_ever() -> None:
    assert permutation(0, 0, 8).tolist() == EXPECTED[0]
    assert permutation(2**31 - 1, 3, 8).tolist() == EXPECTED[1]
    assert not permutation(0, 0, 8).flags.writeable
    different = [permutation(seed, epoch, 32).tolist() for seed in range(3) for epoch in range(3)]
    assert all(one != other for one, other in pairwise(different))
    assert permutation(1, 0, 32).tolist() != permutation(0, 1, 32).tolist()


EXPECTED = ([0, 2, 1, 5, 4, 3, 6, 7], [1, 7, 4, 0, 2, 3, 6, 5])


@pytest.mark.parametrize(
    ("train", "num_rows", "num_steps", "total_rows"),
    [
        ({"epochs": 1}, 64, 16, 64),
        ({"epochs": 0.1}, 30, 1, 3),
        ({"epochs": 0.07}, 100, 2, 7),
        ({"epochs": 1.5}, 5, 2, 8),
        ({"epochs": 1e-9}, 5, 1, 1),
        ({"max_steps": 7, "epochs": 99}, 5, 7, 28),
    ],
)
def test_the_horizon(train: dict[str, float], num_rows: int, num_steps: int, total_rows: int) -> None:
    order = plan_order(config_of(train={"micro_batch_rows": 4, **train}), 1, num_rows)
    assert (order.num_steps, order.total_rows) == (num_steps, total_rows)
    assert len(stream(order)) == total_rows
    if train == {"epochs": 0.07}:
        assert math.ceil(0.07 * 100) == 8  # the naive way counts a binary hair as a row


def test_held_out_examples_are_drawn_by_the_seed_and_never_trained(f4: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", f3_rows())
    drawn: list[set[str]] = []
    for seed in (1, 2):
        both = pack(source, f4, seq_len=64, eval_examples=8, seed=seed)
        assert both.held_out is not None
        held_out = {text_of(tokens) for tokens, _ in segments(both.held_out)}
        assert len(held_out) == 8 and not held_out & {text_of(tokens) for tokens, _ in segments(both.train)}
        drawn.append(held_out)
    assert drawn[0] != drawn[1]

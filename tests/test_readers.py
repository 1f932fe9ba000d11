"""Reading examples: what is accepted, and what is refused with which line and reason."""

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from fixtures_data import conversation, f3_rows, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from hotlap.data.readers import MAX_LINE_BYTES, BadRow, Message, Source, read_examples
from hotlap.errors import BadData, MissingArtifact

FOREIGN = [
    conversation("user: 你好", "assistant: 您好 😀"),
    conversation("user: café", "assistant: cafe\u0301"),
    conversation("system: brief", "user: 1\u20282", "assistant: a\u0085b"),
    conversation("user: 🧵", "assistant: 👩‍👩‍👧"),
    {"prompt": "q", "completion": "ä"},
]


def contents(path: Path) -> list[list[str]]:
    return [[message.content for message in example.messages] for example in read_examples(path)]


def refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(BadData) as caught:
        list(read_examples(path))
    assert caught.value.exit_code == 2 and caught.value.reason == "data"
    return str(caught.value)


def line(row: object) -> bytes:
    return json.dumps(row).encode() + b"\n"


GOOD = line({"prompt": "q", "completion": "a"})


def test_a_row_of_prompt_and_completion_becomes_two_messages(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", f3_rows(2))
    first, second = read_examples(path)
    assert first.messages == (Message("user", "q0"), Message("assistant", "a0"))
    assert second.messages[1].content == "a1a1"
    assert (first.line, second.line, first.kind) == (1, 2, "completion")
    assert first.place == f"{path} line 1"


def test_a_row_of_messages_keeps_its_turns(tmp_path: Path) -> None:
    row = conversation("system: s", "user: u", "assistant: a", "user: v", "assistant: b")
    (example,) = read_examples(write_jsonl(tmp_path / "x.jsonl", [row]))
    assert [(m.role, m.content) for m in example.messages] == [
        ("system", "s"),
        ("user", "u"),
        ("assistant", "a"),
        ("user", "v"),
        ("assistant", "b"),
    ]
    assert example.kind == "messages"


def test_blank_lines_count_as_lines_but_not_as_examples(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n" + GOOD + b"  \t\r\n" + GOOD)
    assert [example.line for example in read_examples(path)] == [2, 4]


def test_b39_encodings_and_line_ends_give_the_same_rows(tmp_path: Path) -> None:
    plain = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in FOREIGN).encode()
    variants = {
        "plain": plain,
        "bom": b"\xef\xbb\xbf" + plain,
        "crlf": plain.replace(b"\n", b"\r\n"),
        "no_final_newline": plain.removesuffix(b"\n"),
        "escaped": "".join(json.dumps(row) + "\n" for row in FOREIGN).encode(),
    }
    read = {}
    for name, data in variants.items():
        path = tmp_path / name
        path.write_bytes(data)
        read[name] = contents(path)
    expected = [[m["content"] for m in row["messages"]] for row in FOREIGN[:4]] + [["q", "ä"]]
    assert all(rows == expected for rows in read.values())
    # The naive way splits where Unicode sees a line's end, and tears a row apart.
    assert len(plain.decode().splitlines()) > len(FOREIGN)


def test_b39_the_locale_has_no_influence(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", FOREIGN)
    script = (
        "import sys; from pathlib import Path; from hotlap.data.readers import read_examples\n"
        "rows = [[m.content for m in e.messages] for e in read_examples(Path(sys.argv[1]))]\n"
        "print(ascii(rows))\n"
        "try:\n    print(ascii(open(sys.argv[1]).read()) == sys.argv[2])\nexcept UnicodeDecodeError: print(False)\n"
    )
    naive = ascii(path.read_text(encoding="utf-8"))
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), naive], env=env, capture_output=True, text=True, check=True
    )
    rows, naive_is_right = done.stdout.splitlines()
    assert rows == ascii(contents(path))
    assert naive_is_right == "False"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_b39_another_encoding_is_named(tmp_path: Path, encoding: str) -> None:
    message = refusal(tmp_path / "x", GOOD.decode().encode(encoding))
    assert f"is {encoding.upper()}" in message and "Save the file as UTF-8" in message


def test_b39_bytes_that_are_not_utf8_are_named_by_line_and_offset(tmp_path: Path) -> None:
    data = '{"prompt": "q", "completion": "café"}\n'.encode("cp1252")
    message = refusal(tmp_path / "x", GOOD + data)
    at = data.index(b"\xe9")
    assert "line 2" in message and f"byte {at + 1} of the line" in message
    assert f"offset {len(GOOD) + at} in the file" in message
    assert "\ufffd" in (GOOD + data).decode(errors="replace")  # the naive way: a silent replacement


def test_b41_a_field_that_is_null_for_long_does_not_matter(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "completion": "a", "system": None} for i in range(20_000)]
    rows[-1]["system"] = "text"
    rows[7]["weight"] = {"nested": [1, 2.5, True]}
    path = write_jsonl(tmp_path / "x", rows)
    assert sum(1 for _ in read_examples(path)) == 20_000
    forth, back = (contents(write_jsonl(tmp_path / "y", part)) for part in (rows[-100:], rows[:-101:-1]))
    assert back == forth[::-1]


def test_b41_content_of_another_kind_is_named(tmp_path: Path) -> None:
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "value": "i"}]}]}
    path = tmp_path / "x"
    path.write_bytes(line(conversation("user: hi")) + line(parts))
    assert contents(path) == [["hi"], ["hi"]]
    picture = {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}
    message = refusal(path, line(conversation("user: hi")) + line(picture))
    assert "line 2" in message and "'messages[0].content[0]' is of the type 'image'" in message
    naive = [type(row["messages"][0]["content"]) for row in (conversation("user: hi"), parts)]
    assert naive == [str, list]  # one column of one type cannot hold both


def test_b41_a_huge_line_is_refused_by_its_number_without_being_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.write(GOOD + b'{"prompt": "q", "completion": "')
        file.truncate(40_000_000)
    tracemalloc.start()
    with pytest.raises(BadData, match=f"line 2: it is longer than {MAX_LINE_BYTES:,} bytes"):
        list(read_examples(path))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4 * MAX_LINE_BYTES < 40_000_000


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "is empty"),
        (b"\n \n\r\n", "only blank lines"),
        (b"[]\n", "has no rows (3 bytes)"),
        (line([1]), "a list, not an object"),
        (line([{"prompt": "q", "completion": "a"}]) * 2, "a list, not an object"),
        (b"[\n", "the JSON array is broken"),
        (b'[{"prompt": "q", "completion": "a"},\n{"prompt": \n', "line 3: the JSON array is broken"),
        (GOOD + line({"prompt": "q", "completion": ""}), "line 2: 'completion' is empty"),
        (GOOD + line({"prompt": "q", "completion": {"a": 1}}), "line 2: 'completion' is an object, not text"),
        (GOOD + line({"prompt": None, "completion": "a"}), "line 2: 'prompt' is null"),
        (GOOD + line({"completion": "a"}), "line 2: 'prompt' is missing"),
        (line({"messages": []}), "'messages' is an empty list"),
        (line({"messages": None}), "'messages' is null"),
        (line({"messages": ["hi"]}), "'messages[0]' is text"),
        (line({"messages": [{"content": "hi"}]}), "'messages[0].role' is missing"),
        (line({"messages": [{"role": "robot", "content": "hi"}]}), "'messages[0].role' is 'robot'"),
        (line({"messages": [{"role": "user", "content": 7}]}), "'messages[0].content' is a number"),
        (line({"instruction": "q"}), "'output' is missing"),
        (line({"what": "q", "then": "a"}), "its keys: 'what', 'then'"),
        (line({"prompt": "q", "completion": "a", "messages": []}), "two examples in one"),
        (b'{"prompt": "q", "prompt": "r", "completion": "a"}\n', "key 'prompt' stands twice"),
        (b'{"prompt": "q", "completion": "a", "x": NaN}\n', "NaN is no JSON value"),
        (b'{"prompt": "q", "completion": "a"\n', "line 1: it is not JSON"),
        (b'{"prompt": "q", "completion": "\\ud83d"}\n', "half a character, \\ud83d"),
        (b'{"prompt": "q", "completion": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "recursion"),
    ],
)
def test_b42_what_is_no_example_is_refused_with_its_reason(tmp_path: Path, data: bytes, expected: str) -> None:
    message = refusal(tmp_path / "x.jsonl", data)
    assert expected in message and str(tmp_path / "x.jsonl") in message
    message.encode()  # can be printed, whatever stood in the file


def test_b42_reading_goes_on_behind_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "x"
    long_line = b'{"prompt": "' + b"q" * (MAX_LINE_BYTES + 5) + b'"}\n'
    path.write_bytes(GOOD + line({"prompt": "q"}) + long_line + b"no JSON\n" + GOOD)
    rows = list(Source(path).rows())
    assert [row.line for row in rows] == [1, 2, 3, 4, 5]
    assert [row.kind for row in rows if isinstance(row, BadRow)] == [
        "'completion' is missing",
        "a line that is too long",
        "not JSON",
    ]
    examples = read_examples(path)
    assert next(examples).line == 1
    with pytest.raises(BadData, match="line 2: 'completion' is missing"):
        next(examples)


def test_a_source_that_is_not_there_or_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingArtifact, match="does not exist"):
        list(read_examples(tmp_path / "nowhere.jsonl"))
    with pytest.raises(BadData, match="has no data file"):
        list(read_examples(tmp_path))


def test_the_file_is_read_as_examples_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(GOOD * 10 + b"no JSON\n")
    assert next(read_examples(path)).line == 1


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@settings(max_examples=50, deadline=None)
@given(
    pairs=st.lists(st.tuples(TEXT, TEXT), min_size=1),
    newline=st.sampled_from(["\n", "\r\n", "\n\n"]),
    is_escaped=st.booleans(),
)
def test_any_text_survives(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]], newline: str, is_escaped: bool
) -> None:
    path = tmp_path_factory.mktemp("text") / "x"
    rows = [json.dumps({"prompt": p, "completion": c}, ensure_ascii=is_escaped) for p, c in pairs]
    path.write_bytes(newline.join(rows).encode())
    assert contents(path) == [list(pair) for pair in pairs]

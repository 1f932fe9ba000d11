"""The formats people have: containers, forms, places; and the data sets beside this repository, counted by hand."""

import csv
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fixtures_data import conversation, f3_rows, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from hotlap.config_data import CleanConfig, ColumnsConfig, DataConfig
from hotlap.data.examples import BadRow, Example, Message
from hotlap.data.places import container_of, files_of
from hotlap.data.readers import Source
from hotlap.data.records import MAX_LINE_BYTES
from hotlap.errors import BadData

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not here")


def read(path: Path, **data: Any) -> list[Example]:
    rows = list(Source(path, DataConfig(**data)).rows())
    bad = [row for row in rows if isinstance(row, BadRow)]
    assert not bad, bad
    return [row for row in rows if isinstance(row, Example)]


def one(tmp_path: Path, row: dict[str, Any], **data: Any) -> Example:
    (example,) = read(write_jsonl(tmp_path / "one.jsonl", [row]), **data)
    return example


def reason(tmp_path: Path, row: dict[str, Any], **data: Any) -> str:
    (bad,) = Source(write_jsonl(tmp_path / "bad.jsonl", [row]), DataConfig(**data)).rows()
    assert isinstance(bad, BadRow)
    return bad.reason


def spoken(example: Example) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in example.messages]


# --- forms ---


@pytest.mark.parametrize(
    ("row", "form", "expected"),
    [
        ({"prompt": "q", "completion": "a"}, "completion", ["q", "a"]),
        ({"question": "q", "answer": "a"}, "question-answer", ["q", "a"]),
        ({"instruction": "q", "input": "", "output": "a"}, "alpaca", ["q", "a"]),
        ({"instruction": "q", "input": "x", "output": "a", "text": "q x a"}, "alpaca", ["q\nx", "a"]),
        ({"instruction": "q", "output": "a", "history": [["b", "c"]], "system": "s"}, "alpaca", [*"sbcqa"]),
        ({"text": "all"}, "text", ["all"]),
        (conversation("system: s", "user: q", "assistant: a"), "messages", ["s", "q", "a"]),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
            "sharegpt",
            ["s", "q", "a"],
        ),
        (
            {"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
            "sharegpt",
            ["q", "a"],
        ),
        ({"messages": {"role": ["user", "assistant"], "content": ["q", "a"]}}, "messages", ["q", "a"]),
        ({"messages": '[{"role": "user", "content": "q"}]', "id": 7}, "messages", ["q"]),
    ],
)  # fmt: skip
def test_a_form_is_found_by_its_keys_and_can_be_named(
    tmp_path: Path, row: dict[str, Any], form: str, expected: list[str]
) -> None:
    for settings_ in ({}, {"format": form}):
        example = one(tmp_path, row, **settings_)
        assert example.form == form and [text for _, text in spoken(example)] == expected


def test_b42_a_named_form_refuses_another(tmp_path: Path) -> None:
    alpaca = {"instruction": "q", "output": "a"}
    assert "not of the form 'messages'" in reason(tmp_path, alpaca, format="messages")
    assert "data.columns.prompt" in reason(tmp_path, {"frage": "q", "antwort": "a"})
    assert "two examples in one" in reason(tmp_path, {**alpaca, "question": "q", "answer": "a"})


def test_named_columns_make_a_form(tmp_path: Path) -> None:
    columns = ColumnsConfig(prompt="frage", completion="antwort", system="rolle")
    example = one(tmp_path, {"frage": "q", "antwort": "a", "rolle": "s"}, columns=columns)
    assert spoken(example) == [("system", "s"), ("user", "q"), ("assistant", "a")]
    assert "'antwort' is null" in reason(tmp_path, {"frage": "q", "antwort": None}, columns=columns)


def test_weights_choose_answers_and_may_choose_nothing_else(tmp_path: Path) -> None:
    rows = conversation("user: q", "assistant: a", "user: r", "assistant: b")["messages"]
    rows[1]["weight"], rows[3]["loss_weight"], rows[0]["weight"] = 0, 1.0, 0
    example = one(tmp_path, {"messages": rows})
    assert [example.messages[turn].is_trained for turn in example.answers] == [False, True]
    rows[1]["weight"] = 0.5
    assert "It may be 0 or 1" in reason(tmp_path, {"messages": rows})
    rows[1]["weight"], rows[2]["weight"] = 0, 1
    assert "only what the assistant says is trained" in reason(tmp_path, {"messages": rows})


CALL = {"name": "look", "arguments": {"at": "sky"}}


@pytest.mark.parametrize(
    "row",
    [
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "blue"},
                {"from": "gpt", "value": "It is blue."},
            ],
            "tools": json.dumps([{"name": "look", "description": "looks"}]),
        },
        {
            "messages": [
                {"role": "user", "content": "q"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {**CALL, "arguments": json.dumps(CALL["arguments"])},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "blue"},
                {"role": "assistant", "content": [{"type": "text", "text": "It is "}, "blue."]},
            ],
            "tools": [{"type": "function", "function": {"name": "look", "description": "looks"}}],
        },
    ],
)
def test_tool_turns_are_the_same_in_either_form(tmp_path: Path, row: dict[str, Any]) -> None:
    example = one(tmp_path, row)
    assert example.messages == (
        Message("user", "q"),
        Message("assistant", "", (CALL,)),
        Message("tool", "blue"),
        Message("assistant", "It is blue."),
    )
    assert example.tools == ({"type": "function", "function": {"name": "look", "description": "looks"}},)


def test_clean_up_and_system_prompt(tmp_path: Path) -> None:
    row = {"question": "<<1>> q", "answer": "2 <<1+1=2>>2"}
    clean = (CleanConfig(pattern="<<[^>]*>>"), CleanConfig(pattern=r"^(\d) ", replace=r"\1: "))
    example = one(tmp_path, row, clean=clean, system="Count.")
    assert spoken(example) == [("system", "Count."), ("user", "<<1>> q"), ("assistant", "2: 2")]
    assert "leaves nothing" in reason(tmp_path, row, clean=(CleanConfig(pattern=".*"),))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"conversations": [{"from": "nobody", "value": "q"}]}, "'conversations[0].from' is 'nobody'"),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, "'conversations[0].value' is not JSON"),
        ({"conversations": [{"from": "function_call", "value": "[1]"}]}, "[0]' is a number"),
        ({"messages": [{"role": "user", "content": "q"}], "tools": "["}, "'tools' is not JSON"),
        ({"messages": [{"role": "user", "content": "q"}], "tools": [{"x": 1}]}, "'tools[0].name' is missing"),
        ({"messages": [{"role": "user", "content": "q"}], "tools": [{"name": "\ud83d"}]}, "half a character"),
        ({"instruction": "q", "output": "a", "history": ["x"]}, "'history' is not a list of pairs"),
        ({"messages": [{"role": "user", "content": [7]}]}, "'messages[0].content[0]' is a number"),
    ],
)
def test_what_is_doubtful_is_refused(tmp_path: Path, row: dict[str, Any], expected: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (bad,) = Source(path).rows()
    assert isinstance(bad, BadRow) and expected in bad.reason
    bad.reason.encode()


# --- containers ---


ROWS = [{"prompt": f"q{i}é\u2028", "completion": f"a{i}\n😀"} for i in range(50)]


def written(folder: Path, kind: str, rows: Sequence[dict[str, Any]]) -> Path:
    path = folder / f"x.{kind}"
    if kind in ("json", "pretty.json"):
        path.write_text(json.dumps(rows, indent=1 if kind == "json" else None, ensure_ascii=False), encoding="utf-8")
    elif kind in ("csv", "tsv"):
        with path.open("w", encoding="utf-8-sig", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="," if kind == "csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "jsonl":
        write_jsonl(path, rows)
    else:
        write_table(path, rows)
    return path


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=7)
    elif path.name.endswith("file.arrow"):
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)


@pytest.mark.parametrize("kind", ["jsonl", "json", "pretty.json", "csv", "tsv", "parquet", "arrow", "file.arrow"])
def test_every_container_gives_the_same_examples(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind, ROWS)
    assert [[text for _, text in spoken(example)] for example in read(path)] == [list(row.values()) for row in ROWS]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow"])
def test_nested_rows_and_missing_fields_survive_every_container(tmp_path: Path, kind: str) -> None:
    rows = [conversation(f"user: q{i}", f"assistant: a{i}") for i in range(20)]
    rows[-1]["tools"] = json.dumps([{"name": "look"}])
    rows = [{"messages": row["messages"], "tools": row.get("tools")} for row in rows]
    examples = read(written(tmp_path, kind, rows))
    assert [len(example.tools) for example in examples] == [0] * 19 + [1]
    assert spoken(examples[3]) == [("user", "q3"), ("assistant", "a3")]


def test_rows_are_placed_where_they_begin(tmp_path: Path) -> None:
    array = tmp_path / "x.json"
    array.write_text('[\n{"prompt": "q",\n "completion": "a"},\n\n{"prompt": "q"}\n, {"text": "t"}]\n')
    assert [row.line for row in Source(array).rows()] == [2, 5, 6]
    table = tmp_path / "x.csv"
    table.write_text('prompt,completion\nq,"a\n\nb"\nq,a,more\nq,a\n')
    rows = list(Source(table).rows())
    assert [row.line for row in rows] == [2, 5, 6]
    assert isinstance(rows[1], BadRow) and "3 cells and the header 2" in rows[1].reason
    text = tmp_path / "x.txt"
    text.write_bytes(b"\n one\r\ntwo\n\n \nthree\n")
    assert [(row.line, row.messages[0].content) for row in read(text)] == [(2, " one\ntwo"), (6, "three")]


def test_b41_a_json_array_is_read_in_bounded_memory(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "x.json"
    row = json.dumps({"prompt": "q" * 5000, "completion": "a"})
    path.write_text("[" + ",\n".join([row] * 3_000) + "]")
    tracemalloc.start()
    count = sum(1 for _ in Source(path).rows())
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 3_000 and peak_bytes < path.stat().st_size / 2
    huge = tmp_path / "huge.json"
    huge.write_text('[{"prompt": "q", "completion": "' + "a" * (2 * MAX_LINE_BYTES) + '"}]')
    with pytest.raises(BadData, match="an element is longer than"):
        list(Source(huge).rows())


def test_b39_a_json_array_knows_its_encoding(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    text = json.dumps(ROWS, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert len(read(path)) == 50
    path.write_bytes(text.encode("utf-16"))
    with pytest.raises(BadData, match="is UTF-16"):
        read(path)
    path.write_bytes('[{"prompt": "q", "completion": "é"}]'.encode("cp1252"))
    with pytest.raises(BadData, match="0xe9 near offset 32 is not UTF-8"):
        read(path)


def test_an_array_s_doubtful_element_is_a_bad_row_and_reading_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    good = '{"prompt": "q", "completion": "a"}'
    path.write_text(f'[{good}, {{"prompt": "q", "prompt": "r"}}, {{"x": NaN}}, {good}]')
    rows = list(Source(path).rows())
    assert [isinstance(row, BadRow) for row in rows] == [False, True, True, False]
    path.write_text(f"[{good}] {good}")
    with pytest.raises(BadData, match="something follows the array"):
        list(Source(path).rows())


def test_what_is_no_data_is_named(tmp_path: Path) -> None:
    for name, data in (("x.parquet", b"PAR1 no"), ("x.arrow", b"nothing"), ("x.jsonl.gz", b"\x1f\x8b")):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(BadData, match=name):
            list(Source(path).rows())
    header = tmp_path / "x.csv"
    header.write_text("prompt,prompt\nq,a\n")
    with pytest.raises(BadData, match="two have the same"):
        list(Source(header).rows())
    header.write_text("prompt,completion\n")
    with pytest.raises(BadData, match="has no rows"):
        list(Source(header).rows())


@pytest.mark.parametrize("substitute", [r"\2", r"\q"])
def test_what_takes_a_pattern_s_place_is_checked_before_any_row(substitute: str) -> None:
    with pytest.raises(ValueError, match="replace does not fit the pattern"):
        CleanConfig(pattern="(a)", replace=substitute)


@pytest.mark.parametrize("pattern", ["", "/abs/*", "**x"])
def test_a_pattern_that_is_none_is_named(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(BadData, match="is no pattern for files"):
        files_of(tmp_path, pattern)


def test_a_header_that_is_no_csv_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    for text in ('"prompt"x,completion\nq,a\n', "prompt,completion\rq,a\r"):
        path.write_bytes(text.encode())
        with pytest.raises(BadData, match="line 1 is no row of column names"):
            list(Source(path).rows())


def test_what_an_open_quote_takes_along_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('prompt,completion\nq,a\nq,"a\n' + "q,a\n" * 5 + 'q,"a"\nq,b\n')
    good, bad, last = Source(path).rows()
    assert isinstance(bad, BadRow) and bad.line == 3 and "goes on to line 9" in bad.reason
    assert [row.line for row in (good, last)] == [2, 10]


@settings(max_examples=30, deadline=None)
@given(
    texts=st.lists(
        st.tuples(*[st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\x00"), min_size=1)] * 2),
        min_size=1,
    ),
    kind=st.sampled_from(["jsonl", "json", "pretty.json", "csv", "parquet", "arrow"]),
)
def test_any_text_survives_any_container(
    tmp_path_factory: pytest.TempPathFactory, texts: list[tuple[str, str]], kind: str
) -> None:
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in texts]
    found = read(written(tmp_path_factory.mktemp("any"), kind, rows))
    assert [tuple(text for _, text in spoken(example)) for example in found] == texts


# --- folders ---


def test_a_folder_saved_by_datasets_is_read_in_its_own_order(tmp_path: Path) -> None:
    for split, rows in (("train", f3_rows(10)), ("test", f3_rows(3))):
        folder = tmp_path / "d" / split
        folder.mkdir(parents=True)
        names = [f"data-{part:05}-of-00002.arrow" for part in range(2)]
        for name, part in zip(names, (rows[:4], rows[4:] or rows[:1]), strict=True):
            write_table(folder / name, part)
        state = {"_data_files": [{"filename": name} for name in names]}
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert [spoken(example)[0][1] for example in read(tmp_path / "d")] == [f"q{i}" for i in range(10)]
    assert len(read(tmp_path / "d" / "test")) == 4
    (tmp_path / "d" / "train" / names[1]).unlink()
    with pytest.raises(BadData, match="lacks data-00001"):
        files_of(tmp_path / "d")


def test_a_hub_folder_s_training_split_is_found_or_asked_for(tmp_path: Path) -> None:
    for name in ("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        write_jsonl(path, f3_rows(2))
    (tmp_path / "README.md").write_text("# about")
    assert len(read(tmp_path)) == 4
    assert len(read(tmp_path, files="data/test*")) == 2
    with pytest.raises(BadData, match=r"no file that fits data.files = 'x\*'.*README.md"):
        read(tmp_path, files="x*")
    write_jsonl(tmp_path / "train.jsonl", f3_rows(2))
    with pytest.raises(BadData, match="2 kinds or folders"):
        read(tmp_path)


# --- the data beside this repository, counted by other means ---


@needs_shared
@pytest.mark.parametrize(
    ("name", "words", "form", "count", "num_messages"),
    [
        ("gsm8k/train.jsonl", "JSON lines", "question-answer", 7473, 2 * 7473),
        ("gsm8k/test.jsonl", "JSON lines", "question-answer", 1319, 2 * 1319),
        ("instruct/alpaca_en_demo.json", "a JSON array", "alpaca", 999, 2 * 999),
        ("instruct/identity.json", "a JSON array", "alpaca", 91, 2 * 91),
        ("instruct/glaive_toolcall_en_demo.json", "a JSON array", "sharegpt", 300, 2 * 746 + 2 * 211),
        ("instruct/v1_sft_demo.jsonl", "JSON lines", "messages", 500, 1000),
        ("text/tinyshakespeare.txt", "plain text, an example a paragraph", "text", 7222, 7222),
    ],
)
def test_shared_data_loads_with_the_counts_of_its_own(
    name: str, words: str, form: str, count: int, num_messages: int
) -> None:
    path = SHARED / name
    examples = read(path)
    assert container_of(path).words == words and {example.form for example in examples} == {form}
    assert (len(examples), sum(len(example.messages) for example in examples)) == (count, num_messages)
    if path.suffix == ".txt":
        assert [example.messages[0].content for example in examples] == [
            text.strip("\n") for text in path.read_text().split("\n\n") if text.strip()
        ]
    elif form != "sharegpt":
        rows = json.loads(path.read_text()) if path.suffix == ".json" else path.read_text().strip("\n").split("\n")
        assert len(rows) == count


@needs_shared
def test_shared_tool_calls_are_all_there() -> None:
    path = SHARED / "instruct/glaive_toolcall_en_demo.json"
    examples = read(path)
    calls = [call for example in examples for message in example.messages for call in message.tool_calls]
    roles = Counter(message.role for example in examples for message in example.messages)
    rows = json.loads(path.read_text())
    assert len(calls) == 211 and roles == {"user": 746, "assistant": 746 + 211, "tool": 211}
    assert (
        sum(bool(example.tools) for example in examples) == sum(row["tools"] not in ("", "[]") for row in rows) == 191
    )
    said = [message for row in rows for message in row["conversations"] if message["from"] == "function_call"]
    assert calls == [json.loads(message["value"]) for message in said]


@needs_shared
def test_shared_weights_are_kept() -> None:
    examples = read(SHARED / "instruct/v1_sft_demo.jsonl")
    assert all(example.messages[1].is_trained for example in examples)

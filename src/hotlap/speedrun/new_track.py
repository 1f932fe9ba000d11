"""Make a track: of one's own data, or freeze a folder whose rules were written by hand."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from hotlap import clock, durable
from hotlap.errors import BadData, HotlapError, UsageError
from hotlap.speedrun import inputs, track
from hotlap.speedrun.track import FileData, GeneratedData, Row, Spec, Track

Say = Callable[[str], None]
_TEST_SHARE = 5
_MIN_TEST_ROWS = 20
_MIN_ANSWER_TOKENS = 64
_NAMES = (("question", "answer"), ("prompt", "completion"))

_SPEC = """# Written by `hotlap speedrun new-track`. Once pins.json is beside it, it is frozen.
id = {id}
version = 1
title = {title}
frozen_on = "{date}"
source = {source}
data_prefix = {id}

[base_model]
name = {name}
reference = {reference}

[data]
type = "files"
train = "train.jsonl"
test = "test.jsonl"

[metric]
type = "{metric}"
target = {target}
prompt = "{{question}}\\n"
batch_rows = 16
{exact}
[limits]
adapter_params = 30_000_000
time_limit_s = 3600
memory_bytes = 17_179_869_184
num_processes = 512

[hardware]
kind = "cpu"
threads = {threads}

[verification]
looks = [3, 5, 8]
alpha = 0.05
protections = ["filesystem", "network", "processes", "privileges", "limits"]
"""


def freeze(folder: Path, say: Say) -> Track:
    """Pin a track's rules, files, base model and training rows as they are now: once, but for a provisional one.

    Raises:
        UsageError: it is frozen already.
        ConfigError: its rules are not valid.
    """
    spec = track.read_spec(folder)
    model = inputs.model_folder(folder, spec, say)
    rows = inputs.unpinned_train_rows(folder, spec)
    return track.freeze(folder, model, rows, _files(spec))


def _files(spec: Spec) -> list[str]:
    match spec.data:
        case GeneratedData() as data:
            names = [data.program]
        case FileData() as data:
            names = [data.train, data.test]
        case _:
            names = []
    kind, _, program = spec.base_model.reference.partition(":")
    names += [program] if kind == "make" else []
    return names if spec.environment is None else [*names, spec.environment]


def make(
    contest: Path,
    track_id: str,
    data: Path,
    metric: Literal["exact", "loss"],
    target: float,
    base_model: str,
    threads: int,
    say: Say,
) -> Track:
    """A frozen track of a JSONL file with `question` and `answer`, or `prompt` and `completion`. One row in five,
    chosen by its own hash, is held out for the test, so that equal rows never stand on both sides.

    Raises:
        BadData: rows are not of that form, or too few.
        UsageError: there is such a track already, or its name is no word.
        HotlapError: the base model is not here, or a rule is not valid; nothing is left behind.
    """
    if not track.is_id(track_id):
        raise UsageError(f"{track_id!r} names no track. A name is small letters, digits and dashes, as in my-data.")
    folder = contest / "tracks" / track_id
    if folder.exists():
        raise UsageError(f"{folder} is there already. Changed rules are a new version, in a folder of their own.")
    rows = _rows(data, metric)
    is_test = [int(durable.sha256_bytes(row["question"].encode())[:8], 16) % _TEST_SHARE == 0 for row in rows]
    num_test = sum(is_test)
    if num_test < _MIN_TEST_ROWS:
        raise BadData(f"{data} would give {num_test} test rows, and {_MIN_TEST_ROWS} are the least. Bring more rows.")
    if all(is_test):
        raise BadData(f"{data} would leave no row to train on: rows with one question stay together. Bring others.")
    # No token is shorter than a byte.
    answer_tokens = max(_MIN_ANSWER_TOKENS, 1 + max(len(row["answer"].encode()) for row in rows))
    say(f"{len(rows) - num_test} rows to train on, {num_test} held out for the test")
    files = {
        "spec.toml": _spec_text(track_id, data, metric, target, base_model, threads, answer_tokens).encode(),
        "train.jsonl": inputs.as_lines([row for row, held_out in zip(rows, is_test, strict=True) if not held_out]),
        "test.jsonl": inputs.as_lines([row for row, held_out in zip(rows, is_test, strict=True) if held_out]),
    }
    durable.make_dirs(folder)
    try:
        for name, content in files.items():
            durable.write_synced(folder / name, content)
        return freeze(folder, say)
    except HotlapError:
        # With other rules, or another base model, the name is free again.
        durable.remove_tree(folder)
        raise


def _spec_text(
    track_id: str, data: Path, metric: str, target: float, base_model: str, threads: int, answer_tokens: int
) -> str:
    def quoted(text: str) -> str:
        # A JSON string is a TOML string too, but for letters that JSON writes as two halves.
        return json.dumps(text, ensure_ascii=False)

    exact = f'rule = "exact"\nmax_new_tokens = {answer_tokens}\nstop = []\n' if metric == "exact" else ""
    plain = re.sub(r"[^A-Za-z0-9-]+", "-", Path(base_model).name).strip("-")
    return _SPEC.format(
        id=quoted(track_id),
        title=quoted(f"{data.stem}, {metric}"),
        date=clock.utc_text(clock.wall_s())[:10],
        source=quoted("the user's own data"),
        name=quoted(f"local/{plain}"),
        reference=quoted(base_model),
        metric=metric,
        target=target,
        exact=exact,
        threads=threads,
    )


def _rows(path: Path, metric: str) -> list[Row]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise BadData(f"{path} is not text in UTF-8.") from None
    rows: list[Row] = []
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        try:
            row = json.loads(line)
            names = next(names for names in _NAMES if all(isinstance(row.get(name), str) for name in names))
        except (ValueError, AttributeError, StopIteration):
            raise BadData(f"{path} line {number} has no texts `question` and `answer`.") from None
        answer = row[names[1]].strip()
        if metric == "exact" and "\n" in answer:
            raise BadData(
                f"{path} line {number} has an answer of several lines, and of what a model writes only the first line "
                f"is compared. Shorten it, or choose --metric loss."
            )
        rows.append({"question": row[names[0]], "answer": answer})
    return rows

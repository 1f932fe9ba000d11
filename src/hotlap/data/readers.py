"""Examples from JSON lines, one object a line, read strictly: what is doubtful is refused with its line number.

A line holds `prompt` and `completion`, or `messages` of `role` and `content`; other keys are ignored. UTF-8 with or
without a byte-order mark, whatever the locale says. Only `\\n` and `\\r\\n` end a line.
"""

import codecs
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from hotlap.errors import BadData, MissingArtifact

ROLES = ("system", "user", "assistant")

MAX_LINE_BYTES = 1 << 21
"""Longest line that is read. It bounds memory, and lies far beyond the longest row anybody trains on."""

_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True)
class Example:
    """One conversation. A `completion` example was given as prompt and completion: two messages, user and assistant."""

    messages: tuple[Message, ...]
    line: int
    kind: Literal["messages", "completion"] = "messages"
    source: str = ""

    @property
    def place(self) -> str:
        """Where it was read, for error messages."""
        return f"{self.source} line {self.line}" if self.source else f"Line {self.line}"


def read_examples(path: Path) -> Iterator[Example]:
    """The file's examples in order, read as they are asked for.

    Raises:
        BadData: a line is no example, or there is none; names the file, the line and the reason.
        MissingArtifact: there is no such file.
    """
    is_empty = True
    for line in _lines(path):
        is_empty = False
        try:
            yield _example(line.record(), line.number, str(path))
        except _NoExample as reason:
            raise BadData(f"{path} line {line.number}: {reason}") from None
    if is_empty:
        _refuse_empty(path)


def count_examples(path: Path) -> int:
    """How many examples `read_examples` would yield if every line is one.

    Raises: as `read_examples` does, for what can be seen without parsing.
    """
    count = sum(1 for _ in _lines(path))
    if count == 0:
        _refuse_empty(path)
    return count


def _refuse_empty(path: Path) -> NoReturn:
    size = path.stat().st_size
    what = "is empty" if size == 0 else f"has only blank lines ({size:,} bytes)"
    raise BadData(f"{path} {what}: there is nothing to train on. Write one JSON object a line.")


class _NoExample(Exception):
    """Why a line is no example, and what to do, in sentences."""


@dataclass(frozen=True)
class _Line:
    number: int
    offset: int
    data: bytes

    def record(self) -> Any:
        """
        Raises:
            _NoExample: the line is not UTF-8 or not JSON.
        """
        try:
            return _DECODER.decode(self.data.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise _NoExample(
                f"byte 0x{self.data[error.start]:02x} at byte {error.start + 1} of the line "
                f"(offset {self.offset + error.start} in the file) is not UTF-8. Save the file as UTF-8."
            ) from None
        except json.JSONDecodeError as error:
            reason = f"{error.msg} at column {error.colno}"
        except (ValueError, RecursionError) as error:
            reason = str(error)
        hint = " Enclosing brackets are not wanted." if self.data.lstrip().startswith(b"[") else ""
        raise _NoExample(f"it is not JSON that can be read: {reason}. Write one JSON object a line.{hint}") from None


def _lines(path: Path) -> Iterator[_Line]:
    """The lines that are not blank."""
    if not path.exists():
        raise MissingArtifact(f"{path} does not exist. Check data set paths in the configuration.")
    if not path.is_file():
        raise BadData(f"{path} is not a file. Name the JSON-lines file itself.")
    offset = number = 0
    with path.open("rb") as file:
        while data := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(data) > MAX_LINE_BYTES:
                raise BadData(
                    f"{path} line {number} is longer than {MAX_LINE_BYTES:,} bytes, the most a line may have. "
                    f"Split or remove it."
                )
            mark = _byte_order_mark(path, data) if number == 1 else 0
            if data[mark:].strip():
                yield _Line(number, offset + mark, data[mark:])
            offset += len(data)


def _byte_order_mark(path: Path, data: bytes) -> int:
    """Length of the UTF-8 mark that `data` begins with, if it does.

    Raises:
        BadData: it begins with the mark of another encoding.
    """
    for mark, encoding in _FOREIGN_MARKS:
        if data.startswith(mark):
            raise BadData(f"{path} is {encoding}, by its byte-order mark. Save the file as UTF-8.")
    return len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0


# UTF-32's little-endian mark begins with UTF-16's, so it is looked for first.
_FOREIGN_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} stands twice in one object")
    return record


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


_DECODER = json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_constant=_no_constant)


def _example(record: Any, line: int, source: str) -> Example:
    if not isinstance(record, dict):
        raise _NoExample(f"it is {_kind(record)}, not an object. Write one JSON object a line.")
    found = [form for form in _FORMS if any(key in record for key in form.keys)]
    if len(found) != 1:
        problem = "no example that hotlap knows" if not found else "two examples in one"
        keys = ", ".join(repr(key) for key in record)[:_SHOWN_CHARACTERS] or "none"
        raise _NoExample(f"it is {problem} (its keys: {keys}). Write either 'prompt' and 'completion', or 'messages'.")
    return Example(found[0].messages(record), line, found[0].kind, source)


def _prompt_and_completion(record: dict[str, Any]) -> tuple[Message, ...]:
    return (
        Message("user", _text(record, "prompt", "prompt")),
        Message("assistant", _text(record, "completion", "completion")),
    )


def _conversation(record: dict[str, Any]) -> tuple[Message, ...]:
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        what = "an empty list" if messages == [] else _kind(messages)
        raise _NoExample(f"'messages' is {what}. Make it a list of objects with 'role' and 'content'.")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def _message(message: Any, name: str) -> Message:
    if not isinstance(message, dict):
        raise _NoExample(f"'{name}' is {_kind(message)}. Make it an object with 'role' and 'content'.")
    role = _text(message, "role", f"{name}.role")
    if role not in ROLES:
        raise _NoExample(f"'{name}.role' is {role!r}. It may be {', '.join(ROLES)}.")
    return Message(role, _text(message, "content", f"{name}.content"))


def _text(record: dict[str, Any], key: str, name: str) -> str:
    if key not in record:
        raise _NoExample(f"'{name}' is missing. Give it text, or remove the line.")
    text = record[key]
    if not isinstance(text, str):
        raise _NoExample(f"'{name}' is {_kind(text)}, not text. Give it text, or remove the line.")
    if not text:
        raise _NoExample(f"'{name}' is empty. Give it text, or remove the line.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _NoExample(
            f"'{name}' has half a character, \\u{ord(text[error.start]):04x}, at position {error.start + 1}. "
            f"Write it with its other half, or remove it."
        ) from None
    return text


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


@dataclass(frozen=True)
class _Form:
    """One way to write an example: the keys that announce it, and how it becomes messages."""

    kind: Literal["messages", "completion"]
    keys: tuple[str, ...]
    messages: Callable[[dict[str, Any]], tuple[Message, ...]]


_FORMS = (
    _Form("messages", ("messages",), _conversation),
    _Form("completion", ("prompt", "completion"), _prompt_and_completion),
)

"""Records of text files, in order and read as they are asked for: JSON lines, a JSON array, CSV, plain text.

UTF-8 with or without a byte-order mark, whatever the locale says. Only `\\n` and `\\r\\n` end a line. A row that
cannot be read is yielded as a `BadRow` and reading goes on behind it; a file that cannot is refused.
"""

import codecs
import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from hotlap.data.examples import BadRow, NoExample
from hotlap.errors import BadData

MAX_LINE_BYTES = 1 << 21
"""Longest line, or element of an array, that is read. It bounds memory, and lies far beyond the longest row anybody
trains on."""

_READ_BYTES = 1 << 20
_WHITE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class Record:
    """A row's value, and where it begins: the line, or the row from 1, by `unit`."""

    value: Any
    line: int
    unit: str = "line"


Rows = Iterator[Record | BadRow]


def json_lines(path: Path) -> Rows:
    """One JSON value a line; blank lines are passed over."""
    for line in _lines(path):
        if isinstance(line, BadRow):
            yield line
        elif line.data.strip():
            try:
                yield Record(line.value(), line.number)
            except NoExample as reason:
                yield BadRow(line.number, reason.kind, str(reason))


# --- lines ---


@dataclass(frozen=True)
class _Line:
    number: int
    offset: int
    data: bytes

    def text(self) -> str:
        """
        Raises:
            NoExample: the line is not UTF-8.
        """
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise NoExample(
                f"byte 0x{self.data[error.start]:02x} at byte {error.start + 1} of the line "
                f"(offset {self.offset + error.start} in the file) is not UTF-8. Save the file as UTF-8.",
                "not UTF-8",
            ) from None

    def value(self) -> Any:
        """
        Raises:
            NoExample: the line is not UTF-8 or not JSON.
        """
        text = self.text()
        try:
            return _DECODER.decode(text)
        except json.JSONDecodeError as error:
            reason = f"{error.msg} at column {error.colno}"
        except (ValueError, RecursionError) as error:
            reason = str(error)
        hint = " Enclosing brackets are not wanted." if self.data.lstrip().startswith(b"[") else ""
        raise NoExample(
            f"it is not JSON that can be read: {reason}. Write one JSON object a line.{hint}", "not JSON"
        ) from None


def _lines(path: Path) -> Iterator[_Line | BadRow]:
    offset = number = 0
    with path.open("rb") as file:
        while data := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(data) > MAX_LINE_BYTES:
                yield BadRow(
                    number,
                    "a line that is too long",
                    f"it is longer than {MAX_LINE_BYTES:,} bytes, the most a line may have. Split or remove it.",
                )
                offset += len(data) + _skip_line(file)
                continue
            mark = byte_order_mark(path, data) if number == 1 else 0
            yield _Line(number, offset + mark, data[mark:])
            offset += len(data)


def _skip_line(file: IO[bytes]) -> int:
    num_bytes = 0
    while data := file.readline(_READ_BYTES):
        num_bytes += len(data)
        if data.endswith(b"\n"):
            break
    return num_bytes


def byte_order_mark(path: Path, data: bytes) -> int:
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


# --- a JSON array ---


def json_array(path: Path) -> Rows:
    """The elements of one JSON array, a few at a time.

    Raises:
        BadData: the array itself is broken, so nothing behind that place can be told apart.
    """
    with path.open("rb") as file:
        yield from _elements(_Window(path, file))


def _elements(text: "_Window") -> Rows:
    text.skip("[")
    if text.peek() == "]":
        return
    row = 0
    while True:
        row += 1
        line = text.line_number()
        yield from _element(text, row, line)
        mark = text.peek()
        if mark == "]":
            break
        text.skip(",")
    text.skip("]")
    if text.peek():
        raise BadData(f"{text.path} line {text.line_number()}: something follows the array. Remove it.")


def _element(text: "_Window", row: int, line: int) -> Rows:
    try:
        yield Record(text.value(), line)
    except _Strict as reason:
        problem = f"row {row} is not JSON that can be read: {reason}. Correct or remove it."
        yield BadRow(line, "not JSON", problem)


class _Strict(Exception):
    """JSON that is whole, and that we refuse."""


class _Window:
    """The part of a file's text that is being read. Memory: one read and one element."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path = path
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._at = self._counted_at = self._num_bytes = self._num_lines = 0
        self._is_ended = False

    def peek(self) -> str:
        """The next character that is no white space, or none at the end of the file."""
        while True:
            found = _WHITE.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def skip(self, mark: str) -> None:
        found = self.peek()
        if found != mark:
            what = f"{found!r} stands" if found else "the file ends"
            raise BadData(
                f"{self.path} line {self.line_number()}: {what} where {mark!r} belongs, so the JSON array is broken. "
                f"Repair it, or write one JSON object a line."
            )
        self._at += 1

    def line_number(self) -> int:
        self.peek()
        self._count_lines()
        return self._num_lines + 1

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                # A number that touches the end of what was read may go on.
                if end < len(self._text) or not self._more():
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                self._require_room()
                if not self._more():
                    raise self._broken(error) from None
            except (ValueError, RecursionError) as error:
                self._pass_over()
                raise _Strict(str(error)) from None

    def _pass_over(self) -> None:
        """Go behind an element that is refused for what is in it."""
        lenient = json.JSONDecoder()
        while True:
            try:
                self._at = lenient.raw_decode(self._text, self._at)[1]
                return
            except json.JSONDecodeError as error:
                self._require_room()
                if not self._more():
                    raise self._broken(error) from None
            except RecursionError as error:
                raise BadData(f"{self.path} line {self.line_number()}: {error}. Remove the element.") from None

    def _require_room(self) -> None:
        if len(self._text) - self._at > MAX_LINE_BYTES:
            raise BadData(
                f"{self.path} line {self.line_number()}: an element is longer than {MAX_LINE_BYTES:,} characters, "
                f"or broken. Split or repair it, or write one JSON object a line."
            )

    def _broken(self, error: json.JSONDecodeError) -> BadData:
        line = self.line_number() + self._text.count("\n", self._at, error.pos)
        return BadData(f"{self.path} line {line}: the JSON array is broken: {error.msg}. Repair it.")

    def _count_lines(self) -> None:
        self._num_lines += self._text.count("\n", self._counted_at, self._at)
        self._counted_at = self._at

    def _more(self) -> bool:
        """Read on, forgetting what was consumed. False at the end."""
        if self._is_ended:
            return False
        data = self._file.read(_READ_BYTES)
        if self._num_bytes == 0:
            data = data[byte_order_mark(self.path, data) :]
        try:
            more = self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            at = self._num_bytes + error.start
            raise BadData(
                f"{self.path}: byte 0x{error.object[error.start]:02x} near offset {at} is not UTF-8. "
                f"Save the file as UTF-8."
            ) from None
        self._num_bytes += len(data)
        self._count_lines()
        self._text = self._text[self._at :] + more
        self._at = self._counted_at = 0
        if not data:
            self._is_ended = True
        return bool(data)


# --- CSV and plain text ---


def tsv_rows(path: Path) -> Rows:
    """`csv_rows`, with tabs between the cells."""
    return csv_rows(path, "\t")


def csv_rows(path: Path, delimiter: str = ",") -> Rows:
    """Rows of a CSV file by the names in its first line. All values are text; an empty cell is empty text.

    Raises:
        BadData: the file's first line names no columns, or a line cannot be decoded.
    """
    csv.field_size_limit(MAX_LINE_BYTES)
    reader = csv.reader(_decoded(path), delimiter=delimiter, strict=True)
    try:
        header = next(reader, None)
    except csv.Error as error:
        raise BadData(f"{path} line 1 is no row of column names: {error}. Write one name a column.") from None
    if header is None:
        return
    if len(set(header)) != len(header) or not all(header):
        raise BadData(f"{path} line 1: a column has no name, or two have the same one. Name every column once.")
    line = reader.line_num + 1
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            # A quote that is not closed takes the lines behind it along, which must not go unsaid.
            more = f" It goes on to line {reader.line_num:,}: a quote is not closed." if reader.line_num > line else ""
            problem = f"it is not CSV that can be read: {error}.{more} Quote the cell, or remove the row."
            yield BadRow(line, "not CSV", problem)
            line = reader.line_num + 1
            continue
        if cells is None:
            return
        if len(cells) == len(header):
            yield Record(dict(zip(header, cells, strict=True)), line)
        elif cells:
            problem = (
                f"it has {len(cells)} cells and the header {len(header)}. Quote cells with a {delimiter!r} in them."
            )
            yield BadRow(line, "another number of cells than the header", problem)
        line = reader.line_num + 1


def _decoded(path: Path) -> Iterator[str]:
    for line in _lines(path):
        try:
            if isinstance(line, BadRow):
                raise NoExample(line.reason)
            yield line.text()
        except NoExample as reason:
            number = line.line if isinstance(line, BadRow) else line.number
            raise BadData(f"{path} line {number}: {reason}") from None


def paragraphs(path: Path) -> Rows:
    """What stands between blank lines of a plain text, each as a record of `text`."""
    begins, lines = 0, list[str]()
    num_characters = 0
    for number, text in enumerate(_decoded(path), start=1):
        if text.strip():
            begins = begins or number
            lines.append(text)
            num_characters += len(text)
            if num_characters > MAX_LINE_BYTES:
                raise BadData(
                    f"{path} line {begins}: a paragraph is longer than {MAX_LINE_BYTES:,} characters. "
                    f"Put blank lines between examples."
                )
        elif lines:
            yield Record({"text": _paragraph(lines)}, begins)
            begins, lines, num_characters = 0, [], 0
    if lines:
        yield Record({"text": _paragraph(lines)}, begins)


def _paragraph(lines: list[str]) -> str:
    return "".join(lines).replace("\r\n", "\n").rstrip("\n")

"""What travels to a rented machine: a wheel of the hotlap that runs here, with the versions it runs with.

The wheel is made from the files themselves and not by a build backend: what is tried here runs there, edits included,
no network is needed, and the same files give the same bytes, so that its hash names what is installed. Docstrings stay
here, and what no job there uses: each part of the wheel that is to be sent is a machine.
"""

import ast
import base64
import bz2
import csv
import hashlib
import io
import re
import tokenize
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import hotlap
from hotlap import durable

_EXTRA = "train"
_OF_THE_IMAGE = {"torch"}
"""Builds of it differ with the machine, so the image's own is used, or the newest for its processor is installed."""

_SENT = (".py", ".jsonl", ".toml", ".typed")
_STAYS = re.compile(
    r"(cloud|export|report|testing)/|translate\.py|data/propose\.py|"
    r"cli/(budget|dashboard|demo|doctor|export|generate|init|launch|machines|push|reap|report|serve|sink|"
    r"speedrun|train|volume)\w*\.py|"
    r"speedrun/(ablate|duel|new_track|rerun|rounds|template|transfer)\.py"
)
"""What no job on a rented machine uses."""

_BEGINS = r"(cloud/(__init__|bundle|errand|provider)|cli/(__init__|commands))\.py"
_GOES = re.compile(rf"{_BEGINS}|cloud/worker\.py")
"""Of that, what every job there begins with, an errand or a slice."""

_CORE = r"(__\w+__|checkpoint|child|clock|config\w*|durable|errors|guard|runs|secrecy|supervise|tether)\.py|"
_ALONE = {
    "research": re.compile(
        _CORE + r"cli/(__init__|commands|research\w*|progress|runs)\.py|"
        r"research/(?!lora|simulate|replay|ray_|price|travel)\w+\.py"
    ),
    "verify": re.compile(_CORE + r"(artifacts|hub|pins|sources)\.py|speedrun/\w+\.py"),
}
"""What a kind of errand takes along where no volume has the rest: one request has room for it."""

_AS_IT_IS = "speedrun/evaluate.py"
"""Tracks are pinned to its bytes."""

_PART_CHARS = 86_000
"""A create request may have 102,400 bytes, and `boot` and `arrive` travel in each."""


@dataclass(frozen=True)
class Parcel:
    wheel: bytes
    file_name: str

    @property
    def digest(self) -> str:
        """SHA-256 of the wheel, in hexadecimal."""
        return durable.sha256_bytes(self.wheel)

    def parts(self) -> list[str]:
        """The wheel, packed, in parts that fit into one request each, as text without quotes or slashes."""
        text = base64.b85encode(bz2.compress(self.wheel)).decode()
        return [text[start : start + _PART_CHARS] for start in range(0, len(text), _PART_CHARS)]


def pack(errand: Literal["research", "verify"] | None = None) -> Parcel:
    """The running hotlap as a wheel; for an errand alone, only what that uses, and without comments."""
    here = metadata.distribution("hotlap")
    info = f"hotlap-{here.version}.dist-info"
    root = Path(hotlap.__file__).parent
    names, send = _names(root), _sent
    if errand is not None:
        alone = re.compile(f"{_BEGINS}|{_ALONE[errand].pattern}")
        names, send = [name for name in names if alone.fullmatch(name)], _sent_bare
    files = {f"hotlap/{name}": send(root, name) for name in names}
    headers, _, _read_me = (here.read_text("METADATA") or "").partition("\n\n")
    files[f"{info}/METADATA"] = (headers + "\n").encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: hotlap\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = (here.read_text("entry_points.txt") or "").encode()
    files[f"{info}/constraints.txt"] = constraints("gpt" if errand == "research" else _EXTRA).encode()
    # Hashes do not pack, and the whole is held against its own on the machine.
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD", is_hashed=errand is None)
    return Parcel(_zipped(files), f"hotlap-{here.version}-py3-none-any.whl")


def _names(root: Path) -> list[str]:
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.suffix in _SENT)
    return [name for name in names if _GOES.fullmatch(name) or not _STAYS.match(name)]


def _sent(root: Path, name: str) -> bytes:
    data = (root / name).read_bytes()
    return bare(data.decode()).encode() if name.endswith(".py") and name != _AS_IT_IS else data


def _sent_bare(root: Path, name: str) -> bytes:
    data = _sent(root, name)
    return uncommented(data.decode()).encode() if name.endswith(".py") and name != _AS_IT_IS else data


def uncommented(source: str) -> str:
    """The same program without comments, each line where it was."""
    lines = source.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip() + "\n"
    return "".join(lines)


def bare(source: str) -> str:
    """The same program without docstrings, each line where it was, so that tracebacks tell the same."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for text in filter(_is_text, node.body):
                assert text.end_lineno is not None
                lines[text.lineno - 1 : text.end_lineno] = ["\n"] * (text.end_lineno - text.lineno + 1)
                if len(node.body) == 1:
                    lines[text.lineno - 1] = " " * text.col_offset + "...\n"
    return "".join(lines)


def _is_text(node: ast.stmt) -> bool:
    """Whether it says something and does nothing: a docstring, or that of a field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def constraints(extra: str = _EXTRA) -> str:
    """The versions installed here of all that hotlap with this extra needs, a line each."""
    found: dict[str, str] = {}
    waiting = [("hotlap", frozenset({extra}))]
    while waiting:
        name, extras = waiting.pop()
        if name in found or name in _OF_THE_IMAGE:
            continue
        try:
            here = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # an optional part that is not installed here has no version to keep
            continue
        found[name] = Version(here.version).public
        for text in here.requires or []:
            need = Requirement(text)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                waiting.append((canonicalize_name(need.name), frozenset(need.extras)))
    del found["hotlap"]
    return "".join(f"{name}=={version}\n" for name, version in sorted(found.items()))


def _record(files: dict[str, bytes], itself: str, is_hashed: bool) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        writer.writerow((name, f"sha256={digest}", len(data)) if is_hashed else (name, "", ""))
    writer.writerow((itself, "", ""))
    return out.getvalue().encode()


def _zipped(files: dict[str, bytes]) -> bytes:
    """Not compressed here: as a whole it packs better. Dates are left out of it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return out.getvalue()

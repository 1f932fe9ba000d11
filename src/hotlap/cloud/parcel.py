"""What travels to a rented machine: a wheel of the hotlap that runs here, with the versions it runs with.

The wheel is made from the files themselves and not by a build backend: what is tried here runs there, edits included,
no network is needed, and the same files give the same bytes, so that its hash names what is installed.
"""

import base64
import csv
import hashlib
import io
import lzma
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import hotlap
from hotlap import durable

_EXTRA = "train"
_OF_THE_IMAGE = {"torch"}
"""Builds of it differ with the machine, so the image's own is used, or the newest for its processor is installed."""

_SENT = (".py", ".jsonl", ".toml", ".typed")
_STAYS = ("export", "report", "testing")
"""Packages that no job on a rented machine uses: each part of a wheel is a machine."""

_PIECE_CHARS = 72_000
"""A create request may have 102,400 bytes, and `boot` travels in each."""


@dataclass(frozen=True)
class Parcel:
    wheel: bytes
    file_name: str

    @property
    def digest(self) -> str:
        """SHA-256 of the wheel, in hexadecimal."""
        return durable.sha256_bytes(self.wheel)

    def pieces(self) -> list[str]:
        """The wheel, packed, in parts that fit into one request each, as text without quotes or slashes."""
        text = base64.b85encode(lzma.compress(self.wheel, preset=9 | lzma.PRESET_EXTREME)).decode()
        return [text[start : start + _PIECE_CHARS] for start in range(0, len(text), _PIECE_CHARS)]


def pack() -> Parcel:
    """The running hotlap as a wheel."""
    here = metadata.distribution("hotlap")
    info = f"hotlap-{here.version}.dist-info"
    root = Path(hotlap.__file__).parent
    files = {
        f"hotlap/{path.relative_to(root).as_posix()}": path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.suffix in _SENT and path.relative_to(root).parts[0] not in _STAYS
    }
    headers, _, _read_me = (here.read_text("METADATA") or "").partition("\n\n")
    files[f"{info}/METADATA"] = (headers + "\n").encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: hotlap\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = (here.read_text("entry_points.txt") or "").encode()
    files[f"{info}/constraints.txt"] = constraints().encode()
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    return Parcel(_zipped(files), f"hotlap-{here.version}-py3-none-any.whl")


def constraints() -> str:
    """The versions installed here of all that a slice needs, a line each."""
    found: dict[str, str] = {}
    waiting = [("hotlap", frozenset({_EXTRA}))]
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


def _record(files: dict[str, bytes], itself: str) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        writer.writerow((name, f"sha256={digest}", len(data)))
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

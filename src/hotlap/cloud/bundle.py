"""Small files in a machine's order and in its log, for a machine that has no volume.

Sent, they are one text. Back, they are events among a machine's lines, `bundle`: the text in parts, each with its place
and the hash of the whole, so that a part that comes twice, late or never is nothing. What comes back is a stranger's
word: it is written below the folders that were named, and nowhere else.
"""

import base64
import hashlib
import io
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from hotlap import durable
from hotlap.errors import CorruptFile

EVENT = "bundle"
MAX_BYTES = 8 << 20
"""Of what a text may unpack to, and of all the text that is taken from one machine."""

_MEMORY_BYTES = 32 << 20
"""Of what unpacking may take; a text may ask for gigabytes."""

_LINE_CHARS = 3_000
"""Of a part. How long a line a provider's log keeps whole is not known; a container's own is cut at 16 KiB."""


def packed(files: Mapping[str, bytes]) -> str:
    """Files by their paths as a text without quotes or slashes. The same files give the same text."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:  # not compressed here: as a whole it packs better
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)
    return base64.b85encode(lzma.compress(out.getvalue(), preset=6 | lzma.PRESET_EXTREME)).decode()


def unpacked(text: str) -> dict[str, bytes]:
    """
    Raises:
        CorruptFile: it is no such text, or more than `MAX_BYTES`.
    """
    too_much = f"Files that came with a machine's words are cut off, or more than {MAX_BYTES} bytes."
    try:
        reader = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY_BYTES)
        data = reader.decompress(base64.b85decode(text), max_length=MAX_BYTES)
        if not reader.eof:
            raise CorruptFile(too_much)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            if sum(entry.file_size for entry in entries) > MAX_BYTES:
                raise CorruptFile(too_much)
            return {entry.filename: archive.read(entry) for entry in entries}
    except (ValueError, OSError, EOFError, RuntimeError, lzma.LZMAError, zipfile.BadZipFile, zlib.error) as error:
        raise CorruptFile(f"Files that came with a machine's words cannot be unpacked: {error}.") from None


def read(root: Path, patterns: Iterable[str]) -> dict[str, bytes]:
    """The files below a folder that these patterns name, hidden ones and links left out."""
    paths = {path for pattern in patterns for path in root.glob(pattern)}
    files = (path for path in sorted(paths) if path.is_file() and not path.is_symlink())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files if not path.name.startswith(".")}


def write(root: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        durable.make_dirs((root / name).parent)
        durable.replace(root / name, data)


def events(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """The same files as events, in order."""
    text = packed(files)
    digest = hashlib.sha256(text.encode()).hexdigest()
    parts = [text[start : start + _LINE_CHARS] for start in range(0, len(text), _LINE_CHARS)]
    return [
        {"event": EVENT, "sha256": digest, "part": number, "of": len(parts), "text": part}
        for number, part in enumerate(parts)
    ]


class Inbox:
    """Takes events and writes the files that they make, below `folders` of `root` alone, each as `take_home` has it,
    which may refuse with `CorruptFile`."""

    def __init__(
        self, root: Path, folders: Sequence[str], take_home: Callable[[str, bytes], bytes] = lambda _name, data: data
    ) -> None:
        self._root, self._folders = root, [PurePosixPath(folder) for folder in folders]
        self._take_home = take_home
        self._parts: dict[str, dict[int, str]] = {}
        self._num_chars = 0
        self._complaint = ""

    def take(self, event: Mapping[str, Any]) -> list[str]:
        """The paths that were written with this event, if it made something whole."""
        digest, number, count, text = (event.get(name) for name in ("sha256", "part", "of", "text"))
        if not (isinstance(digest, str) and isinstance(text, str)):
            return []
        if not (isinstance(number, int) and isinstance(count, int) and 0 <= number < count):
            return []
        self._num_chars += len(text)
        if self._num_chars > MAX_BYTES:
            self._complaint = f"the machine sent more than {MAX_BYTES} bytes of files"
            return []
        parts = self._parts.setdefault(digest, {})
        parts[number] = text
        if len(parts) < count:
            return []
        whole = "".join(parts[place] for place in sorted(self._parts.pop(digest)))
        if hashlib.sha256(whole.encode()).hexdigest() != digest:
            self._complaint = "files did not arrive as they were sent"
            return []
        return self._write(whole)

    def _write(self, text: str) -> list[str]:
        try:
            came = {name: data for name, data in unpacked(text).items() if self._may_be_written(name)}
            files = {name: self._take_home(name, data) for name, data in came.items()}
        except CorruptFile as error:
            self._complaint = str(error)
            return []
        write(self._root, files)
        return list(files)

    def _may_be_written(self, name: str) -> bool:
        path = PurePosixPath(name)
        is_ours = ".." not in path.parts and any(path.is_relative_to(folder) for folder in self._folders)
        # Nor through a link that leads elsewhere.
        return is_ours and (self._root / path).resolve() == (self._root.resolve() / path)

    def what_is_wrong(self) -> str:
        """In words, why something is not here that was sent. Empty: nothing is."""
        return self._complaint or ("the machine's log broke off in the middle of them" if self._parts else "")

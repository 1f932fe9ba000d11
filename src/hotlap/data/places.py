"""Which files a data set consists of, and what each is: found by looking at names and first bytes."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotlap.data import records, tables
from hotlap.data.records import Rows
from hotlap.errors import BadData, MissingArtifact

_HEAD_BYTES = 4096
_SHOWN_FILES = 8
_SPLIT = "train"
_OTHER_SPLITS = ("test", "validation", "valid", "val", "dev", "eval")
_STATE = "state.json"


@dataclass(frozen=True)
class Container:
    """A kind of file, and how its rows are read. `words` say it aloud."""

    words: str
    rows: Callable[[Path], Rows]
    unit: str = "line"
    """What a row's number counts."""


JSON_LINES = Container("JSON lines", records.json_lines)
JSON_ARRAY = Container("a JSON array", records.json_array)
CSV = Container("CSV", records.csv_rows)
TSV = Container("tab-separated CSV", records.tsv_rows)
TEXT = Container("plain text, an example a paragraph", records.paragraphs)
PARQUET = Container("Parquet", tables.parquet_rows, "row")
ARROW = Container("Arrow", tables.arrow_rows, "row")

_BY_SUFFIX = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), JSON_LINES),
    ".csv": CSV,
    ".tsv": TSV,
    **dict.fromkeys((".txt", ".md"), TEXT),
    ".parquet": PARQUET,
    ".arrow": ARROW,
}


@dataclass(frozen=True)
class DataFile:
    path: Path
    container: Container


def files_of(place: Path, pattern: str | None = None) -> list[DataFile]:
    """The files of a data set, in order.

    Raises:
        MissingArtifact: there is no such place.
        BadData: it holds no data that can be read, or more than one kind of it.
    """
    if not place.exists():
        raise MissingArtifact(f"{place} does not exist. Check data set paths in the configuration.")
    paths = [place] if place.is_file() else _in_folder(place, pattern)
    return [DataFile(path, container_of(path)) for path in paths]


def container_of(path: Path) -> Container:
    """What a file is, by its first bytes where they tell, else by its name; JSON lines if nothing does."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(b"PAR1"):
        return PARQUET
    if head.startswith(b"ARROW1"):
        return ARROW
    if head.startswith((b"\x1f\x8b", b"PK\x03\x04", b"\x28\xb5\x2f\xfd")):
        raise BadData(f"{path} is compressed. Unpack it and name what was in it.")
    named = _BY_SUFFIX.get(path.suffix.lower(), JSON_LINES)
    return JSON_ARRAY if named is JSON_LINES and _is_array(head) else named


def _is_array(head: bytes) -> bool:
    """Whether an array of objects begins here. `[]` alone is one; a line that is a list is no array of examples."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    return re.match(rb"\[\s*(\{|\]\s*$|$)", text) is not None and not re.match(rb"\[.*\]\s*\n\s*[\[{]", text)


# --- folders ---


def _in_folder(folder: Path, pattern: str | None) -> list[Path]:
    if pattern is not None:
        try:
            paths = sorted(path for path in folder.glob(pattern) if path.is_file())
        except (ValueError, NotImplementedError) as error:
            raise BadData(
                f"data.files = {pattern!r} is no pattern for files below {folder}: {error}. Write it like data/train-*."
            ) from None
        if not paths:
            raise BadData(f"{folder} has no file that fits data.files = {pattern!r}. It has {_listed(folder)}.")
        return paths
    if (folder / "dataset_dict.json").is_file():
        return _in_dataset_dict(folder)
    if (folder / _STATE).is_file():
        return _saved_to_disk(folder)
    return _of_one_kind(folder)


def _in_dataset_dict(folder: Path) -> list[Path]:
    """`save_to_disk` of several splits: a folder each."""
    splits = sorted(path.parent.name for path in folder.glob(f"*/{_STATE}"))
    if len(splits) == 1 or _SPLIT in splits:
        return _saved_to_disk(folder / (_SPLIT if _SPLIT in splits else splits[0]))
    raise BadData(f"{folder} has the splits {', '.join(splits) or 'none'}. Name one of them: {folder}/SPLIT.")


def _saved_to_disk(folder: Path) -> list[Path]:
    try:
        names = [entry["filename"] for entry in json.loads((folder / _STATE).read_bytes())["_data_files"]]
    except (ValueError, KeyError, TypeError):
        raise BadData(f"{folder / _STATE} does not list the data's files. Save the data set again.") from None
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise BadData(f"{folder} lacks {missing[0]}, which its {_STATE} lists. Copy the whole folder again.")
    return [folder / name for name in names]


def _of_one_kind(folder: Path) -> list[Path]:
    """The training split of a folder, such as a hub data set, if its files leave no doubt which that is."""
    found = [path for path in _files(folder) if path.suffix.lower() in _BY_SUFFIX and not _is_about_data(path)]
    training = [path for path in found if _is_of_split(path, folder, (_SPLIT,))]
    found = training or [path for path in found if not _is_of_split(path, folder, _OTHER_SPLITS)]
    kinds = {(path.parent, path.suffix.lower()) for path in found}
    if len(kinds) == 1:
        return found
    problem = "no data file" if not found else f"{len(kinds)} kinds or folders of data files"
    raise BadData(f"{folder} has {problem} ({_listed(folder)}). Name a file, or a pattern with data.files.")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


def _is_about_data(path: Path) -> bool:
    names = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "manifest.json", _STATE, "license.txt")
    return path.name.lower() in names or path.suffix.lower() == ".md"


def _is_of_split(path: Path, folder: Path, splits: Sequence[str]) -> bool:
    words = re.split(r"[^a-z]+", path.relative_to(folder).with_suffix("").as_posix().lower())
    return any(word in splits for word in words)


def _listed(folder: Path) -> str:
    names = [path.relative_to(folder).as_posix() for path in _files(folder)]
    more = ", ..." if len(names) > _SHOWN_FILES else ""
    return (", ".join(names[:_SHOWN_FILES]) or "no files") + more

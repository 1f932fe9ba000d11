"""Submissions: a folder `submissions/NNN-author/` with `train.py`, `config.yaml` and `NOTES.md`, read but never run.

The form is the public contest's; `recipe.toml` may stand in place of `train.py`. `check` gives every reason at once for
which a folder cannot be verified; what only looks like a rule broken is a warning, for the person who reads the code.
"""

import ast
import os
import re
import stat
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from hotlap import durable
from hotlap.errors import ConfigError, UsageError
from hotlap.speedrun import recipe
from hotlap.speedrun.environments import EXTRA
from hotlap.speedrun.track import Track

NAME = re.compile(r"(?:[a-z][a-z0-9]*-)?[0-9]{3}-[a-z0-9][a-z0-9-]{0,39}")
"""`000-baseline`, or as the public contest's second track has it, `t2-000-baseline`."""

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")
TRAIN = "train.py"
REQUIRED = ("config.yaml", "NOTES.md")
_TEXT = {".py", ".yaml", ".yml", ".md", ".txt", ".toml", ".json", ".cu", ".cpp", ".c", ".h"}
_DATA = {".json", ".txt", ".toml", ".yaml", ".yml"}
_NUMBER = re.compile(r"(?<![\w.])[0-9]+(?:\.[0-9]+)?")
_MAX_FILE_BYTES, _MAX_TOTAL_BYTES, _MAX_FILES = 262_144, 1_048_576, 50
_MIN_NOTES = 100
_MAX_EXTRAS = 20
_FIELDS = ("author", "github", "description", "base_model", "technique")
_MAX_FIELD = 1_000
_MAX_CLAIM = 1e9
_LONG_LITERAL = 2_000
_MAX_NUMBERS = 64
_NETWORK = {"socket", "requests", "urllib", "http", "httpx", "aiohttp", "ftplib", "smtplib", "paramiko"}
_CODE_IN_DATA = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
_SEED_CALLS = {"manual_seed", "manual_seed_all", "set_seed", "seed", "Random", "default_rng"}


@dataclass(frozen=True)
class Finding:
    level: Literal["refused", "warning"]
    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.level}: {self.place}: {self.reason}"


@dataclass(frozen=True)
class Submission:
    folder: Path
    config: dict[str, Any]
    code_sha256: str
    """Over names and bytes of all its files but the notes: the code state that is verified once."""
    recipe: dict[str, Any] | None
    """Settings of hotlap's trainer, in place of a program."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def extras(self) -> tuple[str, ...]:
        """Packages to be installed beside the track's."""
        return tuple(self.config.get("extra_pip_packages") or ())

    @property
    def claims(self) -> dict[str, Any]:
        """What its author measured."""
        return self.config.get("self_reported") or {}


def load(folder: Path, track: Track) -> Submission:
    """
    Raises:
        UsageError: `check` refuses it; the message holds every reason.
    """
    refused = [finding for finding in check(folder, track) if finding.level == "refused"]
    if refused:
        raise UsageError(f"{folder} cannot be verified: " + "; ".join(str(finding) for finding in refused))
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    has_recipe = (folder / recipe.RECIPE).is_file()
    return Submission(folder, config, code_sha256(folder), recipe.read(folder / recipe.RECIPE) if has_recipe else None)


def track_of(folder: Path) -> str:
    """The track that a submission is for, by its own words; `t1` when it says nothing, as in the public contest."""
    path = folder / "config.yaml"
    if path.is_symlink() or not path.is_file() or path.stat().st_size > _MAX_FILE_BYTES:
        raise UsageError(f"{path} is missing, a link, or too large: a submission has a config.yaml.")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UsageError(f"{path} is not YAML in UTF-8.") from None
    track = config.get("track", "t1") if isinstance(config, dict) else None
    if not isinstance(track, str):
        raise UsageError(f"{path} needs a text as 'track'.")
    return track


def code_sha256(folder: Path) -> str:
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    hashes = {name: durable.sha256_file(path) for name, path in files.items() if name != "NOTES.md"}
    return durable.sha256_bytes(durable.canonical_json(hashes).encode())


def check(folder: Path, track: Track) -> list[Finding]:
    """Everything there is to say about a submission without running it."""
    if not folder.is_dir() or folder.is_symlink():
        return [Finding("refused", folder.name, "there is no such folder")]
    found: list[Finding] = []
    if not NAME.fullmatch(folder.name):
        found.append(Finding("refused", repr(folder.name), "a folder is called NNN-author, lower case"))
    found += _check_files(folder)
    if any(finding.level == "refused" for finding in found):
        return found  # what is not a plain small text file is not opened
    found += [finding for path in _paths(folder) for finding in _check_text(path, folder)]
    found += _check_config(folder / "config.yaml", track)
    if (folder / recipe.RECIPE).is_file():
        found += _check_recipe(folder / recipe.RECIPE)
    if len((folder / "NOTES.md").read_text(encoding="utf-8", errors="replace").strip()) < _MIN_NOTES:
        found.append(Finding("refused", "NOTES.md", f"tell in {_MIN_NOTES} characters or more what makes it fast"))
    return found


def _paths(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if not path.is_dir() or path.is_symlink()]


def _check_files(folder: Path) -> list[Finding]:
    found: list[Finding] = []
    paths = _paths(folder)
    total = 0
    for path in paths:
        place = path.relative_to(folder).as_posix()
        facts = os.lstat(path)
        total += facts.st_size
        if not stat.S_ISREG(facts.st_mode):
            found.append(Finding("refused", ascii(place), "neither links nor special files are taken"))
        elif facts.st_mode & 0o6000:
            found.append(Finding("refused", ascii(place), "has a set-user bit"))
        elif not all(_FILE.fullmatch(part) for part in Path(place).parts):
            found.append(
                Finding("refused", ascii(place), "names hold ASCII letters, digits, `_`, `-` and `.`, no dot first")
            )
        elif path.suffix.lower() not in _TEXT:
            found.append(
                Finding("refused", place, f"only text is taken ({', '.join(sorted(_TEXT))}): no weights, no data")
            )
        elif facts.st_size > _MAX_FILE_BYTES:
            found.append(Finding("refused", place, f"has {facts.st_size:,} bytes; {_MAX_FILE_BYTES:,} are allowed"))
    if total > _MAX_TOTAL_BYTES or len(paths) > _MAX_FILES:
        limits = f"{_MAX_FILES} files and {_MAX_TOTAL_BYTES:,} bytes are allowed in all"
        found.append(Finding("refused", folder.name, f"has {len(paths)} files and {total:,} bytes; {limits}"))
    names = {path.relative_to(folder).as_posix() for path in paths}
    found += [Finding("refused", name, "is missing") for name in REQUIRED if name not in names]
    if len(names & {TRAIN, recipe.RECIPE}) != 1:
        found.append(Finding("refused", TRAIN, f"there has to be one of {TRAIN} and {recipe.RECIPE}"))
    return found


def _check_recipe(path: Path) -> list[Finding]:
    try:
        recipe.read(path)
    except ConfigError as error:
        return [Finding("refused", path.name, str(error))]
    return []


def _check_text(path: Path, folder: Path) -> list[Finding]:
    place = path.relative_to(folder).as_posix()
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return [Finding("refused", place, "is not UTF-8 text")]
    found: list[Finding] = []
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        if any(len(word) > _LONG_LITERAL for word in line.split()):
            reason = f"a word of more than {_LONG_LITERAL:,} characters: data or weights as text"
            found.append(Finding("refused", f"{place}:{number}", reason))
        if tricks := sorted({_name_of(char) for char in line if _is_trick(char)}):
            found.append(Finding("refused", f"{place}:{number}", f"hides something: {', '.join(tricks)}"))
    if path.suffix == ".py":
        return found + _check_code(text, place)
    if path.suffix in _DATA and (count := len(_NUMBER.findall(text))) > _MAX_NUMBERS:
        found.append(Finding("warning", place, f"holds {count:,} numbers: read whether they are data or weights"))
    return found


def _is_trick(char: str) -> bool:
    """Whether a reader would not see a character, or see the text in another order than Python does."""
    return (unicodedata.category(char) in ("Cf", "Cc", "Co", "Cs", "Zl", "Zp") and char != "\t") or (
        char.isspace() and char not in " \t"
    )


def _name_of(char: str) -> str:
    return f"U+{ord(char):04X} {unicodedata.name(char, 'control')}"


def _check_code(text: str, place: str) -> list[Finding]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [Finding("refused", place, f"is not Python: {error}")]
    found: list[Finding] = []
    for node in ast.walk(tree):
        for level, reason in _complaints(node):
            found.append(Finding(level, f"{place}:{getattr(node, 'lineno', 1)}", reason))
    return found


_Complaints = list[tuple[Literal["refused", "warning"], str]]


def _complaints(node: ast.AST) -> _Complaints:
    match node:
        case ast.Import(names=names):
            return _imports([name.name for name in names])
        case ast.ImportFrom(module=str(module)):
            return _imports([module])
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name) if not name.isascii():
            return [("refused", f"the name {name!a} is not ASCII, so it can look like another")]
        case ast.Attribute(attr="sched_setaffinity" | "SIG_IGN" as name) | ast.Name(id="sched_setaffinity" as name):
            return [("warning", f"{name}: it can take more processors, or hide what its children use: read why")]
        case ast.Constant(value=str() | bytes() as value) if len(value) > _LONG_LITERAL and " " not in str(value[:200]):
            return [("refused", f"a literal of {len(value):,} characters: data or weights in code")]
        case ast.List() | ast.Tuple() | ast.Set() | ast.Dict() if _num_numbers(node) > _MAX_NUMBERS:
            return [("refused", f"{_num_numbers(node)} numbers in a row: data or chosen rows in code")]
        case ast.Call():
            return _calls(node)
        case ast.Constant(value=str(value)) if re.search(r"_test\b|split=.test|\btest\.jsonl\b", value):
            return [("warning", f"speaks of the test split: {value[:60]!a}")]
        case _:
            return []


def _num_numbers(node: ast.List | ast.Tuple | ast.Set | ast.Dict) -> int:
    items = [*node.keys, *node.values] if isinstance(node, ast.Dict) else node.elts
    return sum(_is_number(item) for item in items)


def _is_number(node: ast.AST | None) -> bool:
    """Whether it is written out, with a sign or without."""
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _imports(names: list[str]) -> _Complaints:
    found: _Complaints = []
    for top in sorted({name.partition(".")[0] for name in names}):
        if top in _NETWORK:
            found.append(("warning", f"imports {top}; a run has no network"))
        if top in _CODE_IN_DATA:
            found.append(("warning", f"imports {top}, which runs what it reads"))
        if top == "ctypes":
            found.append(("warning", "imports ctypes: read what it calls"))
    return found


def _calls(node: ast.Call) -> _Complaints:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in ("eval", "exec", "__import__", "compile") and isinstance(node.func, ast.Name):
        return [("refused", f"{name}() runs text that nobody can read here")]
    given = [*node.args, *(word.value for word in node.keywords if word.arg in ("seed", "data_seed"))]
    is_seeding = name in _SEED_CALLS or any(word.arg in ("seed", "data_seed") for word in node.keywords)
    if is_seeding and any(_is_number(value) for value in given):
        return [("refused", f"{name}() is given a seed of its own; a run's seed comes with --seed")]
    return []


def _check_config(path: Path, track: Track) -> list[Finding]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return [Finding("refused", path.name, f"is not YAML: {str(error)[:200]}")]
    if not isinstance(config, dict):
        return [Finding("refused", path.name, "is not a mapping")]
    found: list[Finding] = []
    for name in _FIELDS:
        if not isinstance(config.get(name), str) or not config[name].strip():
            found.append(Finding("refused", path.name, f"needs a text as {name!r}"))
        elif any(_is_trick(char) for char in config[name].replace("\n", "")):  # YAML has escapes for them
            found.append(Finding("refused", path.name, f"{name!r} hides something"))
        elif len(config[name]) > _MAX_FIELD:
            found.append(Finding("refused", path.name, f"{name!r} has more than {_MAX_FIELD} characters"))
    if config.get("base_model") not in (None, track.spec.base_model.name):
        found.append(Finding("refused", path.name, f"base_model must be {track.spec.base_model.name}"))
    wanted = config.get("track", "t1")
    if wanted != track.spec.id:
        # Anything but a text is not shown: a few aliases in YAML can stand for more than memory holds.
        shown = ascii(wanted[:40]) if isinstance(wanted, str) else f"a {type(wanted).__name__}"
        found.append(Finding("refused", path.name, f"is for track {shown}, not {track.spec.id}"))
    if "seed" in config:
        found.append(Finding("refused", path.name, "holds a seed; the verifier draws it"))
    return [*found, *_check_extras(config, path.name), *_check_claims(config, path.name)]


def _check_extras(config: dict[str, Any], place: str) -> list[Finding]:
    extras = config.get("extra_pip_packages") or []
    if not isinstance(extras, list) or len(extras) > _MAX_EXTRAS or not all(isinstance(each, str) for each in extras):
        return [Finding("refused", place, f"extra_pip_packages is no list of at most {_MAX_EXTRAS} texts")]
    return [
        Finding("warning", place, f"has {each[:60]} installed: read what it is; weights or data can be a package too")
        if EXTRA.fullmatch(each)
        else Finding("refused", place, f"extra_pip_packages: {each[:60]!a} is not name==version, which is all we take")
        for each in extras
    ]


def _check_claims(config: dict[str, Any], place: str) -> list[Finding]:
    claims = config.get("self_reported") or {}
    if not isinstance(claims, dict):
        return [Finding("refused", place, "self_reported is not a mapping")]
    accuracies = claims.get("accuracies") or []
    numbers = [claims.get("mean_train_seconds") or 0.0, *(accuracies if isinstance(accuracies, list) else ["no list"])]
    if not all(isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n < _MAX_CLAIM for n in numbers):
        return [Finding("refused", place, "self_reported: mean_train_seconds and accuracies are numbers, 0 or more")]
    return []

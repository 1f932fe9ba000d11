"""The sandbox: a stranger's program with read-only inputs, no network, no secrets, and an end.

What it protects: files outside the inputs (not visible), the inputs (read-only), the network (none, not even loopback),
other processes (not visible, and nothing of the program outlives its time), privileges (no capability, no way to get
one), the disk (all writing goes to memory of a limited size), the number of processes and the memory of each.

What it does not protect against: a hole in the kernel, which the program shares with everybody on this machine; reading
how busy the processor is; wear on the machine in its allowed time. The memory limit is per process, and a second time
for all files; memory that processes share without a file is not counted, so a program can use up the machine's. A
program may move to other processors than it was given: what it used is told, and held against the track by whoever
called. On a machine with a GPU, its driver would be part of the attack surface; GPU tracks are not run here.

The protections are those of Linux namespaces, opened by `jail.py`. Where the kernel refuses one, nothing is run.
"""

import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotlap import clock, durable
from hotlap.child import Stops, run_child
from hotlap.errors import ChildCrashed, Refused
from hotlap.speedrun.stopping import require_not_stopped

_JAIL = Path(__file__).with_name("jail.py")
_SETUP_S = 60.0
_MAX_LOG_CHARS = 1 << 20
OUTPUT = "/out"


@dataclass(frozen=True)
class Bounds:
    """What a program may use."""

    time_limit_s: float
    memory_bytes: int
    num_processes: int
    threads: int


@dataclass(frozen=True)
class Ran:
    """How a locked-in program ended. Times are the warden's, beside the program, and the caller's, outside."""

    exit_code: int | None
    """None: its time was over. A signal's number is added to 128."""
    wall_s: float
    outer_wall_s: float
    cpu_s: float
    max_rss_bytes: int
    num_left_behind: int
    """Processes that were still there when it had ended, and were killed."""
    output: tuple[dict[str, Any], ...]
    """Everything in its output folder: `name`, `kind`, `bytes`."""
    collected: tuple[str, ...]
    protections: tuple[str, ...]
    log: str
    """What it wrote on standard output and standard error; the end of it when it was long."""


@dataclass(frozen=True)
class Program:
    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    inputs: tuple[tuple[Path, str], ...]
    """Files and folders, and where it sees them, read-only. A later one may lie in an earlier one's place."""
    collect: Mapping[str, int]
    """Names in the output folder that are copied out, with the most bytes each may have."""
    libraries: tuple[Path, ...] = ()
    """Folders it sees where they are: the environment that its Python belongs to."""


def run(
    program: Program,
    bounds: Bounds,
    work: Path,
    needs: Sequence[str],
    stops: Stops | None = None,
) -> Ran:
    """Run a program in a sandbox of its own. `work` is an existing empty folder; collected files come to `work/out`.

    Raises:
        Refused: this machine cannot give a protection in `needs`. The program did not run.
        ChildCrashed: the sandbox itself ended without a result; no fault of the program's.
        Stopped: somebody asked to, now or before, as `stops` tells.
    """
    plan = _plan(program, bounds, work)
    path = work / "plan.json"
    durable.replace(path, durable.canonical_json(plan).encode())
    told: list[dict[str, Any]] = []
    log = _Log()
    end = run_child(
        [sys.executable, "-I", "-S", str(_JAIL), str(path)],
        clock.Deadline(clock.monotonic_s() + bounds.time_limit_s + _SETUP_S),
        on_event=told.append,
        on_talk=log.add,
        env={},
        stops=stops,
    )
    require_not_stopped(end)
    troubles = [event["why"] for event in told if event["event"] == "trouble"]
    given = next((tuple(event["protections"]) for event in told if event["event"] == "locked"), ())
    if lacking := [word for word in needs if word not in given]:
        raise Refused(
            f"This machine cannot lock strangers' code in ({'; '.join(troubles) or end.last_words[-300:]}); "
            f"not given: {', '.join(lacking)}. Run on Linux with user namespaces allowed."
        )
    if end.result is None:
        raise ChildCrashed(f"The sandbox ended with code {end.exit_code} and no result: {'; '.join(troubles)}")
    return _ran(end.result, end.wall_s, given, log.text())


def _ran(told: dict[str, Any], outer_wall_s: float, protections: tuple[str, ...], log: str) -> Ran:
    return Ran(
        exit_code=told["exit_code"],
        wall_s=told["wall_s"],
        outer_wall_s=outer_wall_s,
        cpu_s=told["cpu_s"],
        max_rss_bytes=told["max_rss_bytes"],
        num_left_behind=told["num_left_behind"],
        output=tuple(told["output"]),
        collected=tuple(told["collected"]),
        protections=protections,
        log=log,
    )


class _Log:
    def __init__(self) -> None:
        self._lines: deque[str] = deque()
        self._num_chars = 0

    def add(self, line: str) -> None:
        self._lines.append(line)
        self._num_chars += len(line) + 1  # an empty line takes room too
        while self._num_chars > _MAX_LOG_CHARS:
            self._num_chars -= len(self._lines.popleft()) + 1

    def text(self) -> str:
        return "\n".join(self._lines)


def _plan(program: Program, bounds: Bounds, work: Path) -> dict[str, Any]:
    for name in ("root", "out"):
        durable.make_dirs(work / name)
    return {
        "root": str(work / "root"),
        "binds": [[str(source), target] for source, target in (*_system(program.libraries), *program.inputs)],
        "writable": [OUTPUT, "/tmp", "/dev/shm"],
        "argv": list(program.argv),
        "cwd": program.cwd,
        "env": dict(program.env),
        "output": OUTPUT,
        "collect": dict(program.collect),
        "collect_into": str(work / "out"),
        "time_limit_s": bounds.time_limit_s,
        "memory_bytes": bounds.memory_bytes,
        "num_processes": bounds.num_processes,
        "threads": bounds.threads,
    }


def _system(libraries: tuple[Path, ...]) -> list[tuple[Path, str]]:
    """The operating system's programs and libraries, Python's own, and those of an environment."""
    names = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
    places = [Path(name) for name in names]
    places += [Path(sys.base_prefix), *libraries]
    found: list[tuple[Path, str]] = []
    for place in places:
        is_inside = any(place.is_relative_to(target) for _, target in found)
        if place.exists() and not is_inside:
            found.append((Path(os.path.realpath(place)), str(place)))
    return found


def require_hidden(path: Path, libraries: tuple[Path, ...]) -> None:
    """
    Raises:
        Refused: every program that is run with these libraries would see `path`.
    """
    for source, _ in _system(libraries):
        if path.resolve().is_relative_to(source):
            raise Refused(
                f"{path} lies in {source}, which strangers' programs see, so that they could read test rows there. "
                f"Move the contest, or the virtual environment, elsewhere."
            )


def variables(threads: int, python: Path) -> dict[str, str]:
    """All the variables a locked-in program gets, but for what its contest adds."""
    count = str(threads)
    return {
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "HOME": "/tmp",
        "USER": "contestant",
        "LOGNAME": "contestant",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }

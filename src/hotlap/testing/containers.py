"""What runs on an emulated machine: a scripted stand-in for boot and job in fake time, or the command itself."""

import contextlib
import heapq
import itertools
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hotlap import durable
from hotlap.cloud import boot, guardian


@dataclass(frozen=True)
class Line:
    at_s: float
    text: str


@dataclass(frozen=True)
class Exit:
    """The command ended, so the platform starts it again."""

    at_s: float


@dataclass(frozen=True)
class EndSelf:
    """The machine asks, with its own key, for its own end."""

    at_s: float


Happening = Line | Exit | EndSelf


@dataclass(frozen=True)
class Birth:
    """One start of a container."""

    pod_id: str
    number: int
    """From 1; a restart is the next."""

    at_s: float
    env: Mapping[str, str]
    argv: tuple[str, ...]
    marks: set[str] = field(default_factory=set[str])
    """What outlives a restart, as a volume does."""

    first_line_s: float = 0.0


class Container(Protocol):
    def until(self, at_s: float) -> list[Happening]:
        """What happened since the last call and until then, in order."""
        ...

    def signal(self, number: int) -> None: ...

    def kill(self) -> None:
        """End it and everything it started. Fine to repeat."""
        ...


Runtime = Callable[[Birth], Container]


# --- scripted ---


@dataclass(frozen=True)
class Job:
    """What a scripted machine does, by the rules of `cloud.boot`."""

    seconds: float = 60.0
    exit_code: int = 0
    reason: str = "done"
    freezes_after_s: float | None = None
    """From then on nothing is heard of it, and nothing in it runs, its own deadline included."""

    exits_after_s: float | None = None
    """The whole container ends then, as when the system kills it for its memory; it is started again."""

    has_volume: bool = True
    skew_s: float = 0.0
    """How wrong the machine's clock is."""

    talk: tuple[str, ...] = ()


class Scripted:
    """A container that is a function of time."""

    def __init__(self, happenings: Iterator[Happening]) -> None:
        self._rest = happenings
        self._next = next(happenings, None)

    def until(self, at_s: float) -> list[Happening]:
        found: list[Happening] = []
        while self._next is not None and self._next.at_s <= at_s:
            found.append(self._next)
            self._next = next(self._rest, None)
        return found

    def signal(self, number: int) -> None:
        self.kill()

    def kill(self) -> None:
        self._next, self._rest = None, iter(())


def scripted(job: Job | Callable[[Birth], Job] = Job()) -> Runtime:
    def start(birth: Birth) -> Container:
        return Scripted(_boot_and_job(birth, job if isinstance(job, Job) else job(birth)))

    return start


def silent(_birth: Birth) -> Container:
    """A container that runs and says nothing."""
    return Scripted(iter(()))


def crashing(_birth: Birth) -> Container:
    """An image without a working command: it ends at once, and is started again, for ever."""
    return Scripted(iter([Line(_birth.at_s + 0.5, "exec: no such file"), Exit(_birth.at_s + 1.0)]))


def _boot_and_job(birth: Birth, job: Job) -> Iterator[Happening]:
    """What boot would print, decided by its own functions, until the container ends."""
    begins_s = birth.at_s + birth.first_line_s
    ends = [at_s for at_s in (job.freezes_after_s, job.exits_after_s) if at_s is not None]
    last_s = begins_s + min(ends, default=float("inf"))
    yield from itertools.takewhile(lambda happening: happening.at_s <= last_s, _undisturbed(birth, job, begins_s))
    if job.exits_after_s is not None:
        yield Exit(last_s)


def _undisturbed(birth: Birth, job: Job, begins_s: float) -> Iterator[Happening]:
    orders = boot.orders_of(birth.env)
    boot_id = f"{birth.pod_id}-{birth.number}"
    yield Line(begins_s, boot.event_line("boot", boot_id=boot_id, lease=orders.lease_id, nonce=orders.nonce))
    local_s = begins_s + job.skew_s
    refused = boot.refusal(orders, local_s)
    if refused is None and orders.lease_id in birth.marks:
        refused = "again", "The job was started here before."
    if refused:
        yield Line(begins_s, boot.event_line("refused", boot_id=boot_id, reason=refused[0], message=refused[1]))
        yield EndSelf(begins_s + orders.linger_s)
        return
    if job.has_volume:
        birth.marks.add(orders.lease_id)
    yield Line(begins_s, "the job runs")
    run_s = boot.seconds_to_run(orders, local_s)
    over_s = begins_s + min(job.seconds, run_s)
    beats = ((at_s, boot.event_line("heartbeat", boot_id=boot_id)) for at_s in _every(orders.heartbeat_s, begins_s))
    talks = ((begins_s + 1.0 + number, text) for number, text in enumerate(job.talk))
    for at_s, text in heapq.merge(beats, talks):
        if at_s >= over_s:
            break
        yield Line(at_s, text)
    if job.seconds > run_s:
        result = boot.result_of(None, -9, did_overrun=True)
    else:
        result = {"exit_code": job.exit_code, "reason": job.reason, "message": ""}
    yield Line(over_s, boot.event_line("result", **{**result, "boot_id": boot_id}))
    yield EndSelf(over_s + orders.linger_s)


def _every(seconds: float, from_s: float) -> Iterator[float]:
    return (from_s + seconds * number for number in itertools.count(1))


# --- real ---


class LocalProcesses:
    """Runs the command itself, as a session of its own, with the machine's environment and nothing of ours.

    There is no root to mount with, so what names the volume's path in command and environment is given the volume's
    folder. `python` is what an image's `python3` is.
    """

    def __init__(self, folder: Path, pod_env: Callable[[str], Mapping[str, str]], python: str = sys.executable) -> None:
        self._folder = folder
        self._pod_env = pod_env
        self._python = python

    def __call__(self, birth: Birth) -> "RealContainer":
        disk = self._folder / "disks" / birth.pod_id
        volume = self._folder / "volume"
        if disk.exists():
            durable.remove_tree(disk)
        durable.make_dirs(disk)
        durable.make_dirs(volume)
        mount = birth.env.get("HOTLAP_VOLUME", "")

        def placed(text: str) -> str:
            return text.replace(mount, str(volume)) if mount else text

        env = {name: placed(value) for name, value in birth.env.items()}
        inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        return RealContainer(
            self._found([placed(word) for word in birth.argv]),
            {**inherited, **env, **self._pod_env(birth.pod_id)},
            disk,
        )

    def _found(self, argv: list[str]) -> list[str]:
        program, *words = argv
        is_python = program in ("python", "python3")
        found = self._python if is_python else shutil.which(program) or program
        # What boot starts is looked up by name as well.
        return [found, *(self._python if word == "python3" else word for word in words)]


class RealContainer:
    def __init__(self, argv: list[str], env: dict[str, str], disk: Path) -> None:
        # Not the machine's id: another emulator, at the same seed, has a machine of the same one.
        self._mark = f"HOTLAP_TESTING_CONTAINER={secrets.token_hex(16)}"
        name, _, value = self._mark.partition("=")
        env = {**env, name: value}
        self._lines: list[str] = []
        self._turn = threading.Lock()
        self._is_over = False
        try:
            self._process = subprocess.Popen(
                argv,
                cwd=disk,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._process = None
            self._lines.append(f"exec: {argv[0]}: {error.strerror}")
            return
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def _read(self) -> None:
        assert self._process and self._process.stdout
        with self._process.stdout as stream:
            for raw in stream:
                with self._turn:
                    self._lines.append(raw.decode(errors="replace").rstrip("\n"))

    def until(self, at_s: float) -> list[Happening]:
        has_ended = self._process is None or self._process.poll() is not None
        if has_ended and self._process:
            self._reader.join(timeout=1.0)
        with self._turn:
            lines, self._lines = self._lines, []
        found: list[Happening] = [Line(at_s, text) for text in lines]
        if has_ended and not self._is_over:
            self._is_over = True
            self.kill()
            found.append(Exit(at_s))
        return found

    def signal(self, number: int) -> None:
        if self._process:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def kill(self) -> None:
        if self._process is None:
            return
        self.signal(signal.SIGKILL)
        for pid in guardian.pids_with(self._mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=1.0)


def argv_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """The command of a create request: `entrypoint` and `cmd`, or `args` as JSON of these, or as shell words."""
    args = body.get("args") or ""
    if args.lstrip().startswith("{"):
        body = json.loads(args)
        args = ""
    return (*body.get("entrypoint", ()), *body.get("cmd", ()), *shlex.split(args))

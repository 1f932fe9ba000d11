"""Run one child process under a deadline: the watchdog of a slice, and of every other process we start.

The child gets a process group of its own. Past its deadline the group is killed, whatever it is doing. A first
Ctrl-C or SIGTERM is passed on and waited for; a second Ctrl-C kills. The child tells its progress as JSON lines on
standard output; its standard error is talk.
"""

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any

from hotlap import clock, tether
from hotlap.errors import INTERRUPTED, OVERRAN, ChildCrashed

Event = dict[str, Any]
_POLL_S = 0.2
_TAIL_LINES = 20
_LINES_AT_ONCE = 1_000
_MAX_EVENT_CHARS, _MAX_TALK_CHARS = 1 << 26, 1 << 16
"""A longer line comes in pieces: one that a stranger's program never ends must not fill our memory."""

_PATIENCE_S = 1.0
_WAITING_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}


def with_waiting_threads(env: Mapping[str, str]) -> dict[str, str]:
    """An environment in which OpenMP's idle threads spin for some tenths of a millisecond and then sleep, unless it
    says something of that itself. By default they spin on, which on a machine that does anything else besides costs
    half the speed and more; if they sleep at once, one that does nothing else loses a third (docs/log.md, 2026-12-01).
    torch's builds for Linux have GNU's OpenMP, which takes the count; others only sleep."""
    return {**({} if _WAITING_THREADS.keys() & env.keys() else _WAITING_THREADS), **env}


@dataclass(frozen=True)
class ChildEnd:
    """How a child ended. `exit_code` is the child's own, 124 if its deadline ended it, 130 after a second Ctrl-C;
    a child killed by anything else has the negative signal number, as `subprocess` has it."""

    exit_code: int
    pid: int
    wall_s: float
    """From the child's start to its being reaped."""
    result: Event | None
    """Its last event, if that was a `result`."""
    last_words: str
    """The end of its standard error."""
    was_asked_to_stop: bool = False
    """Whether a stop signal was passed on to it."""

    def raise_if_killed(self, what: str) -> None:
        """
        Raises:
            ChildCrashed: a signal nobody here sent ended it.
        """
        if self.exit_code >= 0:
            return
        name = signal_name(-self.exit_code)
        hint = " The system may have run out of memory." if name == "SIGKILL" else ""
        raise ChildCrashed(
            f"{what} was ended by {name} from outside.{hint} What it published is intact; run the same command again."
        )


@dataclass
class Stops:
    """Stop signals this process received while it watched, and the children they are passed on to."""

    processes: "set[subprocess.Popen[str]]" = field(default_factory=set)
    num_interrupts: int = 0
    was_asked: bool = False
    was_killed: bool = False
    _told: set[int] = field(default_factory=set)

    def handle(self, number: int, _frame: FrameType | None) -> None:
        self.was_asked = True
        self.num_interrupts += number == signal.SIGINT
        self.was_killed = self.num_interrupts > 1
        for process in list(self.processes):
            self._pass_on(process)

    def watch(self, process: "subprocess.Popen[str]") -> None:
        """From now on; what was received before, it receives at once."""
        self.processes.add(process)
        if self.was_asked and process.pid not in self._told:
            self._pass_on(process)

    def _pass_on(self, process: "subprocess.Popen[str]") -> None:
        if self.was_killed:
            kill_group(process.pid)
        else:
            self._told.add(process.pid)
            process.send_signal(signal.SIGTERM)


def run_child(
    argv: Sequence[str],
    deadline: clock.Deadline,
    on_event: Callable[[Event], None] = lambda _event: None,
    on_talk: Callable[[str], None] = lambda _line: None,
    env: Mapping[str, str] | None = None,
    stops: Stops | None = None,
) -> ChildEnd:
    """Start a child, watch it to its end, and leave nothing of its process group behind.

    Signals are received in the main thread only. A child watched in another thread takes `stops`, for which the main
    thread is in `passing_on_stops`.
    """
    if stops is None:
        with passing_on_stops() as stops:
            return _watch(argv, deadline, on_event, on_talk, env, stops)
    return _watch(argv, deadline, on_event, on_talk, env, stops)


def _watch(
    argv: Sequence[str],
    deadline: clock.Deadline,
    on_event: Callable[[Event], None],
    on_talk: Callable[[str], None],
    env: Mapping[str, str] | None,
    stops: Stops,
) -> ChildEnd:
    started_s = clock.monotonic_s()
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=env,
        start_new_session=True,
    )
    stops.watch(process)
    assert process.stdout and process.stderr
    lines: queue.Queue[tuple[str, str]] = queue.Queue(_LINES_AT_ONCE)
    readers = [_reader("event", process.stdout, lines), _reader("talk", process.stderr, lines)]
    listener = _Listener(on_event, on_talk)
    did_overrun = False
    try:
        while process.poll() is None:
            listener.hear(lines, timeout_s=min(_POLL_S, deadline.remaining_s()))
            if deadline.is_over() and process.poll() is None:
                did_overrun = True
                kill_group(process.pid)
                process.wait()
    finally:  # also when a listener raised: nobody would watch the child any more
        kill_group(process.pid)
        process.wait()
        stops.processes.discard(process)
    wall_s = clock.monotonic_s() - started_s
    listener.hear_out(lines, readers)
    code = INTERRUPTED if stops.was_killed else OVERRAN if did_overrun else process.returncode
    return ChildEnd(code, process.pid, wall_s, listener.result, "\n".join(listener.talk), stops.was_asked)


class _Listener:
    def __init__(self, on_event: Callable[[Event], None], on_talk: Callable[[str], None]) -> None:
        self._on_event, self._on_talk = on_event, on_talk
        self.result: Event | None = None
        self.talk: list[str] = []

    def hear(self, lines: "queue.Queue[tuple[str, str]]", timeout_s: float) -> bool:
        """Handle lines that are there, waiting for a first one at most `timeout_s`; whether there was any. Not more
        than fit into the queue at once: a child that floods must not keep its watchdog from the clock."""
        wait_s = timeout_s
        for number in range(_LINES_AT_ONCE):
            try:
                kind, line = lines.get(timeout=wait_s) if wait_s else lines.get_nowait()
            except queue.Empty:
                return number > 0
            wait_s = 0.0
            self._take(kind, line)
        return True

    def hear_out(self, lines: "queue.Queue[tuple[str, str]]", readers: Sequence[threading.Thread]) -> None:
        """What a dead child had said. A process that escaped its group may hold the pipes open: not for long."""
        patience = clock.Deadline(clock.monotonic_s() + _PATIENCE_S)
        while not patience.is_over() and (self.hear(lines, 0.0) or any(reader.is_alive() for reader in readers)):
            readers[0].join(timeout=0.01)
        self.hear(lines, 0.0)

    def _take(self, kind: str, line: str) -> None:
        event = _event_in(line) if kind == "event" else None
        if event is None:
            self.talk = [*self.talk[1 - _TAIL_LINES :], line]
            self._on_talk(line)
        elif event["event"] == "result":
            self.result = event
        else:
            self._on_event(event)


def _event_in(line: str) -> Event | None:
    """The event a line holds; None for a library's print."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def _reader(kind: str, stream: IO[str], lines: "queue.Queue[tuple[str, str]]") -> threading.Thread:
    def read() -> None:
        longest = _MAX_EVENT_CHARS if kind == "event" else _MAX_TALK_CHARS
        with stream:
            while line := stream.readline(longest):
                lines.put((kind, line.rstrip("\n")))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


@contextmanager
def passing_on_stops() -> Generator[Stops]:
    """Stop signals go to the children that are watched with what this yields. For the main thread."""
    stops = Stops()
    previous = {
        number: signal.signal(number, stops.handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield stops
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def signal_name(number: int) -> str:
    """As in a manual, also for those that have only numbers: Python's list ends where real-time signals begin."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def kill_group(pid: int) -> None:
    """End what is left of a process group that a child began."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    except PermissionError:  # macOS says so of a group whose members are all dead
        return


def die_with_parent(parent: int | None = None) -> None:
    """For the child: ask Linux for a SIGTERM when the watching parent dies, so that no child runs on unwatched. Which
    process that is, only a child can know that was told; else it is whoever has it now."""
    tether.end_with(parent or os.getppid(), signal.SIGTERM)

"""Deadlines, process start as the operating system dates it, and the only place that reads a clock.

Two clocks: `monotonic_s` for every deadline (on Linux one clock for all processes since boot, so a moment can be
handed to a child), `wall_s` only where machines must agree on a moment (a lock's expiry) or people read it.
"""

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path


def monotonic_s() -> float:
    return time.monotonic()


def wall_s() -> float:
    return time.time()


def utc_text(at_s: float) -> str:
    """`at_s` seconds since 1970 as `2026-11-30T09:00:00Z`."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def sleep_s(seconds: float) -> None:
    time.sleep(seconds)


@dataclass(frozen=True)
class Deadline:
    """A moment by which work must be finished and saved."""

    at_s: float
    now_s: Callable[[], float] = monotonic_s

    def remaining_s(self) -> float:
        return max(0.0, self.at_s - self.now_s())

    def keeping(self, tail_s: float) -> "Deadline":
        """An earlier deadline, leaving `tail_s` for what comes after."""
        return Deadline(self.at_s - tail_s, self.now_s)

    def allows(self, next_s: float) -> bool:
        """Whether work of that length still fits. Past the deadline nothing does, not even what takes no time."""
        return not self.is_over() and next_s <= self.remaining_s()

    def is_over(self) -> bool:
        return self.remaining_s() <= 0.0


class OutOfTime(Exception):
    """Something is not ready by its deadline. What there is of it is kept, and the next call goes on."""


def process_started_s(pid: int | None = None) -> float:
    """When a process began, on `monotonic_s`'s clock, as the operating system dates it.

    Linux dates it to a hundredth of a second; elsewhere `ps` does to a second, taken towards the earlier moment.

    Raises:
        ProcessLookupError: there is no such process.
    """
    pid = os.getpid() if pid is None else pid
    if _HAS_PROC:
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(process_birth(pid)) / os.sysconf("SC_CLK_TCK")
        return time.monotonic() - age_s
    return time.monotonic() - _seconds_of(_ps("etime", pid)) - 1.0


def process_birth(pid: int) -> str:
    """A word that tells a process from a later one with the same pid.

    Raises:
        ProcessLookupError: there is no such process.
    """
    if not _HAS_PROC:
        return _ps("lstart", pid)
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(pid) from None
    state, *fields = stat.rpartition(")")[2].split()
    if state in _DEAD_STATES:
        raise ProcessLookupError(pid)
    return fields[18]


def boot_id() -> str:
    """A word that changes with every start of this machine, so that a pid from before is not believed."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else _ps("lstart", 1)


_HAS_PROC = Path("/proc/self/stat").exists()
_DEAD_STATES = "ZX"  # dead, only not reaped yet


def _ps(column: str, pid: int) -> str:
    command = ["ps", "-o", "stat=", "-o", f"{column}=", "-p", str(pid)]
    # A birth must read the same to processes with other locales.
    env = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
    state, _, value = subprocess.run(command, capture_output=True, text=True, env=env).stdout.strip().partition(" ")
    if not value or state[0] in _DEAD_STATES:
        raise ProcessLookupError(pid)
    return value.strip()


def _seconds_of(elapsed: str) -> int:
    """`[[days-]hours:]minutes:seconds` as seconds."""
    days, _, clock = elapsed.rpartition("-")
    seconds = 0
    for part in clock.split(":"):
        seconds = seconds * 60 + int(part)
    return int(days or 0) * 86_400 + seconds

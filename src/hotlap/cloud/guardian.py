"""The guardian of a local machine: starts its command, ends it at its deadline, and stays until all of it is reaped.

`python -m hotlap.cloud.guardian STAGED`, detached, so that it outlives whoever rented the machine. It adopts every
descendant that loses its parent, so one that forks away or ignores signals is still found, killed and waited for.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hotlap import clock, durable
from hotlap.cloud import boot
from hotlap.cloud.machine_files import MachineFolder

_PR_SET_CHILD_SUBREAPER = 36
_TICK_S = 0.05
_KILL_TICK_S = 0.01
GRACE_S = 8.0
"""From the request to end until the kill: a slice saves within it."""


class _Asked:
    """Whether somebody asked for the machine's end."""

    is_asked = False

    def handle(self, _number: int, _frame: object) -> None:
        self.is_asked = True


def main(argv: list[str]) -> int:
    staged = MachineFolder(Path(argv[0]))
    facts = staged.facts()
    left_s = facts["not_after_s"] - clock.wall_s()
    if left_s <= 0:
        print(f"The machine's time was over {-left_s:.0f} s ago.", file=sys.stderr)
        return 1
    deadline = clock.Deadline(clock.monotonic_s() + left_s)
    asked = _Asked()
    signal.signal(signal.SIGTERM, asked.handle)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _adopt_orphans()
    staged.write_guardian(os.getpid())
    folder = MachineFolder(staged.path.parent / facts["machine_id"])
    durable.rename_exclusively(staged.path, folder.path)
    folder.write_dead(_live(folder, facts, deadline, asked))
    return 0


def _live(folder: MachineFolder, facts: dict[str, Any], deadline: clock.Deadline, asked: _Asked) -> dict[str, Any]:
    """Everything from the command's start until no process of it is left; returns how it ended."""
    log = os.open(folder.log, os.O_WRONLY)
    env = {**os.environ, **facts["env"], "HOTLAP_VOLUME": str(folder.volume)}
    try:
        process = subprocess.Popen(
            facts["argv"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder.disk,
            env=env,
            start_new_session=True,
        )
    except OSError as error:
        return {"why": f"its command cannot be started: {error.strerror}", "exit_code": 127, "at_s": clock.wall_s()}
    status, why = _watch(process.pid, deadline, facts["grace_s"], asked)
    status = _kill_everything(process.pid, status)
    code = None if status is None else os.waitstatus_to_exitcode(status)
    process.returncode = code  # it was reaped past `subprocess`
    return {"why": why, "exit_code": code, "at_s": clock.wall_s()}


def _watch(pid: int, deadline: clock.Deadline, grace_s: float, asked: _Asked) -> tuple[int | None, str]:
    """Wait until the command ended, or must; its wait status if it did, and why it is over."""
    kill_at = deadline
    is_told = False
    while True:
        with contextlib.suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if reaped[0] == pid:
                    return reaped[1], "its command ended"
        if asked.is_asked and not is_told:
            is_told = True
            _signal_group(pid, signal.SIGTERM)
            kill_at = clock.Deadline(min(deadline.at_s, clock.monotonic_s() + grace_s))
        if deadline.is_over():
            return None, "its time was over"
        if kill_at.is_over():
            return None, "it was told to end and did not"
        clock.sleep_s(_TICK_S)


def _kill_everything(pid: int, status: int | None) -> int | None:
    """Kill every descendant until there is none, and return the command's wait status."""
    _signal_group(pid, signal.SIGKILL)
    while True:
        for descendant in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(descendant, signal.SIGKILL)
        try:
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                status = reaped[1] if reaped[0] == pid else status
        except ChildProcessError:  # nothing is left, which is the proof
            return status
        clock.sleep_s(_KILL_TICK_S)


def descendants(pid: int) -> list[int]:
    """Processes below one, as Linux lists them; elsewhere none are found and the group must do."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _parents() -> Iterator[tuple[int, int]]:
    for pid in boot.process_ids():
        with contextlib.suppress(OSError, ValueError, IndexError):
            yield pid, int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def pids_with(setting: str) -> Iterator[int]:
    """Processes whose environment has this, such as `NAME=value`, wherever in the tree of processes they went."""
    for pid in boot.process_ids():
        with contextlib.suppress(OSError):
            if setting.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                yield pid


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _adopt_orphans() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def order(staged: Path) -> list[str]:
    """The command line of a guardian."""
    return [sys.executable, "-m", "hotlap.cloud.guardian", str(staged)]


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except (OSError, json.JSONDecodeError) as error:
        print(f"The machine does not start: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)

"""The watchdog: deadlines, signals, and nothing left behind."""

import os
import signal
import sys
import time
from typing import Any

import pytest

from hotlap import child, clock
from hotlap.errors import ChildCrashed


def run(code: str, seconds: float = 30.0, **listeners: Any) -> child.ChildEnd:
    return child.run_child([sys.executable, "-c", code], clock.Deadline(clock.monotonic_s() + seconds), **listeners)


class Soon:
    """A deadline that is over when the test says so."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self.deadline = clock.Deadline(1.0, lambda: self._now_s)

    def is_now(self) -> None:
        self._now_s = 1.0


def test_a_line_without_an_end_comes_in_pieces() -> None:
    talk: list[str] = []
    run("import sys; sys.stderr.write('x' * 200_000)", on_talk=talk.append)
    assert "".join(talk) == "x" * 200_000 and max(map(len, talk)) == 65_536


def test_events_talk_and_result() -> None:
    events: list[dict[str, Any]] = []
    talk: list[str] = []
    code = """
import json, sys
print(json.dumps({"event": "step", "step": 1}), flush=True)
print("a library prints", flush=True)
print("talk", file=sys.stderr)
print(json.dumps({"event": "result", "exit_code": 75}))
sys.exit(75)
"""
    end = run(code, on_event=events.append, on_talk=talk.append)
    assert events == [{"event": "step", "step": 1}]
    assert sorted(talk) == ["a library prints", "talk"]
    assert (end.exit_code, end.result) == (75, {"event": "result", "exit_code": 75})
    end.raise_if_killed("It")


def test_past_its_deadline_the_whole_group_dies() -> None:
    """A child that ignores SIGTERM, with a grandchild that does too and holds the pipes."""
    code = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print('{"event": "grandchild", "pid": %d}' % grandchild.pid, flush=True)
time.sleep(600)
"""
    events: list[dict[str, Any]] = []
    soon = Soon()
    argv = [sys.executable, "-c", code]
    end = child.run_child(argv, soon.deadline, lambda event: (events.append(event), soon.is_now()))  # type: ignore
    assert end.exit_code == 124
    with pytest.raises(ProcessLookupError):
        clock.process_birth(end.pid)
    _wait_for_death(events[0]["pid"])  # of a grandchild nobody here can say when its kill has arrived


def _wait_for_death(pid: int) -> None:
    until = time.monotonic() + 20.0
    while time.monotonic() < until:
        try:
            clock.process_birth(pid)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    pytest.fail(f"process {pid} lives")


@pytest.mark.long
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_flood_of_words_does_not_keep_the_watchdog_from_the_clock(stream: str) -> None:
    """A progress bar gone wild, say: more lines than can be shown, without end."""
    soon, num_lines = Soon(), 0

    def show(_line: str) -> None:
        nonlocal num_lines
        num_lines += 1
        time.sleep(1e-4)
        if num_lines == 5000:
            soon.is_now()

    argv = [sys.executable, "-c", f"import sys\nwhile True: print('x' * 80, file=sys.{stream})"]
    end = child.run_child(argv, soon.deadline, on_talk=show)
    assert end.exit_code == 124
    assert len(end.last_words.splitlines()) == 20


def test_listener_that_fails_leaves_no_child() -> None:
    code = """
import os, time
print('{"event": "pid", "pid": %d}' % os.getpid(), flush=True)
time.sleep(600)
"""
    pids: list[int] = []

    def fail(event: dict[str, Any]) -> None:
        pids.append(event["pid"])
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run(code, on_event=fail)
    with pytest.raises(ProcessLookupError):
        clock.process_birth(pids[0])


def test_kill_from_outside_is_told_with_the_likely_cause() -> None:
    end = run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert end.exit_code == -signal.SIGKILL
    with pytest.raises(ChildCrashed, match=r"The slice was ended by SIGKILL from outside.*out of memory"):
        end.raise_if_killed("The slice")


def test_crash_leaves_its_last_words() -> None:
    end = run("raise SystemError('out of cheese')")
    assert end.exit_code == 1
    assert "out of cheese" in end.last_words


def test_first_stop_is_passed_on_and_waited_for() -> None:
    code = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), sys.exit(75)))
print('{"event": "ready"}', flush=True)
time.sleep(600)
"""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        end = run(code, on_event=lambda _event, number=number: os.kill(os.getpid(), number))
        assert end.exit_code == 75


def test_second_interrupt_kills() -> None:
    """The first reaches the child, which tells and stays."""
    code = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print('{"event": "told"}', flush=True))
print('{"event": "ready"}', flush=True)
time.sleep(600)
"""
    events: list[str] = []

    def interrupt(event: dict[str, Any]) -> None:
        events.append(event["event"])
        os.kill(os.getpid(), signal.SIGINT)

    assert run(code, on_event=interrupt).exit_code == 130
    assert events == ["ready", "told"]


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    run("pass")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_that_has_only_a_number_is_told_by_it() -> None:
    """Python names no real-time signals but the first and the last; a child may be ended by any."""
    number = signal.SIGRTMIN + 2
    end = run(f"import os; os.kill(os.getpid(), {number})")
    assert end.exit_code == -number
    with pytest.raises(ChildCrashed, match=f"ended by signal {int(number)} from outside"):
        end.raise_if_killed("It")

"""Deadlines without waiting, and a process's start checked against the system's own tools."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotlap import clock
from hotlap.clock import Deadline


@dataclasses.dataclass
class FakeClock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_deadline_counts_down_and_never_below_zero():
    now = FakeClock()
    deadline = Deadline(110.0, now)
    assert deadline.remaining_s() == 10.0
    now.now_s = 109.5
    assert deadline.remaining_s() == 0.5
    assert not deadline.is_over()
    for over_s in (110.0, 1e9):
        now.now_s = over_s
        assert deadline.remaining_s() == 0.0
        assert deadline.is_over()


def test_a_deadline_allows_what_ends_by_it():
    now = FakeClock()
    deadline = Deadline(110.0, now)
    assert deadline.allows(10.0)
    assert deadline.allows(0.0)
    assert not deadline.allows(10.0001)


def test_a_deadline_that_is_over_allows_nothing():
    """Also no work of unknown length that was estimated at zero."""
    now = FakeClock(110.0)
    assert not Deadline(110.0, now).allows(0.0)
    assert not Deadline(50.0, now).allows(0.0)


def test_keeping_a_tail_makes_an_earlier_deadline_on_the_same_clock():
    now = FakeClock()
    deadline = Deadline(110.0, now)
    earlier = deadline.keeping(3.0).keeping(2.0)
    assert earlier == Deadline(105.0, now)
    assert deadline.at_s == 110.0
    assert earlier.remaining_s() == 5.0


def test_a_deadline_cannot_be_moved():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Deadline(1.0).at_s = 2.0  # type: ignore[misc]


def test_a_deadline_runs_on_the_monotonic_clock_unless_told_otherwise():
    deadline = Deadline(clock.monotonic_s() + 1000.0)
    assert 990.0 < deadline.remaining_s() <= 1000.0
    assert not deadline.is_over()


def test_the_clock_set_forward_does_not_move_a_deadline(monkeypatch: pytest.MonkeyPatch):
    deadline = Deadline(clock.monotonic_s() + 1000.0)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert clock.wall_s() == 4e9
    assert deadline.remaining_s() > 990.0


def test_utc_text():
    assert clock.utc_text(0.0) == "1970-01-01T00:00:00Z"
    assert clock.utc_text(1_796_029_200.9) == "2026-11-30T09:00:00Z"


def test_sleep_and_wall_clock():
    before_s, began_s = clock.wall_s(), clock.monotonic_s()
    clock.sleep_s(0.02)
    assert clock.monotonic_s() - began_s >= 0.02
    assert abs(clock.wall_s() - before_s) < 60.0
    assert abs(clock.wall_s() - time.time()) < 1.0


# --- processes ---

ONLY_PROC = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="only Linux dates a process to a hundredth of a second"
)


@dataclasses.dataclass
class Child:
    process: "subprocess.Popen[bytes]"
    earliest_s: float
    latest_s: float

    @property
    def pid(self) -> int:
        return self.process.pid


@pytest.fixture
def child() -> Iterator[Child]:
    earliest_s = clock.monotonic_s()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield Child(process, earliest_s, clock.monotonic_s())
    process.kill()
    process.wait()


@ONLY_PROC
def test_a_child_is_dated_to_its_real_start(child: Child):
    started_s = clock.process_started_s(child.pid)
    # The system counts in hundredths, rounded down.
    assert child.earliest_s - 0.03 <= started_s <= child.latest_s + 0.03
    clock.sleep_s(0.1)
    assert clock.process_started_s(child.pid) == pytest.approx(started_s, abs=0.02)


def test_a_process_dates_itself_as_its_parent_does():
    code = "from hotlap import clock; print(clock.process_started_s(), clock.monotonic_s())"
    before_s = clock.monotonic_s()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    started_s, at_s = map(float, done.stdout.split())
    assert before_s - 1.1 <= started_s <= at_s <= clock.monotonic_s()
    assert started_s < at_s, "the interpreter's own start counts"


@ONLY_PROC
def test_the_fallback_without_proc_agrees_within_two_seconds(child: Child, monkeypatch: pytest.MonkeyPatch):
    for pid in (child.pid, os.getpid(), 1):
        precise_s = clock.process_started_s(pid)
        with monkeypatch.context() as patch:
            patch.setattr(clock, "_HAS_PROC", False)
            coarse_s = clock.process_started_s(pid)
        assert precise_s - 2.0 <= coarse_s <= precise_s + 0.05, "never later: a cap counts everything"


@pytest.mark.parametrize(
    ("elapsed", "seconds"),
    [("00:00", 0), ("01:07", 67), ("2:03:04", 7384), ("1-00:00:01", 86401), ("12-01:00:00", 1040400)],
)
def test_elapsed_time_as_ps_writes_it(elapsed: str, seconds: int):
    assert clock._seconds_of(elapsed) == seconds


@pytest.mark.parametrize("has_proc", [True, False])
def test_birth_is_the_same_word_for_the_same_process_only(
    has_proc: bool, child: Child, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(clock, "_HAS_PROC", has_proc and clock._HAS_PROC)
    birth = clock.process_birth(child.pid)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert clock.process_birth(child.pid) == birth
    assert clock.process_birth(child.pid) != clock.process_birth(1)


@pytest.mark.parametrize("has_proc", [True, False])
def test_a_process_that_ended_has_no_birth(has_proc: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(clock, "_HAS_PROC", has_proc and clock._HAS_PROC)
    process = subprocess.Popen([sys.executable, "-c", ""])
    # Dead and not reaped yet at first, then gone.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    for _ in range(2):
        for question in (clock.process_birth, clock.process_started_s):
            with pytest.raises(ProcessLookupError):
                question(process.pid)
        process.wait()


def test_a_stopped_process_is_alive(child: Child):
    birth = clock.process_birth(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    assert clock.process_birth(child.pid) == birth
    os.kill(child.pid, signal.SIGCONT)


@ONLY_PROC
def test_a_process_with_spaces_and_brackets_in_its_name_is_read(tmp_path: Path):
    name = tmp_path / "a) b (\udcff c"
    name.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(name), "60"])
    try:
        assert clock.process_started_s(process.pid) == pytest.approx(clock.monotonic_s(), abs=5.0)
    finally:
        process.kill()
        process.wait()


def test_boot_id_is_a_word_that_stays():
    assert clock.boot_id() == clock.boot_id() != ""

"""How trials end: statuses from real endings and from what the operating system tells."""

import math
import signal
from pathlib import Path
from typing import Any

import pytest

from hotlap.child import ChildEnd
from hotlap.research import executor
from hotlap.research.disturbed import disturbances, in_words
from hotlap.research.executor import finite, num_oom_kills, shares_of_cores, status_of

pytestmark = pytest.mark.long

GOOD = {"status": "ok", "val_search_nats_per_byte": 1.5}


def end(code: int, was_asked: bool = False) -> ChildEnd:
    return ChildEnd(code, 1, 1.0, None, "last words", was_asked)


CASES: list[tuple[ChildEnd, dict[str, Any] | None, bool, str, str | None]] = [
    (end(0), GOOD, False, "ok", None),
    (end(124), GOOD, False, "timeout", "Timeout"),
    (end(130, True), None, False, "killed", "Stopped"),
    (end(-signal.SIGTERM, True), None, False, "killed", "Stopped"),
    (end(-signal.SIGKILL), None, True, "oom", "OutOfMemoryKiller"),
    (end(-signal.SIGKILL), None, False, "killed", "SIGKILL"),
    (end(-signal.SIGABRT), GOOD, False, "crash", "SIGABRT"),
    (end(1), GOOD, False, "crash", "Exit1"),
    (end(2), GOOD, False, "refused", "OrderRefused"),
    (end(0), None, False, "crash", "NoResult"),
    (end(0), {"status": "splendid"}, False, "crash", "NoResult"),
    (end(0), {"status": "oom", "error_class": "OutOfMemoryError"}, False, "oom", "OutOfMemoryError"),
    (end(0), {"status": "ok", "val_search_nats_per_byte": math.inf}, False, "nan", "NonFiniteScore"),
    (end(0), {"status": "ok", "val_search_nats_per_byte": 0.0}, False, "refused", "ImpossibleScore"),
    (end(0), {"status": "ok", "val_search_nats_per_byte": -1}, False, "refused", "ImpossibleScore"),
    (end(0), {**GOOD, "validity": {"flags": ["zero_loss"]}}, False, "refused", "ImpossibleScore"),
    (end(0), {"status": "ok", "val_search_nats_per_byte": "low"}, False, "crash", "NoScore"),
]


@pytest.mark.parametrize(("ending", "result", "was_oom", "status", "word"), CASES)
def test_statuses(
    ending: ChildEnd, result: dict[str, Any] | None, was_oom: bool, status: str, word: str | None
) -> None:
    assert status_of(ending, result, was_oom) == (status, word)


def test_the_kernel_s_counter_of_memory_kills(tmp_path: Path) -> None:
    """As a control group and as /proc/vmstat write it."""
    group, machine = tmp_path / "memory.events", tmp_path / "vmstat"
    group.write_text("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n")
    machine.write_text("nr_free_pages 12\noom_kill 7\n")
    assert num_oom_kills([group, machine]) == 2
    assert num_oom_kills([tmp_path / "nothing", machine]) == 7
    assert num_oom_kills([tmp_path / "nothing"]) == 0
    assert num_oom_kills() >= 0


def test_numbers_that_are_none_become_null() -> None:
    value = {"a": [1.0, math.nan, {"b": -math.inf}], "c": "nan", "d": 3}
    assert finite(value) == {"a": [1.0, None, {"b": None}], "c": "nan", "d": 3}


def test_disturbances_are_of_the_machine_only() -> None:
    assert disturbances({"flags": ["uneven_steps", "probe", "zero_loss"]}) == ["probe"]
    assert disturbances(None) == [] and disturbances({}) == []


def test_a_disturbance_is_told_with_what_was_measured() -> None:
    """As a rented virtual machine was seen to waver, and a program of somebody's own that gives no numbers."""
    wavering = {
        "wall_over_charged": 1.35,
        "probe_before": 0.2,
        "probe_after": 0.27,
        "flags": ["wall_over_charged", "probe"],
    }
    slower = {**wavering, "wall_over_charged": 1.21, "flags": ["wall_over_charged"]}
    assert in_words([wavering, slower, {"flags": ["uneven_steps"]}, None]) == (
        "steps took 1.21 to 1.35 times what quiet ones take; "
        "a product of reference took 1.35 times as long after it as before"
    )
    assert in_words([{"flags": ["probe", "fan"], "probe_after": True}]) == "probe; fan"


def test_workers_keep_to_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor.os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3, 4}, raising=False)
    assert shares_of_cores(2) == [{0, 1}, {2, 3}]
    assert shares_of_cores(1) == [frozenset()]
    with pytest.raises(executor.ConfigError, match="5 cores"):
        shares_of_cores(6)


def test_the_driver_and_the_power_limit_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program stands in for `nvidia-smi`, and answers as it does."""
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = "--id=3" ] && echo "570.86.15, 700.00"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert executor.gpu_facts() == {"driver": "570.86.15", "power_w": 700.0}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    assert executor.gpu_facts() == {"driver": None, "power_w": None}

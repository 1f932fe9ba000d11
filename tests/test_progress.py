"""What is said of a slice while it runs, from its events."""

from typing import Any

import pytest

from hotlap import clock
from hotlap.cli.launch import _Display
from hotlap.cli.progress import SliceProgress
from hotlap.config import RunConfig
from hotlap.research.plan import last_words

SETTINGS = RunConfig(base_model="m", dataset="d")


def start(elapsed_s: float) -> dict[str, Any]:
    return {
        "event": "start", "run": "r", "resumed_at": 0, "slice_number": 1, "num_run_steps": 4,
        "deadline_at_s": 5e9, "elapsed_s": elapsed_s,
    }  # fmt: skip


def step(number: int, elapsed_s: float) -> dict[str, Any]:
    return {
        "event": "step", "step": number, "num_steps": 4, "loss": 1.0, "num_tokens": 512,
        "step_s": 2.0, "elapsed_s": elapsed_s,
    }  # fmt: skip


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """This machine's clock, which says something else than the slice's."""
    moment = [7e6]
    monkeypatch.setattr(clock, "monotonic_s", lambda: moment[0])
    return moment


def test_goodput_is_of_the_slice_s_own_time_whenever_it_is_seen(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine's events come late and all at once: counted from their arrival, every step would be all of the time."""
    with SliceProgress(SETTINGS) as progress:
        for event in (start(10.0), step(1, 12.0), step(2, 14.0), step(3, 17.0), step(4, 20.0)):
            progress.on_event(event)
    assert "step 4/4 loss 1.0000 | 256 tok/s" in (said := capsys.readouterr().err) and "goodput 40%" in said


def test_a_machine_s_slice_ends_when_it_ends_there(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(SliceProgress, "on_event", lambda _self, event: seen.append(event))
    with _Display(SETTINGS, None) as display:
        display.on_event(start(20.0))
    assert seen[0]["deadline_at_s"] == now[0] + SETTINGS.slice.cap_s - 20.0


@pytest.mark.parametrize(
    ("tail", "told"),
    [
        (': 0.13, "loss": 4.67}\n{"fraction": 0.2, "loss": 4.1}\n', "it said nothing else"),
        ('{"fraction": 0.2, "loss": 4.1}\nOSError: gone\n\n', "OSError: gone"),
        ("", "it said nothing else"),
        ('7304993}\n{"fraction": 0.2, "loss": null}', "it said nothing else"),
    ],
)
def test_a_failed_trial_is_told_by_its_last_words_and_not_by_its_progress(tail: str, told: str) -> None:
    assert last_words(tail) == told

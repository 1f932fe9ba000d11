"""Seeded fault schedules end well: a few here, and as many as wanted by `python -m benchmarks.faults`."""

from pathlib import Path

import pytest
from schedules import draw, play

pytestmark = pytest.mark.long


@pytest.mark.parametrize("seed", range(30))
def test_a_schedule_ends_well(seed: int, home: Path) -> None:
    home.mkdir()
    outcome = play(draw(seed), home)
    assert outcome.wrong == []


def test_a_seed_is_one_story(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def story(folder: Path) -> tuple[object, ...]:
        folder.mkdir()
        monkeypatch.setenv("HOTLAP_HOME", str(folder))
        outcome = play(draw(8), folder)
        return outcome.ending, outcome.cost_usd_micros, outcome.charged_usd_micros, outcome.num_requests

    assert story(tmp_path / "one") == story(tmp_path / "two")

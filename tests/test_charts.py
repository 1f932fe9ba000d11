"""A study's charts: drawn from its numbers alone, whole SVG files, the same bytes every time."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from hotlap.report import charts
from hotlap.research import board, proposer, simulate
from hotlap.research.history import History
from hotlap.research.space import StudyConfig

pytestmark = pytest.mark.long

NAMES = {"progress.svg", "axes.svg", "prediction.svg", "clock.svg", "curves.svg"}


def texts(data: bytes) -> set[str]:
    return {
        "".join(node.itertext()).strip() for node in ElementTree.fromstring(data).iter() if node.tag.endswith("text")
    }


def searched() -> History:
    study = StudyConfig(name="s", baseline_runs=2)
    return simulate.search(study, simulate.draw_bowl(np.random.default_rng(1)), 40, 1)


def plots_of(history: History) -> dict[str, object]:
    return board.plots(history) | {"expected": proposer.responses(history)}


def test_what_is_expected_of_an_axis_has_its_lowest_place_near_the_truth() -> None:
    """All past runs together, not only those of this axis; the band is narrow where runs are."""
    bowl = simulate.draw_bowl(np.random.default_rng(1))
    history = simulate.search(StudyConfig(name="s", baseline_runs=2), bowl, 100, 1)
    expected = proposer.responses(history)
    assert set(expected) == {f"x{index}" for index in range(8)}
    for index in range(8):
        anchor = history.anchor.config[f"x{index}"]
        near = min(expected[f"x{index}"], key=lambda row: abs(row[0] - anchor))
        far = max(expected[f"x{index}"], key=lambda row: abs(row[0] - anchor))
        assert near[2] < far[2]
    steep = int(np.argmax(np.abs(np.array(bowl.start) - np.array(bowl.optimum))))
    lowest = min(expected[f"x{steep}"], key=lambda row: row[1])[0]
    assert abs(lowest - bowl.optimum[steep]) < 0.25


def test_charts_show_what_the_numbers_hold_and_are_reproducible() -> None:
    plots = {**plots_of(searched()), "floors": {"bigram": 2.05}}
    first, second = charts.draw(plots), charts.draw(plots)
    assert set(first) == NAMES and first == second
    assert {
        "Progress",
        "baseline",
        "screen",
        "confirm",
        "sentinel",
        "anchor",
        "2 s.d. of a run",
        "bigram counts",
    } <= texts(first["progress.svg"])
    assert {f"x{index}" for index in range(8)} <= texts(first["axes.svg"])
    other = charts.draw({**plots, "progress": plots["progress"][:-3]})
    assert other["progress.svg"] != first["progress.svg"] and other["axes.svg"] == first["axes.svg"]


def test_a_study_without_runs_has_charts_too() -> None:
    history = simulate.search(StudyConfig(name="s"), simulate.draw_bowl(np.random.default_rng(1)), 0, 1)
    assert set(charts.draw(plots_of(history))) == NAMES
    nothing = {"progress": [], "anchor": [], "floors": {}, "response": {}, "prediction": [], "clock": [], "noise": None}
    nothing |= {"expected": {}}
    assert set(charts.draw({**nothing, "curves": {"baseline": None, "anchor": None}})) == NAMES


def test_names_of_axes_are_written_as_text() -> None:
    plots = plots_of(searched())
    data = charts.draw({**plots, "response": {"<b>&": [["<i>", 1.0], [None, 2.0]]}})["axes.svg"]
    assert {"<b>&", "<i>", "None"} <= texts(data)

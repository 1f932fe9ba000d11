"""Axes between values and the unit interval, hashes, and a study's file."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from research_stage import make_study

from hotlap.errors import ConfigError
from hotlap.research import space
from hotlap.research.executor import ask_axes, code_hash_of
from hotlap.research.space import Axis, Space, StudyConfig, config_hash, load_study, space_of

LR = Axis(name="lr", kind="log", default=1e-3, low=1e-4, high=1e-2)
DEPTH = Axis(name="depth", kind="integer", default=2, low=1, high=12)
HALF_LIFE = Axis(name="half_life", kind="log", default=70_000, low=1e3, high=1e7)
WIDTH = Axis(name="width", kind="choice", default=64, choices=(32, 48, 64, 96))
CAP = Axis(name="cap", kind="choice", default=15, choices=(None, 10, 15))
SWITCH = Axis(name="switch", kind="choice", default=True, choices=(True, False))
WARMUP = Axis(name="warmup", kind="linear", default=0.02, low=0.0, high=0.3)


def test_places_of_values() -> None:
    assert LR.unit(1e-3) == pytest.approx(0.5) and LR.at(0.5) == 1e-3 and LR.at(0.25) == 3.16e-4
    assert DEPTH.unit(1) == 0.0 and DEPTH.unit(12) == 1.0 and DEPTH.at(0.5) in (6, 7)
    assert WIDTH.unit(48) == pytest.approx(1 / 3) and WIDTH.at(0.4) == 48
    assert HALF_LIFE.at(0.5) == 100_000 and isinstance(HALF_LIFE.at(0.5), int)
    assert WARMUP.at(2.0) == 0.3 and WARMUP.at(-1.0) == 0.0


@given(st.floats(-0.5, 1.5), st.sampled_from([LR, DEPTH, HALF_LIFE, WIDTH, WARMUP]))
def test_every_place_has_a_value_on_the_axis(place: float, axis: Axis) -> None:
    value = axis.at(place)
    assert axis.complaint(value) is None
    assert abs(axis.unit(value) - min(1.0, max(0.0, place))) < (0.2 if axis.choices or axis.kind == "integer" else 0.02)


def test_near_values() -> None:
    assert DEPTH.near(2, 0.35, 6) == [1, 3, 4, 5, 6]
    assert WIDTH.near(64, 0.35, 6) == [48, 96]
    assert CAP.near(15, 0.35, 6) == [None, 10] and SWITCH.near(True, 0.1, 6) == [False]
    near = LR.near(1e-3, 0.3, 3)
    assert near == [2.51e-4, 3.98e-4, 6.31e-4, 1.58e-3, 2.51e-3, 3.98e-3]
    assert LR.near(1e-2, 0.3, 3) == [2.51e-3, 3.98e-3, 6.31e-3]


def test_complaints() -> None:
    assert "not within" in (LR.complaint(1.0) or "")
    assert "none of" in (WIDTH.complaint(50) or "") and "none of" in (CAP.complaint(20) or "")
    assert "no whole number" in (DEPTH.complaint(2.5) or "")
    assert "no number" in (DEPTH.complaint(True) or "") and "no number" in (LR.complaint("high") or "")
    assert CAP.complaint(None) is None and "none of" in (SWITCH.complaint(1) or "")


def test_encoding_keeps_names_apart_and_numbers_in_order() -> None:
    both = Space((LR, CAP), {})
    assert both.encode({"lr": 1e-3, "cap": None}) == pytest.approx([0.5, 0.25, 0.0, 0.0])
    assert both.encode({"lr": 1e-2, "cap": 15}) == pytest.approx([1.0, 0.0, 0.0, 0.25])


def test_hash_of_a_configuration() -> None:
    assert config_hash({"a": 1, "b": 0.5}) == config_hash({"b": 0.5, "a": 1.0})
    assert len({config_hash({"a": value}) for value in (1, 2, True, "1", None)}) == 5


def test_space_of_a_study(tmp_path: Path) -> None:
    path = make_study(tmp_path, axes=["x1", "x0"], start="x5 = 0.25")
    path.write_text(path.read_text() + "[range.x1]\nlow = 0.2\n")
    file = load_study(path)
    found = space_of(file, ask_axes(file.study.program))
    assert [(axis.name, axis.low, axis.high) for axis in found.axes] == [("x1", 0.2, 1.0), ("x0", 0.0, 1.0)]
    assert found.start["x0"] == 0.8 and found.start["x5"] == 0.25 and found.start["trick"] == "none"
    assert space.space_from_json(space.space_json(found)) == found
    assert file.study.data == str(tmp_path / "world.json"), "relative to the file"


BAD: list[tuple[str, str]] = [
    ("[study]\nname = 's'\nbudget_s = 'long'\n", "budget_s"),
    ("[study]\nname = 's'\nbudgets = 1\n", "no such setting"),
    ("[study]\nname = '../s'\n", "name"),
    ("[study\n", "not valid TOML"),
    ("[study]\nname = 's'\n[start]\nx = [1]\n", "start"),
]


@pytest.mark.parametrize(("text", "words"), BAD)
def test_bad_files_are_told(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "study.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_study(path)


@pytest.mark.parametrize(
    ("settings", "start", "words"),
    [
        ({"axes": ["x0", "y"]}, "", "no axis 'y'"),
        ({}, "y = 1", "no axis 'y'"),
        ({}, "x1 = 2.0", "not within"),
        ({"axes": ["trick"]}, "trick = 'magic'", "none of"),
    ],
)
def test_axes_that_the_trial_does_not_have(tmp_path: Path, settings: dict[str, Any], start: str, words: str) -> None:
    file = load_study(make_study(tmp_path, start=start, **settings))
    with pytest.raises(ConfigError, match=words):
        space_of(file, ask_axes(file.study.program))


def test_a_program_that_is_no_trial(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('hello')")
    with pytest.raises(ConfigError, match="does not tell its axes"):
        ask_axes(str(script))
    with pytest.raises(ConfigError, match=r"there is no hotlap\.nonesuch"):
        code_hash_of("hotlap.nonesuch")


def test_deadline_and_baseline_runs() -> None:
    study = StudyConfig(name="s", budget_s=20.0)
    assert study.deadline_s == 1.6 * 20 + 5 and study.num_baseline_runs == 6
    assert StudyConfig(name="s", setup_s=60.0).deadline_s == 97
    assert StudyConfig(name="s", budget_s=300.0).num_baseline_runs == 3
    assert StudyConfig(name="s", acceptance="naive").num_baseline_runs == 1


def test_a_study_s_file_as_editors_and_accidents_leave_it(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_bytes(b'\xef\xbb\xbf[study]\r\nname = "s"\r\n')
    assert load_study(path).study.deadline_s == 1.6 * 20 + 5, "and its trials end when they should"
    for text in ("budget_s = " + "9" * 5000, "axes = " + "[" * 5000):
        path.write_text(f"[study]\n{text}")
        with pytest.raises(ConfigError, match="is not valid TOML"):
            load_study(path)

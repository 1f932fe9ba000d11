"""Proposals from a command: a real one on disk, its bad answers, and Optuna's samplers behind the same door."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from research_stage import Stage, make_study

from hotlap import child
from hotlap.errors import ChildCrashed, ConfigError
from hotlap.research import asking, proposer, simulate
from hotlap.research.acceptance import Noise
from hotlap.research.history import History
from hotlap.research.space import StudyConfig, load_study

pytestmark = pytest.mark.long

NOISE = Noise(0.006, 10)

FAKE = """
import json, pathlib, sys
here = pathlib.Path(sys.argv[1])
asked = json.load(sys.stdin)
number = len(list(here.glob("asked*")))
(here / f"asked{number}").write_text(json.dumps(asked))
sys.exit(exec((here / "does").read_text()))
"""


def history_of(**study: Any) -> History:
    """A simulated search of eight axes, 20 runs old."""
    settings = StudyConfig(name="s", baseline_runs=2)
    history = simulate.search(settings, simulate.draw_bowl(np.random.default_rng(1)), 20, 1)
    history.study = StudyConfig(name="s", **study)
    return history


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, History, asking.Asker]:
    """A command that does what the file `does` says, a history to ask about, and who asks it."""
    (tmp_path / "ask.py").write_text(FAKE)
    command = (sys.executable, str(tmp_path / "ask.py"), str(tmp_path))
    history = history_of(proposer="llm", llm_command=command, llm_timeout_s=5.0)
    return tmp_path, history, asking.Asker(history.study, child.Stops(), proposer.all_fit)


def say(folder: Path, *answers: str) -> None:
    (folder / "does").write_text(f"print({list(answers)!r}[min(number, {len(answers) - 1})])")


def test_an_answer_is_one_changed_axis_with_its_reason(model: tuple[Path, History, asking.Asker]) -> None:
    folder, history, asker = model
    say(folder, 'I think:\n```json\n{"axis": "x3", "value": 0.123, "reason": "<b>because</b>"}\n```\n')
    made = asker.propose(history, NOISE, random.Random(1))
    assert made is not None and made.changes == (("x3", history.anchor.config["x3"], 0.123),)
    assert made.config == {**history.anchor.config, "x3": 0.123}
    assert (made.prediction["name"], made.prediction["reason"]) == ("llm", "<b>because</b>")

    asked = json.loads((folder / "asked0").read_text())
    assert set(asked["axes"]) == {f"x{number}" for number in range(8)} and asked["refused"] == []
    assert asked["anchor"]["config"] == history.anchor.config
    tried = [entry for axis in asked["axes"].values() for entry in axis["tried"]]
    assert len(tried) == sum(row["proposal"] is not None and not row["placebo"] for row in history.decisions)
    assert sum(run["num_runs"] for run in asked["runs"]) == sum(len(runs) for runs in history.groups.values())


BAD = {
    "no JSON": ("print('let me think')", "no JSON object"),
    "another axis": ("""print('{"axis": "seed", "value": 7}')""", "no axis 'seed'"),
    "off its axis": ("""print('{"axis": "x0", "value": 3}')""", "not within 0 to 1"),
    "no number": ("""print('{"axis": "x0", "value": NaN}')""", "not within 0 to 1"),
    "two values": ("""print('{"axis": "x0", "value": [0.1, 0.2]}')""", "one value is wanted"),
    "as it is": ("""print(json.dumps({"axis": "x1", "value": asked["anchor"]["config"]["x1"]}))""", "already"),
    "an error": (
        """print('{"axis": "x0", "value": 0.1}'); print("out of credit", file=sys.stderr); sys.exit(3)""",
        "credit",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_answer_is_told_why_and_asked_for_once_more(case: str, model: tuple[Path, History, asking.Asker]) -> None:
    folder, history, asker = model
    does, why = BAD[case]
    good = """print('{"axis": "x2", "value": 0.77}')"""
    (folder / "does").write_text(f"if number == 0:\n    {does}\nelse:\n    {good}")
    made = asker.propose(history, NOISE, random.Random(1))
    assert made is not None and made.changes[0][0] == "x2" and "instead_of" not in made.prediction
    (refused,) = made.prediction["refused"]
    assert why in refused["why"]
    assert json.loads((folder / "asked1").read_text())["refused"] == [refused]


def test_no_good_answer_is_replaced_and_in_the_end_refused(model: tuple[Path, History, asking.Asker]) -> None:
    folder, history, asker = model
    say(folder, "none")
    usual = proposer.PROPOSERS["gp1"](history, NOISE, random.Random(1), proposer.all_fit)
    assert usual is not None
    for _ in range(2):
        made = asker.propose(history, NOISE, random.Random(1))
        assert made is not None and made.config == usual.config
        assert made.prediction["instead_of"] == "llm" and len(made.prediction["refused"]) == 2
    with pytest.raises(ChildCrashed, match=r"no usable answer 6 times.*llm_command"):
        asker.propose(history, NOISE, random.Random(1))


def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "TRIES", 1)
    (tmp_path / "ask.sh").write_text(f"sleep 3600 &\necho $! >> {tmp_path}/pids\nwait\n")
    history = history_of(proposer="llm", llm_command=("sh", str(tmp_path / "ask.sh")), llm_timeout_s=5.0)
    made = asking.Asker(history.study, child.Stops(), proposer.all_fit).propose(history, NOISE, random.Random(1))
    assert made is not None and "no answer within 5 s" in made.prediction["refused"][0]["why"]
    for pid in (tmp_path / "pids").read_text().split():
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_command_that_is_not_there() -> None:
    history = history_of(proposer="llm", llm_command=("no-such-program",))
    made = asking.Asker(history.study, child.Stops(), proposer.all_fit).propose(history, NOISE, random.Random(1))
    assert made is not None and "cannot be started" in made.prediction["refused"][0]["why"]


def test_a_command_and_its_name_need_each_other(tmp_path: Path) -> None:
    for settings in ({"proposer": "llm"}, {"llm_command": ["ask"]}):
        with pytest.raises(ConfigError, match="need each other"):
            load_study(make_study(tmp_path, **settings))
    (tmp_path / "ask.py").write_text("")
    path = make_study(tmp_path, proposer="llm", llm_command=["python3", "ask.py"])
    assert load_study(path).study.llm_command == ("python3", str(tmp_path / "ask.py"))


def test_a_study_asked_of_a_command_counts_its_answers(tmp_path: Path) -> None:
    (tmp_path / "ask.py").write_text(FAKE)
    does = (
        'print("no") if number in (1, 2, 3) else print(json.dumps({"axis": "x0", "value": 0.8 - 0.05 * (number + 1)}))'
    )
    (tmp_path / "does").write_text(does)
    command = [sys.executable, "ask.py", str(tmp_path)]
    stage = Stage(make_study(tmp_path, proposer="llm", llm_command=command, placebo_every=1000, baseline_runs=2))
    assert stage.ask(3) == "trials"
    names = [candidate.first["proposer"]["name"] for candidate in stage.history.candidates.values()]
    assert names == ["llm", "gp1", "llm"]
    board = json.loads((stage.folder.path / "leaderboard.json").read_text())
    assert board["header"]["answers"] == {"asked": 3, "refused": 3, "replaced": 1}
    assert "3 answers refused, 1 replaced" in (stage.folder.path / "LEADERBOARD.md").read_text()


# --- Optuna ---


@pytest.mark.parametrize("kind", ["tpe", "cma", pytest.param("gp", marks=pytest.mark.torch)])
def test_optuna_s_samplers_change_one_axis_near_the_anchor(kind: str) -> None:
    """As the study asks: in a process. The same history and number give the same answer."""
    history = history_of(proposer=kind)
    asker = asking.Asker(history.study, child.Stops(), proposer.all_fit)
    made = [asker.propose(history, NOISE, random.Random(seed)) for seed in ((1, 1) if kind != "gp" else (1,))]
    assert made[0] is not None and made[0].prediction["refused"] == [] and made[0].prediction["name"] == kind
    ((name, old, new),) = made[0].changes
    assert isinstance(old, float) and isinstance(new, float) and 0.0 < abs(new - old) <= proposer.REACH + 0.01, name
    assert made[-1] == made[0]


def test_an_answer_of_optuna_s_that_was_refused_is_not_given_again() -> None:
    """Too large, say: then the next axis of the same point."""
    history = history_of(proposer="tpe")
    first = asking.Asker(history.study, child.Stops(), proposer.all_fit).propose(history, NOISE, random.Random(1))
    assert first is not None
    asker = asking.Asker(history.study, child.Stops(), lambda configs: [config != first.config for config in configs])
    second = asker.propose(history, NOISE, random.Random(1))
    assert second is not None and second.prediction["name"] == "tpe" and second.config != first.config
    assert "larger than the study allows" in second.prediction["refused"][0]["why"]


def test_optuna_that_is_not_there_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install \"hotlap\[optuna\]\""):
        asking.Asker(StudyConfig(name="s", proposer="tpe"), child.Stops(), proposer.all_fit)

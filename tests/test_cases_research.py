"""Bug reports about searches, B55 to B57: each with the naive way that shows the wrong value, then ours."""

import math
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from research_stage import Stage, living_trials, make_study, start_study

from hotlap.errors import ChildCrashed, ConfigError, MachineDisturbed, RunLocked
from hotlap.research import acceptance, board, plan, replay
from hotlap.research.acceptance import NAIVE, TWO_RUN
from hotlap.research.history import Anchor
from hotlap.research.space import load_study

pytestmark = pytest.mark.long

# --- B55: NaN loss. A guard written as `loss > limit` lets NaN run on, and a NaN score upsets every ranking. ---

FAILURES = [
    *(("nan", "nan", "Trick"), ("inf", "nan", "Trick"), ("huge", "diverged", "Trick")),
    *(("nan_score", "nan", "NonFiniteScore"), ("zero", "refused", "ImpossibleScore")),
]


def test_b55_the_naive_ranking_is_upset_by_one_nan() -> None:
    assert not math.nan > 100.0, "the guard that lets it run on"
    assert math.isnan(min([math.nan, 1.0, 0.9])), "and it becomes the best"
    assert min([0.0, 1.0, 0.9]) == 0.0, "as does the 0.0 that stood in for a crash"


def test_b55_no_failure_ever_ranks(tmp_path: Path) -> None:
    """The trial prints -1.0 with its failures; the best stays what trained, and the search goes on."""
    stage = Stage(make_study(tmp_path, baseline_runs=1, proposer="sweep1", axes=["x0", "x1"], placebo_every=1000))
    stage.search(1)
    before = stage.history.anchor.config_hash
    for number, (trick, _, _) in enumerate(FAILURES, start=2):
        (tmp_path / "wish").write_text(trick)
        assert stage.search(number) == "trials"
        assert stage.history.decisions[-1]["outcome"] == "reject_screen"
    failed = [row for row in stage.rows if row["kind"] == "run" and row["status"] != "ok"]
    assert [(row["status"], row["error_class"]) for row in failed] == [(status, word) for _, status, word in FAILURES]
    assert all(row["val_search_nats_per_byte"] is None and row["error_tail"] for row in failed)
    assert stage.history.anchor.config_hash == before
    assert all(entry["nats_per_byte"] > 1.9 for entry in board.leaderboard(stage.history)["entries"])
    (tmp_path / "wish").unlink()
    assert stage.search(len(FAILURES) + 2) == "trials"
    assert [row for row in stage.rows if row["kind"] == "run"][-1]["status"] == "ok"


# --- B56: noisy acceptance. Four runs of one configuration scatter by more than a "gain". ---

BASELINE = [1.000, 1.012, 0.991, 1.004]


def test_b56_the_naive_rule_keeps_a_change_of_seed() -> None:
    assert acceptance.judge_screen(NAIVE, BASELINE, 0.990, s=0.0).outcome == "provisional"


def test_b56_one_low_run_is_unclear_and_three_are_not() -> None:
    noise = acceptance.pooled_noise([BASELINE], prior_s=0.003 * 1.00175)
    assert noise.s == pytest.approx(0.00615, abs=5e-5)
    for first in (0.990, 0.985):
        judged = acceptance.judge_screen(TWO_RUN, BASELINE, first, noise.s)
        assert (judged.outcome, judged.moves_anchor) == ("confirm", False), "unclear: repeat"
    # The seed change repeated gives another draw of the baseline; the lucky one does not come twice.
    assert acceptance.judge_confirm(TWO_RUN, BASELINE, (0.990, 1.004), noise.s).outcome != "provisional"
    assert acceptance.judge_confirm(TWO_RUN, BASELINE, (0.960, 0.964), noise.s).outcome == "provisional"


def test_b56_a_seed_is_no_axis(tmp_path: Path) -> None:
    path = make_study(tmp_path)
    path.write_text(path.read_text().replace('"x3"]', '"seed"]'))
    with pytest.raises(ConfigError, match="lucky seed"):
        load_study(path)


def test_b56_of_200_null_changes_few_are_claimed_and_of_20_real_ones_most() -> None:
    """Noise 0.01, gain 0.03. Claimed is what moved the anchor and was then verified by fresh pairs."""
    source, sigma = np.random.default_rng(56), 0.01
    naive = sum(float(source.normal(1, sigma)) < min(BASELINE) for _ in range(200))
    assert naive > 0.05 * 200, "the naive rule keeps more than one in twenty"

    def is_claimed(gain: float) -> bool:
        incumbent = list(source.normal(1.0, sigma, 6))
        runs = source.normal(1.0 - gain, sigma, 2)
        judged = acceptance.judge_screen(TWO_RUN, incumbent, float(runs[0]), sigma)
        if judged.outcome == "confirm":
            judged = acceptance.judge_confirm(TWO_RUN, incumbent, (float(runs[0]), float(runs[1])), sigma)
        pairs = source.normal(gain, sigma * math.sqrt(2), acceptance.NUM_PAIRS)
        return judged.moves_anchor and acceptance.judge_pairs(list(pairs), sigma).verdict == "verified"

    assert sum(is_claimed(0.0) for _ in range(200)) <= 0.05 * 200
    assert sum(is_claimed(0.03) for _ in range(20)) >= 17


# --- B57: a killed runner's trial stays "running" for ever; failures of all kinds look alike. ---


def test_b57_a_killed_runner_s_trial_is_marked_and_made_again(tmp_path: Path) -> None:
    """Six trials; the runner is killed in the third. The naive fold still holds it for running."""
    stage = Stage(make_study(tmp_path, noise=0.0, sleep_s=0.1, baseline_runs=1))
    process = start_study(tmp_path, 6, 2)
    words, _ = process.communicate(timeout=170)
    assert process.returncode == -signal.SIGKILL, words
    naive_running = {row["run_id"] for row in stage.rows if row["kind"] == "started"} - {
        row["run_id"] for row in stage.rows if row["kind"] == "run"
    }
    assert len(naive_running) == 1, "for ever, if nobody cleans up"
    done_before = [row for row in stage.rows if row["kind"] == "run"]

    assert stage.search(6) == "trials"
    third = stage.history.candidates[2]
    assert [row["status"] for row in third.rows][:2] == ["killed", "ok"]
    assert third.rows[0]["run_id"] in naive_running and third.rows[0]["error_class"] == "StudyDied"
    assert third.rows[0]["seed_init"] != third.rows[1]["seed_init"]
    assert (
        stage.rows[: len(done_before)]
        and [row for row in stage.rows if row["kind"] == "run"][: len(done_before)] == done_before
    )
    assert not stage.history.open and stage.history.num_judged == 6


def test_b57_a_second_live_runner_is_refused(tmp_path: Path) -> None:
    make_study(tmp_path, sleep_s=0.3)
    process = start_study(tmp_path, 3)
    stage = Stage(tmp_path / "study.toml")
    while not living_trials(stage.folder):
        time.sleep(0.01)
    process.send_signal(signal.SIGSTOP)  # it lives, and is not done before we have asked
    with pytest.raises(RunLocked, match="Another process"):
        stage.search(3)
    assert stage.history.num_started >= 1, "readers are welcome"
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=120)[0].splitlines()[-1] == "trials"


KINDS = [
    *(("crash", "crash", "Exit1"), ("segfault", "crash", "SIGSEGV"), ("memory", "oom", "Trick")),
    *(("no_score", "crash", "NoScore"), ("no_result", "crash", "NoResult"), ("diverged", "diverged", "Trick")),
]


def test_b57_each_failure_has_its_own_status(tmp_path: Path) -> None:
    stage = Stage(make_study(tmp_path, baseline_runs=1, proposer="sweep1", axes=["x0", "x1"], placebo_every=1000))
    stage.search(1)
    for number, (trick, _, _) in enumerate(KINDS, start=2):
        (tmp_path / "wish").write_text(trick)
        stage.search(number)
    failed = [row for row in stage.rows if row["kind"] == "run" and row["status"] != "ok"]
    assert [(row["status"], row["error_class"]) for row in failed] == [(status, word) for _, status, word in KINDS]
    assert "this trial crashes" in failed[0]["error_tail"]


def test_b57_a_trial_killed_from_outside_is_made_again_but_not_for_ever(tmp_path: Path) -> None:
    stage = Stage(make_study(tmp_path, baseline_runs=1, proposer="sweep1", axes=["x0"], placebo_every=1000))
    stage.search(1)
    (tmp_path / "wish").write_text("sigkill")
    stage.search(2)
    assert [row["status"] for row in stage.history.candidates[1].rows] == ["killed"] * 3
    assert stage.history.decisions[-1]["outcome"] == "not_judged"


def test_b57_a_hanging_trial_is_ended_at_its_deadline(tmp_path: Path) -> None:
    stage = Stage(
        make_study(
            tmp_path, baseline_runs=1, proposer="sweep1", axes=["x0"], placebo_every=1000, budget_s=0.05, setup_s=0.0
        )
    )
    stage.search(1)
    (tmp_path / "wish").write_text("hang")
    stage.search(2)
    (row,) = [row for row in stage.rows if row["kind"] == "run" and row["status"] != "ok"]
    assert (row["status"], row["exit_code"]) == ("timeout", 124)
    assert not living_trials(stage.folder)


def test_a_disturbed_run_is_quarantined_and_made_again_once(tmp_path: Path) -> None:
    stage = Stage(make_study(tmp_path, baseline_runs=1, proposer="sweep1", axes=["x0"], placebo_every=1000))
    stage.search(1)
    (tmp_path / "wish").write_text("disturbed")
    stage.search(2)
    rows = stage.history.candidates[1].rows
    assert [(row["status"], row["flags"]) for row in rows] == [("invalid_machine", ["wall_over_charged"])] * 2
    assert rows[0]["error_tail"] == "steps took 1.35 times what quiet ones take"
    assert stage.history.decisions[-1]["outcome"] == "not_judged"
    assert rows[0]["val_search_nats_per_byte"] is not None, "kept, but in no decision"
    assert all(run.status == "ok" for runs in stage.history.groups.values() for run in runs)
    assert "- disturbed runs: 0 used, 2 left out (steps took 1.35 times" in markdown(stage)


def markdown(stage: Stage) -> str:
    return (stage.folder.path / "LEADERBOARD.md").read_text()


def test_a_machine_that_wavers_is_told_soon_and_the_advice_can_be_followed(tmp_path: Path) -> None:
    """Fifteen baselines were spent on it, `on_disturbed` could not be changed, and the same command never went on."""
    stage = Stage(make_study(tmp_path, baseline_runs=6, proposer="sweep1", axes=["x0"], placebo_every=1000))
    (tmp_path / "wish").write_text("disturbed")
    for num_runs in (5, 6):
        said = rf'{num_runs} of the last {num_runs} runs.*took 1\.35 times.*on_disturbed = "use"'
        with pytest.raises(MachineDisturbed, match=said):
            stage.search(1)
        assert [row["status"] for row in stage.history.ended] == ["invalid_machine"] * num_runs
    make_study(tmp_path, baseline_runs=6, proposer="sweep1", axes=["x0"], placebo_every=1000, on_disturbed="use")
    assert stage.search(1) == "trials"
    assert "- disturbed runs: 8 used, 6 left out" in markdown(stage) and "| 6 (6 disturbed) |" in markdown(stage)
    (decision,) = stage.history.decisions
    assert decision["reason"].endswith("; 8 of its 8 runs were disturbed"), decision
    assert replay.disagreements(stage.rows, stage.secret) == []


@pytest.mark.parametrize(
    ("runs", "gives_up"),
    [
        *(("|xxxx", False), ("|xxxxx", True), ("|xxxxoxx", False), ("|xxnxxnx", True)),
        *(("|" + "xo" * 20, False), ("|" + "xxxo" * 3 + "x", True)),
        *(("xxx|x", False), ("xxx|xx", True), ("xxxxx|", False), ("xxxxx|x", True), ("xxxxx|oxxxx", False)),
        ("xxxo" * 5 + "|xxxx", False),
    ],
)
def test_when_a_disturbed_machine_is_given_up(runs: str, gives_up: bool) -> None:
    """x: disturbed, o: ok, n: failed by itself, |: here the command began. A slice of a rented machine may have room
    for three runs only, and all slices together must not go on for ever."""
    status = {"x": "invalid_machine", "o": "ok", "n": "nan"}
    fields = {"proposal": 1, "config_hash": "c", "role": "screen", "validity": {"flags": ["probe"]}}
    ended = [{**fields, "status": status[each]} for each in runs.replace("|", "")]
    found = plan.trouble(ended, runs.index("|"), Anchor({}, "a", 1))
    assert isinstance(found, MachineDisturbed) if gives_up else found is None


def test_a_machine_that_has_become_quiet_goes_on(tmp_path: Path) -> None:
    """Of a search, and of a proof, whose pairs that were lost to the machine say nothing against the candidate."""
    settings = {"acceptance": "naive", "baseline_runs": 2, "proposer": "sweep1", "axes": ["x0"], "placebo_every": 1000}
    stage = Stage(make_study(tmp_path, noise=0.0, **settings))

    def on_a_wavering_machine(act: Callable[[], str]) -> None:
        (tmp_path / "wish").write_text("disturbed")
        with pytest.raises(MachineDisturbed):
            act()
        (tmp_path / "wish").unlink()

    on_a_wavering_machine(lambda: stage.search(1))
    assert stage.search(1) == "trials" and len(stage.history.anchors) == 2
    for _ in range(2):
        on_a_wavering_machine(stage.verify)
    assert stage.verify() == "judged" and stage.history.verified is not None
    assert stage.history.verified["num_pairs"] == 8 and "disturbed" not in stage.history.verified["reason"]


@pytest.mark.parametrize(
    ("trick", "words"), [("crash", "3 runs of the baseline failed"), ("sigkill", "killed from outside")]
)
def test_what_stood_in_a_command_s_way_does_not_stand_in_the_next_one_s(tmp_path: Path, trick: str, words: str) -> None:
    """What was lacking, a package or memory, is mended outside of the study's file, which stays as it is."""
    stage = Stage(make_study(tmp_path, baseline_runs=1, proposer="sweep1", axes=["x0"], placebo_every=1000))
    (tmp_path / "wish").write_text(trick)
    with pytest.raises(ChildCrashed, match=words):
        stage.search(1)
    assert len(stage.history.ended) == 3
    (tmp_path / "wish").unlink()
    assert stage.search(1) == "trials"
    assert replay.disagreements(stage.rows, stage.secret) == []

"""What bounds a search: minutes, a goal that survives a stop, caps on size, jumps when stuck, and what it all costs."""

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from research_stage import Stage, make_study

from hotlap import clock
from hotlap.errors import ConfigError, UsageError
from hotlap.research import claim, executor, plan, proposer, simulate
from hotlap.research.acceptance import Noise
from hotlap.research.disturbed import disturbances
from hotlap.research.executor import NUMBERS
from hotlap.research.history import History
from hotlap.research.price import price_of
from hotlap.research.sizes import Caps
from hotlap.research.space import Axis, Space, StudyConfig, in_words, space_json

pytestmark = pytest.mark.long

NOISE = Noise(0.006, 10)


# --- minutes and goals ---


def test_no_trial_starts_that_could_outlast_the_minutes_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """A trial may take 25.8 s here. The clock is the test's: a day passes after the second proposal's first run."""
    stage, now_s = Stage(make_study(tmp_path, noise=0.0, baseline_runs=1, proposer="sweep1", placebo_every=1000)), [0.0]
    until = clock.Deadline(60.0, lambda: now_s[0])
    assert stage.path.exists()

    def on_row(row: dict[str, Any], history: History) -> None:
        if row["kind"] == "run" and row["proposal"] == 1:
            now_s[0] = 50.0

    assert stage.opened(lambda opened: opened.search(4, until), on_row) == "time"
    assert stage.history.num_judged in (1, 2) and not stage.history.open
    judged = stage.history.num_judged
    assert stage.history.goal is not None and stage.history.goal["num_judged"] == 4
    assert stage.ask(4) == "trials" and stage.history.num_judged == 4, f"{4 - judged} were left"
    assert stage.ask(1) == "trials" and stage.history.num_judged == 5
    with pytest.raises(UsageError, match=r"One trial may take 26 s, and 10 s are left"):
        stage.ask(1, clock.Deadline(60.0, lambda: 50.0))


def test_a_pair_is_not_begun_without_room_for_both_arms(tmp_path: Path) -> None:
    stage = Stage(make_study(tmp_path, noise=0.0, baseline_runs=1, proposer="sweep1", placebo_every=1000, axes=["x0"]))
    stage.search(3)
    until = clock.Deadline(40.0, lambda: 0.0)  # one of 25.8 s fits, two do not
    assert stage.opened(lambda opened: opened.run(claim.next_in_verification, until)) == "time"
    assert not any(row["role"] == "verify" for row in stage.rows if row["kind"] == "run")


# --- size ---

SIZED = """
import json, pathlib, sys
if "--sizes" in sys.argv:
    with open(pathlib.Path(__file__).with_name("asked"), "a") as file: file.write("x")
    configs = json.load(sys.stdin)["configs"]
    print(json.dumps([{"params": 100 + 100 * config["x1"], "expected_mem_mb": 10} for config in configs]))
elif "--axes" in sys.argv:
    print(json.dumps({f"x{i}": {"default": 0.5, "kind": "linear", "low": 0, "high": 1} for i in range(8)}))
"""


def test_what_is_too_large_is_never_proposed(tmp_path: Path) -> None:
    """The program is asked once for a batch, and not again for what it has told."""
    (tmp_path / "sized.py").write_text(SIZED)
    history = simulate.search(
        StudyConfig(name="s", baseline_runs=2), simulate.draw_bowl(np.random.default_rng(1)), 20, 1
    )
    x1 = history.anchor.config["x1"]
    assert isinstance(x1, float)
    caps = Caps(StudyConfig(name="s", program=str(tmp_path / "sized.py"), max_params=int(100 + 100 * x1)))
    for kind in ("gp1", "random1", "sweep1"):
        history.study = StudyConfig(name="s", proposer=kind)  # type: ignore[arg-type]
        made = proposer.propose(history, NOISE, random.Random(3), caps.fits)
        assert made is not None and 100 + 100 * float(made.config["x1"] or 0) <= int(100 + 100 * x1)
        caps.fits([made.config])
    assert (tmp_path / "asked").read_text() == "xxx"
    with pytest.raises(ConfigError, match=r"baseline is too large: params 1\d\d.*of at most 50"):
        Caps(StudyConfig(name="s", program=str(tmp_path / "sized.py"), max_params=50)).require_start(
            history.anchors[0].config
        )


def test_a_program_that_tells_no_sizes_cannot_be_capped(tmp_path: Path) -> None:
    (tmp_path / "mute.py").write_text("print('hello')")
    caps = Caps(StudyConfig(name="s", program=str(tmp_path / "mute.py"), max_mem_mb=5.0))
    with pytest.raises(ConfigError, match="answers --sizes"):
        caps.fits([{"x0": 1.0}])
    assert Caps(StudyConfig(name="s", program=str(tmp_path / "mute.py"))).fits([{"x0": 1.0}]) == [True]


# --- jumps and plateaus ---


def stuck(num_failed: int) -> History:
    """A search over a learning rate, a batch size and another axis, of which all proposals have failed."""
    axes = (
        Axis(name="lr", kind="log", default=1e-3, low=1e-4, high=1e-2),
        Axis(name="batch_size", kind="choice", default=16, choices=(4, 8, 16, 32, 64)),
        Axis(name="x2", kind="linear", default=0.5, low=0.0, high=1.0),
    )
    study = StudyConfig(name="s", baseline_runs=2, placebo_every=1000).model_dump(mode="json")
    space = Space(axes, {"lr": 1e-3, "batch_size": 16, "x2": 0.5})
    history = History.of([{"kind": "campaign", "campaign_id": "s", "study": study, "space": space_json(space)}])
    while history.num_judged < num_failed:
        action = plan.next_in_search(history, b"k", "2000-01-01", 10**6)
        if isinstance(action, plan.Decide):
            history.apply({**action.row, "at": ""})
            continue
        assert isinstance(action, plan.Start)
        history.apply({**action.row, "started_at": "2000-01-01"})
        # Whatever is changed is worse, by more than luck explains.
        loss = 2.0 + 0.004 * (history.num_started % 2) + 0.1 * bool(action.row["changes"])
        ended = dict.fromkeys((*NUMBERS, "exit_code", "error_class", "error_tail", "ended_at", "cell"))
        ended |= {"kind": "run", "status": "ok", "val_search_nats_per_byte": loss, "flags": []}
        history.apply({**action.row, **ended})
    return history


def test_two_coupled_axes_jump_once_after_a_dozen_failures() -> None:
    for num_failed, num_changed in ((11, 1), (12, 2), (13, 1)):
        history = stuck(num_failed)
        made = proposer.propose(history, history.noise(), random.Random(1))
        assert made is not None and len(made.changes) == num_changed, num_failed
        if num_changed == 2:
            assert {axis for axis, _, _ in made.changes} == {"lr", "batch_size"}
            assert in_words(made.changes).count("→") == 2
    jump = list(history.candidates.values())[12].first
    assert len(jump["changes"]) == 2 and (jump["axis"], jump["old"], jump["new"]) == (None, None, None)


# --- what is written down ---


def test_what_a_run_costs_and_which_code_it_was(tmp_path: Path) -> None:
    """In a repository of its own: its commit, and whether anything was changed since."""
    (tmp_path / "trial.py").write_text("1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *words], cwd=tmp_path, check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True, check=True)
    program = str(tmp_path / "trial.py")
    assert executor.commit_of(program) == {"git_commit": commit.stdout.strip(), "dirty": False}
    (tmp_path / "trial.py").write_text("2\n")
    executor.commit_of.cache_clear()
    assert executor.commit_of(program)["dirty"] is True
    (tmp_path / "loose.py").write_text("")
    assert executor.commit_of(str(tmp_path / "loose.py")) == {"git_commit": None, "dirty": None}
    outside = tmp_path / ".git"
    outside.rename(tmp_path / "gone")
    executor.commit_of.cache_clear()
    assert executor.commit_of(program) == {"git_commit": None, "dirty": None}

    stage = Stage(make_study(tmp_path / "study", baseline_runs=1, usd_per_hour=3.6, proposer="sweep1"))
    stage.search(1)
    runs = [row for row in stage.rows if row["kind"] == "run"]
    for row in runs:
        assert row["cost_usd"] == pytest.approx(row["total_s"] / 1000) and row["price_usd_h"] == 3.6
        assert {"git_commit", "dirty", "mfu", "executor"} <= set(row) and row["validity"]["throttled_us"] >= 0
    header = json.loads((stage.folder.path / "leaderboard.json").read_text())["header"]
    assert header["cost_usd"] == pytest.approx(sum(row["cost_usd"] for row in runs))
    assert ", $0.0" in (stage.folder.path / "LEADERBOARD.md").read_text()


def test_utilization_is_a_share_of_the_reference_product() -> None:
    fields: dict[str, Any] = {"flops_per_token": 6e6, "tokens_per_s": 1e4, "machine": {"gpu": None}}
    fields["validity"] = {"probe_before": 0.5, "probe_after": 0.4}
    assert executor.mfu_of(fields) == pytest.approx(6e10 / (2 * 256**3 / 0.4e-3))
    assert executor.mfu_of({**fields, "machine": {"gpu": "H100"}}) is None
    assert executor.mfu_of({**fields, "validity": None}) is None


def test_a_quota_that_held_a_run_back_is_a_disturbance(tmp_path: Path) -> None:
    (tmp_path / "cpu.stat").write_text("usage_usec 5\nnr_throttled 3\nthrottled_usec 1234\n")
    assert executor.throttled_us(tmp_path / "cpu.stat") == 1234 and executor.throttled_us(tmp_path / "none") == 0
    fields: dict[str, Any] = {"validity": {"flags": ["uneven_steps"]}, "total_s": 10.0}
    held = executor.with_throttling(fields, 300_000)["validity"]
    assert held["throttled_us"] == 300_000 and disturbances(held) == ["throttled"]
    assert disturbances(executor.with_throttling(fields, 100_000)["validity"]) == []


# --- price ---


def test_a_session_s_price_by_hand() -> None:
    """20 s trials, of which the longest takes 37 s, in slices of 300 s that take 30 s to boot: 10 fit, of 25 s each."""
    study = StudyConfig(name="s")
    price = price_of(study, None, 8, 360_000, 300.0, 30.0)
    runs = 6 + 8 * 1.31 * 9 / 8
    assert price.num_runs == pytest.approx(runs, abs=1)
    assert price.num_slices == 2 and price.usd_micros == 2 * 30_000
    assert price.most_slices == -(-2 * (6 + 18) // 7) and price.most_usd_micros == price.most_slices * 30_000
    assert price.words.startswith("A full 8-iteration session costs about $0.0600: 18 runs of 25 s in 2 slices.")
    with pytest.raises(ConfigError, match="37 s, and a slice of 60 s has 30 s"):
        price_of(study, None, 8, 360_000, 60.0, 30.0)

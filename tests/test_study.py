"""A study as a whole: real child programs, a real journal, kills at any moment."""

import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import trial_program
from money import NOON_S
from research_stage import Stage, essence, living_trials, make_study, start_study

from hotlap import clock
from hotlap.errors import ConfigError, CorruptFile, RunChanged, Undecided, UsageError
from hotlap.research import board, plan, replay, seeds, simulate
from hotlap.research.acceptance import NAIVE, TWO_RUN
from hotlap.research.history import History
from hotlap.research.space import StudyConfig

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """A study with 14 proposals judged, and its anchor verified."""
    stage = Stage(make_study(tmp_path_factory.mktemp("searched"), placebo_every=5, sentinel_every=6))
    assert stage.search(14) == "trials"
    assert stage.verify() == "judged"
    return stage


def test_a_search_finds_what_is_there_to_find(searched: Stage) -> None:
    history = searched.history
    first, last = history.anchors[0].config, history.anchor.config
    assert trial_program.true_loss(first) == pytest.approx(2.315)
    assert trial_program.true_loss(last) < 2.09
    assert history.num_judged == 14 and not history.in_progress and not history.open
    roles = [row["role"] for row in searched.rows if row["kind"] == "run"]
    assert roles[:3] == ["baseline"] * 3 and roles.count("baseline") == 3
    assert roles.count("sentinel") >= 1 and roles.count("verify") == 16


def test_every_run_is_announced_and_every_change_is_of_one_axis(searched: Stage) -> None:
    started: dict[str, dict[str, object]] = {}
    anchor_hashes = {anchor.config_hash: anchor.config for anchor in searched.history.anchors}
    for row in searched.rows:
        if row["kind"] == "started":
            started[row["run_id"]] = row
        if row["kind"] == "run":
            before = started[row["run_id"]]
            assert before["seed_init"] == row["seed_init"] and before["config"] == row["config"]
        if row["kind"] == "started" and row["role"] == "screen":
            parent = anchor_hashes[row["parent_hash"]]
            changed = [axis for axis in parent if parent[axis] != row["config"][axis]]
            assert changed == [row["axis"]] and parent[row["axis"]] == row["old"]
            assert {"mu", "sd", "ei", "p_feasible"} <= set(row["proposer"])


def test_no_seed_comes_twice_and_arms_of_a_pair_share_their_data(searched: Stage) -> None:
    runs = [row for row in searched.rows if row["kind"] == "run"]
    assert len({row["seed_init"] for row in runs}) == len(runs)
    pairs: dict[int, list[dict[str, object]]] = {}
    for row in runs:
        if row["role"] == "verify":
            pairs.setdefault(row["pair"]["number"], []).append(row)
    assert len(pairs) == 8
    for arms in pairs.values():
        assert len({row["seed_data"] for row in arms}) == 1
    assert "".join(str(row["arm"]) for number in sorted(pairs) for row in pairs[number]) == "ICCIICCIICCIICCI"
    others = [row["seed_data"] for row in runs if row["role"] != "verify"]
    assert len(set(others)) == len(others)


def test_only_verification_sees_the_locked_split(searched: Stage) -> None:
    for row in searched.rows:
        if row["kind"] == "run":
            assert (row["val_lock_nats_per_byte"] is not None) == (row["role"] == "verify")


def test_a_placebo_runs_the_anchor_and_is_revealed(searched: Stage) -> None:
    history = searched.history
    placebos = [row for row in history.decisions if row["placebo"]]
    assert len(placebos) in (2, 3)
    for row in placebos:
        first = history.candidates[row["proposal"]].first
        assert row["ran_hash"] == first["parent_hash"] != first["config_hash"]
        assert seeds.commitment(row["salt"], True) == first["commitment"] != seeds.commitment(row["salt"], False)
        order = json.loads((searched.folder.trial(row["run_ids_candidate"][0]) / "order.json").read_text())
        assert order["config"] == history.anchor_named(row["ran_hash"]).config
    for row in history.decisions:
        if row["proposal"] is not None and not row["placebo"]:
            first = history.candidates[row["proposal"]].first
            assert seeds.commitment(row["salt"], False) == first["commitment"]


def test_the_claim_is_the_mean_of_its_pairs(searched: Stage) -> None:
    history = searched.history
    (claim_row,) = [row for row in history.decisions if row["outcome"] == "verified"]
    lock = {row["run_id"]: row["val_lock_nats_per_byte"] for row in searched.rows if row["kind"] == "run"}
    gains = [
        lock[theirs] - lock[own]
        for own, theirs in zip(claim_row["run_ids_candidate"], claim_row["run_ids_incumbent"], strict=True)
    ]
    assert claim_row["delta"] == pytest.approx(sum(gains) / 8)
    low, high = claim_row["interval_90"]
    truth = trial_program.true_loss(history.anchors[0].config) - trial_program.true_loss(history.anchor.config)
    assert low < claim_row["delta"] < high and low - 0.01 < truth < high + 0.01
    assert json.loads((searched.folder.path / "best.json").read_text())["config"] == history.anchor.config


def test_verifying_again_changes_nothing(searched: Stage) -> None:
    before = searched.folder.journal.read_bytes()
    assert searched.verify() == "judged"
    assert searched.folder.journal.read_bytes() == before


def test_the_board_is_a_function_of_the_journal(searched: Stage) -> None:
    files = {name: (searched.folder.path / name).read_bytes() for name in board.render(searched.history)}
    assert set(files) == {"LEADERBOARD.md", "leaderboard.json", "best.json", "anchor.json", "plots.json"}
    assert board.render(History.of(searched.rows)) == files
    assert replay.disagreements(searched.rows, searched.secret) == []


def test_the_leaderboard_s_mean_leaves_out_the_runs_that_chose(searched: Stage) -> None:
    history = searched.history
    entry = next(
        entry for entry in board.leaderboard(history)["entries"] if entry["config_hash"] == history.anchor.config_hash
    )
    chosen_by = next(row for row in history.decisions if row["candidate_hash"] == history.anchor.config_hash)
    assert not set(chosen_by["run_ids_candidate"]) & set(entry["run_ids"])
    losses = {run.run_id: run.loss for run in history.runs}
    assert entry["nats_per_byte"] == pytest.approx(
        sum(losses[name] or 0 for name in entry["run_ids"]) / entry["num_runs"]
    )
    assert entry["rank"] == 1 and entry["state"] == "verified" and entry["num_runs"] >= 8
    text = (searched.folder.path / "LEADERBOARD.md").read_text()
    assert "| 1 |" in text and "*bigram counts*" in text and "placebos kept: " in text


def test_an_edited_journal_is_found_out(searched: Stage) -> None:
    rows = json.loads(json.dumps(searched.rows))
    victim = next(row for row in rows if row["kind"] == "run" and row["role"] == "screen")
    victim["val_search_nats_per_byte"] -= 0.2
    assert replay.disagreements(rows, searched.secret)


def test_the_same_runs_under_another_rule(searched: Stage) -> None:
    history = searched.history
    naive, two = replay.under(NAIVE, history), replay.under(TWO_RUN, history)
    assert len(naive) == len(two) == 14
    record = next(row for row in searched.rows if row["kind"] == "run")["val_search_nats_per_byte"]
    for judgment in naive:
        assert judgment.kept == (judgment.first_loss < record)
        record = min(record, judgment.first_loss)
    assert sum(bool(judgment.kept) for judgment in naive) >= sum(bool(judgment.kept) for judgment in two)


def test_a_study_without_a_baseline_has_nothing_to_judge_by_another_rule() -> None:
    """Every run of it may have failed, on a busy machine say."""
    bowl = simulate.draw_bowl(np.random.default_rng(1))
    history = simulate.search(StudyConfig(name="s", baseline_runs=4), bowl, 0, 1)
    assert replay.under(NAIVE, history) == [] and replay.summary([], history)["num_judged"] == 0


# --- killed at any moment ---


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_a_study_killed_15_times_decides_as_one_that_was_not(tmp_path: Path) -> None:
    """Without noise a run made again has the same loss, so the two journals must tell the same story."""
    calm, torn = tmp_path / "calm", tmp_path / "torn"
    for folder in (calm, torn):
        make_study(folder, noise=0.0, sleep_s=0.02)
    source, stage = random.Random(11), Stage(torn / "study.toml")
    for _ in range(15):
        before = size_of(stage.folder.journal)
        process = start_study(torn, 1000)
        while size_of(stage.folder.journal) <= before:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.005)
        time.sleep(source.uniform(0.0, 1.6))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        until = time.monotonic() + 60
        while living_trials(stage.folder):
            assert time.monotonic() < until, living_trials(stage.folder)
            time.sleep(0.01)
    goal = len(stage.history.candidates) + 2
    for folder in (torn, calm):
        assert start_study(folder, goal).communicate(timeout=170)[0].splitlines()[-1] == "trials"

    rows = stage.rows
    assert essence(rows) == essence(Stage(calm / "study.toml").rows)
    names = [row["run_id"] for row in rows if row["kind"] == "run"]
    assert len(set(names)) == len(names) == sum(row["kind"] == "started" for row in rows)
    killed = [row for row in rows if row["kind"] == "run" and row["status"] == "killed"]
    assert killed and all(row["val_search_nats_per_byte"] is None for row in killed)
    seeds_used = [row["seed_init"] for row in rows if row["kind"] == "started"]
    assert len(set(seeds_used)) == len(seeds_used)
    assert replay.disagreements(rows, stage.secret) == []


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.8])
def test_a_journal_cut_anywhere_goes_on(tmp_path: Path, fraction: float) -> None:
    """Power loss: the journal is a prefix of what it would have been, the last row torn, and the board is older."""
    whole = Stage(make_study(tmp_path / "whole", noise=0.0))
    whole.search(6)
    cut = Stage(make_study(tmp_path / "cut", noise=0.0))
    cut.folder.path.mkdir(parents=True)
    data = whole.folder.journal.read_bytes()
    world = str(tmp_path / "whole").encode(), str(tmp_path / "cut").encode()
    cut.folder.journal.write_bytes(data[: int(len(data) * fraction)].replace(*world))
    cut.folder.secret.write_bytes(whole.folder.secret.read_bytes())
    assert cut.search(6) == "trials"
    assert essence(cut.rows) == essence(whole.rows)
    assert any("never finished" in text for text in cut.said)


def test_a_stop_signal_ends_the_trial_and_the_same_command_goes_on(tmp_path: Path) -> None:
    make_study(tmp_path, noise=0.0)
    (tmp_path / "wish").write_text("hang")
    process = start_study(tmp_path, 4)
    stage = Stage(tmp_path / "study.toml")
    while not living_trials(stage.folder):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0].splitlines()[-1] == "stopped"
    (tmp_path / "wish").unlink()
    assert [row["status"] for row in stage.rows if row["kind"] == "run"][-1] == "killed"
    assert not living_trials(stage.folder) and not stage.history.open
    assert stage.search(1) == "trials"


# --- several at a time ---


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_workers_overlap_and_decide_soundly(tmp_path: Path) -> None:
    stage = Stage(make_study(tmp_path, sleep_s=0.1, workers=2, placebo_every=4))
    most_open = 0

    def watch(_row: dict[str, object], history: History) -> None:
        nonlocal most_open
        most_open = max(most_open, len(history.open))

    assert stage.search(8, on_row=watch) == "trials"
    history = stage.history
    assert most_open == 2 and history.num_judged == 8 and not history.open
    assert replay.disagreements(stage.rows, stage.secret) == []
    hashes = [candidate.first["config_hash"] for candidate in history.candidates.values()]
    placebo = [candidate.decision and candidate.decision["placebo"] for candidate in history.candidates.values()]
    tried = [name for name, hidden in zip(hashes, placebo, strict=True) if not hidden]
    assert len(set(tried)) == len(tried)
    assert {row["cell"]["workers"] for row in stage.rows if row["kind"] == "run"} == {2}


# --- what is refused ---


def test_changed_settings_program_or_secret_are_refused(tmp_path: Path) -> None:
    path = make_study(tmp_path)
    stage = Stage(path)
    stage.search(1)
    make_study(tmp_path, budget_s=0.7)
    with pytest.raises(RunChanged, match=r"study\.budget_s is 0\.5 there and 0\.7 now"):
        stage.search(2)
    make_study(tmp_path, start="x1 = 0.9")
    with pytest.raises(RunChanged, match="start"):
        stage.search(2)
    make_study(tmp_path, trials_per_day=100, proposer="random1")  # may change
    assert stage.search(2) == "trials"
    assert stage.history.study.proposer == "random1"
    stage.folder.secret.write_text("0" * 32)
    with pytest.raises(CorruptFile, match="not this study's"):
        stage.search(3)


def test_a_changed_evaluation_ends_the_study(tmp_path: Path) -> None:
    stage = Stage(make_study(tmp_path))
    stage.search(1)
    (tmp_path / "wish").write_text("bytes")
    with pytest.raises(RunChanged, match="val_bytes was 1000 and is 999"):
        stage.search(3)
    assert stage.rows[-1]["status"] == "refused" and stage.rows[-1]["error_class"] == "CellChanged"


@pytest.mark.parametrize(
    "text", ["[start]\nseed = 1", "[start]\nSEED_INIT = 4", "[range.my_seed]\nlow = 1", 'axes = ["x0", "data_seed"]']
)
def test_a_seed_anywhere_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "study.toml"
    path.write_text(f'[study]\nname = "s"\n{text}\n')
    with pytest.raises(ConfigError, match=r"seed.*draws all seeds itself"):
        Stage(path)


def test_a_machine_that_is_too_noisy_is_told_so(tmp_path: Path) -> None:
    stage = Stage(make_study(tmp_path, noise=0.3, baseline_runs=6))
    with pytest.raises(Undecided, match="too noisy"):
        stage.search(4)
    assert stage.history.num_judged == 0


def test_nothing_to_prove_is_said(tmp_path: Path) -> None:
    stage = Stage(make_study(tmp_path))
    with pytest.raises(UsageError, match="Nothing has been searched"):
        stage.verify()
    stage.search(1)
    if stage.history.anchor is stage.history.anchors[0]:
        with pytest.raises(UsageError, match="nothing to prove"):
            stage.verify()


def test_a_claim_that_fresh_runs_do_not_bear_out(tmp_path: Path) -> None:
    """The founding rule moves to a lucky run of a configuration that is no better; eight pairs tell so."""
    settings = {"acceptance": "naive", "proposer": "sweep1", "axes": ["x7"], "placebo_every": 1000}
    path = make_study(tmp_path, noise=0.02, start="x7 = 0.55", **settings)
    path.write_text(path.read_text() + "[range.x7]\nlow = 0.44\nhigh = 0.56\n")
    stage = Stage(path)
    stage.search(4)
    assert len(stage.history.anchors) > 1
    stage.verify()
    (row,) = [row for row in stage.history.decisions if row["candidate_hash"] == stage.history.anchor.config_hash][-1:]
    assert row["outcome"] == "not_verified" and row["num_pairs"] == 8
    assert json.loads((stage.folder.path / "best.json").read_text())["config"] is None


def test_the_day_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(make_study(tmp_path, trials_per_day=5))
    monkeypatch.setattr(clock, "wall_s", lambda: NOON_S)  # it must not end while this goes on
    day = clock.utc_text(NOON_S)[:10]
    assert stage.act(lambda history, secret: plan.next_in_search(history, secret, day, 50)) == "day"
    assert stage.history.num_started == 5
    assert stage.act(lambda history, secret: plan.next_in_search(history, secret, "2099-01-01", 1)) == "trials"


def test_an_order_that_the_trial_refuses_is_told_at_once(tmp_path: Path) -> None:
    stage = Stage(make_study(tmp_path))
    (tmp_path / "wish").write_text("refuse")
    with pytest.raises(ConfigError, match=r"refuses its order \(error: no such text\)"):
        stage.search(1)
    assert [(row["status"], row["error_class"]) for row in stage.rows if row["kind"] == "run"] == [
        ("refused", "OrderRefused")
    ]


def test_a_candidate_that_fails_while_it_is_proven_is_no_record(tmp_path: Path) -> None:
    settings = {"acceptance": "naive", "proposer": "sweep1", "placebo_every": 1000, "axes": ["x0"]}
    stage = Stage(make_study(tmp_path, noise=0.0, **settings, baseline_runs=1))
    stage.search(1)
    (tmp_path / "wish").write_text("nan")
    with pytest.raises(Undecided, match=r"its run r\d+ ended nan, where a record never fails"):
        stage.verify()
    (tmp_path / "wish").unlink()
    with pytest.raises(Undecided, match="a record never fails"):
        stage.verify()
    assert stage.history.verified is None


def test_a_closed_study_can_be_checked_from_its_journal_alone_and_never_goes_on(tmp_path: Path) -> None:
    stage = Stage(make_study(tmp_path, noise=0.0, baseline_runs=1, proposer="sweep1", axes=["x0"], start="x1 = 0.5"))
    stage.search(1)
    secret = stage.secret
    assert stage.opened(lambda opened: opened.close()) == "closed"
    stage.folder.secret.unlink()
    assert stage.folder.read_secret(stage.history) == secret
    assert replay.disagreements(stage.rows, secret) == []
    rows = json.loads(json.dumps(stage.rows))
    next(row for row in rows if row["kind"] == "started")["seed_init"] += 1
    assert replay.disagreements(rows, secret) == ["r000001: its seeds are not the study's"]
    with pytest.raises(UsageError, match="was closed"):
        stage.search(2)
    assert stage.rows[0]["rule"]["confirm"] == 1.0 and stage.rows[0]["data_sha256"]


def test_a_program_may_write_anything(tmp_path: Path) -> None:
    """What is of another kind than it should be is not known; the board is still made."""
    stage = Stage(make_study(tmp_path, baseline_runs=1, proposer="sweep1", axes=["x0"]))
    (tmp_path / "wish").write_text("odd")
    assert stage.search(1) == "trials"
    row = next(row for row in stage.rows if row["kind"] == "run")
    assert row["status"] == "ok"
    assert [row[name] for name in ("machine", "validity", "params", "steps")] == [None] * 4
    assert (stage.folder.path / "LEADERBOARD.md").exists()

"""Submissions in turn on track `micro`: duels, ablations, transfers, and what a stop or other code does to them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from contest import changed_track, micro, micro_contest, run_of, written_submission

from hotlap import clock, durable
from hotlap.cli import cli
from hotlap.errors import Refused, UsageError
from hotlap.speedrun import ablate, rounds, submission, template, transfer
from hotlap.speedrun.attempt import Sources
from hotlap.speedrun.stopping import Stopped

FAILING = "raise SystemExit(4)\n"


@pytest.fixture
def contest(tmp_path: Path) -> Path:
    return micro_contest(tmp_path / "contest")


def counting(log: list[str]) -> Sources:
    """Seeds 1, 2, ... and entropies e1, e2, ..., and when they were asked."""

    def draw(kind: str) -> int:
        log.append(kind)
        return log.count(kind)

    return Sources(seed=lambda: draw("seed"), entropy=lambda: f"e{draw('entropy')}")


def no_talk(_text: str) -> None:
    return


# --- pure parts ---


def test_everybody_comes_first_as_often_as_last() -> None:
    assert [rounds.order_of(["a", "b"], n) for n in (1, 2, 3, 4)] == [["a", "b"], ["b", "a"], ["b", "a"], ["a", "b"]]
    orders = [rounds.order_of(["a", "b", "c"], number) for number in range(1, 7)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    for place in (0, 2):
        assert sorted(order[place] for order in orders) == ["a", "a", "b", "b", "c", "c"]


def test_a_paired_difference_is_that_of_a_textbook() -> None:
    """Ratios 1/2, 1/2, 1/4: geometric mean 2^(-4/3). Student's t at 2.5 % with 2 degrees of freedom is 4.3027."""
    first = [run_of(n, score, 10.0) for n, score in enumerate((0.9, 0.8, 0.7), 1)]
    second = [run_of(n, 0.6, wall_s) for n, wall_s in enumerate((20.0, 20.0, 40.0), 1)]
    found = rounds.paired([*first, run_of(4, None, 1.0)], [*second, run_of(4, 0.9, 99.0)])
    assert found.num_pairs == 3  # of the fourth one side has no score
    half = 4.302653 * math.log(2) / math.sqrt(3) / math.sqrt(3)
    assert found.time_ratio == pytest.approx(2 ** (-4 / 3))
    assert found.time_ratio_interval == pytest.approx((2 ** (-4 / 3) / math.exp(half), 2 ** (-4 / 3) * math.exp(half)))
    assert found.time_difference_s == pytest.approx(-50 / 3) and found.score_difference == pytest.approx(0.2)
    assert found.faster is None and found.time_ratio_interval[1] > 1
    steady = [run_of(n, 0.9, 10.0 + n / 10) for n in (1, 2, 3)]
    slower = [run_of(n, 0.9, 20.0) for n in (1, 2, 3)]
    assert rounds.paired(steady, slower).faster == 0 and rounds.paired(slower, steady).faster == 1
    assert rounds.paired(steady[:1], slower[:1]).faster is None  # one pair has no spread
    assert rounds.paired([run_of(1, None, 1.0)], slower[:1]).time_ratio is None


def test_what_two_recipes_differ_by() -> None:
    whole = {
        "optim": {"lr": 1e-2, "schedule": "cosine"},
        "techniques": {"chunked_loss": True},
        "train": {"epochs": 2.0},
    }
    plain = {"optim": {"lr": 1e-3}, "train": {"epochs": 2}}
    lr, chunked = ablate.factors_of(whole, plain)  # a default that is said, and an integer for a float, are none
    assert (lr.name, lr.whole, lr.plain) == ("optim.lr", 1e-2, 1e-3)
    assert (chunked.name, chunked.whole, chunked.plain) == ("techniques.chunked_loss", True, False)
    assert ablate.without_techniques(whole) == {key: whole[key] for key in ("optim", "train")}
    variants, misfits = ablate.variants_of(whole, plain, [lr, chunked])
    assert misfits == {}
    assert variants["000-left-out"]["optim"] == {"lr": 1e-3, "schedule": "cosine"}
    assert variants["000-alone"] == {"optim": {"lr": 1e-2}, "train": {"epochs": 2}}
    assert variants["001-left-out"]["techniques"] == {"chunked_loss": False}
    assert variants["001-alone"]["techniques"] == {"chunked_loss": True}


def test_a_technique_that_cannot_stand_alone_says_why() -> None:
    whole = {"lora": {"dropout": 0.0}, "techniques": {"fused_projections": True}}
    plain = {"lora": {"dropout": 0.1}}
    variants, misfits = ablate.variants_of(whole, plain, ablate.factors_of(whole, plain))
    reason = "techniques.fused_projections needs one input for all, so neither lora.dora nor lora.dropout"
    assert misfits == {"000-left-out": reason, "001-alone": reason}
    assert set(variants) == {ablate.WHOLE, ablate.PLAIN, "000-alone", "001-left-out"}


@pytest.mark.parametrize(
    ("verdict", "scores", "answer"),
    [
        ("pass", (0.9, 0.9, 0.9), "transfers"),
        ("fail", (0.9, 0.7, 0.9), "partly"),
        ("undecided", (0.8,), "partly"),
        ("fail", (0.7, 0.7), "no"),
        ("fail", (None, 0.9), "no"),
    ],
)
def test_what_a_transfer_says(verdict: str, scores: tuple[float | None, ...], answer: str) -> None:
    runs = [run_of(n, score, 1.0, *(["broken"] if score is None else [])) for n, score in enumerate(scores, 1)]
    rules = {"target": 0.8, "higher_is_better": True}
    assert transfer.answer_of({"decision": {"verdict": verdict}, "rules": rules, "runs": runs}) == answer


# --- real runs ---


def failing(contest: Path, *names: str) -> dict[str, submission.Submission]:
    return {
        name: submission.load(written_submission(contest, f"{FAILING}# {name}\n", name), micro(contest))
        for name in names
    }


@pytest.mark.torch
def test_rounds_that_were_cut_go_on_with_what_was_drawn(
    contest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "warm_libraries", no_talk)  # nothing here imports any
    entries, log, out = failing(contest, "001-ada", "002-bob"), list[str](), tmp_path / "out"
    over = clock.Deadline(clock.monotonic_s())
    with pytest.raises(Stopped):
        rounds.run_rounds(entries, micro(contest), 2, out, counting(log), no_talk, over)
    assert log == []
    done = rounds.run_rounds(entries, micro(contest), 1, out, counting(log), no_talk).runs
    durable.remove_tree(out / "002-bob" / "run-1")  # as if cut in the middle of the first round
    again = rounds.run_rounds(entries, micro(contest), 2, out, counting(log), no_talk).runs
    assert log == ["seed", "entropy", "seed", "entropy"]  # one seed and one set of rows for all of a round
    assert [[run["seed"] for run in runs] for runs in again.values()] == [[1, 2], [1, 2]]
    assert again["001-ada"][0] == done["001-ada"][0]
    assert all(run["complaints"] and run["score"] is None for runs in again.values() for run in runs)
    others = failing(contest, "003-eve")
    with pytest.raises(Refused, match="other code"):
        rounds.run_rounds({"001-ada": others["003-eve"]}, micro(contest), 1, out, counting(log), no_talk)
    command = [
        "speedrun",
        "duel",
        *(str(entry.folder) for entry in entries.values()),
        "--pairs",
        "2",
        "--out",
        str(out),
    ]
    assert cli.main([*command, "--contest", str(contest)], standalone_mode=False) == 8
    told = (out / "duel.md").read_text()
    assert "0 pairs were scored" in told and "| 2 | 2 | no score | no score |" in told
    with pytest.raises(UsageError, match="a duel takes two"):
        cli.main([*command[:3], *command[2:3], "--contest", str(contest)], standalone_mode=False)


MICRO_RECIPE = """
[optim]
lr = 5e-3
schedule = "linear"

[train]
max_steps = 80
micro_batch_rows = 10

[data]
seq_len = 32

[techniques]
chunked_loss = true
"""


@pytest.mark.long
@pytest.mark.torch
def test_a_recipe_is_taken_apart(contest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two trainings for an ablation of one technique, scored."""
    folder = template.new(contest, "003-eve", "eve", micro(contest), "recipe")
    (folder / "recipe.toml").write_text(MICRO_RECIPE)
    common = ["--contest", str(contest), "--json"]
    command = ["speedrun", "ablate", str(folder), "--rounds", "1", *common]
    assert cli.main(command, standalone_mode=False) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    for name in (ablate.WHOLE, ablate.PLAIN):
        (run,) = told["runs"][name]
        assert (run["exit_code"], run["complaints"]) == (0, []) and run["score"] >= 0.8
        assert run["num_left_behind"] == 0
        assert run["num_tokens"] >= 80 * 10 * 3  # rows hold one example or more, and none is shorter
        assert 0 < run["phases_s"]["steps"] < sum(run["phases_s"].values()) < run["wall_s"]
        assert {entry["name"] for entry in run["output"]} == {"adapter_config.json", "adapter_model.safetensors"}
    (factor,) = told["factors"]
    assert factor["name"] == "techniques.chunked_loss"
    assert factor["alone"]["misfit"].startswith("it is the other recipe")
    assert told["whole_against_plain"]["num_pairs"] == 1
    table = ablate.to_markdown(told)
    assert "| `techniques.chunked_loss` = `true` for `false` | does not stand: " in table
    assert "| all of them | | | " in table and "one pair" in table
    whole, plain = told["runs"][ablate.WHOLE][0], told["runs"][ablate.PLAIN][0]
    assert whole["seed"] == plain["seed"] and whole["test_sha256"] == plain["test_sha256"]
    assert told["whole_against_plain"]["time_ratio"] == pytest.approx(whole["wall_s"] / plain["wall_s"])


def test_a_transfer_keeps_the_recipe_and_takes_the_other_track_s_rule(
    contest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs are there already, as if a first call had made them; the third command line needs none."""
    folder = template.new(contest, "003-eve", "eve", micro(contest), "recipe")
    (folder / "recipe.toml").write_text(MICRO_RECIPE)
    away = changed_track(contest, {'id = "micro"': 'id = "away"', "looks = [3, 5]": "looks = [2, 5]"}, "away")
    command = ["speedrun", "transfer", str(folder), "--to", "away", "--runs", "2", "--contest", str(contest)]

    def answer_with(*scores: float) -> tuple[int, dict[str, Any]]:
        out = tmp_path / "-".join(map(str, scores))
        for number, score in enumerate(scores, start=1):
            (out / f"run-{number}").mkdir(parents=True)
            (out / f"run-{number}" / "result.json").write_text(json.dumps(run_of(number, score, 10.0)))
        code = cli.main([*command, "--out", str(out), "--json"], standalone_mode=False)
        moved = submission.load(out / "entry" / "003-eve", away)
        assert moved.recipe == submission.load(folder, micro(contest)).recipe
        return code, json.loads(capsys.readouterr().out)

    code, told = answer_with(0.96, 0.96)
    assert (code, told["answer"], told["from"]["track"], told["to"]["track"]) == (0, "transfers", "micro", "away")
    code, told = answer_with(0.96, 0.7)
    assert (code, told["answer"]) == (8, "partly")
    with pytest.raises(UsageError, match="already"):
        cli.main([*command[:4], "micro", *command[5:]], standalone_mode=False)


def test_a_transfer_that_fails_says_why_in_one_line(
    contest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason is the end of a program's talk, line breaks included."""
    folder = template.new(contest, "003-eve", "eve", micro(contest), "recipe")
    changed_track(contest, {'id = "micro"': 'id = "away"'}, "away")
    broken = run_of(1, None, 10.0, "it ended with code 1: Traceback\n  line 3\nValueError: x")
    (tmp_path / "out" / "run-1").mkdir(parents=True)
    (tmp_path / "out" / "run-1" / "result.json").write_text(json.dumps(broken))
    command = ["speedrun", "transfer", str(folder), "--to", "away", "--runs", "1", "--contest", str(contest)]
    assert cli.main([*command, "--out", str(tmp_path / "out")], standalone_mode=False) == 8
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "hotlap: exit 8 fail: run 1: it ended with code 1: Traceback line 3 ValueError: x"

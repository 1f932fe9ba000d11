"""`hotlap speedrun` as a user meets it: help, a contest from the first command to the tables, and what is refused."""

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from contest import micro_contest, trained_submission, written_submission

from hotlap.cli import cli
from hotlap.cli.speedrun import speedrun
from hotlap.errors import MissingArtifact, PinMismatch, Refused, UsageError


def hotlap(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["speedrun", *arguments], standalone_mode=False)


@pytest.fixture
def contest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = micro_contest(tmp_path / "contest")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("name", sorted(speedrun.commands))
def test_help_ends_with_an_example_that_parses(name: str, contest: Path) -> None:
    (contest / "mine.jsonl").write_text("{}")
    text = CliRunner().invoke(speedrun, [name, "--help"]).output
    program, group, command, *arguments = shlex.split(text.rstrip().splitlines()[-1].strip())
    assert (program, group, command) == ("hotlap", "speedrun", name)
    speedrun.commands[name].make_context(name, arguments)


def test_from_the_first_command_to_the_tables(contest: Path) -> None:
    (row,) = json.loads(hotlap("tracks", "--json").stdout)
    assert (row["track"], row["target"], row["base_model"]) == ("micro", 0.8, "hotlap/tiny-random")
    made = hotlap("new", "001-ada", "--author", "ada", "--track", "micro")
    assert made.stdout.strip() == str(contest / "submissions" / "001-ada")
    assert json.loads(hotlap("check", "submissions/001-ada", "--json").stdout) == []
    assert hotlap("records").exception is None
    assert (contest / "records" / "LEADERBOARD.md").is_file()
    assert json.loads(hotlap("records", "--check", "--json").stdout) == []


def test_check_says_every_reason_and_exits_2(contest: Path) -> None:
    written_submission(contest, "exec('x')\n", author="")
    done = hotlap("check", "submissions/002-bob")
    assert "refused: train.py:1: exec() runs text" in done.stdout
    assert "refused: config.yaml: needs a text as 'author'" in done.stdout
    assert isinstance(done.exception, UsageError) and "2 reasons" in str(done.exception)


def test_a_changed_track_is_exit_4(contest: Path) -> None:
    with (contest / "tracks" / "micro" / "spec.toml").open("a") as file:
        file.write("# x\n")
    error = hotlap("tracks").exception
    assert isinstance(error, PinMismatch) and error.exit_code == 4


def test_drifted_tables_are_exit_4(contest: Path) -> None:
    hotlap("records")
    (contest / "records" / "records.json").write_text("{}")
    error = hotlap("records", "--check").exception
    assert isinstance(error, PinMismatch) and "records.json is not up to date" in str(error)


@pytest.mark.torch
def test_a_track_of_ones_own(contest: Path, tiny_model: Path) -> None:
    rows = [{"question": f"say {number}", "answer": str(number)} for number in range(200)]
    (contest / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ("--data", "mine.jsonl", "--metric", "loss", "--base-model", str(tiny_model), "--threads", "1")
    assert "--target" in str(hotlap("new-track", "mine", *common).exception)
    made = hotlap("new-track", "mine", *common, "--target", "2.5")
    assert made.stdout.startswith("mine ")
    assert {row["track"] for row in json.loads(hotlap("tracks", "--json").stdout)} == {"micro", "mine"}


def test_what_is_not_there(contest: Path) -> None:
    assert isinstance(hotlap("new", "001-ada", "--author", "ada", "--track", "c9").exception, MissingArtifact)
    assert isinstance(hotlap("replay", "nothing.json").exception, MissingArtifact)
    assert isinstance(hotlap("check", "submissions/009-eve").exception, UsageError)


def test_a_machine_with_too_few_threads_is_refused_in_one_line(contest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained_submission(contest)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set())
    error = hotlap("verify", "submissions/001-ada").exception
    assert isinstance(error, Refused)
    assert str(error) == "Track micro asks for 1 processor threads; this machine has 0."

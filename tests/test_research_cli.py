"""`hotlap research` as a user meets it."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner
from research_stage import make_study

from hotlap.cli import cli, main
from hotlap.cli.research import research
from hotlap.research.space import StudyConfig, load_study

pytestmark = pytest.mark.long

SUBCOMMANDS = sorted(research.commands)


@dataclass(frozen=True)
class Said:
    stdout: str
    stderr: str


Hotlap = Callable[..., Said]


@pytest.fixture
def hotlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hotlap:
    """`hotlap research` in `tmp_path`: the whole program but for the start of its process."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str, check: int = 0) -> Said:
        monkeypatch.setattr(sys, "argv", ["hotlap", "research", *args])
        with pytest.raises(SystemExit) as left:
            main()
        said = Said(*capsys.readouterr())
        assert left.value.code == check, said
        return said

    return run


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_s_help_ends_with_an_example_that_parses(name: str) -> None:
    text = CliRunner().invoke(cli, ["research", name, "--help"]).output
    program, group, command, *args = shlex.split(text.rstrip().splitlines()[-1])
    assert (program, group, command) == ("hotlap", "research", name)
    research.commands[name].make_context(name, args)


def test_a_study_is_the_default_command() -> None:
    for args in (["s.toml", "--trials", "8"], ["--trials", "8", "s.toml"]):
        context = research.make_context("research", list(args))
        name, _, rest = research.resolve_command(context, [*context._protected_args, *context.args])  # type: ignore[attr-defined]
        assert name == "run" and sorted(rest) == sorted(args)


def test_a_session_from_the_command_line(hotlap: Hotlap, tmp_path: Path) -> None:
    make_study(tmp_path, baseline_runs=2, axes=["x0"], proposer="sweep1", placebo_every=1000)
    expected = hotlap("simulate", "study.toml", "--repeats", "200", "--json", "--usd-per-hour", "3")
    report = json.loads(expected.stdout)
    assert report["noise"] is None and report["session_usd"] > 0 and len(report["table"]) == 5
    assert 0 < report["rented"]["usd_micros"] <= report["rented"]["most_usd_micros"]
    assert "A full 8-iteration session costs about $" in report["words"]
    hotlap("best", "bowl", check=2)

    first = hotlap("study.toml", "--trials", "3")
    assert first.stdout.strip() == "studies/bowl/LEADERBOARD.md"
    assert first.stderr.splitlines()[-1].startswith("hotlap: exit 0 done: all trials")
    assert "r000001 baseline" in first.stderr and "x0 0.8 → 0.0" in first.stderr

    again = json.loads(hotlap("study.toml", "--trials", "1", "--json").stdout)
    assert again["header"]["num_judged"] == 4 and again["verified"] is None and again["reason"] == "done"
    assert json.loads(hotlap("best", "bowl").stdout)["config"] is None
    anchor = json.loads(hotlap("best", "bowl", "--anchor").stdout)
    assert anchor["config"] == again["anchor"] and anchor["config"]["x0"] == 0.25

    charts = {path.name for path in (tmp_path / "studies" / "bowl").glob("*.svg")}
    assert charts == {"progress.svg", "axes.svg", "prediction.svg", "clock.svg", "curves.svg"}

    verified = hotlap("verify", "bowl", "--json")
    assert json.loads(verified.stdout)["verified"] == anchor["config"]
    assert "verified: 8 pairs" in verified.stderr
    text = hotlap("leaderboard", "bowl").stdout
    assert text == (tmp_path / "studies/bowl/LEADERBOARD.md").read_text() and "| 1 |" in text
    assert json.loads(hotlap("leaderboard", "studies/bowl", "--json").stdout)["entries"][0]["rank"] == 1
    assert json.loads(hotlap("replay", "bowl", "--json").stdout)["agrees"] is True
    under = json.loads(hotlap("replay", "bowl", "--rule", "naive", "--json").stdout)
    assert under["num_judged"] == 4 and under["num_kept"] >= 1
    simulated = json.loads(hotlap("simulate", "bowl", "--repeats", "200", "--json").stdout)
    assert simulated["noise"] > 0

    (tmp_path / "studies/bowl/best.json").write_text("{}")
    stale = hotlap("replay", "bowl", check=4)
    assert "best.json" in stale.stderr.splitlines()[-1]


def test_refusals_have_their_exit_codes(hotlap: Hotlap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_study(tmp_path, noise=0.3, baseline_runs=6)
    assert "draws all seeds" not in hotlap("nonesuch", check=2).stderr
    noisy = hotlap("study.toml", "--trials", "1", "--json", check=8)
    assert json.loads(noisy.stdout)["reason"] == "undecided"
    assert noisy.stderr.splitlines()[-1].startswith("hotlap: exit 8 undecided: Runs of one configuration differ")
    with monkeypatch.context() as patch:
        patch.setenv("HOTLAP_SERVING", "1")
        assert "hotlap: exit 3 guard" in hotlap("study.toml", check=3).stderr
    path.write_text(path.read_text() + "seed_init = 1\n")
    assert "exit 2 config" in hotlap("study.toml", check=2).stderr


def test_a_wavering_machine_s_figures_are_told_with_every_run(hotlap: Hotlap, tmp_path: Path) -> None:
    settings = {"baseline_runs": 1, "axes": ["x0"], "proposer": "sweep1"}
    make_study(tmp_path, **settings)
    (tmp_path / "wish").write_text("disturbed")
    lines = hotlap("study.toml", "--trials", "1", check=8).stderr.splitlines()
    assert lines[0].endswith("nats/byte (Disturbed: steps took 1.35 times what quiet ones take)")
    assert lines[-1].startswith("hotlap: exit 8 disturbed: 5 of the last 5 runs were disturbed and left out: steps")
    make_study(tmp_path, **settings, on_disturbed="use")
    lines = hotlap("study.toml", "--trials", "1").stderr.splitlines()
    assert lines[0].endswith("(disturbed, and used: steps took 1.35 times what quiet ones take)")


def test_the_page_s_study_loads_and_its_commands_parse(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / "docs" / "research.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", text, flags=re.S)
    (tmp_path / "study.toml").write_text(block)
    file = load_study(tmp_path / "study.toml")
    assert file.study.name == "lr-20s" and file.start == {"lr": 1e-3} and file.range["lr"].high == 2e-2
    lines = re.findall(r"^\$ hotlap research (.*)$", text, flags=re.M)
    assert len(lines) == 6
    for line in lines:
        words = shlex.split(line, comments=True)
        name, args = (words[0], words[1:]) if words[0] in research.commands else ("run", words)
        research.commands[name].make_context(name, args)
    settings = re.findall(r"`(\w+)`", text.partition("**Settings**")[2].partition("##")[0])
    assert {"workers", "setup_s", "trials_per_day"} <= set(settings)
    assert set(settings) - {"two_run", "naive"} <= set(StudyConfig.model_fields)

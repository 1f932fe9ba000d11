"""The CI templates of a public contest: what they may do, and what their guards refuse."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from contest import ROOT

from hotlap.cli.speedrun import speedrun

TEMPLATES = sorted((ROOT / "docs" / "contest-ci").glob("*.yml"))


def steps_of(path: Path) -> list[dict[str, Any]]:
    jobs: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_there_are_two() -> None:
    assert [path.name for path in TEMPLATES] == ["check.yml", "verify.yml"]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_no_stranger_s_word_becomes_a_command_and_no_secret_is_near(path: Path) -> None:
    text = path.read_text()
    tree = yaml.safe_load(text)
    assert tree["permissions"] == {"contents": "read"}
    triggers = tree[True]  # YAML reads `on` as true
    assert set(triggers) <= {"pull_request", "workflow_dispatch"}
    assert "secrets." not in text
    for step in steps_of(path):
        assert "${{" not in step.get("run", "")
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False
            assert "head" not in step["with"]["ref"]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_their_commands_parse(path: Path) -> None:
    runs = "\n".join(step.get("run", "") for step in steps_of(path))
    found = re.findall(r"hotlap speedrun (.+)", runs)
    assert found
    for line in found:
        command, *arguments = shlex.split(line.replace("$RUNS", "3"))
        speedrun.commands[command].make_context(command, arguments)


def guard(submission: str, commit: str = "a" * 40, runs: str = "3") -> int:
    (step,) = [step for step in steps_of(TEMPLATES[1]) if step.get("name", "").startswith("Refuse")]
    given = {"SUBMISSION": submission, "COMMIT": commit, "RUNS": runs, "PATH": "/usr/bin:/bin"}
    return subprocess.run(["bash", "-e", "-c", step["run"]], env=given, timeout=60, capture_output=True).returncode


def test_the_guard_lets_a_proper_request_through() -> None:
    assert guard("001-ada") == guard("t2-000-baseline", "0123456789abcdef" * 2 + "01234567", "12") == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"submission": "001-ada; touch x"},
        {"submission": "$(id)"},
        {"submission": "../main"},
        {"submission": "001-ada\n002-eve"},
        {"submission": "001-ada\n"},
        {"submission": ""},
        {"submission": "001-ada", "commit": "main"},
        {"submission": "001-ada", "commit": "a" * 39},
        {"submission": "001-ada", "commit": "a" * 40 + "\nx"},
        {"submission": "001-ada", "runs": "3 --contest /"},
        {"submission": "001-ada", "runs": "-1"},
    ],
)
def test_the_guard_refuses(bad: dict[str, str]) -> None:
    assert guard(**bad) == 1

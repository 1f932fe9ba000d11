"""What the documentation claims: generated blocks, sessions, configurations, links, version."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import readme
import reference

import hotlap
from hotlap.cli import cli
from hotlap.cloud import runpod
from hotlap.cloud.launcher import JOB_MARGIN_S
from hotlap.cloud.money import Rate, loss_bound_s, ttl_s
from hotlap.config import CloudConfig, RunConfig

ROOT = readme.ROOT
TEXT = readme.README.read_text()
PAGES = [readme.README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_generated_blocks_are_up_to_date() -> None:
    assert readme.written() == TEXT, "run: python tests/readme.py"


def test_first_session_stands_by_line_20() -> None:
    lines = TEXT.splitlines()
    assert any(line.startswith("$ make demo") for line in lines[:20])


def test_every_hotlap_command_in_the_readme_parses() -> None:
    lines = re.findall(r"^\$ (hotlap .*)$", TEXT, flags=re.M)
    assert len(lines) >= 3
    for line in lines:
        _, command, *args = shlex.split(line, comments=True)
        cli.commands[command].make_context(command, args)


def test_toml_in_the_readme_is_a_run(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", TEXT, flags=re.S)
    config = RunConfig.model_validate(tomllib.loads(block))
    assert config.base_model == "smollm2-135m"


def test_proofs_name_tests_that_exist() -> None:
    names = re.findall(r"tests/[\w/]+\.py", TEXT)
    assert names and all((ROOT / name).is_file() for name in names)


def test_figures_of_the_readme_are_measured_ones() -> None:
    table = TEXT.partition("## What that was worth")[2].partition("## ")[0]
    measured = set(re.findall(r"\d+(?:[.,]\d+)*", (ROOT / "docs/measured.md").read_text()))
    figures = [row.split("|")[-2] for row in re.findall(r"^\| .*\|$", table, flags=re.M)[2:]]
    assert len(figures) >= 5
    for figure in figures:
        assert set(re.findall(r"\d+(?:[.,]\d+)*", figure)) <= measured, figure


def test_the_worst_loss_that_is_promised_is_the_code_s() -> None:
    """As `cloud.toml` is written, for RunPod: how long a machine may live if its launcher dies, and what that costs."""
    settings = CloudConfig()
    ttl = ttl_s(settings.limits.max_slice_minutes * 60.0 + JOB_MARGIN_S, runpod.TRAITS)
    period_s, proof_s = settings.reaper.period_minutes * 60.0, runpod.TRAITS.proof_s
    bound_s = loss_bound_s(ttl, period_s, runpod.TRAITS)
    usd = Rate(3_000_000, num_gpus=1, billing_unit_s=runpod.TRAITS.billing_unit_s).cost(bound_s).usd_micros / 1e6
    promise = f"({ttl} s + {period_s:.0f} s + {proof_s:.0f} s) x $3/h = ${usd:.2f}"
    assert promise in TEXT
    assert f"= {bound_s} s, at $3 an hour ${usd:.2f}" in " ".join((ROOT / "docs" / "money.md").read_text().split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        is_made = any((page.parent / target).resolve() == ROOT / "docs" / made for made in reference.pages())
        assert "://" in target or is_made or (page.parent / target).exists(), target


def test_version_is_the_changelog_s() -> None:
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert newest and newest[1] == hotlap.__version__ == pyproject["project"]["version"]


def test_ci_runs_exactly_the_readme_s_test_command() -> None:
    commands = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("make")]
    assert commands == ["make test"]


@pytest.mark.real
def test_demo_shows_what_the_readme_shows(smollm2: Path, real_home: Path, tmp_path: Path) -> None:
    """The whole demo: a killed slice, a resumed one, a finished run, and a model that says who it is."""
    process = subprocess.run(
        [sys.executable, "-m", "hotlap", "demo"],
        cwd=tmp_path,
        env={**__import__("os").environ, "HOTLAP_HOME": str(real_home)},
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert process.returncode == 0, process.stderr
    assert "killed (SIGKILL)" in process.stdout and "0 done" in process.stdout
    (run,) = json.loads(
        subprocess.run(
            [sys.executable, "-m", "hotlap", "runs", "--json"], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
    )
    assert run["state"] == "finished" and run["num_slices"] >= 3
    slices = json.loads(
        subprocess.run(
            [sys.executable, "-m", "hotlap", "runs", run["name"], "--json"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    assert slices[0]["ending"] == "killed"
    assert slices[1]["resumed_at"] > 0
    assert slices[-1]["ending"] == "done"
    after = process.stdout.partition("after")[2]
    assert after.count("hotlap") >= 1 and "Lap" in after
    before = [line for line in process.stderr.splitlines() if line.startswith("  Who are you?")]
    assert before and "Lap" not in before[0]

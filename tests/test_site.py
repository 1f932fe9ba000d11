"""The documentation site: generated pages are whole, commands parse, configurations load, links lead somewhere."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import readme
import reference
import sessions
from click.testing import CliRunner
from test_propose import model_of_width
from test_report import make_run

from hotlap.cli import cli
from hotlap.config import RunConfig
from hotlap.research.space import StudyConfig

ROOT = readme.ROOT
PAGES = sorted(
    page for page in (ROOT / "docs").rglob("*.md") if page.name != "log.md" and "decisions" not in page.parts
)
COMMANDS = [
    (page.relative_to(ROOT).as_posix(), line)
    for page in PAGES
    for line in re.findall(r"^\$ (hotlap .*)$", page.read_text(), flags=re.M)
]

NEED_AN_ACCOUNT = re.compile(r"(?<!\S)(--volume-id|--on (runpod|modal|ssh)|--offers|hotlap push)\b")


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=lambda value: value)
def test_every_command_of_the_documentation_parses(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()  # what an argument names has to be there
    (tmp_path / "mine.jsonl").touch()
    _, name, *words = ["", *shlex.split(line, comments=True)]
    command, context = cli, None
    while True:
        context = command.make_context(name, words, parent=context)
        if not isinstance(command, click.Group):
            return
        found, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
        name = str(found)
        assert command is not None


CHEAP = re.compile(
    r"hotlap (runs|logs|budget|machines|reap|report(?! (lr|my-study))|init|preview|launch .*--on local.*--dry-run"
    r"|research simulate|speedrun (tracks|new|check|records))"
)
"""What needs no training before it; `python -m benchmarks.docs` types all of them."""


@pytest.mark.parametrize("page", sorted({line.page for line in sessions.shown() if CHEAP.match(line.text)}))
def test_commands_that_cost_nothing_do_what_the_page_says(
    page: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the page, in a folder with runs of the names that pages use, and with a base model of which only
    the tokenizer is real. Whatever else this machine serves is none of a page's business."""
    home.mkdir()
    (home / "cloud.toml").write_text("[guard]\ntrain_beside_serving = true\n")
    model = model_of_width(tmp_path / "model", 64)
    (model / "model.safetensors").touch()
    sessions.furnish(tmp_path, page)
    for name in ("lap", "my-run", "RUN"):
        make_run(tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    for line in sessions.shown():
        if line.page == page and not line.why_not and CHEAP.match(line.text):
            for path in tmp_path.glob("*.toml"):  # those that a command has just written, too
                path.write_text(path.read_text().replace("smollm2-135m", str(model)))
            words = [str(model) if word == "smollm2-135m" else word for word in line.words[1:]]
            result = CliRunner().invoke(cli, words)
            assert result.exit_code == 0, f"{line.text}: {result.exception}\n{result.output}"


def test_commands_that_need_an_account_say_so() -> None:
    lines = [line for _, line in COMMANDS if NEED_AN_ACCOUNT.search(line)]
    assert len(lines) >= 5 and all("# account" in line or "init" in line for line in lines)


def test_runs_in_the_documentation_are_valid() -> None:
    blocks = [text for page in PAGES for text in re.findall(r"```toml\n(.*?)```", page.read_text(), flags=re.S)]
    trees = [tomllib.loads(text) for text in blocks]
    found = [RunConfig.model_validate(tree) for tree in trees if "base_model" in tree]
    studies = [StudyConfig.model_validate(tree["study"]) for tree in trees if "study" in tree]
    assert len(found) >= 2 and len(studies) >= 2


def test_generated_pages_have_every_command_setting_and_exit_code() -> None:
    made = reference.pages()
    for name, command in cli.commands.items():
        assert f"## `hotlap {name}`" in made["reference/cli.md"]
        for child in command.commands if isinstance(command, click.Group) else ():
            assert f"## `hotlap {name} {child}`" in made["reference/cli.md"]
    settings = made["reference/config.md"]
    for name, field in RunConfig.model_fields.items():
        assert f"`{name}" in settings, name
        for inner in reference._models_in(field):
            assert all(f"`{name}.{key}" in settings for key in inner.model_fields), name
    assert "| `train.epochs` | `float`, > 0 | `1.0` | Passes over the data" in settings
    assert (
        "runs/NAME/run.json" in made["reference/files.md"] and "| 75 | `slice_over`" in made["reference/exit-codes.md"]
    )


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text()))
    written = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES}
    assert listed == written | set(reference.pages())


@pytest.mark.long
def test_the_site_builds_and_no_link_leads_nowhere(tmp_path: Path) -> None:
    env = {**os.environ, "DISABLE_MKDOCS_2_WARNING": "true", "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    for page in ("tutorial.html", "reference/config.html", "how-to/look.html"):
        assert "hotlap" in (tmp_path / "site" / page).read_text()

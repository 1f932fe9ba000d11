"""The command line as a user meets it: real commands in real processes."""

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hotlap import errors
from hotlap.cli import cli, main, written

COMMANDS = sorted(cli.commands)


def hotlap(*args: str, cwd: Path, check: int | None = 0) -> subprocess.CompletedProcess[str]:
    process = subprocess.run(
        [sys.executable, "-m", "hotlap", *args], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert check is None or process.returncode == check, process.stdout + process.stderr
    return process


@pytest.fixture
def tiny_args(tiny_model: Path, f3: Path) -> list[str]:
    return [
        *("train", "--base-model", str(tiny_model), "--dataset", str(f3), "--run", "tiny"),
        *("--set", "data.seq_len=64", "--set", "lora.rank=4", "--set", "slice.num_threads=1"),
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_ends_with_an_example_that_parses(name: str) -> None:
    text = CliRunner().invoke(cli, [name, "--help"]).output
    example = text.rstrip().splitlines()[-1].strip()
    program, command, *args = shlex.split(example)
    assert (program, command) == ("hotlap", name)
    cli.commands[name].make_context(name, args)


def test_help_of_a_command_says_what_every_option_does() -> None:
    """Of groups, too: `hotlap speedrun new --track` said nothing of itself."""
    waiting: list[tuple[str, click.Command]] = list(cli.commands.items())
    while waiting:
        name, command = waiting.pop()
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{name} {parameter.name}"
        if isinstance(command, click.Group):
            waiting += [(f"{name} {child}", inner) for child, inner in command.commands.items()]


@pytest.mark.parametrize(
    ("typed", "expected"), [("hotlap rep", "plain,report\n"), ("hotlap logs -f my", "plain,my-run\n")]
)
def test_a_shell_is_told_commands_and_runs(typed: str, expected: str, tmp_path: Path) -> None:
    """What bash asks when Tab is pressed, after `eval "$(_HOTLAP_COMPLETE=bash_source hotlap)"`."""
    for name in ("my-run", "mine", "other"):
        (tmp_path / "runs" / name / "slices").mkdir(parents=True)
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    env = {**os.environ, "_HOTLAP_COMPLETE": "bash_complete", **words}
    program = [str(Path(sys.executable).parent / "hotlap")]
    process = subprocess.run(program, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert process.stdout == expected, process.stderr


@pytest.mark.torch
def test_a_run_from_the_command_line(tiny_args: list[str], tmp_path: Path) -> None:
    """Train, look, ask, and meet the refusals, each as its own command."""
    train = [*tiny_args, "--set", "train.max_steps=12"]
    first = hotlap(*train, "--chain", cwd=tmp_path)
    assert first.stdout.strip() == "runs/tiny/adapter"
    assert "slice 1, from the start of 12" in first.stderr and "step 12/12" in first.stderr
    assert first.stderr.splitlines()[-1].startswith("hotlap: exit 0 done")

    listing = json.loads(hotlap("runs", "--json", cwd=tmp_path).stdout)
    assert [(row["name"], row["state"], row["step"]) for row in listing] == [("tiny", "finished", 12)]
    assert "finished" in hotlap("runs", cwd=tmp_path).stdout

    (row,) = json.loads(hotlap("runs", "tiny", "--json", cwd=tmp_path).stdout)
    phases = ("interpreter", "imports", "load", "data", "resume", "steps", "evaluation", "publish", "other", "exit")
    assert all(row[phase] is not None and row[phase] >= 0 for phase in phases)
    assert sum(row[phase] for phase in phases) == pytest.approx(row["wall_s"], abs=0.5)
    table = hotlap("runs", "tiny", cwd=tmp_path).stdout
    assert all(word in table for word in ("imports", "step p95 s", "goodput", "done"))

    rows = [json.loads(line) for line in hotlap("logs", "tiny", "-f", "--json", cwd=tmp_path).stdout.splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 13))
    assert "is over (done)" in hotlap("stop", "tiny", cwd=tmp_path).stdout

    again = hotlap(*train, "--json", cwd=tmp_path)
    assert json.loads(again.stdout)["reason"] == "done"
    refused = hotlap(*train, "--set", "optim.lr=0.5", "--json", cwd=tmp_path, check=3)
    assert json.loads(refused.stdout)["reason"] == "changed"
    assert "optim.lr is 0.0002 in the run and 0.5 now" in refused.stderr


@pytest.mark.torch
def test_stop_ends_a_chain_and_the_same_command_resumes(tiny_args: list[str], tmp_path: Path) -> None:
    train = [*tiny_args, "--chain", "--set", "train.max_steps=1000000"]
    chain = _start(train, tmp_path)
    _wait_for_steps(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    answer = json.loads(hotlap("stop", "tiny", "--json", cwd=tmp_path).stdout)
    _, err = chain.communicate(timeout=60)
    assert (answer["ending"], chain.returncode) == ("stopped", 75), err
    assert err.splitlines()[-1].startswith("hotlap: exit 75 stopped")
    assert json.loads(hotlap("runs", "--json", cwd=tmp_path).stdout)[0]["state"] == "paused"


@pytest.mark.torch
def test_stop_before_a_slice_can_listen_is_a_stop(tiny_args: list[str], tmp_path: Path) -> None:
    chain = _start([*tiny_args, "--chain", "--json"], tmp_path)
    children = Path(f"/proc/{chain.pid}/task/{chain.pid}/children")
    while not children.read_text():
        time.sleep(0.001)
    chain.send_signal(signal.SIGTERM)
    out, err = chain.communicate(timeout=60)
    assert (chain.returncode, json.loads(out)["reason"]) == (75, "stopped"), err
    assert err.splitlines()[-1].startswith("hotlap: exit 75 stopped")


@pytest.mark.torch
def test_a_second_interrupt_leaves_at_once(tiny_args: list[str], tmp_path: Path) -> None:
    train = [*tiny_args, "--chain", "--set", "train.max_steps=1000000", "--set", "slice.grace_s=60"]
    chain = _start(train, tmp_path)
    _wait_for_steps(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    slice_pid = json.loads((tmp_path / "runs/tiny/slices/0001/holder.json").read_text())["pid"]
    os.kill(slice_pid, signal.SIGSTOP)  # a slice that hangs does not answer the first
    while not _status(slice_pid).partition("State:")[2].strip().startswith("T"):
        time.sleep(0.01)
    chain.send_signal(signal.SIGINT)
    while not _awaits(slice_pid, signal.SIGTERM):
        time.sleep(0.01)
    chain.send_signal(signal.SIGINT)
    _, err = chain.communicate(timeout=60)
    assert chain.returncode == 130, err
    assert not Path(f"/proc/{slice_pid}").exists()


def _awaits(pid: int, number: int) -> bool:
    """Whether a signal was sent to a stopped process."""
    pending = re.findall(r"^(?:SigPnd|ShdPnd):\s*(\w+)", _status(pid), flags=re.M)
    return any(int(mask, 16) >> (number - 1) & 1 for mask in pending)


def _status(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


def _start(args: list[str], cwd: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "hotlap", *args]
    return subprocess.Popen(argv, cwd=cwd, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _wait_for_steps(metrics: Path, timeout_s: float = 90.0) -> None:
    until = time.monotonic() + timeout_s
    while not metrics.exists() or metrics.stat().st_size < 2_000:
        assert time.monotonic() < until, "no steps"
        time.sleep(0.05)


def test_errors_have_code_reason_and_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole program but for the start of its process."""
    from hotlap.cli import main

    monkeypatch.chdir(tmp_path)
    of_a_run = ("train", "--base-model", "m", "--dataset", "d")
    cases = [
        (("train",), 2, "config", "base_model: is missing"),
        (("train", "nonesuch.toml"), 2, "config", "nonesuch.toml does not exist"),
        (("train", "--set", "limits.max_slice_minutes=60"), 2, "config", "cloud.toml"),
        (("runs", "nonesuch"), 2, "usage", "no run 'nonesuch'"),
        (("generate", "nonesuch", "Hi"), 2, "usage", "no run 'nonesuch'"),
        (("nonesuch",), 2, "usage", "No such command"),
        (("prefetch", "nonesuch/"), 2, None, ""),
        (("prefetch", "~nosuchuser/model"), 2, "missing", "cannot be looked up"),
        (("prefetch", "n" * 300), 2, "missing", "cannot be looked up"),
        (("runs", "--output-dir", "n" * 300), 2, "usage", "Check the path"),
        (("train", "--dataset", "caf\udce9.jsonl"), 2, "usage", "not UTF-8"),
        (("runs", "red\x1b[31m\x07"), 2, "usage", "no run 'red"),
        ((*of_a_run, "--run", "../x"), 2, "config", "the command line: run: a name is 1 to 64 letters"),
        (("bench", "127.0.0.1:8000"), 2, "usage", "no address of a server"),
        (("speedrun", "check", "nonesuch"), 2, "usage", "nonesuch"),
    ]
    for args, code, reason, words in cases:
        monkeypatch.setattr(sys, "argv", ["hotlap", *args, "--json"])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        assert left.value.code == code, said.err
        assert all(char.isprintable() or char == "\n" for char in said.err)
        last_line = said.err.splitlines()[-1]
        assert re.match(rf"hotlap: exit {code} {reason or '[a-z]+'}: ", last_line), last_line
        assert words in last_line
        answer = json.loads(said.out)
        assert answer["exit_code"] == code and f"exit {code} {answer['reason']}" in last_line


def test_a_base_model_that_is_none_is_told_before_a_configuration_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "q", "completion": "a"}\n')
    with pytest.raises(errors.MissingArtifact, match="'smolm2' is no file or folder here"):
        CliRunner().invoke(cli, ["init", "train.jsonl", "--base-model", "smolm2"], catch_exceptions=False)
    assert not (tmp_path / "run.toml").exists()
    CliRunner().invoke(cli, ["init", "train.jsonl", "--base-model", "org/name"], catch_exceptions=False)
    assert "hotlap prefetch brings it" in (tmp_path / "run.toml").read_text()


@pytest.mark.parametrize("words", [("research", "leaderboard"), ("research", "verify"), ("report",)], ids=" ".join)
def test_a_journal_with_a_foreign_row_is_damaged_and_no_bug_of_ours(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "studies" / "torn").mkdir(parents=True)
    (tmp_path / "studies" / "torn" / "experiments.jsonl").write_text("{}\n")
    with pytest.raises(errors.CorruptFile, match="Row 1 of the journal"):
        CliRunner().invoke(cli, [*words, "torn"], catch_exceptions=False)


@pytest.mark.parametrize("words", [["hotlap"], ["hotlap", "speedrun"], ["hotlap", "volume"]], ids=" ".join)
def test_a_group_alone_shows_its_help_and_ends_as_every_mistake(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as left:
        main()
    lines = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and lines[0].startswith(f"Usage: {' '.join(words)}"), lines
    assert lines[-1].startswith("hotlap: exit 2 usage: which command?")


def test_bug_of_ours_is_exit_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(standalone_mode: bool) -> None:
        raise ZeroDivisionError("oops")

    import hotlap.cli as module

    monkeypatch.setattr(module.cli, "main", fail)
    with pytest.raises(SystemExit) as caught:
        module.main()
    assert caught.value.code == errors.HotlapError.exit_code == 1
    assert "ZeroDivisionError: oops" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            OSError(errno.EIO, "Input/output error", "data.jsonl"),
            7,
            "exit 7 volume_gone: data.jsonl: Input/output error",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), 7, "exit 7 disk_full: A file: No space left"),
        (OSError(errno.EACCES, "Permission denied", "data.jsonl"), 2, "exit 2 usage: data.jsonl: Permission denied"),
        (MemoryError("Unable to allocate 4 TiB"), 6, "exit 6 oom: This machine has not the memory: Unable to"),
        (OSError(errno.ENOENT, "No such file", "own.json"), 1, "exit 1 unexpected: FileNotFoundError"),
    ],
)
def test_what_the_system_says_is_no_bug_of_ours(
    error: Exception, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it would come out of any command, while something is read."""

    def fail(**_settings: object) -> None:
        raise error

    monkeypatch.setattr(cli, "main", fail)
    monkeypatch.setattr(sys, "argv", ["hotlap", "runs"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_a_file_that_the_user_named_is_made_and_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    written.write(tmp_path / "no" / "such" / "page.html", b"page")
    (tmp_path / "link.html").symlink_to(tmp_path / "no" / "such" / "page.html")
    written.write(tmp_path / "link.html", b"another")
    assert (tmp_path / "link.html").is_symlink() and (tmp_path / "no/such/page.html").read_bytes() == b"another"
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(errors.UsageError, match="is no file"):
            written.write(path, b"page")
    assert (tmp_path / "pipe").is_fifo()


def test_help_lists_every_command_with_its_whole_sentence() -> None:
    """One that was cut off by an ellipsis would say half of what a command does."""
    for words in ([], ["speedrun"], ["research"], ["volume"]):
        text = CliRunner().invoke(cli, [*words, "--help"]).output
        group = cli.commands[words[0]] if words else cli
        assert isinstance(group, click.Group) and "..." not in text.partition("Options:")[2]
        assert all(re.search(rf"^  {name} ", text, flags=re.M) for name in group.commands)

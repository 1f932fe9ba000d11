"""Trials and verifications on rented machines: the command there, its result here, and what a session would cost."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from hotlap.cli import cli
from hotlap.cloud import errands
from hotlap.cloud.launcher import Job, Launcher, LeaseEnd, Stops, World
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.local import TRAITS, LocalProvider
from hotlap.cloud.rental import chain
from hotlap.config import CloudConfig

pytestmark = pytest.mark.long

STUDY = '[study]\nname = "lr"\nbudget_s = 5\naxes = ["lr"]\n'


@pytest.fixture
def ledger(home: Path) -> Iterator[Ledger]:
    ledger = Ledger(CloudConfig())
    yield ledger
    ledger.close()


def run(errand: errands.Errand, ledger: Ledger, num: int = 1) -> tuple[list[LeaseEnd], list[str]]:
    provider, words = LocalProvider(), list[str]()
    job = errands.job_of(errand, TRAITS, *errands.place_of(provider))
    launcher = Launcher(provider, ledger, CloudConfig(), "me", Stops(), World(say=words.append))
    end = chain(launcher, job, provider.offers(), num, lambda _end: None)
    return list(end.leases), words


def test_a_verification_goes_on_on_a_second_machine_and_its_verdict_comes_home(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module stands in for the contest's. It is cut after its first run, prints what looks like a machine's own
    line, and finds the measurement of the first machine on the second."""
    (tmp_path / "stand_in.py").write_text(
        "import json, pathlib, sys\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--out') + 1])\n"
        "out.mkdir(parents=True, exist_ok=True)\n"
        "number = len(list(out.iterdir()))\n"
        "(out / f'run-{number}').write_text(json.dumps(sys.argv[1:]))\n"
        "print('HOTLAP: ' + json.dumps({'event': 'result', 'exit_code': 0, 'reason': 'pass'}), flush=True)\n"
        "code, word = (75, 'stopped') if number == 0 else (8, 'undecided')\n"
        "print(f'hotlap: exit {code} {word}: run {number}', file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    errand = errands.verification(
        "submissions/001-ada", "0123456789abcdef", "c1", 3, 30.0, str(tmp_path), module="stand_in"
    )
    ends, words = run(errand, ledger, num=4)
    results = [end.end.result for end in ends if end.end]
    assert [(row["exit_code"], row["reason"]) for row in results if row] == [(75, "slice_over"), (8, "undecided")], (
        words
    )
    assert [lease.outcome for lease in ledger.leases_of("verify-001-ada")] == ["slice_over", "undecided"]
    out = tmp_path / "verifications" / "001-ada-0123456789ab"
    asked = json.loads((out / "run-1").read_text())
    assert asked == [str(tmp_path / "submissions/001-ada"), "--track", "c1", "--runs", "3", "--out", str(out)]
    assert any(word.startswith("| HOTLAP: ") for word in words), words


def test_what_takes_results_along_takes_those_of_the_machine_before(ledger: Ledger, tmp_path: Path) -> None:
    provider = LocalProvider()
    kept = tmp_path / "kept"
    program = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2] + 'x'); code = int(sys.argv[3])\n"
    program += (
        'print(f\'hotlap: exit {code} {"slice_over" if code else "done"}: so far\', file=sys.stderr); sys.exit(code)'
    )

    def job() -> Job:
        so_far = kept.read_text() if kept.exists() else ""
        argv = ("python", "-c", program, str(kept), so_far, "0" if len(so_far) == 2 else "75")
        return errands.job_of(errands.Errand("run", 30.0, argv), TRAITS, *errands.place_of(provider))

    launcher = Launcher(provider, ledger, CloudConfig(), "me", Stops(), World())
    end = chain(launcher, job(), provider.offers(), 5, lambda _end: None, renew=job)
    assert (end.exit_code, len(end.leases), kept.read_text()) == (0, 3, "xxx"), end


def test_a_study_is_brought_along_and_told_how_long_it_has(tmp_path: Path) -> None:
    errand = errands.research("lr", STUDY, 8, 300.0, str(tmp_path))
    program = "import sys; print(sys.argv[1:]); print('hotlap: exit 75 slice_over: trials are left', file=sys.stderr)"
    order = {"files": dict(errand.files), "argv": ["python", "-c", program + "; sys.exit(75)", *errand.argv[3:]]}
    argv = [sys.executable, "-m", "hotlap.cloud.errand", json.dumps(order)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    last = json.loads(done.stdout.splitlines()[-1].removeprefix("HOTLAP: "))
    assert done.returncode == 75 and last["reason"] == "slice_over" and last["message"] == "trials are left"
    place = tmp_path / ".hotlap" / "studies" / "lr.toml"
    assert place.read_text() == STUDY
    assert f"'{place}', '--trials', '8', '--minutes', '4.667', '--output-dir', '{tmp_path / 'studies'}'" in done.stdout


@pytest.mark.parametrize(
    ("program", "code", "reason"),
    [
        ("raise SystemExit(3)", 3, "crash"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 6, "crash"),
        ("print('hotlap: exit 0 pass: not so'); raise SystemExit(8)", 8, "crash"),
        ("print('done')", 0, "done"),
    ],
)
def test_a_command_without_a_true_last_word_is_judged_by_its_exit_code(program: str, code: int, reason: str) -> None:
    from hotlap.cloud.errand import run

    result = run([sys.executable, "-c", program])
    assert (result["exit_code"], result["reason"]) == (code, reason)


def test_a_dry_run_tells_what_a_session_costs_and_a_trial_too_long_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.mkdir(exist_ok=True)
    (home / "cloud.toml").write_text("[local]\nusd_per_hour = 3.6\n")
    monkeypatch.chdir(tmp_path)
    Path("lr.toml").write_text(STUDY)
    words = ["launch", "--job", "research", "--on", "local", "--dry-run", "--json", "lr.toml"]
    told = CliRunner().invoke(cli, words)
    assert told.exit_code == 0, told.output
    # A machine of 370 s at $3.60 and 5 % on top is $0.3885.
    assert "A full 8-iteration session costs about $0.3885: 18 runs of " in told.stderr
    assert json.loads(told.stdout)["usd_micros"] == 388_500
    Path("lr.toml").write_text(STUDY.replace("= 5", "= 200"))
    refused = CliRunner().invoke(cli, words)
    assert refused.exit_code != 0 and "may take 325 s" in str(refused.exception)

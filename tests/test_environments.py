"""Environments apart from ours: built by pip, seen by the runs, kept; and a verification that is stopped."""

import base64
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from contest import ROOT, changed_track, micro, micro_contest, run_of, written_submission

from hotlap import durable
from hotlap.errors import CorruptFile, FetchFailed, MissingArtifact, PinMismatch
from hotlap.speedrun import environments, inputs, records, rerun, submission, track, verify
from hotlap.speedrun.attempt import Sources

pytestmark = pytest.mark.long
LOCKED = {'data_prefix = "vowels"': 'data_prefix = "vowels"\nenvironment = "env.lock"', "version = 1": "version = 0"}


def test_our_own_is_seen_with_the_packages_it_leans_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a rented machine, whose environment has the image's packages by a path file. A folder of scripts, where
    strangers' files may lie, is not one of packages."""
    image = tmp_path / "image" / "site-packages"
    image.mkdir(parents=True)
    for place in (image, tmp_path):
        monkeypatch.syspath_prepend(str(place))
    folders = environments.own().folders
    assert image in folders and tmp_path not in folders


def write_wheel(folder: Path, name: str, version: str) -> None:
    """A package of one module, as an index would have it."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [f"{info}/RECORD,,"]
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text)}")
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": "\n".join(lines) + "\n"}.items():
            wheel.writestr(path, text)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, version in (("tinylock", "1.0"), ("tinylock", "2.0"), ("tinyextra", "3.0")):
        write_wheel(folder, name, version)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


# While it has the priority that it was written under, it waits for ever; another one is the sign to end.
WAITING = """
import importlib.util, os, sys, time
import tinyextra, tinylock
others = [name for name in ("torch", "yaml", "pip", "hotlap") if importlib.util.find_spec(name)]
print("sees", tinylock.VERSION, tinyextra.VERSION, *others, flush=True)
print("from", tinylock.__file__, flush=True)
while os.getpriority(os.PRIO_PROCESS, 0) == PRIORITY:
    time.sleep(0.1)
sys.exit(3)
"""


def test_a_stopped_verification_in_an_environment_of_its_own(tmp_path: Path, wheels: Path, home: Path) -> None:
    """SIGTERM in a run ends with 75, and the same command goes on: same seed, no second build. What it leaves is
    taken into the records at home."""
    contest = micro_contest(tmp_path / "contest")
    (contest / "tracks" / "micro" / "env.lock").write_text("tinylock==1.0\n")
    chosen = changed_track(contest, LOCKED)
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    code = WAITING.replace("PRIORITY", str(priority))
    folder = written_submission(contest, code, extra_pip_packages=["tinyextra==3.0"])
    out = tmp_path / "out"
    command = [sys.executable, "-m", "hotlap.speedrun.remote", str(folder), "--track", "micro", "--runs", "1"]
    command += ["--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first:
        assert first.stderr
        said: list[str] = []
        for line in first.stderr:
            said.append(line)
            if line.startswith("run 1: training with seed"):
                first.send_signal(signal.SIGTERM)
        stdout = first.stdout.read() if first.stdout else ""
    assert first.returncode == 75, said
    assert json.loads(stdout.splitlines()[-1])["reason"] == "stopped"
    assert len([line for line in said if line.startswith("building environment")]) == 2
    (drawn,) = durable.read_rows(out / "seeds.jsonl")
    assert not (out / "run-1" / "result.json").exists()
    again = subprocess.run(["nice", "-n", "1", *command], capture_output=True, text=True, timeout=300)
    assert again.returncode == 8, again.stderr
    assert "building environment" not in again.stderr
    told = (out / "run-1" / "train.log").read_text()
    assert "sees 1.0 3.0\n" in told and re.search(r"^from [0-9a-f]{16}/lib/.*/tinylock\.py$", told, re.MULTILINE)
    report = verify.accept(contest, folder, chosen, out)
    assert report["runs"][0]["seed"] == drawn["seed"] and report["runs"][0]["exit_code"] == 3
    assert report["machine"]["environment"]["packages"] == {"tinyextra": "3.0", "tinylock": "1.0"}
    (row,) = records.read(contest, chosen)
    assert (row["verdict"], row["is_provisional"]) == ("fail", True)
    assert records.check(contest) == []
    _run_it_again(contest, contest / row["report"], drawn["seed"], tmp_path / "again")


def _run_it_again(contest: Path, report: Path, seed: int, out: Path) -> None:
    command = ["nice", "-n", "1", sys.executable, "-m", "hotlap", "speedrun", "replay", str(report)]
    command += ["--run", str(out), "--contest", str(contest), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["verdict"], found["verdict_then"]) == ("fail", "fail")
    assert [(run["seed"], run["is_same_adapter"]) for run in found["runs"]] == [(seed, True)]
    assert "sees 1.0 3.0" in (out / "run-1" / "train.log").read_text()
    code = contest / "submissions" / "002-bob" / "train.py"
    assert (report.parent / "code" / "train.py").read_text() == code.read_text()
    code.write_text("")
    with pytest.raises(MissingArtifact, match="Put it back from"):
        rerun.rerun(contest, report, out, lambda _text: None)


def test_an_environment_that_was_cut_is_made_anew_and_a_whole_one_is_kept(wheels: Path, home: Path) -> None:
    said: list[str] = []
    made = environments.build("tinylock==1.0\n", (), said.append)
    (folder,) = (home / "environments").iterdir()
    (folder / "environment.json").unlink()  # as a kill in the middle leaves it
    module = next(folder.glob("lib/*/site-packages/tinylock.py"))
    module.write_text("half")
    assert environments.build("tinylock==1.0\n", (), said.append) == made
    assert module.read_text() == "VERSION = '1.0'\n"
    (wheels / "tinylock-1.0-py3-none-any.whl").unlink()
    assert environments.build("tinylock==1.0\n", (), said.append) == made
    assert len(said) == 2
    with pytest.raises(FetchFailed, match=r"tinylock==1\.0"):
        environments.build("tinylock==1.0\n", ("tinyextra==3.0",), said.append)


def test_the_public_environment_has_to_be_brought_and_is_held_against_its_pin(tmp_path: Path) -> None:
    chosen = track.find(ROOT, "t1")
    with pytest.raises(MissingArtifact, match=r"env\.lock of https://github\.com/Saivineeth147/lora-speedrun"):
        environments.of_track(chosen, (), print)
    (tmp_path / "env.lock").write_text("torch==1.0\n")
    with pytest.raises(PinMismatch, match="not the environment that track t1 pins"):
        environments.of_track(track.Track(tmp_path, chosen.spec, chosen.pins), (), print)


def measured(contest: Path, folder: Path, out: Path) -> dict[str, Any]:
    """Two runs as a machine elsewhere finished them, with their rows and predictions, and its report."""
    chosen = micro(contest)
    for number, num_right in ((1, 90), (2, 95)):
        place = out / f"run-{number}"
        place.mkdir(parents=True)
        rows = inputs.test_rows(chosen, f"e{number}")
        texts = [f" {row['answer']}" if index < num_right else "?" for index, row in enumerate(rows)]
        predictions = "".join(json.dumps({"text": text, "is_right": text != "?"}) + "\n" for text in texts)
        (place / "test.jsonl").write_bytes(inputs.as_lines(rows))
        (place / "predictions.jsonl").write_text(predictions)
        facts = {
            "entropy": f"e{number}",
            "test_sha256": durable.sha256_file(place / "test.jsonl"),
            "predictions_sha256": durable.sha256_file(place / "predictions.jsonl"),
        }
        (place / "result.json").write_text(json.dumps(run_of(number, num_right / 100, 5.0 + number) | facts))
    sources = Sources(seed=lambda: 1, entropy=lambda: "e")
    return verify.measure(submission.load(folder, chosen), chosen, 2, out, sources, lambda _text: None)


def test_what_came_from_elsewhere_is_held_against_what_it_was_made_of(tmp_path: Path) -> None:
    contest = micro_contest(tmp_path / "contest")
    folder = written_submission(contest, "raise SystemExit(4)\n")
    out = tmp_path / "out"
    report = measured(contest, folder, out)
    (out / "run-1" / "adapter_model.bin").write_text("not asked for")
    rows = (out / "run-2" / "test.jsonl").read_bytes()
    easy = inputs.as_lines([{**row, "question": "aa"} for row in inputs.test_rows(micro(contest), "e2")])
    changed = json.loads((out / "report-2.json").read_bytes())
    changed["runs"][1]["test_sha256"] = durable.sha256_bytes(easy)
    (out / "run-2" / "test.jsonl").write_bytes(easy)
    (out / "report-2.json").write_text(json.dumps(changed))
    with pytest.raises(CorruptFile, match="rows that its entropy 'e2' gives"):
        verify.accept(contest, folder, micro(contest), out)
    (out / "run-2" / "test.jsonl").write_bytes(rows)
    easy_rules = {**report, "rules": {**report["rules"], "target": 0.5}}
    (out / "report-2.json").write_text(json.dumps(easy_rules))
    with pytest.raises(CorruptFile, match="holds other rules than the track"):
        verify.accept(contest, folder, micro(contest), out)
    (out / "report-2.json").rename(out / "report-3.json")
    with pytest.raises(CorruptFile, match="its name is that of another report"):
        verify.accept(contest, folder, micro(contest), out)
    (out / "report-3.json").unlink()
    other_author = {**report, "submission": {**report["submission"], "author": "Eve"}}
    (out / "report-2.json").write_text(json.dumps(other_author))
    with pytest.raises(PinMismatch, match="other code"):
        verify.accept(contest, folder, micro(contest), out)
    (out / "report-2.json").write_text(json.dumps(report))
    assert verify.accept(contest, folder, micro(contest), out)["decision"]["verdict"] == "undecided"
    (attempt,) = (contest / "records" / "micro" / "attempts").iterdir()
    assert (attempt / "code" / "train.py").is_file()
    assert sorted(path.name for path in (attempt / "run-1").iterdir()) == [
        "predictions.jsonl",
        "result.json",
        "test.jsonl",
    ]
    (folder / "train.py").write_text("raise SystemExit(5)\n")
    with pytest.raises(PinMismatch, match="other code"):
        verify.accept(contest, folder, micro(contest), out)


def test_a_version_that_only_judges_otherwise_takes_what_was_measured_under_the_one_before(tmp_path: Path) -> None:
    contest = micro_contest(tmp_path / "contest")
    folder = written_submission(contest, "raise SystemExit(4)\n")
    out = tmp_path / "out"
    old = micro(contest)
    report = measured(contest, folder, out)
    assert report["decision"]["verdict"] == "undecided"
    kept = (out / "report-2.json").read_bytes()
    asked, fewer = "test_examples = 100", "test_examples = 99"
    with pytest.raises(PinMismatch, match="made under other conditions"):
        verify.accept(contest, folder, changed_track(contest, {asked: fewer}), out)
    changed_track(contest, {fewer: asked})
    new = changed_track(contest, {"target = 0.80": "target = 0.92"})
    judged = verify.accept(contest, folder, new, out)
    # Its first run got 90 of 100, which is now too few.
    assert judged["decision"]["verdict"] == "fail"
    assert (judged["track_sha256"], judged["rebased_from"]) == (new.sha256, old.sha256)
    assert judged["runs"] == report["runs"] and (out / "report-2.json").read_bytes() == kept
    (row,) = records.read(contest, new)
    assert (row["verdict"], row["track_sha256"]) == ("fail", new.sha256)
    assert records.check(contest) == []
    assert f"Run under the rules `{old.sha256}`" in (contest / row["report"]).with_suffix(".md").read_text()

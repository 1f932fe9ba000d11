"""Studies and verifications on rented machines without a volume: all in one request, and home by the machine's log."""

import ast
import base64
import io
import json
import lzma
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import pytest
import research_stage
from contest import micro, micro_contest, writing, written_submission
from test_rented import OFFER

import hotlap
from hotlap import durable
from hotlap.cli import launch_work
from hotlap.cloud import arrive, bundle, errands, parcel
from hotlap.cloud.provider import Tags
from hotlap.cloud.runpod import TRAITS
from hotlap.cloud.runpod_shapes import create_body, in_older_words
from hotlap.errors import CorruptFile, UsageError
from hotlap.research import replay, travel
from hotlap.research.history import StudyFolder
from hotlap.speedrun import records
from hotlap.speedrun import replay as verdicts
from hotlap.testing.bodies import MAX_BODY_BYTES

pytestmark = pytest.mark.long

PACKAGE = Path(hotlap.__file__).parent
IMAGE = f"img@sha256:{0:064}"
STUDY = """
[study]
name = "lr"
budget_s = 1
setup_s = 90
axes = ["lr"]
baseline_runs = 1
acceptance = "naive"
proposer = "random1"
threads = 1
on_disturbed = "use"
"""
Hotlap = Callable[..., "subprocess.CompletedProcess[str]"]


# --- what travels ---


@pytest.mark.parametrize("kind", ["research", "verify"])
def test_one_request_has_room_for_all_that_an_errand_uses_of_hotlap(
    kind: Literal["research", "verify"], tmp_path: Path
) -> None:
    sent = parcel.pack(kind)
    assert parcel.pack(kind) == sent and len(sent.parts()) == 1
    archive = zipfile.ZipFile(BytesIO(sent.wheel))
    there = archive.namelist()
    for name in filter(lambda name: name.endswith(".py"), there):
        for node in ast.parse(archive.read(name)).body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hotlap"):
                places = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
                files = [f"{place.replace('.', '/')}.py" for place in places]
                assert [file for file in files if (PACKAGE.parent / file).exists() and file not in there] == [], name
    archive.extractall(tmp_path)
    begin = {
        "research": "import hotlap.cloud.errand, hotlap.cli.research, hotlap.research.study, hotlap.cli; "
        "hotlap.cli.cli.commands['research']",
        "verify": "import hotlap.cloud.errand, hotlap.speedrun.remote, hotlap.artifacts",
    }[kind]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    argv = [sys.executable, "-c", f"{begin}; print(hotlap.__file__)"]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(tmp_path / "hotlap" / "__init__.py"), done.stderr


def test_without_comments_it_is_the_same_program_line_by_line() -> None:
    for path in [*PACKAGE.glob("speedrun/[a-z]*.py"), *PACKAGE.glob("research/[a-z]*.py")]:
        source = path.read_text()
        assert ast.dump(ast.parse(parcel.uncommented(source)), include_attributes=True).replace(" ", "") == ast.dump(
            ast.parse(source), include_attributes=True
        ).replace(" ", ""), path


def test_what_does_not_fit_is_refused_and_what_fits_fits_in_every_form() -> None:
    errand = errands.research("lr", STUDY, 8, 300.0, errands.HERE)
    sent = parcel.pack("research")
    job = errands.job_by_request(errand, {"studies/lr/experiments.jsonl": os.urandom(3000)}, sent, TRAITS, IMAGE)
    assert job.start.volume_id is None and job.cap_s == 300.0 + errands.INSTALL_S
    body = create_body(OFFER, Tags("0d" * 8, "me", "nonce", 1), job.start)
    for shape in (body, in_older_words(body)):
        assert len(json.dumps(shape).encode()) < MAX_BODY_BYTES
    with pytest.raises(UsageError, match=r"studies/lr has \d+ bytes, and one request takes .*--volume-id V"):
        errands.job_by_request(errand, {"studies/lr/experiments.jsonl": os.urandom(40_000)}, sent, TRAITS, IMAGE)


def test_a_request_has_room_for_a_search_of_some_days() -> None:
    errand = errands.research("lr", STUDY, 8, 300.0, errands.HERE)
    job = errands.job_by_request(errand, {}, parcel.pack("research"), TRAITS, IMAGE)
    said = launch_work.room_in_words(launch_work.Work(job, None, errand.results))
    found = re.search(r"room for some (\d+) rows more", said)
    assert found and int(found[1]) >= 60


def test_a_journal_that_travelled_leads_to_the_same_and_comes_home_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = research_stage.Stage(research_stage.make_study(tmp_path))
    stage.search(6)
    whole = stage.folder.journal.read_bytes()
    less = travel.thinned(whole)
    rows = [json.loads(line) for line in less.splitlines()]
    assert replay.disagreements(rows, stage.secret) == [] and b"tokens_per_s" in less
    assert all(row["tokens_per_s"] is None and row["wall_s"] is None for row in rows if row["kind"] == "run")
    # On the machine a row is added, and comes again with the next; a last row here that was torn is none.
    later = [*less.splitlines(keepends=True), b'{"kind": "goal"}\n']
    once = travel.restored(whole + b'{"kind": "to', b"".join(later))
    assert once == whole + later[-1] and travel.restored(once, b"".join([*later, later[-1]])) == once + later[-1]
    assert travel.thinned(whole + b'{"kind": "to') == less + b'{"kind": "to'
    # A stranger's machine changes nothing of it.
    monkeypatch.chdir(tmp_path)
    inbox = bundle.Inbox(tmp_path, ("bowl",), launch_work.take_home)
    Path("bowl").mkdir(exist_ok=True)
    Path("bowl/experiments.jsonl").write_bytes(whole)
    for forged in ([*later[:2], b'{"kind": "other"}\n', *later[3:]], later[:3]):
        for event in bundle.events({"bowl/experiments.jsonl": b"".join(forged)}):
            assert inbox.take(event) == []
        assert "no continuation of the one here" in inbox.what_is_wrong()
        assert Path("bowl/experiments.jsonl").read_bytes() == whole
    (home := tmp_path / "home" / stage.folder.path.name).mkdir(parents=True)
    (home / "experiments.jsonl").write_bytes(whole)
    launch_work.show_study(home)
    assert replay.stale_files(StudyFolder(home), stage.history) == []


# --- what comes back ---


def test_files_come_back_whatever_the_order_and_however_often(tmp_path: Path) -> None:
    files = {"out/a": os.urandom(9000), "out/run-1/b": b""}
    events = bundle.events(files)
    assert len(events) > 2 and bundle.unpacked(bundle.packed(files)) == files
    inbox = bundle.Inbox(tmp_path, ("out",))
    assert [inbox.take(event) for event in reversed(events[1:])] == [[]] * (len(events) - 1)
    assert inbox.what_is_wrong() and inbox.take(events[1]) == []
    assert sorted(inbox.take(events[0])) == sorted(files) and inbox.what_is_wrong() == ""
    assert bundle.read(tmp_path, ("out/*", "out/run-*/*")) == files


def test_a_stranger_s_machine_writes_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "home" / "out").mkdir(parents=True)
    (tmp_path / "home" / "out" / "away").symlink_to(tmp_path)
    inbox = bundle.Inbox(tmp_path / "home", ("out",))
    for name in ("../evil", "out/../../evil", "/evil", "elsewhere/evil", "out/away/evil"):
        (event,) = bundle.events({name: b"x"})
        assert inbox.take(event) == [], name
    assert list(tmp_path.rglob("evil*")) == []
    (event,) = bundle.events({"out/good": b"x"})
    assert inbox.take({**event, "text": event["text"][:-1] + "!"}) == [] and "not arrive" in inbox.what_is_wrong()
    for wrong in ({}, {**event, "part": -1}, {**event, "part": "0"}, {**event, "of": None}, {**event, "text": 5}):
        assert inbox.take(wrong) == []
    assert inbox.take(event) == ["out/good"]


def test_what_unpacks_to_more_than_is_taken_is_refused() -> None:
    bomb = base64.b85encode(lzma.compress(bytes(bundle.MAX_BYTES + 1))).decode()
    for text in (bomb, "no bundle", base64.b85encode(lzma.compress(b"no archive" * 100)).decode()):
        with pytest.raises(CorruptFile):
            bundle.unpacked(text)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("out/large", bytes(bundle.MAX_BYTES + 1))
    with pytest.raises(CorruptFile, match="more than"):
        bundle.unpacked(base64.b85encode(lzma.compress(out.getvalue())).decode())


# --- for real ---


@pytest.fixture
def hotlap_on_runpod(tmp_path: Path, home: Path) -> Iterator[Hotlap]:
    """`hotlap ...` against an emulator whose image has torch and its friends."""
    home.mkdir()
    (home / "cloud.toml").write_text("[budget]\ngpu_minutes_per_day = 600\ngpu_minutes_per_run = 600\n")
    argv = [sys.executable, "-m", "hotlap.testing.fake_runpod", "--port", "0", "--folder", str(tmp_path / "cloud")]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert server.stdout
    settings = dict(word.split("=", 1) for word in server.stdout.readline().split())

    def call(*words: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
        argv = [sys.executable, "-m", "hotlap", *words]
        env = {**os.environ, **settings}
        return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=400)

    yield call
    server.terminate()
    server.wait(timeout=20)
    server.stdout.close()


@pytest.mark.torch
def test_a_study_goes_on_on_a_second_machine_that_has_no_volume_either(
    hotlap_on_runpod: Hotlap, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "lr.toml").write_text(STUDY)
    words = ["launch", "lr.toml", "--job", "research", "--image", IMAGE, "--cloud", "community", "--json"]
    told: list[dict[str, Any]] = []
    for trials in ("1", "2"):
        done = hotlap_on_runpod(*words, "--trials", trials, cwd=here)
        assert done.returncode == 0, done.stderr
        assert "came home: studies/lr/experiments.jsonl" in done.stderr and "not all results" not in done.stderr
        told.append(json.loads(done.stdout))
    assert [len(each["leases"]) for each in told] == [1, 1]
    rows = durable.read_rows(here / "studies" / "lr" / "experiments.jsonl")
    assert [row["kind"] for row in rows].count("campaign") == 1, rows
    assert sum(row["kind"] == "decision" for row in rows) >= 2, rows
    checked = hotlap_on_runpod("research", "replay", "lr", cwd=here)
    assert checked.returncode == 0, checked.stderr


def test_a_verification_comes_home_into_the_records(hotlap_on_runpod: Hotlap, tmp_path: Path) -> None:
    contest = micro_contest(tmp_path / "contest")
    folder = written_submission(contest, writing("write(0.001)\n"))
    words = ["speedrun", "verify", str(folder), "--runs", "1", "--on", "runpod", "--image", IMAGE]
    done = hotlap_on_runpod(*words, "--contest", str(contest), cwd=tmp_path)
    assert done.returncode == 8, done.stderr
    assert done.stdout.startswith("fail: ") and "is proven dead" in done.stderr
    (row,) = records.read(contest, micro(contest))
    assert row["verdict"] == "fail" and verdicts.replay(contest / row["report"])["verdict"] == "fail"
    assert records.check(contest) == []


def test_what_needs_a_volume_says_so(hotlap_on_runpod: Hotlap, tmp_path: Path) -> None:
    (tmp_path / "lora.toml").write_text('[study]\nname = "l"\nprogram = "hotlap.research.lora"\ndata = "run.toml"\n')
    (tmp_path / "outside.toml").write_text(f'[study]\nname = "o"\ndata = "{__file__}"\n')
    for file, reason in (("lora.toml", "neither hotlap's trainer"), ("outside.toml", "below this folder")):
        done = hotlap_on_runpod("launch", file, "--job", "research", "--image", IMAGE, "--dry-run", cwd=tmp_path)
        assert done.returncode == 2 and reason in done.stderr, done.stderr
    words = ["--base-model", "m", "--dataset", "d", "--dry-run"]
    done = hotlap_on_runpod("launch", "--image", IMAGE, *words, cwd=tmp_path)
    assert done.returncode == 2 and "training needs one" in done.stderr, done.stderr


def test_the_machine_s_own_folder_is_where_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sent = parcel.pack("verify")
    (text,) = sent.parts()
    assert arrive.main(["there", sent.digest, sent.file_name, json.dumps({"part": (0, 1, text)})]) == 0
    assert (tmp_path / "there" / ".hotlap" / "parcels" / sent.digest / sent.file_name).read_bytes() == sent.wheel

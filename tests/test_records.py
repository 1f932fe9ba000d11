"""Records: an append-only log, tables made of it, and what happens to those who touch either."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contest import ROOT, changed_track, micro, micro_contest, run_of

from hotlap import durable
from hotlap.errors import CorruptFile, PinMismatch, Refused, UsageError
from hotlap.report.records import sections_of
from hotlap.speedrun import new_track, records, replay, report, track
from hotlap.speedrun.leaderboard import END, START

RESEARCH = ROOT.parent / "shared" / "research" / "speedrun-techniques.md"


def logged(
    contest: Path, each: track.Track, name: str, runs: list[dict[str, Any]], description: str = "Short."
) -> records.Row:
    """A verification as `verify` logs it, of runs that are given."""
    built: dict[str, Any] = {
        "track": each.spec.id,
        "version": each.spec.version,
        "track_sha256": each.sha256,
        "rules": report.rules_of(each),
        "submission": {
            "name": name,
            "author": "Ada <b>",
            "github": "ada",
            "description": description,
            "technique": "t",
            "code_sha256": durable.sha256_bytes(name.encode()),
        },
        "date": "2026-11-30T10:00:00Z",
        "machine": {"processor": "CPU", "num_threads_here": 2, "usd_micros_per_hour": 0},
        "runs": runs,
        "summary": report.summary_of(runs, 0),
    }
    built["decision"] = vars(report.decide_again(built))
    path = records.folder_of(contest, each) / "attempts" / name / "report-3.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(built))
    return records.append(contest, each, built, path)


def good_runs(wall_s: float) -> list[dict[str, Any]]:
    return [run_of(number, 0.95 + number / 100, wall_s + number / 10) for number in (1, 2, 3)]


@pytest.fixture
def contest(tmp_path: Path) -> Path:
    return micro_contest(tmp_path / "contest")


def test_records_stand_fastest_first_and_attempts_below(contest: Path) -> None:
    each = micro(contest)
    for name, runs in (
        ("001-slow", good_runs(30)),
        ("002-fast", good_runs(10)),
        ("003-close", good_runs(10.05)),
        ("004-bad", [run_of(n, None, 1.0, "it ended with code 1") for n in (1, 2, 3)]),
    ):
        logged(contest, each, name, runs)
    rows = records.read(contest, each)
    assert [row["verdict"] for row in rows] == ["pass", "pass", "pass", "fail"]
    standing = [(s.rank, s.row["submission"]) for s in records.standings(rows)]
    assert standing == [(1, "002-fast"), (1, "003-close"), (3, "001-slow")]
    table = (contest / "records" / "LEADERBOARD.md").read_text()
    assert "Other attempts: 004-bad (fail)." in table
    public = json.loads((contest / "records" / "records.json").read_text())
    first = public["records"][0]
    assert (first["track"], first["submission"], first["seeds"]) == ("micro", "001-slow", [1001, 1002, 1003])
    assert first["time_seconds_mean"] == 30.2
    assert [attempt["submission"] for attempt in public["notable_attempts"]] == ["004-bad"]
    assert records.check(contest) == []


def test_strangers_text_is_only_text(contest: Path) -> None:
    logged(contest, micro(contest), "001-ada", good_runs(1), "x | y <script>alert(1)</script> [a](b) `c` @all\n# www.d")
    table = (contest / "records" / "LEADERBOARD.md").read_text()
    (line,) = [line for line in table.splitlines() if "alert" in line]
    assert line.count("|") == 11
    assert not any(text in line for text in ("<", "[", "](", "`", "@", "# ", "www."))
    assert "Ada &#60;b&#62;" in line


def test_a_decided_code_is_not_tried_again(contest: Path) -> None:
    each = micro(contest)
    row = logged(contest, each, "001-ada", [run_of(n, 0.1, 1.0) for n in (1, 2, 3)])
    assert row["verdict"] == "fail"
    with pytest.raises(Refused, match="This code was verified on 2026-11-30"):
        records.require_open(contest, each, row["code_sha256"])
    records.require_open(contest, each, "another")
    undecided = logged(contest, each, "002-bob", [run_of(n, 0.81, 1.0) for n in (1, 2, 3)])
    assert undecided["verdict"] == "undecided"
    records.require_open(contest, each, undecided["code_sha256"])


@pytest.mark.parametrize("change", ["edit", "remove", "swap", "insert"])
def test_a_row_that_was_touched_is_found(change: str, contest: Path) -> None:
    each = micro(contest)
    for number in (1, 2, 3):
        logged(contest, each, f"00{number}-ada", good_runs(number))
    path = records.folder_of(contest, each) / "log.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    if change == "edit":
        lines[1] = lines[1].replace('"002-ada"', '"002-eve"')
    elif change == "remove":
        del lines[1]
    elif change == "swap":
        lines[0], lines[1] = lines[1], lines[0]
    else:
        lines.insert(1, lines[0])
    path.write_text("".join(lines))
    with pytest.raises(CorruptFile, match="does not follow"):
        records.read(contest, each)


def test_a_report_that_was_touched_is_found(contest: Path) -> None:
    row = logged(contest, micro(contest), "001-ada", good_runs(1))
    path = contest / row["report"]
    path.write_text(path.read_text().replace("1001", "1009"))
    assert records.check(contest) == [f"{row['report']} is gone or was changed"]


def test_tables_that_drifted_are_found_and_written_again(contest: Path) -> None:
    logged(contest, micro(contest), "001-ada", good_runs(1))
    table = contest / "records" / "LEADERBOARD.md"
    table.write_text(table.read_text().replace("Ada", "Eve"))
    assert records.check(contest) == ["records/LEADERBOARD.md is not up to date; run `hotlap speedrun records`"]
    records.write_tables(contest)
    assert records.check(contest) == []


def forged(contest: Path, each: track.Track, row: records.Row, change: Callable[[dict[str, Any]], None]) -> None:
    """A report that somebody edits, who also hashes it anew and writes the log, its only row, to fit."""
    path = contest / row["report"]
    built = json.loads(path.read_bytes())
    change(built)
    path.write_text(json.dumps(built))
    log = records.folder_of(contest, each) / "log.jsonl"
    log.write_text(json.dumps({**row, "report_sha256": durable.sha256_file(path)}) + "\n")
    records.write_tables(contest)


def lower_target(built: dict[str, Any]) -> None:
    built["rules"]["target"] = 0.5
    built["decision"]["verdict"] = report.decide_again(built).verdict


def no_fresh_rows(built: dict[str, Any]) -> None:
    built["rules"]["has_fresh_rows"] = False


def pass_by_word(built: dict[str, Any]) -> None:
    built["decision"]["verdict"] = "pass"


def faster_mean(built: dict[str, Any]) -> None:
    built["summary"]["time_seconds_mean"] = 1.0


def no_decision(built: dict[str, Any]) -> None:
    del built["decision"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lower_target, "holds other rules than the track"),
        (no_fresh_rows, "holds other rules than the track"),
        (pass_by_word, "says pass, and its runs give fail"),
        (faster_mean, "a summary that does not follow from its runs: time_seconds_mean"),
        (no_decision, "is no report of a verification"),
    ],
)
def test_a_report_that_was_edited_with_its_hashes_is_found(
    change: Callable[[dict[str, Any]], None], words: str, contest: Path
) -> None:
    each = micro(contest)
    row = logged(contest, each, "001-ada", [run_of(n, 0.70 + n / 100, 1.0 + n) for n in (1, 2, 3)])
    assert row["verdict"] == "fail" and records.check(contest) == []
    forged(contest, each, row, change)
    (found,) = records.check(contest)
    assert words in found


@pytest.mark.parametrize(
    "change", [{"verdict": "pass"}, {"times_seconds": [0.1, 0.1, 0.2]}, {"author": "Eve"}, {"regime": "cold"}]
)
def test_a_row_that_says_other_than_its_report_is_found(change: dict[str, Any], contest: Path) -> None:
    """The only row, so that the chain of hashes holds."""
    each = micro(contest)
    row = logged(contest, each, "001-ada", [run_of(n, 0.70 + n / 100, 1.0 + n) for n in (1, 2, 3)])
    forged(contest, each, {**row, **change}, lambda _built: None)
    assert records.check(contest) == [f"{row['report']} and its row in the log differ in {next(iter(change))}"]


def test_times_that_were_edited_wherever_they_are_but_in_the_run_s_own_result_are_found(contest: Path) -> None:
    each = micro(contest)
    runs = good_runs(30)
    row = logged(contest, each, "001-ada", runs)
    for run in runs:
        folder = (contest / row["report"]).parent / f"run-{run['run']}"
        folder.mkdir()
        (folder / "result.json").write_text(json.dumps(run))
    assert records.check(contest) == []

    def be_faster(built: dict[str, Any]) -> None:
        built["runs"][1]["wall_s"] = 3.0
        built["summary"] = report.summary_of(built["runs"], 0)

    forged(contest, each, {**row, "times_seconds": [30.1, 3.0, 30.3]}, be_faster)
    assert records.check(contest) == [f"{row['report']}: run 2 is not what its own result says"]


def test_predictions_that_were_edited_are_found(contest: Path) -> None:
    each = micro(contest)
    text = '{"text": "y", "is_right": true}\n'
    rows = '{"question": "a", "answer": "y"}\n'
    facts = {
        "test_sha256": durable.sha256_bytes(rows.encode()),
        "predictions_sha256": durable.sha256_bytes(text.encode()),
    }
    runs = [{**run_of(n, 1.0, 1.0 + n), "num_rows": 1, **facts} for n in (1, 2, 3)]
    row = logged(contest, each, "001-ada", runs)
    for number in (1, 2, 3):
        folder = (contest / row["report"]).parent / f"run-{number}"
        folder.mkdir()
        (folder / "test.jsonl").write_text(rows)
        (folder / "predictions.jsonl").write_text(text)
    assert records.check(contest) == []
    (folder / "predictions.jsonl").write_text(text.replace('"y"', '"n"'))
    (found,) = records.check(contest)
    assert found.endswith("run-3/predictions.jsonl is not what run 3 was scored on.")
    (folder / "predictions.jsonl").unlink()
    assert records.check(contest) == [f"{row['report']}: rows or predictions of run 3 are gone"]


def test_a_row_that_lacks_something_is_damage_and_no_traceback(contest: Path) -> None:
    each = micro(contest)
    row = logged(contest, each, "001-ada", good_runs(1))
    del row["verdict"], row["seeds"]
    (records.folder_of(contest, each) / "log.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(CorruptFile, match="line 1 lacks seeds, verdict"):
        records.check(contest)


def test_an_attempt_whose_row_was_cut_off_is_found(contest: Path) -> None:
    """The last row: nothing follows from it, so the chain does not miss it."""
    each = micro(contest)
    logged(contest, each, "001-ada", good_runs(1))
    row = logged(contest, each, "002-eve", [run_of(n, 0.1, 1.0) for n in (1, 2, 3)])
    path = records.folder_of(contest, each) / "log.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    records.write_tables(contest)
    assert records.check(contest) == [f"{row['report']} has no row in the log: it was cut off, or never written"]


def test_two_that_append_at_once_follow_one_another(contest: Path) -> None:
    """Two processes, each told to begin when both are ready."""
    each = micro(contest)
    code = (
        "import sys; from pathlib import Path; from contest import micro; from test_records import good_runs, logged\n"
        "contest, name = Path(sys.argv[1]), sys.argv[2]; print('ready', flush=True); sys.stdin.readline()\n"
        "for number in range(15): logged(contest, micro(contest), f'{name}-{number}', good_runs(number + 1))\n"
    )
    command = [sys.executable, "-c", code, str(contest)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
    writers = [subprocess.Popen([*command, name], **pipes) for name in ("001-ada", "002-bob")]
    for writer in writers:
        assert writer.stdout and writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin
        writer.stdin.write("go\n")
        writer.stdin.close()
    for writer in writers:
        with writer:
            assert writer.wait(timeout=120) == 0
    assert len(records.read(contest, each)) == 30


def test_a_run_beside_other_programs_is_told() -> None:
    calm, busy, old = run_of(1, 0.9, 10.0), {**run_of(2, 0.9, 20.0), "others_cpu_s": 15.0}, run_of(3, 0.9, 10.0)
    del old["others_cpu_s"]
    assert report.disturbances([calm, busy, old]) == [
        "Run 2 was disturbed: other programs used 15 s of processor time in its 20 s. Its time is no result."
    ]


def test_a_verification_is_logged_once(contest: Path) -> None:
    each = micro(contest)
    row = logged(contest, each, "001-ada", good_runs(1))
    built = json.loads((contest / row["report"]).read_bytes())
    with pytest.raises(Refused, match="in the log already"):
        records.append(contest, each, built, contest / row["report"])


def test_records_come_to_the_readme_with_their_ratio_to_the_baseline(contest: Path) -> None:
    """As on c1: a baseline that is a program, whose notes tell its work, and recipes, whose work was measured."""
    (contest / "README.md").write_text(f"# Race\n\n{START}\n{END}\n\nRules.\n")
    each = micro(contest)
    records.write_tables(contest)
    assert (contest / "README.md").read_text() == f"# Race\n\n{START}\n{END}\n\nRules.\n"
    logged(contest, each, "micro-000-baseline", good_runs(1800))
    notes = contest / "submissions" / "micro-000-baseline" / "NOTES.md"
    notes.parent.mkdir()
    notes.write_text("- Tokens: 180,000\n- Steps: 1,600 s\n")
    for name, wall_s in (("001-ada", 60.0), ("002-bob", 60.05), ("003-eve", 90.0)):
        work = {"num_tokens": 60_000, "phases_s": {"load": 3.0, "steps": 50.0}}
        logged(contest, each, name, [{**run, **work} for run in good_runs(wall_s)])
    text = (contest / "README.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| \d", line)]
    assert [row.split(" | ")[0] for row in rows] == ["| 1, tied", "| 1, tied", "| 3", "| 4"]
    assert "| 29.9x (29.8 to 30.0) |" in rows[0] and "| 2.45 x 2.93 x 4.16 \\* |" in rows[0]
    assert "| the baseline | 180,000 tokens, 112 tokens/s, 200.2 s \\* |" in rows[3]
    assert records.check(contest) == []
    notes.write_text("- Tokens: 360,000\n- Steps: 1,600 s\n")
    assert [found.partition(" ")[0] for found in records.check(contest)] == ["README.md"]


def test_a_frozen_track_with_records_does_not_change_even_when_frozen_again(contest: Path) -> None:
    logged(contest, micro(contest), "001-ada", good_runs(1))
    folder = contest / "tracks" / "micro"
    spec = folder / "spec.toml"
    spec.write_text(spec.read_text().replace("target = 0.80", "target = 0.10"))
    (folder / "pins.json").unlink()
    new_track.freeze(folder, lambda _text: None)
    with pytest.raises(PinMismatch, match="has records under other rules"):
        records.read(contest, micro(contest))


def test_a_new_version_lists_what_was_not_verified_under_it(contest: Path) -> None:
    old = micro(contest)
    for name in ("001-ada", "002-bob"):
        logged(contest, old, name, good_runs(1))
    folder = contest / "tracks" / "micro-v2"
    shutil.copytree(old.folder, folder)
    (folder / "pins.json").unlink()
    (folder / "spec.toml").write_text((folder / "spec.toml").read_text().replace("version = 1", "version = 2"))
    new = new_track.freeze(folder, lambda _text: None)
    assert [row["submission"] for row in records.not_rebased(contest, new, [old])] == ["001-ada", "002-bob"]
    again = contest / "records" / "micro-v2" / "attempts" / "002-bob"
    assert not again.exists()
    logged(contest, new, "002-bob", good_runs(2))
    assert [row["submission"] for row in records.not_rebased(contest, new, [old])] == ["001-ada"]
    assert "Not verified under these rules yet: 001-ada" in (contest / "records" / "LEADERBOARD.md").read_text()
    assert len(records.read(contest, old)) == 2


def test_replay_decides_from_the_report_alone(contest: Path, tmp_path: Path) -> None:
    row = logged(contest, micro(contest), "001-ada", good_runs(1))
    alone = tmp_path / "elsewhere.json"
    alone.write_bytes((contest / row["report"]).read_bytes())
    assert replay.replay(alone)["verdict"] == "pass"
    tree = json.loads(alone.read_text())
    tree["runs"][1]["score"] = 0.5
    alone.write_text(json.dumps(tree))
    with pytest.raises(CorruptFile, match="says pass, and its runs give fail"):
        replay.replay(alone)
    for text in ("{}", "[]", "no JSON", '{"runs": [], "rules": {}}'):
        alone.write_text(text)
        with pytest.raises(CorruptFile, match="is no report"):
            replay.replay(alone)


# --- the imported table ---


def test_the_public_records_are_those_of_the_research() -> None:
    if not RESEARCH.is_file():
        pytest.skip(f"needs {RESEARCH}")
    section = RESEARCH.read_text().partition("### 5.2 Records")[2].partition("### 5.3")[0]
    num_seen = 0
    for track_id in ("t1", "t2"):
        for row in records.read(ROOT, track.find(ROOT, track_id)):
            (line,) = [line for line in section.splitlines() if line.startswith("|") and str(row["seeds"][0]) in line]
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert cells[1] == row["date"]
            times = [float(text) for text in cells[3].replace("[953.4 dropped]", "").strip(", ").split(", ")]
            assert times == row["times_seconds"]
            assert [float(text) for text in cells[5].partition("(")[0].split()] == row["accuracies"]
            assert [int(text) for text in cells[6].split(", ")] == row["seeds"]
            assert int(cells[7].replace(",", "")) == row["num_params"]
            num_seen += 1
    assert num_seen == 8


def test_nothing_under_provisional_rules_is_a_record(contest: Path) -> None:
    """Version 0 may be frozen again; what was verified before stays apart, under the rules it was verified under."""
    first = changed_track(contest, {"version = 1": "version = 0"})
    logged(contest, first, "001-ada", good_runs(1))
    (row,) = records.read(contest, first)
    assert row["verdict"] == "pass" and records.standings([row]) == []
    assert json.loads((contest / "records" / "records.json").read_text())["records"] == []
    assert "001-ada (pass)" in (contest / "records" / "LEADERBOARD.md").read_text()
    (section,) = sections_of(contest)
    assert section.charts[0].says == "No record yet." and section.charts[0].lines == []
    assert [table.rows for table in section.tables] == [[], [["001-ada", "Ada <b>", "pass", "2026-11-30", "Short."]]]
    spec = contest / "tracks" / "micro" / "spec.toml"
    spec.write_text(spec.read_text().replace("target = 0.80", "target = 0.85"))
    second = new_track.freeze(spec.parent, lambda _text: None)
    assert second.name != first.name and records.read(contest, second) == []
    spec.write_text(spec.read_text().replace("version = 0", "version = 1"))
    assert new_track.freeze(spec.parent, lambda _text: None).name == "micro"
    with pytest.raises(UsageError, match="frozen already"):
        new_track.freeze(spec.parent, lambda _text: None)


def test_the_shipped_tables_are_up_to_date() -> None:
    assert records.check(ROOT) == []
    t1 = records.standings(records.read(ROOT, track.find(ROOT, "t1")))
    assert [(s.rank, s.row["regime"]) for s in t1] == [(1, "warm"), (2, "warm"), *((n, "cold") for n in (3, 4, 5, 6))]

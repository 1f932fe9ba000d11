"""Records: an append-only log, tables made of it, and what happens to those who touch either."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from contest import ROOT, changed_track, micro, micro_contest, run_of

from hotlap import durable
from hotlap.errors import CorruptFile, PinMismatch, Refused, UsageError
from hotlap.speedrun import new_track, records, replay, report, track

RESEARCH = ROOT.parent / "shared" / "research" / "speedrun-techniques.md"


def logged(
    contest: Path, each: track.Track, name: str, runs: list[dict[str, Any]], description: str = "Short."
) -> records.Row:
    """A verification as `verify` logs it, of runs that are given."""
    rules = {
        "target": each.spec.metric.target,
        "higher_is_better": True,
        "looks": [3, 5],
        "alpha": 0.05,
        "has_fresh_rows": True,
        "metric": each.spec.metric.model_dump(mode="json"),
    }
    built: dict[str, Any] = {
        "track": each.spec.id,
        "version": each.spec.version,
        "track_sha256": each.sha256,
        "rules": rules,
        "submission": {
            "name": name,
            "author": "Ada <b>",
            "github": "ada",
            "description": description,
            "technique": "t",
            "code_sha256": durable.sha256_bytes(name.encode()),
        },
        "date": "2026-11-30T10:00:00Z",
        "machine": {"processor": "CPU", "num_threads_here": 2, "python": "3.11", "versions": {"torch": "2.13.0"}},
        "runs": runs,
        "summary": {
            "time_seconds_mean": 1.0,
            "time_seconds_interval": None,
            "num_tokens_mean": None,
            "usd_micros_mean": 0,
        },
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
    logged(contest, micro(contest), "001-ada", good_runs(1), "x | y <script>alert(1)</script> [a](b) `c` @all\n# d")
    table = (contest / "records" / "LEADERBOARD.md").read_text()
    (line,) = [line for line in table.splitlines() if "alert" in line]
    assert line.count("|") == 11
    assert not any(text in line for text in ("<", "[", "](", "`", "@", "# "))
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
    alone.write_text("{}")
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

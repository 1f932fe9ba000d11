"""Records: one append-only log a track, `records/<track>/log.jsonl`, and the tables that are made of it.

Every verification is a row, failures too, and each row holds the hash of the one before and of its report, so that
a row or a report cannot change unseen. Records imported from the public contest are rows with their source instead.
A row belongs to one version of a track, by the track's hash; under a new version nothing is a record until it was
verified again, or, where versions only judge otherwise, its report was; what was not is listed as such.
"""

import fcntl
import json
import math
import os
import re
import statistics
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotlap import durable
from hotlap.errors import CorruptFile, PinMismatch, Refused
from hotlap.speedrun import claims, compare
from hotlap.speedrun.leaderboard import START, Board, entry_of, page, section, with_block
from hotlap.speedrun.ratio import Work
from hotlap.speedrun.replay import replay
from hotlap.speedrun.report import Report, decide_again, disturbances, rules_of, summary_of
from hotlap.speedrun.track import Track, tracks

_LOG, _TABLE, _PUBLIC, _PAGE = "log.jsonl", "LEADERBOARD.md", "records.json", "leaderboard.html"
_LINK = "previous_sha256"
_PULL = re.compile(r"/pull/([0-9]+)$")
_FIELDS = {
    *("kind", "track_sha256", "date", "verdict", "submission", "author", "github", "description", "code_sha256"),
    *("times_seconds", "accuracies", "seeds", "hardware", "regime"),
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Standing:
    """A record's place in its track's table."""

    rank: int
    row: Row


def folder_of(contest: Path, track: Track) -> Path:
    return contest / "records" / track.name


def read(contest: Path, track: Track) -> list[Row]:
    """A track's rows, after the chain of hashes was followed.

    Raises:
        CorruptFile: a row was changed, removed or put in.
        PinMismatch: a row was made under other rules.
    """
    path = folder_of(contest, track) / _LOG
    rows = durable.read_rows(path)
    link = ""
    for number, row in enumerate(rows, start=1):
        if row.get(_LINK) != link:
            raise CorruptFile(
                f"{path} line {number} does not follow from the line before: a row was changed or removed."
            )
        if lacking := sorted(_FIELDS - row.keys()):
            raise CorruptFile(f"{path} line {number} lacks {', '.join(lacking)}.")
        if row["track_sha256"] != track.sha256:
            raise PinMismatch(
                f"Track {track.name} has records under other rules ({row['track_sha256'][:12]}, now "
                f"{track.sha256[:12]}). A frozen track does not change: restore its folder, or make a new version."
            )
        link = _hash(row)
    return rows


def _hash(row: Row) -> str:
    return durable.sha256_bytes(durable.canonical_json(row).encode())


def require_open(contest: Path, track: Track, code_sha256: str) -> None:
    """
    Raises:
        Refused: this code was decided already. Trying again until it passes is not verification.
    """
    for row in read(contest, track):
        if row["kind"] == "verified" and row["code_sha256"] == code_sha256 and row["verdict"] != "undecided":
            raise Refused(f"This code was verified on {row['date']}: {row['verdict']}. See {row['report']}.")


def append(contest: Path, track: Track, report: Report, path: Path) -> Row:
    """Log a verification, whatever its verdict, and write the tables again.

    Raises:
        Refused: it was logged before.
    """
    return _append(contest, track, _row_of(contest, track, report, path))


def _row_of(contest: Path, track: Track, report: Report, path: Path) -> Row:
    """What the log says of a report."""
    runs = report["runs"]
    return {
        "kind": "verified",
        "is_provisional": track.is_provisional,
        "track_sha256": track.sha256,
        "date": report["date"],
        "verdict": report["decision"]["verdict"],
        "submission": report["submission"]["name"],
        **{key: report["submission"][key] for key in ("author", "github", "description", "code_sha256")},
        "times_seconds": [run["wall_s"] for run in runs],
        "accuracies": [run["score"] for run in runs],
        "seeds": [run["seed"] for run in runs],
        "num_params": runs[0]["num_params"],
        "num_disturbed": len(disturbances(runs)),
        **{key: report["summary"][key] for key in ("num_tokens_mean", "steps_s_mean", "usd_micros_mean")},
        "hardware": f"{report['machine']['processor']}, {track.spec.hardware.threads} threads",
        "regime": "warm",
        "report": path.relative_to(contest).as_posix(),
        "report_sha256": durable.sha256_file(path),
    }


def import_fact(contest: Path, track: Track, fact: Row) -> Row:
    """Log a record of the public contest as it was published there. `fact` has the fields of a verified row, with
    `source` in place of a report."""
    return _append(contest, track, {"kind": "imported", "track_sha256": track.sha256, **fact})


def _append(contest: Path, track: Track, row: Row) -> Row:
    path = folder_of(contest, track) / _LOG
    durable.make_dirs(path.parent)
    with _one_writer(contest / "records"):
        rows = read(contest, track)
        if row.get("report") in {each["report"] for each in rows if each["kind"] == "verified"}:
            raise Refused(f"{row['report']} is in the log already.")
        linked = {**row, _LINK: _hash(rows[-1]) if rows else ""}
        durable.append_rows(path, [linked])
        durable.sync_file(path)
        write_tables(contest)
    return linked


@contextmanager
def _one_writer(folder: Path) -> Generator[None]:
    """Two that append at once would both follow the same row. The lock is the kernel's: it ends with its holder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def standings(rows: Sequence[Row]) -> list[Standing]:
    """Rows that passed under rules that stand, fastest first; times that do not differ significantly share a rank. Rows
    of another timing regime are ranked among themselves, below: cold and warm starts do not compare."""
    found: list[Standing] = []
    for regime in ("warm", "cold"):
        passed = [row for row in rows if is_record(row) and row["regime"] == regime]
        places = compare.ranks([row["times_seconds"] for row in passed])
        ranked = [Standing(place + len(found), row) for place, row in zip(places, passed, strict=True)]
        found += sorted(ranked, key=lambda each: statistics.fmean(each.row["times_seconds"]))
    return found


def is_record(row: Row) -> bool:
    """Whether it passed, under rules that stand."""
    # Rows of the public contest, and those of before there were provisional rules, do not say it.
    return row["verdict"] == "pass" and not row.get("is_provisional")


def not_rebased(contest: Path, track: Track, older: Sequence[Track]) -> list[Row]:
    """Records of earlier versions of a track whose code was not verified under this one."""
    here = {row.get("code_sha256") for row in read(contest, track)}
    earlier = [row for each in older for row in read(contest, each) if is_record(row)]
    return [row for row in earlier if row.get("code_sha256") not in here]


# --- tables ---


def boards(contest: Path) -> list[Board]:
    """Everything there is to show of a contest, by track."""
    every = tracks(contest)
    return [_board(contest, track, [other for other in every if _is_older(other, track)]) for track in every]


def _board(contest: Path, track: Track, older: Sequence[Track]) -> Board:
    spec, rows = track.spec, read(contest, track)
    return Board(
        name=track.name,
        title=spec.title,
        target=spec.metric.target,
        is_share=spec.metric.type == "exact",
        base_model=spec.base_model.name,
        is_provisional=track.is_provisional,
        entries=tuple(
            entry_of(each.rank, each.row, rows.index(each.row), _work_of(contest, each.row)) for each in standings(rows)
        ),
        not_rebased=tuple((row["submission"], row["author"]) for row in not_rebased(contest, track, older)),
        others=tuple((row["submission"], row["verdict"]) for row in rows if not is_record(row)),
    )


def _work_of(contest: Path, row: Row) -> Work | None:
    """What a record's runs do in their steps: as measured, or of a program as its notes say, which are no part of the
    code and may be written when the times are known."""
    if row.get("num_tokens_mean") and row.get("steps_s_mean"):
        return Work(row["num_tokens_mean"], row["steps_s_mean"], is_measured=True)
    notes = contest / "submissions" / row["submission"] / "NOTES.md"
    return claims.work_in(notes.read_text(encoding="utf-8", errors="replace")) if notes.is_file() else None


def tables(contest: Path) -> dict[Path, bytes]:
    """The generated files and what they must hold."""
    folder = contest / "records"
    every, shown = tracks(contest), boards(contest)
    text = "# Leaderboard\n\nGenerated by `hotlap speedrun records`; the rows are in `records/*/log.jsonl`.\n"
    public = {
        "_comment": "Generated; the fields are the public contest's.",
        "records": [entry for track in every for entry in _public_entries(contest, track)],
        "notable_attempts": [entry for track in every for entry in _attempts(contest, track)],
    }
    found = {
        folder / _TABLE: (text + "".join(map(section, shown))).encode(),
        folder / _PUBLIC: (json.dumps(public, indent=1, sort_keys=True) + "\n").encode(),
        folder / _PAGE: page(shown).encode(),
    }
    readme = contest / "README.md"
    if readme.is_file() and START in (words := readme.read_text(encoding="utf-8")):
        found[readme] = with_block(words, shown).encode()
    return found


def write_tables(contest: Path) -> None:
    durable.make_dirs(contest / "records")
    for path, data in tables(contest).items():
        durable.replace(path, data)


def check(contest: Path) -> list[str]:
    """What is wrong with a contest's records, in words: drifted tables, reports that were changed or lack their row,
    rows, verdicts and scores that do not follow from what was kept.

    Raises:
        CorruptFile, PinMismatch: as `read`.
    """
    found = [
        f"{path.relative_to(contest)} is not up to date; run `hotlap speedrun records`"
        for path, data in tables(contest).items()
        if not path.is_file() or path.read_bytes() != data
    ]
    for track in tracks(contest):
        rows = [row for row in read(contest, track) if row["kind"] == "verified"]
        for row in rows:
            found += _check_report(contest, track, row)
        logged = {row["report"] for row in rows}
        for path in sorted(folder_of(contest, track).glob("attempts/*/report-*.json")):
            if path.relative_to(contest).as_posix() not in logged:
                found.append(f"{path.relative_to(contest)} has no row in the log: it was cut off, or never written")
    return found


def _check_report(contest: Path, track: Track, row: Row) -> list[str]:
    path = contest / row["report"]
    if not path.is_file() or durable.sha256_file(path) != row["report_sha256"]:
        return [f"{row['report']} is gone or was changed"]
    try:
        again = replay(path)["scores"]
        report: Report = json.loads(path.read_bytes())
        require_consistent(track, report)
        gone = [run["run"] for run, score in zip(report["runs"], again, strict=True) if score is None and _is_kept(run)]
        unlike = [run["run"] for run in report["runs"] if not _is_as_kept(run, path.parent)]
        expected = _row_of(contest, track, report, path)
    except CorruptFile as error:
        return [str(error)]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        return [f"{row['report']} is no report of a verification: {type(error).__name__} {error}"]
    wrong = sorted(key for key in expected if row.get(key) != expected[key])
    found = [f"{row['report']} and its row in the log differ in {', '.join(wrong)}"] if wrong else []
    found += [f"{row['report']}: run {number} is not what its own result says" for number in unlike]
    return found + [f"{row['report']}: rows or predictions of run {number} are gone" for number in gone]


def _is_as_kept(run: dict[str, Any], folder: Path) -> bool:
    path = folder / f"run-{run['run']}" / "result.json"
    return not path.is_file() or json.loads(path.read_bytes()) == run


def _is_kept(run: dict[str, Any]) -> bool:
    """Whether a run's rows and predictions were put beside its report."""
    return run["score"] is not None and "predictions_sha256" in run


def require_consistent(track: Track, report: Report) -> None:
    """
    Raises:
        CorruptFile: a report has other rules than its track, or a verdict or summary that does not follow from its
            runs. Its own hash says nothing of that: whoever writes a report can hash it.
    """
    name = f"The report of {report['submission']['name']} on track {track.name}"
    if report["rules"] != rules_of(track):
        raise CorruptFile(f"{name} holds other rules than the track.")
    decision = decide_again(report)
    if decision.verdict != report["decision"]["verdict"]:
        raise CorruptFile(f"{name} says {report['decision']['verdict']}, and its runs give {decision.verdict}.")
    expected = summary_of(report["runs"], report["machine"]["usd_micros_per_hour"])
    if wrong := sorted(key for key in expected if not _are_close(report["summary"].get(key), expected[key])):
        raise CorruptFile(f"{name} has a summary that does not follow from its runs: {', '.join(wrong)}.")


def _are_close(said: Any, expected: Any) -> bool:
    """Whether two figures are the same but for how another machine rounds."""
    if isinstance(expected, list):
        return isinstance(said, list) and len(said) == len(expected) and all(map(_are_close, said, expected))
    if isinstance(expected, float):
        return isinstance(said, float) and math.isclose(said, expected, rel_tol=1e-9)
    return said == expected


def _is_older(other: Track, track: Track) -> bool:
    return other.spec.id == track.spec.id and other.spec.version < track.spec.version


def _public_entries(contest: Path, track: Track) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for number, row in enumerate(row for row in read(contest, track) if is_record(row)):
        entries.append(
            {
                "id": number,
                "track": track.name,
                "status": "verified",
                "time_seconds_mean": round(statistics.fmean(row["times_seconds"]), 1),
                "verified_by": "hotlap speedrun verify" if row["kind"] == "verified" else "the public contest",
                "verification_report": row.get("report") or row["source"],
                "pr": int(found[1]) if (found := _PULL.search(row.get("source", ""))) else None,
                "notes": f"submissions/{row['submission']}/NOTES.md" if row["kind"] == "verified" else None,
                **{key: row[key] for key in ("date", "author", "github", "submission", "description")},
                **{key: row[key] for key in ("times_seconds", "accuracies", "seeds", "hardware")},
            }
        )
    return entries


def _attempts(contest: Path, track: Track) -> list[dict[str, Any]]:
    return [
        {"track": track.name, **{key: row[key] for key in ("github", "description", "submission", "verdict")}}
        for row in read(contest, track)
        if not is_record(row)
    ]

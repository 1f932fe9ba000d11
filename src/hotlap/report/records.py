"""A contest's records in sections: the progression of every track, its standings, and what did not pass."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from hotlap.report.chart import Chart, Line
from hotlap.report.page import Section, Table
from hotlap.speedrun import records
from hotlap.speedrun.records import Row
from hotlap.speedrun.track import Track, tracks


def sections_of(contest: Path) -> list[Section]:
    """
    Raises:
        CorruptFile, PinMismatch: as `records.read`.
    """
    return [section for track in tracks(contest) if (section := _section(contest, track)) is not None]


def _section(contest: Path, track: Track) -> Section | None:
    rows = records.read(contest, track)
    if not rows:
        return None
    metric = track.spec.metric
    sign = "at least" if metric.type == "exact" else "at most"
    return Section(
        f"track-{track.name}",
        f"Track {track.name}: {track.spec.title}",
        text=f"Target: {sign} {metric.target:g} ({metric.type}). Base model {track.spec.base_model.name}.",
        charts=[_progression(track, rows)],
        tables=[_standings(rows), _others(rows)],
    )


def _progression(track: Track, rows: Sequence[Row]) -> Chart:
    """Every record's time, in the order of the log, and the best so far of each timing regime."""
    lines: list[Line] = []
    best_of_all: list[str] = []
    order = [_name(row) for row in rows if records.is_record(row)]
    for regime in ("warm", "cold"):
        passed = [row for row in rows if records.is_record(row) and row["regime"] == regime]
        if not passed:
            continue
        names = [_name(row) for row in passed]
        times = [statistics.fmean(row["times_seconds"]) for row in passed]
        best = [min(times[: at + 1]) for at in range(len(times))]
        lines += [Line(f"{regime} start", names, times, "points"), Line(f"best, {regime} start", names, best)]
        best_of_all.append(f"{min(times):.1f} s from a {regime} start")
    says = f"The best of {track.name}: {', '.join(best_of_all)}." if lines else "No record yet."
    return Chart(f"progression-{track.name}", "Progression", "submission", "mean seconds", lines, says, (), order)


def _name(row: Row) -> str:
    return f"{row['submission']} ({row['date'][:10]})"


def _standings(rows: Sequence[Row]) -> Table:
    header = ["rank", "mean s", "spread s", "score", "by", "what", "when", "start", "proof"]
    cells = [
        [
            standing.rank,
            statistics.fmean(row["times_seconds"]),
            statistics.stdev(row["times_seconds"]) if len(row["times_seconds"]) > 1 else None,
            statistics.fmean(row["accuracies"]),
            *(row["author"], row["description"], row["date"][:10], row["regime"], row.get("report") or row["source"]),
        ]
        for standing in records.standings(rows)
        for row in [standing.row]
    ]
    return Table("Standings", header, cells, "Times that do not differ significantly share a rank.")


def _others(rows: Sequence[Row]) -> Table:
    others = [row for row in rows if not records.is_record(row)]
    cells = [[row["submission"], row["author"], row["verdict"], row["date"][:10], row["description"]] for row in others]
    return Table("Other attempts", ["submission", "by", "verdict", "when", "what"], cells, "" if cells else "None.")

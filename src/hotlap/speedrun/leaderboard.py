"""Tables and the page of a contest, from data to text: Markdown, a README block, and HTML with a chart of progress.

What strangers wrote is escaped for where it stands. The page is one file: no script, nothing from elsewhere.
"""

import datetime
import html
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hotlap.speedrun.report import cost_of, escaped

START, END = "<!-- LEADERBOARD:START -->", "<!-- LEADERBOARD:END -->"
_WIDTH, _HEIGHT, _EDGE = 640, 220, 46


@dataclass(frozen=True)
class Entry:
    """A record at its place."""

    rank: int
    time_s: float
    spread_s: float
    score: float
    cost: str
    """What a run costs in dollars and tokens, as far as that is known."""
    author: str
    description: str
    date: str
    regime: str
    proof: str


@dataclass(frozen=True)
class Board:
    """All there is to show of a track."""

    name: str
    title: str
    target: float
    is_share: bool
    """Whether a score is a share of right answers, and larger is better."""
    base_model: str
    is_provisional: bool
    entries: tuple[Entry, ...]
    not_rebased: tuple[tuple[str, str], ...]
    """Submission and author of records under earlier rules that were not verified under these."""
    others: tuple[tuple[str, str], ...]
    """Other attempts: submission and how it ended."""


def entry_of(rank: int, row: dict[str, Any]) -> Entry:
    times = row["times_seconds"]
    return Entry(
        rank=rank,
        time_s=statistics.fmean(times),
        spread_s=statistics.stdev(times),
        score=statistics.fmean(row["accuracies"]),
        cost=cost_of(row.get("usd_micros_mean"), row.get("num_tokens_mean")),
        author=row["author"],
        description=row["description"],
        date=row["date"][:10],
        regime=row["regime"],
        proof=row.get("report") or row["source"],
    )


def progression(board: Board) -> list[Entry]:
    """Records in the order of their dates, as far as each was faster than all before it."""
    found: list[Entry] = []
    for entry in sorted(board.entries, key=lambda entry: (entry.date, -entry.time_s)):
        if not found or entry.time_s < found[-1].time_s:
            found.append(entry)
    return found


# --- Markdown ---


def section(board: Board) -> str:
    """A track's part of LEADERBOARD.md."""
    sign = "at least" if board.is_share else "at most"
    metric = "exact" if board.is_share else "loss"
    lines = [
        "",
        f"## {board.name}: {escaped(board.title)}",
        "",
        f"Target: {sign} {board.target:g} ({metric}). Base model {escaped(board.base_model)}.",
        *(["", "These rules are provisional: nothing here is a record yet."] if board.is_provisional else []),
        "",
        "| rank | time s | spread s | score | cost | by | what | when | start | proof |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for entry in board.entries:
        numbers = [str(entry.rank), f"{entry.time_s:.1f}", f"{entry.spread_s:.1f}", f"{entry.score:.4f}", entry.cost]
        words = [escaped(entry.author), escaped(entry.description), entry.date, entry.regime, escaped(entry.proof)]
        lines.append("| " + " | ".join([*numbers, *words]) + " |")
    for submission, author in board.not_rebased:
        lines.append(f"\nNot verified under these rules yet: {escaped(submission)}, {escaped(author)}.")
    if board.others:
        lines += ["", "Other attempts: " + ", ".join(f"{escaped(name)} ({how})" for name, how in board.others) + "."]
    return "\n".join([*lines, ""])


def with_block(readme: str, boards: Sequence[Board]) -> str:
    """A README with the fastest of each track between its two marks; one without the marks stays as it is."""
    before, start, rest = readme.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        return readme
    lines = ["", "| track | target | fastest | score | by | when |", "| --- | --- | --- | --- | --- | --- |"]
    for board in boards:
        sign = "≥" if board.is_share else "≤"
        if board.entries:
            first = board.entries[0]
            best = [f"{first.time_s:.1f} s", f"{first.score:.4f}", escaped(first.author), first.date]
        else:
            best = ["provisional" if board.is_provisional else "open", "", "", ""]
        lines.append("| " + " | ".join([board.name, f"{sign} {board.target:g}", *best]) + " |")
    return before + start + "\n".join([*lines, ""]) + end + after


# --- HTML ---

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .6rem; vertical-align: top; }
th { border-bottom: 2px solid #ccc; } td { border-bottom: 1px solid #eee; } td.n, th.n { text-align: right; }
svg { width: 100%; height: auto; max-width: 40rem; } .quiet { color: #666; }
"""


def page(boards: Sequence[Board]) -> str:
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>Leaderboard</title><style>{_STYLE}</style></head><body><h1>Leaderboard</h1>",
        *(_html_of(board) for board in boards),
        "</body></html>",
        "",
    ]
    return "\n".join(parts)


def _html_of(board: Board) -> str:
    sign = "at least" if board.is_share else "at most"
    lines = [
        f"<h2>{html.escape(board.name)}: {html.escape(board.title)}</h2>",
        f'<p class="quiet">{html.escape(board.base_model)}, {sign} {board.target:g}'
        f"{'; provisional rules, nothing here is a record yet' if board.is_provisional else ''}</p>",
    ]
    if not board.entries:
        return "\n".join([*lines, "<p>No record yet.</p>"])
    lines.append(chart(progression(board)))
    lines.append(
        '<table><tr><th class="n">rank</th><th class="n">time</th><th class="n">score</th><th class="n">cost</th>'
    )
    lines.append("<th>by</th><th>what</th><th>when</th><th>start</th></tr>")
    for entry in board.entries:
        numbers = (str(entry.rank), f"{entry.time_s:.1f} ± {entry.spread_s:.1f} s", f"{entry.score:.4f}", entry.cost)
        words = (entry.author, entry.description, entry.date, entry.regime)
        cells = "".join(f'<td class="n">{number}</td>' for number in numbers)
        lines.append(f"<tr>{cells}{''.join(f'<td>{html.escape(word)}</td>' for word in words)}</tr>")
    return "\n".join([*lines, "</table>"])


def chart(steps: Sequence[Entry]) -> str:
    """How the record fell: days along, seconds up, on a logarithmic scale."""
    days = [datetime.date.fromisoformat(entry.date).toordinal() for entry in steps]
    logs = [math.log10(entry.time_s) for entry in steps]
    first, last = days[0], max(days[-1], days[0] + 1)
    low, high = min(logs) - 0.08, max(logs) + 0.08

    def x(day: int) -> float:
        return _EDGE + (day - first) / (last - first) * (_WIDTH - 2 * _EDGE)

    def y(log: float) -> float:
        return _HEIGHT - 28 - (log - low) / (high - low) * (_HEIGHT - 56)

    path = f"M{x(days[0]):.1f} {y(logs[0]):.1f}"
    for day, log in zip(days[1:], logs[1:], strict=True):
        path += f" H{x(day):.1f} V{y(log):.1f}"
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="How the record fell">',
        f'<path d="{path} H{_WIDTH - _EDGE}" fill="none" stroke="#2a6f97" stroke-width="2"/>',
    ]
    for entry, day, log in zip(steps, days, logs, strict=True):
        said = html.escape(f"{entry.date}: {entry.time_s:.1f} s, {entry.author}")
        parts.append(f'<circle cx="{x(day):.1f}" cy="{y(log):.1f}" r="4" fill="#2a6f97"><title>{said}</title></circle>')
        parts.append(f'<text x="{x(day) + 6:.1f}" y="{y(log) - 7:.1f}" font-size="12">{entry.time_s:.1f} s</text>')
    for day, anchor in ((days[0], "start"), (days[-1], "end")) if len(days) > 1 else ((days[0], "start"),):
        text = datetime.date.fromordinal(day).isoformat()
        parts.append(f'<text x="{x(day):.1f}" y="{_HEIGHT - 6}" font-size="12" text-anchor="{anchor}">{text}</text>')
    return "\n".join([*parts, "</svg>"])

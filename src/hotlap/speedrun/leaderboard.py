"""Tables and the page of a contest, from data to text: Markdown, a README block, and HTML with a chart of progress.

What strangers wrote is escaped for where it stands. The page is one file: no script, nothing from elsewhere.
"""

import datetime
import html
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hotlap.speedrun.ratio import Work, factors, ratio_interval
from hotlap.speedrun.report import cost_of, escaped

START, END = "<!-- LEADERBOARD:START -->", "<!-- LEADERBOARD:END -->"
_BASELINE = re.compile(r"(?:[a-z][a-z0-9]*-)?000-.*")
"""The submission with number 0 is what the others are held against."""
_WIDTH, _HEIGHT, _EDGE = 640, 220, 46


@dataclass(frozen=True)
class Entry:
    """A record at its place."""

    rank: int
    submission: str
    times_s: tuple[float, ...]
    score: float
    cost: str
    """What a run costs in dollars and tokens, as far as that is known."""
    author: str
    description: str
    date: str
    regime: str
    proof: str
    is_imported: bool
    """Whether it is another contest's record, told as a fact and not run again."""
    work: Work | None
    """What its runs do in their steps, as far as that is known."""
    number: int
    """Its row in the track's log."""
    is_disturbed: bool
    """Whether the machine did something else too while it was measured."""

    @property
    def time_s(self) -> float:
        return statistics.fmean(self.times_s)

    @property
    def spread_s(self) -> float:
        return statistics.stdev(self.times_s)

    @property
    def time(self) -> str:
        return f"{self.time_s:.1f} ± {self.spread_s:.1f} s{', disturbed' if self.is_disturbed else ''}"


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

    @property
    def ours(self) -> tuple[Entry, ...]:
        """Records that were verified here."""
        return tuple(entry for entry in self.entries if not entry.is_imported)

    def baseline_of(self, entry: Entry) -> Entry | None:
        """What an entry is held against: the first submission number 0, from the same kind of start."""
        found = [each for each in self.entries if _BASELINE.fullmatch(each.submission) and each.regime == entry.regime]
        return min(found, key=lambda each: each.number) if found else None

    def place_of(self, entry: Entry) -> str:
        is_tied = sum(each.rank == entry.rank for each in self.entries) > 1
        return f"{entry.rank}, tied" if is_tied else str(entry.rank)


def entry_of(rank: int, row: dict[str, Any], number: int, work: Work | None) -> Entry:
    return Entry(
        rank=rank,
        submission=row["submission"],
        times_s=tuple(row["times_seconds"]),
        score=statistics.fmean(row["accuracies"]),
        cost=cost_of(row.get("usd_micros_mean"), row.get("num_tokens_mean")),
        author=row["author"],
        description=row["description"],
        date=row["date"][:10],
        regime=row["regime"],
        proof=row.get("report") or row["source"],
        is_imported=row["kind"] == "imported",
        work=work,
        number=number,
        is_disturbed=bool(row.get("num_disturbed")),
    )


def progression(board: Board) -> list[Entry]:
    """Records in the order of the log, as far as each was faster than all before it."""
    found: list[Entry] = []
    for entry in sorted(board.entries, key=lambda entry: entry.number):
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
    ]
    if board.entries:
        head = ("rank", "time", "score", "over baseline", "cost", "by", "what", "when", "start", "proof")
        lines += ["", f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    elif not board.is_provisional:
        lines += ["", "No record yet."]
    for entry in board.entries:
        numbers = [board.place_of(entry), entry.time, f"{entry.score:.4f}"]
        numbers += [over_baseline(board, entry) or "-", entry.cost]
        words = [escaped(entry.author), escaped(entry.description), entry.date, entry.regime, escaped(entry.proof)]
        lines.append("| " + " | ".join([*numbers, *words]) + " |")
    for submission, author in board.not_rebased:
        lines.append(f"\nNot verified under these rules yet: {escaped(submission)}, {escaped(author)}.")
    if board.others:
        lines += ["", "Other attempts: " + ", ".join(f"{escaped(name)} ({how})" for name, how in board.others) + "."]
    return "\n".join([*lines, ""])


def over_baseline(board: Board, entry: Entry) -> str:
    """The ratio of the baseline's time to an entry's, with its interval; "" where there is no baseline."""
    baseline = board.baseline_of(entry)
    if baseline is None:
        return ""
    if baseline is entry:
        return "the baseline"
    low, high = ratio_interval(baseline.times_s, entry.times_s)
    return f"{baseline.time_s / entry.time_s:.1f}x ({low:.1f} to {high:.1f})"


def product(board: Board, entry: Entry) -> str:
    """That ratio as a product, or the baseline's own figures; "" where one of the two does not tell its tokens and
    steps. A star: as its author says."""
    baseline = board.baseline_of(entry)
    if baseline is None or baseline.work is None or entry.work is None:
        return ""
    star = "" if baseline.work.is_measured and entry.work.is_measured else " \\*"
    found = factors(baseline.time_s, baseline.work, entry.time_s, entry.work)
    if found is None:
        return ""
    if baseline is entry:
        work = entry.work
        rate, fixed_s = work.num_tokens / work.steps_s, entry.time_s - work.steps_s
        return f"{work.num_tokens:,.0f} tokens, {rate:,.0f} tokens/s, {fixed_s:.1f} s{star}"
    return f"{found.tokens:.2f} x {found.speed:.2f} x {found.fixed:.2f}{star}"


_BELOW = """
Times are means over fresh seeds. Records share a rank where their times differ by less than chance explains (Welch,
5 %); intervals are those of 95 %."""
_PRODUCT = """The product takes the baseline to the record in three steps: as few tokens, then as many
tokens a second, then as little time around the steps."""
_STAR = "\\* Tokens and seconds of steps as the author says them."


def with_block(readme: str, boards: Sequence[Board]) -> str:
    """A README with every track's records between its two marks, and with nothing there while no record was verified
    here; one without the marks stays as it is."""
    before, start, rest = readme.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        return readme
    shown = [board for board in boards if board.ours]
    if not shown:
        return before + start + "\n" + end + after
    products = "".join(product(board, entry) for board in shown for entry in board.ours)
    said = " ".join([_BELOW, *([_PRODUCT] if products else []), *([_STAR] if "*" in products else [])])
    lines = ["", "## Leaderboard", *(line for board in shown for line in _readme_table(board)), said]
    return before + start + "\n".join([*lines, ""]) + end + after


def _readme_table(board: Board) -> list[str]:
    sign = "at least" if board.is_share else "at most"
    head = (
        "rank",
        "submission",
        "time",
        "score",
        "over the baseline",
        "fewer tokens x more tokens/s x smaller fixed cost",
        "by",
        "when",
    )
    lines = [
        "",
        f"**{board.name}**: {escaped(board.title)}, {escaped(board.base_model)}, {sign} {board.target:g}.",
        "",
        f"| {' | '.join(head)} |",
        "| --- " * len(head) + "|",
    ]
    for entry in board.ours:
        cells = [board.place_of(entry), escaped(entry.submission)]
        cells += [entry.time, f"{entry.score:.4f}"]
        cells += [over_baseline(board, entry) or "-", product(board, entry) or "-"]
        lines.append("| " + " | ".join([*cells, escaped(entry.author), entry.date]) + " |")
    return lines


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
    heads = "".join(f'<th class="n">{name}</th>' for name in ("rank", "time", "score", "over baseline", "cost"))
    lines.append(f"<table><tr>{heads}<th>by</th><th>what</th><th>when</th><th>start</th></tr>")
    for entry in board.entries:
        numbers = [board.place_of(entry), entry.time, f"{entry.score:.4f}"]
        numbers += [over_baseline(board, entry) or "-", entry.cost]
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

"""The page of a study: its charts from the numbers of its board, its leaderboard, its decisions and its axes."""

from collections.abc import Mapping, Sequence
from typing import Any

from hotlap.report.chart import Chart, Line, Value
from hotlap.report.page import Page, Section, Table, cell
from hotlap.research import board, proposer
from hotlap.research.history import History

_MOST_CONFIGURATIONS = 1000
_ROLES = ("baseline", "screen", "confirm", "sentinel", "verify")


def page_of(name: str, history: History, made_at: str) -> Page:
    """A study that has begun."""
    found, plots = board.leaderboard(history), board.plots(history)
    header = found["header"]
    facts: list[tuple[str, Value]] = [
        ("Runs", sum(header["num_by_status"].values())),
        ("Proposals judged", header["num_judged"]),
        ("Charged seconds per run", header["budget_s"]),
        ("Rule", header["acceptance"]),
        ("Noise of one run", None if header["noise"] is None else header["noise"]["s"]),
        ("Disturbed runs that count", header["disturbed"]["num_used"]),
        ("Disturbed runs left out", header["disturbed"]["num_left_out"]),
        ("Hours", header["hours"]),
    ]
    charts = [_progress(plots), _prediction(plots), *_clock(plots), _curves(plots)]
    sections = [
        Section("found", "What was found", charts=charts[:1], tables=[_entries(found["entries"])]),
        Section("decisions", "Decisions", tables=[_decisions(found["decisions"])]),
        Section("axes", "Axes", charts=_responses(plots, _expected(history))),
        Section("checks", "Is the search honest?", charts=charts[1:]),
    ]
    return Page(f"Study {name}", made_at, sections, facts)


def _expected(history: History) -> dict[str, list[list[Any]]]:
    """Its time grows with the third power of the number of configurations."""
    return proposer.responses(history) if len(history.groups) <= _MOST_CONFIGURATIONS else {}


def _progress(plots: Mapping[str, Any]) -> Chart:
    runs: Sequence[Any] = plots["progress"]
    places = {run[0]: number for number, run in enumerate(runs)}
    lines = [
        Line(role, [number for number, _ in picked], [run[3] for _, run in picked], "points")
        for role in _ROLES
        if (picked := [(number, run) for number, run in enumerate(runs) if run[1] == role and run[3] is not None])
    ]
    steps = [(places[run_id], loss) for run_id, loss in plots["anchor"] if run_id in places]
    if steps:
        x, y = [*(at for at, _ in steps), len(runs)], [*(loss for _, loss in steps), steps[-1][1]]
        lines.append(Line("anchor", x, y, "steps"))
        band = 2 * (plots["noise"] or 0.0)
        lines += [Line(f"anchor {sign} 2 s.d. of a run", x, [loss + by for loss in y], "steps")
                  for sign, by in (("+", band), ("-", -band)) if band]  # fmt: skip
    seen = [run[3] for run in runs if run[3] is not None]
    floors = [(f"{name} counts", value) for name, value in plots["floors"].items() if seen and value < max(seen) + 0.2]
    failed = sum(run[3] is None for run in runs)
    says = f"{len(runs)} runs, {failed} without a score."
    says += f" The lowest is {min(seen):.4f} nats per byte." if seen else ""
    return Chart("progress", "Progress", "run", "nats per byte", lines, says, floors)


def _responses(plots: Mapping[str, Any], expected: Mapping[str, Sequence[Any]]) -> list[Chart]:
    """Loss over every axis, for configurations that are the anchor but for that axis; and what all past runs together
    say of it."""
    charts: list[Chart] = []
    for number, (name, points) in enumerate(plots["response"].items()):
        if not points:
            continue
        is_named = any(isinstance(value, str | bool | None) for value, _ in points)
        x = [str(value) if is_named else value for value, _ in points]
        lines = [Line("loss", x, [loss for _, loss in points], "points")]
        said = [] if is_named else expected.get(name, [])
        places = [value for value, _, _ in said]
        for label, by in (("expected", 0.0), ("expected + 2 s.d.", 2.0), ("expected - 2 s.d.", -2.0)):
            lines += [Line(label, places, [mean + by * sd for _, mean, sd in said])] if said else []
        best, lowest = min(points, key=lambda point: point[1])
        says = f"{len(points)} runs that are the anchor but for this axis; lowest at {cell(best)}: {lowest:.4f}."
        is_log = bool(places) and min(places) > 0 and max(places) > 20 * min(places)
        charts.append(Chart(f"axis-{number}", f"Axis {name}", name, "nats per byte", lines, says, is_log=is_log))
    return charts


def _prediction(plots: Mapping[str, Any]) -> Chart:
    points = plots["prediction"]
    lines = [Line("run", [mu for mu, _, _ in points], [loss for _, _, loss in points], "points")]
    if points:
        ends = [min(min(mu, loss) for mu, _, loss in points), max(max(mu, loss) for mu, _, loss in points)]
        lines.append(Line("as expected", ends, ends))
    near = sum(abs(loss - mu) <= 2 * sd for mu, sd, loss in points)
    says = f"{near} of {len(points)} outcomes lie within two standard deviations of what was expected."
    return Chart("prediction", "Prediction and outcome", "expected nats per byte", "nats per byte", lines, says)


def _clock(plots: Mapping[str, Any]) -> list[Chart]:
    rows = plots["clock"]
    charts: list[Chart] = []
    for column, ident, title, unit in (
        (1, "speed", "Tokens per second", "tokens/s"),
        (2, "charged", "Wall time over charged time", "ratio"),
    ):
        points = [(number, row[column]) for number, row in enumerate(rows) if row[column] is not None]
        values = [value for _, value in points]
        says = f"Between {min(values):.4g} and {max(values):.4g}." if values else "Nothing is known of it."
        line = Line(unit, [number for number, _ in points], values, "points")
        charts.append(Chart(ident, title, "run", unit, [line], says))
    return charts


def _curves(plots: Mapping[str, Any]) -> Chart:
    lines = [
        Line(name, [at for at, _ in curve], [loss for _, loss in curve])
        for name, curve in plots["curves"].items()
        if curve
    ]
    says = "Training loss of the baseline and of the best configuration over the share of their time."
    return Chart("curves", "Training loss", "share of the budget", "nats per token", lines, says)


def _entries(entries: Sequence[Mapping[str, Any]]) -> Table:
    header = ["configuration", "rank", "state", "bits per byte", "nats per byte", "± s.e.", "runs", "disturbed", "gain"]
    header += ["change"]
    rows = [
        [
            *(entry["config_hash"], entry["rank"], entry["state"], entry["bpb"], entry["nats_per_byte"], entry["se"]),
            *(entry["num_runs"], entry["num_disturbed"], entry["gain_on_baseline"], _change(entry["change"])),
        ]
        for entry in entries
    ]
    return Table(
        "Leaderboard", header, rows, "Means are over runs made after a configuration was chosen, if there are."
    )


def _decisions(decisions: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        [
            row["decision_id"],
            "placebo (no change)" if row["placebo"] else _change(row["change"]),
            row["delta"],
            row["outcome"],
            row["reason"],
        ]
        for row in reversed(decisions)
    ]
    return Table("Newest decisions", ["decision", "change", "gain", "outcome", "why"], rows)


def _change(change: Mapping[str, Any] | None) -> str | None:
    return None if change is None else f"{change['axis']}: {cell(change['old'])} → {cell(change['new'])}"

"""A study's charts as SVG: progress, response of every axis, prediction against outcome, the clock, loss curves.

Drawn from the numbers of `plots.json` and from what all runs together say of every axis (`proposer.responses`), and
byte for byte the same for the same numbers: no date, no random names in them.
"""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hotlap import durable

Plots = Mapping[str, Any]

_STYLE = {"svg.hashsalt": "hotlap", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False}
_COLORS = {"baseline": "tab:gray", "sentinel": "tab:green", "verify": "tab:purple", "screen": "tab:blue"}


def write(folder: Path, plots: Plots) -> None:
    """`plots`: those of the board, and under `expected` those of `proposer.responses`."""
    for name, data in draw(plots).items():
        durable.replace(folder / name, data)


def draw(plots: Plots) -> dict[str, bytes]:
    """Every chart's file, by name."""
    charts: dict[str, Callable[[Plots], Figure]] = {
        "progress.svg": _progress,
        "axes.svg": _response,
        "prediction.svg": _prediction,
        "clock.svg": _clock,
        "curves.svg": _curves,
    }
    with matplotlib.rc_context(_STYLE):
        return {name: _svg(chart(plots)) for name, chart in charts.items()}


def _svg(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _one(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=x, ylabel=y)
    return figure, axes


def _progress(plots: Plots) -> Figure:
    """Every run, where the anchor stood, and what counting alone reaches."""
    figure, axes = _one("Progress", "run", "nats per byte")
    runs: Sequence[Any] = plots["progress"]
    for role, color in [*_COLORS.items(), ("confirm", "tab:cyan")]:
        points = [(number, run[3]) for number, run in enumerate(runs) if run[1] == role and run[3] is not None]
        if points:
            axes.scatter(*zip(*points, strict=True), s=12, color=color, label=role)
    failed = [number for number, run in enumerate(runs) if run[3] is None]
    seen = [run[3] for run in runs if run[3] is not None]
    if seen:
        axes.scatter(failed, [max(seen)] * len(failed), marker="x", s=14, color="tab:red", label="no score")
    places = {run[0]: number for number, run in enumerate(runs)}
    steps = [(places[run_id], loss) for run_id, loss in plots["anchor"] if run_id in places]
    if steps:
        x, y = zip(*[*steps, (len(runs), steps[-1][1])], strict=True)
        axes.step(x, y, where="post", color="black", linewidth=1, label="anchor")
        if plots["noise"] is not None:
            low, high = ([value + sign * 2 * plots["noise"] for value in y] for sign in (-1, 1))
            axes.fill_between(x, low, high, step="post", color="black", alpha=0.1, linewidth=0, label="2 s.d. of a run")
    for name, value in plots["floors"].items():
        if seen and min(seen) - 0.2 < value < max(seen) + 0.2:
            axes.axhline(value, color="tab:orange", linestyle=":", linewidth=1)
            axes.annotate(f"{name} counts", (0, value), fontsize=7, color="tab:orange", va="bottom")
    _legend(axes)
    return figure


def _response(plots: Plots) -> Figure:
    """Loss against the value of every axis, for configurations that are the anchor but for that axis; the line and
    its band (two standard deviations) are what all past runs together say."""
    names = list(plots["response"])
    columns = min(4, max(1, len(names)))
    rows = max(1, math.ceil(len(names) / columns))
    figure = Figure(figsize=(2.4 * columns, 2.0 * rows), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in grid:
        axes.set_visible(False)
    for name, axes in zip(names, grid, strict=False):
        axes.set_visible(True)
        axes.set_title(name, fontsize=8)
        points = plots["response"][name]
        if any(isinstance(value, str | bool | None) for value, _ in points):
            points = [(str(value), loss) for value, loss in points]
        if points:
            axes.scatter(*zip(*points, strict=True), s=10)
        if expected := plots["expected"].get(name):
            value, mean, sd = (np.array(column) for column in zip(*expected, strict=True))
            axes.plot(value, mean, linewidth=0.8)
            axes.fill_between(value, mean - 2 * sd, mean + 2 * sd, alpha=0.15, linewidth=0)
            axes.set_xscale("log" if min(value) > 0 and max(value) > 20 * min(value) else "linear")
        axes.tick_params(labelsize=6)
    return figure


def _prediction(plots: Plots) -> Figure:
    """What the proposer expected before each run, with one standard deviation, and what came."""
    figure, axes = _one("Prediction and outcome", "expected nats per byte", "nats per byte")
    points = plots["prediction"]
    if points:
        mu, sd, loss = zip(*points, strict=True)
        axes.errorbar(mu, loss, xerr=sd, fmt="o", markersize=3, linewidth=0.7)
        low, high = min(*mu, *loss), max(*mu, *loss)
        axes.plot([low, high], [low, high], color="black", linewidth=0.7)
    return figure


def _clock(plots: Plots) -> Figure:
    """Throughput of every run, and how much longer it took than it was charged."""
    figure, axes = _one("Clock", "run", "tokens per second")
    other = axes.twinx()
    other.set_ylabel("wall / charged", color="tab:red")
    for column, place, color in ((1, axes, "tab:blue"), (2, other, "tab:red")):
        points = [(number, row[column]) for number, row in enumerate(plots["clock"]) if row[column] is not None]
        if points:
            place.scatter(*zip(*points, strict=True), s=10, color=color)
    return figure


def _curves(plots: Plots) -> Figure:
    figure, axes = _one("Training loss", "share of the budget", "nats per token")
    for name, curve in plots["curves"].items():
        if curve:
            axes.plot(*zip(*curve, strict=True), label=name)
    _legend(axes)
    return figure


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, frameon=False)

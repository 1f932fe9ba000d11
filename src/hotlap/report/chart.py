"""A chart as numbers, and what is made of them: an interactive figure, an SVG, a table, a CSV file."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
from matplotlib.figure import Figure

Value = float | int | str | None
Form = Literal["line", "steps", "points", "bars", "stacked"]

COLORS = ("#2f7fc1", "#c8651b", "#2e8b57", "#9a5fc0", "#d0453f", "#1f8f99", "#a06a3a", "#7d7d7d", "#b0487f", "#6b7f1f")
"""Each at least 3 : 1 against the light and the dark page. Dashes and markers tell lines apart without color."""

_DASHES = ("solid", "dash", "dot", "dashdot")
_SVG_DASHES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D")
_STYLE = {"svg.hashsalt": "hotlap", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False}
_WIDTH, _WIDTH_OF_SEVERAL = 7.0, 4.0
"""Of a picture, in inches."""
_MOST_POINTS = 1200
"""Drawn in one chart: every point is an element of the page, and costs time whenever it is seen."""

_MOST_ROWS = 400


@dataclass(frozen=True)
class Line:
    """One series: values over places on the horizontal axis. None is a gap."""

    name: str
    x: Sequence[Value]
    y: Sequence[Value]
    form: Form = "line"


@dataclass(frozen=True)
class Chart:
    """What one figure shows. `limits` are horizontal lines with a name, such as a cap."""

    ident: str
    title: str
    x: str
    y: str
    lines: Sequence[Line]
    says: str
    """What the figure shows, in a sentence: for those who cannot see it."""

    limits: Sequence[tuple[str, float]] = ()
    places: Sequence[str] = ()
    """Names on the horizontal axis, in their order. Empty: as the lines have them."""

    is_log: bool = False
    """Whether the horizontal axis is logarithmic."""

    @property
    def has_names(self) -> bool:
        """Whether the horizontal axis has names on it, not numbers."""
        return any(isinstance(x, str) for line in self.lines for x in line.x)

    @property
    def is_empty(self) -> bool:
        return all(y is None for line in self.lines for y in line.y)

    @property
    def is_thinned(self) -> bool:
        """Whether there are more points than are drawn."""
        return any(len(line.x) > self._most_points for line in self.lines)

    @property
    def _most_points(self) -> int:
        return _MOST_POINTS // max(1, len(self.lines))

    def _names(self) -> list[str]:
        return list(dict.fromkeys([*self.places, *(str(x) for line in self.lines for x in line.x)]))

    # --- the data itself ---

    def header(self) -> list[str]:
        return [self.x, *(line.name for line in self.lines)]

    def rows(self) -> list[list[Value]]:
        """One row per place on the horizontal axis, in order of appearance; numbers in their order."""
        places: dict[Value, list[Value]] = {name: [None] * len(self.lines) for name in self.places}
        repeated: list[list[Value]] = []
        for column, line in enumerate(self.lines):
            for x, y in zip(line.x, line.y, strict=True):
                row = places.setdefault(x, [None] * len(self.lines))
                if row[column] is None:
                    row[column] = y
                else:
                    repeated.append([x, *(y if other == column else None for other in range(len(self.lines)))])
        rows = [[x, *values] for x, values in places.items()] + repeated
        if not self.has_names:
            rows.sort(key=lambda row: float(row[0] or 0))
        return rows

    def shown_rows(self) -> list[list[Value]]:
        """Those of the table: all of them, or the first and the last when they are many."""
        rows = self.rows()
        half = _MOST_ROWS // 2
        return rows if len(rows) <= _MOST_ROWS else [*rows[:half], *rows[-half:]]

    def csv(self) -> str:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerows([_inert(row) for row in [self.header(), *self.rows()]])
        return out.getvalue()

    # --- as pictures ---

    def figure(self) -> dict[str, Any]:
        """For Plotly.newPlot: `data` and `layout`."""
        traces = [_trace(line, number, self._most_points) for number, line in enumerate(self.lines)]
        named = {"type": "category", "categoryorder": "array", "categoryarray": self._names()} if self.has_names else {}
        named |= {"type": "log"} if self.is_log else {}
        is_stacked = any(line.form == "stacked" for line in self.lines)
        layout: dict[str, Any] = {
            "xaxis": {"title": {"text": _text(self.x)}, **named},
            "yaxis": {"title": {"text": _text(self.y)}, "rangemode": "tozero" if is_stacked else "normal"},
            "barmode": "stack" if is_stacked else "group",
            "shapes": [
                {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": _limit_line()}
                for _, y in self.limits
            ],
            "annotations": [
                {"xref": "paper", "x": 0, "y": y, "text": _text(name), "showarrow": False, "yanchor": "bottom"}
                for name, y in self.limits
            ],
        }
        return {"data": traces, "layout": layout}

    def svg(self) -> bytes:
        """The same bytes for the same numbers."""
        return svg_of([self])

    def draw_on(self, axes: Any) -> None:
        axes.set(title=_plain(self.title), xlabel=_plain(self.x), ylabel=_plain(self.y))
        names = self._names() if self.has_names else []
        bottom: dict[Any, float] = {}
        for number, line in enumerate(self.lines):
            _draw(axes, line, number, names, bottom, self._most_points)
        if names:
            shown = range(0, len(names), -(-len(names) // 12))
            axes.set_xticks(list(shown), [_plain(names[place]) for place in shown], rotation=20, ha="right")
        if self.is_log:
            axes.set_xscale("log")
        for name, y in self.limits:
            axes.axhline(y, color=COLORS[4], linestyle=":", linewidth=1)
            axes.annotate(_plain(name), (0.01, y), xycoords=("axes fraction", "data"), fontsize=7, va="bottom")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, frameon=False)


def svg_of(charts: Sequence[Chart]) -> bytes:
    """Charts side by side in one picture: the same bytes for the same numbers."""
    with matplotlib.rc_context(_STYLE):
        width = _WIDTH if len(charts) == 1 else _WIDTH_OF_SEVERAL * len(charts)
        figure = Figure(figsize=(width, 3.6), layout="constrained")
        for chart, axes in zip(charts, figure.subplots(1, len(charts), squeeze=False)[0], strict=True):
            chart.draw_on(axes)
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        return out.getvalue()


def _limit_line() -> dict[str, Any]:
    return {"color": COLORS[4], "width": 1, "dash": "dot"}


def _draw(axes: Any, line: Line, number: int, names: list[str], bottom: dict[Any, float], most_points: int) -> None:
    x, y = thinned(line.x, line.y, most_points)
    places = [names.index(str(each)) if names else each for each in x]
    values = [float("nan") if each is None else each for each in y]
    style = {"color": COLORS[number % len(COLORS)], "label": _plain(line.name)}
    if line.form in ("line", "steps"):
        mark = {"marker": "o", "markersize": 3} if len(x) <= 20 else {}
        kind = {"drawstyle": "steps-post"} if line.form == "steps" else {}
        axes.plot(places, values, linestyle=_SVG_DASHES[number % 4], linewidth=1.2, **kind, **mark, **style)
    elif line.form == "points":
        axes.scatter(places, values, s=12, marker=_MARKERS[number % 4], **style)
    else:
        low = [bottom.get(place, 0.0) if line.form == "stacked" else 0.0 for place in places]
        axes.bar(places, [0.0 if each is None else each for each in y], bottom=low, **style)
        for place, value in zip(places, y, strict=True):
            bottom[place] = bottom.get(place, 0.0) + float(value or 0.0)  # pyright: ignore[reportArgumentType]


def _trace(line: Line, number: int, most_points: int) -> dict[str, Any]:
    x, y = thinned(line.x, line.y, most_points)
    color = COLORS[number % len(COLORS)]
    trace: dict[str, Any] = {"name": _text(line.name), "x": x, "y": y, "hoverlabel": {"namelength": -1}}
    if line.form in ("bars", "stacked"):
        return {**trace, "type": "bar", "marker": {"color": color}}
    if line.form == "points":
        return {**trace, "type": "scatter", "mode": "markers", "marker": {"color": color, "symbol": number % 4}}
    mode = "lines+markers" if len(x) <= 20 else "lines"
    stroke = {"color": color, "dash": _DASHES[number % 4], "width": 2}
    stroke |= {"shape": "hv"} if line.form == "steps" else {}
    return {**trace, "type": "scatter", "mode": mode, "line": stroke}


def thinned(x: Sequence[Value], y: Sequence[Value], most: int = _MOST_POINTS) -> tuple[list[Value], list[Value]]:
    """At most `most` points, of every stretch its lowest and its highest, so that no spike is lost."""
    if len(x) <= most:
        return list(x), list(y)
    width = -(-2 * len(x) // most)
    kept: list[int] = []
    for start in range(0, len(x), width):
        stretch = [place for place in range(start, min(start + width, len(x))) if isinstance(y[place], int | float)]
        if stretch:
            kept += sorted({min(stretch, key=lambda at: y[at]), max(stretch, key=lambda at: y[at])})  # type: ignore[return-value, arg-type]
    return [x[place] for place in kept], [y[place] for place in kept]


def _text(text: str) -> str:
    """Strangers' text for Plotly, which reads some tags and entities."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _plain(text: str) -> str:
    """Strangers' text for matplotlib, which reads mathematics between dollar signs."""
    return "".join(char if char.isprintable() else " " for char in text).replace("$", r"\$")


def _inert(row: Sequence[Value]) -> list[Value]:
    """A spreadsheet runs a cell that begins like a formula; numbers are left as they are."""
    return [f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t") else cell for cell in row]

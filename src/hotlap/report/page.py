"""A page that stands alone: one file that opens from a disk, without a network, with its charts' data in it.

Interactive charts are drawn by plotly in the reader's browser; where there is no script, the same charts are SVG.
"""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from hotlap.report.chart import Chart, Value

_MOST_ROWS = 200
"""Of a table, before the reader asks for the rest: a browser lays out a table as a whole."""


@dataclass(frozen=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Value]]
    note: str = ""


@dataclass(frozen=True)
class Sample:
    """What was answered to one prompt, in order: (where in the run, the answer)."""

    prompt: str
    answers: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Section:
    ident: str
    title: str
    text: str = ""
    facts: Sequence[tuple[str, Value]] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    samples: Sequence[Sample] = ()


@dataclass(frozen=True)
class Page:
    title: str
    made_at: str
    sections: Sequence[Section]
    facts: Sequence[tuple[str, Value]] = field(default=())


def render(page: Page) -> str:
    charts = [chart for section in page.sections for chart in section.charts if not chart.is_empty]
    return (
        templates()
        .get_template("page.html")
        .render(
            page=page,
            figures={chart.ident: chart.figure() for chart in charts},
            images={chart.ident: base64.b64encode(chart.svg()).decode() for chart in charts},
            files={chart.ident: base64.b64encode(chart.csv().encode()).decode() for chart in charts},
            plotly=get_plotlyjs() if charts else "",
            most_rows=_MOST_ROWS,
        )
    )


def templates() -> jinja2.Environment:
    """Whatever is put into a template is escaped; a name that is not given is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = cell
    environment.filters["is_number"] = is_number
    environment.policies["json.dumps_kwargs"] = {"sort_keys": True, "allow_nan": False}
    return environment


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def cell(value: Any) -> str:
    """A value for people: four or five digits of a fraction, thousands apart, a dash for nothing."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.5g}" if isinstance(value, float) else str(value)

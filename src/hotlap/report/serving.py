"""A chart of what `hotlap bench` found: output speed, and the spread of the two waiting times."""

import io
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.figure import Figure

_STYLE = {"svg.hashsalt": "hotlap", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False}
_RANKS = ("p50", "p95", "p99")


def draw(report: Mapping[str, Any]) -> bytes:
    """SVG, byte for byte the same for the same numbers."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9, 3.5), layout="constrained")
        speed, first, each = figure.subplots(1, 3)
        speed.set(title="Output", ylabel="tokens/s")
        first.set(title="Time to first token", ylabel="s")
        each.set(title="Time per token", ylabel="s")
        for name, found in report.items():
            for number, server in enumerate(found["servers"], start=1):
                label = f"{name}, server {number}" if len(found["servers"]) > 1 else name
                speed.plot(server["tokens_per_s_rounds"], marker="o", label=label)
                for axes, key in ((first, "ttft_s"), (each, "tpot_s")):
                    ranks = [rank for rank in _RANKS if rank in server[key]]
                    axes.plot(ranks, [server[key][rank] for rank in ranks], marker="o")
        speed.set_xlabel("round")
        speed.set_ylim(bottom=0)
        speed.legend(fontsize=7, frameon=False)
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()

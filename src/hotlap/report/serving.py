"""What `hotlap bench` found, as charts: output speed, and the spread of the two waiting times."""

from collections.abc import Mapping
from typing import Any

from hotlap.report.chart import Chart, Line


def charts(report: Mapping[str, Any]) -> list[Chart]:
    """Of a benchmark's report, as `--json` prints it."""
    servers = {
        f"{name}, server {number}" if len(found["servers"]) > 1 else name: server
        for name, found in report.items()
        for number, server in enumerate(found["servers"], start=1)
    }
    speeds = {name: server["tokens_per_s_rounds"] for name, server in servers.items()}
    lines = [Line(name, range(1, len(speed) + 1), speed) for name, speed in speeds.items()]
    return [
        Chart("output", "Output", "round", "tokens/s", lines, "Output tokens a second, round by round."),
        _waits("ttft_s", "Time to first token", servers),
        _waits("tpot_s", "Time per further token", servers),
    ]


def _waits(key: str, title: str, servers: Mapping[str, Any]) -> Chart:
    lines = [Line(name, list(server[key]), list(server[key].values())) for name, server in servers.items()]
    return Chart(key, title, "percentile", "s", lines, f"{title} in seconds, at three percentiles.")

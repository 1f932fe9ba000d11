"""`hotlap budget`: what is spent, what is left, what runs cost, and where it leads."""

import csv
import io
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from hotlap import clock
from hotlap.cli.runs import print_table

if TYPE_CHECKING:
    from hotlap.cloud.lease import Sum

_DAY_S = 86_400
_DAYS = ("day", "gpu_minutes", "usd", "debt_usd")
_RUNS = ("run", "num_machines", "gpu_minutes", "usd", "usd_per_machine")
_LEASES = (
    *("day", "lease_id", "run", "owner", "provider", "gpu", "machine_id", "state", "outcome", "gpu_s", "usd_micros"),
    *("usd_micros_per_hour", "began_s", "ended_s"),
)


@click.command(
    epilog="""\b
Example:
  hotlap budget --json
"""
)
@click.option(
    *("--days", "num_days"), default=30, show_default=True, type=click.IntRange(1, 36_500), help="How far back."
)
@click.option("--csv", "as_csv", is_flag=True, help="One line a machine.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def budget(num_days: int, as_csv: bool, as_json: bool) -> None:
    """Tell what today has left, what every day and run was charged, and what going on like this costs.

    What is held for machines that may be alive counts as spent until they are proven dead.
    """
    from hotlap.cloud.lease import day_of
    from hotlap.cloud.ledger import Ledger
    from hotlap.config import load_cloud

    settings, now_s = load_cloud(), clock.wall_s()
    ledger = Ledger(settings)
    since = day_of(now_s - (num_days - 1) * _DAY_S)
    if as_csv:
        _print_csv([asdict(lease) for lease in ledger.leases_since(since)])
        return
    report = _report(ledger.days(since), ledger.runs_since(since), ledger.state_of(now_s), settings)
    click.echo(json.dumps(report, indent=1)) if as_json else _print(report, ledger.place)


def _report(days: list["Sum"], runs: list[dict[str, Any]], state: dict[str, Any], settings: Any) -> dict[str, Any]:
    from hotlap.cloud.lease import forecast

    return {
        "today": state,
        "days": [_day_row(day) for day in days],
        "runs": [_run_row(run) for run in runs],
        "forecast": forecast(days, settings, state["day"]),
    }


def _day_row(day: "Sum") -> dict[str, Any]:
    return {
        "day": day.name,
        "gpu_minutes": day.charged.gpu_s / 60,
        "usd": day.charged.usd_micros / 1e6,
        "debt_usd": day.debt.usd_micros / 1e6,
        **asdict(day.charged),
    }


def _run_row(run: dict[str, Any]) -> dict[str, Any]:
    usd = run["usd_micros"] / 1e6
    return {**run, "gpu_minutes": run["gpu_s"] / 60, "usd": usd, "usd_per_machine": usd / run["num_machines"]}


def _print(report: dict[str, Any], place: str) -> None:
    today = report["today"]
    click.echo(
        f"today ({today['day']}, UTC): {today['left_text']} left of {today['limit_text']}; "
        f"{today['num_open']} machines may be alive; resets at {today['resets_at']}"
    )
    if report["days"]:
        print_table(report["days"], _DAYS)
        print_table(report["runs"], _RUNS)
    ahead = report["forecast"]
    click.echo(
        f"going on like this: ${ahead['usd_micros_per_30_days'] / 1e6:,.2f} in 30 days; the caps allow "
        f"${ahead['at_most_usd_micros_per_30_days'] / 1e6:,.2f}"
    )
    click.echo(f"ledger: {place}; it is of machines, and storage of volumes is not in it", err=True)


def _print_csv(rows: list[dict[str, Any]]) -> None:
    out = io.StringIO()
    writer = csv.DictWriter(out, _LEASES, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    click.echo(out.getvalue(), nl=False)

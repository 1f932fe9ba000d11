"""The money in sections: per day, provider and run, against the caps; what may be alive; where it leads."""

from collections import defaultdict
from typing import Any

from hotlap import clock
from hotlap.cloud.lease import Lease, day_of, forecast
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.money import usd
from hotlap.config import CloudConfig
from hotlap.report.chart import Chart, Line
from hotlap.report.page import Section, Table

_DAY_S = 86_400
_MOST_RUNS = 30


def section_of(ledger: Ledger, settings: CloudConfig, now_s: float, num_days: int) -> Section:
    since = day_of(now_s - (num_days - 1) * _DAY_S)
    days, leases, state = ledger.days(since), ledger.leases_since(since), ledger.state_of(now_s)
    ahead = forecast(days, settings, state["day"])
    names = [day_of(now_s - back * _DAY_S) for back in reversed(range(num_days))]
    first = min((day.name for day in days), default=names[-1])
    charts = [
        _per_day(leases, [name for name in names if name >= first], settings),
        _gpu_minutes(leases, [name for name in names if name >= first], settings),
        _per_run(ledger.runs_since(since), settings),
    ]
    return Section(
        "money",
        "Money",
        text=f"{state['left_text']} left today ({state['day']}, UTC) of {state['limit_text']}; {state['num_open']} "
        f"machines may be alive. Whatever may be alive is charged its worst case.",
        facts=[
            ("Charged today", usd(state["charged"]["usd_micros"])),
            ("Left today", usd(state["left"]["usd_micros"])),
            (f"Charged in {num_days} days", usd(sum(day.charged.usd_micros for day in days))),
            ("Going on like this, 30 days", usd(ahead["usd_micros_per_30_days"])),
            ("The caps allow in 30 days", usd(ahead["at_most_usd_micros_per_30_days"])),
            ("Beyond its hold (debt)", usd(sum(day.debt.usd_micros for day in days))),
        ],
        charts=charts if days else [],
        tables=[_open(ledger.open_leases()), _closed(leases)],
    )


def _per_day(leases: list[Lease], names: list[str], settings: CloudConfig) -> Chart:
    lines = _stacked(leases, names, lambda lease: lease.usd_micros / 1e6)
    most = max((sum(float(line.y[at] or 0) for line in lines) for at in range(len(names))), default=0.0)  # pyright: ignore[reportArgumentType]
    cap = settings.budget.usd_per_day
    says = f"The dearest of {len(names)} days was ${most:.4g}; a day may cost ${cap:g}."
    return Chart("usd-per-day", "Dollars per day", "day", "dollars", lines, says, [(f"cap ${cap:g}", cap)])


def _gpu_minutes(leases: list[Lease], names: list[str], settings: CloudConfig) -> Chart:
    lines = _stacked(leases, names, lambda lease: lease.gpu_s / 60)
    cap = settings.budget.gpu_minutes_per_day
    says = f"{sum(lease.gpu_s for lease in leases) / 60:.1f} GPU-minutes in all; a day may take {cap:g}."
    limits = [(f"cap {cap:g} min", cap)]
    return Chart("gpu-minutes-per-day", "GPU-minutes per day", "day", "GPU-minutes", lines, says, limits)


def _stacked(leases: list[Lease], names: list[str], value: Any) -> list[Line]:
    """A line per provider over the days on which its leases began."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for lease in leases:
        sums[lease.provider][lease.day] += value(lease)
    return [Line(name, names, [by_day[day] for day in names], "stacked") for name, by_day in sorted(sums.items())]


def _per_run(runs: list[dict[str, Any]], settings: CloudConfig) -> Chart:
    dearest = sorted(runs, key=lambda run: -run["usd_micros"])[:_MOST_RUNS]
    line = Line("charged", [run["run"] for run in dearest], [run["usd_micros"] / 1e6 for run in dearest], "bars")
    cap = settings.budget.usd_per_run
    says = f"{len(runs)} runs; a run may cost ${cap:g}."
    says += f" The dearest, {dearest[0]['run']}, was charged {usd(dearest[0]['usd_micros'])}." if dearest else ""
    return Chart("usd-per-run", "Dollars per run", "run", "dollars", [line], says, [(f"cap ${cap:g}", cap)])


def _open(leases: list[Lease]) -> Table:
    header = ["run", "provider", "machine", "GPU", "state", "at most until", "worst case"]
    rows = [
        [
            *(lease.run, lease.provider, lease.machine_id, lease.gpu, lease.state),
            *(clock.utc_text(lease.not_after_s), usd(lease.usd_micros)),
        ]
        for lease in leases
    ]
    return Table("May be alive", header, rows, "Nothing." if not rows else "hotlap machines asks the providers.")


def _closed(leases: list[Lease]) -> Table:
    newest = [lease for lease in reversed(leases) if not lease.is_open][:200]
    header = ["lease", "day", "run", "provider", "GPU", "state", "outcome", "GPU-seconds", "charged"]
    rows = [
        [
            *(lease.lease_id, lease.day, lease.run, lease.provider, lease.gpu, lease.state, lease.outcome),
            *(lease.gpu_s, usd(lease.usd_micros)),
        ]
        for lease in newest
    ]
    return Table("Leases that are over", header, rows, "The newest 200; hotlap budget --csv has all of them.")

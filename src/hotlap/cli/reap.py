"""`hotlap reap`: end what must not be alive any more, on every provider, and say what survives."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import click

from hotlap import clock
from hotlap.errors import HotlapError, UsageError

if TYPE_CHECKING:
    from hotlap.cloud.ledger import Ledger
    from hotlap.cloud.proof import Patience
    from hotlap.cloud.reaper import Report
    from hotlap.config import CloudConfig

_PATIENCE_S = 180.0


@click.command(
    epilog="""\b
Example:
  hotlap reap --dry-run
"""
)
@click.option("--dry-run", is_flag=True, help="Say what would be ended, and end nothing.")
@click.option("--all-owners", is_flag=True, help="Also machines of other owners, once their time is over.")
@click.option("--install-cron", is_flag=True, help="Have this done every few minutes, by cron or a systemd timer.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def reap(dry_run: bool, all_owners: bool, install_cron: bool, as_json: bool) -> None:
    """End tagged machines past their time and leftovers of leases that are over; never a machine of somebody else.

    Needs nothing but the providers' own listings and the ledger, so it may run from cron, on any machine, twice at a
    time. Exits 5 (survivors) while one of them is not proven dead, or while a provider does not answer.
    """
    from hotlap.cloud import reaper, rental
    from hotlap.cloud.ledger import Ledger
    from hotlap.cloud.proof import Patience
    from hotlap.config import load_cloud
    from hotlap.secrecy import redactor

    settings = load_cloud()
    if install_cron:
        from hotlap.cloud import cron

        if dry_run:
            raise UsageError("--install-cron writes a crontab and has no --dry-run. Leave one of the two out.")
        for line in cron.install(settings):
            click.echo(line)
        return
    redact = redactor(settings.ledger.url)
    trouble = None
    try:
        ledger = Ledger(settings)
    except HotlapError as error:
        ledger, trouble = None, error
        click.echo(f"{redact(str(error))} Machines are judged by their tags alone.", err=True)
    patience = Patience(
        _PATIENCE_S, clock.monotonic_s, clock.sleep_s, say=lambda text: click.echo(redact(text), err=True)
    )
    sweep = partial(_sweep, settings, ledger, all_owners, patience, dry_run)
    reports = [_redacted(sweep(name), redact) for name in rental.configured(settings)]
    if not dry_run:
        reaper.leave_sign(reports, clock.wall_s())
    if as_json:
        click.echo(json.dumps({"is_dry_run": dry_run, "providers": [report.as_json() for report in reports]}, indent=1))
    else:
        for report in reports:
            _print(report, dry_run)
    if trouble is not None:
        raise trouble
    reaper.require_clean(reports)


def _sweep(
    settings: "CloudConfig",
    ledger: "Ledger | None",
    all_owners: bool,
    patience: "Patience",
    is_dry_run: bool,
    name: str,
) -> "Report":
    from hotlap.cloud import rental
    from hotlap.cloud.reaper import Reaper, Report

    try:
        with closing(rental.open_provider(name, settings)) as provider:
            owner = rental.owner_of(settings)
            return Reaper(provider, ledger, settings, owner, all_owners).reap(patience, is_dry_run)
    except Exception as error:  # noqa: BLE001  (whatever befalls one provider, machines of the others still cost)
        return Report(name, failure=f"the pass over {name} broke off: {type(error).__name__}: {error}")


def _redacted(report: "Report", redact: Callable[[str], str]) -> "Report":
    return report if report.failure is None else replace(report, failure=redact(report.failure))


def _print(report: "Report", dry_run: bool) -> None:
    from hotlap.cli.progress import plain

    for warning in report.warnings:
        click.echo(plain(f"{report.provider}: {warning}"), err=True)
    for machine, reason in report.doomed:
        state = "would end" if dry_run else "survives" if machine.machine_id in report.survivors else "ended"
        click.echo(plain(f"{report.provider}: {state} {machine.machine_id} ({machine.name}): {reason}"))
    for lease in report.closed:
        click.echo(f"{report.provider}: lease {lease.lease_id} is {lease.state}, {lease.amount.text()}")
    if not report.doomed and report.failure is None:
        click.echo(f"{report.provider}: nothing is past its time", err=True)

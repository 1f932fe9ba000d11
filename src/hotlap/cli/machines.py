"""`hotlap machines`: what is rented now, from every provider; and what could be."""

import json
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from hotlap.cli.runs import print_table
from hotlap.errors import HotlapError

if TYPE_CHECKING:
    from hotlap.cloud.lease import Lease
    from hotlap.cloud.provider import Listing, Machine, Provider

_COLUMNS = ("provider", "machine_id", "state", "run", "owner", "age_s", "left_s", "usd_per_hour", "problems")
_OFFERS = ("provider", "gpu", "cloud", "region", "usd_per_hour", "has_stock")


@click.command(
    epilog="""\b
Example:
  hotlap machines --json
"""
)
@click.option("--offers", is_flag=True, help="What can be rented, instead of what is.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def machines(offers: bool, as_json: bool) -> None:
    """List every machine of every provider that this environment has a key for, ours or not."""
    from hotlap.cloud import rental
    from hotlap.cloud.ledger import Ledger
    from hotlap.config import load_cloud

    settings = load_cloud()
    leases = {} if offers else {lease.lease_id: lease for lease in Ledger(settings).open_leases()}
    rows, troubles = list[dict[str, Any]](), list[HotlapError]()
    for name in rental.configured(settings):
        # The trouble of one must not hide what is rented from another.
        try:
            with closing(rental.open_provider(name, settings)) as provider:
                if offers:
                    rows += [_offer_row(asdict(offer)) for offer in provider.offers()]
                else:
                    rows += _rows(provider, leases, troubles)
        except HotlapError as error:
            troubles.append(error)
    click.echo(json.dumps(rows, indent=1)) if as_json else print_table(rows, _OFFERS if offers else _COLUMNS)
    if troubles:
        raise troubles[0]


def _rows(provider: "Provider", leases: dict[str, "Lease"], troubles: list[HotlapError]) -> list[dict[str, Any]]:
    from hotlap.cloud.provider import ListingBroken

    try:
        listing = provider.machines()
    except ListingBroken as error:
        troubles.append(error)
        listing = error.seen
    return [_row(provider.traits.name, machine, listing, leases) for machine in listing.machines]


def _row(provider: str, machine: "Machine", listing: "Listing", leases: dict[str, "Lease"]) -> dict[str, Any]:
    lease = leases.get(machine.lease_id or "")
    left_s = None if machine.not_after_s is None else round(machine.not_after_s - listing.now_s)
    return {
        "provider": provider,
        "machine_id": machine.machine_id,
        "name": machine.name,
        "state": machine.state,
        "is_ours": machine.is_ours,
        "run": lease.run if lease else None,
        "owner": machine.owner,
        "age_s": round(listing.now_s - machine.created_at_s),
        "left_s": left_s,
        "usd_per_hour": _usd(machine.usd_micros_per_hour),
        "problems": "; ".join(machine.problems) or None,
    }


def _offer_row(offer: dict[str, Any]) -> dict[str, Any]:
    return {**offer, "usd_per_hour": _usd(offer["usd_micros_per_hour"])}


def _usd(usd_micros: int | None) -> float | None:
    return None if usd_micros is None else usd_micros / 1e6

"""`hotlap launch --offers`: the kinds of GPU that have room for a run, by what a slice on them costs at most."""

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hotlap.cloud.provider import Offer, Provider, Where
    from hotlap.config import RunConfig

_COLUMNS = ("gpu", "cloud", "region", "memory_gb", "usd_per_hour", "usd_per_slice", "has_stock")
_ROOM = 0.9
"""Of a GPU's memory, what a run may need: the driver and the allocator's waste take the rest."""


def show(config: "RunConfig | None", provider: "Provider", where: "Where", as_json: bool) -> int:
    """Print them; those without room are counted in the table's place and listed in JSON.

    Raises:
        UsageError: there is no run whose needs are known.
    """
    from hotlap.cli.runs import print_table
    from hotlap.errors import UsageError

    if config is None:
        raise UsageError("--offers is for runs (--job qlora). hotlap machines --offers lists all there is.")

    needed, why_not = _needed_bytes(config)
    rows = ranked(config, provider, where, needed)
    if as_json:
        facts = {"needed_bytes": needed, "offers": rows}
        click.echo(json.dumps(facts, indent=1))
        return 0
    print_table([row for row in rows if row["fits"] is not False], _COLUMNS)
    if needed is None:
        click.echo(f"Whether the run fits is not known: {why_not}", err=True)
    else:
        num_small = sum(row["fits"] is False for row in rows)
        click.echo(f"the run needs about {needed / 1e9:.1f} GB; {num_small} offers are too small", err=True)
    return 0


def ranked(config: "RunConfig", provider: "Provider", where: "Where", needed: int | None) -> list[dict[str, Any]]:
    """The offers that fit, cheapest slice first; then those of which it is not known; then those that do not. What is
    sold out comes last among its equals."""
    from hotlap.cloud import rental
    from hotlap.cloud.money import rate_of, worst_rate

    ttl_s = rental.ttl_of(config, provider)
    rows = [
        {
            "provider": offer.provider,
            "gpu": offer.gpu,
            "cloud": offer.cloud,
            "region": offer.region,
            "memory_gb": offer.memory_gb,
            "fits": _fits(offer, needed),
            "usd_per_hour": offer.usd_micros_per_hour / 1e6,
            "usd_per_slice": worst_rate(rate_of(offer)).cost(ttl_s).usd_micros / 1e6,
            "has_stock": offer.has_stock,
        }
        for offer in provider.offers(None, where)
    ]
    order = {True: 0, None: 1, False: 2}
    return sorted(rows, key=lambda row: (order[row["fits"]], row["has_stock"] is False, row["usd_per_slice"]))


def _fits(offer: "Offer", needed: int | None) -> bool | None:
    if needed is None or offer.memory_gb is None:
        return None
    return needed <= _ROOM * offer.memory_gb * 1e9


def _needed_bytes(config: "RunConfig") -> tuple[int | None, str]:
    """By the base model's shape, if it is here; its weights need not be known beyond that."""
    from hotlap import artifacts
    from hotlap.data import estimate
    from hotlap.errors import HotlapError

    try:
        shape = estimate.shape_of(artifacts.locate_model(config.base_model))
    except HotlapError as error:
        return None, str(error)
    precision = "bfloat16" if config.model.precision == "auto" else config.model.precision
    memory = estimate.most_memory_of(shape, config, precision)
    return memory.peak_bytes(config.train.micro_batch_rows), ""

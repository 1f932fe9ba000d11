"""`hotlap init`: start a project, from a data set or from the configuration of another trainer."""

import os
from pathlib import Path

import click

from hotlap.errors import ConfigError, HotlapError, MissingArtifact, UsageError


@click.command(
    epilog="""\b
Examples:
  hotlap init data/train.jsonl --on runpod
  hotlap init --from axolotl.yaml --output run.toml
"""
)
@click.argument("dataset", required=False)
@click.option(
    *("--from", "source"),
    type=click.Path(path_type=Path),
    help="A configuration of axolotl, or of TRL's SFT trainer; YAML or JSON.",
)
@click.option("--base-model", help="What to fine-tune.  [default: smollm2-135m]")
@click.option("--on", "provider", help="Price a slice on what this provider offers now: local or runpod.")
@click.option(
    "--output", default="run.toml", show_default=True, type=click.Path(path_type=Path), help="The file to write."
)
def init(dataset: str | None, source: Path | None, base_model: str | None, provider: str | None, output: Path) -> None:
    """Write a commented configuration: for DATASET, which is looked at, or from another trainer's configuration.

    Of a data set its form, lengths and number of examples are found and a value is proposed for each setting that
    depends on them. Of another trainer's configuration what could not be carried over is listed, with reasons. An
    existing file is not overwritten. Look at what comes out with hotlap preview before you train.
    """
    if (dataset is None) == (source is None):
        raise UsageError("hotlap init takes a data set, or --from with another trainer's configuration; give one.")
    if source is not None and (base_model or provider):
        raise UsageError("--base-model and --on go with a data set; a translated configuration names its own model.")
    if output.exists():
        raise ConfigError(f"{output} is there already. Name another file with --output.")
    if source is not None:
        _translate(source, output)
    else:
        _propose(str(dataset), base_model or "smollm2-135m", provider, output)
    click.echo(str(output))


def _translate(source: Path, output: Path) -> None:
    from hotlap.cli import written
    from hotlap.translate import one_line, translate

    try:
        text = source.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} cannot be read: {error}.") from None
    found = translate(text, str(source))
    written.write(output, found.as_toml().encode())
    for entry in found.left:
        click.echo(f"not carried over: {one_line(entry)}", err=True)
    click.echo(f"Read as a configuration of {found.tool}; {len(found.left)} settings were not carried over.", err=True)


def _propose(dataset: str, base_model: str, provider: str | None, output: Path) -> None:
    from hotlap import artifacts, sources
    from hotlap.cli import written
    from hotlap.cli.progress import plain
    from hotlap.config import load_cloud
    from hotlap.data.propose import look_at, propose

    cloud = load_cloud()
    place = artifacts.locate_dataset(dataset)
    is_here = isinstance(sources.parse(base_model), Path)
    try:
        model: Path | None = artifacts.locate_model(base_model)
    except MissingArtifact:
        if is_here:
            raise
        model = None  # it can be brought, and is proposed for until then
    look = look_at(place, model)
    notes = [
        f"Next: hotlap preview {output}, hotlap train {output} --chain; on a rented machine: hotlap launch {output}."
    ]
    notes += [_price(provider)] if provider else []
    folder = output.absolute().parent
    # The file's own paths are relative to its folder.
    named = os.path.relpath(place, folder) if Path(dataset).exists() else dataset
    model_named = os.path.relpath(base_model, folder) if Path(base_model).exists() else base_model
    proposal = propose(look, model_named, named, cloud, notes)
    written.write(output, proposal.as_toml().encode())
    for note in proposal.notes:
        click.echo(plain(note), err=True)


def _price(name: str) -> str:
    """What a slice costs at most on the cheapest machine of a provider; its trouble must not keep the file away."""
    from contextlib import closing

    from hotlap.cloud import rental
    from hotlap.cloud.launcher import JOB_MARGIN_S
    from hotlap.cloud.money import rate_of, ttl_s, usd, worst_rate
    from hotlap.config import load_cloud

    cloud = load_cloud()
    try:
        with closing(rental.open_provider(name, cloud)) as provider:
            offers = provider.offers()
            ttl = ttl_s(cloud.limits.max_slice_minutes * 60.0 + JOB_MARGIN_S, provider.traits)
    except UsageError:
        raise
    except HotlapError as error:
        return f"{name} did not tell its prices: {error}"
    if not offers:
        return f"{name} offers nothing now."
    worst, rate = worst_rate(rate_of(offers[0])).cost(ttl), usd(offers[0].usd_micros_per_hour)
    return (
        f"Cheapest of {name} now: {offers[0].gpu} at {rate} an hour; a slice costs at most "
        f"{usd(worst.usd_micros)} there. hotlap preview --on {name} prices the whole run on every kind."
    )

"""`hotlap init`: start a project from the configuration of another trainer."""

from pathlib import Path

import click


@click.command(
    epilog="""\b
Example:
  hotlap init --from axolotl.yaml --output run.toml
"""
)
@click.option(
    *("--from", "source"),
    required=True,
    type=click.Path(path_type=Path),
    help="A configuration of axolotl, or of TRL's SFT trainer; YAML or JSON.",
)
@click.option(
    "--output", default="run.toml", show_default=True, type=click.Path(path_type=Path), help="The file to write."
)
def init(source: Path, output: Path) -> None:
    """Write hotlap's configuration from another trainer's, and list what could not be carried over, with reasons.

    An existing file is not overwritten. Look at what comes out with hotlap preview before you train.
    """
    from hotlap import durable
    from hotlap.errors import ConfigError
    from hotlap.translate import one_line, translate

    try:
        text = source.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} cannot be read: {error}.") from None
    found = translate(text, str(source))
    if output.exists():
        raise ConfigError(f"{output} is there already. Name another file with --output.")
    durable.replace(output, found.as_toml().encode())
    for entry in found.left:
        click.echo(f"not carried over: {one_line(entry)}", err=True)
    click.echo(f"Read as a configuration of {found.tool}; {len(found.left)} settings were not carried over.", err=True)
    click.echo(str(output))

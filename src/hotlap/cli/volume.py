"""`hotlap volume` and `hotlap pull`: files onto a network volume, and a run's results back from it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotlap.cli.commands import Commands

if TYPE_CHECKING:
    from hotlap.cloud.volume import Volume

_VOLUME = click.option(
    "--volume-id", required=True, help="Network volume, modal:NAME, ssh: (a box of yours), or a folder."
)


@click.group(
    cls=Commands,
    epilog="""\b
Example:
  hotlap volume ls --volume-id V data
""",
)
def volume() -> None:
    """List, put and get files of a network volume.

    What was cut goes on where it was, and what is there already is not sent again.
    """


@volume.command(
    epilog="""\b
Example:
  hotlap volume ls --volume-id V runs --json
"""
)
@_VOLUME
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.argument("prefix", default="")
def ls(volume_id: str, as_json: bool, prefix: str) -> None:
    """List the files below PREFIX with their sizes."""
    from hotlap.cli.runs import print_table

    rows = [{"key": item.key, "bytes": item.num_bytes} for item in opened(volume_id).ls(prefix)]
    click.echo(json.dumps(rows, indent=1)) if as_json else print_table(rows, ("key", "bytes"))


@volume.command(
    epilog="""\b
Example:
  hotlap volume put --volume-id V data/train.jsonl data/train.jsonl
"""
)
@_VOLUME
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.argument("key")
def put(volume_id: str, source: Path, key: str) -> None:
    """Bring a file, or a folder's files, to KEY. A machine sees it as /workspace/KEY."""
    from hotlap.cloud.volume import walk

    there = opened(volume_id)
    for path, name in walk(source, key):
        was_sent = there.put(path, name)
        click.echo(f"{'put' if was_sent else 'there already'}: {name}", err=True)


@volume.command(
    epilog="""\b
Example:
  hotlap volume get --volume-id V runs/mine/metrics.jsonl metrics.jsonl
"""
)
@_VOLUME
@click.argument("key")
@click.argument("target", type=click.Path(path_type=Path))
def get(volume_id: str, key: str, target: Path) -> None:
    """Bring the file KEY here, as TARGET."""
    was_got = opened(volume_id).get(key, target)
    click.echo(f"{'got' if was_got else 'here already'}: {target}", err=True)


@click.command(
    epilog="""\b
Example:
  hotlap pull mine --volume-id V
"""
)
@click.argument("run")
@_VOLUME
@click.option("--from", "folder", default="runs", show_default=True, help="The volume's folder of runs, or of studies.")
@click.option("--output-dir", default="runs", show_default=True, type=click.Path(path_type=Path), help="Where to.")
def pull(run: str, volume_id: str, folder: str, output_dir: Path) -> None:
    """Bring a run's adapters, metrics and reports here; a study's journal and board with --from studies --output-dir
    studies. Checkpoints and trials stay where they are."""
    from hotlap.cloud import volume as volumes

    volumes.pull(opened(volume_id), run, folder, output_dir, lambda text: click.echo(text, err=True))
    click.echo(output_dir / run)


def opened(volume_id: str) -> "Volume":
    """As `volume.open_volume`, with Modal's volumes and the files of a box."""
    from hotlap.cloud import rental
    from hotlap.cloud.volume import open_volume
    from hotlap.config import load_cloud

    ours = rental.modal_volume(volume_id) or rental.box_volume(volume_id, load_cloud())
    return ours or open_volume(volume_id, rental.center_of)

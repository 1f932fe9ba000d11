"""`hotlap push`: a run's adapter or exported model on a model hub, with its card."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotlap.cli.export import talk, tuned_of
from hotlap.cli.runs import OUTPUT_DIR

if TYPE_CHECKING:
    from hotlap.export.push import Cost


@click.command(
    epilog="""\b
Example:
  hotlap push my-run org/my-model --form merged --dry-run
"""
)
@click.argument("run")
@click.argument("repo")
@OUTPUT_DIR
@click.option(
    "--form",
    default="adapter",
    show_default=True,
    help="adapter, or the name of a folder in RUN's export/: merged, fp8, gguf-q8_0.",
)
@click.option("--public", is_flag=True, help="Make a new repository public; otherwise it is private.")
@click.option("--dry-run", is_flag=True, help="Print the model card and the files, and send nothing.")
def push(run: str, repo: str, output_dir: Path, form: str, public: bool, dry_run: bool) -> None:
    """Push RUN's adapter or exported model to the hub repository REPO as one commit. Needs HF_TOKEN."""
    from hotlap import runs
    from hotlap.errors import MissingArtifact
    from hotlap.export import folders
    from hotlap.export import push as pushing

    tuned = tuned_of(run, output_dir, talk)
    folder = tuned.adapter if form == "adapter" else folders.folder_of(tuned.run, Path(form).name)
    if not folder.is_dir():
        raise MissingArtifact(f"{folder} is not there. Run `hotlap export` first.")
    run_folder = runs.RunFolder(tuned.run)
    identity = runs.read_identity(run_folder)
    assert identity is not None  # `tuned_of` has read it
    facts = folders.facts_of(folder)
    card = pushing.card_of(tuned, identity, facts, runs.all_slices(run_folder), _cost(tuned.run.name))
    if dry_run:
        click.echo(card)
        for name, path in pushing.files_of(folder).items():
            click.echo(f"{path.stat().st_size:>14,} {name}")
        return
    click.echo(pushing.push(tuned, folder, repo, not public, card, talk))


def _cost(run: str) -> "Cost | None":
    """By the ledger of this home, since it began."""
    from hotlap.cloud.ledger import Ledger
    from hotlap.config import hotlap_home, load_cloud
    from hotlap.export.push import Cost

    if not hotlap_home().exists():
        return None
    for row in Ledger(load_cloud()).runs_since(""):
        if row["run"] == run:
            return Cost(row["num_machines"], row["gpu_s"], row["usd_micros"])
    return None

"""`hotlap train`: one slice, or slices until the run is done."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hotlap.config import RunConfig
    from hotlap.supervise import SliceEnd


@click.command(
    epilog="""\b
Example:
  hotlap train --base-model smollm2-135m --dataset data/train.jsonl --chain
"""
)
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--base-model", help="A folder, a GGUF file, a hub id, a package, or a short name.")
@click.option("--dataset", help="A JSONL file of prompt/completion or of messages.")
@click.option("--output-dir", help="Folder in which runs have theirs.  [default: runs]")
@click.option("--run", "run_name", help="Name of the run; the same name resumes.  [default: from the settings]")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting, as in lora.rank=32.")
@click.option("--chain", is_flag=True, help="Slice after slice until the run is done.")
@click.option("--json", "as_json", is_flag=True, help="The last slice's result as JSON.")
def train(
    config: Path | None,
    base_model: str | None,
    dataset: str | None,
    output_dir: str | None,
    run_name: str | None,
    overrides: tuple[str, ...],
    chain: bool,
    as_json: bool,
) -> int:
    """Train one slice of a run: resume, train until its cap, save, exit.

    Exits 0 when the run is done and 75 when it wants another slice. CONFIG is a TOML file; flags and --set win over it.
    """
    from hotlap import clock
    from hotlap.config import load_run

    flags = {"base_model": base_model, "dataset": dataset, "output_dir": output_dir, "run": run_name}
    settings = load_run(config, overrides, **flags)
    end = run_slices(settings, cap_began_s=clock.process_started_s(), chain=chain)
    if as_json:
        click.echo(json.dumps({**(end.result or {}), "exit_code": end.exit_code, "reason": end.reason}))
    elif end.exit_code == 0:
        click.echo(f"{settings.run_folder / 'adapter'}")
    return end.exit_code


def run_slices(settings: "RunConfig", cap_began_s: float, chain: bool) -> "SliceEnd":
    """Watch one slice or a chain of them, with a progress bar on standard error.

    Raises:
        ChildCrashed: a slice was killed from outside.
    """
    from hotlap import supervise
    from hotlap.cli.progress import SliceProgress

    while True:
        with SliceProgress(settings) as progress:
            end = supervise.run_slice(settings, progress.on_event, progress.on_talk, cap_began_s)
        if end.reason == "killed":
            end.end.raise_if_killed("The slice")
        progress.tell(end)
        if not chain or not end.goes_on:
            return end
        cap_began_s = supervise.clock.monotonic_s()

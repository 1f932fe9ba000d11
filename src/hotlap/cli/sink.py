"""`hotlap sink`: a run's metrics to TensorBoard, Weights & Biases, MLflow or Trackio."""

from pathlib import Path

import click

from hotlap.cli.runs import OUTPUT_DIR, complete_run

_NAMES = ("tensorboard", "wandb", "mlflow", "trackio")
_EVERY_S = 2.0


@click.command(
    epilog="""\b
Example:
  hotlap sink my-run --to tensorboard --follow
"""
)
@click.argument("run", shell_complete=complete_run)
@click.option("--to", "name", required=True, type=click.Choice(_NAMES), help="Which tracker; each is an extra.")
@click.option("-f", "--follow", is_flag=True, help="Go on as rows come, until the run is not running any more.")
@OUTPUT_DIR
def sink(run: str, name: str, follow: bool, output_dir: Path) -> None:
    """Send a run's metrics to a tracker: each row once, however often this is called.

    It reads what the run has written, so no tracker can slow a slice down, change it or end it. Weights & Biases is
    kept offline unless WANDB_MODE says otherwise; MLflow goes where MLFLOW_TRACKING_URI points.
    """
    from hotlap import clock
    from hotlap.report.sink import send
    from hotlap.runs import find_run, newest_number, slice_state

    folder = find_run(run, output_dir)

    def is_over() -> bool:
        return not follow or slice_state(folder, newest_number(folder)).ending != "running"

    num_sent = send(folder, name, is_over, lambda: clock.sleep_s(_EVERY_S))
    click.echo(f"{num_sent} rows of {folder.name} sent to {name}")

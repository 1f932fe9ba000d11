"""`hotlap runs`, `logs` and `stop`: what is there, what it says, and ending it."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hotlap.runs import RunFolder, SliceState


def complete_run(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of runs, for a shell's completion. Options before the name count: `--output-dir` above all."""
    from hotlap.runs import list_runs

    folder = Path(context.params.get("output_dir") or "runs")
    return [run.name for run in list_runs(folder) if run.name.startswith(incomplete)]


OUTPUT_DIR = click.option(
    "--output-dir", default="runs", show_default=True, type=click.Path(path_type=Path), help="Folder of runs."
)
_POLL_S = 0.5
_STOP_PATIENCE_S = 60.0
_NEXT_SLICE_S = 5.0
_PROOF_PATIENCE_S = 180.0


@click.command(
    epilog="""\b
Example:
  hotlap runs --json
"""
)
@click.argument("run", required=False, shell_complete=complete_run)
@OUTPUT_DIR
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def runs(run: str | None, output_dir: Path, as_json: bool) -> None:
    """List the runs; with RUN, its slices and where their seconds went."""
    from hotlap.report.slices import COLUMNS, slice_row
    from hotlap.runs import all_slices, find_run, list_runs, run_state

    if run is None:
        states = [asdict(run_state(folder)) for folder in list_runs(output_dir)]
        click.echo(json.dumps(states, indent=1)) if as_json else print_table(states, _RUN_COLUMNS)
        return
    slices = [slice_row(state) for state in all_slices(find_run(run, output_dir))]
    click.echo(json.dumps(slices, indent=1)) if as_json else print_table(slices, COLUMNS)


_RUN_COLUMNS = ("name", "state", "step", "num_steps", "num_slices", "loss", "val_loss", "created_at")


def print_table(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hotlap.cli.progress import plain

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.replace("_", " "), justify="left" if column in ("name", "state", "ending") else "right")
    for row in rows:
        # As `Text`, for strangers name machines, and markup is a language too.
        table.add_row(*(Text(plain(_cell(row[column]))) for column in columns))
    console = Console(highlight=False)
    console.width = console.width if console.is_terminal else 240
    console.print(table)
    if not rows:
        console.print("none")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


@click.command(
    epilog="""\b
Example:
  hotlap logs my-run -f
"""
)
@click.argument("run", shell_complete=complete_run)
@click.option("-f", "--follow", is_flag=True, help="Go on as rows come, until the run is not running any more.")
@OUTPUT_DIR
@click.option("--json", "as_json", is_flag=True, help="Rows as JSON lines.")
def logs(run: str, follow: bool, output_dir: Path, as_json: bool) -> None:
    """Print a run's metrics, a line per step and evaluation."""
    from hotlap.runs import find_run

    for row in _rows(find_run(run, output_dir), follow):
        click.echo(json.dumps(row) if as_json else _line(row))


def _rows(run: "RunFolder", follow: bool) -> Iterator[dict[str, Any]]:
    """Rows as they are there; a resumed slice that takes rows back says so by telling their steps again."""
    from hotlap import clock, durable

    num_told = 0
    while True:
        is_running = _newest_slice(run, waits=follow).ending == "running"
        rows = durable.read_rows(run.metrics)
        yield from rows[min(num_told, len(rows)) :]
        num_told = len(rows)
        if not follow or not is_running:
            return
        clock.sleep_s(_POLL_S)


def _newest_slice(run: "RunFolder", waits: bool) -> "SliceState":
    """The newest slice. Between two slices of a chain there is none that runs, so `waits` gives a next one time."""
    from hotlap import clock
    from hotlap.runs import newest_number, slice_state

    until = clock.Deadline(clock.monotonic_s() + _NEXT_SLICE_S)
    while True:
        state = slice_state(run, newest_number(run))
        ended_at_s = state.ended_at_s or 0.0
        is_between = state.ending == "slice_over" and clock.wall_s() - ended_at_s < _NEXT_SLICE_S
        if not waits or not is_between or until.is_over():
            return state
        clock.sleep_s(_POLL_S / 5)


def _line(row: dict[str, Any]) -> str:
    return "  ".join(
        f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
    )


@click.command(
    epilog="""\b
Example:
  hotlap stop my-run
"""
)
@click.argument("run", shell_complete=complete_run)
@OUTPUT_DIR
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def stop(run: str, output_dir: Path, as_json: bool) -> None:
    """Stop a run's slice: its state is saved, and the same command resumes it. Waits for the proof.

    A machine that is rented for the run is given back, and proven dead.
    """
    from hotlap.runs import find_run

    leases = _end_rented(run)
    if leases and not (output_dir / run / "slices").is_dir():
        # The run's folder lies on a volume elsewhere; its machines are all that is here.
        click.echo(json.dumps({"run": run, "leases": leases}) if as_json else f"{run}: nothing is rented any more")
        return
    folder = find_run(run, output_dir)
    state = _newest_slice(folder, waits=True)
    newest = state.number
    if state.ending == "running":
        state = _end(folder, state)
    answer = {"run": folder.name, "slice": newest, "ending": state.ending, "step": (state.result or {}).get("step")}
    answer |= {"leases": leases} if leases else {}
    click.echo(json.dumps(answer) if as_json else f"{folder.name}: slice {newest} is over ({state.ending})")


def _end_rented(run: str) -> list[dict[str, Any]]:
    """Give back what is rented for a run, which a file in the home or the ledger tells."""
    from hotlap import clock
    from hotlap.cloud import launches
    from hotlap.config import hotlap_home, load_cloud

    name = Path(run).name
    if load_cloud().ledger.url is None and not (hotlap_home() / "ledger.sqlite").exists():
        return []
    from hotlap.cloud import rental
    from hotlap.cloud.ledger import Ledger
    from hotlap.cloud.proof import Patience
    from hotlap.secrecy import redactor

    settings = load_cloud()

    redact = redactor(settings.ledger.url)

    def say(text: str) -> None:
        click.echo(redact(text), err=True)

    patience = Patience(_PROOF_PATIENCE_S, clock.monotonic_s, clock.sleep_s, say=say)
    closed = launches.stop(
        name, Ledger(settings), settings, lambda each: rental.open_provider(each, settings), patience, say
    )
    for lease in closed:
        say(f"machine {lease.machine_id or 'unseen'}: lease {lease.lease_id} is {lease.state}, {lease.amount.text()}")
    keys = ("lease_id", "machine_id", "state", "gpu_s", "usd_micros")
    return [{key: getattr(lease, key) for key in keys} for lease in closed]


def _end(run: "RunFolder", state: "SliceState") -> "SliceState":
    """SIGTERM, and SIGKILL to one that does not leave; returns what the slice left behind."""
    from hotlap import clock
    from hotlap.errors import UsageError
    from hotlap.runs import slice_state

    holder = state.holder
    assert holder is not None
    if not holder.is_local():
        raise UsageError(f"Slice {state.number} runs on {holder.host}; run this there, or wait for its end.")
    _signal(holder.pid, signal.SIGTERM)
    patience = clock.Deadline(clock.monotonic_s() + _STOP_PATIENCE_S)
    while holder.is_alive():
        if patience.is_over():
            click.echo(f"Process {holder.pid} does not leave; killing it.", err=True)
            _signal(holder.pid, signal.SIGKILL)
        clock.sleep_s(_POLL_S / 5)
    return slice_state(run, state.number)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return

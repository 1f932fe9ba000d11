"""`hotlap dashboard`: a live page of slices, machines, money and verdicts."""

import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotlap import clock
from hotlap.cli.report import open_ledger, require_extra
from hotlap.cli.runs import OUTPUT_DIR
from hotlap.errors import UsageError

if TYPE_CHECKING:
    from hotlap.cloud.ledger import Ledger
    from hotlap.config import CloudConfig

_PROOF_PATIENCE_S = 180.0


@click.command(
    epilog="""\b
Example:
  hotlap dashboard --port 8787
"""
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Another address than loopback needs a token.")
@click.option("--port", default=8787, show_default=True, type=click.IntRange(0, 65535), help="0: any that is free.")
@OUTPUT_DIR
@click.option(
    "--studies-dir", default="studies", show_default=True, type=click.Path(path_type=Path), help="Folder of studies."
)
def dashboard(host: str, port: int, output_dir: Path, studies_dir: Path) -> None:
    """Serve a page of what goes on now: slices, machines with a button that ends them, today's budget, verdicts.

    Prints its address. On another address than loopback the address ends in a token, and whoever has it may end
    machines; it travels unencrypted, so reach a remote dashboard through ssh -L instead.
    """
    require_extra()
    from hotlap.cloud import rental
    from hotlap.report import dashboard as live_page
    from hotlap.report.live import Listings, Slices, Verdicts, Watcher

    _, settings = open_ledger()
    token = None if host in live_page.LOOPBACK else secrets.token_urlsafe(24)
    watcher = Watcher(
        settings,
        _book(),
        Listings({name: partial(rental.open_provider, name, settings) for name in rental.configured(settings)}),
        Slices(output_dir),
        Verdicts(studies_dir, Path("records")),
    )
    try:
        listener = live_page.listen(host, port)
    except OSError as error:
        raise UsageError(
            f"{host}:{port} cannot be had: {error.strerror}. Name another with --host or --port."
        ) from None
    app = live_page.make_app(watcher.sections, live_page.Stops(_ending(settings)), token)
    name = f"[{host}]" if ":" in host else host
    click.echo(f"http://{name}:{listener.getsockname()[1]}/" + (f"?token={token}" if token else ""))
    live_page.serve(app, listener)


def _book() -> Callable[[], "Ledger | None"]:
    """The ledger, opened once, as soon as there is one."""
    opened: list[Ledger] = []

    def book() -> "Ledger | None":
        if not opened:
            ledger, _ = open_ledger()
            opened.extend([ledger] if ledger else [])
        return opened[0] if opened else None

    return book


def _ending(settings: "CloudConfig") -> Callable[[str, Callable[[str], None]], str]:
    """What the button does: as `hotlap stop RUN`, for what is rented."""
    from hotlap.cloud import launches, rental
    from hotlap.cloud.proof import Patience

    def end(run: str, say: Callable[[str], None]) -> str:
        ledger, _ = open_ledger()
        if ledger is None:
            raise UsageError("Nothing is rented.")
        patience = Patience(_PROOF_PATIENCE_S, clock.monotonic_s, clock.sleep_s, say=say)
        leases = launches.stop(run, ledger, settings, lambda each: rental.open_provider(each, settings), patience, say)
        told = [f"{each.machine_id or 'unseen'} is {each.state}, {each.amount.text()}" for each in leases]
        return f"proven dead: {'; '.join(told) or 'nothing was rented any more'}"

    return end

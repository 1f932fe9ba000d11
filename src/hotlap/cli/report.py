"""`hotlap report`: a page that stands alone, for a run, a study, or everything that is here."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotlap import clock
from hotlap.cli import written
from hotlap.cli.runs import OUTPUT_DIR, complete_run
from hotlap.errors import UsageError

if TYPE_CHECKING:
    from hotlap.cloud.ledger import Ledger
    from hotlap.config import CloudConfig
    from hotlap.report.page import Page, Section


@click.command(
    epilog="""\b
Example:
  hotlap report my-run
"""
)
@click.argument("name", required=False, metavar="[RUN|STUDY]", shell_complete=complete_run)
@click.option("--output", type=click.Path(path_type=Path), help="The file to write.  [default: reports/NAME.html]")
@OUTPUT_DIR
@click.option(
    "--studies-dir", default="studies", show_default=True, type=click.Path(path_type=Path), help="Folder of studies."
)
@click.option(
    *("--days", "num_days"), default=30, show_default=True, type=click.IntRange(1, 3650), help="Days of money."
)
def report(name: str | None, output: Path | None, output_dir: Path, studies_dir: Path, num_days: int) -> None:
    """Make a page of a run or a study; without a name, of the money, the runs and the records.

    The page is one file. It needs no network, holds the data of its charts as tables and files, and can be sent to
    somebody who has no hotlap.
    """
    require_extra()
    from hotlap.report.page import render

    made_at = clock.utc_text(clock.wall_s())
    page = _overview(output_dir, studies_dir, num_days, made_at) if name is None else None
    page = page or _named(str(name), output_dir, studies_dir, made_at)
    path = output or Path("reports") / f"{Path(name or 'overview').name}.html"
    written.write(path, render(page).encode())
    click.echo(str(path))


def require_extra() -> None:
    """
    Raises:
        UsageError: what pages are made with is not installed.
    """
    missing = [name for name in ("jinja2", "plotly", "matplotlib", "starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError(f"{', '.join(missing)} is missing. Run: pip install 'hotlap[report]'.")


def _named(name: str, output_dir: Path, studies_dir: Path, made_at: str) -> "Page":
    from hotlap.report import run as run_report
    from hotlap.runs import RunFolder, list_runs

    for path in (output_dir / name, Path(name)):
        if (path / "slices").is_dir():
            run = RunFolder(path)
            ledger, _ = open_ledger()
            return run_report.page_of(run, made_at, ledger.leases_of(run.name) if ledger else [])
    for path in (studies_dir / name, Path(name)):
        if (path / "experiments.jsonl").is_file():
            from hotlap.cli.research import history_of
            from hotlap.report import study as study_report
            from hotlap.research.history import StudyFolder

            return study_report.page_of(path.name, history_of(StudyFolder(path)), made_at)
    known = [run.name for run in list_runs(output_dir)] + [path.name for path in _studies(studies_dir)]
    raise UsageError(
        f"There is no run {name!r} in {output_dir}/ and no study in {studies_dir}/ (there: "
        f"{', '.join(known) or 'none'}). Name other folders with --output-dir and --studies-dir."
    )


def _overview(output_dir: Path, studies_dir: Path, num_days: int, made_at: str) -> "Page":
    from hotlap.report import overview
    from hotlap.runs import list_runs

    others: list[Section] = []
    ledger, settings = open_ledger()
    if ledger is not None:
        from hotlap.report import money

        others.append(money.section_of(ledger, settings, clock.wall_s(), num_days))
    if Path("records").is_dir() and Path("tracks").is_dir():
        from hotlap.report import records

        others += records.sections_of(Path())
    return overview.page_of(list_runs(output_dir), _studies(studies_dir), others, made_at)


def _studies(folder: Path) -> list[Path]:
    return [path.parent for path in sorted(folder.glob("*/experiments.jsonl"))]


def open_ledger() -> tuple["Ledger | None", "CloudConfig"]:
    """The ledger, if money was ever held here; and the limits."""
    from hotlap.config import hotlap_home, load_cloud

    settings = load_cloud()
    if settings.ledger.url is None and not (hotlap_home() / "ledger.sqlite").exists():
        return None, settings
    from hotlap.cloud.ledger import Ledger

    return Ledger(settings), settings

"""`hotlap research`: search over configurations by identical short trials, prove what was found, look at it again."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotlap.cli.commands import Commands
from hotlap.cli.runs import print_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotlap.clock import Deadline
    from hotlap.research.history import History, StudyFolder
    from hotlap.research.study import Listener, Study

_REASONS = {
    "trials": "all trials that were asked for are judged",
    "day": "today's trials are used up (study.trials_per_day)",
    "plateau": "nothing near the anchor promises a gain; change the structure, the ranges, or the budget",
    "exhausted": "everything near the anchor was tried",
    "time": "another trial might not end in time; the same command goes on",
    "stopped": "stopped; the same command goes on",
    "interrupted": "ended at the second Ctrl-C; the same command goes on",
    "judged": "judged",
    "closed": "closed; its secret stands in the journal, and nobody can go on with it",
}
_BOOT_S = 30.0
"""Of a rented machine's slice, what passes before its first trial."""

_DRAWING_SHARE = 10
"""The charts rest this many times as long as they took to draw."""

_EXITS = {"time": (75, "slice_over"), "stopped": (75, "stopped"), "interrupted": (130, "interrupted")}


class _StudyFirst(Commands):
    """`hotlap research STUDY` is `hotlap research run STUDY`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_named = bool(args) and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if is_named or not args else ["run", *args])


@click.group(
    cls=_StudyFirst,
    epilog="""\b
Example:
  hotlap research lr.toml --trials 8
""",
)
def research() -> None:
    """Search over configurations by short trials that all have the same time: `hotlap research STUDY`.

    STUDY is a TOML file; what was found lies in studies/NAME. Each trial changes one axis of the best so far. The same
    command goes on where the last one stopped, however it ended.
    """


_output_dir = click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    default=Path("studies"),
    show_default=True,
    help="Where studies lie.",
)
_as_json = click.option("--json", "as_json", is_flag=True, help="As JSON.")
_minutes = click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="Start no trial that could outlast so many minutes from now, and exit 75 while trials are left.",
)
_study = click.argument("study", type=click.Path(path_type=Path))


@research.command(
    epilog="""\b
Example:
  hotlap research run lr.toml --trials 8
"""
)
@_study
@click.option("--trials", type=click.IntRange(min=1), help="Changes to try now.  [default: until none promises a gain]")
@_minutes
@_output_dir
@_as_json
def run(study: Path, trials: int | None, minutes: float | None, output_dir: Path, as_json: bool) -> int:
    """Search: baseline, then one change of one axis after the other, each judged and written down.

    The same command again goes on with the trials that are left; when none are, it asks for as many more.
    """
    until = _deadline_of(minutes)
    return _act(study, output_dir, as_json, lambda opened: opened.search(trials, until))


@research.command(
    epilog="""\b
Example:
  hotlap research verify lr
"""
)
@_study
@_minutes
@_output_dir
@_as_json
def verify(study: Path, minutes: float | None, output_dir: Path, as_json: bool) -> int:
    """Prove the best so far: eight pairs of fresh runs against the last proven one, on a split nothing else looks at.

    Exits 0 when it is proven and 8 when it is not.
    """
    from hotlap.errors import ProofFailed
    from hotlap.research import claim

    until = _deadline_of(minutes)
    code = _act(study, output_dir, as_json, lambda opened: opened.run(claim.next_in_verification, until))
    history = _folder_of(study, output_dir).read()
    verdict = [row for row in history.decisions if row["candidate_hash"] == history.anchor.config_hash]
    verdict = [row for row in verdict if row["outcome"] in claim.VERDICTS]
    if code == 0 and verdict and verdict[-1]["outcome"] == "not_verified":
        raise ProofFailed(f"Not proven: {verdict[-1]['reason']}. The search may go on; it is asked only once.")
    return code


def _deadline_of(minutes: float | None) -> "Deadline | None":
    """So many minutes after this process began."""
    from hotlap import clock

    return None if minutes is None else clock.Deadline(clock.process_started_s() + 60.0 * minutes)


def _act(study: Path, output_dir: Path, as_json: bool, act: "Callable[[Study], str]") -> int:
    from hotlap import guard
    from hotlap.cli.research_progress import StudyProgress
    from hotlap.research import study as studies

    guard.require_not_serving()
    folder = _folder_of(study, output_dir)
    file = studies.file_of(study, folder)
    with (
        StudyProgress(file.study) as progress,
        studies.opened(file, folder, _drawing(progress.listener, folder)) as opened,
    ):
        reason = act(opened)
        history = opened.history
        _draw(folder, history)
    code, word = _EXITS.get(reason, (0, "done"))
    if as_json:
        click.echo(json.dumps(_summary(history, folder) | {"exit_code": code, "reason": word, "why": reason}))
    else:
        click.echo(str(folder.path / "LEADERBOARD.md"))
    click.echo(f"hotlap: exit {code} {word}: {_REASONS[reason]}", err=True)
    return code


def _drawing(listener: "Listener", folder: "StudyFolder") -> "Listener":
    """The same listener, which also draws the charts anew after a run, as long as that takes little of the time."""
    from dataclasses import replace

    from hotlap import clock

    next_at_s = 0.0

    def on_row(row: dict[str, Any], history: "History") -> None:
        nonlocal next_at_s
        listener.on_row(row, history)
        began_s = clock.monotonic_s()
        if row["kind"] == "run" and began_s >= next_at_s:
            _draw(folder, history)
            ended_s = clock.monotonic_s()
            next_at_s = ended_s + _DRAWING_SHARE * (ended_s - began_s)

    return replace(listener, on_row=on_row)


def _draw(folder: "StudyFolder", history: "History") -> None:
    """Draw the charts, where they can be drawn."""
    from importlib.util import find_spec

    # A rented machine's hotlap draws nothing, though its image may have what draws.
    if find_spec("matplotlib") is None or find_spec("hotlap.report") is None:
        return
    from hotlap.report import charts
    from hotlap.research import board, proposer

    charts.write(folder.path, board.plots(history) | {"expected": proposer.responses(history)})


def _summary(history: "History", folder: "StudyFolder") -> dict[str, Any]:
    from hotlap.research import board

    found = board.leaderboard(history)
    return {"study": history.study.name, "folder": str(folder.path), "header": found["header"]} | {
        "anchor": history.anchor.config,
        "verified": history.verified["config"] if history.verified else None,
    }


@research.command(
    epilog="""\b
Example:
  hotlap research best lr
"""
)
@_study
@_output_dir
@click.option("--anchor", is_flag=True, help="Where the search stands, proven or not.")
def best(study: Path, output_dir: Path, anchor: bool) -> None:
    """Print the last proven configuration with its evidence, as JSON."""
    from hotlap.research import board

    folder = _folder_of(study, output_dir)
    click.echo(board.render(history_of(folder))["anchor.json" if anchor else "best.json"].decode(), nl=False)


@research.command(
    epilog="""\b
Example:
  hotlap research leaderboard lr --json
"""
)
@_study
@_output_dir
@_as_json
def leaderboard(study: Path, output_dir: Path, as_json: bool) -> None:
    """Print what was found: proven configurations, provisional ones, what counting alone reaches, recent decisions."""
    from hotlap.research import board

    files = board.render(history_of(_folder_of(study, output_dir)))
    click.echo(files["leaderboard.json" if as_json else "LEADERBOARD.md"].decode(), nl=False)


@research.command(
    epilog="""\b
Example:
  hotlap research simulate lr.toml --usd-per-hour 0.30
"""
)
@_study
@_output_dir
@click.option("--trials", type=click.IntRange(min=1), default=8, show_default=True, help="Changes to try in a session.")
@click.option(
    "--usd-per-hour", type=click.FloatRange(0, 1e5), default=0.0, show_default=True, help="Price of the machine."
)
@click.option("--repeats", type=click.IntRange(min=100), default=4000, show_default=True, help="Simulated cases each.")
@_as_json
def simulate(study: Path, output_dir: Path, trials: int, usd_per_hour: float, repeats: int, as_json: bool) -> None:
    """Tell before anything runs how often noise would be kept, what would be found, and what it takes."""
    from dataclasses import asdict

    from hotlap.config_cloud import LimitsConfig
    from hotlap.errors import ConfigError
    from hotlap.research import price
    from hotlap.research import simulate as simulator
    from hotlap.research import study as studies

    folder = _folder_of(study, output_dir)
    history = folder.read() if folder.journal.exists() else None
    file = studies.file_of(study, folder)
    report = simulator.forecast(file.study, history, trials, usd_per_hour, repeats)
    if usd_per_hour > 0:
        slice_s = 60.0 * LimitsConfig().max_slice_minutes
        try:
            rented = price.price_of(file.study, history, trials, round(usd_per_hour * 1e6), slice_s, _BOOT_S)
        except ConfigError as error:
            report |= {"rented": None, "words": f"{report['words']}\nNot on rented machines: {error}"}
        else:
            report |= {"rented": asdict(rented), "words": f"{report['words']}\nOn rented machines: {rented.words}"}
    if as_json:
        click.echo(json.dumps(report, indent=1))
        return
    print_table(report["table"], tuple(report["table"][0]))
    click.echo(report["words"])


@research.command(
    epilog="""\b
Example:
  hotlap research replay lr --rule naive
"""
)
@_study
@_output_dir
@click.option("--rule", type=click.Choice(["two_run", "naive"]), help="Judge the same runs by another rule.")
@_as_json
def replay(study: Path, output_dir: Path, rule: str | None, as_json: bool) -> None:
    """Check that the journal leads to its own decisions and to its board; or judge its runs by another rule."""
    from dataclasses import asdict

    from hotlap import durable
    from hotlap.errors import CorruptFile
    from hotlap.research import acceptance
    from hotlap.research import replay as replays

    folder = _folder_of(study, output_dir)
    history = history_of(folder)
    if rule is not None:
        judgments = replays.under(acceptance.RULES[rule], history)
        summary = replays.summary(judgments, history)
        rows = [asdict(judgment) for judgment in judgments]
        if as_json:
            click.echo(json.dumps({**summary, "judgments": rows}, indent=1))
            return
        if rows:
            print_table(rows, tuple(rows[0]))
        click.echo(", ".join(f"{name} {value:.4g}" for name, value in summary.items()))
        return
    found = replays.disagreements(durable.read_rows(folder.journal), folder.read_secret(history))
    stale = replays.stale_files(folder, history)
    if found or stale:
        raise CorruptFile(
            f"{folder.journal} does not lead to what stands there: {'; '.join([*found, *stale])}. Run the study again "
            f"to make the board anew; a decision that differs was made by other code or edited."
        )
    answer = {"num_decisions": len(history.decisions), "num_runs": history.num_ended, "agrees": True}
    click.echo(
        json.dumps(answer) if as_json else f"{len(history.decisions)} decisions and the board follow from the journal"
    )


@research.command(
    epilog="""\b
Example:
  hotlap research close lr
"""
)
@_study
@_output_dir
@_as_json
def close(study: Path, output_dir: Path, as_json: bool) -> int:
    """End a study for good, and write its secret into the journal: `replay` then needs the journal alone.

    Whoever knows the secret can foresee every seed, so nothing is run in the study afterwards.
    """
    return _act(study, output_dir, as_json, lambda opened: opened.close())


def _folder_of(study: Path, output_dir: Path) -> "StudyFolder":
    from hotlap.research import study as studies

    return studies.find_folder(study, output_dir)


def history_of(folder: "StudyFolder") -> "History":
    from hotlap.errors import UsageError

    history = folder.read()
    if history.campaign is None:
        raise UsageError(f"There is no study in {folder.path}. Run `hotlap research STUDY.toml` first.")
    return history

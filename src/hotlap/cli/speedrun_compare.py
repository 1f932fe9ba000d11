"""`hotlap speedrun duel`, `ablate` and `transfer`: what verified times do not say of each other."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotlap.cli.speedrun import contest_option, json_option, say, speedrun, stopped
from hotlap.errors import DONE, NOT_PROVEN

if TYPE_CHECKING:
    from hotlap.speedrun.submission import Submission

_out = click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where runs and result are kept; the same command goes on there. [default: comparisons/ in the contest]",
)


@speedrun.command(
    epilog="""\b
Example:
  hotlap speedrun duel submissions/002-ada submissions/001-ada --pairs 3
"""
)
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option("--pairs", type=click.IntRange(min=2), default=3, show_default=True, help="Runs of each, in pairs.")
@_out
@contest_option
@json_option
def duel(first: Path, second: Path, pairs: int, out: Path | None, contest: Path, as_json: bool) -> int:
    """Run two submissions in turn on this machine, and say what they differ by. Exit 0: FIRST is faster with
    confidence; 8: it is not, or that is not proven; 75: stopped by a signal, and the same command goes on."""
    from hotlap.cli.progress import plain
    from hotlap.speedrun import duel as maker
    from hotlap.speedrun import remote, submission, track
    from hotlap.speedrun.stopping import Stopped

    contest = contest.absolute()
    chosen = track.find(contest, submission.track_of(first.absolute()))
    one, other = (submission.load(folder.absolute(), chosen) for folder in (first, second))
    folder = out or contest / "comparisons" / f"{_code_name(one)}-against-{_code_name(other)}"
    try:
        told = maker.duel(one, other, chosen, pairs, folder.absolute(), remote.sources(), say)
    except Stopped:
        return stopped()
    click.echo(json.dumps(told, indent=1) if as_json else plain((folder / "duel.md").read_text(encoding="utf-8")))
    if told["faster"] == one.name:
        return DONE
    why = "no difference is proven" if told["faster"] is None else f"{told['faster']} is the faster one"
    say(f"hotlap: exit {NOT_PROVEN} {'undecided' if told['faster'] is None else 'fail'}: {why}")
    return NOT_PROVEN


@speedrun.command(
    epilog="""\b
Example:
  hotlap speedrun ablate submissions/002-ada
"""
)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    help="The plain recipe: each setting in which they differ counts. [default: the same without [techniques]]",
)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each variant.")
@_out
@contest_option
@json_option
def ablate(folder: Path, against: Path | None, rounds: int, out: Path | None, contest: Path, as_json: bool) -> int:
    """Leave out each technique of a recipe, and add each alone to a plain one, all in turn on this machine. Prints the
    table for the notes. FOLDER is a submission with a recipe.toml. Exit 75: stopped by a signal, and the same command
    goes on."""
    from hotlap.cli.progress import plain
    from hotlap.errors import UsageError
    from hotlap.speedrun import ablate as maker
    from hotlap.speedrun import remote, submission, track
    from hotlap.speedrun.stopping import Stopped

    contest = contest.absolute()
    chosen = track.find(contest, submission.track_of(folder.absolute()))
    entry = submission.load(folder.absolute(), chosen)
    other = submission.load(against.absolute(), chosen) if against else None
    if other is not None and other.recipe is None:
        raise UsageError(f"{other.name} is a program; name a recipe as --against.")
    plain_settings = other.recipe if other and other.recipe else maker.without_techniques(entry.recipe or {})
    tail = f"-against-{_code_name(other)}" if other else ""
    place = out or contest / "comparisons" / f"ablation-{_code_name(entry)}{tail}"
    try:
        told = maker.ablate(entry, plain_settings, chosen, rounds, place.absolute(), remote.sources(), say)
    except Stopped:
        return stopped()
    click.echo(json.dumps(told, indent=1) if as_json else plain((place / "ablation.md").read_text(encoding="utf-8")))
    return DONE


@speedrun.command(
    epilog="""\b
Example:
  hotlap speedrun transfer submissions/002-ada --to c2
"""
)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--to", "track_id", required=True, help="The other track.")
@click.option(
    "--runs", "num_runs", type=click.IntRange(min=1), default=3, show_default=True, help="Of the recipe there."
)
@_out
@contest_option
@json_option
def transfer(folder: Path, track_id: str, num_runs: int, out: Path | None, contest: Path, as_json: bool) -> int:
    """Run a recipe on another track as it is: transfers, partly, or no. FOLDER is a submission with a recipe.toml. Exit
    0: it transfers; 8: partly or no; 75: stopped by a signal, and the same command goes on."""
    from hotlap.speedrun import remote, submission, track
    from hotlap.speedrun import transfer as maker
    from hotlap.speedrun.stopping import Stopped

    contest = contest.absolute()
    home = track.find(contest, submission.track_of(folder.absolute()))
    away = track.find(contest, track_id)
    entry = submission.load(folder.absolute(), home)
    place = out or contest / "comparisons" / f"{_code_name(entry)}-to-{away.name}"
    try:
        told = maker.transfer(entry, home, away, num_runs, place.absolute(), remote.sources(), say)
    except Stopped:
        return stopped()
    if as_json:
        click.echo(json.dumps(told, indent=1))
    else:
        summary = told["report"]["summary"]
        scores = ", ".join("-" if run["score"] is None else f"{run['score']:.4f}" for run in told["report"]["runs"])
        mean_s = summary["time_seconds_mean"]
        click.echo(f"{told['answer']}: {mean_s:.1f} s, scores {scores}, target {told['to']['target']:g}")
    if told["answer"] == "transfers":
        return DONE
    decision = told["report"]["decision"]
    say(f"hotlap: exit {NOT_PROVEN} {decision['verdict']}: {decision['reasons'][0]}")
    return NOT_PROVEN


def _code_name(entry: "Submission") -> str:
    return f"{entry.name}-{entry.code_sha256[:12]}"

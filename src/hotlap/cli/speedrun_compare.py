"""`hotlap speedrun duel`, `ablate` and `transfer`: what verified times do not say of each other."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotlap.cli.speedrun import contest_option, json_option, say, speedrun, stopped
from hotlap.errors import DONE, NOT_PROVEN

if TYPE_CHECKING:
    from hotlap.speedrun.attempt import Sources
    from hotlap.speedrun.submission import Submission
    from hotlap.speedrun.track import Track

_out = click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where runs and result are kept; the same command goes on there. [default: comparisons/ in the contest]",
)


@dataclass(frozen=True)
class _Opened:
    """What every comparison begins with: a contest, a submission, and the track that it says it is for."""

    contest: Path
    track: "Track"
    entry: "Submission"

    @classmethod
    def at(cls, contest: Path, folder: Path) -> "_Opened":
        from hotlap.speedrun import submission, track

        contest, folder = contest.absolute(), folder.absolute()
        chosen = track.find(contest, submission.track_of(folder))
        return cls(contest, chosen, submission.load(folder, chosen))

    def another(self, folder: Path) -> "Submission":
        """A second submission to the same track."""
        from hotlap.speedrun import submission

        return submission.load(folder.absolute(), self.track)

    def place(self, out: Path | None, name: str) -> Path:
        """Where runs and result are kept."""
        return (out or self.contest / "comparisons" / name).absolute()


def _unless_stopped(compare: "Callable[[Sources], dict[str, Any]]") -> dict[str, Any] | None:
    """What a comparison told; None when somebody asked it to stop."""
    from hotlap.speedrun import remote
    from hotlap.speedrun.stopping import Stopped

    try:
        return compare(remote.sources())
    except Stopped:
        return None


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
    from hotlap.speedrun.duel import duel as run

    opened = _Opened.at(contest, first)
    one, other = opened.entry, opened.another(second)
    place = opened.place(out, f"{_code_name(one)}-against-{_code_name(other)}")
    told = _unless_stopped(lambda sources: run(one, other, opened.track, pairs, place, sources, say))
    if told is None:
        return stopped()
    click.echo(json.dumps(told, indent=1) if as_json else plain((place / "duel.md").read_text(encoding="utf-8")))
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

    opened = _Opened.at(contest, folder)
    entry, other = opened.entry, opened.another(against) if against else None
    if other is not None and other.recipe is None:
        raise UsageError(f"{other.name} is a program; name a recipe as --against.")
    plain_settings = other.recipe if other and other.recipe else maker.without_techniques(entry.recipe or {})
    tail = f"-against-{_code_name(other)}" if other else ""
    place = opened.place(out, f"ablation-{_code_name(entry)}{tail}")
    told = _unless_stopped(
        lambda sources: maker.ablate(entry, plain_settings, opened.track, rounds, place, sources, say)
    )
    if told is None:
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
    from hotlap.speedrun import track
    from hotlap.speedrun.transfer import transfer as run

    opened = _Opened.at(contest, folder)
    away = track.find(opened.contest, track_id)
    place = opened.place(out, f"{_code_name(opened.entry)}-to-{away.name}")
    told = _unless_stopped(lambda sources: run(opened.entry, opened.track, away, num_runs, place, sources, say))
    if told is None:
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
    # A reason may hold a program's last lines, and the last line on standard error is one.
    say(f"hotlap: exit {NOT_PROVEN} {decision['verdict']}: {' '.join(decision['reasons'][0].split())}")
    return NOT_PROVEN


def _code_name(entry: "Submission") -> str:
    return f"{entry.name}-{entry.code_sha256[:12]}"

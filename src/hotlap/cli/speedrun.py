"""`hotlap speedrun`: tracks, submissions, verification and records of a contest, which is a folder."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hotlap.cli.commands import Commands
from hotlap.errors import DONE, NOT_PROVEN, SLICE_OVER, MissingArtifact, PinMismatch

_COLUMNS = ("track", "version", "target", "metric", "base_model", "hardware", "sha256")
_STANDINGS = ("track", "rank", "time_s", "score", "author", "description", "report")

contest_option = click.option(
    "--contest",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path(),
    help="The contest's folder, with tracks/, submissions/ and records/. [default: here]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="As JSON.")


@click.group(
    cls=Commands,
    epilog="""\b
Example:
  hotlap speedrun tracks
""",
)
def speedrun() -> None:
    """A contest in training time, whose every claim is run again."""


@speedrun.command(
    epilog="""\b
Example:
  hotlap speedrun tracks --json
"""
)
@contest_option
@json_option
def tracks(contest: Path, as_json: bool) -> None:
    """List the tracks, each held against its pins."""
    from hotlap.speedrun import track

    rows = [
        {
            "track": each.folder.name,
            "version": each.spec.version,
            "target": each.spec.metric.target,
            "metric": each.spec.metric.type,
            "base_model": each.spec.base_model.name,
            "hardware": each.spec.hardware.gpu or f"{each.spec.hardware.threads} threads",
            "sha256": each.sha256[:12],
        }
        for each in track.tracks(contest.absolute())
    ]
    _show(rows, _COLUMNS, as_json)


@speedrun.command(
    epilog="""\b
Example:
  hotlap speedrun new 001-ada --author ada --track micro
"""
)
@click.argument("name")
@click.option("--author", required=True, help="Your GitHub name.")
@click.option("--track", "track_id", required=True, help="What it is for: a folder of tracks/.")
@click.option("--recipe", is_flag=True, help="Settings of hotlap's trainer in recipe.toml, in place of a train.py.")
@contest_option
def new(name: str, author: str, track_id: str, recipe: bool, contest: Path) -> None:
    """Start a submission from a template that trains."""
    from hotlap.speedrun import template, track

    contest = contest.absolute()
    chosen = track.find(contest, track_id)
    click.echo(template.new(contest, name, author, chosen, "recipe" if recipe else "train"))


@speedrun.command(
    "new-track",
    epilog="""\b
Example:
  hotlap speedrun new-track mine --data mine.jsonl --metric exact --target 0.8 --base-model smollm2-135m
""",
)
@click.argument("track_id")
@click.option("--data", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Rows, as JSONL.")
@click.option(
    "--metric",
    type=click.Choice(["exact", "loss"]),
    default="exact",
    show_default=True,
    help="Answers that are right to the letter, or held-out loss.",
)
@click.option("--target", type=float, help="What a run has to reach: a share, or nats per token.")
@click.option("--base-model", default="smollm2-135m", show_default=True, help="As hotlap prefetch takes it.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Of processor, for each run.")
@contest_option
def new_track(
    track_id: str, data: Path | None, metric: Any, target: float | None, base_model: str, threads: int, contest: Path
) -> None:
    """Make a track of your own data, and freeze it. Without --data: freeze a folder whose spec.toml you wrote."""
    from hotlap.speedrun import new_track as maker
    from hotlap.speedrun import records as book

    contest = contest.absolute()
    if data is None:
        made = maker.freeze(contest / "tracks" / track_id, say)
    elif target is None:
        raise click.UsageError("--data needs --target: what a run has to reach.")
    else:
        made = maker.make(contest, track_id, data, metric, target, base_model, threads, say)
    book.write_tables(contest)
    click.echo(f"{made.name} {made.sha256}")


@speedrun.command(
    epilog="""\b
Example:
  hotlap speedrun check submissions/001-ada
"""
)
@click.argument("folder", type=click.Path(path_type=Path))
@contest_option
@json_option
def check(folder: Path, contest: Path, as_json: bool) -> int:
    """Say everything about a submission that can be said without running it. Exit 2 if it cannot be verified."""
    from hotlap.cli.progress import plain
    from hotlap.errors import UsageError
    from hotlap.speedrun import submission, track, verify

    contest, folder = contest.absolute(), folder.absolute()
    chosen = track.find(contest, submission.track_of(folder))
    found = submission.check(folder, chosen)
    if not any(each.level == "refused" for each in found):
        found += verify.claims_against_measured(contest, submission.load(folder, chosen), chosen)
    click.echo(json.dumps([asdict(each) for each in found], indent=1)) if as_json else None
    for each in [] if as_json else found:
        click.echo(plain(str(each)))
    if refused := sum(each.level == "refused" for each in found):
        raise UsageError(f"{refused} reasons against {folder.name!a}; see above.")
    return DONE


@speedrun.command(
    epilog="""\b
Example:
  hotlap speedrun verify submissions/001-ada --runs 3
"""
)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--runs",
    "num_runs",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="How many, with those of earlier calls.",
)
@click.option(
    "--measured",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Run nothing: check and take in what `python -m hotlap.speedrun.remote` left in this folder.",
)
@click.option("--on", "provider", help="Run it on a rented machine: local, ssh, runpod or modal.")
@click.option("--volume-id", help="Of --on: the volume to which the submission, its track and the runs come.")
@click.option("--image", help="Of --on: as of `hotlap launch`.")
@contest_option
@json_option
def verify(
    folder: Path,
    num_runs: int,
    measured: Path | None,
    provider: str | None,
    volume_id: str | None,
    image: str | None,
    contest: Path,
    as_json: bool,
) -> int:
    """Run a submission again with fresh seeds, locked in, and decide. Exit 0: pass; 8: fail or undecided; 75: stopped
    by a signal, and the same command goes on."""
    from hotlap.cli import speedrun_rented
    from hotlap.cli.progress import plain
    from hotlap.speedrun import remote, submission, track
    from hotlap.speedrun import verify as verifier
    from hotlap.speedrun.report import disturbances
    from hotlap.speedrun.stopping import Stopped

    contest, folder = contest.absolute(), folder.absolute()
    chosen = track.find(contest, submission.track_of(folder))
    if provider is not None:
        code, measured = speedrun_rented.measure(contest, folder, chosen, num_runs, provider, volume_id, image)
        if code not in (DONE, NOT_PROVEN):
            return code
    try:
        if measured is None:
            report = verifier.verify(contest, folder, chosen, num_runs, remote.sources(), say)
        else:
            report = verifier.accept(contest, folder, chosen, measured.absolute())
    except Stopped:
        return stopped()
    decision, summary = report["decision"], report["summary"]
    if as_json:
        click.echo(json.dumps(report, indent=1))
    else:
        click.echo(f"{decision['verdict']}: {summary['time_seconds_mean']:.2f} s, score {summary['score_mean']}")
        for reason in decision["reasons"]:
            click.echo(plain(f"  {reason}"))
        for disturbance in disturbances(report["runs"]):
            click.echo(f"  {disturbance}")
        if chosen.is_provisional:
            click.echo("  no record: the rules of this track are provisional")
    if decision["verdict"] == "pass":
        return DONE
    # A reason may hold a program's last lines, and the last line on standard error is one.
    say(f"hotlap: exit {NOT_PROVEN} {decision['verdict']}: {' '.join(decision['reasons'][0].split())}")
    return NOT_PROVEN


@speedrun.command(
    epilog="""\b
Example:
  hotlap speedrun records --check
"""
)
@click.option("--check", "only_check", is_flag=True, help="Write nothing; exit 4 if anything does not follow.")
@contest_option
@json_option
def records(only_check: bool, contest: Path, as_json: bool) -> None:
    """Write the tables from the logs, and show who stands where."""
    from hotlap.speedrun import records as book
    from hotlap.speedrun import track

    contest = contest.absolute()
    if not only_check:
        book.write_tables(contest)
    if wrong := book.check(contest):
        raise PinMismatch("\n".join(wrong))
    rows = [
        {
            "track": each.name,
            "rank": standing.rank,
            "time_s": sum(standing.row["times_seconds"]) / len(standing.row["times_seconds"]),
            "score": sum(standing.row["accuracies"]) / len(standing.row["accuracies"]),
            "author": standing.row["author"],
            "description": standing.row["description"],
            "report": standing.row.get("report"),
        }
        for each in track.tracks(contest)
        for standing in book.standings(book.read(contest, each))
    ]
    _show(rows, _STANDINGS, as_json)


@speedrun.command(
    epilog="""\b
Example:
  hotlap speedrun replay records/micro/attempts/001-ada-0123456789ab/report-3.json
"""
)
@click.argument("report", type=click.Path(path_type=Path))
@click.option(
    "--run",
    "out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Train and score again with the report's seeds and test rows, into this folder.",
)
@contest_option
@json_option
def replay(report: Path, out: Path | None, contest: Path, as_json: bool) -> int:
    """Decide again from a report alone, and count its kept predictions again. With --run, run it again as well.
    Exit 0 if it says the same, 8 if a second run does not."""
    from hotlap.speedrun import replay as again

    if not report.is_file():
        raise MissingArtifact(f"{report} is no file; name a report.json of a verification.")
    found = again.replay(report)
    if out is not None:
        return _run_again(contest.absolute(), report, out.absolute(), as_json)
    click.echo(json.dumps(found, indent=1) if as_json else f"{found['verdict']}: as reported")
    return DONE


_RUNS = ("run", "seed", "score", "score_then", "wall_s", "wall_s_then", "is_same_adapter")


def _run_again(contest: Path, report: Path, out: Path, as_json: bool) -> int:
    from hotlap.speedrun.rerun import rerun
    from hotlap.speedrun.stopping import Stopped

    try:
        found = rerun(contest, report, out, say)
    except Stopped:
        return stopped()
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        _show(found["runs"], _RUNS, as_json=False)
    if found["verdict"] == found["verdict_then"]:
        return DONE
    say(f"hotlap: exit {NOT_PROVEN} {found['verdict']}: the report says {found['verdict_then']}")
    return NOT_PROVEN


def stopped() -> int:
    say(f"hotlap: exit {SLICE_OVER} stopped: finished runs are kept; the same command goes on")
    return SLICE_OVER


def say(text: str) -> None:
    from hotlap.cli.progress import plain, stderr_console

    stderr_console().print(plain(text), markup=False)


def _show(rows: list[dict[str, Any]], columns: tuple[str, ...], as_json: bool) -> None:
    from hotlap.cli.progress import plain
    from hotlap.cli.runs import print_table

    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    print_table([{key: plain(v) if isinstance(v, str) else v for key, v in row.items()} for row in rows], columns)

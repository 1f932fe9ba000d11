"""The report of a verification: every fact a verdict came from, as JSON for machines and Markdown for people.

The verdict is a function of the report: `decide_again` computes it from the report alone. What strangers wrote is
escaped in Markdown.
"""

import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hotlap import durable
from hotlap.errors import PinMismatch
from hotlap.speedrun import claims
from hotlap.speedrun.compare import Decision, RunFacts, decide, interval
from hotlap.speedrun.submission import Submission
from hotlap.speedrun.track import GeneratedData, LossMetric, Track

Report = dict[str, Any]
_UNDISTURBED = 0.1
IDENTITY = ("name", "author", "github", "description")
_MARKUP = {ord(char): f"&#{ord(char)};" for char in "&<>\\`*_{}[]()#+!|~@:$"}


def build(
    track: Track, entry: Submission, results: Sequence[dict[str, Any]], machine: dict[str, Any], date: str
) -> Report:
    """The report of all runs so far."""
    files = sorted(path for path in entry.folder.rglob("*") if path.is_file())
    report: Report = {
        "format": 1,
        "track": track.spec.id,
        **_identity_of_track(track),
        "submission": {
            **identity_of(entry),
            "technique": entry.config["technique"],
            "code_sha256": entry.code_sha256,
            "files": {path.relative_to(entry.folder).as_posix(): durable.sha256_file(path) for path in files},
        },
        "date": date,
        "machine": machine,
        "runs": list(results),
    }
    summary = summary_of(results, machine["usd_micros_per_hour"])
    differing = claims.disagreements(claims.of_folder(entry.folder, entry.config), summary)
    return {**report, "decision": asdict(decide_again(report)), "summary": summary, "differing_claims": differing}


def rebased(track: Track, report: Report) -> Report:
    """The report of the same runs as another version of their track judges them, which nothing but target, looks and
    alpha may tell from the one that they were made under.

    Raises:
        PinMismatch: it differs in more: the runs have to be made again.
    """
    if report.get("conditions_sha256") != track.conditions_sha256:
        raise PinMismatch(
            f"This report's runs were made under other conditions than track {track.name}'s, "
            f"so that they say nothing about it. Run `hotlap speedrun verify` on the submission."
        )
    judged = {**report, **_identity_of_track(track), "rebased_from": report["track_sha256"]}
    return {**judged, "decision": asdict(decide_again(judged))}


def _identity_of_track(track: Track) -> dict[str, Any]:
    return {
        "version": track.spec.version,
        "is_provisional": track.is_provisional,
        "track_sha256": track.sha256,
        "conditions_sha256": track.conditions_sha256,
        "rules": rules_of(track),
    }


def identity_of(entry: Submission) -> dict[str, str]:
    """Whose submission it is, as tables show it."""
    return {"name": entry.name, **{key: entry.config[key] for key in IDENTITY[1:]}}


def rules_of(track: Track) -> dict[str, Any]:
    """What of a track's rules a verdict follows from."""
    spec = track.spec
    return {
        "target": spec.metric.target,
        "higher_is_better": not isinstance(spec.metric, LossMetric),
        "looks": list(spec.verification.looks),
        "alpha": spec.verification.alpha,
        "has_fresh_rows": isinstance(spec.data, GeneratedData),
        "metric": spec.metric.model_dump(mode="json"),
        "limits": spec.limits.model_dump(mode="json"),
    }


def decide_again(report: Report) -> Decision:
    """The verdict, from what the report holds."""
    rules = report["rules"]
    runs = [
        RunFacts(
            score=run["score"],
            num_rows=run["num_rows"],
            is_fresh=rules["has_fresh_rows"],
            wall_s=run["wall_s"],
            complaints=tuple(run["complaints"]),
            adapter_sha256=run["adapter_sha256"],
        )
        for run in report["runs"]
    ]
    return decide(runs, rules["target"], rules["higher_is_better"], rules["looks"], rules["alpha"])


def summary_of(results: Sequence[dict[str, Any]], usd_micros_per_hour: int) -> dict[str, Any]:
    """What all runs together gave."""
    times = [run["wall_s"] for run in results]
    scores = [run["score"] for run in results if run["score"] is not None]
    tokens = [run["num_tokens"] for run in results if run["num_tokens"] is not None]
    # A run that was finished before hotlap kept its phases counts all the same.
    steps_s = [run["phases_s"]["steps"] for run in results if run.get("phases_s")]
    return {
        "time_seconds_mean": statistics.fmean(times),
        "time_seconds_interval": list(interval(times)) if len(times) > 1 else None,
        "score_mean": statistics.fmean(scores) if scores else None,
        "score_stdev": statistics.stdev(scores) if len(scores) > 1 else None,
        "num_tokens_mean": statistics.fmean(tokens) if tokens else None,
        "steps_s_mean": statistics.fmean(steps_s) if steps_s else None,
        "usd_micros_mean": round(statistics.fmean(times) * usd_micros_per_hour / 3600),
    }


def disturbances(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Runs beside which the machine did something else too, so that their times are too long: a ratio to a
    baseline that was disturbed flatters."""
    told: list[str] = []
    for run in runs:
        others_s = run.get("others_cpu_s") or 0.0  # runs that were finished before hotlap asked do not say it
        if others_s > _UNDISTURBED * run["wall_s"] + 1.0:
            what = f"other programs used {others_s:.0f} s of processor time in its {run['wall_s']:.0f} s"
            told.append(f"Run {run['run']} was disturbed: {what}. Its time is no result.")
    return told


def _phases(runs: Sequence[dict[str, Any]]) -> str:
    """A recipe's timeline in words; "" for a program, of which only its whole time is known."""
    told = [run["phases_s"] for run in runs if run.get("phases_s")]
    means = {name: statistics.fmean(phases[name] for phases in told) for name in (told[0] if told else ())}
    return ", ".join(f"{name} {mean_s:.2f}" for name, mean_s in means.items() if mean_s >= 0.005)


def escaped(text: object) -> str:
    """Strangers' text for Markdown, where it is only text: no markup, no line breaks, no mention, no table cell."""
    plain = " ".join("".join(char if char.isprintable() else " " for char in str(text)).split())
    # A web address needs no markup to become a link where it begins like this.
    return re.sub("(?i)www[.]", lambda found: found[0][:3] + "&#46;", plain.translate(_MARKUP))


def cost_of(usd_micros: int | None, num_tokens: float | None) -> str:
    """In words. Where no price is set, and of programs that are not ours, it is not known."""
    parts = [f"${usd_micros / 1e6:.4f}"] if usd_micros else []
    return ", ".join(parts + ([f"{num_tokens:,.0f} tokens"] if num_tokens else [])) or "-"


def to_markdown(report: Report) -> str:
    entry, decision, summary = report["submission"], report["decision"], report["summary"]
    environment = report["machine"]["environment"]
    lock = environment["lock_sha256"]
    lines = [
        f"# {escaped(entry['name'])} on track {report['track']}, version {report['version']}: {decision['verdict']}",
        "",
        *(f"- {escaped(reason)}" for reason in decision["reasons"]),
        *(f"- {escaped(claim)}" for claim in report["differing_claims"]),
        *(f"- {disturbance}" for disturbance in disturbances(report["runs"])),
        *(["- These rules are provisional: this is no record."] if report["is_provisional"] else []),
        f"- By {escaped(entry['author'])}: {escaped(entry['description'])}",
        f"- Code `{entry['code_sha256']}`, track `{report['track_sha256']}`, {report['date']}",
        *([f"- Run under the rules `{report['rebased_from']}`."] if "rebased_from" in report else []),
        f"- {escaped(report['machine']['processor'])}, {report['machine']['num_threads_here']} threads, "
        f"Python {report['machine']['python']}, torch {report['machine']['versions']['torch']}",
        f"- Environment: {len(environment['packages'])} packages, {f'lock `{lock}`' if lock else 'that of hotlap'}",
        f"- Sandbox: {', '.join(report['runs'][0]['protections'])}",
        "",
        "| run | seed | time s | outside s | CPU s | score | parameters | left behind | complaints |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in report["runs"]:
        score = "-" if run["score"] is None else f"{run['score']:.4f}"
        params = "-" if run["num_params"] is None else f"{run['num_params']:,}"
        lines.append(
            f"| {run['run']} | {run['seed']} | {run['wall_s']:.2f} | {run['outer_wall_s']:.2f} | {run['cpu_s']:.2f} "
            f"| {score} | {params} | {run['num_left_behind']} | {escaped('; '.join(run['complaints'])) or 'none'} |"
        )
    if phases := _phases(report["runs"]):
        lines += ["", f"Seconds of a run by phase, on average: {phases}."]
    low_high = summary["time_seconds_interval"]
    spread = f", 95 % interval {low_high[0]:.2f} to {low_high[1]:.2f} s" if low_high else ""
    cost = cost_of(summary["usd_micros_mean"], summary["num_tokens_mean"])
    return "\n".join(
        [*lines, "", f"Mean time {summary['time_seconds_mean']:.2f} s{spread}. Cost of a run: {cost}.", ""]
    )

"""What a study has found, as files that are functions of its journal alone, made anew after every run.

    LEADERBOARD.md     for people
    leaderboard.json   the same for programs, with the axis ledger: what was tried on every axis and what came of it
    best.json          the last proven configuration, with its evidence
    anchor.json        where the search stands
    plots.json         the numbers behind the charts

The mean of a configuration is taken over runs made after it was chosen: the runs that chose it were chosen for being
low. A configuration that has no such run yet shows the run that confirmed it, marked.
"""

import html
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hotlap import durable
from hotlap.research import acceptance, disturbed
from hotlap.research.acceptance import Noise
from hotlap.research.history import OK, Anchor, History, Row, StudyFolder, loss_of
from hotlap.research.space import Settings

_SHOWN_DECISIONS = 20
_LN2 = math.log(2)


def write(folder: StudyFolder, history: History) -> None:
    for name, data in render(history).items():
        durable.replace(folder.path / name, data)


def render(history: History) -> dict[str, bytes]:
    """Every file of the board, by name. The same journal gives the same bytes."""
    board = leaderboard(history)
    return {
        "LEADERBOARD.md": _markdown(history, board).encode(),
        "leaderboard.json": _json(board, indent=None),
        "best.json": _json(_best(history, board)),
        "anchor.json": _json(_anchor(history, board)),
        "plots.json": _json(plots(history), indent=None),
    }


def _json(value: Any, indent: int | None = 1) -> bytes:
    return (json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False) + "\n").encode()


# --- entries ---


@dataclass(frozen=True)
class _Mean:
    loss: float
    runs: list[Row]
    is_after_choice: bool


def _mean_of(history: History, anchor: Anchor) -> _Mean | None:
    """A configuration's mean over the runs after its choice. None before its first run."""
    runs = [run.row for run in history.groups.get(anchor.config_hash, [])]
    if anchor.decision is None:
        return _Mean(fmean(map(loss_of, runs)), runs, True) if runs else None
    chosen_by = anchor.decision["run_ids_candidate"][-1]
    after = [row for row in runs if row["run_id"] > chosen_by]
    chosen = [row for row in runs if row["run_id"] == chosen_by]
    kept = after or chosen
    return _Mean(fmean(map(loss_of, kept)), kept, bool(after))


def leaderboard(history: History) -> dict[str, Any]:
    """Header, entries in their order, newest decisions, axis ledger; JSON values, null where nothing is known."""
    noise = history.noise() if history.groups.get(history.anchors[0].config_hash) else None
    claims = {row["candidate_hash"]: row for row in history.decisions if row["outcome"] in ("verified", "not_verified")}
    entries = [entry for anchor in history.anchors if (entry := _entry(history, anchor, noise, claims))]
    order = {"verified": 0, "provisional": 1, "baseline": 1}
    entries.sort(key=lambda entry: (order[entry["state"]], entry["nats_per_byte"]))
    _rank(entries)
    return {
        "header": _header(history, noise),
        "entries": entries,
        "floors": floors(history),
        "decisions": [_told(row, history) for row in history.decisions[-_SHOWN_DECISIONS:]],
        "axes": ledger(history),
    }


def _entry(history: History, anchor: Anchor, noise: Noise | None, claims: Mapping[str, Row]) -> dict[str, Any] | None:
    mean, base = _mean_of(history, anchor), _mean_of(history, history.anchors[0])
    if mean is None or base is None or noise is None:
        return None
    decision, claim = anchor.decision, claims.get(anchor.config_hash)
    proven = claim is not None and claim["outcome"] == "verified"
    half = acceptance.t_at(0.05, noise.df) * noise.s * math.sqrt(1 / len(mean.runs) + 1 / len(base.runs))
    gain = base.loss - mean.loss
    last = mean.runs[-1]
    return {
        "config_hash": anchor.config_hash,
        "state": "verified" if proven else "provisional" if decision else "baseline",
        "nats_per_byte": mean.loss,
        "bpb": mean.loss / _LN2,
        "se": noise.s / math.sqrt(len(mean.runs)),
        "num_runs": len(mean.runs),
        "num_disturbed": sum(bool(row["flags"]) for row in mean.runs),
        "is_after_choice": mean.is_after_choice,
        "gain_on_baseline": gain if decision else None,
        "interval_90": [gain - half, gain + half] if decision else None,
        "gain_on_parent": decision["delta"] if decision else None,
        "change": _change(history, decision) if decision else None,
        "claim": _claim(claim, history) if claim else None,
        **{name: last[name] for name in ("tokens_per_s", "steps", "params", "charged_s", "wall_s", "peak_mem_mb")},
        "last_run_at": last["ended_at"],
        "run_ids": [row["run_id"] for row in mean.runs],
        "config": anchor.config,
    }


def _claim(row: Row, history: History) -> dict[str, Any]:
    names = ("outcome", "delta", "interval_90", "p", "p_of_all_claims", "num_pairs", "passed_at", "rho", "gap")
    evidence = {*row["run_ids_candidate"], *row["run_ids_incumbent"]}
    num_disturbed = sum(run["run_id"] in evidence for run in history.ended if run["flags"])
    told = {name: row[name] for name in names} | {"num_disturbed": num_disturbed}
    return told | {"is_gap_wide": row["is_gap_wide"], "decision_id": row["decision_id"]}


def _change(history: History, decision: Row) -> dict[str, Any]:
    """Its axis, old and new; of a jump, those of both axes beside each other."""
    changes = history.candidates[decision["proposal"]].first["changes"]
    if len(changes) == 1:
        return dict(zip(("axis", "old", "new"), changes[0], strict=True))
    return {
        name: ", ".join(str(change[place]) for change in changes) for place, name in enumerate(("axis", "old", "new"))
    }


def _rank(entries: list[dict[str, Any]]) -> None:
    """Proven ones have a rank, and share it when they are closer than a standard error."""
    rank, before = 0, None
    for position, entry in enumerate(entries, start=1):
        if entry["state"] != "verified":
            entry["rank"] = None
            continue
        if before is None or entry["nats_per_byte"] - before["nats_per_byte"] >= entry["se"]:
            rank = position
        entry["rank"], before = rank, entry


def _header(history: History, noise: Noise | None) -> dict[str, Any]:
    assert history.campaign is not None
    placebos = [row for row in history.decisions if row["placebo"] and row["outcome"] != "not_judged"]
    resets = [row for row in history.decisions if row["outcome"] == "drift_reset"]
    costs = [row["cost_usd"] for row in history.ended if row["cost_usd"] is not None]
    spent = [row["total_s"] for row in history.ended if row["total_s"] is not None]
    return {
        "study": history.study.name,
        "campaign_id": history.campaign["campaign_id"],
        "program": history.study.program,
        "data": history.study.data,
        "budget_s": history.study.budget_s,
        "acceptance": history.study.acceptance,
        "cell": history.cell,
        "noise": {"s": noise.s, "df": noise.df} if noise else None,
        "num_runs": history.num_ended,
        "num_judged": history.num_judged,
        "num_by_status": dict(sorted(Counter(row["status"] for row in history.ended).items())),
        "disturbed": _disturbed(history),
        "hours": sum(spent) / 3600 if spent else None,
        "cost_usd": sum(costs) if costs else None,
        "answers": _answers(history),
        "placebos": {"num_judged": len(placebos), "num_kept": sum(row["moves_anchor"] for row in placebos)},
        "drift_resets": len(resets),
    }


def _answers(history: History) -> dict[str, int]:
    """Proposals that a command was asked for, answers that were refused, proposals that were made in its place."""
    told = [candidate.first["proposer"] for candidate in history.candidates.values()]
    asked = [made for made in told if "refused" in made]
    refused = sum(len(made["refused"]) for made in asked)
    return {"asked": len(asked), "refused": refused, "replaced": sum("instead_of" in made for made in asked)}


def _disturbed(history: History) -> dict[str, Any]:
    """Runs on a machine that was busy or wavered: how many count all the same, how many do not, what was measured."""
    flagged = [row for row in history.ended if row["flags"]]
    num_used = sum(row["status"] == OK for row in flagged)
    num_left_out = sum(row["status"] == "invalid_machine" for row in flagged)
    words = disturbed.in_words([row["validity"] for row in flagged])
    return {"num_used": num_used, "num_left_out": num_left_out, "words": words}


def floors(history: History) -> dict[str, float]:
    """What counting alone reaches on this text, nats per byte."""
    known = next((run.row["floors"] for run in history.runs if run.status == OK and run.row["floors"]), {})
    return {name: value for name, value in known.items() if isinstance(value, int | float)}


def _told(row: Row, history: History) -> dict[str, Any]:
    names = ("decision_id", "outcome", "delta", "se", "placebo", "reason", "proposal", "candidate_hash")
    change = _change(history, row) if row["proposal"] is not None else None
    return {name: row[name] for name in names} | {"change": change}


def ledger(history: History) -> dict[str, list[dict[str, Any]]]:
    """By axis: every change that was judged. Placebos changed nothing, so they are not here."""
    ledger: dict[str, list[dict[str, Any]]] = {axis.name: [] for axis in history.space.axes}
    for row in history.decisions:
        if row["proposal"] is None or row["placebo"]:
            continue
        changes = history.candidates[row["proposal"]].first["changes"]
        for axis, old, new in changes:
            beside = [other for other, _, _ in changes if other != axis]
            tried = {"old": old, "new": new, "outcome": row["outcome"], "delta": row["delta"]}
            ledger[axis].append({**tried, "beside": beside, "reason": row["reason"]})
    return ledger


def _best(history: History, board: dict[str, Any]) -> dict[str, Any]:
    if history.verified is None:
        return {"config": None, "reason": f"nothing is proven yet; hotlap research verify {history.study.name}"}
    entry = next(entry for entry in board["entries"] if entry["config_hash"] == history.verified["candidate_hash"])
    evidence = history.verified["run_ids_candidate"] + history.verified["run_ids_incumbent"]
    return _named(entry) | {"claim": entry["claim"], "evidence": evidence}


def _anchor(history: History, board: dict[str, Any]) -> dict[str, Any]:
    own = [entry for entry in board["entries"] if entry["config_hash"] == history.anchor.config_hash]
    if not own:
        return {"config": history.anchor.config, "config_hash": history.anchor.config_hash, "state": None}
    return _named(own[0]) | {"evidence": own[0]["run_ids"]}


def _named(entry: dict[str, Any]) -> dict[str, Any]:
    names = ("config", "config_hash", "state", "nats_per_byte", "bpb", "se", "num_runs", "is_after_choice")
    return {name: entry[name] for name in names}


# --- charts, as numbers ---


def plots(history: History) -> dict[str, Any]:
    """Progress, response of every axis, prediction against outcome, fairness of the clock, two loss curves."""
    runs = sorted(history.runs, key=lambda run: run.run_id)
    ok = [run for run in runs if run.status == OK]
    best = history.anchor.config_hash
    near = [(run.config, run.loss, _changes(run.config, history.anchor.config)) for run in ok]
    curves = {run.config_hash: run.row["loss_curve"] for run in ok}
    base = history.anchors[0].config_hash
    return {
        "progress": [[run.run_id, run.role, run.status, run.loss if run.status == OK else None] for run in runs],
        "anchor": [[a.runs[0]["run_id"], fmean(a.losses)] for a in history.anchors if a.runs],
        "noise": history.noise().s if history.groups.get(base) else None,
        "floors": floors(history),
        "response": {
            axis.name: [[config[axis.name], loss] for config, loss, changed in near if changed <= {axis.name}]
            for axis in history.space.axes
        },
        "prediction": [
            [run.row["proposer"]["mu"], run.row["proposer"]["sd"], run.loss]
            for run in ok
            if run.role == "screen" and run.row["proposer"]["mu"] is not None
        ],
        "clock": [
            [run.run_id, run.row["tokens_per_s"], (run.row["validity"] or {}).get("wall_over_charged")] for run in runs
        ],
        "curves": {"baseline": curves.get(base), "anchor": curves.get(best)},
    }


def _changes(config: Settings, anchor: Settings) -> set[str]:
    """Axes on which a configuration is not the anchor."""
    return {name for name, value in anchor.items() if config[name] != value}


# --- for people ---


def _markdown(history: History, board: dict[str, Any]) -> str:
    header, entries = board["header"], board["entries"]
    lines = [f"# {_safe(header['study'])}", "", *_header_lines(header), ""]
    columns = "| rank | config | state | bpb | nats/byte | runs | gain on baseline | change | params | tokens/s |"
    lines += [columns, "| ---: | --- | --- | ---: | ---: | ---: | --- | --- | ---: | ---: |"]
    rows = [(entry["nats_per_byte"], _entry_line(entry)) for entry in entries if entry["state"] == "verified"]
    rest = [(entry["nats_per_byte"], _entry_line(entry)) for entry in entries if entry["state"] != "verified"]
    rest += [(value, _floor_line(name, value)) for name, value in board["floors"].items()]
    lines += [line for _, line in rows] + [line for _, line in sorted(rest)]
    lines += ["", "Means are over runs made after a configuration was chosen; * has none yet.", ""]
    lines += ["| decision | change | gain | outcome |", "| --- | --- | ---: | --- |"]
    lines += [_decision_line(row) for row in reversed(board["decisions"])]
    return "\n".join(lines) + "\n"


def _header_lines(header: dict[str, Any]) -> list[str]:
    noise, placebos, busy = header["noise"], header["placebos"], header["disturbed"]
    lost = f"{busy['num_used']} used, {busy['num_left_out']} left out ({_safe(busy['words'])})"
    told = "not measured yet" if noise is None else f"{noise['s']:.4f} nats/byte ({noise['df']} degrees of freedom)"
    statuses = ", ".join(f"{count} {status}" for status, count in header["num_by_status"].items()) or "none"
    cost = "" if header["cost_usd"] is None else f", ${header['cost_usd']:.2f}"
    answers = "{asked} proposals asked for, {refused} answers refused, {replaced} replaced".format(**header["answers"])
    hours = "-" if header["hours"] is None else f"{header['hours']:.2f} h"
    return [
        f"- budget {header['budget_s']:g} charged seconds, data {_safe(header['data'])}, rule {header['acceptance']}",
        f"- noise of one run: {told}",
        f"- runs: {statuses}; {header['num_judged']} proposals judged; {hours}{cost}",
        *([f"- disturbed runs: {lost}"] if busy["words"] else []),
        *([f"- {answers}"] if header["answers"]["asked"] else []),
        f"- placebos kept: {placebos['num_kept']} of {placebos['num_judged']}; drift resets: {header['drift_resets']}",
    ]


def _entry_line(entry: dict[str, Any]) -> str:
    interval = entry["interval_90"]
    gain = "" if interval is None else f"{entry['gain_on_baseline']:+.4f} [{interval[0]:+.4f}, {interval[1]:+.4f}]"
    cells = (
        entry["rank"] or "",
        f"`{entry['config_hash']}`",
        entry["state"],
        f"{entry['bpb']:.4f}",
        f"{entry['nats_per_byte']:.4f} ± {entry['se']:.4f}{'' if entry['is_after_choice'] else ' *'}",
        f"{entry['num_runs']}" + (f" ({entry['num_disturbed']} disturbed)" if entry["num_disturbed"] else ""),
        gain,
        _safe(_words(entry["change"])),
        "-" if entry["params"] is None else f"{entry['params']:,}",
        "-" if entry["tokens_per_s"] is None else f"{entry['tokens_per_s']:,.0f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def _floor_line(name: str, value: float) -> str:
    words = "without training" if name == "untrained" else f"{name} counts"
    return f"| | *{_safe(words)}* | floor | {value / _LN2:.4f} | {value:.4f} | | | | | |"


def _decision_line(row: dict[str, Any]) -> str:
    words = "placebo (no change)" if row["placebo"] else _words(row["change"])
    gain = "-" if row["delta"] is None else f"{row['delta']:+.4f}"
    return f"| {row['decision_id']} | {_safe(words)} | {gain} | {_safe(row['outcome'])}: {_safe(row['reason'])} |"


def _words(change: Mapping[str, Any] | None) -> str:
    return "" if change is None else f"{change['axis']} {change['old']} → {change['new']}"


def _safe(text: str) -> str:
    """Strangers' text within a table's cell."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")

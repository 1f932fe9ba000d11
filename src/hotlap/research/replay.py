"""A journal looked at again: whether it leads to its own decisions, and what another rule would make of its runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hotlap.research import acceptance, board, claim, plan, seeds, space
from hotlap.research.acceptance import Rule
from hotlap.research.history import OK, History, Row, StudyFolder, loss_of


def disagreements(rows: Sequence[Row], secret: bytes) -> list[str]:
    """Seeds and decisions in the journal that its own earlier rows and its secret do not lead to, in words."""
    history, found = History(), list[str]()
    for row in rows:
        if row["kind"] == "started" and (row["seed_init"], row["seed_data"]) != _seeds_of(row, secret):
            found.append(f"{row['run_id']}: its seeds are not the study's")
        if row["kind"] == "decision":
            is_claim = row["outcome"] in claim.VERDICTS
            action = (
                claim.next_in_verification(history, secret)
                if is_claim
                else plan.next_in_search(history, secret, "", None, lambda *_: None)
            )
            written = {key: value for key, value in row.items() if key != "at"}
            if not isinstance(action, plan.Decide):
                found.append(f"{row['decision_id']}: nothing was to be decided there")
            elif changed := sorted(key for key in action.row if action.row[key] != written.get(key)):
                found.append(f"{row['decision_id']}: {', '.join(changed)} should be otherwise")
        history.apply(row)
    return found


def _seeds_of(row: Row, secret: bytes) -> tuple[int, int]:
    """Both arms of a pair share the seed of their data."""
    pair = row["pair"]
    data = ("pair", pair["candidate_hash"], pair["number"], "data") if pair else (row["run_id"], "data")
    return seeds.number(secret, row["run_id"], "init"), seeds.number(secret, *data)


def stale_files(folder: StudyFolder, history: History) -> list[str]:
    """Files of the board that are not what the journal gives."""
    return [
        name
        for name, data in board.render(history).items()
        if not (folder.path / name).exists() or (folder.path / name).read_bytes() != data
    ]


@dataclass(frozen=True)
class Judgment:
    """What a rule makes of one proposal's runs. `kept` is None where it would have needed a run that was not made."""

    proposal: int
    change: str
    is_placebo: bool
    first_loss: float
    kept: bool | None
    was_kept: bool


def under(rule: Rule, history: History) -> list[Judgment]:
    """Every judged proposal under another rule. What that rule would have proposed instead cannot be known."""
    runs = history.groups.get(history.anchors[0].config_hash, [])
    base = [loss_of(run.row) for run in runs if run.role == "baseline"]
    if not base:  # every run of it failed, or there is none yet: nothing was proposed
        return []
    incumbent, s = (base[:1] if rule.confirm is None else base), history.noise().s
    found: list[Judgment] = []
    for candidate in history.candidates.values():
        if candidate.decision is None or not candidate.losses:
            continue
        kept = _kept(rule, incumbent, candidate.losses, s)
        is_placebo = candidate.decision["placebo"]
        if kept:
            incumbent = [candidate.losses[0] if rule.confirm is None else candidate.losses[-1]]
        change = space.in_words(candidate.first["changes"])
        was_kept = candidate.decision["moves_anchor"]
        found.append(Judgment(candidate.number, change, is_placebo, candidate.losses[0], kept, was_kept))
    return found


def _kept(rule: Rule, incumbent: Sequence[float], losses: Sequence[float], s: float) -> bool | None:
    judged = acceptance.judge_screen(rule, incumbent, losses[0], s)
    if judged.outcome != "confirm":
        return judged.moves_anchor
    if len(losses) < 2:
        return None
    return acceptance.judge_confirm(rule, incumbent, (losses[0], losses[1]), s).moves_anchor


def summary(judgments: Sequence[Judgment], history: History) -> dict[str, Any]:
    """Counts, and the gain that the rule would have reported."""
    kept = [judgment for judgment in judgments if judgment.kept]
    base = next((run for run in history.runs if run.role == "baseline" and run.status == OK), None)
    return {
        "num_judged": len(judgments),
        "num_kept": len(kept),
        "num_kept_placebos": sum(judgment.is_placebo for judgment in kept),
        "num_undecided": sum(judgment.kept is None for judgment in judgments),
        "num_kept_then": sum(judgment.was_kept for judgment in judgments),
        "reported_gain": loss_of(base.row) - kept[-1].first_loss if kept and base else 0.0,
    }

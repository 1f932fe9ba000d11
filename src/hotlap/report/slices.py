"""A run's slices as flat rows: how each ended, its figures, and where its seconds went."""

from typing import Any

from hotlap.runs import SliceState

PHASES = (*("interpreter", "imports", "load", "data", "resume", "steps", "evaluation", "publish", "other", "exit"),)
COLUMNS = (
    *("number", "ending", "resumed_at", "step", "tokens_per_s", "goodput", "wall_s", "step_p50_s", "step_p95_s"),
    *PHASES,
)


def slice_row(state: SliceState) -> dict[str, Any]:
    """Phases in seconds; None where it gave no account."""
    result, seen = state.result or {}, state.exit or {}
    timeline = result.get("timeline", {})
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {"number": state.number, "ending": state.ending}
    row |= {key: result.get(key) for key in ("resumed_at", "step", "tokens_per_s")}
    row |= {key: timeline.get(key) for key in ("goodput", "step_p50_s", "step_p95_s")}
    row |= timeline.get("phases_s", {})
    row["wall_s"] = seen.get("wall_s", timeline.get("elapsed_s"))
    if seen.get("account_s") is not None:
        row["exit"] = max(0.0, seen["wall_s"] - seen["account_s"])
    return row

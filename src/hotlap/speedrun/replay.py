"""Decide again from what a verification left: the verdict from the report, the scores from the kept predictions."""

import json
import math
from pathlib import Path
from typing import Any

from hotlap import durable
from hotlap.errors import CorruptFile
from hotlap.speedrun.evaluate import is_right
from hotlap.speedrun.report import Report, decide_again


def replay(path: Path) -> dict[str, Any]:
    """`verdict`, and `scores`: of each run as its rows and predictions give it, or None where they are not kept.

    Raises:
        CorruptFile: the report says something else than its runs, or a run something else than its predictions.
    """
    try:
        report: Report = json.loads(path.read_bytes())
        decision = decide_again(report)
        said = report["decision"]["verdict"]
        if decision.verdict != said:
            reasons = "; ".join(decision.reasons)
            raise CorruptFile(f"{path} says {said}, and its runs give {decision.verdict}: {reasons}")
        metric = report["rules"]["metric"]
        scores = [_score_again(run, path.parent / f"run-{run['run']}", metric) for run in report["runs"]]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CorruptFile(f"{path} is no report of a verification: {type(error).__name__} {error}") from None
    return {"verdict": decision.verdict, "reasons": list(decision.reasons), "scores": scores}


def _score_again(run: dict[str, Any], folder: Path, metric: dict[str, Any]) -> float | None:
    rows_path, predictions_path = folder / "test.jsonl", folder / "predictions.jsonl"
    if run["score"] is None or not (rows_path.is_file() and predictions_path.is_file()):
        return None
    for path, name in ((rows_path, "test_sha256"), (predictions_path, "predictions_sha256")):
        if durable.sha256_file(path) != run[name]:
            raise CorruptFile(f"{path} is not what run {run['run']} was scored on.")
    items = [json.loads(line) for line in predictions_path.read_text(encoding="utf-8").splitlines()]
    if metric["type"] == "loss":
        score = sum(item["loss_sum"] for item in items) / sum(item["num_tokens"] for item in items)
    else:
        rows = [json.loads(line) for line in rows_path.read_text(encoding="utf-8").splitlines()]
        right = [is_right(metric["rule"], item["text"], row) for item, row in zip(items, rows, strict=True)]
        score = sum(right) / len(rows)
    if not math.isclose(score, run["score"], rel_tol=1e-9):
        raise CorruptFile(f"Run {run['run']} claims {run['score']}, and its predictions give {score}.")
    return score

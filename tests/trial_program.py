"""A real trial program for tests: it keeps to the protocol of docs/research.md; its loss is analytic, with noise.

Its axes are eight numbers in [0, 1] whose best values are known. `trick` makes it fail the ways real trials fail, and
so do files in the folder that it is told to look at: `data` of the study.
"""

import json
import math
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

NUM_AXES = 8
BEST = [0.3, 0.7, 0.5, 0.6, 0.4, 0.45, 0.55, 0.5]
FLOOR = 2.0
TRICKS = (
    *("none", "nan", "inf", "huge", "nan_score", "zero", "crash", "hang", "sigkill", "memory", "no_score"),
    *("no_result", "disturbed", "diverged", "segfault", "no_lock", "bytes", "odd", "refuse"),
)


def axes() -> dict[str, dict[str, Any]]:
    numbers = {f"x{i}": {"default": 0.5, "kind": "linear", "low": 0.0, "high": 1.0, "choices": None} for i in range(8)}
    trick = {"default": "none", "kind": "choice", "low": None, "high": None, "choices": list(TRICKS)}
    return {**numbers, "trick": trick}


def true_loss(config: dict[str, Any]) -> float:
    """Nats per byte without noise: a bowl around BEST."""
    return FLOOR + sum((config[f"x{i}"] - BEST[i]) ** 2 for i in range(NUM_AXES))


def main(order_path: str) -> None:
    order = json.loads(Path(order_path).read_text())
    settings = json.loads(Path(order["data"]).read_text()) if order["data"] != "embedded" else {}
    config = order["config"]
    noise = random.Random(f"{order['seed_init']}/{order['seed_data']}").gauss(0, settings.get("noise", 0.005))
    trick = config["trick"]
    # What tests change while a study runs, as the world does.
    wish = Path(order["data"]).with_name("wish") if order["data"] != "embedded" else None
    if wish is not None and wish.exists() and trick == "none":
        trick = wish.read_text().strip()
    print(json.dumps({"fraction": 0.5, "loss": 2.5}), file=sys.stderr, flush=True)
    time.sleep(settings.get("sleep_s", 0.0))
    loss = true_loss(config) + noise
    finish(order, trick, loss, config)


def finish(order: dict[str, Any], trick: str, loss: float, config: dict[str, Any]) -> None:
    if trick == "crash":
        raise RuntimeError("this trial crashes")
    if trick == "refuse":
        print("error: no such text", file=sys.stderr)
        sys.exit(2)
    if trick == "hang":
        time.sleep(3600)
    if trick == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if trick == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if trick == "no_result":
        return
    status = {"nan": "nan", "inf": "nan", "huge": "diverged", "diverged": "diverged", "memory": "oom"}.get(trick, "ok")
    score: float | None = {"nan_score": math.nan, "zero": 0.0, "no_score": None}.get(trick, loss)
    # A failed trial may well print a score; here it is one that would be the best of all.
    score = -1.0 if status != "ok" else score
    flags = ["wall_over_charged"] if trick == "disturbed" else ["uneven_steps"]
    result = {
        "status": status,
        "error_class": None if status == "ok" else "Trick",
        "error_tail": None if status == "ok" else trick,
        "val_search_nats_per_byte": score,
        "val_search_bpb": None if score is None else score / math.log(2),
        "val_lock_nats_per_byte": score + 0.01 if "lock" in order["splits"] and trick != "no_lock" and score else None,
        "val_tokens": 1000,
        "val_bytes": 999 if trick == "bytes" else 1000,
        "floors": {"unigram": 3.0, "bigram": 2.4},
        "budget_s": order["budget_s"],
        "charged_s": order["budget_s"],
        "wall_s": order["budget_s"] * 1.1,
        "total_s": order["budget_s"] * 1.2,
        "steps": 100,
        "tokens": 10_000,
        "tokens_per_s": 500.0,
        "params": 1000 + round(1000 * config["x0"]),
        "peak_mem_mb": 10.0,
        "loss_curve": [[0.5, loss + 1], [1.0, loss]],
        "validity": {"wall_over_charged": 1.35 if trick == "disturbed" else 1.1, "flags": flags},
        "machine": {"cpu": "test", "cores": 2, "threads": order["threads"], "gpu": None, "torch": "none"},
        "data": {"sha256": "0" * 64},
        "config": config,
    }
    if trick == "odd":  # as somebody's own program may write it
        result |= {"machine": "mine", "validity": [], "floors": {"bigram": "low"}, "params": "many", "steps": True}
    line = json.dumps(result)
    out = Path(order["out"])
    staged = out.with_suffix(".part")
    staged.write_text(line)
    staged.rename(out)
    print(line)


if __name__ == "__main__":
    if sys.argv[1] == "--axes":
        print(json.dumps(axes()))
    else:
        main(sys.argv[1])

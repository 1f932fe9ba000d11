"""What the default GPT reaches in 20 charged seconds: three runs with seeds of their own, one after another.

`python -m benchmarks.gpt [FILE] [BUDGET_S] [AXIS=VALUE ...]`. Prints one JSON object: losses on both splits, tokens/s,
wall over charged time and flags of each run, their mean and spread, the floors, and the load before each run.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import spread
from hotlap.research.gpt import assignment

SEEDS = (1, 2, 3)
KEPT = ("val_search_nats_per_byte", "val_lock_nats_per_byte", "tokens_per_s", "steps", "epochs", "wall_s", "total_s")


def main() -> None:
    words = [word for word in sys.argv[1:] if "=" not in word]
    order: dict[str, Any] = {
        "config": dict(assignment(word) for word in sys.argv[1:] if "=" in word),
        "data": words[0] if words else "embedded",
        "budget_s": float(words[1]) if len(words) > 1 else 20.0,
        "splits": ["search", "lock"],
        "threads": int(os.environ.get("THREADS", os.cpu_count() or 1)),
    }
    runs: list[dict[str, Any]] = []
    for seed in SEEDS:
        load = os.getloadavg()[0]
        result = _run(order | {"seed_init": seed, "seed_data": 100 + seed})
        shown = {name: result[name] for name in ("status", *KEPT)}
        runs.append({"seed": seed, "load": round(load, 1), **shown, "validity": result["validity"]})
    losses = [run["val_search_nats_per_byte"] for run in runs]
    print(json.dumps({
        "mean": statistics.mean(losses), "sd": statistics.stdev(losses), "floors": result["floors"],
        "tokens_per_s": spread([run["tokens_per_s"] for run in runs]), "runs": runs,
        "config": result["config"], "params": result["params"], "machine": result["machine"], "data": result["data"],
    }))  # fmt: skip


def _run(order: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.json"
        path.write_text(json.dumps(order))
        command = [sys.executable, "-m", "hotlap.research.gpt", str(path)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()

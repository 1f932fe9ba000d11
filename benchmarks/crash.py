"""SIGKILL the real model's slices at random moments, N times, and compare every finished run with one never cut.

`make crash N=200`. Slices are real processes on real files; they share only the seconds of importing torch
and of reading the frozen base model (`tests/zygote.py`). Prints one JSON object; exits 1 at the first difference.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from hotlap import artifacts, durable, runs
from hotlap.config import RunConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from zygote import Zygote

_LATEST_KILL = 0.4  # of an uncut run's time, since a resumed slice has less to do
DATASET = Path(__file__).resolve().parent.parent / "src/hotlap/cli/demo_identity.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    base = artifacts.fetch("smollm2-135m", lambda text: print(text, file=sys.stderr))
    scratch = Path(tempfile.mkdtemp(prefix="hotlap-crash-"))
    zygote = Zygote(scratch, base)
    began_s = time.monotonic()
    right = _uncut(zygote, scratch)
    uncut_s = time.monotonic() - began_s
    chance = random.Random(options.seed)
    kills, num_runs, resumed_at, phases = 0, 0, Counter[int](), Counter[str]()
    while kills < options.kills:
        config = _config(scratch / f"run-{num_runs}")
        while kills < options.kills:
            process = zygote.start(config, "patches:publish_often")
            time.sleep(chance.uniform(0.0, uncut_s * _LATEST_KILL))
            was_over = process.is_over()
            process.kill()
            if process.wait() == 0:
                break
            kills += not was_over
            phases[_reached(process.events())] += 1
            print(f"{kills} kills", end="\r", file=sys.stderr)
        last = zygote.run(config)
        assert last.status == 0, last.talk()
        resumed_at[last.result().get("resumed_at", -1)] += 1
        if _state(config) != right:
            sys.exit(f"run {num_runs} differs from the uncut one: {scratch}")
        num_runs += 1
        shutil.rmtree(config.output_dir)
    zygote.close()
    shutil.rmtree(scratch)
    print(json.dumps({
        "kills": kills, "finished_runs_compared": num_runs, "differences": 0, "killed_after": dict(phases),
        "uncut_run_s": round(uncut_s, 1), "seconds": round(time.monotonic() - began_s), "cores": os.cpu_count(),
    }))  # fmt: skip


def _config(output_dir: Path) -> RunConfig:
    return RunConfig.model_validate({
        "base_model": "smollm2-135m", "dataset": str(DATASET), "output_dir": str(output_dir), "run": "crash", "seed": 1,
        "data": {"seq_len": 64, "eval_examples": 1}, "lora": {"rank": 8, "dropout": 0.05}, "optim": {"lr": 1e-3},
        "model": {"precision": "float32"},
        "train": {"max_steps": 5}, "eval": {"every_steps": 3}, "slice": {"num_threads": 1},
    })  # fmt: skip


def _uncut(zygote: Zygote, scratch: Path) -> dict[str, str]:
    config = _config(scratch / "uncut")
    process = zygote.run(config)
    assert process.status == 0, process.talk()
    return _state(config)


def _state(config: RunConfig) -> dict[str, str]:
    run = runs.RunFolder(config.run_folder)
    newest = runs.newest_checkpoint(run, lambda text: None)
    assert newest is not None
    adapters = [folder / "adapter_model.safetensors" for folder in (run.adapter, run.best)]
    files = [*adapters, newest.folder / "optimizer.safetensors", run.metrics]
    return {f"{path.parent.name[:4]}/{path.name}": durable.sha256_file(path) for path in files}


def _reached(events: list[dict[str, object]]) -> str:
    """How far a killed slice had told to be."""
    return str(events[-1]["event"]) if events else "nothing"


if __name__ == "__main__":
    main()

"""Every technique alone, and all together, against none: the dates task of track c1 on a real model.

`python -m benchmarks.techniques MODEL_FOLDER [--minutes 10] [--repeats 3] [--only NAME...]`. One run of slices of
their own processes a variant and seed, the variants in turn. It starts no run when the minutes are over and goes on
where it stopped when it is called again: what was measured is in benchmarks/results/techniques.jsonl, a line a run.
The summary is printed and goes to benchmarks/results/techniques.json: ratios to `off` of the same seed.

`off` has every technique off, also those that are on by default. They are told by the table `[techniques]` itself, so
a new one is measured as soon as it is there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import spread
from hotlap import durable
from hotlap.config import RunConfig
from hotlap.config_techniques import TechniquesConfig

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks" / "results" / "techniques.jsonl"
SUMMARY = ROWS.with_suffix(".json")
NUM_STEPS = 12
PEAK_LR = 1e-3
SIX = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]
STAGED = {"after_step": 8, "top_layers": 8, "tail_passes": 2}
ONLY_ON_A_GPU = {"kernels"}


def plain_switches() -> list[str]:
    """Those that are on or off and nothing else. They are found, so that none is forgotten."""
    fields = TechniquesConfig.model_fields.items()
    return [name for name, info in fields if info.annotation is bool and name not in ONLY_ON_A_GPU]


def variants() -> dict[str, dict[str, Any]]:
    """Settings beside `off`, in which every plain switch is off."""
    sixteen = {"model": {"precision": "bfloat16"}}
    # A quarter fewer steps, and the same sum of learning rates.
    sum_of_rates = sum(lr_of(step) for step in range(1, NUM_STEPS + 1))
    shorter = {"techniques": {"integrated_lr": sum_of_rates}, "train": {"max_steps": NUM_STEPS * 3 // 4}}
    every = {**dict.fromkeys(plain_switches(), True), "staged": STAGED, "adapter_precision": "model"}
    return {
        "off": {},
        **{name: {"techniques": {name: True}} for name in plain_switches()},
        "pruned targets": {"lora": {"target_modules": SIX}},
        "staged": {"techniques": {"staged": STAGED}},
        "fewer steps, same integrated lr": shorter,
        "bfloat16 base": sixteen,
        "bfloat16 base and adapter": {**sixteen, "techniques": {"adapter_precision": "model"}},
        "everything": {"lora": {"target_modules": SIX}, "techniques": every},
    }


def lr_of(step: int) -> float:
    from hotlap.config import OptimConfig
    from hotlap.train.optim import lr_at

    return lr_at(step, NUM_STEPS, OptimConfig(lr=PEAK_LR, warmup_steps=2))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=None)
    arguments = parser.parse_args()
    names = [name for name in variants() if arguments.only is None or name in {"off", *arguments.only}]
    until_s = time.monotonic() + 60.0 * arguments.minutes
    ROWS.parent.mkdir(exist_ok=True)
    done = {(row["variant"], row["seed"]) for row in durable.read_rows(ROWS)}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["HOTLAP_HOME"] = f"{scratch}/home"
        write_data(Path(scratch))
        for seed in range(arguments.repeats):
            for name in names:
                if (name, seed) in done:
                    continue
                if time.monotonic() >= until_s:
                    print("The minutes are over; call again to go on.", file=sys.stderr)
                    summarize()
                    return
                row = {"variant": name, "seed": seed, **measured(config_of(arguments.model, Path(scratch), name, seed))}
                durable.append_rows(ROWS, [row])
                print(json.dumps(row), file=sys.stderr)
    summarize()


def write_data(scratch: Path) -> None:
    for split, num_rows in (("train", 600), ("test", 40)):
        command = [sys.executable, str(ROOT / "tracks/c1/generate.py"), "--split", split]
        told = subprocess.run(
            [*command, "--seed", "techniques", "--rows", str(num_rows)], check=True, capture_output=True, text=True
        ).stdout
        rows = [json.loads(line)["row"] for line in told.splitlines()]
        texts = [{"prompt": f"Text: {row['question']}\nDate:", "completion": f" {row['answer']}"} for row in rows]
        (scratch / f"{split}.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))


def config_of(model: Path, scratch: Path, name: str, seed: int) -> RunConfig:
    tree: dict[str, Any] = {
        "base_model": str(model),
        "dataset": str(scratch / "train.jsonl"),
        "output_dir": str(scratch / "runs"),
        "run": f"{name.replace(' ', '-').replace(',', '')}-{seed}",
        "seed": seed,
        "data": {"seq_len": 256, "eval_dataset": str(scratch / "test.jsonl")},
        "packing": {"method": "best-fit"},
        "model": {"precision": "float32"},
        "optim": {"lr": PEAK_LR, "warmup_steps": 2},
        "train": {"max_steps": NUM_STEPS, "micro_batch_rows": 2},
        "techniques": dict.fromkeys(plain_switches(), False),
    }
    for section, values in variants()[name].items():
        tree[section] = {**tree.get(section, {}), **values}
    return RunConfig.model_validate(tree)


def measured(config: RunConfig) -> dict[str, Any]:
    """A run from the first process's start to the last one's exit; what its steps took, and what it learned."""
    order = json.dumps({"config": config.model_dump(mode="json")})
    began_s, steps_s, num_tokens, code = time.monotonic(), 0.0, 0, 75
    while code == 75:
        process = subprocess.run(
            [sys.executable, "-m", "hotlap.train.slice", order], capture_output=True, text=True, check=False
        )
        code = process.returncode
        result = json.loads(process.stdout.splitlines()[-1])
        steps_s += result["timeline"]["phases_s"]["steps"]
        num_tokens += result.get("num_tokens", 0)
    if code:
        raise SystemExit(f"{config.run} ended with {code}: {process.stderr}")
    rows = durable.read_rows(config.run_folder / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    return {
        "wall_s": round(time.monotonic() - began_s, 2),
        "steps_s": round(steps_s, 2),
        "tokens_per_s": round(num_tokens / steps_s, 1),
        "num_steps": len(losses),
        "last_loss": sum(losses[-3:]) / 3,
        "val_loss": next(row["val_loss"] for row in reversed(rows) if "val_loss" in row),
        "load": float(Path("/proc/loadavg").read_text().split()[0]),
    }


def summarize() -> None:
    rows = durable.read_rows(ROWS)
    off = {row["seed"]: row for row in rows if row["variant"] == "off"}
    summary: dict[str, Any] = {"load": spread([row["load"] for row in rows])}
    for name in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == name and row["seed"] in off]
        if not mine:
            continue
        summary[name] = {
            "runs": len(mine),
            **{
                f"{key}, of off": spread([row[key] / off[row["seed"]][key] for row in mine])
                for key in ("wall_s", "steps_s", "tokens_per_s")
            },
            **{key: spread([row[key] for row in mine]) for key in ("tokens_per_s", "last_loss", "val_loss")},
        }
    SUMMARY.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()

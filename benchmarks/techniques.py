"""Every technique alone, and all together, against none: the dates task of track c1 on a real model.

`python -m benchmarks.techniques MODEL_FOLDER [--minutes 10] [--repeats 3] [--only NAME...]`. One run of slices of
their own processes a variant and seed, the variants in turn. It starts no run when the minutes are over and goes on
where it stopped when it is called again: what was measured is in benchmarks/results/techniques.jsonl, a line a run, and
measured anew if that is removed. The summary is printed and goes to benchmarks/results/techniques.json: smallest,
median and largest of each figure, ratios of times to `off` of the same seed, and differences of losses to its.

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
TIMES = ("wall_s", "start_s", "steps_s", "tokens_per_s")
LOSSES = ("last_loss", "val_loss")
NUM_STEPS = 12
LAST_STEPS = 3
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
        "bfloat16 base, prepacked": {**sixteen, "techniques": {"prepacked_weights": True}},
        "everything": {"lora": {"target_modules": SIX}, "techniques": every},
    }


def lr_of(step: int) -> float:
    from hotlap.config import OptimConfig
    from hotlap.train.optim import lr_at

    return lr_at(step, NUM_STEPS, OptimConfig(lr=PEAK_LR, warmup_steps=2))


class Failed(Exception):
    """A run that did not end well."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=[name for name in variants() if name != "off"], metavar="NAME")
    arguments = parser.parse_args()
    names = [name for name in variants() if arguments.only is None or name in {"off", *arguments.only}]
    until_s = time.monotonic() + 60.0 * arguments.minutes
    ROWS.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["HOTLAP_HOME"] = f"{scratch}/home"
        has_failed = measure(arguments.model, Path(scratch), names, arguments.repeats, until_s)
    summarize(arguments.model.name)
    if has_failed:
        raise SystemExit("A run failed, see above; it is tried again at the next call.")


def measure(model: Path, scratch: Path, names: list[str], repeats: int, until_s: float) -> bool:
    """What is not measured yet, until the time is over. Returns whether a run failed."""
    has_failed = False
    done = {(row["variant"], row["seed"]) for row in durable.read_rows(ROWS) if row["model"] == model.name}
    write_data(scratch)
    for seed in range(repeats):
        is_warm = False
        for name in names:
            if (name, seed) in done:
                continue
            if time.monotonic() >= until_s:
                print("The minutes are over; call again to go on.", file=sys.stderr)
                return has_failed
            try:
                if not is_warm:
                    measured(warm_up_of(model, scratch, seed))
                    is_warm = True
                found = measured(config_of(model, scratch, name, seed))
            except Failed as error:
                print(f"{name}, seed {seed}: {error}", file=sys.stderr)
                has_failed = True
                continue
            row = {"variant": name, "seed": seed, "model": model.name, **found}
            durable.append_rows(ROWS, [row])
            print(json.dumps(row), file=sys.stderr)
    return has_failed


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


def warm_up_of(model: Path, scratch: Path, seed: int) -> RunConfig:
    """One step, so that none of the runs that are measured is the one that packs the data, reads the model from the
    disk, and finds the names that lean imports keep."""
    config = config_of(model, scratch, "off", seed)
    one_step = {"run": f"warm-up-{seed}", "train": config.train.model_copy(update={"max_steps": 1})}
    return config.model_copy(update={**one_step, "techniques": TechniquesConfig()})


def measured(config: RunConfig) -> dict[str, Any]:
    """A run from the first process's start to the last one's exit; what its steps took, and what it learned.

    Raises:
        Failed: a slice did not end well.
    """
    order = json.dumps({"config": config.model_dump(mode="json")})
    began_s, num_tokens, timelines = time.monotonic(), 0, list[dict[str, Any]]()
    code = 75
    while code == 75:
        process = subprocess.run(
            [sys.executable, "-m", "hotlap.train.slice", order], capture_output=True, text=True, check=False
        )
        code = process.returncode
        if code not in (0, 75):
            raise Failed(f"exit {code}: {process.stderr[-1500:]}")
        result = json.loads(process.stdout.splitlines()[-1])
        timelines.append(result["timeline"])
        num_tokens += result.get("num_tokens", 0)
    steps_s = sum(timeline["phases_s"]["steps"] for timeline in timelines)
    rows = durable.read_rows(config.run_folder / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    last = losses[-LAST_STEPS:]
    return {
        "wall_s": round(time.monotonic() - began_s, 2),
        "start_s": timelines[0]["first_step_at_s"],
        "steps_s": round(steps_s, 2),
        "tokens_per_s": round(num_tokens / steps_s, 1),
        "num_steps": len(losses),
        "last_loss": sum(last) / len(last),
        "val_loss": next(row["val_loss"] for row in reversed(rows) if "val_loss" in row),
        "load": float(Path("/proc/loadavg").read_text().split()[0]),
    }


def summarize(model: str) -> None:
    rows = [row for row in durable.read_rows(ROWS) if row["model"] == model]
    off = {row["seed"]: row for row in rows if row["variant"] == "off"}
    summary: dict[str, Any] = {"model": model}
    if rows:
        summary["load"] = spread([row["load"] for row in rows])
    for name in variants():
        mine = [row for row in rows if row["variant"] == name and row["seed"] in off]
        if not mine:
            continue
        summary[name] = {
            "runs": len(mine),
            **{key: spread([row[key] for row in mine]) for key in (*TIMES, *LOSSES)},
            **{f"{key}, of off": spread([row[key] / off[row["seed"]][key] for row in mine]) for key in TIMES},
            **{f"{key}, less off's": spread([row[key] - off[row["seed"]][key] for row in mine]) for key in LOSSES},
        }
    SUMMARY.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()

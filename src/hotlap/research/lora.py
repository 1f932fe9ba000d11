"""A trial that fine-tunes: `python -m hotlap.research.lora ORDER.json` trains LoRA for a charged time and scores it.

The order's `data` is a run's TOML file: base model, data set, and a held-out JSONL file (`data.eval_dataset`), whose
lines are divided in turn between the two splits. A short run that learns nothing first measures the configuration's
own time of a step, and what the base model scores (the floor `untrained`); then it is trained for as many steps as fit
the budget, each charged that time, so that a busy machine takes longer and learns the same. The score is nats per byte
of the held-out completions. `--sizes` tells what configurations would take, before any of them runs.

Every split is scored by a run of its own, with the same seed and steps: what is held out changes nothing that is
trained.
"""

import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotlap import artifacts, clock, durable, runs, supervise
from hotlap.config import RunConfig, load_run
from hotlap.data.estimate import most_memory_of, shape_of
from hotlap.data.packed import PackedDataset, Packing, open_packed
from hotlap.data.readers import read_examples
from hotlap.errors import ConfigError, HotlapError, TrainingFailed

AXES: dict[str, dict[str, Any]] = {
    "lr": {"kind": "log", "default": 2e-4, "low": 1e-5, "high": 1e-2},
    "rank": {"kind": "choice", "default": 16, "choices": [1, 2, 4, 8, 16, 32, 64, 128]},
    "alpha_per_rank": {"kind": "choice", "default": 2.0, "choices": [0.5, 1.0, 2.0, 4.0]},
    "targets": {"kind": "choice", "default": "all-linear", "choices": ["all-linear", "attention"]},
    "dropout": {"kind": "linear", "default": 0.0, "low": 0.0, "high": 0.3},
    "weight_decay": {"kind": "linear", "default": 0.0, "low": 0.0, "high": 0.3},
    "warmup": {"kind": "linear", "default": 0.05, "low": 0.0, "high": 0.3},
    "schedule": {"kind": "choice", "default": "cosine", "choices": ["cosine", "linear", "constant"]},
    "grad_accumulation": {"kind": "choice", "default": 4, "choices": [1, 2, 4, 8, 16]},
    "seq_len": {"kind": "choice", "default": 256, "choices": [64, 128, 256, 512, 1024]},
}
"""What a study may change, in the words of a study; `config_of` says what each is in a run."""

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_CALIBRATION_STEPS = 5
_NO_LR = 1e-30
_SLOWDOWN = 1.15
"""Steps that took longer than that, beside those of the calibration, were disturbed."""

_STATUSES = {"nan": "nan", "diverged": "diverged", "oom": "oom"}


@dataclass(frozen=True)
class Trained:
    """One run as it ended: nats per byte of its held-out split, and what the slices told."""

    nats_per_byte: float
    num_bytes: int
    num_targets: int
    num_tokens: int
    step_p50_s: float
    step_p95_s: float
    wall_s: float
    num_params: int


class TrialFailed(TrainingFailed):
    """A run of the trial did not finish. `status` is the trial's."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


def main(argv: list[str]) -> int:
    """Exit code 0 once there is a result, whatever its status; that of the error where the order makes no sense."""
    try:
        if argv[:1] == ["--axes"]:
            print(json.dumps(AXES))
        elif argv[:1] == ["--sizes"]:
            asked = json.load(sys.stdin)
            print(json.dumps(sizes(Path(asked["data"]), asked["configs"])))
        else:
            carry_out(json.loads(Path(argv[0]).read_text()))
    except HotlapError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def carry_out(order: dict[str, Any]) -> None:
    """Run an order, and leave its result."""
    began_s = clock.process_started_s()
    try:
        result = trial(order)
    except TrialFailed as error:
        result = {"status": error.status, "error_class": type(error).__name__, "error_tail": str(error)}
    result |= {"budget_s": order["budget_s"], "total_s": clock.monotonic_s() - began_s, "config": order["config"]}
    result |= {"machine": machine(order["threads"])}
    durable.replace(Path(order["out"]), durable.canonical_json(result).encode())
    print(durable.canonical_json(result))


def trial(order: dict[str, Any]) -> dict[str, Any]:
    """Calibrate, train and score; the fields of a run's row.

    Raises:
        ConfigError: the run's file cannot be used, or a held-out example is trained as well.
        TrialFailed: a run ended otherwise than done.
    """
    folder, budget_s = Path(order["out"]).parent, float(order["budget_s"])
    base = load_run(Path(order["data"]))
    splits = split_held_out(base, folder)
    # Steps that move nothing take as long as others, and what they leave is scored: the base model.
    still = {**order, "config": {**order["config"], "lr": _NO_LR}}
    untrained = train(config_of(base, still, folder, "calibration", splits["search"], _CALIBRATION_STEPS))
    step_s = untrained.step_p50_s
    num_steps = max(1, int(budget_s / step_s))
    trained = {
        split: train(config_of(base, order, folder, split, splits[split], num_steps)) for split in order["splits"]
    }
    search = trained["search"]
    slowdown = search.step_p50_s / step_s
    return {
        "status": "ok",
        "error_class": None,
        "error_tail": None,
        "val_search_nats_per_byte": search.nats_per_byte,
        "val_search_bpb": search.nats_per_byte / math.log(2),
        "val_lock_nats_per_byte": trained["lock"].nats_per_byte if "lock" in trained else None,
        "floors": {"untrained": untrained.nats_per_byte},
        "val_tokens": search.num_targets,
        "val_bytes": search.num_bytes,
        "charged_s": num_steps * step_s,
        "wall_s": search.wall_s,
        "steps": num_steps,
        "tokens": search.num_tokens,
        "tokens_per_s": search.num_tokens / (num_steps * step_s),
        "step_ms_p50": search.step_p50_s * 1000,
        "step_ms_p95": search.step_p95_s * 1000,
        "params": search.num_params,
        "validity": {"wall_over_charged": slowdown, "flags": ["wall_over_charged"] if slowdown > _SLOWDOWN else []},
        "data": {"sha256": durable.sha256_bytes(f"{_hash(base.dataset)}{_hash(base.data.eval_dataset)}".encode())},
    }


def split_held_out(base: RunConfig, folder: Path) -> dict[str, Path]:
    """The held-out file's lines, in turn, in a file for each split.

    Raises:
        ConfigError: the run has no held-out JSONL file, or one of a single line.
    """
    source = Path(base.data.eval_dataset or "")
    if not (source.is_file() and source.suffix == ".jsonl"):
        raise ConfigError("A LoRA study needs data.eval_dataset, a JSONL file, in the run's TOML file.")
    lines = [line for line in source.read_bytes().splitlines(keepends=True) if line.strip()]
    if len(lines) < 2:
        raise ConfigError(f"{source} has {len(lines)} examples; two splits need two.")
    paths = {split: folder / f"{split}.jsonl" for split in ("search", "lock")}
    for number, path in enumerate(paths.values()):
        durable.replace(path, b"".join(lines[number::2]))
    return paths


def config_of(
    base: RunConfig, order: dict[str, Any], folder: Path, name: str, held_out: Path, num_steps: int
) -> RunConfig:
    """The run that a study's configuration is."""
    axes = order["config"]
    tree = base.model_dump(mode="json")
    tree["lora"] |= {"rank": axes["rank"], "alpha": float(axes["rank"] * axes["alpha_per_rank"])}
    tree["lora"] |= {"dropout": axes["dropout"]}
    tree["lora"] |= {"target_modules": axes["targets"] if axes["targets"] == "all-linear" else _ATTENTION}
    tree["optim"] |= {name: axes[name] for name in ("lr", "weight_decay", "schedule")}
    tree["optim"] |= {"warmup_steps": round(axes["warmup"] * num_steps)}
    tree["train"] |= {"grad_accumulation": axes["grad_accumulation"], "max_steps": num_steps}
    tree["data"] |= {"seq_len": axes["seq_len"], "eval_dataset": str(held_out)}
    tree["eval"] |= {"every_steps": None}
    tree["slice"] |= {"num_threads": order["threads"]}
    # One seed for the adapter and the order of the data: both arms of a pair share it.
    return RunConfig.model_validate(tree | {"output_dir": str(folder), "run": name, "seed": order["seed_data"]})


def sizes(data: Path, configs: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Trained parameters and memory of configurations, by the formula of `hotlap preview`, every token trained."""
    base = load_run(data)
    shape = shape_of(artifacts.locate_model(base.base_model))
    found: list[dict[str, int]] = []
    for config in configs:
        run = config_of(base, {"config": config, "threads": 1, "seed_data": 0}, Path(), "sizes", Path("held_out"), 1)
        precision = "float32" if run.model.precision == "auto" else run.model.precision
        peak_bytes = most_memory_of(shape, run, precision).peak_bytes(run.train.micro_batch_rows)
        params = shape.num_adapter_parameters(run.lora)
        found.append({"params": params, "expected_mem_mb": math.ceil(peak_bytes / 2**20)})
    return found


def train(config: RunConfig) -> Trained:
    """Slices until the run is done.

    Raises:
        ConfigError: a held-out example is trained as well.
        TrialFailed: a slice ended otherwise.
    """
    wall_s, tokens, last_step, num_steps = 0.0, 0, 0, config.train.max_steps or 0

    def on_event(event: dict[str, Any]) -> None:
        nonlocal last_step
        if event["event"] == "step":
            last_step = event["step"]
            print(json.dumps({"fraction": last_step / num_steps, "loss": event["loss"]}), file=sys.stderr, flush=True)

    while True:
        end = supervise.run_slice(config, on_event, lambda line: print(line, file=sys.stderr))
        wall_s += end.wall_s
        tokens += (end.result or {}).get("num_tokens", 0)
        if not end.goes_on:
            break
    if end.result is None or end.exit_code != 0:
        message = end.result["message"] if end.result else end.end.last_words
        raise TrialFailed(_STATUSES.get(end.reason, "crash"), f"slice ended {end.reason}: {message}")
    return _trained(runs.RunFolder(config.run_folder), end.result, wall_s, tokens)


def _trained(run: runs.RunFolder, result: dict[str, Any], wall_s: float, num_tokens: int) -> Trained:
    identity = runs.read_identity(run)
    assert identity is not None
    val_loss = next(row["val_loss"] for row in reversed(durable.read_rows(run.metrics)) if "val_loss" in row)
    held_out = require_unseen(identity.packed)
    path = Path(identity.trajectory["data"]["eval_dataset"])
    num_bytes = sum(
        len(item.messages[index].content.encode()) for item in read_examples(path) for index in item.answers
    )
    timeline = result["timeline"]
    return Trained(
        nats_per_byte=val_loss * held_out.num_trained_tokens / num_bytes,
        num_bytes=num_bytes,
        num_targets=held_out.num_trained_tokens,
        num_tokens=num_tokens,
        step_p50_s=timeline["step_p50_s"],
        step_p95_s=timeline["step_p95_s"],
        wall_s=wall_s,
        num_params=(run.adapter / "adapter_model.safetensors").stat().st_size // 4,
    )


def require_unseen(packed: Mapping[str, str]) -> PackedDataset:
    """The held-out rows, from fingerprints of a run's `train` and `held_out`.

    Raises:
        ConfigError: one of their examples is trained as well.
    """
    train, held_out = open_packed(packed["train"]), open_packed(packed["held_out"])
    assert train is not None and held_out is not None
    if (leak := Packing(train, held_out).leak_in_words()) is not None:
        raise ConfigError(leak)
    return held_out


def _hash(path: str | None) -> str:
    return durable.sha256_file(Path(path)) if path is not None and Path(path).is_file() else str(path)


def machine(threads: int) -> dict[str, Any]:
    """What runs must share to be compared."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    torch = importlib.metadata.version("torch")
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": threads, "gpu": None, "torch": torch}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

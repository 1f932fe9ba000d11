"""What a slice needs against what `hotlap preview` says: peak memory of real slices, each a process of its own.

`python -m benchmarks.memory MODEL_FOLDER`. Two steps a setting. Prints a line of JSON a setting, then the errors.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import spread
from hotlap.config import RunConfig
from hotlap.data.estimate import memory_of, shape_of
from hotlap.data.prepare import locate, prepare

SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "4 rows": {"train": {"micro_batch_rows": 4}},
    "4 rows, recomputed": {"train": {"micro_batch_rows": 4}, "slice": {"gradient_checkpointing": True}},
    "prepacked": {"techniques": {"prepacked_weights": True}},
    "rank 64": {"lora": {"rank": 64}},
    "dora": {"lora": {"rank": 16, "dora": True}},
    "nf4": {"model": {"precision": "float32", "quantization": "nf4"}},
    "int8": {"model": {"precision": "float32", "quantization": "int8"}},
    "adamw8bit, rank 64": {"optim": {"kind": "adamw8bit"}, "lora": {"rank": 64}},
    "bfloat16, 4 rows": {"model": {"precision": "bfloat16"}, "train": {"micro_batch_rows": 4}},
}
NUM_STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", nargs="*", default=list(SETTINGS))
    arguments = parser.parse_args()
    errors: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["HOTLAP_HOME"] = f"{scratch}/home"
        data = Path(scratch) / "data.jsonl"
        rows = [{"prompt": f"Count from {i}.", "completion": " ".join(map(str, range(i, i + 90)))} for i in range(64)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for name in arguments.only:
            config = config_of(arguments.model, data, Path(scratch), name)
            found = measure(config, arguments.model)
            errors.append(found["estimated_bytes"] / found["measured_bytes"] - 1.0)
            print(json.dumps({"setting": name, **found, "error": round(errors[-1], 3)}), flush=True)
    print(json.dumps({"error": spread(errors), "|error|": spread([abs(error) for error in errors])}))


def config_of(model: Path, data: Path, scratch: Path, name: str) -> RunConfig:
    tree: dict[str, Any] = {
        "base_model": str(model),
        "dataset": str(data),
        "output_dir": str(scratch / "runs"),
        "run": name.replace(",", "").replace(" ", "-"),
        "seed": 7,
        "data": {"seq_len": 512},
        "model": {"precision": "float32"},
    }
    merged = {**tree, **SETTINGS[name]}
    merged["train"] = {"max_steps": NUM_STEPS, **SETTINGS[name].get("train", {})}
    return RunConfig.model_validate(merged)


def measure(config: RunConfig, model: Path) -> dict[str, int]:
    packing = prepare(config, 7, locate(config), model, lambda text: None)
    estimated = memory_of(shape_of(model), config, packing.train).peak_bytes(config.train.micro_batch_rows)
    order = json.dumps({"config": config.model_dump(mode="json")})
    process = subprocess.Popen([sys.executable, "-m", "hotlap.train.slice", order], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{config.run} ended with {process.returncode}")
    return {"estimated_bytes": estimated, "measured_bytes": usage.ru_maxrss * 1024}


if __name__ == "__main__":
    main()

"""A merge against what it cannot do without: its time over copying the files plus loading, its memory over a shard.

`python -m benchmarks.export time MODEL_FOLDER ADAPTER_FOLDER [--repeats N]`: `hotlap export merge`'s process, proof
included, in turns with a process that copies the model's files (synced) and loads the model once. 135M: 20 s a repeat.

`python -m benchmarks.export memory [--shard-gb 1.0]`: a synthetic model of two shards (sparse files), the merge
alone, anonymous memory above what is there after the imports. A minute, and twice the shards on the disk.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import spread

COPY_AND_LOAD = """
import os, shutil, sys
from pathlib import Path
import hotlap.train
from hotlap.train.base import load_base
source, target = map(Path, sys.argv[1:])
shutil.copytree(source, target)
for path in target.iterdir():
    os.fsync(os.open(path, os.O_RDONLY))
load_base(source)
"""
MEMORY = """
import json, sys, threading
from pathlib import Path
from hotlap.export import merge
def anonymous():
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
base, adapter, target = map(Path, sys.argv[1:])
before, most, is_over = anonymous(), [0], threading.Event()
def watch():
    while not is_over.wait(0.02):
        most[0] = max(most[0], anonymous())
thread = threading.Thread(target=watch)
thread.start()
merge.merge(base, adapter, target, "base", None, lambda line: None)
is_over.set()
thread.join()
print(json.dumps({"baseline_bytes": before, "above_bytes": most[0] - before}))
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="what", required=True)
    timed = commands.add_parser("time")
    timed.add_argument("model", type=Path)
    timed.add_argument("adapter", type=Path)
    timed.add_argument("--repeats", type=int, default=5)
    memory = commands.add_parser("memory")
    memory.add_argument("--shard-gb", type=float, default=1.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.what == "time":
            print(json.dumps(times(arguments.model, arguments.adapter, Path(scratch), arguments.repeats)))
        else:
            print(json.dumps(memory_of(Path(scratch), int(arguments.shard_gb * 2**30))))


def times(model: Path, adapter: Path, scratch: Path, repeats: int) -> dict[str, Any]:
    order = {"base": str(model), "adapter": str(adapter), "precision": "base", "quantization": None}
    found: dict[str, list[float]] = {}
    for number in range(repeats):
        target = scratch / f"merged-{number}"
        text = json.dumps({**order, "chat_template": None, "packed": {}, "target": str(target)})
        merged = _spent([sys.executable, "-m", "hotlap.export.merge_task", text])
        copied = _spent([sys.executable, "-c", COPY_AND_LOAD, str(model), str(scratch / "copy")])
        for folder in (target, scratch / "copy"):
            shutil.rmtree(folder)
        for clock in merged:
            found.setdefault(f"merge_{clock}", []).append(merged[clock])
            found.setdefault(f"copy_and_load_{clock}", []).append(copied[clock])
            found.setdefault(f"ratio_{clock}", []).append(merged[clock] / copied[clock])
    return {"load_average": os.getloadavg()[0], **{name: spread(values) for name, values in found.items()}}


def memory_of(scratch: Path, shard_bytes: int) -> dict[str, Any]:
    adapter = make_model(scratch / "model", shard_bytes)
    argv = [sys.executable, "-c", MEMORY, str(scratch / "model"), str(adapter), str(scratch / "merged")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    adapter_bytes = (adapter / "adapter_model.safetensors").stat().st_size
    room = shard_bytes + adapter_bytes
    return {**found, "shard_bytes": shard_bytes, "adapter_bytes": adapter_bytes, "ratio": found["above_bytes"] / room}


def make_model(folder: Path, shard_bytes: int) -> Path:
    """Two shards of two bfloat16 matrices each, all zeros in sparse files, and an adapter on every one. Its folder."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    width = 4096
    rows = shard_bytes // 4 // width
    names = [f"model.layers.{number}.self_attn.q_proj" for number in range(4)]
    shards = {f"model-{number}.safetensors": names[2 * number : 2 * number + 2] for number in range(2)}
    for file_name, held in shards.items():
        header = {
            f"{name}.weight": {
                "dtype": "BF16",
                "shape": [rows, width],
                "data_offsets": [place * rows * width * 2, (place + 1) * rows * width * 2],
            }
            for place, name in enumerate(held)
        }
        text = json.dumps(header).encode()
        with (folder / file_name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + len(held) * rows * width * 2)
    weight_map = {f"{name}.weight": file_name for file_name, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    adapter = folder.with_name("adapter")
    adapter.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(16, width)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, 16)
    save_file(tensors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 16, "lora_alpha": 32}')
    return adapter


def _spent(argv: list[str]) -> dict[str, float]:
    """Seconds by the wall, and of processor time, which a crowded machine disturbs less."""
    started_s, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"s": time.perf_counter() - started_s, "cpu_s": cpu_s}


if __name__ == "__main__":
    main()

"""Training beside TRL's `SFTTrainer`: the same rows, adapter, optimizer and attention between examples, in turn.

`python -m benchmarks.trl MODEL_FOLDER --trl-python PYTHON`, with the Python of an environment that has TRL (the `bench`
extra). Packing is TRL's `bfd` with its completion-only loss, 512 tokens a step, float32 on a processor. TRL writes down
the rows that it made, and we train them. Prints one JSON object, and writes it to `benchmarks/results/trl.json`: losses
and their largest difference, tokens/s that are no padding, MFU against a float32 product of the same minutes, and
seconds from process start to the first forward pass.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import spread

RESULT = Path(__file__).parent / "results" / "trl.json"
SEQ_LEN = 512
RANK = 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--techniques", default="{}", help="[techniques] of a third side, as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = compare(arguments, Path(scratch))
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


def compare(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    order: dict[str, Any] = {
        "model": str(arguments.model.absolute()), "data": str(scratch / "data.jsonl"), "out": str(scratch / "trl.json"),
        "num_steps": arguments.steps, "seq_len": SEQ_LEN, "lr": 2e-4, "rank": RANK, "adapter": str(scratch / "adapter"),
        "num_threads": len(os.sched_getaffinity(0)),
    }  # fmt: skip
    Path(order["data"]).write_text("".join(json.dumps(row) + "\n" for row in examples(16 * arguments.steps)))
    ours({**order, "only_adapter": True})
    sides: dict[str, list[dict[str, Any]]] = {"trl": [], "hotlap": [], "hotlap with techniques": []}
    peaks: list[float] = []
    for repeat in range(arguments.repeats):
        print(f"repeat {repeat + 1}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
        # Without -P, this folder's trl.py would be TRL.
        run([arguments.trl_python, "-P", str(Path(__file__).with_name("trl_side.py")), json.dumps(order)])
        sides["trl"].append(json.loads(Path(order["out"]).read_text()))
        peaks.append(json.loads(ours({"gemm": order}))["flops"])
        sides["hotlap"].append(json.loads(ours(order)))
        if techniques := json.loads(arguments.techniques):
            sides["hotlap with techniques"].append(json.loads(ours({**order, "techniques": techniques})))
    return report(sides, peaks, arguments)


def report(sides: dict[str, list[dict[str, Any]]], peaks: list[float], arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {
        "steps": arguments.steps, "repeats": arguments.repeats, "load": os.getloadavg(), "cores": os.cpu_count(),
        "techniques": json.loads(arguments.techniques), "gemm_gflops": spread([peak / 1e9 for peak in peaks]),
    }  # fmt: skip
    # The floor for a frozen base: forward, and the gradient of its inputs; adapters and attention are left out.
    flops_per_token = 4 * num_linear_weights(arguments.model)
    theirs = sides["trl"]
    for side, runs in sides.items():
        if not runs:
            continue
        rates = [tokens_per_s(each) for each in runs]
        found[side] = {
            "tokens_per_s": spread(rates),
            "mfu": spread([rate * flops_per_token / peak for rate, peak in zip(rates, peaks, strict=True)]),
            "first_forward_s": spread([each["first_forward_s"] for each in runs]),
            "losses": runs[0]["losses"],
        }
        if side != "trl":
            ratios = [rate / tokens_per_s(other) for rate, other in zip(rates, theirs, strict=True)]
            both = zip(runs[0]["losses"], theirs[0]["losses"], strict=True)
            found[side]["tokens_per_s over trl"] = spread(ratios)
            found[side]["largest loss difference"] = max(abs(one - other) for one, other in both)
    return found


def tokens_per_s(side: dict[str, Any]) -> float:
    """Of the second step and later ones."""
    return sum(side["num_tokens"][1:]) / sum(side["step_s"][-(len(side["num_tokens"]) - 1) :])


def num_linear_weights(model: Path) -> int:
    shape = SimpleNamespace(**json.loads((model / "config.json").read_bytes()))
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    attention = 2 * shape.num_attention_heads * head + 2 * shape.num_key_value_heads * head
    return shape.num_hidden_layers * shape.hidden_size * (attention + 3 * shape.intermediate_size)


def examples(num: int) -> list[dict[str, str]]:
    """Counting, in answers of 8 to 90 numbers."""
    draw = random.Random(7)
    return [
        {"prompt": f"Count from {i}.", "completion": " " + " ".join(map(str, range(i, i + draw.randint(8, 90))))}
        for i in range(num)
    ]


def ours(order: dict[str, Any]) -> str:
    return run([sys.executable, "-m", "benchmarks.trl_ours", json.dumps(order)])


def run(argv: list[str]) -> str:
    """Standard output of a process that ends well."""
    # How OpenMP's threads wait is each side's own: TRL has torch's default, which spins, and slices have theirs.
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    began_s = time.perf_counter()
    process = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"{argv[:3]} ended with {process.returncode}:\n{process.stderr[-2000:]}")
    print(f"{argv[2].rpartition('/')[2]}: {time.perf_counter() - began_s:.0f} s", file=sys.stderr)
    return process.stdout


if __name__ == "__main__":
    main()

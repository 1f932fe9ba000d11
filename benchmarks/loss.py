"""The loss in chunks against all logits at once, at the size of Qwen2.5's head: memory and time, side by side.

`python -m benchmarks.loss [--repeats 3] [--threads 2]`, about two minutes on a quiet machine of two cores. Each
measurement is forward and backward in a process of its own, the two ways in turn, and its memory is what the process's
peak rose by, above weights and inputs. Prints one JSON object and writes it to benchmarks/results/loss.json.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import spread
from hotlap.child import with_waiting_threads

RESULT = Path(__file__).parent / "results" / "loss.json"
WAYS = ("all at once", "chunks")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--positions", type=int, default=4_096)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--way", choices=WAYS)
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measured(arguments)))
        return
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(arguments.repeats):
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.loss", *sys.argv[1:], "--way", way]
            found[way].append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
            print(way, found[way][-1], file=sys.stderr)
    full, chunked = found[WAYS[0]], found[WAYS[1]]
    logits_bytes = 4 * arguments.positions * arguments.vocabulary
    result = {
        "vocabulary": arguments.vocabulary,
        "positions": arguments.positions,
        "width": arguments.width,
        "threads": arguments.threads,
        "logits_bytes": logits_bytes,
        "extra memory, of the logits' bytes": {
            way: spread([one["extra_bytes"] / logits_bytes for one in found[way]]) for way in WAYS
        },
        "extra memory, chunks over all at once": spread(
            [one["extra_bytes"] / other["extra_bytes"] for one, other in zip(chunked, full, strict=True)]
        ),
        "seconds": {way: spread([one["seconds"] for one in found[way]]) for way in WAYS},
        "time, chunks over all at once": spread(
            [one["seconds"] / other["seconds"] for one, other in zip(chunked, full, strict=True)]
        ),
        "processor time, chunks over all at once": spread(
            [one["cpu_s"] / other["cpu_s"] for one, other in zip(chunked, full, strict=True)]
        ),
        "relative difference of the loss": abs(chunked[0]["loss"] / full[0]["loss"] - 1.0),
        "load": float(Path("/proc/loadavg").read_text().split()[0]),
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    os.environ |= with_waiting_threads(os.environ)  # as slices have it
    import torch

    from hotlap.config_techniques import chunk_positions
    from hotlap.train.loss import Head, summed_loss

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    linear = torch.nn.Linear(arguments.width, arguments.vocabulary, bias=False).requires_grad_(False)
    hidden_ND = torch.randn(arguments.positions, arguments.width, requires_grad=True)
    next_N = torch.randint(0, arguments.vocabulary, (arguments.positions,))
    chunk = None if arguments.way == WAYS[0] else chunk_positions(arguments.vocabulary)
    summed_loss(Head(linear), hidden_ND[:2], next_N[:2], chunk).backward()  # what a first call sets up
    before_bytes = peak_bytes()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    loss = summed_loss(Head(linear), hidden_ND, next_N, chunk)
    loss.backward()
    seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "extra_bytes": peak_bytes() - before_bytes,
        "loss": float(loss.detach()),
    }


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()

"""What the block mask costs, and what a step needs: a step of a real model, blocked and open, interleaved.

`python -m benchmarks.mask MODEL_FOLDER [--seq-len 256]`. Prints one JSON object: seconds a step, their ratio pair by
pair, and the peak memory of the process beside what `hotlap preview` estimates.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np

from benchmarks import spread
from hotlap.config import LoraConfig, OptimConfig, RunConfig
from hotlap.data.estimate import memory_of, shape_of
from hotlap.data.facts import Facts
from hotlap.data.packed import PackedDataset
from hotlap.train import model, optim
from hotlap.train.step import batch_loss, read_batch

EXAMPLE_TOKENS = 64
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--seq-len", type=int, default=256)
    arguments = parser.parse_args()
    shape, lora = shape_of(arguments.model), LoraConfig()
    data = rows_of(arguments.seq_len, shape.vocabulary)
    adapted = model.attach_lora(model.load_base(arguments.model), lora, 0, "base")
    optimizer = optim.build(adapted.parameters, OptimConfig())
    times_s: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(REPEATS + 1):
        for is_open, mine in times_s.items():
            began_s = time.perf_counter()
            batch_loss(adapted, read_batch(data, np.array([0])), is_open).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if repeat:
                mine.append(time.perf_counter() - began_s)
    ratios = [blocked / opened for blocked, opened in zip(times_s[False], times_s[True], strict=True)]
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({
        "seq_len": arguments.seq_len, "blocked_s": spread(times_s[False]), "open_s": spread(times_s[True]),
        "blocked over open": spread(ratios), "peak_bytes": peak_bytes,
        "estimated_bytes": memory_of(shape, RunConfig(base_model="m", dataset="d"), data, "float32").peak_bytes(1),
    }))  # fmt: skip


def rows_of(seq_len: int, vocabulary: int) -> PackedDataset:
    """One full row of examples, half of each trained."""
    tokens_NT = np.random.default_rng(0).integers(0, vocabulary, (1, seq_len)).astype(np.int32)
    segments_NT = (np.arange(seq_len)[None] // EXAMPLE_TOKENS + 1).astype(np.uint16)
    is_trained_NT = (np.arange(seq_len)[None] % EXAMPLE_TOKENS) >= EXAMPLE_TOKENS // 2
    num_trained = int(is_trained_NT.sum())
    facts = Facts(seq_len, 1, 1, int(segments_NT.max()), seq_len, num_trained, EXAMPLE_TOKENS, vocabulary - 1)
    return PackedDataset("mask", facts, tokens_NT, segments_NT, is_trained_NT, is_trained_NT.sum(axis=1))


if __name__ == "__main__":
    main()

"""Forward and backward of a step of a real model, each technique that changes it against the plain way, in turn.

`python -m benchmarks.step MODEL_FOLDER [--repeats 5] [--rows 2] [--threads 2]`, about two minutes on a quiet machine of
two cores. One process, one model a way, rows of 256 tokens in which half are trained, float32. Prints one JSON object
and writes it to benchmarks/results/step.json: seconds, and ratios to the plain way, pair by pair,
also of processor time, which other work on the machine changes less.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks import spread
from hotlap.child import with_waiting_threads

RESULT = Path(__file__).parent / "results" / "step.json"
SEQ_LEN = 256
MASK = "plain, by a mask"
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    MASK: {},
    "chunked_loss": {"chunked_loss": True},
    "fused_projections": {"fused_projections": True},
    "prepacked_weights": {"prepacked_weights": True},
    "all three": {"chunked_loss": True, "fused_projections": True, "prepacked_weights": True},
}
LAST = "all three, six targets"
SIX = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[*WAYS, LAST], help="ways, beside the plain one")
    arguments = parser.parse_args()
    os.environ |= with_waiting_threads(os.environ)  # as slices have it
    import torch

    from hotlap.config import LoraConfig
    from hotlap.config_techniques import TechniquesConfig
    from hotlap.train import model
    from hotlap.train.machine import use_threads
    from hotlap.train.step import Batch, batch_loss

    use_threads(arguments.threads)

    def adapted_for(name: str) -> Any:
        lora = LoraConfig(target_modules=SIX) if name == LAST else LoraConfig()
        techniques = TechniquesConfig(**WAYS.get(name, WAYS["all three"]))
        made = model.attach_lora(model.load_base(arguments.model), lora, 0, "base", techniques=techniques)
        if name != MASK:
            made.use_kernel("examples")
        made.peft_model.train()
        return made

    ways = {name: adapted_for(name) for name in dict.fromkeys(("plain", *arguments.only))}
    base: Any = ways["plain"].peft_model.get_base_model()
    tokens_BT = torch.randint(
        0, base.config.vocab_size, (arguments.rows, SEQ_LEN), generator=torch.Generator().manual_seed(0)
    )
    is_trained_BT = (torch.arange(SEQ_LEN) % 64 >= 32)[None].expand_as(tokens_BT)
    batch = Batch(tokens_BT, torch.arange(SEQ_LEN)[None].expand_as(tokens_BT) // 64 + 1, is_trained_BT)
    times_s: dict[str, list[float]] = {name: [] for name in ways}
    cpu_times_s: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, float] = {}
    for repeat in range(arguments.repeats + 1):
        for name, adapted in ways.items():
            adapted.peft_model.zero_grad(set_to_none=True)
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            loss = batch_loss(adapted, batch)
            loss.backward()
            losses[name] = float(loss.detach())
            if repeat:  # the first sets up
                times_s[name].append(time.perf_counter() - began_s)
                cpu_times_s[name].append(time.process_time() - began_cpu_s)
    result = {
        "tokens": arguments.rows * SEQ_LEN,
        "seconds": {name: spread(mine) for name, mine in times_s.items()},
        "of plain": of_plain(times_s),
        "of plain, processor time": of_plain(cpu_times_s),
        "relative difference of the loss": {name: abs(loss / losses["plain"] - 1.0) for name, loss in losses.items()},
        "load": float(Path("/proc/loadavg").read_text().split()[0]),
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def of_plain(times_s: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        name: spread([one / other for one, other in zip(mine, times_s["plain"], strict=True)])
        for name, mine in times_s.items()
    }


if __name__ == "__main__":
    main()

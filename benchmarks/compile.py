"""Whether torch.compile would repay itself in a slice: steps of a real model, plain and compiled, and the first call.

`python -m benchmarks.compile MODEL_FOLDER [--fused]`, some minutes on two cores; needs a C++ compiler. Rows of four
lengths, as packed rows have them. Prints one JSON object, with the steps after which a slice would have gained, and
writes it to benchmarks/results/compile.json.
"""

import argparse
import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import spread
from hotlap.child import with_waiting_threads

RESULT = Path(__file__).parent / "results" / "compile.json"
LENGTHS = (256, 250, 244, 239)
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--fused", action="store_true")
    arguments = parser.parse_args()
    os.environ |= with_waiting_threads(os.environ)  # as slices have it
    import torch

    from hotlap.config import LoraConfig
    from hotlap.config_techniques import TechniquesConfig
    from hotlap.train import attention, model
    from hotlap.train.machine import use_threads
    from hotlap.train.step import Batch, batch_loss

    use_threads(arguments.threads)
    techniques = TechniquesConfig(fused_projections=arguments.fused)

    def adapted_now() -> model.AdaptedModel:
        base = model.load_base(arguments.model)
        adapted = model.attach_lora(base, LoraConfig(), 0, "base", techniques=techniques)
        adapted.peft_model.train()
        return adapted

    def step_s(adapted: model.AdaptedModel, length: int) -> float:
        tokens_BT = torch.randint(0, num_tokens, (1, length), generator=torch.Generator().manual_seed(length))
        is_trained_BT = torch.arange(length)[None] >= length // 2
        adapted.peft_model.zero_grad(set_to_none=True)
        began_s = time.perf_counter()
        batch_loss(adapted, Batch(tokens_BT, torch.ones_like(tokens_BT), is_trained_BT)).backward()
        return time.perf_counter() - began_s

    as_it_is, to_compile = adapted_now(), adapted_now()
    if (kernel := attention.kernel_here("auto", "float32", as_it_is.device)[0]) != "mask":
        as_it_is.use_kernel(kernel)
    # It keeps the mask: a loop over examples would break the graph.
    for layer in to_compile.layers:
        layer.forward = torch.compile(layer.forward)
    base: Any = as_it_is.peft_model.get_base_model()
    num_tokens: int = base.config.vocab_size
    step_s(as_it_is, LENGTHS[0])
    plain = [step_s(as_it_is, length) for _ in range(REPEATS) for length in LENGTHS]
    first = [step_s(to_compile, length) for length in LENGTHS]
    compiled = [step_s(to_compile, length) for _ in range(REPEATS) for length in LENGTHS]
    saved_s = statistics.median(plain) - statistics.median(compiled)
    cost_s = sum(first) - len(first) * statistics.median(compiled)
    result = {
        "plain_s": spread(plain),
        "compiled_s": spread(compiled),
        "compiled over plain": round(statistics.median(compiled) / statistics.median(plain), 3),
        "compiling_s": round(cost_s, 1),
        "steps until repaid": math.ceil(cost_s / saved_s) if saved_s > 0 else None,
        "fused": arguments.fused,
        "load": float(Path("/proc/loadavg").read_text().split()[0]),
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""A merge and its proof, as a process of their own: `python -m hotlap.export.merge_task ORDER`.

The order, as JSON: `base` and `adapter` (folders), `target` (a folder that does not exist), `precision` (`base`,
`float32`, `bfloat16`, `float16`), `quantization` (a run's settings of `[model]`, or null), `chat_template` (a file or
null), `packed` (fingerprints of a run's rows). The result is the report.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

# Before torch, for which it sets the environment.
import hotlap.train  # isort: skip  # noqa: F401  # pyright: ignore[reportUnusedImport]
from hotlap.export.task import Say, do_task
from hotlap.train.lean import lean_imports


def work(order: dict[str, Any], say: Say) -> dict[str, Any]:
    # Half of what a small model's merge takes is imports. Quantized weights need them all.
    with nullcontext() if order["quantization"] else lean_imports():
        from hotlap.export import merge, proof

    base, adapter, target = (Path(order[name]) for name in ("base", "adapter", "target"))
    template = order["chat_template"] and Path(order["chat_template"])
    merged = merge.merge(base, adapter, target, order["precision"], template, say)
    say(f"Merged {sum(merged.kinds.values())} of {merged.num_tensors} tensors. Asking both models the same.")
    evidence = proof.prove(base, adapter, target, order["quantization"], order["packed"], say)
    return {**vars(merged), **evidence}


if __name__ == "__main__":
    do_task(work)

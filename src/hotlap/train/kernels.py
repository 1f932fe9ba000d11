"""Kernels of others, where they are present: said aloud in either case."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

_WITHOUT_ITS_LOSS = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Ours sums over trained positions only."""


def use_kernels(causal_lm: Any, say: Callable[[str], None]) -> bool:
    """Have Liger compute norms, rotation and feed-forward of the base model. Returns whether it does."""
    device: str = causal_lm.device.type
    if device != "cuda":
        say(f"techniques.kernels: Liger's kernels are for GPUs, and this machine trains on {device}; goes on without.")
        return False
    if find_spec("liger_kernel") is None:
        say("techniques.kernels: Liger is not installed; goes on without. To have it: pip install liger-kernel")
        return False
    from transformers.integrations.liger import apply_liger_kernel

    apply_liger_kernel(causal_lm, _WITHOUT_ITS_LOSS)
    say("techniques.kernels: Liger computes norms, rotation and feed-forward.")
    return True

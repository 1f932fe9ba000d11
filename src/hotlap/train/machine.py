"""What of this machine may change the rounding of a result: threads, versions, the kind of processor."""

import importlib.metadata
import os
import platform
from contextlib import suppress

import peft
import torch
import transformers

import hotlap


def use_threads(num_threads: int) -> int:
    torch.set_num_threads(num_threads)
    # Without it, cuBLAS is not deterministic and torch refuses products on a GPU.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_deterministic_debug_mode("error")  # as use_deterministic_algorithms does, which imports the compiler
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return num_threads


def versions() -> dict[str, str]:
    """What may change the rounding of a result."""
    found = {
        "hotlap": hotlap.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "processor": torch.backends.cpu.get_cpu_capability(),
    }
    with suppress(importlib.metadata.PackageNotFoundError):
        found["bitsandbytes"] = importlib.metadata.version("bitsandbytes")
    return found

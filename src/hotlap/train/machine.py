"""What of this machine may change the rounding of a result: threads, versions, the kind of processor."""

import importlib.metadata
import os
import platform
from functools import cache

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
    if (bitsandbytes := _version_of("bitsandbytes")) is not None:
        found["bitsandbytes"] = bitsandbytes
    return found


@cache
def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def seed(number: int) -> None:
    """As `torch.manual_seed`, for the devices that are in use. Torch's own also writes down the call stack three times
    at every call, in case a device comes into use later; a slice's comes before its first step."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)

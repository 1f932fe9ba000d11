"""What torch finds on this machine, and whether bfloat16 is worth using on it. `python -m hotlap.train.probe`.

One `result` event. Times are measured, since a processor without bfloat16 instructions still computes in it, slowly.
"""

import sys
from typing import Any

import torch

from hotlap import child, clock
from hotlap.errors import DONE
from hotlap.train.channel import events

_FIRST_SIZE = 256
_LARGEST_SIZE = 4096
_REPEATS = 20
_ENOUGH_S = 0.2
_AS_FAST = 1.2


def main() -> None:
    emit = events()
    child.die_with_parent()
    emit({"event": "result", "exit_code": DONE, "reason": "done", "message": "probed", **probe()})
    sys.exit(DONE)


def probe() -> dict[str, Any]:
    """The torch build, the devices it sees, and the time of a matrix product on the best of them."""
    device = best_device()
    num_threads = torch.get_num_threads()
    # A busy neighbor stalls all threads of a product as soon as there are two, and the ratio is the same with one.
    torch.set_num_threads(1)
    product = measure(device)
    uses_bfloat16, verdict = judge(product["float32_s"], product["bfloat16_s"])
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": device.type,
        "devices": _devices(device),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": num_threads,
        "matrix_product": product,
        "uses_bfloat16": uses_bfloat16,
        "verdict": verdict,
    }


def best_device() -> torch.device:
    # A CUDA build names CUDA as its accelerator also where there is none.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def judge(float32_s: float, bfloat16_s: float) -> tuple[bool, str]:
    """Whether to use bfloat16, and that in words. It halves memory, so being as fast is enough."""
    ratio = bfloat16_s / float32_s
    if ratio <= 1.0:
        return True, f"bfloat16: use ({1.0 / ratio:.1f} times as fast as float32)"
    if ratio <= _AS_FAST:
        return True, "bfloat16: use (as fast as float32)"
    return False, f"bfloat16: do not use ({ratio:.1f} times slower than float32)"


def measure(device: torch.device) -> dict[str, Any]:
    """Seconds of a square matrix product in both precisions, as large as can be told apart without waiting."""
    size = _FIRST_SIZE
    while True:
        float32_s, bfloat16_s = (_product_s(size, dtype, device) for dtype in (torch.float32, torch.bfloat16))
        # Twice the size takes eight times as long.
        if size == _LARGEST_SIZE or 8 * max(float32_s, bfloat16_s) > _ENOUGH_S:
            return {"size": size, "float32_s": float32_s, "bfloat16_s": bfloat16_s}
        size *= 2


def _product_s(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """The fastest of a few, or of one where one takes long."""
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    enough = clock.Deadline(clock.monotonic_s() + _ENOUGH_S)
    fastest_s = float("inf")
    for _ in range(_REPEATS):
        began_s = clock.monotonic_s()
        torch.mm(matrix, matrix)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        fastest_s = min(fastest_s, clock.monotonic_s() - began_s)
        if enough.is_over():
            break
    return fastest_s


def _devices(device: torch.device) -> list[dict[str, Any]]:
    """Name and memory of each accelerator; torch tells the memory of CUDA's only."""
    if device.type != "cuda":
        num_devices = torch.accelerator.device_count() if device.type != "cpu" else 0
        return [{"name": device.type, "memory_bytes": None}] * num_devices
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": properties.name, "memory_bytes": properties.total_memory} for properties in found]


if __name__ == "__main__":
    main()

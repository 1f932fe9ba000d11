"""Our side of `benchmarks.trl`: the rows that TRL packed, through the steps of a slice. The order is JSON."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hotlap.config import RunConfig
from hotlap.train.lean import lean_imports

_WIDTH = 2048


def main() -> None:
    order = json.loads(sys.argv[1])
    if "gemm" in order:
        print(json.dumps({"flops": gemm_flops(order["gemm"]["num_threads"])}))
        return
    config = RunConfig.model_validate({
        "base_model": order["model"], "dataset": order["data"], "seed": 7,
        "data": {"seq_len": order["seq_len"]}, "model": {"precision": "float32"},
        "lora": {"rank": order["rank"], "alpha": 2.0 * order["rank"]},
        "optim": {"lr": order["lr"], "schedule": "constant"}, "train": {"max_steps": order["num_steps"]},
        "techniques": order.get("techniques", {}),
    })  # fmt: skip
    import torch  # noqa: F401  (lean imports are made around it)

    with lean_imports():
        from hotlap.train import attention, model, optim
        from hotlap.train.machine import use_threads
    use_threads(order["num_threads"])
    base = model.load_base(Path(order["model"]), config.model)
    adapted = model.attach_lora(base, config.lora, 7, order["model"], None, None, config.techniques)
    folder = Path(order["adapter"])
    if order.get("only_adapter"):
        folder.mkdir()
        (folder / model.ADAPTER_FILE).write_bytes(model.save_tensors(dict(adapted.saved)))
        (folder / model.ADAPTER_CONFIG_FILE).write_bytes(adapted.adapter_config_json())
        return
    model.load_parameters(adapted.saved, model.load_tensors(folder / model.ADAPTER_FILE), folder)
    adapted.use_kernel(attention.kernel_here("auto", "float32", adapted.device)[0])
    print(json.dumps(steps(adapted, optim.build(adapted.parameters, config.optim), config, order)))


def steps(adapted: Any, optimizer: Any, config: RunConfig, order: dict[str, Any]) -> dict[str, Any]:
    from hotlap import clock
    from hotlap.train.step import Stepper

    rows = json.loads(Path(order["out"] + ".rows").read_text())
    opened: Any = SimpleNamespace(
        packing=SimpleNamespace(train=dataset_of(rows, order["seq_len"]), held_out=None),
        order=SimpleNamespace(rows_of_step=lambda step: [(step - 1) % len(rows)], num_steps=order["num_steps"]),
        identity=SimpleNamespace(seed=7, precision="float32"),
    )
    stepper = Stepper(adapted, optimizer, opened, config, on_out_of_memory=lambda _step, _rows: None)
    first_s = clock.monotonic_s() - clock.process_started_s()
    found: dict[str, Any] = {"first_forward_s": first_s, "losses": [], "step_s": [], "num_tokens": []}
    for step in range(1, order["num_steps"] + 1):
        began_s = time.perf_counter()
        result = stepper.forward_backward(step)
        stepper.apply(step)
        found["step_s"].append(time.perf_counter() - began_s)
        found["losses"].append(result.loss)
        found["num_tokens"].append(result.num_tokens)
    return found


def dataset_of(rows: list[dict[str, Any]], seq_len: int) -> Any:
    """TRL's packed rows as ours: its labels are the row's own tokens where they are trained, not shifted."""
    import numpy as np

    tokens_NT = np.zeros((len(rows), seq_len), dtype=np.int32)
    segments_NT = np.zeros((len(rows), seq_len), dtype=np.uint16)
    is_trained_NT = np.zeros((len(rows), seq_len), dtype=np.bool_)
    for at, row in enumerate(rows):
        length = len(row["input_ids"])
        tokens_NT[at, :length] = row["input_ids"]
        segments_NT[at, :length] = np.repeat(np.arange(1, len(row["seq_lengths"]) + 1), row["seq_lengths"])
        is_trained_NT[at, :length] = np.array(row["labels"]) != -100
    return SimpleNamespace(tokens_NT=tokens_NT, segments_NT=segments_NT, is_trained_NT=is_trained_NT)


def gemm_flops(num_threads: int) -> float:
    """Operations a second of a float32 product, the best of several."""
    import torch

    torch.set_num_threads(num_threads)
    one, other = torch.randn(_WIDTH, _WIDTH), torch.randn(_WIDTH, _WIDTH)
    times_s: list[float] = []
    for _ in range(8):
        began_s = time.perf_counter()
        one @ other
        times_s.append(time.perf_counter() - began_s)
    return 2 * _WIDTH**3 / min(times_s)


if __name__ == "__main__":
    main()

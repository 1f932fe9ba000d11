"""FP8 by llm-compressor, alone in an environment of its own: `python compress.py ORDER`.

The order, as JSON: `source` and `target` (folders), `ignore` (modules that stay as they are), `rows` (tokens, and for
each whether it counts in the loss). One line of JSON on standard output is the result. Weights are stored as float8
with a scale a channel, activations are to be rounded a token at a time (FP8_DYNAMIC of compressed-tensors). No data
is needed. Both models are then loaded and asked, in float32 arithmetic.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000", **os.environ}


def main() -> None:
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    order: dict[str, Any] = json.loads(sys.argv[1])
    source, target = Path(order["source"]), Path(order["target"])
    compress(source, target, order["ignore"])
    result = {"layers": layer_errors(source, target), **compared(source, target, order["rows"])}
    channel.write(json.dumps({"event": "result", "exit_code": 0, **result}) + "\n")
    channel.flush()


def compress(source: Path, target: Path, ignore: list[str]) -> None:
    from llmcompressor import model_free_ptq  # pyright: ignore[reportMissingImports]  (of its own environment)

    model_free_ptq(source, target, scheme="FP8_DYNAMIC", ignore=ignore, device="cpu")


def layer_errors(source: Path, target: Path) -> dict[str, float]:
    """Of every quantized weight: root mean square of its error over that of itself."""
    from safetensors import safe_open

    places: dict[str, Path] = {}
    for path in source.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            places |= dict.fromkeys(file.keys(), path)
    found: dict[str, float] = {}
    for path in sorted(target.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                if name.endswith(".weight_scale"):
                    weight = name.removesuffix("_scale")
                    stored = file.get_tensor(weight).float() * file.get_tensor(name).float()
                    with safe_open(places[weight], "pt") as before:
                        exact = before.get_tensor(weight).float()
                    found[weight] = float((stored - exact).norm() / exact.norm())
    return found


def compared(source: Path, target: Path, rows: list[dict[str, Any]]) -> dict[str, float]:
    """The loss of both models in nats per token, and how far their logits are apart, in standard deviations."""
    import torch

    plain, logits = _asked(source, rows)
    quantized, others = _asked(target, rows)
    spread = torch.cat([each.flatten() for each in logits]).std()
    apart = torch.cat([(a - b).flatten() for a, b in zip(logits, others, strict=True)])
    return {
        "val_loss_before": plain,
        "val_loss_fp8": quantized,
        "error_to_before": float(apart.square().mean().sqrt() / spread),
    }


def _asked(folder: Path, rows: list[dict[str, Any]]) -> tuple[float, list[Any]]:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    nats, count, kept = 0.0, 0, []
    with torch.inference_mode():
        for row in rows:
            logits_TV = model(torch.tensor([row["tokens"]]), use_cache=False).logits[0]
            losses_T = torch.nn.functional.cross_entropy(
                logits_TV[:-1], torch.tensor(row["tokens"][1:]), reduction="none"
            )
            is_kept_T = torch.tensor(row["is_trained"][1:], dtype=torch.bool)
            nats += float(losses_T[is_kept_T].sum())
            count += int(is_kept_T.sum())
            kept.append(logits_TV[-1].clone())
    return nats / max(1, count), kept


if __name__ == "__main__":
    main()

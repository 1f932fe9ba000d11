"""The proof of a merge: base with adapter and merged model are asked the same, and their logits have to agree.

Twice. The merged files must give the logits of PEFT's own merge, rounded once to their precision (`exact`), which
finds a wrong, missing or twice applied change however small it is. And they must give those of the unmerged model
but for that rounding (`rounding`). Errors are root mean squares, in units of the logits' standard deviation. What a
quantized run was trained against is another base: there the loss on the run's own rows is compared, and told.
"""

import math
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from hotlap.config import ModelConfig
from hotlap.errors import ProofFailed
from hotlap.export import tensors
from hotlap.export.rows import Row, encoded, loss_rows
from hotlap.export.task import Say
from hotlap.train.base import load_base
from hotlap.train.generate import num_tokens_of, trained_rows_of

EXACT = 1e-3
ROUNDING = {"F32": 1e-3, "F16": 0.02, "BF16": 0.15}
"""Largest errors that are taken, by the merged files' least precise type."""
LOSS_NATS = 0.05
"""A merged model that is worse by more than this than what was trained is told."""

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_WRAPPED = re.compile(r"^base_model\.model\.|\.base_layer|\.modules_to_save\.default|\.token_adapter")
"""What PEFT adds to a tensor's name."""

_NUM_TOKENS = 32
"""At the end of a prompt. Each meets every tensor but the embedding's other rows: more of them would find no more."""
_MOST_ADDED = 48
_MEMORY_FACTOR = 1.5

# T tokens of a prompt, V vocabulary


def prove(
    base: Path,
    adapter: Path,
    merged: Path,
    quantization: dict[str, Any] | None,
    fingerprints: dict[str, str],
    say: Say,
) -> dict[str, Any]:
    """What was compared, and how far it was apart.

    Raises:
        ProofFailed: the merged model is not the trained one.
    """
    settings = ModelConfig.model_validate({"precision": _precision(base, say)})
    rows = _rows(merged, adapter)
    plain, tuned, reference = _unmerged(base, adapter, settings, rows, merged)
    ours = logits_of(load_base(merged, settings), rows)
    spread = float(torch.cat([each.flatten() for each in tuned]).std())
    exact, rounding, effect = (error(a, b) / spread for a, b in ((ours, reference), (ours, tuned), (tuned, plain)))
    limit = ROUNDING[_word(merged)]
    found: dict[str, Any] = {
        "error_to_exact_merge": exact,
        "error_to_exact_merge_allowed": EXACT,
        "error_to_unmerged": rounding,
        "error_to_unmerged_allowed": limit,
        "adapter_effect": effect,
        "num_logits": sum(each.numel() for each in ours),
    }
    say(
        f"Logits, in standard deviations: {exact:.2g} from an exact merge (allowed {EXACT:g}), {rounding:.2g} from the "
        f"unmerged model (allowed {limit:g}); the adapter itself moves them by {effect:.2g}."
    )
    if not (exact <= EXACT and rounding <= limit):
        raise ProofFailed(
            f"The merged model does not say what base and adapter say: its logits are {exact:.3g} (allowed {EXACT:g}) "
            f"from an exact merge and {rounding:.3g} (allowed {limit:g}) from the unmerged model. Nothing is published."
        )
    if rounding > effect:
        say("Rounding moves the logits more than the adapter does. Export with --precision float32, or train more.")
    if quantization:
        trained = ModelConfig.model_validate({**quantization, "precision": settings.precision})
        found |= _against_trained(base, adapter, merged, trained, loss_rows(fingerprints, merged), say)
    return found


def _against_trained(
    base: Path, adapter: Path, merged: Path, trained: ModelConfig, rows: tuple[list[Row], str], say: Say
) -> dict[str, Any]:
    """The loss of what was trained, an adapter on a quantized base, and of the merged model."""
    kept, what = rows
    as_trained = mean_loss(_adapted(load_base(base, trained, num_tokens_of(adapter)), adapter), kept)
    as_merged = mean_loss(load_base(merged, ModelConfig(precision=trained.precision)), kept)
    say(
        f"The run was trained on its base in {trained.quantization}; merged is the unquantized one. Loss on {what}: "
        f"{as_trained:.4f} as trained, {as_merged:.4f} merged ({as_merged - as_trained:+.4f})."
    )
    if as_merged - as_trained > LOSS_NATS:
        say(
            f"The merged model is worse by more than {LOSS_NATS} nats per token. Serve the adapter on the quantized "
            f"base instead, or train on the unquantized base."
        )
    return {
        "val_loss_as_trained": as_trained,
        "val_loss_merged": as_merged,
        "trained_on": trained.quantization,
        "merged_into": "unquantized",
        "loss_rows": what,
    }


# --- what is asked ---


def _rows(model_folder: Path, adapter: Path) -> list[list[int]]:
    prompt = encoded(model_folder)[0]
    added = sorted({row for trained in trained_rows_of(adapter).values() for row in trained})
    return [prompt[-_NUM_TOKENS:], *([added[:_MOST_ADDED]] if added else [])]


# --- what they answer ---


def _unmerged(
    base: Path, adapter: Path, settings: ModelConfig, rows: list[list[int]], merged: Path
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Logits of the base alone, of the base with its adapter, and after PEFT's own merge, rounded once
    as the merged files are."""
    model = _adapted(load_base(base, settings, num_tokens_of(adapter)), adapter)
    with model.disable_adapter():
        plain = logits_of(model, rows)
    tuned = logits_of(model, rows)
    model.merge_adapter()
    words = {entry.name: entry.dtype for entry in tensors.all_entries(merged).values()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            word = words.get(_WRAPPED.sub("", name), _word(merged))
            parameter.copy_(parameter.to(_DTYPES[word]))
    return plain, tuned, logits_of(model, rows)


def _adapted(base: Any, adapter: Path) -> Any:
    # PEFT asks transformers for a property by the name it had before; nothing a user could change.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    return PeftModel.from_pretrained(base, str(adapter)).eval()


def logits_of(model: Any, rows: list[list[int]]) -> list[torch.Tensor]:
    """`[T, V]` of each row, in float32."""
    with torch.inference_mode():
        return [
            model.eval()(torch.tensor([tokens], device=model.device), use_cache=False).logits[0].float().cpu()
            for tokens in rows
        ]


def error(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    squares = sum(float((a - b).double().square().sum()) for a, b in zip(first, second, strict=True))
    return math.sqrt(squares / sum(each.numel() for each in first))


def mean_loss(model: Any, rows: list[Row]) -> float:
    """Nats per trained token."""
    nats, count = 0.0, 0
    for row in rows:
        (logits_TV,) = logits_of(model, [row.tokens])
        targets_T = torch.tensor(row.tokens[1:])
        kept_T = torch.tensor(row.is_trained[1:])
        losses_T = torch.nn.functional.cross_entropy(logits_TV[:-1], targets_T, reduction="none")
        nats += float(losses_T[kept_T].sum())
        count += int(kept_T.sum())
    return nats / max(1, count)


# --- in which precision ---


def _precision(base: Path, say: Say) -> str:
    """float32 where memory has room for it; else what the files have."""
    entries = tensors.all_entries(base).values()
    num_values = sum(math.prod(entry.shape) for entry in entries)
    if not torch.cuda.is_available() and _free_bytes() < _MEMORY_FACTOR * 4 * num_values:
        say("The models are compared in bfloat16: memory has no room for them in float32.")
        return "bfloat16"
    return "float32"


def _free_bytes() -> int:
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 1 << 62)


def _word(folder: Path) -> str:
    """The least precise type of a folder's weights, in safetensors' words."""
    present = {entry.dtype for entry in tensors.all_entries(folder).values()}
    return next(word for word in _DTYPES if word in present)

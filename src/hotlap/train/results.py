"""What a finished run leaves behind: `adapter/` and `best/`, as standard PEFT folders, made from checkpoints."""

import json
import math
from pathlib import Path
from typing import Any

import torch

from hotlap import durable, runs
from hotlap.train import model
from hotlap.train.assembly import TOKENIZER_FILES
from hotlap.train.optim import Named


class Results:
    """Makes result folders from checkpoints."""

    def __init__(
        self, run: runs.RunFolder, lock: runs.RunLock, adapted: model.AdaptedModel, tokenizer_folder: Path | None
    ) -> None:
        """`tokenizer_folder`: where the tokenizer lies that the result must carry, if it must. To be made before
        anything is trained or restored: PiSSA's first values are kept from it."""
        self._run, self._lock = run, lock
        self._tokenizer_folder = tokenizer_folder
        self._first = first_values(adapted.parameters) if adapted.starts_from_base else None

    def publish(self, checkpoint: Path, target: Path, facts: dict[str, Any]) -> None:
        """Put the adapter of a checkpoint into a result folder."""
        self._lock.require()
        staged = target.with_name(f".staging-{target.name}")
        for leftover in (staged, target):
            if leftover.exists():
                durable.remove_tree(leftover)
        durable.make_dirs(staged)
        for name, data in self._files(checkpoint).items():
            durable.write_synced(staged / name, data)
        durable.publish(staged, target, facts, self._lock.require)

    def _files(self, checkpoint: Path) -> dict[str, bytes]:
        names = (model.ADAPTER_CONFIG_FILE, model.ADAPTER_FILE)
        files = {name: (checkpoint / name).read_bytes() for name in names}
        if self._first is not None:
            tensors = model.load_tensors(checkpoint / model.ADAPTER_FILE)
            fields = json.loads(files[model.ADAPTER_CONFIG_FILE])
            files = {
                model.ADAPTER_CONFIG_FILE: model.config_json(plain_config(fields)),
                model.ADAPTER_FILE: model.save_tensors(plain_tensors(tensors, self._first)),
            }
        if self._tokenizer_folder is not None:
            present = [name for name in TOKENIZER_FILES if (self._tokenizer_folder / name).is_file()]
            files |= {name: (self._tokenizer_folder / name).read_bytes() for name in present}
        return files


def first_values(parameters: Named) -> dict[str, torch.Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in parameters.items() if _is_factor(name)}


def plain_tensors(tensors: dict[str, torch.Tensor], first: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A PiSSA adapter as an ordinary one on the unchanged base, of twice the rank: BA - B'A' with the first values B'
    and A', which PiSSA has taken out of the base, is [B, -B'] times [A over A']."""
    plain: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if "lora_A" in name:
            plain[name] = torch.cat([value, first[name]], dim=0)
        elif "lora_B" in name:
            plain[name] = torch.cat([value, -first[name]], dim=1)
        else:
            plain[name] = value
    return plain


def plain_config(fields: dict[str, Any]) -> dict[str, Any]:
    """PEFT's settings of `plain_tensors`, with the scale that the update had."""
    alpha = fields["lora_alpha"] * (math.sqrt(2.0) if fields["use_rslora"] else 2.0)
    return {**fields, "r": 2 * fields["r"], "lora_alpha": alpha, "init_lora_weights": True}


def _is_factor(name: str) -> bool:
    return "lora_A" in name or "lora_B" in name

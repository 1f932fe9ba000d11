"""Where a tensor of a model lies in the files it is loaded from, which may call it otherwise."""

from dataclasses import replace
from pathlib import Path

import torch

from hotlap.errors import AuditFailed
from hotlap.export.changes import Change


def placed(changes: dict[str, Change], folder: Path, in_files: set[str]) -> dict[str, Change]:
    """Changes by the name that their tensor has in the files of a model folder.

    Raises:
        AuditFailed: a trained tensor has no place in the files.
    """
    if set(changes) <= in_files:
        return changes
    file_names = _file_names(folder, in_files)
    found = {file_names[name]: change for name, change in changes.items() if name in file_names}
    for name, change in changes.items():
        if name in file_names:
            continue
        twin = _tied_twin(change, found)
        if twin is None:
            raise AuditFailed(
                f"The adapter changes {name}, which is no tensor of its own in {folder}: it was trained on another "
                f"model, or its layers lie in the files in another form. Serve it unmerged."
            )
        found[twin] = replace(found[twin], num_tensors=found[twin].num_tensors + change.num_tensors)
    return found


def _tied_twin(change: Change, others: dict[str, Change]) -> str | None:
    """The first name of a tensor that is trained in full and saved under two, as tied heads are."""
    for name, other in others.items():
        if change.whole is not None and other.whole is not None and torch.equal(change.whole, other.whole):
            return name
    return None


def _file_names(folder: Path, in_files: set[str]) -> dict[str, str]:
    """The model's name of every tensor, and the file's, where loading only renames it."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    mapping = get_model_conversion_mapping(skeleton)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    have = skeleton.state_dict()
    found: dict[str, str] = {}
    for name in in_files:
        renamed, pattern = rename_source_key(name, renamings, converters, skeleton.base_model_prefix, have)
        if pattern is None and renamed in have:
            found[renamed] = name
    return found

"""Which tokens of a row may see which: examples apart, within a window where a model has one; and their positions."""

from dataclasses import dataclass
from typing import Any

import torch

from hotlap.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"
"""What transformers calls layers that see all of an example, and a window of it."""

# B rows, T positions


@dataclass(frozen=True)
class Window:
    """How far back a token sees, itself included, in the layers that slide, or in every layer of a model without
    layer types (`is_everywhere`)."""

    size: int
    is_everywhere: bool


def sliding_window_of(text_config: Any) -> Window | None:
    """
    Raises:
        ConfigError: the model attends in a way for which we have no mask.
    """
    kinds: set[str] = set(getattr(text_config, "layer_types", None) or ())
    if unknown := kinds - {FULL, SLIDING}:
        raise ConfigError(
            f"This model has layers of {sorted(unknown)}, and rows of several examples are not safe in them."
        )
    size: int | None = getattr(text_config, "sliding_window", None)
    if kinds:
        return Window(size, is_everywhere=False) if size is not None and SLIDING in kinds else None
    return Window(size, is_everywhere=True) if size is not None else None


def masks_of(segments_BT: torch.Tensor, window: Window | None) -> torch.Tensor | dict[str, torch.Tensor]:
    """`block_mask`, and the same within a window for the layers that slide. Transformers takes a ready mask as it is
    and adds no window of its own to it."""
    mask_BQTT = block_mask(segments_BT)
    if window is None:
        return mask_BQTT
    near_TT = torch.ones_like(mask_BQTT[0, 0]).triu(diagonal=1 - window.size)
    return mask_BQTT & near_TT if window.is_everywhere else {FULL: mask_BQTT, SLIDING: mask_BQTT & near_TT}


def as_summands(mask: torch.Tensor | dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """A mask, or one of each kind, as numbers that are added to scores. Transformers' plain attention adds whatever it
    is given: of truth values, which are 0 and 1, nothing would be hidden."""
    if isinstance(mask, dict):
        return {kind: as_summands(each, dtype) for kind, each in mask.items()}
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


def positions_of(segments_BT: torch.Tensor) -> torch.Tensor:
    """Positions that restart at 0 with every example of a row."""
    num_T = segments_BT.shape[1]
    index_BT = torch.arange(num_T, device=segments_BT.device).expand_as(segments_BT)
    begins_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    begins_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    return index_BT - torch.where(begins_BT, index_BT, 0).cummax(dim=1).values


def block_mask(segments_BT: torch.Tensor) -> torch.Tensor:
    """`[B, 1, T, T]`, true where a query may look at a key: earlier or itself, and of the same example."""
    num_T = segments_BT.shape[1]
    causal_TT = torch.ones(num_T, num_T, dtype=torch.bool, device=segments_BT.device).tril()
    same_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
    return (same_BTT & causal_TT)[:, None]

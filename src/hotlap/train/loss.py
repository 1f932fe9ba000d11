"""Completion-only cross-entropy: logits are formed only where a trained token is predicted."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

# B rows, T positions, D model width, N trained targets, V vocabulary


def targets_of(
    tokens_BT: torch.Tensor, segments_BT: torch.Tensor, is_trained_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each position has to predict: `predicts_BT`, whether its successor is a trained token of the same
    example, and `next_BT`, that successor. An example's first token is never a target."""
    predicts_BT = torch.zeros_like(is_trained_BT)
    predicts_BT[:, :-1] = is_trained_BT[:, 1:] & (segments_BT[:, 1:] == segments_BT[:, :-1])
    next_BT = torch.roll(tokens_BT, shifts=-1, dims=1)
    return predicts_BT, next_BT


def summed_loss(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden_BTD: torch.Tensor,
    predicts_BT: torch.Tensor,
    next_BT: torch.Tensor,
) -> torch.Tensor:
    """Nats summed over the trained targets, a float32 scalar; exactly 0, with a gradient of 0, when there are none."""
    hidden_ND = hidden_BTD[predicts_BT]
    if hidden_ND.shape[0] == 0:
        return hidden_BTD.sum() * 0.0
    logits_NV = logits_of(hidden_ND).float()
    return F.cross_entropy(logits_NV, next_BT[predicts_BT].long(), reduction="sum")

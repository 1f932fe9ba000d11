"""Completion-only cross-entropy: logits only where a trained token is predicted, all at once or in chunks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

# B rows, T positions, D model width, N trained targets, C of them in a chunk, V vocabulary


@dataclass(frozen=True)
class Head:
    """The output head: `uncapped` makes logits `[..., V]` of hidden states `[..., D]`; `trained` are its parameters
    that train; `soft_cap` bends logits to within itself, as Gemma does."""

    uncapped: Callable[[torch.Tensor], torch.Tensor]
    trained: tuple[torch.Tensor, ...] = ()
    soft_cap: float | None = None

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """`[..., V]` in float32, with the soft cap."""
        logits_NV = self.uncapped(hidden_ND).float()
        return logits_NV if self.soft_cap is None else torch.tanh(logits_NV / self.soft_cap) * self.soft_cap


def targets_of(
    tokens_BT: torch.Tensor, segments_BT: torch.Tensor, is_trained_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each position has to predict: `predicts_BT`, whether its successor is a trained token of the same
    example, and `next_BT`, that successor. An example's first token is never a target."""
    predicts_BT = torch.zeros_like(is_trained_BT)
    predicts_BT[:, :-1] = is_trained_BT[:, 1:] & (segments_BT[:, 1:] == segments_BT[:, :-1])
    next_BT = torch.roll(tokens_BT, shifts=-1, dims=1)
    return predicts_BT, next_BT


def summed_loss(head: Head, hidden_ND: torch.Tensor, next_N: torch.Tensor, chunk: int | None = None) -> torch.Tensor:
    """Nats summed over N targets, a float32 scalar; exactly 0, with a gradient of 0, when there are none.

    With `chunk`, no more than so many positions have logits at a time: the gradient is formed with them, in the forward
    pass, and only that is kept (as in Liger and in the public contest's record 3). Its gradient cannot be
    differentiated again.
    """
    if hidden_ND.shape[0] == 0:
        return hidden_ND.float().sum() * 0.0
    if chunk is None:
        return _plain(head, hidden_ND, next_N)
    if not torch.is_grad_enabled():
        pieces = zip(hidden_ND.split(chunk), next_N.split(chunk), strict=True)
        return torch.stack([_plain(head, hidden_CD, next_C) for hidden_CD, next_C in pieces]).sum()
    apply: Callable[..., torch.Tensor] = _ChunkedLoss.apply
    return apply(head, chunk, next_N, hidden_ND, *head.trained)


def _plain(head: Head, hidden_ND: torch.Tensor, next_N: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head.logits(hidden_ND), next_N, reduction="sum")


class _ChunkedLoss(torch.autograd.Function):
    """Inputs that are differentiated: the hidden states, then the head's trained parameters."""

    @staticmethod
    def forward(
        ctx: Any, head: Head, chunk: int, next_N: torch.Tensor, hidden_ND: torch.Tensor, *trained: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros((), device=hidden_ND.device)
        gradient_ND = torch.empty_like(hidden_ND)
        gradients = [torch.zeros_like(parameter) for parameter in trained]
        for first in range(0, hidden_ND.shape[0], chunk):
            here = slice(first, first + chunk)
            with torch.enable_grad():
                hidden_CD = hidden_ND[here].detach().requires_grad_()
                logits_CV = head.uncapped(hidden_CD)
            nats, wanted_CV = _nats_and_gradient(logits_CV.detach(), next_N[here], head.soft_cap)
            total += nats
            gradient_ND[here], *found = torch.autograd.grad(logits_CV, [hidden_CD, *trained], wanted_CV)
            del logits_CV, wanted_CV  # or two chunks are held at a time
            for gradient, more in zip(gradients, found, strict=True):
                gradient += more
        ctx.save_for_backward(gradient_ND, *gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        (scale,) = outer
        return (None, None, None, *(gradient * scale.to(gradient.dtype) for gradient in ctx.saved_tensors))


def _nats_and_gradient(
    logits_CV: torch.Tensor, next_C: torch.Tensor, soft_cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed nats, and their gradient with regard to the uncapped logits, whose memory is reused."""
    bent_CV = logits_CV.float()
    if soft_cap is not None:
        bent_CV = bent_CV.div_(soft_cap).tanh_()
    probability_CV = bent_CV if soft_cap is None else bent_CV * soft_cap
    probability_CV -= probability_CV.amax(dim=-1, keepdim=True)
    right_C1 = probability_CV.gather(-1, next_C[:, None])
    sum_C1 = probability_CV.exp_().sum(dim=-1, keepdim=True)
    nats = (sum_C1.log() - right_C1).sum()
    probability_CV /= sum_C1
    probability_CV[torch.arange(len(next_C), device=next_C.device), next_C] -= 1.0
    if soft_cap is not None:
        probability_CV *= 1.0 - bent_CV.square_()
    return nats, probability_CV.to(logits_CV.dtype)

"""Attention in short examples: those of about one length at once, forward and backward as plain products.

torch's attention takes longer to begin than to attend in forty tokens, and it begins once for each example. Here a
group's examples are filled up to its longest. Padding stands behind the tokens, whom the causal mask keeps from it, and
gets no gradient. Everything is computed in float32 whatever the inputs are, which is as near to the exact values as
torch's kernel, or nearer.
"""

import functools
from dataclasses import dataclass
from typing import Any, cast

import torch

SHORT = 128
"""Tokens. On two cores it gains little beyond twice that, and what is kept for the backward pass grows with it."""

_ALIKE = 1.5
"""The longest of a group has at most that many times the tokens of its shortest."""

# N tokens of all examples, E examples of a group, L tokens of its longest, H query heads, K key heads, G = H / K,
# D head width, V width of values


@dataclass(frozen=True)
class Group:
    """Where the examples of a group are."""

    num_E: int
    num_L: int
    sources: torch.Tensor
    """Which of N each of the E x L places shows; padding shows its example's last token."""

    filled: torch.Tensor
    """The places that are no padding, in order."""

    targets: torch.Tensor
    """Which of N those are."""

    def padded(self, states_NHD: torch.Tensor) -> torch.Tensor:
        """`[E, H, L, D]`, float32."""
        states = states_NHD.index_select(0, self.sources).view(self.num_E, self.num_L, *states_NHD.shape[1:])
        return states.transpose(1, 2).float()

    def put(self, states_EHLD: torch.Tensor, into_NHD: torch.Tensor) -> None:
        states = states_EHLD.transpose(1, 2).flatten(0, 1).index_select(0, self.filled)
        into_NHD.index_copy_(0, self.targets, states.to(into_NHD.dtype))


@functools.lru_cache(maxsize=1)
def groups_of(ends_E: torch.Tensor) -> tuple[Group, ...] | None:
    """Of `[0, end of the first example, ...]`; None where one is too long. All layers of a pass ask for the same."""
    lengths_E = ends_E.diff()
    order = lengths_E.argsort(descending=True, stable=True)
    lengths: list[int] = lengths_E[order].tolist()
    if not lengths or lengths[0] > SHORT:
        return None
    cuts = [0]
    for place, length in enumerate(lengths):
        if length * _ALIKE < lengths[cuts[-1]]:
            cuts.append(place)
    sizes = [stop - first for first, stop in zip(cuts, [*cuts[1:], len(lengths)], strict=True)]
    return tuple(_group(ends_E[members].long(), lengths_E[members].long()) for members in order.split(sizes))


def _group(starts_E: torch.Tensor, lengths_E: torch.Tensor) -> Group:
    num_L = int(lengths_E[0])
    steps_L = torch.arange(num_L, device=starts_E.device)
    sources_EL = starts_E[:, None] + steps_L.minimum(lengths_E[:, None] - 1)
    is_filled_EL = steps_L < lengths_E[:, None]
    filled = is_filled_EL.flatten().nonzero()[:, 0]
    return Group(len(starts_E), num_L, sources_EL.flatten(), filled, sources_EL[is_filled_EL])


def attend(
    query_1HND: torch.Tensor, key_1KND: torch.Tensor, value_1KNV: torch.Tensor, groups: tuple[Group, ...], scale: float
) -> torch.Tensor:
    """`[1, N, H, V]` in the precision of the query: what each token sees of its own example, up to itself."""
    states = (each[0].transpose(0, 1) for each in (query_1HND, key_1KND, value_1KNV))
    return cast(torch.Tensor, _Attention.apply(*states, groups, scale))[None]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_NHD: Any, key_NKD: Any, value_NKV: Any, groups: tuple[Group, ...], scale: float
    ) -> torch.Tensor:
        num_H, num_K = query_NHD.shape[1], key_NKD.shape[1]
        out_NHV = query_NHD.new_empty(*query_NHD.shape[:2], value_NKV.shape[-1])
        kept: list[torch.Tensor] = []
        with torch.autocast(query_NHD.device.type, enabled=False):
            for group in groups:
                # The queries of a key head one under another: keys and values need not be repeated.
                query = (group.padded(query_NHD) * scale).reshape(group.num_E * num_K, -1, query_NHD.shape[-1])
                key, value = (group.padded(each).flatten(0, 1) for each in (key_NKD, value_NKV))
                later = query.new_full((group.num_L, group.num_L), float("-inf")).triu(1)
                weights = torch.baddbmm(later.repeat(num_H // num_K, 1), query, key.transpose(1, 2)).softmax(-1)
                group.put((weights @ value).view(group.num_E, num_H, group.num_L, -1), out_NHV)
                kept += [query, key, value, weights]
        ctx.groups, ctx.scale, ctx.num_K = groups, scale, num_K
        ctx.save_for_backward(*kept)
        return out_NHV

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        (gradient_NHV,) = outer
        num_N, num_H, _ = gradient_NHV.shape
        num_K, saved = ctx.num_K, ctx.saved_tensors  # asked for once: recomputed activations are given out once
        to_query = gradient_NHV.new_empty(num_N, num_H, saved[0].shape[-1])
        to_key = gradient_NHV.new_empty(num_N, num_K, saved[1].shape[-1])
        to_value = gradient_NHV.new_empty(num_N, num_K, saved[2].shape[-1])
        with torch.autocast(gradient_NHV.device.type, enabled=False):
            for place, group in enumerate(ctx.groups):
                query, key, value, weights = saved[4 * place : 4 * place + 4]
                gradient = gradient_NHV.new_zeros(group.num_E * group.num_L, *gradient_NHV.shape[1:])
                gradient.index_copy_(0, group.filled, gradient_NHV.index_select(0, group.targets))
                gradient = gradient.view(group.num_E, group.num_L, num_H, -1).transpose(1, 2).float()
                gradient = gradient.reshape(query.shape[0], query.shape[1], -1)
                to_weights = gradient @ value.transpose(1, 2)
                to_scores = weights * (to_weights - (weights * to_weights).sum(-1, keepdim=True))
                shape = (group.num_E, num_K, group.num_L, -1)
                group.put((to_scores @ key).mul_(ctx.scale).view(group.num_E, num_H, group.num_L, -1), to_query)
                group.put((to_scores.transpose(1, 2) @ query).view(shape), to_key)
                group.put((weights.transpose(1, 2) @ gradient).view(shape), to_value)
        return to_query, to_key, to_value, None, None

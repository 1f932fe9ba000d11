"""How packed examples are kept apart: a mask, or a kernel that knows where examples begin.

A mask `[B, 1, T, T]` serves everywhere. Two kernels take the examples of all rows one behind another, with no padding
between them, and compute nothing across their ends: FlashAttention on CUDA, and elsewhere torch's attention called for
each example by itself, or `short` where all of them are. Flex attention skips blocks of the mask. What is ours is the
layout, the attention in short examples, and a check that examples are apart before a step is made.
"""

# B rows, T positions, N tokens of all rows that are no padding, E examples, H heads, D model or head width

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils.import_utils import is_flash_attn_2_available

from hotlap.errors import ConfigError
from hotlap.train import short

IMPLEMENTATIONS = {"flash": "flash_attention_2", "flex": "flex_attention", "examples": "hotlap_examples"}
"""What transformers calls them."""

FLAT = ("flash", "examples")
"""Those that are handed a `Flat`."""

_ROUNDING = 0.05
_CHANGED = 2


def choose_kernel(wanted: str, device: str, precision: str, is_flash_here: bool) -> tuple[str, str | None]:
    """The kernel, and a sentence that says why; None where nobody asked and there is nothing to choose from.

    Raises:
        ConfigError: the one that is wanted cannot work here.
    """
    missing = (
        "no CUDA device" if device != "cuda"
        else f"{precision} numbers, and it computes in 16 bits only" if precision == "float32"
        else "no flash-attn package" if not is_flash_here
        else None
    )  # fmt: skip
    if wanted == "auto" and device != "cuda":
        return "examples", None
    if wanted == "auto":
        kernel = "mask" if missing else "flash"
        why = f"FlashAttention has {missing} here" if missing else "the flash-attn package is here"
        return kernel, f"Attention between packed examples is blocked by {_WORDS[kernel]}: {why}."
    if wanted == "flash" and missing:
        raise ConfigError(
            f"slice.attention_kernel = 'flash' finds {missing}. Leave it out, and hotlap takes what works here."
        )
    if wanted == "flex" and device != "cuda":
        raise ConfigError(
            "slice.attention_kernel = 'flex' finds no CUDA device, and it has no backward pass elsewhere. Leave it out."
        )
    return wanted, f"Attention between packed examples is blocked by {_WORDS[wanted]}, as slice.attention_kernel says."


_WORDS = {
    "mask": "an explicit mask",
    "flash": "FlashAttention",
    "flex": "flex attention",
    "examples": "attending in each by itself",
}


def kernel_here(wanted: str, precision: str, device: torch.device) -> tuple[str, str | None]:
    """`choose_kernel` for this machine."""
    return choose_kernel(wanted, device.type, precision, is_flash_attn_2_available())


@dataclass(frozen=True)
class Flat:
    """The tokens of rows one behind another, without padding. Its tensors are on the model's device, and nothing asks
    that for a value."""

    num_rows: int
    places_N: torch.Tensor
    """Where the tokens are, counted through all rows."""

    positions_1N: torch.Tensor
    lengths_1N: torch.Tensor
    """How long each token's example is."""

    ends_E: torch.Tensor
    """Where examples begin and end: 0, then the place behind each."""

    longest: int
    row_length: int

    def arguments_for(self, kernel: str) -> dict[str, Any]:
        """What transformers hands to the kernel. Asking for determinism is part of a run's promise to repeat."""
        both = {f"cu_seq_lens_{side}": self.ends_E for side in "qk"}
        both |= {f"max_length_{side}": self.longest for side in "qk"}
        # Of a mask with four dimensions transformers takes it that it is ready; without one it would make its own.
        mask = None if kernel == "flash" else torch.ones(1, 1, 1, 1, dtype=torch.bool)
        return {**both, "attention_mask": mask, "position_ids": self.positions_1N, "deterministic": True}

    def gathered(self, values_BT: torch.Tensor) -> torch.Tensor:
        return values_BT.flatten().index_select(0, self.places_N)[None]

    def spread(self, hidden_1ND: torch.Tensor) -> torch.Tensor:
        """Back in rows; padding is 0."""
        num_D = hidden_1ND.shape[-1]
        hidden_ND = hidden_1ND.new_zeros(self.num_rows * self.row_length, num_D)
        return hidden_ND.index_copy(0, self.places_N, hidden_1ND[0]).view(self.num_rows, self.row_length, num_D)


def flatten(segments_BT: torch.Tensor, positions_BT: torch.Tensor, device: torch.device) -> Flat:
    """Of segments and positions on the host, for a model on the device."""
    places_N = (segments_BT > 0).flatten().nonzero()[:, 0]
    positions_N = positions_BT.flatten()[places_N]
    begins = (positions_N == 0).nonzero()[:, 0]
    ends_E = torch.cat([begins, begins.new_tensor([len(positions_N)])]).to(torch.int32)
    lengths_E = ends_E.diff()
    tensors = (places_N, positions_N[None], lengths_E.repeat_interleave(lengths_E)[None], ends_E)
    places_N, positions_1N, lengths_1N, ends_E = (each.to(device, non_blocking=True) for each in tensors)
    num_rows, row_length = segments_BT.shape
    return Flat(num_rows, places_N, positions_1N, lengths_1N, ends_E, int(lengths_E.max()), row_length)


def attend_by_example(
    module: torch.nn.Module,
    query_1HND: torch.Tensor,
    key_1HND: torch.Tensor,
    value_1HND: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """`[1, N, H, D]`: what each token sees of its own example. Keys and values may have fewer heads than queries.

    Without examples (an answer is being made) it is transformers' own way.

    Raises:
        ValueError: the layer attends in a way that torch's function has not.
    """
    ends_E: torch.Tensor | None = given.get("cu_seq_lens_q")
    if ends_E is None:
        return sdpa_attention_forward(
            module, query_1HND, key_1HND, value_1HND, mask, dropout, scaling, sliding_window=sliding_window, **given
        )
    if odd := [name for name in ("softcap", "s_aux", "position_bias") if given.get(name) is not None]:
        raise ValueError(f"its layers attend with {odd[0]}")
    groups = None if dropout else short.groups_of(ends_E)
    if groups and (sliding_window is None or groups[0].num_L <= sliding_window):
        scale = query_1HND.shape[-1] ** -0.5 if scaling is None else scaling
        return short.attend(query_1HND, key_1HND, value_1HND, groups, scale), None
    lengths = ends_E.diff().tolist()
    found: list[torch.Tensor] = []
    for parts in zip(*(states.split(lengths, dim=2) for states in (query_1HND, key_1HND, value_1HND)), strict=True):
        near = _near(parts[0].shape[2], sliding_window, parts[0].device)
        out_1HED = F.scaled_dot_product_attention(
            *parts, attn_mask=near, is_causal=near is None, dropout_p=dropout, scale=scaling, enable_gqa=True
        )
        found.append(out_1HED.transpose(1, 2))
    return torch.cat(found, dim=1), None


def _near(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """A mask for an example that is longer than the window, or None."""
    if window is None or length <= window:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


AttentionInterface.register(IMPLEMENTATIONS["examples"], attend_by_example)
AttentionMaskInterface.register(IMPLEMENTATIONS["examples"], sdpa_mask)


def flex_mask(segments_BT: torch.Tensor, window: int | None = None) -> BlockMask:
    """Whom a token sees, as flex attention wants it: earlier ones of its example, no more than `window` of them."""
    num_B, num_T = segments_BT.shape

    def sees(row: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        is_seen = (query >= key) & (segments_BT[row, query] == segments_BT[row, key])
        return is_seen if window is None else is_seen & (query - key < window)

    return create_block_mask(sees, num_B, None, num_T, num_T, device=segments_BT.device)  # pyright: ignore[reportArgumentType]


Hidden = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`hidden(tokens_BT, segments_BT)` of a model."""


def keeps_examples_apart(hidden: Hidden, device: torch.device) -> bool:
    """Whether another token in a row's first example leaves what is computed of earlier ones and of the second example
    as it was, bit for bit, and changes what is computed of its own."""
    second, earlier, own = _changes(hidden, device)
    return bool(own.any()) and not bool(second.any()) and not bool(earlier.any())


def heeds_mask(hidden: Hidden, device: torch.device) -> bool:
    """The same in most tokens, but for rounding: where int8 finds its outliers, and which expert computes what with
    what, depends on all tokens together."""
    second, earlier, own = (float(change.median()) for change in _changes(hidden, device))
    # A model that computes no numbers is for the first step to tell.
    return not math.isfinite(own) or max(second, earlier) <= _ROUNDING * own


def _changes(hidden: Hidden, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How far another token moves what is computed of the row's second example, of tokens before it, and of those of
    its own example from it on."""
    segments_BT = torch.tensor([[1] * 5 + [2] * 6 + [0] * 2, [1] * 9 + [2] * 4], device=device)
    tokens_BT = torch.arange(segments_BT.numel(), device=device).reshape(segments_BT.shape) % 11
    changed_BT = tokens_BT.clone()
    changed_BT[:, _CHANGED] += 1
    with torch.no_grad():
        moved_BT = (hidden(tokens_BT, segments_BT) - hidden(changed_BT, segments_BT)).float().norm(dim=-1)
    is_earlier_BT = (torch.arange(segments_BT.shape[1], device=device) < _CHANGED).expand_as(segments_BT)
    return moved_BT[segments_BT == 2], moved_BT[is_earlier_BT], moved_BT[(segments_BT == 1) & ~is_earlier_BT]

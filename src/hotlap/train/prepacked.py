"""Products with frozen weights on a processor, through oneDNN, which is given each weight laid out for it once.

The weights of a base model never change, so what a product does to them first need not be done again at every step. The
operators are those into which torch's compiler freezes linear layers for inference (`mkldnn._linear_pointwise`); here
they serve training, with a second layout for the gradient of the inputs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel

# N rows of inputs, I inputs, O outputs, R ranks of a group together


class Layouts:
    """Lays weights out, and is needed no longer then."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0)

    def onward(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """What `_times` takes for `input @ weight.T`."""
        return torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous())

    def back(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """What `_times` takes for `gradient @ weight`."""
        if self._scratch.numel() < weight_OI.numel() or self._scratch.dtype != weight_OI.dtype:
            self._scratch = torch.empty(weight_OI.numel(), dtype=weight_OI.dtype)
        # In one place for all: fresh memory takes longer than the copy.
        weight_IO = self._scratch[: weight_OI.numel()].view(weight_OI.shape[::-1]).copy_(weight_OI.detach().t())
        return torch.ops.mkldnn._reorder_linear_weight(weight_IO)


def _times(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows.contiguous(), weight, bias, "none", [], "")


def _times_and_sum(rows: torch.Tensor, weight: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.binary(rows.contiguous(), others, weight, None, "add")


class Product:
    """`input @ weight.T + bias` of a frozen weight."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, layouts: Layouts) -> None:
        self.onward, self.back = layouts.onward(weight_OI), layouts.back(weight_OI)
        self.bias_O = None if bias_O is None else bias_O.detach()

    def __call__(self, input_NI: torch.Tensor) -> torch.Tensor:
        """`[..., O]` of `[..., I]`, in the weight's precision."""
        apply: Callable[..., torch.Tensor] = _Linear.apply
        return apply(input_NI.to(self.onward.dtype), self)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_NI: torch.Tensor, product: Product) -> torch.Tensor:
        ctx.product = product
        return _times(input_NI, product.onward, product.bias_O)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        (gradient_NO,) = outer
        return _times(gradient_NO, ctx.product.back), None


@dataclass(frozen=True)
class Member:
    """A linear module of a group. Without LoRA, `inner`, `outer` and `scale` have no part in it."""

    weight_OI: torch.Tensor
    inner: torch.nn.Parameter | None = None
    outer: torch.nn.Parameter | None = None
    scale: float = 0.0

    @property
    def num_outputs(self) -> int:
        return self.weight_OI.shape[0]


@dataclass(frozen=True)
class LaidOut:
    """The frozen weights of a group: all of them together, and each by itself for the gradient of the inputs."""

    onward: torch.Tensor
    backs: tuple[torch.Tensor, ...]
    bias_O: torch.Tensor | None


def lay_out(
    members: Sequence[Member], weight_OI: torch.Tensor, bias_O: torch.Tensor | None, layouts: Layouts
) -> LaidOut:
    """`weight_OI`, `bias_O`: those of all members, one under another."""
    backs = tuple(layouts.back(member.weight_OI) for member in members)
    return LaidOut(layouts.onward(weight_OI), backs, None if bias_O is None else bias_O.detach())


def outputs_of(members: Sequence[Member], laid_out: LaidOut, input_BTI: torch.Tensor) -> Sequence[torch.Tensor]:
    """`[..., outputs]` of each member: the base's product once for all, and each adapter's added to it where it
    lies. Adapters of more precision than the weights are rounded to theirs, as autocast does it."""
    dtype = laid_out.onward.dtype
    inners = [member.inner.to(dtype) for member in members if member.inner is not None]
    outers = [member.outer.to(dtype) for member in members if member.outer is not None]
    apply: Callable[..., Sequence[torch.Tensor]] = _WithAdapters.apply
    return apply(members, laid_out, input_BTI.to(dtype), *inners, *outers)


class _WithAdapters(torch.autograd.Function):
    """Of the input and the A's and B's of the members that have LoRA."""

    @staticmethod
    def forward(
        ctx: Any, members: Sequence[Member], laid_out: LaidOut, input_BTI: torch.Tensor, *both: torch.Tensor
    ) -> Any:
        input_NI = input_BTI.reshape(-1, input_BTI.shape[-1])
        base_NO = _times(input_NI, laid_out.onward, laid_out.bias_O)
        outputs = base_NO.split([member.num_outputs for member in members], dim=-1)
        inners, outers = both[: len(both) // 2], both[len(both) // 2 :]
        low_NR = input_NI @ torch.cat(inners).t() if inners else input_NI[:, :0]
        lows = low_NR.split([len(inner) for inner in inners], dim=-1) if inners else ()
        adapted = [place for place, member in enumerate(members) if member.inner is not None]
        for place, low, outer in zip(adapted, lows, outers, strict=True):
            outputs[place].addmm_(low, outer.t(), alpha=members[place].scale)
        ctx.members, ctx.adapted, ctx.laid_out = members, adapted, laid_out
        ctx.save_for_backward(input_NI, low_NR, *both)
        return tuple(output.view(*input_BTI.shape[:-1], -1) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *outer_gradients: torch.Tensor) -> Any:
        input_NI, low_NR, *both = ctx.saved_tensors
        inners, outers = both[: len(both) // 2], both[len(both) // 2 :]
        gradients = [each.reshape(len(input_NI), -1) for each in outer_gradients]
        to_outers: list[torch.Tensor] = []
        to_lows: list[torch.Tensor] = []
        first = 0
        for place, inner, outer in zip(ctx.adapted, inners, outers, strict=True):
            scale: float = ctx.members[place].scale
            low = low_NR[:, first : first + len(inner)]
            first += len(inner)
            to_outers.append((low.t() @ gradients[place]).t().mul_(scale))
            to_lows.append((gradients[place] @ outer).mul_(scale))
        to_low_NR = torch.cat(to_lows, dim=-1) if to_lows else low_NR
        to_inners = (to_low_NR.t() @ input_NI).split([len(inner) for inner in inners]) if inners else ()
        to_input = None
        if ctx.needs_input_grad[2]:
            to_input = to_low_NR @ torch.cat(inners) if inners else torch.zeros_like(input_NI)
            for gradient, back in zip(gradients, ctx.laid_out.backs, strict=True):
                to_input = _times_and_sum(gradient, back, to_input)
            to_input = to_input.view(*outer_gradients[0].shape[:-1], -1)
        return None, None, to_input, *to_inners, *to_outers


def why_not(model: torch.nn.Module) -> str | None:
    """What keeps this model's products from being laid out here, in words, or None."""
    kinds = {(parameter.device.type, parameter.dtype) for parameter in model.parameters()}
    if any(device != "cpu" for device, _ in kinds):
        return "its layouts are for processors"
    if kinds not in ({("cpu", torch.float32)}, {("cpu", torch.bfloat16)}):
        return "its layouts are for float32 or bfloat16 numbers"
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    if kinds == {("cpu", torch.bfloat16)} and not has_bfloat16_units():
        return "this processor has no bfloat16 units"
    return None


def has_bfloat16_units() -> bool:
    """oneDNN's products in bfloat16 are slower than torch's where the processor only emulates them."""
    able = getattr(torch.cpu, "get_capabilities", dict)()  # torch before 2.10 does not tell
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def prepack(model: PeftModel, done: Iterable[torch.nn.Module], layouts: Layouts) -> None:
    """Have every frozen linear layer of the decoder, and the output head, multiply by a weight that is laid out. Those
    that are `done` do so already."""
    causal_lm: Any = model.get_base_model()
    skipped = set(map(id, done))
    for module in [*causal_lm.get_decoder().modules(), causal_lm.get_output_embeddings()]:
        is_frozen = not any(each.requires_grad for each in module.parameters())
        if type(module) is torch.nn.Linear and is_frozen and id(module) not in skipped:
            product = Product(module.weight, module.bias, layouts)
            setattr(module, "forward", product)  # noqa: B010  (its parameter has our name)

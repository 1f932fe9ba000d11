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
        if self._scratch.numel() < weight_OI.numel():
            self._scratch = torch.empty(weight_OI.numel())
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
        """`[..., O]` of `[..., I]`."""
        apply: Callable[..., torch.Tensor] = _Linear.apply
        return apply(input_NI, self)


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


class GroupProduct:
    """Linear modules of one input with their adapters: the base's product once for all, and each adapter's added to it
    where it lies."""

    def __init__(
        self, members: Sequence[Member], weight_OI: torch.Tensor, bias_O: torch.Tensor | None, layouts: Layouts
    ) -> None:
        """`weight_OI`, `bias_O`: those of all members, one under another."""
        self.sizes = [member.num_outputs for member in members]
        self.adapted = [place for place, member in enumerate(members) if member.inner is not None]
        self.scales = [members[place].scale for place in self.adapted]
        self.onward = layouts.onward(weight_OI)
        self.backs = [layouts.back(member.weight_OI) for member in members]
        self.bias_O = None if bias_O is None else bias_O.detach()
        self._parameters = [members[place].inner for place in self.adapted]
        self._parameters += [members[place].outer for place in self.adapted]

    def __call__(self, input_BTI: torch.Tensor) -> Sequence[torch.Tensor]:
        """`[..., outputs]` of each member."""
        apply: Callable[..., Sequence[torch.Tensor]] = _Group.apply
        return apply(self, input_BTI, *self._parameters)


class _Group(torch.autograd.Function):
    """Of the input and the A's and B's of a group's adapters."""

    @staticmethod
    def forward(ctx: Any, group: GroupProduct, input_BTI: torch.Tensor, *both: torch.Tensor) -> Any:
        input_NI = input_BTI.reshape(-1, input_BTI.shape[-1])
        base_NO = _times(input_NI, group.onward, group.bias_O)
        outputs = base_NO.split(group.sizes, dim=-1)
        inners, outers = both[: len(group.adapted)], both[len(group.adapted) :]
        low_NR = input_NI @ torch.cat(inners).t() if inners else input_NI[:, :0]
        lows = low_NR.split([inner.shape[0] for inner in inners], dim=-1) if inners else ()
        for place, low, outer, scale in zip(group.adapted, lows, outers, group.scales, strict=True):
            outputs[place].addmm_(low, outer.t(), alpha=scale)
        ctx.group = group
        ctx.save_for_backward(input_NI, low_NR, *both)
        return tuple(output.view(*input_BTI.shape[:-1], -1) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *outer_gradients: torch.Tensor) -> Any:
        group: GroupProduct = ctx.group
        input_NI, low_NR, *both = ctx.saved_tensors
        inners, outers = both[: len(group.adapted)], both[len(group.adapted) :]
        gradients = [each.reshape(len(input_NI), -1) for each in outer_gradients]
        to_outers: list[torch.Tensor] = []
        to_lows: list[torch.Tensor] = []
        first = 0
        for place, inner, outer, scale in zip(group.adapted, inners, outers, group.scales, strict=True):
            low = low_NR[:, first : first + len(inner)]
            first += len(inner)
            to_outers.append((low.t() @ gradients[place]).t().mul_(scale))
            to_lows.append((gradients[place] @ outer).mul_(scale))
        to_low_NR = torch.cat(to_lows, dim=-1) if to_lows else low_NR
        to_inners = (to_low_NR.t() @ input_NI).split([len(inner) for inner in inners]) if inners else ()
        to_input = None
        if ctx.needs_input_grad[1]:
            to_input = to_low_NR @ torch.cat(inners) if inners else torch.zeros_like(input_NI)
            for gradient, back in zip(gradients, group.backs, strict=True):
                to_input = _times_and_sum(gradient, back, to_input)
            to_input = to_input.view(*outer_gradients[0].shape[:-1], -1)
        return None, to_input, *to_inners, *to_outers


def why_not(model: torch.nn.Module) -> str | None:
    """What keeps this model's products from being laid out here, in words, or None."""
    kinds = {(parameter.device.type, parameter.dtype) for parameter in model.parameters()}
    if any(device != "cpu" for device, _ in kinds):
        return "its layouts are for processors"
    if any(dtype != torch.float32 for _, dtype in kinds):
        return "its layouts are for float32 numbers"
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    return None


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

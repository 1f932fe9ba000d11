"""Products with frozen weights on a processor, through oneDNN, which is given each weight laid out for it once.

The weights of a base model never change, so what a product does to them first need not be done again at every step. The
operators are those into which torch's compiler freezes linear layers for inference (`mkldnn._linear_pointwise`); here
they serve training, with a second layout for the gradient of the inputs.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from peft import PeftModel

# N rows of inputs, I inputs, O outputs


class Product:
    """`input @ weight.T + bias` of a frozen weight, held in two layouts besides the weight itself."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        weight_OI = weight_OI.detach()
        self.onward = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous())
        self.back = torch.ops.mkldnn._reorder_linear_weight(weight_OI.t().contiguous())
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
        return _times(gradient_NO, ctx.product.back, None), None


def _times(rows: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows.contiguous(), weight, bias, "none", [], "")


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


def prepack(model: PeftModel, done: Iterable[torch.nn.Module]) -> None:
    """Have every frozen linear layer of the decoder, and the output head, multiply by a weight that is laid out. Those
    that are `done` do so already."""
    causal_lm: Any = model.get_base_model()
    skipped = set(map(id, done))
    for module in [*causal_lm.get_decoder().modules(), causal_lm.get_output_embeddings()]:
        is_frozen = not any(each.requires_grad for each in module.parameters())
        if type(module) is torch.nn.Linear and is_frozen and id(module) not in skipped:
            setattr(module, "forward", Product(module.weight, module.bias))  # noqa: B010  (its parameter has our name)

"""Fewer and larger products in a layer: projections of one input as one, in the frozen base and in LoRA's A.

Every adapted module keeps its own A and B as parameters, under the names that PEFT gave them; only how their products
are computed changes. So checkpoints, optimizer state and the finished adapter are those of the plain model.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear

from hotlap.errors import ConfigError
from hotlap.train.prepacked import Layouts, Member, lay_out, outputs_of

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules that their parent gives one input, in every decoder family that we support."""

# B rows, T positions, I inputs, O outputs of all modules of a group, R their ranks together


class Group:
    """Linear modules of one input. Whichever is called first computes them all; the others find their part ready."""

    def __init__(self, modules: list[Any], layouts: Layouts | None) -> None:
        self.plain: list[torch.nn.Linear] = [_plain_of(module) for module in modules]
        self._weight_OI, self._bias_O = _joined(self.plain)
        self._members = [_member_of(module, linear) for module, linear in zip(modules, self.plain, strict=True)]
        self._laid_out = layouts and lay_out(self._members, self._weight_OI, self._bias_O, layouts)
        self._input: torch.Tensor | None = None
        self._ready: dict[int, torch.Tensor] = {}
        for place, module in enumerate(modules):
            module.forward = _Output(self, place)

    def output(self, place: int, input_BTI: torch.Tensor) -> torch.Tensor:
        """`[B, T, outputs]` of the module in that place."""
        if self._input is not input_BTI or place not in self._ready:
            self._ready = dict(enumerate(self._outputs(input_BTI)))
            self._input = input_BTI
        output = self._ready.pop(place)
        if not self._ready:
            self._input = None  # or the whole graph of a step would be kept until the next
        return output

    def forget(self) -> None:
        """Let go of what a pass that was broken off left ready: all that it had computed hangs on it."""
        self._input = None
        self._ready = {}

    def _outputs(self, input_BTI: torch.Tensor) -> Sequence[torch.Tensor]:
        if self._laid_out is not None:
            return outputs_of(self._members, self._laid_out, input_BTI)
        base_BTO = F.linear(input_BTI, self._weight_OI, self._bias_O)
        bases = base_BTO.split([member.num_outputs for member in self._members], dim=-1)
        inner: list[torch.Tensor] = [member.inner for member in self._members if member.inner is not None]
        if not inner:
            return bases
        low_BTR = F.linear(input_BTI, inner[0] if len(inner) == 1 else torch.cat(inner))
        lows = iter(low_BTR.split([each.shape[0] for each in inner], dim=-1))
        return [
            base if member.outer is None else _plus(base, next(lows), member.outer, member.scale)
            for member, base in zip(self._members, bases, strict=True)
        ]


def _plus(base_BTO: torch.Tensor, low_BTR: torch.Tensor, outer_OR: torch.Tensor, scale: float) -> torch.Tensor:
    """Product, scale and sum in one pass over the outputs."""
    sum_NO = torch.addmm(base_BTO.flatten(0, -2), low_BTR.flatten(0, -2), outer_OR.t(), alpha=scale)
    return sum_NO.view(base_BTO.shape)


class _Output:
    """Stands in for a module's `forward`."""

    def __init__(self, group: Group, place: int) -> None:
        self._group, self._place = group, place

    def __call__(self, input_BTI: torch.Tensor) -> torch.Tensor:
        return self._group.output(self._place, input_BTI)


def fuse(model: PeftModel, layouts: Layouts | None = None) -> list[Group]:
    """Change how the decoder's linear modules are computed. With `layouts` their weights are laid out, as `prepacked`
    does it.

    Raises:
        ConfigError: none of its layers has projections of one input by the names that we know.
    """
    causal_lm: Any = model.get_base_model()
    groups = list(_groups_of(causal_lm.get_decoder()))
    if all(len(modules) == 1 for modules in groups):
        raise ConfigError(
            f"techniques.fused_projections: no layer of this model has {' and '.join(_TOGETHER[0])}, or "
            f"{' and '.join(_TOGETHER[1])}, as separate modules. Leave it out."
        )
    return [Group(modules, layouts) for modules in groups]


def _groups_of(decoder: torch.nn.Module) -> Iterator[list[Any]]:
    """Modules that share an input, where at least two do or LoRA is on it."""
    taken: set[int] = set()
    for parent in decoder.modules():
        for names in _TOGETHER:
            found = [getattr(parent, name, None) for name in names]
            modules = [module for module in found if _is_ours(module)]
            if len(modules) > 1:
                taken |= set(map(id, modules))
                yield modules
    adapted = (module for module in decoder.modules() if isinstance(module, LoraLinear) and _is_ours(module))
    yield from ([module] for module in adapted if id(module) not in taken)


def _is_ours(module: Any) -> bool:
    """A subclass may compute something else, and one that is trained in full has to stay where the optimizer finds
    it."""
    linear = _plain_of(module)
    return type(linear) is torch.nn.Linear and not linear.weight.requires_grad


def _plain_of(module: Any) -> Any:
    return module.base_layer if isinstance(module, LoraLinear) else module


def _member_of(module: Any, linear: torch.nn.Linear) -> Member:
    if not isinstance(module, LoraLinear):
        return Member(linear.weight.detach())
    inner: Any = module.lora_A["default"].weight
    outer: Any = module.lora_B["default"].weight
    return Member(linear.weight.detach(), inner, outer, module.scaling["default"])


def _joined(plain: list[torch.nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One matrix of all weights and one vector of all biases, of which the modules' own become views: nothing is held
    twice."""
    if len(plain) == 1:
        return plain[0].weight, plain[0].bias
    weight_OI = torch.cat([linear.weight.detach() for linear in plain])
    first = 0
    for linear in plain:
        linear.weight.data = weight_OI[first : first + linear.out_features]
        first += linear.out_features
    biases: list[Any] = [linear.bias for linear in plain]
    if all(bias is None for bias in biases):
        return weight_OI, None
    zeros = weight_OI.new_zeros
    return weight_OI, torch.cat(
        [
            zeros(linear.out_features) if bias is None else bias.detach()
            for linear, bias in zip(plain, biases, strict=True)
        ]
    )

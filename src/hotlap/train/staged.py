"""Staged backward: from some step on only the top layers train, on what the frozen ones below made of the rows.

What the frozen layers give is a function of the run, so a slice that resumes in the tail computes it again and has the
same bits.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from hotlap.config_techniques import StagedConfig
from hotlap.data.order import Order
from hotlap.errors import ConfigError
from hotlap.train import optim
from hotlap.train.model import AdaptedModel

Key = tuple[int, int, int]

# B rows, T positions, D model width


class Stage:
    """The tail of a run: the boundary, which parameters still train above it, and what is kept of below."""

    def __init__(self, adapted: AdaptedModel, config: StagedConfig, order: Order) -> None:
        """
        Raises:
            ConfigError: the model does not come apart there.
        """
        self._adapted, self._config, self._order = adapted, config, order
        layers = adapted.layers
        if not layers:
            raise ConfigError("techniques.staged finds no layers in this family of models. Leave it out.")
        first = len(layers) - config.top_layers
        if first < 1:
            raise ConfigError(
                f"techniques.staged.top_layers = {config.top_layers}, and the model has {len(layers)} layers: nothing "
                f"would be frozen. Give fewer."
            )
        if adapted.layers_share or adapted.has_grown:
            raise ConfigError(
                "techniques.staged cannot freeze a part of this model: its layers share keys and values, or rows of "
                "added tokens train below them all. Leave it out."
            )
        self._below, self._above = layers[:first], layers[first:]
        trains = {id(parameter) for layer in self._above for parameter in layer.parameters()}
        self.active = {name: each for name, each in adapted.parameters.items() if id(each) in trains}
        if not self.active:
            raise ConfigError(
                f"techniques.staged: nothing trains in the top {config.top_layers} layers. Give more of them."
            )
        self._kept: dict[Key, torch.Tensor] = {}

    def is_on(self, step: int) -> bool:
        return step > self._config.after_step

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Freeze what is below. Doing it again changes nothing."""
        for name, parameter in self._adapted.parameters.items():
            if name not in self.active:
                parameter.requires_grad_(False)
                parameter.grad = None
        optim.retire(optimizer, self.active)

    def hidden_of(self, step: int, num_rows: int, place: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """What makes hidden states of a micro-batch: the one at `place` of the step's micro-batches of `num_rows`."""
        key = (self._order.source_of(step), num_rows, place)
        is_needed_again = self._order.is_repeated_after(step)

        def hidden(tokens_BT: torch.Tensor, segments_BT: torch.Tensor) -> torch.Tensor:
            boundary_BTD = self._kept.get(key)
            if boundary_BTD is None:
                boundary_BTD = self._boundary(tokens_BT, segments_BT)
            if is_needed_again:
                self._kept[key] = boundary_BTD
            else:
                self._kept.pop(key, None)
            with _giving(self._below, lambda _given: boundary_BTD):
                return self._adapted.hidden(tokens_BT, segments_BT)

        return hidden

    def forget(self) -> None:
        """Give the memory back."""
        self._kept.clear()

    @torch.no_grad()
    def _boundary(self, tokens_BT: torch.Tensor, segments_BT: torch.Tensor) -> torch.Tensor:
        """What the lowest layer above the boundary is given, `[B, T, D]`."""
        seen: list[torch.Tensor] = []

        def see(given_BTD: torch.Tensor) -> torch.Tensor:
            seen.append(given_BTD)
            return given_BTD

        # A base model's own dropout would be drawn anew by a slice that resumes, and from another step's numbers.
        self._adapted.peft_model.eval()
        try:
            with _giving(self._above, see):
                self._adapted.hidden(tokens_BT, segments_BT)
        finally:
            self._adapted.peft_model.train()
        return seen[0]


@contextmanager
def _giving(layers: list[torch.nn.Module], give: Callable[[torch.Tensor], torch.Tensor]) -> Generator[None]:
    """For a while these layers compute nothing and `give` what they return. The decoder goes on making each layer's
    mask and rotation, in whatever way its family does."""

    def forward(hidden_BTD: torch.Tensor, *_given: Any, **_named: Any) -> torch.Tensor:
        return give(hidden_BTD)

    before = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = forward
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            if own is None:
                del layer.forward
            else:
                layer.forward = own

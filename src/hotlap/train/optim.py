"""The optimizer, its learning rate at a step, and its state as named tensors."""

import math
from typing import Any

import torch

from hotlap.config import OptimConfig
from hotlap.config_techniques import TechniquesConfig
from hotlap.errors import ConfigError

Named = dict[str, torch.nn.Parameter]


def lr_at(step: int, num_steps: int, config: OptimConfig) -> float:
    """Learning rate of update `step` (the first is 1) of `num_steps`: a pure function of the step.

    Past the horizon it stays where it ended and never rises.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    first = config.warmup_steps
    if config.schedule == "warmdown":
        first = max(first, num_steps - math.ceil(config.warmdown_ratio * num_steps))
    decay_steps = max(1, num_steps - first)
    progress = min(1.0, max(0.0, (step - first - 1) / decay_steps))
    share = 0.5 * (1.0 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1.0 - progress
    floor = config.final_lr_ratio
    return config.lr * (floor + (1.0 - floor) * share)


class EagerAdamW(torch.optim.AdamW):
    """torch's AdamW, number for number. Its decorators, which only matter to `torch.compile`, import the compiler at
    the first step: seconds in which nothing is trained."""

    step = torch.no_grad()(torch.optim.AdamW.step.__wrapped__)  # type: ignore[attr-defined]
    zero_grad = torch.optim.AdamW.zero_grad.__wrapped__  # type: ignore[attr-defined]
    add_param_group = torch.optim.AdamW.add_param_group.__wrapped__  # type: ignore[attr-defined]


class Schedule:
    """The learning rate at each step of a run, with what the techniques make of it."""

    def __init__(self, config: OptimConfig, techniques: TechniquesConfig, num_steps: int) -> None:
        self._config, self._staged, self._num_steps = config, techniques.staged, num_steps
        self._scale = 1.0
        if techniques.integrated_lr is not None:
            self._scale = techniques.integrated_lr / math.fsum(map(self._unscaled, range(1, num_steps + 1)))

    def at(self, step: int) -> float:
        return self._scale * self._unscaled(step)

    def _unscaled(self, step: int) -> float:
        if self._staged is not None and self._staged.lr is not None and step > self._staged.after_step:
            return self._staged.lr
        return lr_at(step, self._config.schedule_steps or self._num_steps, self._config)


def build(parameters: Named, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over the adapter's parameters, in the order of their names; every B in a group of its own with LoRA+.

    Raises:
        ConfigError: this kind of optimizer does not run on the parameters' device, or its library is missing.
    """
    ratio = config.lora_plus_ratio
    outer = [name for name in sorted(parameters) if ratio is not None and "lora_B" in name]
    groups: list[dict[str, Any]] = [
        {"params": [parameters[name] for name in sorted(set(parameters) - set(outer))], "lr_ratio": 1.0}
    ]
    if ratio is not None:
        groups.append({"params": [parameters[name] for name in outer], "lr_ratio": ratio})
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    if config.kind == "adamw":
        return EagerAdamW(groups, **settings, fused=True)
    return _from_bitsandbytes(groups, config.kind, settings)


def _from_bitsandbytes(groups: list[dict[str, Any]], kind: str, settings: dict[str, Any]) -> torch.optim.Optimizer:
    device = next(parameter.device for group in groups for parameter in group["params"])
    if kind.startswith("paged") and device.type != "cuda":
        other = "adamw8bit" if kind.endswith("8bit") else "adamw"
        raise ConfigError(
            f"optim.kind = {kind!r} moves memory between a GPU and its host, and this machine trains on {device.type}. "
            f"Take {other!r}."
        )
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError(
            f"optim.kind = {kind!r} needs bitsandbytes: {error}. Run: pip install 'hotlap[train]'"
        ) from None
    names = {"adamw8bit": "AdamW8bit", "paged_adamw": "PagedAdamW", "paged_adamw8bit": "PagedAdamW8bit"}
    make: Any = getattr(bitsandbytes.optim, names[kind])
    return make(groups, **settings)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_ratio"]


def retire(optimizer: torch.optim.Optimizer, active: Named) -> None:
    """Leave the optimizer only these parameters, and their moments as they are."""
    kept = {id(parameter) for parameter in active.values()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in kept:
                optimizer.state.pop(parameter, None)
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in kept]


def state_tensors(optimizer: torch.optim.Optimizer, parameters: Named) -> dict[str, torch.Tensor]:
    """The optimizer's own tensors, not copies, as `exp_avg.<parameter>` and so on; empty before the first update.
    Integers become tensors; bitsandbytes' maps of 8-bit codes (`qmap`) are constants and left out."""
    return {
        f"{kind}.{name}": value if isinstance(value, torch.Tensor) else torch.tensor(value)
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for kind, value in optimizer.state[parameter].items()
        if not kind.startswith("qmap")
    }


def load_state(optimizer: torch.optim.Optimizer, parameters: Named, tensors: dict[str, torch.Tensor]) -> None:
    """Put back what `state_tensors` gave, copied to each parameter's device."""
    saved: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        kind, _, name = key.partition(".")
        saved.setdefault(name, {})[kind] = tensor
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            (name,) = [name for name, each in parameters.items() if each is parameter]
            if name in saved:
                _load_one(optimizer, group, parameter, (number, place), saved[name])


def _load_one(
    optimizer: Any, group: Any, parameter: torch.nn.Parameter, place: tuple[int, int], saved: dict[str, torch.Tensor]
) -> None:
    if isinstance(optimizer, torch.optim.AdamW):
        optimizer.state[parameter] = {kind: value.to(parameter.device, copy=True) for kind, value in saved.items()}
        return
    # bitsandbytes allocates its own state, paged where asked for, and counts steps in a plain integer.
    optimizer.init_state(group, parameter, *place)
    state = optimizer.state[parameter]
    for kind, value in saved.items():
        if isinstance(state[kind], torch.Tensor):
            state[kind].copy_(value)
        else:
            state[kind] = int(value)

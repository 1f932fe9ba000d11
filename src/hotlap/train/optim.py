"""The optimizer, its learning rate at a step, and its state as named tensors."""

import math

import torch

from hotlap.config import OptimConfig

Named = dict[str, torch.nn.Parameter]
_STATE = ("exp_avg", "exp_avg_sq", "step")


def lr_at(step: int, num_steps: int, config: OptimConfig) -> float:
    """Learning rate of update `step` (the first is 1) of `num_steps`: a pure function of the step.

    Past the horizon it stays where it ended and never rises.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    decay_steps = max(1, num_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps - 1) / decay_steps)
    share = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    floor = config.final_lr_ratio
    return config.lr * (floor + (1.0 - floor) * share)


def build(parameters: Named, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the adapter's parameters, in the order of their names."""
    return torch.optim.AdamW(
        [parameters[name] for name in sorted(parameters)],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def state_tensors(optimizer: torch.optim.Optimizer, parameters: Named) -> dict[str, torch.Tensor]:
    """The optimizer's own tensors, not copies, as `exp_avg.<parameter>` and so on; empty before the first update."""
    return {
        f"{kind}.{name}": optimizer.state[parameter][kind]
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for kind in _STATE
    }


def load_state(optimizer: torch.optim.Optimizer, parameters: Named, tensors: dict[str, torch.Tensor]) -> None:
    """Put back what `state_tensors` gave, copied to each parameter's device."""
    for name, parameter in parameters.items():
        if f"step.{name}" in tensors:
            optimizer.state[parameter] = {
                kind: tensors[f"{kind}.{name}"].to(parameter.device, copy=True) for kind in _STATE
            }

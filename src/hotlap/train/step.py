"""One optimizer update: micro-batches forward and backward, then the update, or nothing of it."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from hotlap.config import RunConfig
from hotlap.data.packed import PackedDataset
from hotlap.errors import AuditFailed, Diverged, NonFiniteLoss, OutOfMemory
from hotlap.train import loss, machine, optim
from hotlap.train.model import AdaptedModel
from hotlap.train.opening import OpenedRun
from hotlap.train.staged import Stage

# R rows of a step, B rows of a micro-batch, T positions

ResultT = TypeVar("ResultT")

_ABSURD_LOSS = 1_000.0
_FLOAT16_LOSS_SCALE = 2.0**12
"""Small gradients of activations are below what float16 can hold. A power of two, so it is taken out exactly; and a
constant, since one that adapts would be a state of the run."""

_NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class StepLoss:
    """`loss` in nats per trained token, None if the step has no trained token."""

    loss: float | None
    num_trained_tokens: int
    num_tokens: int


@dataclass(frozen=True)
class Batch:
    """Rows cut to the longest of them. Tokens that are no padding: `num_tokens`."""

    tokens_BT: torch.Tensor
    segments_BT: torch.Tensor
    is_trained_BT: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return int((self.segments_BT > 0).sum())


def read_batch(dataset: PackedDataset, rows: np.ndarray) -> Batch:
    segments_BT = torch.from_numpy(dataset.segments_NT[rows].astype(np.int32))
    longest = int((segments_BT > 0).sum(dim=1).max())
    return Batch(
        tokens_BT=torch.from_numpy(dataset.tokens_NT[rows].astype(np.int64))[:, :longest],
        segments_BT=segments_BT[:, :longest],
        is_trained_BT=torch.from_numpy(dataset.is_trained_NT[rows])[:, :longest],
    )


def batch_loss(
    model: AdaptedModel,
    batch: Batch,
    is_open: bool = False,
    hidden_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Nats summed over the batch's targets. `is_open`: a row is attended to as if it were one example. `hidden_of`
    stands in for `model.hidden`."""
    # On the host, since finding positions by a mask makes a device answer before it can go on.
    predicts_BT, next_BT = loss.targets_of(batch.tokens_BT, batch.segments_BT, batch.is_trained_BT)
    predicts_N = predicts_BT.flatten().nonzero().flatten()
    next_N = next_BT.flatten()[predicts_N]
    attended_BT = _attended(batch.segments_BT, is_open)
    tokens_BT, predicts_N, next_N = (
        given.to(model.device, non_blocking=True) for given in (batch.tokens_BT, predicts_N, next_N)
    )
    hidden_BTD = (hidden_of or model.hidden)(tokens_BT, attended_BT)
    return loss.summed_loss(model.head, hidden_BTD.flatten(0, 1).index_select(0, predicts_N), next_N, model.loss_chunk)


def _attended(segments_BT: torch.Tensor, is_open: bool) -> torch.Tensor:
    """The segments that are computed. What the last token of an example would predict is no target, and no other token
    sees it, so that it is padding: a thirtieth of the work where examples have thirty tokens."""
    if is_open:
        return (segments_BT > 0).to(segments_BT.dtype)
    is_last_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    is_last_BT[:, :-1] = segments_BT[:, 1:] != segments_BT[:, :-1]
    computed_BT = segments_BT.masked_fill(is_last_BT, 0)
    return computed_BT if computed_BT.any() else segments_BT


def num_targets(batch: Batch) -> int:
    return int(loss.targets_of(batch.tokens_BT, batch.segments_BT, batch.is_trained_BT)[0].sum())


class Stepper:
    """Makes steps. What a step does depends on its number, the run's seed and the data, on nothing before it."""

    def __init__(
        self,
        model: AdaptedModel,
        optimizer: torch.optim.Optimizer,
        opened: OpenedRun,
        config: RunConfig,
        on_out_of_memory: Callable[[int, int], None],
    ) -> None:
        """`on_out_of_memory(step, rows)` is told of every halving of the micro-batch, to `rows`."""
        self._model = model
        self._optimizer = optimizer
        self._dataset = opened.packing.train
        self._order = opened.order
        self._config = config
        self._seed = opened.identity.seed
        self._on_out_of_memory = on_out_of_memory
        self._loss_scale = _FLOAT16_LOSS_SCALE if opened.identity.precision == "float16" else 1.0
        self.micro_batch_rows = config.train.micro_batch_rows
        self.schedule = optim.Schedule(config.optim, config.techniques, opened.order.num_steps)
        staged = config.techniques.staged
        self._stage = None if staged is None else Stage(model, staged, opened.order)
        self._active = model.parameters
        self._norm: torch.Tensor | None = None
        self._norm_value = 0.0

    def forward_backward(self, step: int) -> StepLoss:
        """Gradients of the step's mean loss per trained token. Parameters stay as they are.

        Raises:
            NonFiniteLoss, Diverged: nothing may be applied.
            OutOfMemory: a single row does not fit.
        """
        rows = self._order.rows_of_step(step)
        self._model.peft_model.train()
        if self._stage is not None and self._stage.is_on(step):
            self._stage.begin(self._optimizer)
            self._active = self._stage.active

        def attempt(num_rows: int) -> StepLoss:
            self._optimizer.zero_grad(set_to_none=True)
            machine.seed(step_seed(self._seed, step))
            return self._accumulate(step, [rows[i : i + num_rows] for i in range(0, len(rows), num_rows)])

        def halve(num_rows: int) -> None:
            self._model.forget()
            if self._stage is not None:
                self._stage.forget()
            self.micro_batch_rows = num_rows
            self._on_out_of_memory(step, num_rows)

        return with_halving(attempt, self.micro_batch_rows, halve, f"step {step}")

    def _accumulate(self, step: int, micro_batches: list[np.ndarray]) -> StepLoss:
        batches = [read_batch(self._dataset, rows) for rows in micro_batches]
        total_targets = sum(num_targets(batch) for batch in batches)
        num_tokens = sum(batch.num_tokens for batch in batches)
        if total_targets == 0:
            return StepLoss(None, 0, num_tokens)
        nats: list[torch.Tensor] = []
        for place, batch in enumerate(batches):
            hidden_of = None
            if self._stage is not None and self._stage.is_on(step):
                hidden_of = self._stage.hidden_of(step, len(micro_batches[0]), place)
            found = batch_loss(self._model, batch, self._config.packing.attention == "open", hidden_of)
            nats.append(found.detach())
            (found / total_targets * self._loss_scale).backward()
        self._norm = self._gradient_norm(step)
        # The only time in a step that the device is asked for a value, and so waited for.
        *values, self._norm_value = torch.stack([*nats, self._norm]).tolist()
        mean_loss = sum(values) / total_targets
        require_sane(mean_loss, step)
        return StepLoss(mean_loss, total_targets, num_tokens)

    def _gradient_norm(self, step: int) -> torch.Tensor:
        """A float32 scalar on the device.

        Raises:
            AuditFailed: a parameter that trains got no gradient.
        """
        gradients: list[torch.Tensor] = []
        for name, parameter in self._active.items():
            if parameter.grad is None:
                raise AuditFailed(f"{name} is trainable and got no gradient at step {step}.")
            if self._loss_scale != 1.0:
                parameter.grad /= self._loss_scale
            gradients.append(parameter.grad)
        return torch.nn.utils.get_total_norm(gradients).float()

    def apply(self, step: int) -> float:
        """The update. Returns the gradient's norm before clipping.

        Raises:
            NonFiniteLoss: a gradient is not finite; nothing was applied.
        """
        assert self._norm is not None
        if not math.isfinite(self._norm_value):
            raise NonFiniteLoss("The gradient", self._norm_value, step)
        if self._config.optim.max_grad_norm is not None:
            parameters = list(self._active.values())
            torch.nn.utils.clip_grads_with_norm_(parameters, self._config.optim.max_grad_norm, self._norm)
        optim.set_lr(self._optimizer, self.schedule.at(step))
        self._optimizer.step()
        return self._norm_value


def require_sane(value: float, step: int, what: str = "Loss", intact_step: int | None = None) -> None:
    """
    Raises:
        NonFiniteLoss, Diverged
    """
    if not math.isfinite(value):
        raise NonFiniteLoss(what, value, step, intact_step)
    if value > _ABSURD_LOSS:
        raise Diverged(value, step, intact_step, what)


def step_seed(seed: int, step: int) -> int:
    """Seeds whatever is random within a step."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}".encode()).digest()[:7])


def with_halving(
    attempt: Callable[[int], ResultT], num_rows: int, on_halved: Callable[[int], None], what: str
) -> ResultT:
    """`attempt(num_rows)`, with half the rows as often as memory runs out.

    Raises:
        OutOfMemory: one row does not fit.
    """
    while True:
        try:
            return attempt(num_rows)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            words = str(error).partition("\n")[0]
        if num_rows == 1:
            raise OutOfMemory(
                f"One row does not fit into memory at {what} ({words}). The step before is intact. "
                f"Lower data.seq_len or lora.rank, which starts a run of its own, or set slice.gradient_checkpointing "
                f"= true, which goes on with this one."
            )
        num_rows //= 2
        on_halved(num_rows)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Torch on a CPU or on MPS, and the libraries of CUDA, say it with a plain RuntimeError."""
    is_plain = isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    return is_plain or isinstance(error, (torch.OutOfMemoryError, MemoryError))

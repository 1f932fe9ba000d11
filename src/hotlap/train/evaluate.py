"""Loss over the held-out rows. It changes nothing that training depends on."""

from collections.abc import Callable

import numpy as np
import torch

from hotlap.data.packed import PackedDataset
from hotlap.train.model import AdaptedModel
from hotlap.train.step import batch_loss, num_targets, read_batch, with_halving


class Evaluator:
    """`val_loss`: nats per trained token over all held-out rows, summed in their order."""

    def __init__(self, model: AdaptedModel, held_out: PackedDataset, micro_batch_rows: int) -> None:
        self._model = model
        self._held_out = held_out
        self._micro_batch_rows = micro_batch_rows

    def val_loss(self, check_time: Callable[[], None], on_out_of_memory: Callable[[int], None]) -> float:
        """`check_time` may give up by raising between batches."""

        def halve(num_rows: int) -> None:
            self._model.forget()
            self._micro_batch_rows = num_rows
            on_out_of_memory(num_rows)

        self._model.peft_model.eval()
        with torch.inference_mode():
            return with_halving(
                lambda num_rows: self._mean_loss(num_rows, check_time), self._micro_batch_rows, halve, "the evaluation"
            )

    def _mean_loss(self, num_rows: int, check_time: Callable[[], None]) -> float:
        nats, count = 0.0, 0
        for start in range(0, self._held_out.num_rows, num_rows):
            check_time()
            rows = np.arange(start, min(start + num_rows, self._held_out.num_rows))
            batch = read_batch(self._held_out, rows)
            nats += float(batch_loss(self._model, batch))
            count += num_targets(batch)
        return nats / count

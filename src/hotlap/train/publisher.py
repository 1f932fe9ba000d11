"""Checkpoints written behind the next step, by one thread, from a copy of the state."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hotlap import clock
from hotlap.checkpoint import CheckpointStore
from hotlap.errors import DiskFull
from hotlap.train import model, optim

OPTIMIZER_FILE = "optimizer.safetensors"
_GUESSED_BYTES_PER_S = 50e6
_EXIT_S = 0.5
_RETRY_FOR_S = 30.0
_RETRY_EVERY_S = 1.0


class Cancelled(Exception):
    """A publish was given up for a newer one; nothing became visible."""


@dataclass(frozen=True)
class Snapshot:
    """The state after a step, copied, so that training can go on while it is written."""

    step: int
    num_updates: int
    adapter: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    adapter_config: bytes
    facts: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        tensors = [*self.adapter.values(), *self.optimizer.values()]
        return sum(tensor.nbytes for tensor in tensors) + 65_536

    def files(self) -> Iterable[tuple[str, bytes]]:
        yield model.ADAPTER_CONFIG_FILE, self.adapter_config
        yield model.ADAPTER_FILE, model.save_tensors(self.adapter)
        yield OPTIMIZER_FILE, model.save_tensors(self.optimizer)


def published_key(facts: dict[str, Any]) -> tuple[int, int]:
    """Tells two states apart: the step, and the last step that was evaluated."""
    return facts["progress"]["step"], facts["progress"]["last_eval_step"]


class Publisher:
    """At most one publish is under way. The thread touches nothing that training changes."""

    def __init__(
        self,
        store: CheckpointStore,
        parameters: optim.Named,
        before: Callable[[], None],
        on_published: Callable[[int], None],
        say: Callable[[str], None],
    ) -> None:
        """`before` runs ahead of each publish: it makes durable what the checkpoint refers to."""
        self._store = store
        self._parameters = parameters
        self._before = before
        self._on_published = on_published
        self._say = say
        self._thread: threading.Thread | None = None
        self._under_way: Snapshot | None = None
        self._cancel = threading.Event()
        self._error: BaseException | None = None
        self._slowest_s: float | None = None
        self._num_bytes = 65_536 + sum(3 * parameter.nbytes for parameter in parameters.values())
        self.published: tuple[int, int] | None = None
        """`published_key` of the newest state that is published."""

    def publish_s(self) -> float:
        """How long a publish takes: the slowest measured, a guess from the size before the first."""
        if self._slowest_s is not None:
            return self._slowest_s
        return 1.0 + self._num_bytes / _GUESSED_BYTES_PER_S

    def tail_s(self) -> float:
        """Time to keep for the last publish and for leaving."""
        return 1.5 * self.publish_s() + _EXIT_S

    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, snapshot: Snapshot) -> None:
        """Publish behind; waits for the one before, and raises its error. A full disk is told and tried again later."""
        self.wait()
        self._cancel.clear()
        self._under_way = snapshot
        self._thread = threading.Thread(target=self._run, args=(snapshot,), name="publisher")
        self._thread.start()

    def wait(self) -> None:
        """Wait for what is under way.

        Raises:
            HotlapError: it failed for another reason than a full disk.
        """
        self._join()
        error, self._error = self._error, None
        if isinstance(error, DiskFull):
            self._say(f"{error} Training goes on; saving is tried again.")
        elif error is not None and not isinstance(error, Cancelled):
            raise error

    def finish(self, snapshot: Snapshot, deadline: clock.Deadline) -> None:
        """Publish now, unless this state is published already. Gives up an older publish that is under way if both
        do not fit; tries again for a while if the disk is full.

        Raises:
            HotlapError: it could not be saved.
        """
        is_other = self._under_way is not None and published_key(self._under_way.facts) != published_key(snapshot.facts)
        if self.is_busy() and is_other and not deadline.allows(2 * self.publish_s()):
            self._cancel.set()
        self.wait()
        retry_until = clock.Deadline(clock.monotonic_s() + _RETRY_FOR_S)
        while self.published != published_key(snapshot.facts):
            self._cancel.clear()
            self._run(snapshot)
            error, self._error = self._error, None
            if error is None:
                return
            out_of_time = retry_until.is_over() or not deadline.allows(self.publish_s() + _RETRY_EVERY_S)
            if not isinstance(error, DiskFull) or out_of_time:
                raise error
            clock.sleep_s(_RETRY_EVERY_S)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, snapshot: Snapshot) -> None:
        began_s = clock.monotonic_s()
        try:
            self._before()
            self._store.publish(
                snapshot.step,
                snapshot.files,
                snapshot.facts,
                snapshot.num_bytes,
                inspect=lambda staged: self._inspect(staged, snapshot.num_updates),
                check_cancelled=self._check_cancelled,
            )
        except BaseException as error:  # noqa: BLE001  (raised again in the thread that waits)
            self._error = error
            return
        self._slowest_s = max(self._slowest_s or 0.0, clock.monotonic_s() - began_s)
        self.published = published_key(snapshot.facts)
        self._on_published(snapshot.step)

    def _inspect(self, staged: Path, num_updates: int) -> None:
        path = staged / model.ADAPTER_FILE
        model.audit_adapter(self._parameters, model.load_tensors(path), num_updates, path)

    def _check_cancelled(self) -> None:
        if self._cancel.is_set():
            raise Cancelled

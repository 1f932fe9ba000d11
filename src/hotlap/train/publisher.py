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
from hotlap.train.stop import EXIT_S

OPTIMIZER_FILE = "optimizer.safetensors"
_GUESSED_BYTES_PER_S = 50e6
_RETRY_FOR_S = 30.0
_RETRY_EVERY_S = 1.0
_POLL_S = 0.05


class Cancelled(Exception):
    """A publish was given up for a newer one; nothing became visible."""


@dataclass(frozen=True)
class Snapshot:
    """The state after a step, copied, so that training can go on while it is written."""

    key: tuple[int, int]
    """`Progress.key`: the step comes first."""

    num_updates: int
    adapter: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    adapter_config: bytes
    facts: dict[str, Any]

    @property
    def step(self) -> int:
        return self.key[0]

    @property
    def is_best(self) -> bool:
        best = self.facts["best"]
        return best is not None and best["step"] == self.step

    @property
    def num_bytes(self) -> int:
        tensors = [*self.adapter.values(), *self.optimizer.values()]
        return sum(tensor.nbytes for tensor in tensors) + 65_536

    def files(self) -> Iterable[tuple[str, bytes]]:
        yield model.ADAPTER_CONFIG_FILE, self.adapter_config
        yield model.ADAPTER_FILE, model.save_tensors(self.adapter)
        yield OPTIMIZER_FILE, model.save_tensors(self.optimizer)


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
        """`before` is part of each publish, and its beginning: it makes durable what the checkpoint refers to."""
        self._store = store
        self._parameters = parameters
        self._before = before
        self._on_published = on_published
        self._say = say
        self._thread: threading.Thread | None = None
        self._under_way: Snapshot | None = None
        self._began_s = 0.0
        self._cancel = threading.Event()
        self._error: BaseException | None = None
        self._slowest_s: float | None = None
        self._slowest_before_s: float | None = None
        self._given_up_after_s = 0.0
        self._num_bytes = 65_536 + sum(3 * parameter.nbytes for parameter in parameters.values())
        self.published: tuple[int, int] | None = None
        """`key` of the newest state that is published."""

    @property
    def measured_s(self) -> float | None:
        """How long a publish takes: the slowest of this slice, or else of the one before; at least as long as one had
        taken that was given up."""
        return max(self._slowest_s or self._slowest_before_s or 0.0, self._given_up_after_s) or None

    def take_up(self, published: tuple[int, int], measured_s: float | None) -> None:
        """Go on from what an earlier slice published and measured."""
        self.published = published
        self._slowest_before_s = measured_s

    def publish_s(self) -> float:
        """`measured_s`, or a guess from the size; no less than the one under way has taken."""
        expected_s = self.measured_s or 1.0 + self._num_bytes / _GUESSED_BYTES_PER_S
        return max(expected_s, clock.monotonic_s() - self._began_s) if self.is_busy() else expected_s

    def tail_s(self) -> float:
        """Time to keep for the last publish and for leaving."""
        return 1.5 * self.publish_s() + EXIT_S

    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def let_finish(self, at_most_s: float) -> None:
        if self._thread is not None:
            self._thread.join(at_most_s)

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

    def settle(self, key: tuple[int, int], until: Callable[[], clock.Deadline]) -> None:
        """`wait`, and give up an older state than `key` if both that and `key`'s do not fit. `until` is asked again
        and again: a stop signal brings it nearer."""
        while self.is_busy():
            if self._is_in_the_way(key, until()):
                self._cancel.set()
            self.let_finish(_POLL_S)
        self.wait()

    def finish(self, snapshot: Snapshot, until: Callable[[], clock.Deadline]) -> None:
        """Publish now, unless this state is published already; tries again for a while if the disk is full.

        Raises:
            HotlapError: it could not be saved.
        """
        retry_until = clock.Deadline(clock.monotonic_s() + _RETRY_FOR_S)
        while self.published != snapshot.key:
            self._cancel.clear()
            self._run(snapshot)
            error, self._error = self._error, None
            if error is None:
                return
            out_of_time = retry_until.is_over() or not until().allows(self.publish_s() + _RETRY_EVERY_S)
            if not isinstance(error, DiskFull) or out_of_time:
                raise error
            clock.sleep_s(_RETRY_EVERY_S)

    def _is_in_the_way(self, key: tuple[int, int], deadline: clock.Deadline) -> bool:
        """Whether `key`'s publish fits only if the one under way is given up. Where it fits in no case, the older
        state is better than none; and the best so far is no other's to give up."""
        assert self._under_way is not None
        if self._under_way.key == key or self._under_way.is_best:
            return False
        if self.measured_s is None:
            return True
        left_s = max(0.0, self.measured_s - (clock.monotonic_s() - self._began_s))
        return deadline.allows(self.measured_s) and not deadline.allows(left_s + self.measured_s)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, snapshot: Snapshot) -> None:
        self._began_s = clock.monotonic_s()
        try:
            self._store.publish(
                snapshot.step,
                lambda: self._files(snapshot),
                snapshot.facts,
                snapshot.num_bytes,
                inspect=lambda staged: self._inspect(staged, snapshot.num_updates),
                check_cancelled=self._check_cancelled,
            )
        except BaseException as error:  # noqa: BLE001  (raised again in the thread that waits)
            self._error = error
            if isinstance(error, Cancelled):
                self._given_up_after_s = max(self._given_up_after_s, clock.monotonic_s() - self._began_s)
            return
        self._slowest_s = max(self._slowest_s or 0.0, clock.monotonic_s() - self._began_s)
        self.published = snapshot.key
        self._on_published(snapshot.step)

    def _files(self, snapshot: Snapshot) -> Iterable[tuple[str, bytes]]:
        self._before()
        yield from snapshot.files()

    def _inspect(self, staged: Path, num_updates: int) -> None:
        path = staged / model.ADAPTER_FILE
        model.audit_adapter(self._parameters, model.load_tensors(path), num_updates, path)

    def _check_cancelled(self) -> None:
        if self._cancel.is_set():
            raise Cancelled

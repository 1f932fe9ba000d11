"""What tests change in a slice process before it starts, by name: `patches:as_told`."""

import contextlib
import itertools
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotlap import clock, durable


def slower_disk() -> None:
    """Each sync takes 5 ms more."""
    durable.disk = _SlowDisk(5e-3)


class _SlowDisk(durable.Disk):
    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def sync(self, path: Any) -> None:
        time.sleep(self._delay_s)
        super().sync(path)


def phase_s(name: str) -> float:
    """A delay the test gave in the environment, in seconds."""
    return float(os.environ.get(f"TEST_{name.upper()}_S", "0"))


# --- by environment variables: `patches:as_told` applies each one whose variable is set ---


def as_told() -> None:
    for variable, patch in _BY_VARIABLE.items():
        if variable in os.environ:
            patch(os.environ[variable])


def mark(name: str) -> None:
    """An event `phase`, among those of the slice."""
    os.write(_EVENTS, f'{{"event": "phase", "name": "{name}"}}\n'.encode())


# The slice turns standard output over to its talk; events go to a copy, as these do.
_EVENTS = os.dup(1)
_PIECE_S = 0.02


def _sleep_in_pieces(seconds: float, between: Callable[[], None] = lambda: None) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        between()
        time.sleep(_PIECE_S)


def _before_step(act: Callable[[int], None]) -> None:
    from hotlap.train.step import Stepper

    forward_backward = Stepper.forward_backward

    def changed(self: Stepper, step: int) -> Any:
        act(step)
        return forward_backward(self, step)

    Stepper.forward_backward = changed  # type: ignore[method-assign]


def _stop_at(step: str) -> None:
    """Asks itself to stop during that step, which is finished."""
    _before_step(lambda now: os.kill(os.getpid(), signal.SIGTERM) if now == int(step) else None)


def _draw_random_numbers(count: str) -> None:
    """Uses up numbers of every global generator."""
    import numpy as np
    import torch

    torch.rand(int(count))
    np.random.rand(int(count))
    random.random()


def _slow_data(seconds: str) -> None:
    from hotlap.data import prepare as module

    prepare = module.prepare

    def slowed(*args: Any) -> Any:
        mark("data")
        _sleep_in_pieces(float(seconds))
        return prepare(*args)

    module.prepare = slowed


def _slow_warmup(seconds: str) -> None:
    """The slice's first step compiles, say."""
    is_warm = []

    def warm_up(_step: int) -> None:
        if not is_warm:
            mark("warmup")
            is_warm.append(True)
            _sleep_in_pieces(float(seconds))

    _before_step(warm_up)


def _short_lock(seconds: str) -> None:
    """How long the run lock lasts, however long the slice."""
    from hotlap import runs
    from hotlap.train import slice as slice_module

    acquire = runs.acquire
    slice_module.runs.acquire = lambda run, hold_s, say: acquire(run, float(seconds), say)


def _slow_step(seconds: str) -> None:
    _before_step(lambda _step: time.sleep(float(seconds)))


def _wait_before(told: str) -> None:
    """`4 PATH`: before step 4 it waits until there is such a file, so that what a test does then comes before it."""
    step, path = told.split(" ", 1)

    def wait(now: int) -> None:
        while now == int(step) and not Path(path).exists():
            time.sleep(0.005)

    _before_step(wait)


def _slow_evaluation(seconds: str) -> None:
    from hotlap.train.evaluate import Evaluator

    val_loss = Evaluator.val_loss

    def slowed(self: Evaluator, check_time: Callable[[], None], on_out_of_memory: Any) -> float:
        mark("evaluation")
        _sleep_in_pieces(float(seconds), check_time)
        return val_loss(self, check_time, on_out_of_memory)

    Evaluator.val_loss = slowed  # type: ignore[method-assign]


def _slow_write(seconds: str) -> None:
    """A checkpoint's write, spread over its syncs: three files, the manifest, its folder, and the folder above."""
    numbers = itertools.count(1)

    class SlowCheckpoints(durable.Disk):
        def make_dir(self, path: Path) -> None:
            super().make_dir(path)
            if path.name.startswith(".staging-step-"):
                mark(f"write {next(numbers)}")
                mark(f"write of step {int(path.name.split('-')[2])}")

        def sync(self, path: Path) -> None:
            if "checkpoints" in path.parts:
                time.sleep(float(seconds) / 6)
            super().sync(path)

    durable.disk = SlowCheckpoints()


def _hang_at(step: str) -> None:
    """A step that never ends, and does not listen."""

    def hang(now: int) -> None:
        if now == int(step):
            mark("hang")
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGALRM})
            time.sleep(3600.0)

    _before_step(hang)


def _wall_clock_jumps_at(step: str) -> None:
    """The system's clock is set forward by an hour."""
    has_jumped = []
    _before_step(lambda now: has_jumped.append(True) if now == int(step) else None)
    clock.wall_s = lambda: time.time() + 3600.0 * bool(has_jumped)


def _be_naive(about: str) -> None:
    """What the promise is not made of, to show that a test of it can fail."""
    from hotlap.train import model, optim
    from hotlap.train.publisher import Publisher
    from hotlap.train.staged import Stage
    from hotlap.train.stop import StopSignals

    if about == "stop":  # the flag is looked at between steps only
        StopSignals.may_give_up = lambda self: contextlib.nullcontext()  # type: ignore
    elif about == "tail":  # nothing is kept for the last save
        Publisher.tail_s = lambda self: 0.0  # type: ignore[method-assign]
    elif about == "optimizer":  # only the adapter is taken up again
        optim.load_state = lambda *args: None
    elif about == "stage":  # frozen layers are computed again at every step
        Stage.hidden_of = lambda self, *args: self._adapted.hidden  # type: ignore
    elif about == "logits":  # the output head is the end
        model.logit_scale_of = lambda _config: 1.0
    else:
        raise ValueError(about)


def _retry_for_s(seconds: str) -> None:
    from hotlap.train import publisher

    publisher._RETRY_FOR_S = float(seconds)
    publisher._RETRY_EVERY_S = 0.1


def _disk_is_full_for(step: str) -> None:
    """For that step's checkpoint only."""
    from hotlap.checkpoint import CheckpointStore
    from hotlap.errors import DiskFull

    publish = CheckpointStore.publish

    def refuse(self: CheckpointStore, now: int, *args: Any, **named: Any) -> Any:
        if now == int(step):
            raise DiskFull("full")
        return publish(self, now, *args, **named)

    CheckpointStore.publish = refuse  # type: ignore[method-assign]


def _limit_file_size(num_bytes: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(num_bytes), int(num_bytes)))


def _publish_in_step(_: str) -> None:
    """Training waits for each publish."""
    from hotlap.train.publisher import Publisher

    start = Publisher.start

    def start_and_wait(self: Publisher, snapshot: Any) -> None:
        start(self, snapshot)
        self.wait()

    Publisher.start = start_and_wait  # type: ignore[method-assign]


def _spoil_adapter(how: str) -> None:
    """The adapter's tensors on their way into a file, once there was an update."""
    from hotlap.train import model

    save_tensors = model.save_tensors

    def spoiled(tensors: dict[str, Any]) -> bytes:
        outer = {name for name in tensors if "lora_B" in name and not name.startswith(("exp_", "step"))}
        if outer and any(bool(tensors[name].any()) for name in outer):
            if how == "empty":
                tensors = {}
            elif how == "half":
                tensors = {name: tensor for name, tensor in tensors.items() if ".layers.0." in name}
            elif how == "zero":
                tensors = {name: tensor * (name not in outer) for name, tensor in tensors.items()}
        return save_tensors(tensors)

    model.save_tensors = spoiled


def _memory_for(tokens: str) -> None:
    """`400 training`: a forward pass over more tokens, padding included, does not fit, there or in the `evaluation`; `0
    loading`: nor does the model."""
    import torch

    from hotlap.train import model
    from hotlap.train.model import AdaptedModel

    most, where = tokens.split()
    hidden = AdaptedModel.hidden

    def full(*_given: Any, **_named: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    if where == "loading":
        model.load_base = full

    def limited(self: AdaptedModel, tokens_BT: Any, segments_BT: Any) -> Any:
        if (where == "training") == self.peft_model.training and tokens_BT.numel() > int(most):
            raise torch.OutOfMemoryError(f"CUDA out of memory: {tokens_BT.numel()} tokens.")
        return hidden(self, tokens_BT, segments_BT)

    AdaptedModel.hidden = limited  # type: ignore[method-assign]


def _change_loss(told: str) -> None:
    """`nan@3`: what the loss of step 3 becomes, its gradient staying; `0*`: of every step, with a gradient of 0."""
    value, is_everywhere, at = told.partition("*")
    value, _, at = value.partition("@")

    def change(nats: Any, step: int) -> Any:
        if is_everywhere:
            return nats * float(value)
        return nats - nats.detach() + float(value) if int(at or step) == step else nats

    _change_training_loss(change)


def _change_gradient(told: str) -> None:
    """`nan@3`: what the gradient of step 3 is multiplied with, the loss staying."""
    value, _, at = told.partition("@")

    def change(nats: Any, step: int) -> Any:
        if step == int(at):
            nats.register_hook(lambda gradient: gradient * float(value))
        return nats

    _change_training_loss(change)


def _change_training_loss(change: Callable[[Any, int], Any]) -> None:
    from hotlap.train import step as step_module

    batch_loss = step_module.batch_loss
    current = [0]
    _before_step(lambda step: current.__setitem__(0, step))
    step_module.batch_loss = lambda *given, **named: change(batch_loss(*given, **named), current[0])


def _val_losses(values: str) -> None:
    """One after another."""
    from hotlap.train.evaluate import Evaluator

    left = [float(value) for value in values.split()]
    Evaluator.val_loss = lambda self, check_time, on_out_of_memory: left.pop(0)  # type: ignore


def _bfloat16_s(seconds: str) -> None:
    """What a matrix product in bfloat16 takes, where one in float32 takes a second."""
    from hotlap.train import probe

    probe.measure = lambda device: {"size": 1, "float32_s": 1.0, "bfloat16_s": float(seconds)}


_BY_VARIABLE: dict[str, Callable[[str], None]] = {
    "TEST_STOP_AT": _stop_at,
    "TEST_RANDOM_NUMBERS": _draw_random_numbers,
    "TEST_DATA_S": _slow_data,
    "TEST_WARMUP_S": _slow_warmup,
    "TEST_LOCK_S": _short_lock,
    "TEST_STEP_S": _slow_step,
    "TEST_WAIT_BEFORE": _wait_before,
    "TEST_EVALUATION_S": _slow_evaluation,
    "TEST_WRITE_S": _slow_write,
    "TEST_HANG_AT": _hang_at,
    "TEST_WALL_CLOCK_JUMPS_AT": _wall_clock_jumps_at,
    "TEST_NAIVE": _be_naive,
    "TEST_RETRY_FOR_S": _retry_for_s,
    "TEST_DISK_IS_FULL_FOR": _disk_is_full_for,
    "TEST_FILE_BYTES": _limit_file_size,
    "TEST_PUBLISH_IN_STEP": _publish_in_step,
    "TEST_ADAPTER": _spoil_adapter,
    "TEST_MEMORY": _memory_for,
    "TEST_LOSS": _change_loss,
    "TEST_GRADIENT": _change_gradient,
    "TEST_VAL_LOSSES": _val_losses,
    "TEST_BFLOAT16_S": _bfloat16_s,
}


def publish_often() -> None:
    """A checkpoint after every step, behind the next one."""
    from hotlap.train.loop import Loop

    Loop._next_publish_s = lambda self: 0.0  # type: ignore[method-assign]

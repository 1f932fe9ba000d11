"""Slices as real processes without paying for their imports each time.

A zygote imports torch and the training code once and forks a child for every slice asked for, before torch has
started any thread of its own. Each slice is a real process that can be killed by any signal at any instruction; only
the seconds of importing are shared.

All workers of a test run share one, which ends with the last of them. Whoever comes first starts it, under a lock.
They talk over a socket in JSON lines: {"argv", "patch", "out", "env", "cwd"} in; {"pid"} and {"pid", "status"} out.
"""

import contextlib
import fcntl
import gc
import importlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hotlap.config import RunConfig

TESTS = Path(__file__).parent
T = TypeVar("T")


class SliceProcess:
    """A slice that runs, or ran."""

    def __init__(self, pid: int, out: Path) -> None:
        self.pid = pid
        self._out = out
        self._ended = threading.Event()
        self._events: list[dict[str, Any]] = []
        self._num_read = 0
        self.status: int | None = None

    def wait(self, timeout_s: float = 120.0) -> int:
        """Exit code; a signal that killed it as a negative number."""
        if not self._ended.wait(timeout_s):
            os.kill(self.pid, signal.SIGKILL)
            raise AssertionError(f"the slice did not end within {timeout_s} s:\n{self.talk()}")
        assert self.status is not None
        return self.status

    def kill(self, number: int = signal.SIGKILL) -> None:
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return

    def is_over(self) -> bool:
        return self._ended.is_set()

    def end(self, status: int) -> None:
        self.status = status
        self._ended.set()

    def events(self) -> list[dict[str, Any]]:
        """What it said so far; a line is parsed once, however often somebody looks."""
        if self._out.exists():
            with self._out.open("rb") as file:
                file.seek(self._num_read)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._num_read += len(whole) + len(newline)
            self._events += [json.loads(line) for line in whole.split(b"\n") if line]
        return list(self._events)

    def talk(self) -> str:
        path = self._out.with_suffix(".err")
        return path.read_text() if path.exists() else ""

    def result(self) -> dict[str, Any]:
        return next(event for event in reversed(self.events()) if event["event"] == "result")

    def wait_for(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The first event of this kind with these fields; fails when the slice ends without it."""

        def find() -> dict[str, Any] | None:
            for event in self.events():
                if event["event"] == kind and all(event.get(name) == value for name, value in fields.items()):
                    return event
            return None

        return self._wait_until(find, f"{kind} {fields}")

    def wait_for_talk(self, words: str) -> None:
        """Until it has said so on standard error; fails when it ends without it."""
        self._wait_until(lambda: words in self.talk() or None, words)

    def _wait_until(self, find: Callable[[], T | None], what: str, timeout_s: float = 120.0) -> T:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            was_over = self.is_over()
            if (found := find()) is not None:
                return found
            assert not was_over, f"ended without {what}:\n{self.talk()}"
            time.sleep(0.01)
        raise AssertionError(f"no {what} within {timeout_s} s:\n{self.talk()}")


class Zygote:
    def __init__(self, scratch: Path, base: Path | None = None, shared: Path | None = None) -> None:
        """`base`: a model folder to read once, for slices of one thread (a pool of threads does not survive a fork).
        `shared`: the folder where others of this test run look for it too, or `scratch`."""
        self._scratch = scratch
        self._numbers = itertools.count(1)
        self._slices: dict[int, SliceProcess] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = self._connected(shared or scratch, [str(base)] if base else [])
        self._answers: list[int] = []
        self._turn = threading.Lock()
        self._started = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _connected(self, folder: Path, words: list[str]) -> socket.socket:
        with _locked(folder) as address:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(address)
            except (FileNotFoundError, ConnectionRefusedError):
                with socket.socket(socket.AF_UNIX) as listener:
                    (folder / _NAME).unlink(missing_ok=True)
                    listener.bind(address)
                    listener.listen()
                    command = [sys.executable, __file__, str(folder), str(listener.fileno()), *words]
                    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
                    self._process = subprocess.Popen(command, pass_fds=[listener.fileno()], **quiet)
                connection.connect(address)
        return connection

    def start(self, config: RunConfig, patch: str | None = None, env: dict[str, str] | None = None) -> SliceProcess:
        """Start a slice. `patch` names `module:function` of the tests, called in the child before the slice."""
        out = self._scratch / f"slice-{next(self._numbers)}.jsonl"
        argv = [json.dumps({"config": config.model_dump(mode="json")})]
        env = {**os.environ, **(env or {})}
        order = {"argv": argv, "patch": patch, "out": str(out), "env": env, "cwd": str(Path.cwd())}
        # Answers carry no name, so one order at a time.
        with self._turn, self._started:
            self._socket.sendall(json.dumps(order).encode() + b"\n")
            assert self._started.wait_for(lambda: bool(self._answers), timeout=180), "the zygote does not answer"
            pid = self._answers.pop()
            process = self._slices[pid] = SliceProcess(pid, out)
            self._started.notify_all()
            return process

    def run(self, config: RunConfig, patch: str | None = None, **env: str) -> SliceProcess:
        process = self.start(config, patch, env)
        process.wait()
        return process

    @staticmethod
    def wait_for_any(processes: Sequence[SliceProcess], timeout_s: float = 120.0) -> None:
        """Until one of them has ended."""
        until = time.monotonic() + timeout_s
        while not any(process.is_over() for process in processes):
            assert time.monotonic() < until, [process.talk() for process in processes]
            time.sleep(0.005)

    def close(self) -> None:
        """Whoever started it waits for its end, which comes when nobody needs it any more."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join(timeout=10)
        self._socket.close()
        if self._process:
            self._process.wait()

    def _read(self) -> None:
        for line in self._socket.makefile("rb"):
            answer = json.loads(line)
            with self._started:
                if "status" not in answer:
                    self._answers.append(answer["pid"])
                    self._started.notify_all()
                    continue
                self._started.wait_for(lambda: answer["pid"] in self._slices, timeout=10)  # noqa: B023
            self._slices.pop(answer["pid"]).end(answer["status"])


# --- the zygote's own process ---

_NAME = "zygote"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[str]:
    """The address of the zygote that belongs to a folder, which nobody else starts or ends meanwhile. It is short: a
    socket's must be."""
    lock = os.open(folder / f"{_NAME}.lock", os.O_RDWR | os.O_CREAT)
    place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield f"/proc/self/fd/{place}/{_NAME}"
    finally:
        os.close(place)
        os.close(lock)


def _serve(folder: Path, listener: socket.socket, base: Path | None) -> None:
    import peft
    import peft.utils.transformers_weight_conversion
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import hotlap.data.packed
    import hotlap.data.render
    import hotlap.train.loop
    import hotlap.train.model
    import hotlap.train.opening
    import hotlap.train.slice

    sys.path.insert(0, str(TESTS))
    if base:
        torch.set_num_threads(1)
        model = hotlap.train.model.load_base(base)
        hotlap.train.model.load_base = lambda folder, *_: model
    # The first one to ask has a thousand patterns compiled.
    peft.utils.transformers_weight_conversion.get_checkpoint_conversion_mapping("llama")
    # What is imported is no garbage, and looking at it would have each slice copy the pages where it lies.
    gc.freeze()
    clients = _Clients(folder, listener)
    for client, order in clients.orders():
        pid = os.fork()
        if pid == 0:
            clients.forget()
            _become_slice(order)
        clients.tell(client, {"pid": pid})
        clients.children[pid] = client
    os._exit(0)  # leaving torch takes seconds on a busy machine


class _Clients:
    """Those who order slices, and whose slice is whose."""

    def __init__(self, folder: Path, listener: socket.socket) -> None:
        self._folder = folder
        self._listener = listener
        self._buffers: dict[socket.socket, bytes] = {}
        self.children: dict[int, socket.socket] = {}
        listener.setblocking(False)

    def orders(self) -> Iterator[tuple[socket.socket, dict[str, Any]]]:
        """Orders as they come, until nobody is left; children that ended are told in between."""
        while self._buffers or self._is_needed():
            ready, _, _ = select.select([self._listener, *self._buffers], [], [], 0.01)
            self._reap()
            for each in ready:
                if each is self._listener:
                    self._accept()
                    continue
                data = _received(each)
                if not data:
                    self._forsake(each)
                    continue
                *lines, self._buffers[each] = (self._buffers[each] + data).split(b"\n")
                for line in lines:
                    yield each, json.loads(line)

    def tell(self, client: socket.socket, answer: dict[str, int]) -> None:
        with contextlib.suppress(OSError):  # it is gone
            client.sendall(json.dumps(answer).encode() + b"\n")

    def forget(self) -> None:
        """In a child: none of this is its own."""
        for each in (self._listener, *self._buffers):
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            client, _ = self._listener.accept()
            client.setblocking(True)
            self._buffers[client] = b""

    def _forsake(self, client: socket.socket) -> None:
        client.close()
        del self._buffers[client]
        for pid in [pid for pid, each in self.children.items() if each is client]:
            os.kill(pid, signal.SIGKILL)

    def _is_needed(self) -> bool:
        """Whether somebody came at the last moment; if not, the next one has to start another."""
        with _locked(self._folder):
            self._accept()
            if not self._buffers:
                (self._folder / _NAME).unlink(missing_ok=True)
        return bool(self._buffers)

    def _reap(self) -> None:
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self.tell(self.children.pop(pid), {"pid": pid, "status": os.waitstatus_to_exitcode(status)})


def _received(client: socket.socket) -> bytes:
    try:
        return client.recv(1 << 20)
    except ConnectionResetError:
        return b""


def _become_slice(order: dict[str, Any]) -> None:
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(order["env"])
        os.chdir(order["cwd"])
        out = Path(order["out"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT, 0o644), 1)
        os.dup2(os.open(out.with_suffix(".err"), os.O_WRONLY | os.O_CREAT, 0o644), 2)
        if order["patch"]:
            module, _, function = order["patch"].partition(":")
            getattr(importlib.import_module(module), function)()
        from hotlap.train import slice as slice_module

        slice_module.main(order["argv"])
    except BaseException:  # noqa: BLE001  (told, then the forked child ends)
        import traceback

        traceback.print_exc()
    os._exit(1)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), Path(sys.argv[3]) if sys.argv[3:] else None)

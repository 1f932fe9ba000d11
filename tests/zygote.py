"""Slices as real processes without paying for their imports each time.

A zygote imports torch and the training code once and forks a child for every slice asked for, before torch has
started any thread of its own. Each slice is a real process that can be killed by any signal at any instruction; only
the seconds of importing are shared.

Parent and zygote talk in JSON lines: {"argv", "patch", "out", "env"} in; {"pid"} and {"pid", "status"} out.
"""

import gc
import importlib
import itertools
import json
import os
import select
import signal
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
        lines = self._out.read_bytes().split(b"\n")[:-1] if self._out.exists() else []
        return [json.loads(line) for line in lines]

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
    def __init__(self, scratch: Path, base: Path | None = None) -> None:
        """`base`: a model folder to read once, for slices of one thread (a pool of threads does not survive a fork)."""
        self._scratch = scratch
        self._numbers = itertools.count(1)
        self._slices: dict[int, SliceProcess] = {}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *([str(base)] if base else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._answers: list[int] = []
        self._turn = threading.Lock()
        self._started = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, config: RunConfig, patch: str | None = None, env: dict[str, str] | None = None) -> SliceProcess:
        """Start a slice. `patch` names `module:function` of the tests, called in the child before the slice."""
        out = self._scratch / f"slice-{next(self._numbers)}.jsonl"
        argv = [json.dumps({"config": config.model_dump(mode="json")})]
        order = {"argv": argv, "patch": patch, "out": str(out), "env": {**os.environ, **(env or {})}}
        assert self._process.stdin
        # Answers carry no name, so one order at a time.
        with self._turn, self._started:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
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
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=60)  # leaving torch takes seconds on a busy machine
        self._reader.join(timeout=10)
        assert self._process.stdout
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._started:
                if "status" not in answer:
                    self._answers.append(answer["pid"])
                    self._started.notify_all()
                    continue
                self._started.wait_for(lambda: answer["pid"] in self._slices, timeout=10)  # noqa: B023
            self._slices.pop(answer["pid"]).end(answer["status"])


def _serve() -> None:
    import peft  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import hotlap.data.packed
    import hotlap.data.render
    import hotlap.train.loop
    import hotlap.train.model
    import hotlap.train.opening

    sys.path.insert(0, str(TESTS))
    if sys.argv[1:]:
        torch.set_num_threads(1)
        base = hotlap.train.model.load_base(Path(sys.argv[1]))
        hotlap.train.model.load_base = lambda folder, *_: base
    # What is imported is no garbage, and looking at it would have each slice copy the pages where it lies.
    gc.freeze()
    for order in _orders():
        pid = os.fork()
        if pid == 0:
            _become_slice(order)
        print(json.dumps({"pid": pid}), flush=True)


def _orders() -> Iterator[dict[str, Any]]:
    """Orders as they come; children that ended are told in between."""
    buffer = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.01)
        _reap()
        if not ready:
            continue
        data = os.read(0, 1 << 20)
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        print(json.dumps({"pid": pid, "status": os.waitstatus_to_exitcode(status)}), flush=True)


def _become_slice(order: dict[str, Any]) -> None:
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(order["env"])
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
    _serve()

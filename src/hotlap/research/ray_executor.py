"""Trials on a Ray cluster: each is a task that starts the same child under the same watchdog, on a node that is free.

Ray Core only: the study proposes and judges, the child keeps its own time, and Ray says where. Every node needs this
version of hotlap. The program's file and the text go with each task; what else a trial reads (a run's TOML file, its
model) must lie at the same path everywhere. The journal stays with this process, which is its only writer.
"""

import os
import signal
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray.exceptions import RayError, TaskCancelledError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hotlap import child, clock, durable
from hotlap.config import hotlap_home
from hotlap.errors import INTERRUPTED
from hotlap.research.executor import NUMBERS, Ending, Trial, run_trial
from hotlap.research.history import Row

_PATIENCE_S = 10.0
_TAIL = 2000


class RayExecutor:
    """Trials as tasks, each with as many processors as the trial has threads, and a GPU of its own on `cuda`.

    Ray is not asked to make a lost task again: its loss is written down, and the study makes the run again under seeds
    of its own.
    """

    def __init__(self, stops: child.Stops) -> None:
        self._stops = stops
        self._was_ours = not ray.is_initialized()
        if self._was_ours:  # the cluster of RAY_ADDRESS, or a new one on this machine
            ray.init(log_to_driver=False, include_dashboard=None)
        self._pending: dict[Any, Trial] = {}
        self._asked_to_stop: set[Any] = set()
        self._node_of_pair: dict[str, str] = {}

    def submit(self, trial: Trial) -> None:
        options: dict[str, Any] = {"num_cpus": trial.order["threads"], "max_retries": 0}
        if trial.order["device"] == "cuda":
            options["num_gpus"] = 1
        if trial.pair in self._node_of_pair:  # both arms of a pair on one machine
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self._node_of_pair[trial.pair], soft=False)
        ref = _run.options(**options).remote(trial, _files_of(trial))
        self._pending[ref] = trial

    def next_ended(self) -> Ending:
        while True:
            done, _ = ray.wait(list(self._pending), num_returns=1, timeout=1.0)
            if done:
                return self._ending_of(done[0])
            if self._stops.was_asked:
                self._stop_all()

    def close(self) -> None:
        for ref in self._pending:
            ray.cancel(ref, force=True)
        patience = clock.Deadline(clock.monotonic_s() + _PATIENCE_S)
        while self._pending and not patience.is_over():  # until no child of a task is left
            done, _ = ray.wait(list(self._pending), num_returns=1, timeout=patience.remaining_s())
            for ref in done:
                del self._pending[ref]
        if self._was_ours:
            ray.shutdown()

    def _stop_all(self) -> None:
        """Once for every task; again, and hard, after a second Ctrl-C."""
        for ref in self._pending:
            if ref not in self._asked_to_stop or self._stops.was_killed:
                ray.cancel(ref, force=self._stops.was_killed)
                self._asked_to_stop.add(ref)

    def _ending_of(self, ref: Any) -> Ending:
        trial = self._pending.pop(ref)
        try:
            fields, left, node = ray.get(ref)
        except TaskCancelledError:
            return Ending(trial.run_id, _gone("Stopped", "stopped while it ran", self._stop_code()), was_stopped=True)
        except RayError as error:
            was_stopped = ref in self._asked_to_stop
            # The child ends with its task's process.
            code = self._stop_code() if was_stopped else -signal.SIGKILL
            return Ending(trial.run_id, _gone(type(error).__name__, str(error), code), was_stopped)
        durable.make_dirs(trial.folder)
        for name, data in left.items():
            durable.replace(trial.folder / name, data)
        if trial.pair is not None:
            self._node_of_pair[trial.pair] = node
        return Ending(trial.run_id, fields, was_stopped=ref in self._asked_to_stop)

    def _stop_code(self) -> int | None:
        return INTERRUPTED if self._stops.was_killed else None


def _gone(error_class: str, tail: str, code: int | None) -> Row:
    """A run that left nothing: its worker or its node is gone, and nothing is learned of the configuration."""
    fields: Row = dict.fromkeys(NUMBERS)
    return {**fields, "status": "killed", "exit_code": code, "error_class": error_class, "error_tail": tail[-_TAIL:]}


def _files_of(trial: Trial) -> dict[str, bytes]:
    """What a node may lack: the program, if it is a file, and the data, if it is one file that says it all."""
    paths = {"program": Path(trial.program), "data": Path(trial.order["data"])}
    return {name: path.read_bytes() for name, path in paths.items() if path.is_file() and path.suffix not in (".toml",)}


@ray.remote
def _run(trial: Trial, files: dict[str, bytes]) -> tuple[Row, dict[str, bytes], str]:
    """On a node: the trial's fields, what it left, and which node this is."""
    # Ray cancels by an interrupt, which workers ignore where their cluster was started in the background of a shell.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = hotlap_home() / "trials" / f"{trial.run_id}-{os.getpid()}"
    durable.make_dirs(folder)
    try:
        program, order = trial.program, trial.order
        if "program" in files:
            program = str(folder / Path(trial.program).name)
            durable.replace(Path(program), files["program"])
        if "data" in files:
            order = {**order, "data": str(folder / Path(order["data"]).name)}
            durable.replace(Path(order["data"]), files["data"])
        here = Trial(trial.run_id, program, order, trial.deadline_s, folder)
        # Signals are Ray's here: cancelling the task raises in this thread, and leaving the watch ends the child.
        ending = run_trial(here, child.Stops(), lambda _run_id, _fraction, _loss: None)
        left = {
            path.name: path.read_bytes() for path in (folder / "order.json", folder / "result.json") if path.exists()
        }
        return ending.fields, left, str(ray.get_runtime_context().get_node_id())
    finally:
        durable.remove_tree(folder)

"""Trials as child processes: one order in, one result out, each under a watchdog, some at a time.

A trial is any program that is called as `PROGRAM ORDER.json`, writes its result to the order's `out` and exits 0
(docs/research.md). What becomes of it has a status of its own, whether or not it lived to give a result.
"""

import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from hotlap import child, clock, durable
from hotlap.errors import INTERRUPTED, OVERRAN, ConfigError, UsageError
from hotlap.research.disturbed import flags_of
from hotlap.research.history import OK, Row

TABLES = ("floors", "validity", "machine", "data")
NUMBERS = (
    *("val_search_nats_per_byte", "val_search_bpb", "val_lock_nats_per_byte", "train_loss_ema", "val_tokens"),
    *("val_bytes", "budget_s", "charged_s", "wall_s", "cpu_s", "setup_s", "compile_s", "warm_s", "eval_s", "total_s"),
    *("steps", "tokens", "tokens_per_s", "step_ms_p20", "step_ms_p50", "step_ms_p95", "epochs", "params"),
    *("params_active", "flops_per_token", "expected_mem_mb", "mfu", "peak_mem_mb", "lr_at_end", "grad_norm_p50"),
    *("grad_norm_p99", "loss_curve", *TABLES),
)
"""What a run's row takes over from the trial's result; null where there is none, or something of another kind."""

_OWN_STATUSES = frozenset((OK, "nan", "diverged", "oom", "crash"))
_TAIL_CHARS = 2000
_PROBE_FLOPS = 2 * 256**3
"""Of the reference product that `validity.probe_before` times, in milliseconds."""

_THROTTLED_SHARE = 0.02
_AXES_S = 120.0
_GIT_S = 10.0
_SMI_S = 10.0


@dataclass(frozen=True)
class Trial:
    """A run to be made: its order, and the folder that keeps what it leaves."""

    run_id: str
    program: str
    order: Row
    deadline_s: float
    folder: Path
    pair: str | None = None
    """Trials with the same word are compared with each other, and run on the same machine."""


@dataclass(frozen=True)
class Ending:
    """How a run ended, as fields of its row: `status`, `exit_code`, `error_class`, `error_tail` and `NUMBERS`."""

    run_id: str
    fields: Row
    was_stopped: bool = False
    """Somebody asked this process to stop while the trial ran."""


OnProgress = Callable[[str, float, float | None], None]
"""Run, charged fraction, training loss."""


class Executor(Protocol):
    """Where trials run, several at a time."""

    def submit(self, trial: Trial) -> None:
        """Start it, or hold it until there is room."""
        ...

    def next_ended(self) -> Ending:
        """Wait for any submitted trial to end."""
        ...

    def close(self) -> None:
        """Leave nothing behind that runs."""
        ...


class LocalExecutor:
    """Child processes of this one. With several at a time, each worker keeps to cores of its own."""

    def __init__(self, num_workers: int, stops: child.Stops, on_progress: OnProgress) -> None:
        self._stops, self._on_progress = stops, on_progress
        self._trials: queue.Queue[Trial | None] = queue.Queue()
        self._endings: queue.Queue[Ending | Exception] = queue.Queue()
        # The workers live as long as the executor: a trial ends with the thread that started it (`tether.py`).
        self._threads = [
            threading.Thread(target=self._work, args=(cores,), daemon=True) for cores in shares_of_cores(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, trial: Trial) -> None:
        self._trials.put(trial)

    def next_ended(self) -> Ending:
        while True:
            try:
                ending = self._endings.get(timeout=1.0)  # in pieces, so that this thread hears signals
            except queue.Empty:
                continue
            if isinstance(ending, Exception):
                raise ending
            return ending

    def close(self) -> None:
        self._stops.was_asked = self._stops.was_killed = True  # also for a child that is being started just now
        for process in list(self._stops.processes):
            process.kill()
        for _ in self._threads:
            self._trials.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, cores: frozenset[int]) -> None:
        if cores:
            os.sched_setaffinity(0, cores)
        while (trial := self._trials.get()) is not None:
            if self._stops.was_killed:
                continue
            try:
                self._endings.put(run_trial(trial, self._stops, self._on_progress))
            except Exception as error:  # noqa: BLE001  (a bug, or a full disk: the main thread raises it)
                self._endings.put(error)


def shares_of_cores(num_workers: int) -> list[frozenset[int]]:
    """For every worker the cores it keeps to; none where it may use all, or where the system knows no such thing."""
    if num_workers == 1 or not hasattr(os, "sched_getaffinity"):
        return [frozenset()] * num_workers
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < num_workers:
        raise ConfigError(f"study.workers is {num_workers}, and this machine has {len(cores)} cores; ask for fewer.")
    each = len(cores) // num_workers
    return [frozenset(cores[each * number : each * (number + 1)]) for number in range(num_workers)]


def command_of(program: str) -> list[str]:
    """How a program is started."""
    return [sys.executable, program] if program.endswith(".py") else [sys.executable, "-m", program]


def code_hash_of(program: str) -> str:
    """SHA-256 of a program's file.

    Raises:
        ConfigError: there is no such file or module.
    """
    try:
        spec = None if program.endswith(".py") else find_spec(program)
        return durable.sha256_file(Path(program if spec is None or spec.origin is None else spec.origin))
    except (ModuleNotFoundError, OSError):
        raise ConfigError(f"study.program: there is no {program}.") from None


@lru_cache
def commit_of(program: str) -> Row:
    """The commit of the repository that keeps a program, and whether anything there has been changed since; null where
    none does. Asked once: what happens to the program later, the hash of its code tells."""
    spec = None if program.endswith(".py") else find_spec(program)
    path = Path(program if spec is None or spec.origin is None else spec.origin).absolute()

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", path.parent, *words], capture_output=True, text=True, timeout=_GIT_S)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", path.name) is None:  # a virtual environment inside of somebody's repository
        return {"git_commit": None, "dirty": None}
    changes = git("status", "--porcelain", "--untracked-files=no")
    return {"git_commit": git("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}


def ask_axes(program: str) -> dict[str, Any]:
    """What a program answers to `--axes`: `{name: {default, kind, low, high, choices}}`.

    Raises:
        ConfigError: it gives no such answer.
    """
    try:
        done = subprocess.run(
            [*command_of(program), "--axes"], capture_output=True, text=True, errors="replace", timeout=_AXES_S
        )
        axes = json.loads(done.stdout[done.stdout.index("{") :])
    except (subprocess.TimeoutExpired, ValueError):
        axes = None
    if not isinstance(axes, dict) or not axes or not all(isinstance(entry, dict) for entry in axes.values()):
        raise ConfigError(f"{program} --axes does not tell its axes as JSON; a trial must (docs/research.md).")
    return axes


def run_trial(trial: Trial, stops: child.Stops, on_progress: OnProgress) -> Ending:
    """Run one trial to its end, or to its deadline."""
    durable.make_dirs(trial.folder)
    order = trial.folder / "order.json"
    out = trial.folder / "result.json"
    durable.replace(order, (durable.canonical_json({**trial.order, "out": str(out)}) + "\n").encode())

    def hear(line: str) -> None:
        told = _progress_in(line)
        if told is not None:
            on_progress(trial.run_id, *told)

    argv = [sys.executable, "-m", "hotlap.tether", str(os.getpid()), *command_of(trial.program), str(order)]
    threads = str(trial.order["threads"])
    env = {**child.with_waiting_threads(os.environ), "OMP_NUM_THREADS": threads}
    kills_before, throttled_before = num_oom_kills(), throttled_us()
    end = child.run_child(
        argv, clock.Deadline(clock.monotonic_s() + trial.deadline_s), on_talk=hear, env=env, stops=stops
    )
    result = _read_result(out)
    status, error_class = status_of(end, result, num_oom_kills() > kills_before)
    fields = _fields(end, result, status, error_class)
    return Ending(trial.run_id, with_throttling(fields, throttled_us() - throttled_before), end.was_asked_to_stop)


def _progress_in(line: str) -> tuple[float, float | None] | None:
    try:
        told = json.loads(line)
        return float(told["fraction"]), told["loss"]
    except (ValueError, KeyError, TypeError):
        return None


def _read_result(path: Path) -> Row | None:
    try:
        result = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(result, dict):
        return None
    return {**result, **{name: _of_its_kind(name, finite(result.get(name))) for name in TABLES}}


def status_of(end: child.ChildEnd, result: Row | None, was_oom_killed: bool) -> tuple[str, str | None]:
    """A run's status and, where this module decides it, a word for what was wrong."""
    if end.exit_code == OVERRAN:
        return "timeout", "Timeout"
    if end.exit_code == INTERRUPTED or (end.was_asked_to_stop and end.exit_code != 0):
        return "killed", "Stopped"
    if end.exit_code == -signal.SIGKILL and was_oom_killed:
        return "oom", "OutOfMemoryKiller"
    if end.exit_code in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT):
        return "killed", child.signal_name(-end.exit_code)
    if end.exit_code == UsageError.exit_code:
        return "refused", "OrderRefused"
    if end.exit_code != 0:
        return "crash", child.signal_name(-end.exit_code) if end.exit_code < 0 else f"Exit{end.exit_code}"
    if result is None or result.get("status") not in _OWN_STATUSES:
        return "crash", "NoResult"
    return (result["status"], result.get("error_class")) if result["status"] != OK else _status_of_score(result)


def _status_of_score(result: Row) -> tuple[str, str | None]:
    loss = result.get("val_search_nats_per_byte")
    if isinstance(loss, int | float) and math.isfinite(loss):
        # No text is foretold without a doubt; a trial that says so has seen the answers, or has measured nothing.
        return (
            (OK, None)
            if loss > 0.0 and "zero_loss" not in flags_of(result.get("validity"))
            else ("refused", "ImpossibleScore")
        )
    return ("nan", "NonFiniteScore") if isinstance(loss, float) else ("crash", "NoScore")


def _fields(end: child.ChildEnd, result: Row | None, status: str, error_class: str | None) -> Row:
    known = result or {}
    fields: Row = {name: _of_its_kind(name, finite(known.get(name))) for name in NUMBERS}
    if status != OK:
        # A failed run has no score, whatever it printed: one that ranks would be the best, or the worst, for ever.
        fields |= {"val_search_nats_per_byte": None, "val_search_bpb": None, "val_lock_nats_per_byte": None}
    elif fields["val_search_nats_per_byte"] is not None:
        fields["val_search_nats_per_byte"] = float(fields["val_search_nats_per_byte"])
    fields |= {"total_s": round(end.wall_s, 3), "mfu": mfu_of(fields)}
    if fields["machine"] is not None:
        fields["machine"] |= gpu_facts() if fields["machine"].get("gpu") else dict.fromkeys(("driver", "power_w"))
    tail = None if status == OK else str(known.get("error_tail") or end.last_words)[-_TAIL_CHARS:]
    return {**fields, "status": status, "exit_code": end.exit_code, "error_class": error_class, "error_tail": tail}


def _of_its_kind(name: str, value: Any) -> Any:
    """A program of the user's may write anything."""
    kind = dict if name in TABLES else list if name == "loss_curve" else (int, float)
    return value if isinstance(value, kind) and not isinstance(value, bool) else None


def gpu_facts() -> Row:
    """Driver and power limit, in watts, of the GPU that children see first; null where `nvidia-smi` does not tell."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    query = [f"--id={visible}", "--query-gpu=driver_version,power.limit", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError, subprocess.TimeoutExpired):
        done = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=_SMI_S)
        driver, power_w = done.stdout.split(",")
        return {"driver": driver.strip(), "power_w": float(power_w)}
    return dict.fromkeys(("driver", "power_w"))


def mfu_of(fields: Row) -> float | None:
    """The model's operations a second, as a share of what a reference product reached on the same processor before and
    after. What a GPU could reach is not known."""
    flops, rate, validity = fields["flops_per_token"], fields["tokens_per_s"], fields["validity"] or {}
    probes = [validity.get(name) for name in ("probe_before", "probe_after")]
    known = [probe for probe in probes if isinstance(probe, int | float) and probe > 0]
    if not (known and flops and rate) or (fields["machine"] or {}).get("gpu"):
        return None
    return flops * rate / (_PROBE_FLOPS / (min(known) / 1e3))


def with_throttling(fields: Row, waited_us: int) -> Row:
    """The fields with how long the control group's quota held its processes back, and a flag if that is much."""
    if fields["validity"] is None:
        return fields
    validity = {**fields["validity"], "throttled_us": waited_us}
    if waited_us > _THROTTLED_SHARE * 1e6 * fields["total_s"]:
        validity["flags"] = [*flags_of(fields["validity"]), "throttled"]
    return {**fields, "validity": validity}


def throttled_us(path: Path = Path("/sys/fs/cgroup/cpu.stat")) -> int:
    """Microseconds for which this control group has been held back by its quota since it exists; 0 without one."""
    with suppress(OSError, ValueError, KeyError):
        return int(dict(line.split() for line in path.read_text().splitlines())["throttled_usec"])
    return 0


def finite(value: Any) -> Any:
    """A JSON value whose numbers are numbers; those that are none become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value


def num_oom_kills(files: Sequence[Path] = ()) -> int:
    """How often the kernel has killed for memory: in this control group, or where that is not told, on this machine."""
    for path in files or (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")):
        try:
            counts = dict(line.split()[:2] for line in path.read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return 0

"""A run's identity, folder, lock and state.

    runs/NAME/run.json                     identity, written once by the first slice
              slices/0007/holder.json      who holds, or held, the run lock; made visible exclusively
                          result.json      the slice's own account, its last word
                          exit.json        what its parent saw
              checkpoints/                 see checkpoint.py
              metrics.jsonl                one row per step and per evaluation, nothing that depends on time
              samples.jsonl                answers to `eval.sample_prompts`, before step 1 and at every evaluation
              adapter/  best/              the result, published when the run is done

The lock is the newest slice directory, its number the fencing number: taking the lock means publishing the next
number, which exactly one of many can do, and a holder whose successor exists has lost it.
"""

import json
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

from hotlap import checkpoint, clock, durable
from hotlap.errors import CorruptFile, RunLocked, UsageError, VolumeGone

Say = Callable[[str], None]

_CLOCKS_AGREE_S = 300.0


class RunFolder:
    """Paths of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity = path / "run.json"
        self.slices = path / "slices"
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.adapter = path / "adapter"
        self.best = path / "best"

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True)
class Identity:
    """What a run is; every later slice must agree with it."""

    trajectory: dict[str, Any]
    seed: int
    base_pins: dict[str, Any]
    data_pins: dict[str, dict[str, Any]]
    packed: dict[str, str]
    num_rows: int
    num_steps: int
    num_threads: int
    created_at: str
    precision: str = "float32"
    init_pins: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of the adapter that a warm start began with; empty without one."""

    def write(self, run: RunFolder) -> None:
        durable.replace(run.identity, (json.dumps({"format": 1, **asdict(self)}, indent=1) + "\n").encode())


def read_identity(run: RunFolder) -> Identity | None:
    """None before the first slice got as far as writing it.

    Raises:
        CorruptFile: it cannot be read.
    """
    if not run.identity.exists():
        return None
    try:
        fields = json.loads(run.identity.read_bytes())
        if fields.pop("format") != 1:
            raise ValueError("unknown format")
        return Identity(**fields)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptFile(f"{run.identity} is damaged ({error}); restore it, or start a new run with --run.") from None


# --- the lock ---


@dataclass(frozen=True)
class Holder:
    """Who took the lock: a process of a machine, until a moment in seconds since 1970."""

    number: int
    pid: int
    birth: str
    machine: str
    host: str
    started_at_s: float
    expires_at_s: float
    token: str

    def is_local(self) -> bool:
        return self.machine == machine_word()

    def is_alive(self) -> bool:
        """Whether the process still runs; only asked of a holder on this machine."""
        try:
            return clock.process_birth(self.pid) == self.birth
        except ProcessLookupError:
            return False


def machine_word() -> str:
    """Names this boot of this machine, and the pid namespace within: only there does a pid mean the same."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()}/{clock.boot_id()}/{namespace.readlink() if namespace.exists() else ''}"


class RunLock:
    """The right to write a run, held until `release` or until a later number exists."""

    def __init__(self, run: RunFolder, holder: Holder) -> None:
        self._run = run
        self.holder = holder
        self.number = holder.number
        self.folder = _slice_folder(run, holder.number)

    def require(self) -> None:
        """
        Raises:
            RunLocked: another slice took the run over, so nothing more may be written.
            VolumeGone: the hold itself is no longer there, so whatever is there now is another volume.
        """
        with durable.storage_errors(self.folder):
            is_there = (self.folder / "holder.json").exists()
            is_lost = _slice_folder(self._run, self.number + 1).exists()
        if not is_there:
            raise VolumeGone(
                f"{self.folder} has vanished while slice {self.number} was training. Mount the volume and run the same "
                f"command again; whatever was published there is intact."
            )
        if is_lost:
            raise RunLocked(
                f"Slice {self.number + 1} has taken over {self._run.name} since this one's lock ran out; "
                f"slice {self.number} stops without writing."
            )

    def release(self, result: dict[str, Any]) -> None:
        """Write the slice's account, which is also the end of its hold."""
        durable.replace(self.folder / "result.json", (durable.canonical_json(result) + "\n").encode())


def acquire(run: RunFolder, hold_s: float, say: Say) -> RunLock:
    """Take the run lock for at most `hold_s` seconds.

    Raises:
        RunLocked: a slice that may still be alive holds it.
    """
    durable.make_dirs(run.slices)
    pid = os.getpid()
    while True:
        newest = newest_number(run)
        if newest:
            _require_free(run, newest, say)
        now_s = clock.wall_s()
        holder = Holder(
            number=newest + 1,
            pid=pid,
            birth=clock.process_birth(pid),
            machine=machine_word(),
            host=socket.gethostname(),
            started_at_s=now_s,
            expires_at_s=now_s + hold_s,
            token=secrets.token_hex(8),
        )
        if _publish_holder(run, holder):
            return RunLock(run, holder)


def _require_free(run: RunFolder, number: int, say: Say) -> None:
    state = slice_state(run, number)
    if state.is_over:
        return
    holder = state.holder
    if holder is None:
        say(f"Slice {number} left no readable holder; its lock is taken over.")
        return
    now_s = clock.wall_s()
    left_s = holder.expires_at_s - now_s
    if holder.is_local() and not holder.is_alive():
        say(f"Slice {number} (process {holder.pid}) died without a word; its lock is taken over.")
    elif holder.started_at_s > now_s + _CLOCKS_AGREE_S:
        say(f"The lock of slice {number} was taken in the future: a clock jumped. It is taken over.")
    elif left_s <= 0:
        say(f"The lock of slice {number} ran out {-left_s:.0f} s ago; it is taken over.")
    else:
        way_out = f"Wait, or run: hotlap stop {run.name}." if holder.is_local() else "Wait until then."
        raise RunLocked(
            f"{run.name} is being trained by slice {number} (process {holder.pid} on {holder.host}), "
            f"which holds it for at most {left_s:.0f} s more. {way_out}"
        )


def _publish_holder(run: RunFolder, holder: Holder) -> bool:
    staged = run.slices / f".staging-{holder.token}"
    with durable.storage_errors(staged):
        durable.disk.make_dir(staged)
    durable.write_synced(staged / "holder.json", (durable.canonical_json(asdict(holder)) + "\n").encode())
    try:
        durable.rename_exclusively(staged, _slice_folder(run, holder.number))
    except FileExistsError:
        durable.remove_tree(staged)
        return False
    return True


# --- what the folders tell ---


@dataclass(frozen=True)
class SliceState:
    """One slice as its folder tells it. `result` is its own account, `exit` its parent's; either may be missing."""

    number: int
    holder: Holder | None
    result: dict[str, Any] | None
    exit: dict[str, Any] | None

    @property
    def is_over(self) -> bool:
        return self.result is not None or self.exit is not None

    @property
    def ended_at_s(self) -> float | None:
        """When its account was written, in seconds since 1970."""
        return self.result.get("ended_at_s") if self.result is not None else None

    @property
    def ending(self) -> str:
        """A reason word, or `running`, or `killed` for one that ended without an account."""
        if self.result is not None:
            return self.result["reason"]
        if self.exit is not None:
            return self.exit["reason"]
        if self.holder is None or clock.wall_s() > self.holder.expires_at_s:
            return "killed"
        return "running" if not self.holder.is_local() or self.holder.is_alive() else "killed"


def _slice_folder(run: RunFolder, number: int) -> Path:
    return run.slices / f"{number:04d}"


def newest_number(run: RunFolder) -> int:
    """The highest slice number, 0 before the first."""
    if not run.slices.is_dir():
        return 0
    return max((int(path.name) for path in run.slices.iterdir() if path.name.isdecimal()), default=0)


def slice_state(run: RunFolder, number: int) -> SliceState:
    folder = _slice_folder(run, number)
    return SliceState(
        number=number,
        holder=_read_holder(folder / "holder.json"),
        result=_read_account(folder / "result.json"),
        exit=_read_account(folder / "exit.json"),
    )


def all_slices(run: RunFolder) -> list[SliceState]:
    return [slice_state(run, number) for number in range(1, newest_number(run) + 1)]


def record_exit(run: RunFolder, number: int, seen: dict[str, Any]) -> None:
    """What a slice's parent saw of its end: `exit_code`, `reason`, `wall_s`. It ends the slice's hold."""
    durable.replace(_slice_folder(run, number) / "exit.json", (durable.canonical_json(seen) + "\n").encode())


def _read_holder(path: Path) -> Holder | None:
    fields = _read_json(path)
    return (
        Holder(**fields)
        if fields is not None and set(fields) == {field.name for field in dataclass_fields(Holder)}
        else None
    )


def _read_account(path: Path) -> dict[str, Any] | None:
    account = _read_json(path)
    return account if account is not None and "reason" in account else None


def _read_json(path: Path) -> dict[str, Any] | None:
    """None for what is missing or damaged."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True)
class RunState:
    """A run at a glance. `state` is `finished`, `running`, `paused`, `corrupt` or the reason word of the failure."""

    name: str
    folder: str
    state: str
    step: int
    num_steps: int | None
    num_slices: int
    loss: float | None
    val_loss: float | None
    created_at: str | None


def is_finished(run: RunFolder) -> bool:
    """Whether the result is there and whole."""
    try:
        durable.verify(run.adapter)
    except CorruptFile:
        return False
    return True


def run_state(run: RunFolder) -> RunState:
    newest = newest_number(run)
    try:
        identity, rows = read_identity(run), durable.read_rows(run.metrics)
    except CorruptFile as error:
        return RunState(run.name, str(run.path), error.reason, 0, None, newest, None, None, None)
    ending = slice_state(run, newest).ending if newest else "paused"
    if is_finished(run):
        state = "finished"
    elif ending in ("slice_over", "stopped", "killed"):
        state = "paused"
    else:
        state = ending
    return RunState(
        name=run.name,
        folder=str(run.path),
        state=state,
        step=max((row["step"] for row in rows), default=0),
        num_steps=identity.num_steps if identity else None,
        num_slices=newest,
        loss=next((row["loss"] for row in reversed(rows) if "loss" in row), None),
        val_loss=next((row["val_loss"] for row in reversed(rows) if "val_loss" in row), None),
        created_at=identity.created_at if identity else None,
    )


def list_runs(output_dir: Path) -> list[RunFolder]:
    """Runs in a folder of runs, by name."""
    if not output_dir.is_dir():
        return []
    return [RunFolder(path) for path in sorted(output_dir.iterdir()) if (path / "slices").is_dir()]


def find_run(name: str, output_dir: Path) -> RunFolder:
    """A run by its name in `output_dir`, or by its folder.

    Raises:
        UsageError: there is none.
    """
    for path in (output_dir / name, Path(name)):
        if (path / "slices").is_dir():
            return RunFolder(path)
    known = ", ".join(run.name for run in list_runs(output_dir)) or "none"
    raise UsageError(
        f"There is no run {name!r} in {output_dir}/ (there: {known}). Name another folder with --output-dir."
    )


def newest_checkpoint(run: RunFolder, say: Say) -> checkpoint.Checkpoint | None:
    """For readers of a run, who hold no lock."""
    return checkpoint.CheckpointStore(run.checkpoints, 0, 1, lambda: None).newest(say)

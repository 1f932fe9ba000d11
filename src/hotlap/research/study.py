"""A study: ask what is next, do it, write it down, until there is nothing more to do.

What is next is decided in `plan.py` and `claim.py`, from the journal alone. Here is only the doing: every start is in
the journal before its child exists, every ending before anything is concluded from it.
"""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hotlap
from hotlap import child, clock, durable
from hotlap.errors import INTERRUPTED, ConfigError, HotlapError, RunChanged, UsageError
from hotlap.research import acceptance, board, disturbed, plan, proposer, space
from hotlap.research.asking import Asker
from hotlap.research.executor import (
    NUMBERS,
    Ending,
    Executor,
    LocalExecutor,
    OnProgress,
    Trial,
    ask_axes,
    code_hash_of,
    commit_of,
)
from hotlap.research.history import OK, SCHEMA, History, Journal, Row, StudyFolder, only_writer
from hotlap.research.plan import Action, Decide, Finish, Start, Wait
from hotlap.research.sizes import Caps
from hotlap.research.space import StudyFile

FREE_SETTINGS = (
    *("trials_per_day", "setup_s", "proposer", "llm_command", "llm_timeout_s", "sentinel_every", "max_params"),
    *("max_mem_mb", "usd_per_hour", "on_disturbed"),
)
"""What may change in a study's file after its first run: nothing that a result depends on. How many disturbed runs are
among those that are used, the board says."""

_MACHINE = ("cpu", "cores", "threads", "gpu", "power_w", "torch")

Plan = Callable[[History, bytes], Action]
Tell = Callable[[Row, History], None]
"""Called after every row of the journal."""


@dataclass(frozen=True)
class Listener:
    """Who is told of a study's progress."""

    on_row: Tell
    on_progress: Callable[[str, float, float | None], None]
    say: Callable[[str], None]


class Study:
    """A study that this process may write, with what runs its trials."""

    def __init__(
        self,
        folder: StudyFolder,
        journal: Journal,
        secret: bytes,
        executor: Executor,
        make_propose: Callable[[], plan.Propose],
        listener: Listener,
    ) -> None:
        self._folder, self._journal, self._secret = folder, journal, secret
        self._executor, self._make_propose, self._listener = executor, make_propose, listener
        self._num_before = journal.history.num_ended
        """Runs of the commands before this one."""

    @property
    def history(self) -> History:
        return self._journal.history

    def search(self, num_trials: int | None, until: clock.Deadline | None = None) -> str:
        """Try so many changes, or, given none, go on until nothing better is expected. The same number again goes on
        with what was not finished. Raises as `run` does."""
        goal, propose = self._goal_of(num_trials), self._make_propose()
        return self.run(lambda history, secret: plan.next_in_search(history, secret, _now()[:10], goal, propose), until)

    def _goal_of(self, num_trials: int | None) -> int | None:
        """How many proposals are judged in the end."""
        if num_trials is None:
            return None
        history = self.history
        if (
            history.goal is None
            or history.goal["num_trials"] != num_trials
            or history.goal["num_judged"] <= history.num_judged
        ):
            wanted = {"num_trials": num_trials, "num_judged": history.num_judged + num_trials}
            self._journal.append({"schema": SCHEMA, "kind": "goal", "at": _now(), **wanted})
        assert history.goal is not None
        return int(history.goal["num_judged"])

    def run(self, next_action: Plan, until: clock.Deadline | None = None) -> str:
        """Act until the plan is finished. Returns the reason; after a stop signal `stopped`, or `interrupted` after
        a second Ctrl-C; `time` where another trial could outlast `until`.

        Raises:
            UsageError: not even one trial fits before `until`.
            HotlapError: what the plan says stands in the way, or a run that does not belong to this study.
        """
        if until is not None and not until.allows(self.history.study.deadline_s):
            raise UsageError(
                f"One trial may take {self.history.study.deadline_s:.0f} s, and {until.remaining_s():.0f} s are left. "
                f"Give more --minutes, or lower study.budget_s or study.setup_s."
            )
        stop: str | None = None
        while True:
            is_full = len(self.history.open) >= self.history.study.workers
            # Not asked where nothing could be started: a proposal may cost something.
            must_wait = self.history.open and (stop is not None or is_full)
            action = Wait() if must_wait else self._next(next_action)
            if stop and (isinstance(action, Start) or (stop != "time" and isinstance(action, Finish))):
                return stop
            if isinstance(action, Decide):
                self._append({**action.row, "at": _now()})
            elif isinstance(action, Start) and until is not None and not until.allows(self._longest_s(action)):
                stop = "time"
            elif isinstance(action, Start):
                self._start(action)
            elif self.history.open:
                ending = self._executor.next_ended()
                if ending.was_stopped:
                    stop = "interrupted" if ending.fields["exit_code"] == INTERRUPTED else stop or "stopped"
                self._record(ending)
            elif isinstance(action, Finish):
                if action.error:
                    raise action.error
                return action.reason

    def _next(self, next_action: Plan) -> Action:
        error = plan.trouble(self.history.ended, self._num_before, self.history.anchor)
        return Finish("stopped", error) if error else next_action(self.history, self._secret)

    def close(self) -> str:
        """End the study for good: with its secret in the journal, anybody can check its seeds, and foresee them."""
        self._append({"schema": SCHEMA, "kind": "revealed", "at": _now(), "secret": self._secret.decode()})
        return "closed"

    def _longest_s(self, action: Start) -> float:
        """What a start may take: a pair's first arm is not begun without room for the second."""
        num_trials = 2 if action.row["pair"] and action.row["order"] == 0 else 1
        return num_trials * self.history.study.deadline_s

    def _start(self, action: Start) -> None:
        study = self.history.study
        row: Row = {**action.row, "started_at": _now()}
        self._append(row)
        order: dict[str, Any] = {
            "config": action.config,
            "budget_s": study.budget_s,
            "seed_init": row["seed_init"],
            "seed_data": row["seed_data"],
            "data": study.data,
            "threads": threads_of(study),
            "device": study.device,
            "splits": row["splits"],
        }
        folder = self._folder.trial(row["run_id"]).absolute()
        pair = f"{row['pair']['candidate_hash']}/{row['pair']['number']}" if row["pair"] else None
        self._executor.submit(Trial(row["run_id"], study.program, order, study.deadline_s, folder, pair))

    def _record(self, ending: Ending) -> None:
        row = run_row(self.history, self.history.open[ending.run_id], ending.fields, _now())
        self._append(row)
        if row["error_class"] == "CellChanged":
            raise RunChanged(f"{row['error_tail']} Its runs cannot be compared with those before; start a new study.")

    def _append(self, row: Row) -> None:
        self._journal.append(row)
        if row["kind"] != "started":
            board.write(self._folder, self.history)
        self._listener.on_row(row, self.history)


def run_row(history: History, started: Row, fields: Row, now: str) -> Row:
    """The journal's row of a run that ended, from its start and from how it ended."""
    study = history.study
    assert history.campaign is not None
    flags = disturbed.disturbances(fields["validity"])
    row: Row = {
        **started,
        **fields,
        "kind": "run",
        "flags": flags,
        "ended_at": now,
        "code_hash": code_hash_of(study.program),
        "harness_version": hotlap.__version__,
        **commit_of(study.program),
        "executor": study.executor,
        "price_usd_h": study.usd_per_hour,
        "cost_usd": _cost_usd(study, fields["total_s"]),
        "artifacts": f"trials/{started['run_id']}",
    }
    row |= {"cell": cell_of(history, row)}
    row |= {"cell_id": space.config_hash(row["cell"])}
    if row["status"] != OK:
        return row
    if "lock" in started["splits"] and row["val_lock_nats_per_byte"] is None:
        return {**row, "status": "refused", "error_class": "NoLockedScore", "error_tail": "it has no locked score"}
    if history.cell is not None and (changed := _differences(history.cell, row["cell"])):
        return {**row, "status": "refused", "error_class": "CellChanged", "error_tail": f"Changed since: {changed}."}
    if flags and study.on_disturbed == "quarantine":
        return {
            **row,
            "status": "invalid_machine",
            "error_class": "Disturbed",
            "error_tail": disturbed.in_words([fields["validity"]]),
        }
    return row


def _cost_usd(study: space.StudyConfig, total_s: float | None) -> float | None:
    """A run's share of the machine, which several workers have at a time."""
    if study.usd_per_hour is None or total_s is None:
        return None
    return study.usd_per_hour * total_s / 3600 / study.workers


def cell_of(history: History, row: Row) -> Row:
    """What two runs must share to be compared."""
    machine, data = row["machine"] or {}, row["data"] or {}
    return {
        **{name: machine.get(name) for name in _MACHINE},
        "device": history.study.device,
        "workers": history.study.workers,
        "budget_s": history.study.budget_s,
        "data_sha256": data.get("sha256"),
        "val_tokens": row["val_tokens"],
        "val_bytes": row["val_bytes"],
        "code_hash": row["code_hash"],
    }


def _differences(before: Row, after: Row) -> str:
    return "; ".join(f"{key} was {before[key]} and is {after[key]}" for key in before if before[key] != after[key])


def threads_of(study: space.StudyConfig) -> int:
    if study.threads is not None:
        return study.threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // study.workers)


# --- opening ---


@contextmanager
def opened(
    file: StudyFile, folder: StudyFolder, listener: Listener, draw: Callable[[int], bytes] = os.urandom
) -> Generator[Study]:
    """A study, begun or taken up again, for as long as this process may write it. Only in the main thread.

    Raises:
        RunLocked: another process is running it.
        RunChanged: its file or its trial's code is no longer what it began with.
        UsageError: it was closed.
    """
    with only_writer(folder), child.passing_on_stops() as stops:
        journal = Journal(folder, listener.say)
        if journal.history.revealed:
            raise UsageError(f"The study in {folder.path} was closed, and its secret is known. Begin a new one.")
        secret = _secret(folder, journal.history, draw)
        if journal.history.campaign is None:
            journal.append(_campaign_row(file, secret))
        else:
            _require_unchanged(file, journal)
        _bury(journal)
        board.write(folder, journal.history)
        study = journal.history.study
        caps = Caps(study)
        caps.require_start(journal.history.space.start)
        executor = executor_of(study, stops, listener.on_progress)
        try:
            yield Study(folder, journal, secret, executor, lambda: proposing(study, stops, caps.fits), listener)
        finally:
            executor.close()


def proposing(study: space.StudyConfig, stops: child.Stops, fits: proposer.Fits) -> plan.Propose:
    """What makes a study's proposals: a function of its history, or a command that is asked."""
    if study.proposer not in proposer.PROPOSERS:
        return Asker(study, stops, fits).propose
    return lambda history, noise, source: proposer.propose(history, noise, source, fits)


def executor_of(study: space.StudyConfig, stops: child.Stops, on_progress: OnProgress) -> Executor:
    """
    Raises:
        ConfigError: it is not installed, or this machine has too few cores.
    """
    if study.executor == "local":
        return LocalExecutor(study.workers, stops, on_progress)
    if find_spec("ray") is None:
        raise ConfigError('study.executor = "ray" needs Ray: pip install "hotlap[ray]".')
    from hotlap.research.ray_executor import RayExecutor

    return RayExecutor(stops)


def _secret(folder: StudyFolder, history: History, draw: Callable[[int], bytes]) -> bytes:
    """The study's own, drawn before its journal begins."""
    if history.campaign is None and not folder.secret.exists():
        durable.replace(folder.secret, draw(16).hex().encode() + b"\n")
    return folder.read_secret(history)


def _campaign_row(file: StudyFile, secret: bytes) -> Row:
    study = file.study
    return {
        "schema": SCHEMA,
        "kind": "campaign",
        "campaign_id": f"{study.name}-{durable.sha256_bytes(secret)[:6]}",
        "at": _now(),
        "study": study.model_dump(mode="json"),
        "start": dict(file.start),
        "range": {name: value.model_dump(mode="json") for name, value in file.range.items()},
        "space": space.space_json(space.space_of(file, ask_axes(study.program))),
        "code_hash": code_hash_of(study.program),
        "rule_version": acceptance.RULE_VERSION,
        "rule": acceptance.parameters(acceptance.RULES[study.acceptance]),
        "data_sha256": durable.sha256_file(Path(study.data)) if Path(study.data).is_file() else None,
        "secret_hash": durable.sha256_bytes(secret),
    }


def _require_unchanged(file: StudyFile, journal: Journal) -> None:
    campaign = journal.history.campaign
    assert campaign is not None
    before, after = journal.history.study.model_dump(mode="json"), file.study.model_dump(mode="json")
    changed = {key for key in after if before[key] != after[key]}
    if fixed := sorted(changed - set(FREE_SETTINGS)):
        raise _changed("; ".join(f"study.{key} is {before[key]} there and {after[key]} now" for key in fixed))
    code_hash = code_hash_of(file.study.program)
    if code_hash != campaign["code_hash"]:
        raise _changed(f"{file.study.program} is another program now (SHA-256 {code_hash[:12]})")
    ranges = {name: value.model_dump(mode="json") for name, value in file.range.items()}
    if (file.start, ranges) != (campaign["start"], campaign["range"]):
        raise _changed("[start] or [range] has other values now")
    if changed:
        journal.append({"schema": SCHEMA, "kind": "settings", "at": _now(), "study": after})


def _changed(what: str) -> HotlapError:
    return RunChanged(f"This study began differently: {what}. Change it back, or give the new study another name.")


def _bury(journal: Journal) -> None:
    """What was started and left no result died with its study. Its seeds are never used again."""
    for started in list(journal.history.open.values()):
        fields: Row = dict.fromkeys((*NUMBERS, "exit_code"))
        fields |= {"status": "killed", "error_class": "StudyDied", "error_tail": "the study ended before this run did"}
        journal.append(run_row(journal.history, started, fields, _now()))


def _now() -> str:
    return clock.utc_text(clock.wall_s())


def find_folder(study: Path, output_dir: Path) -> StudyFolder:
    """A study's folder: by its TOML file, by its name in `output_dir`, or by the folder itself.

    Raises:
        UsageError: there is no such file and no such study.
    """
    if study.suffix == ".toml":
        return StudyFolder(output_dir / space.load_study(study).study.name)
    for path in (output_dir / study, study):
        if (path / "experiments.jsonl").is_file():
            return StudyFolder(path)
    raise UsageError(f"There is no study {str(study)!r} in {output_dir}/. Give its TOML file, its name or its folder.")


def file_of(study: Path, folder: StudyFolder) -> StudyFile:
    """What describes a study: its TOML file if that was given, else what its journal says."""
    if study.suffix == ".toml":
        return space.load_study(study)
    history = folder.read()
    assert history.campaign is not None, folder.path
    tree = {"study": history.study.model_dump(), **{key: history.campaign[key] for key in ("start", "range")}}
    return StudyFile.model_validate(tree)

"""What happened in a study: an append-only journal of one writer, and its fold.

    experiments.jsonl   one row per event, synced before anything acts on it:
      campaign   first: space, budgets, rule, hash of the trial's code and of the study's secret
      goal       how many changes a command was asked to try, so that the same command again asks for no more
      settings   when the study's file changed in what may change
      started    before every child, with its seeds; a child that left no run row was killed
      run        how it ended, and its numbers; a missing number is null
      decision   what was made of runs, and what it was made from
      revealed   last, where a study was closed for good: its secret, from which all seeds and placebos follow
      note       words for people

A run of a verification has in `pair` the candidate's configuration, the incumbent's, and the pair's number, since every
candidate has pairs of its own; `arm` (I or C) and `order` are its place there. `artifacts` is the folder with what a
run left: its order, its result, and for a LoRA study the run itself.

A placebo's rows show the change it pretends to be. The decision reveals it, and only then do runs of a proposal count
for a configuration. So a reader who folds the journal, as this module does, is never misled.
"""

import errno
import fcntl
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotlap import durable
from hotlap.errors import CorruptFile, RunLocked, storage_errors
from hotlap.research import acceptance
from hotlap.research.acceptance import Noise
from hotlap.research.space import Settings, Space, StudyConfig, config_hash, space_from_json

SCHEMA = 1
Row = dict[str, Any]

OK = "ok"
FAILED = frozenset(("nan", "diverged", "oom", "crash", "timeout", "refused"))
"""The configuration's own doing, as far as can be told."""

DISTURBED = frozenset(("killed", "invalid_machine"))
"""Something else's doing: nothing is learned of the configuration, and the run is made again."""

_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF}


@dataclass(frozen=True)
class Run:
    """A run that ended, of the configuration that really ran."""

    run_id: str
    role: str
    config: Settings
    config_hash: str
    status: str
    loss: float | None
    row: Row


@dataclass
class Candidate:
    """A proposal on its way: its runs in order, until a decision closes it."""

    number: int
    first: Row
    rows: list[Row] = field(default_factory=list)
    decision: Row | None = None

    @property
    def losses(self) -> list[float]:
        return [loss_of(row) for row in self.rows if row["status"] == OK]


@dataclass
class Anchor:
    """Where the search stands. `runs` are those that its mean may use, oldest first."""

    config: Settings
    config_hash: str
    num_needed: int
    """Runs it must have before anything is compared with it."""
    decision: Row | None = None
    """What made it the anchor. None: it is the baseline."""
    runs: list[Row] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        return [loss_of(row) for row in self.runs[-acceptance.SENTINELS_KEPT :]]


class History:
    """The fold of a journal's rows."""

    def __init__(self) -> None:
        self.campaign: Row | None = None
        self.study: StudyConfig
        self.space: Space
        self.num_started = 0
        self.ended: list[Row] = []
        """All runs that ended, however they did, in that order."""
        self.starts_per_day: dict[str, int] = {}
        self.open: dict[str, Row] = {}
        self.candidates: dict[int, Candidate] = {}
        self.runs: list[Run] = []
        self.groups: dict[str, list[Run]] = {}
        """Runs that ended ok, by the configuration that really ran."""
        self.in_progress: list[Candidate] = []
        """Proposals that no decision has closed."""
        self._repeated: dict[str, list[float]] = {}
        self.decisions: list[Row] = []
        self.anchor: Anchor
        self.anchors: list[Anchor] = []
        """The baseline, and every configuration that has been the anchor since."""
        self.verified: Row | None = None
        """The newest decision that proved a configuration."""
        self.cell: Row | None = None
        self.num_since_anchor_run = 0
        self.goal: Row | None = None
        """What the newest search was asked for."""
        self.revealed: bytes | None = None
        """The secret, once the study is closed."""

    @classmethod
    def of(cls, rows: Iterable[Row]) -> "History":
        history = cls()
        for number, row in enumerate(rows, start=1):
            try:
                history.apply(row)
            except (KeyError, TypeError, ValueError) as error:
                raise CorruptFile(
                    f"Row {number} of the journal is no row of a study ({type(error).__name__} {error}). Bring the "
                    f"journal back from a copy."
                ) from error
        return history

    def apply(self, row: Row) -> None:
        if self.campaign is None and row["kind"] != "campaign":
            raise CorruptFile("The journal does not begin with its campaign row: it is not whole.")
        getattr(self, f"_{row['kind']}", self._other)(row)

    def _other(self, row: Row) -> None:
        """Notes, and kinds that a later version may have."""

    def _campaign(self, row: Row) -> None:
        self.campaign = row
        self.study = StudyConfig.model_validate(row["study"])
        self.space = space_from_json(row["space"])
        start = self.space.start
        self.anchor = Anchor(start, config_hash(start), self.study.num_baseline_runs)
        self.anchors.append(self.anchor)

    def _settings(self, row: Row) -> None:
        self.study = StudyConfig.model_validate(row["study"])

    def _goal(self, row: Row) -> None:
        self.goal = row

    def _revealed(self, row: Row) -> None:
        self.revealed = row["secret"].encode()

    def _started(self, row: Row) -> None:
        self.num_started += 1
        day = row["started_at"][:10]
        self.starts_per_day[day] = self.starts_per_day.get(day, 0) + 1
        self.open[row["run_id"]] = row
        number = row["proposal"]
        if number is not None and number not in self.candidates:
            self.candidates[number] = Candidate(number, row)
            self.in_progress.append(self.candidates[number])

    def _run(self, row: Row) -> None:
        self.open.pop(row["run_id"], None)
        self.ended.append(row)
        if row["status"] == OK and self.cell is None:
            self.cell = row["cell"]
        if row["proposal"] is not None:
            self.candidates[row["proposal"]].rows.append(row)
            self.num_since_anchor_run += row["status"] not in DISTURBED
            return
        self._attribute(row, row["config"], row["config_hash"])
        if row["status"] == OK and row["role"] in ("baseline", "sentinel"):
            self.anchor.runs.append(row)
            self.num_since_anchor_run = 0

    def _attribute(self, row: Row, config: Settings, name: str) -> None:
        run = Run(row["run_id"], row["role"], config, name, row["status"], row["val_search_nats_per_byte"], row)
        self.runs.append(run)
        if run.status == OK:
            group = self.groups.setdefault(name, [])
            group.append(run)
            if len(group) > 1:
                self._repeated[name] = [loss_of(run.row) for run in group]

    def _decision(self, row: Row) -> None:
        self.decisions.append(row)
        if row["outcome"] == "drift_reset":
            self.anchor.runs.clear()
            self.anchor.num_needed = 2
        elif row["outcome"] in ("verified", "not_verified"):
            self.verified = row if row["outcome"] == "verified" else self.verified
        elif row["proposal"] is not None:
            self._close(self.candidates[row["proposal"]], row)

    def _close(self, candidate: Candidate, row: Row) -> None:
        candidate.decision = row
        self.in_progress.remove(candidate)
        config = self.anchor_named(row["ran_hash"]).config if row["placebo"] else candidate.first["config"]
        for run in candidate.rows:
            self._attribute(run, config, row["ran_hash"])
        if row["moves_anchor"] and not row["placebo"]:
            # Only the last run: the first was chosen for being low.
            last = [run for run in candidate.rows if run["status"] == OK][-1:]
            self.anchor = Anchor(config, row["ran_hash"], 1, row, last)
            self.anchors.append(self.anchor)
            self.num_since_anchor_run = 0

    # --- what is asked of it ---

    @property
    def num_ended(self) -> int:
        return len(self.ended)

    @property
    def num_judged(self) -> int:
        return len(self.candidates) - len(self.in_progress)

    def anchor_named(self, name: str) -> Anchor:
        return next(anchor for anchor in self.anchors if anchor.config_hash == name)

    def baseline_loss(self) -> float:
        """Mean of the baseline's runs."""
        losses = [loss_of(run.row) for run in self.groups[self.anchors[0].config_hash]]
        return sum(losses) / len(losses)

    def noise(self) -> Noise:
        ratio = acceptance.PRIOR_RATIO[self.study.device]
        return acceptance.pooled_noise(self._repeated.values(), ratio * self.baseline_loss())

    def pairs_of(self, candidate_hash: str) -> dict[int, dict[str, Row]]:
        """A configuration's verification runs: by pair, by arm."""
        pairs: dict[int, dict[str, Row]] = {}
        for run in self.runs:
            if run.role == "verify" and run.row["pair"]["candidate_hash"] == candidate_hash:
                pairs.setdefault(run.row["pair"]["number"], {})[run.row["arm"]] = run.row
        return pairs


def loss_of(row: Row) -> float:
    """The loss of a run that ended ok, nats per byte."""
    loss = row["val_search_nats_per_byte"]
    assert isinstance(loss, float), row["run_id"]
    return loss


# --- on the disk ---


class StudyFolder:
    """Paths of one study."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = path / "experiments.jsonl"
        self.secret = path / "secret"
        self.trials = path / "trials"

    def trial(self, run_id: str) -> Path:
        return self.trials / run_id

    def read_secret(self, history: History) -> bytes:
        """
        Raises:
            CorruptFile: it is not there, or not the one that the study began with.
        """
        if history.revealed is None and not self.secret.exists():
            raise CorruptFile(
                f"{self.secret} is missing, and all seeds come from it. Restore it, or start a new study."
            )
        secret = history.revealed or self.secret.read_bytes().strip()
        if history.campaign is not None and history.campaign["secret_hash"] != durable.sha256_bytes(secret):
            raise CorruptFile(
                f"{self.secret} is not this study's: its hash is not the one in the journal's first line."
            )
        return secret

    def read(self) -> History:
        """
        Raises:
            CorruptFile: a row before the last cannot be read.
        """
        return History.of(durable.read_rows(self.journal))


class Journal:
    """The right to write a study, and its history so far."""

    def __init__(self, folder: StudyFolder, say: Callable[[str], None]) -> None:
        self._path = folder.journal
        if self._path.exists() and (torn := self._path.stat().st_size - durable.end_of_last_row(self._path)):
            say(f"{self._path}: the last {torn} bytes are a row that was never finished; they are ignored.")
        self.history = folder.read()

    def append(self, row: Mapping[str, Any]) -> None:
        """Durable when this returns."""
        durable.append_rows(self._path, [dict(row)])
        durable.sync_file(self._path)
        self.history.apply(dict(row))


@contextmanager
def only_writer(folder: StudyFolder) -> Generator[None]:
    """Be the only process that writes a study. The lock is the kernel's: it ends with its holder.

    Raises:
        RunLocked: another process has it.
    """
    durable.make_dirs(folder.path)
    path = folder.path / ".lock"
    with storage_errors(path), suppress(FileExistsError):
        durable.disk.create(path, b"")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _take(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, folder: StudyFolder) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunLocked(
            f"Another process is running the study in {folder.path}. Wait for it, or stop it with Ctrl-C; "
            f"`hotlap research leaderboard {folder.path.name}` reads along meanwhile."
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # a volume without locks: then it is up to you
            raise

"""What is going on now, in sections of JSON values: running slices, machines, today's budget, verdicts.

Read again and again, so nothing is read twice: of a log only what is new, of a provider only every so often.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotlap import clock
from hotlap.cloud.lease import Lease, day_of, next_day_s
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.money import Amount
from hotlap.cloud.provider import Listing, ListingBroken, Machine, Provider
from hotlap.config import CloudConfig
from hotlap.errors import HotlapError
from hotlap.runs import RunFolder, list_runs, newest_number, read_identity, slice_state

Json = dict[str, Any]
LISTING_EVERY_S = 10.0
"""How often a provider is asked. Countdowns and prices run on between, in the reader's browser."""

_MOST_VERDICTS = 20


@dataclass
class Follower:
    """Rows of a log, each given once. A log that became shorter was taken back, and is read from its start again."""

    path: Path
    _read_bytes: int = 0

    def new_rows(self) -> tuple[list[Json], bool]:
        """The rows since the last call, and whether they are all there are."""
        try:
            with self.path.open("rb") as file:
                is_new = self._read_bytes == 0 or file.seek(0, 2) < self._read_bytes
                self._read_bytes = 0 if is_new else self._read_bytes
                file.seek(self._read_bytes)
                data = file.read()
        except FileNotFoundError:
            self._read_bytes = 0
            return [], True
        whole, _, _ = data.rpartition(b"\n")
        self._read_bytes += len(whole) + 1 if whole else 0
        # A line that is damaged is somebody else's to tell; what can be read is shown.
        return [row for line in whole.splitlines() if (row := _row(line)) is not None], is_new


def _row(line: bytes) -> Json | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


# --- slices ---


@dataclass
class _Run:
    folder: RunFolder
    metrics: Follower
    step: int = 0
    loss: float | None = None
    val_loss: float | None = None
    num_steps: int | None = None

    def take_in(self) -> None:
        rows, is_new = self.metrics.new_rows()
        if is_new:
            self.step, self.loss, self.val_loss = 0, None, None
        for row in rows:
            self.step = max(self.step, row.get("step", 0))
            self.loss = row.get("loss", self.loss)
            self.val_loss = row.get("val_loss", self.val_loss)
        if self.num_steps is None:
            identity = read_identity(self.folder)
            self.num_steps = identity.num_steps if identity else None


class Slices:
    """The slices that run in a folder of runs."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._runs: dict[str, _Run] = {}

    def section(self) -> list[Json]:
        found: list[Json] = []
        for folder in list_runs(self._output_dir):
            number = newest_number(folder)
            state = slice_state(folder, number)
            if not number or state.holder is None or state.ending != "running":
                self._runs.pop(folder.name, None)
                continue
            run = self._runs.setdefault(folder.name, _Run(folder, Follower(folder.metrics)))
            try:
                run.take_in()
            except HotlapError as error:
                found.append({"run": folder.name, "trouble": str(error)})
                continue
            found.append(
                {
                    "run": folder.name,
                    "slice": number,
                    "host": state.holder.host,
                    "step": run.step,
                    "num_steps": run.num_steps,
                    "loss": run.loss,
                    "val_loss": run.val_loss,
                    "ends_at_s": state.holder.expires_at_s,
                }
            )
        return found


# --- machines ---


def machine_rows(leases: list[Lease], listings: dict[str, Listing]) -> list[Json]:
    """Every lease of the book that may have a machine, and every machine that is listed, first the first to die."""
    seen: dict[str, tuple[str, Machine]] = {}
    strangers: list[Json] = []
    by_name = {f"hotlap-{lease.lease_id}" for lease in leases}
    for provider, listing in listings.items():
        for machine in listing.machines:
            if machine.name in by_name:
                seen[machine.name] = (provider, machine)
            else:
                strangers.append(_stranger(provider, machine))
    rows = [_of_lease(lease, seen.get(f"hotlap-{lease.lease_id}")) for lease in leases]
    return sorted([*rows, *strangers], key=lambda row: (row["ends_at_s"] is None, row["ends_at_s"], row["key"]))


def _of_lease(lease: Lease, found: tuple[str, Machine] | None) -> Json:
    machine = found[1] if found else None
    price = machine.usd_micros_per_hour if machine and machine.usd_micros_per_hour else lease.usd_micros_per_hour
    return {
        "key": lease.lease_id,
        "run": lease.run,
        "machine": machine.machine_id if machine else lease.machine_id,
        "provider": lease.provider,
        "gpu": lease.gpu,
        "owner": lease.owner,
        "state": machine.state if machine else "not listed" if lease.state == "held" else lease.state,
        "began_s": lease.began_s,
        "ends_at_s": lease.not_after_s,
        "usd_micros_per_hour": price,
        "worst_usd_micros": lease.usd_micros,
        "may_stop": True,
        "problems": "; ".join(machine.problems) if machine else "",
    }


def _stranger(provider: str, machine: Machine) -> Json:
    problems = machine.problems if machine.is_ours else ("not in this ledger; hotlap leaves it alone",)
    return {
        "key": f"{provider}/{machine.machine_id}",
        "run": machine.name,
        "machine": machine.machine_id,
        "provider": provider,
        "gpu": None,
        "owner": machine.owner,
        "state": machine.state,
        "began_s": machine.created_at_s,
        "ends_at_s": machine.not_after_s,
        "usd_micros_per_hour": machine.usd_micros_per_hour,
        "worst_usd_micros": None,
        "may_stop": False,
        "problems": "; ".join(problems),
    }


class Listings:
    """What providers listed last, asked for in a thread of its own, so that a slow one holds nobody up."""

    def __init__(self, opening: Mapping[str, Callable[[], Provider]]) -> None:
        """`opening` has what opens a provider, by its name."""
        self._opening, self._opened = opening, dict[str, Provider]()
        self._asked_at_s: float | None = None
        self._turn = threading.Lock()
        self.newest: dict[str, Listing] = {}
        self.troubles: dict[str, str] = {}

    def refresh(self, is_now: bool = False) -> threading.Thread | None:
        """Ask again when the last answer is old; returns the thread that does."""
        with self._turn:
            now_s = clock.monotonic_s()
            if not is_now and self._asked_at_s is not None and now_s - self._asked_at_s < LISTING_EVERY_S:
                return None
            self._asked_at_s = now_s
        thread = threading.Thread(target=self._ask, daemon=True)
        thread.start()
        return thread

    def _ask(self) -> None:
        for name, open_it in self._opening.items():
            try:
                provider = self._opened.get(name) or self._opened.setdefault(name, open_it())
                self.newest[name] = provider.machines()
                self.troubles.pop(name, None)
            except ListingBroken as error:
                self.newest[name] = error.seen
                self.troubles[name] = str(error)
            except HotlapError as error:
                self.troubles[name] = str(error)


# --- verdicts ---


@dataclass
class _Study:
    journal: Follower
    num_runs: int = 0
    lowest: float | None = None
    newest: deque[Json] = field(default_factory=lambda: deque[Json](maxlen=_MOST_VERDICTS))

    def take_in(self) -> None:
        rows, is_new = self.journal.new_rows()
        if is_new:
            self.num_runs, self.lowest = 0, None
            self.newest.clear()
        for row in rows:
            if row.get("kind") == "run":
                self.num_runs += 1
                loss = row.get("val_search_nats_per_byte") if row.get("status") == "ok" else None
                if isinstance(loss, int | float):
                    self.lowest = loss if self.lowest is None else min(self.lowest, loss)
            elif row.get("kind") == "decision":
                self.newest.append(row)


class Verdicts:
    """The newest decisions of studies and of contests, and how far each study is."""

    def __init__(self, studies_dir: Path, records_dir: Path) -> None:
        self._studies_dir, self._records_dir = studies_dir, records_dir
        self._studies: dict[str, _Study] = {}
        self._contests: dict[str, tuple[Follower, deque[Json]]] = {}

    def section(self) -> Json:
        for path in self._studies_dir.glob("*/experiments.jsonl"):
            self._studies.setdefault(path.parent.name, _Study(Follower(path))).take_in()
        for path in self._records_dir.glob("*/log.jsonl"):
            follower, newest = self._contests.setdefault(
                path.parent.name, (Follower(path), deque[Json](maxlen=_MOST_VERDICTS))
            )
            newest.extend(follower.new_rows()[0])
        told = [
            _verdict(row, row.get("at"), name, str(row.get("decision_id")), "outcome", "reason")
            for name, study in sorted(self._studies.items())
            for row in reversed(study.newest)
        ]
        told += [
            _verdict(row, row.get("date"), name, row.get("submission"), "verdict", "description")
            for name, (_, newest) in sorted(self._contests.items())
            for row in reversed(newest)
            if row.get("kind") == "verified"
        ]
        told.sort(key=lambda each: each[0], reverse=True)
        studies = [
            {"study": name, "num_runs": each.num_runs, "lowest": each.lowest}
            for name, each in sorted(self._studies.items())
        ]
        return {"studies": studies, "newest": [row for _, row in told[: 3 * _MOST_VERDICTS]]}


def _verdict(row: Json, when: Any, where: str, what: Any, verdict: str, why: str) -> tuple[str, Json]:
    """With the time at which it was made, in UTC."""
    return str(when or ""), {"where": where, "what": what, "verdict": row.get(verdict), "why": row.get(why)}


# --- all of it ---


class Watcher:
    """All sections, made anew at most twice a second however many look."""

    def __init__(
        self,
        settings: CloudConfig,
        ledger: Callable[[], Ledger | None],
        listings: Listings,
        slices: Slices,
        verdicts: Verdicts,
    ) -> None:
        self._settings, self._ledger, self._listings = settings, ledger, listings
        self._slices, self._verdicts = slices, verdicts
        self._turn = threading.Lock()
        self._made_at_s = float("-inf")
        self._newest: Json = {}

    def sections(self) -> Json:
        with self._turn:
            if clock.monotonic_s() - self._made_at_s >= 0.5:
                self._newest = self._make()
                self._made_at_s = clock.monotonic_s()
            return self._newest

    def _make(self) -> Json:
        self._listings.refresh()
        made: Json = {"slices": self._slices.section(), "verdicts": self._verdicts.section()}
        troubles = dict(self._listings.troubles)
        leases, budget = list[Lease](), None
        try:
            ledger = self._ledger()
            if ledger is not None:
                leases, budget = ledger.open_leases(), ledger.state_of(clock.wall_s())
        except HotlapError as error:
            troubles["ledger"] = str(error)
        made["machines"] = machine_rows(leases, dict(self._listings.newest))
        made["budget"] = budget or _untouched(self._settings)
        made["troubles"] = [{"where": name, "what": text} for name, text in sorted(troubles.items())]
        return made


def _untouched(settings: CloudConfig) -> Json:
    """Today's budget where no money was ever held."""
    budget, now_s = settings.budget, clock.wall_s()
    limit = Amount(budget.gpu_s_per_day, budget.usd_micros_per_day)
    return {
        "day": day_of(now_s),
        "charged": {"gpu_s": 0, "usd_micros": 0},
        "limit": {"gpu_s": limit.gpu_s, "usd_micros": limit.usd_micros},
        "left_text": limit.text(),
        "limit_text": limit.text(),
        "num_open": 0,
        "resets_at": clock.utc_text(next_day_s(now_s)),
    }

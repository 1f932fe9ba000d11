"""The book of money: held for the worst case before a machine exists, settled after it is proven dead.

Each budget is a database: a SQLite file, or any `postgresql://` URL that a team shares. Sums per day and per run are
kept beside the leases, so that a hold costs the same after a hundred thousand of them. A server may restart in the
middle: whatever was being written is written again on a new connection, unless it turns out to be there.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects import postgresql, sqlite

from hotlap import clock
from hotlap.clock import utc_text
from hotlap.cloud.database import default_url, in_words, open_engine, shown, was_cut
from hotlap.cloud.lease import Lease, LeaseState, Sum, day_of, next_day_s, overdue_s, require_room
from hotlap.cloud.money import Amount
from hotlap.config import CloudConfig
from hotlap.errors import HotlapError, VolumeGone
from hotlap.secrecy import redactor

T = TypeVar("T")

_META = sa.MetaData()
_LEASES = sa.Table(
    "leases",
    _META,
    sa.Column("lease_id", sa.String(32), primary_key=True),
    sa.Column("day", sa.String(10), nullable=False),
    sa.Column("run", sa.String(128), nullable=False, index=True),
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("provider", sa.String(32), nullable=False),
    sa.Column("gpu", sa.String(128), nullable=False),
    sa.Column("nonce", sa.String(64), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("machine_id", sa.String(128)),
    sa.Column("usd_micros_per_hour", sa.BigInteger, nullable=False),
    sa.Column("num_gpus", sa.Integer, nullable=False),
    sa.Column("billing_unit_s", sa.Integer, nullable=False),
    sa.Column("began_s", sa.Float, nullable=False),
    sa.Column("not_after_s", sa.BigInteger, nullable=False),
    sa.Column("gpu_s", sa.BigInteger, nullable=False),
    sa.Column("usd_micros", sa.BigInteger, nullable=False),
    sa.Column("ended_s", sa.Float),
    sa.Column("outcome", sa.String(32)),
    sa.Column("note", sa.Text),
    sa.Column("settings", sa.String(16)),
    sqlite_with_rowid=False,  # one page less to sync in a hold
)
# Without parameters: only so can a database see that the index below answers the question.
_IS_OPEN = _LEASES.c.ended_s.is_(None)
# Few leases are open at a time, so what is asked of them does not grow with the book.
sa.Index("open_leases", _LEASES.c.began_s, sqlite_where=_IS_OPEN, postgresql_where=_IS_OPEN)
_SUMS = sa.Table(
    "sums",
    _META,
    sa.Column("kind", sa.String(8), primary_key=True),
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("gpu_s", sa.BigInteger, nullable=False),
    sa.Column("usd_micros", sa.BigInteger, nullable=False),
    sa.Column("debt_gpu_s", sa.BigInteger, nullable=False),
    sa.Column("debt_usd_micros", sa.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

# Built once: building a statement takes longer than running it.
_INSERT = sa.insert(_LEASES)
_SELECT_OPEN = sa.select(_LEASES).where(_IS_OPEN).order_by(_LEASES.c.began_s)
_SELECT_SUMS = sa.select(_SUMS).where(
    sa.or_(
        sa.and_(_SUMS.c.kind == "day", _SUMS.c.name == sa.bindparam("day")),
        sa.and_(_SUMS.c.kind == "run", _SUMS.c.name == sa.bindparam("run")),
    )
)
_SUM_KEYS = ("gpu_s", "usd_micros", "debt_gpu_s", "debt_usd_micros")
_MAKING_TABLES = 0x686F746C6170
"""The advisory lock under which tables are made: two who do it at once would fail each other."""

_RETRY_WAITS_S = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Before each repetition: a stale connection is replaced at once, a server's restart takes some seconds."""


class Ledger:
    def __init__(
        self, settings: CloudConfig, url: str | None = None, sleep_s: Callable[[float], None] = clock.sleep_s
    ) -> None:
        """
        Raises:
            StorageFailed: the book cannot be opened. A wrong address fails at once; waiting would not correct it.
        """
        url = url or settings.ledger.url or default_url()
        self._settings, self._sleep_s = settings, sleep_s
        self.place, self._redact = shown(url), redactor(url, {})
        self._engine = open_engine(url)
        self._upsert = self._adding()
        with self._words(), self._engine.begin() as db:
            if not self._is_sqlite:
                db.execute(sa.select(sa.func.pg_advisory_xact_lock(_MAKING_TABLES)))
            _META.create_all(db)
            if "settings" not in {column["name"] for column in sa.inspect(db).get_columns("leases")}:
                # A book that was begun before leases had it.
                db.execute(sa.text("ALTER TABLE leases ADD COLUMN settings VARCHAR(16)"))

    def close(self) -> None:
        self._engine.dispose()

    def hold(self, lease: Lease) -> Lease:
        """Set the worst case of a lease aside, durably, or raise. Of those who race for the last of it, one wins.

        Raises:
            BudgetRefused: it does not fit into the day's or the run's budget, or too many machines are alive.
            RunLocked: another machine of this run may be alive.
        """
        lease = replace(lease, day=day_of(lease.began_s), state="held")

        def write(db: sa.Connection, is_again: bool) -> None:
            # Cut off after its commit, a hold is in the book already, and must not be refused for its own sake.
            if is_again and _select_leases(
                db, (_LEASES.c.lease_id == lease.lease_id) & (_LEASES.c.nonce == lease.nonce)
            ):
                return
            days, runs = _sums_of(db, lease.day, lease.run)
            open_leases = _as_leases(db.execute(_SELECT_OPEN))
            # Of the day that overdue leases overran in, which is today.
            overdue = sum((self.overrun_of(each, lease.began_s) for each in open_leases), Amount())
            require_room(lease, days.charged + overdue, runs.charged, open_leases, self._settings)
            db.execute(_INSERT, vars(lease))
            self._add(db, lease, lease.day, lease.amount, Amount())

        self._write(write)
        return lease

    def overrun_of(self, lease: Lease, now_s: float) -> Amount:
        """What an open lease may have cost by now beyond its hold."""
        return lease.charge_at(now_s, overdue_s(self._settings)) - lease.amount

    def note_machine(self, lease_id: str, machine_id: str) -> None:
        statement = _update(lease_id).values(machine_id=machine_id, state="held")
        self._write(lambda db, _is_again: db.execute(statement))

    def mark_unresolved(self, lease_id: str, note: str) -> None:
        """The create may have had its effect after all; the hold stays."""
        statement = _update(lease_id).where(_IS_OPEN).values(state="unresolved", note=note)
        self._write(lambda db, _is_again: db.execute(statement))

    def settle(
        self,
        lease_id: str,
        ended_s: float,
        usd_micros_per_hour: int | None = None,
        outcome: str | None = None,
        note: str | None = None,
    ) -> Lease:
        """Book what a machine cost that is proven dead at `ended_s`. The second settlement changes nothing.

        What was more than held is a debt of the day on which it is seen.
        """

        def write(db: sa.Connection, _is_again: bool) -> Lease:
            lease = self._lease(db, lease_id)
            if not lease.is_open:
                return lease
            # A price of 0 is one that the provider does not know yet.
            rate = replace(lease.rate, usd_micros_per_hour=usd_micros_per_hour or lease.usd_micros_per_hour)
            cost = rate.cost(ended_s - lease.began_s)
            return self._close(db, lease, cost, "settled", ended_s, outcome, note)

        return self._write(write)

    def release(self, lease_id: str, now_s: float, note: str) -> Lease:
        """Give a hold back of which no machine came, nor will."""

        def write(db: sa.Connection, _is_again: bool) -> Lease:
            lease = self._lease(db, lease_id)
            return self._close(db, lease, Amount(), "released", now_s, None, note) if lease.is_open else lease

        return self._write(write)

    def _close(
        self,
        db: sa.Connection,
        lease: Lease,
        cost: Amount,
        state: LeaseState,
        ended_s: float,
        outcome: str | None,
        note: str | None,
    ) -> Lease:
        debt = cost.beyond(lease.amount)
        today = day_of(ended_s)
        # Nothing that was held yesterday is charged today, but what overran is.
        self._add(db, lease, lease.day, cost - debt - lease.amount, Amount())
        self._add(db, lease, today, debt, debt)
        closed = replace(
            lease,
            state=state,
            ended_s=ended_s,
            gpu_s=cost.gpu_s,
            usd_micros=cost.usd_micros,
            outcome=outcome,
            note=note or lease.note,
        )
        db.execute(_update(lease.lease_id).values(**asdict(closed)))
        return closed

    def _add(self, db: sa.Connection, lease: Lease, day: str, amount: Amount, debt: Amount) -> None:
        if amount == debt == Amount():
            return
        row = {
            "gpu_s": amount.gpu_s,
            "usd_micros": amount.usd_micros,
            "debt_gpu_s": debt.gpu_s,
            "debt_usd_micros": debt.usd_micros,
        }
        rows = [{"kind": kind, "name": name, **row} for kind, name in (("day", day), ("run", lease.run))]
        db.execute(self._upsert, rows)

    def _adding(self) -> sa.Executable:
        """Add to a sum, which begins at nothing."""
        insert = sqlite.insert if self._is_sqlite else postgresql.insert
        statement = insert(_SUMS)
        added = {key: _SUMS.c[key] + statement.excluded[key] for key in _SUM_KEYS}
        return statement.on_conflict_do_update(index_elements=["kind", "name"], set_=added)

    # --- reading ---

    def lease(self, lease_id: str) -> Lease | None:
        found = self.leases([lease_id])
        return found[0] if found else None

    def leases(self, lease_ids: Sequence[str]) -> list[Lease]:
        """Those of them that are in the book."""
        found: list[Lease] = []
        with self._reading() as db:
            for start in range(0, len(lease_ids), 500):
                found += _select_leases(db, _LEASES.c.lease_id.in_(lease_ids[start : start + 500]))
        return found

    def open_leases(self, run: str | None = None) -> list[Lease]:
        with self._reading() as db:
            found = _select_leases(db, _IS_OPEN)
        return [lease for lease in found if run in (None, lease.run)]

    def leases_of(self, run: str) -> list[Lease]:
        with self._reading() as db:
            return _select_leases(db, _LEASES.c.run == run)

    def leases_since(self, day: str) -> list[Lease]:
        with self._reading() as db:
            return _select_leases(db, _LEASES.c.day >= day)

    def state_of(self, now_s: float) -> dict[str, Any]:
        """Today's budget: charged, left, and when it resets. Machines that overran count what they may have cost."""
        budget, day = self._settings.budget, day_of(now_s)
        open_leases = self.open_leases()
        overrun = sum((self.overrun_of(lease, now_s) for lease in open_leases), Amount())
        limit, charged = Amount(budget.gpu_s_per_day, budget.usd_micros_per_day), self.day(day).charged + overrun
        left = limit.beyond(charged)
        return {
            "day": day,
            "charged": asdict(charged),
            "left": asdict(left),
            "limit": asdict(limit),
            "left_text": left.text(),
            "limit_text": limit.text(),
            "num_open": len(open_leases),
            "resets_at": utc_text(next_day_s(now_s)),
        }

    def day(self, day: str) -> Sum:
        with self._reading() as db:
            return _sums_of(db, day, "")[0]

    def days(self, since: str) -> list[Sum]:
        with self._reading() as db:
            rows = db.execute(sa.select(_SUMS).where(_SUMS.c.kind == "day", _SUMS.c.name >= since))
            return sorted((_as_sum(row) for row in rows), key=lambda each: each.name)

    def runs_since(self, day: str) -> list[dict[str, Any]]:
        """Per run its machines, its charge, and what it was charged per machine."""
        c = _LEASES.c
        sums = (sa.func.count(), sa.func.sum(c.gpu_s), sa.func.sum(c.usd_micros), sa.func.max(c.began_s))
        query = sa.select(c.run, *sums).where(c.day >= day).group_by(c.run).order_by(sums[3].desc())
        with self._reading() as db:
            rows = db.execute(query).all()
        return [
            {"run": row[0], "num_machines": row[1], "gpu_s": int(row[2]), "usd_micros": int(row[3])} for row in rows
        ]

    # --- transactions ---

    @property
    def _is_sqlite(self) -> bool:
        return self._engine.dialect.name == "sqlite"

    def _write(self, work: Callable[[sa.Connection, bool], T]) -> T:
        """Do the work in a transaction that no other writer overlaps. `work` is told whether it may have been done
        before, on a connection that was cut while it was being committed."""
        waits_s = list(_RETRY_WAITS_S)
        is_again = False
        while True:
            try:
                with self._engine.begin() as db:
                    if not self._is_sqlite:
                        # SQLite locked the whole file at BEGIN IMMEDIATE; elsewhere one row stands for the budget.
                        db.execute(self._upsert, [{"kind": "lock", "name": "budget", **dict.fromkeys(_SUM_KEYS, 0)}])
                    return work(db, is_again)
            except exc.DBAPIError as error:
                if self._is_sqlite or not was_cut(error) or not waits_s:
                    raise self._in_words(error) from None
            is_again = True
            self._sleep_s(waits_s.pop(0))

    @contextmanager
    def _reading(self) -> Generator[sa.Connection]:
        with self._words(), self._engine.begin() as db:
            yield db

    def _lease(self, db: sa.Connection, lease_id: str) -> Lease:
        found = _select_leases(db, _LEASES.c.lease_id == lease_id)
        if not found:
            raise VolumeGone(
                f"Lease {lease_id} is not in the ledger {self.place}: that was replaced while a machine was rented. "
                f"Put the one back that was there, and run hotlap reap; receipts/{lease_id}.json tells what it cost."
            )
        return found[0]

    @contextmanager
    def _words(self) -> Generator[None]:
        try:
            yield
        except exc.DBAPIError as error:
            raise self._in_words(error) from None

    def _in_words(self, error: exc.DBAPIError) -> HotlapError:
        return in_words(self.place, self._redact(str(error.orig)))


def _select_leases(db: sa.Connection, where: sa.ColumnElement[bool]) -> list[Lease]:
    return _as_leases(db.execute(sa.select(_LEASES).where(where).order_by(_LEASES.c.began_s)))


def _as_leases(rows: sa.CursorResult[Any]) -> list[Lease]:
    return [Lease(**row._mapping) for row in rows]  # pyright: ignore[reportPrivateUsage]


def _update(lease_id: str) -> sa.Update:
    return sa.update(_LEASES).where(_LEASES.c.lease_id == lease_id)


def _sums_of(db: sa.Connection, day: str, run: str) -> tuple[Sum, Sum]:
    found = {(row.kind, row.name): _as_sum(row) for row in db.execute(_SELECT_SUMS, {"day": day, "run": run})}
    empty = Sum("", Amount(), Amount())
    return found.get(("day", day), replace(empty, name=day)), found.get(("run", run), replace(empty, name=run))


def _as_sum(row: sa.Row[Any]) -> Sum:
    return Sum(row.name, Amount(row.gpu_s, row.usd_micros), Amount(row.debt_gpu_s, row.debt_usd_micros))

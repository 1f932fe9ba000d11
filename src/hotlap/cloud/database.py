"""The database that a ledger lies in: opened so that what is committed is on a disk, and in words when it fails."""

from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc

from hotlap import durable
from hotlap.config import hotlap_home
from hotlap.errors import CorruptFile, DiskFull, HotlapError, StorageFailed, VolumeGone

_CONNECT_TIMEOUT_S = 10
_SET_UP_POSTGRES = (
    # Whatever the server's default is: a hold that returned is on its disk.
    "SET synchronous_commit = on",
    # A holder whose machine vanished in mid-transaction must not lock everybody else out.
    "SET lock_timeout = '20s'",
    "SET statement_timeout = '30s'",
    "SET idle_in_transaction_session_timeout = '30s'",
)


def default_url() -> str:
    return f"sqlite:///{hotlap_home() / 'ledger.sqlite'}"


def open_engine(url: str) -> sa.Engine:
    """
    Raises:
        VolumeGone: the address is none, or its driver is not installed.
    """
    try:
        parsed = sa.make_url(url)
        if _is_cut_wrongly(parsed):
            raise VolumeGone(
                "ledger.url in cloud.toml has an @ in its user or password, where it means the host. Write it as %40."
            )
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        is_sqlite = parsed.get_backend_name() == "sqlite"
        if parsed.database and is_sqlite:
            durable.make_dirs(Path(parsed.database).parent)
        if is_sqlite:
            engine = sa.create_engine(parsed, hide_parameters=True)
        else:
            given = {"connect_timeout": _CONNECT_TIMEOUT_S}
            engine = sa.create_engine(parsed, hide_parameters=True, connect_args=given, pool_pre_ping=True)
    except (exc.ArgumentError, ValueError):  # of a port that is none
        raise VolumeGone("ledger.url in cloud.toml is no address of a database. Correct it.") from None
    except ImportError as error:
        raise VolumeGone(
            f"The ledger {shown(url)} needs a package that is not here ({error}). Run: pip install 'hotlap[postgres]'."
        ) from None
    if is_sqlite:
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_immediately)
    else:
        event.listen(engine, "connect", _set_up_postgres)
    return engine


def _set_up_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the driver would begin transactions of its own, too late to lock
    for pragma in ("busy_timeout=30000", "journal_mode=WAL", "synchronous=FULL"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_immediately(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _set_up_postgres(connection: Any, _record: object) -> None:
    for setting in _SET_UP_POSTGRES:
        connection.execute(setting)
    connection.commit()


def shown(url: str) -> str:
    """An address as it may be read by anybody: without its password, and without its parameters, which may hold one."""
    try:
        parsed = sa.make_url(url)
    except (exc.ArgumentError, ValueError):
        return "that ledger.url names"
    if _is_cut_wrongly(parsed):
        return "that ledger.url names"
    return parsed.set(query={}).render_as_string(hide_password=True)


def _is_cut_wrongly(parsed: sa.URL) -> bool:
    """Whether a part of the password passes for the host, which is in every message."""
    return "@" in (parsed.host or "")


def was_cut(error: exc.DBAPIError) -> bool:
    """Whether the connection is to blame, so that the same work on a new one may succeed, or have succeeded."""
    return error.connection_invalidated or isinstance(error, (exc.OperationalError, exc.InterfaceError))


def in_words(place: str, said: str) -> HotlapError:
    if "disk is full" in said or "No space left" in said:
        return DiskFull(f"The ledger {place} is full: no space is left. Free some; until then nothing is rented.")
    if "malformed" in said or "not a database" in said:
        return CorruptFile(f"The ledger {place} is damaged ({said}). Restore it; until then nothing is rented.")
    first_line = (said.splitlines() or ["no answer"])[0]
    return StorageFailed(f"The ledger {place} does not answer ({first_line}). Nothing is rented without it.")

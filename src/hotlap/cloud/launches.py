"""Runs that are being launched: which process sees to one, and ending it with proof when that process is gone."""

import contextlib
import fcntl
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotlap import clock, durable
from hotlap.cloud import receipts, rental
from hotlap.cloud.lease import Lease
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.proof import Patience, end_all, last_bill
from hotlap.cloud.provider import NAME_PREFIX, Provider
from hotlap.config import CloudConfig, hotlap_home
from hotlap.errors import HotlapError, Survivors, UsageError

_POLL_S = 0.1


def launch_file(run: str) -> Path:
    return hotlap_home() / "launches" / f"{run}.json"


def launch_log(run: str) -> Path:
    return launch_file(run).with_suffix(".log")


_kept: dict[Path, int] = {}
"""Locks that this process holds until it ends, with their descriptors."""


def record(run: str) -> None:
    """Say that this process sees to the run, and keep others of this home from it as long as this process lives. Of
    another home or computer that shares the ledger, each single machine is refused by that.

    Raises:
        UsageError: another process sees to it.
    """
    pid = os.getpid()
    lock = launch_file(run).with_suffix(".lock")
    durable.make_dirs(lock.parent)
    with contextlib.suppress(FileExistsError):
        durable.disk.create(lock, b"")
    if lock not in _kept:
        descriptor = os.open(lock, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            require_no_other(run)
            raise UsageError(f"Another process sees to {run} already. Follow it, or run: hotlap stop {run}.") from None
        _kept[lock] = descriptor
    word = {"pid": pid, "birth": clock.process_birth(pid), "boot": clock.boot_id()}
    durable.replace(launch_file(run), durable.canonical_json(word).encode())


def supervisor(run: str) -> int | None:
    """The process that sees to the run, if it lives on this machine."""
    try:
        word: dict[str, Any] = json.loads(launch_file(run).read_bytes())
        is_it = word["boot"] == clock.boot_id() and clock.process_birth(word["pid"]) == word["birth"]
    except (FileNotFoundError, ProcessLookupError):
        return None
    except (ValueError, KeyError, TypeError):  # a damaged word is no word; the ledger still knows the machines
        return None
    return word["pid"] if is_it else None


def stop(
    run: str,
    ledger: Ledger,
    settings: CloudConfig,
    provider_of: Callable[[str], Provider],
    patience: Patience,
    say: Callable[[str], None],
) -> list[Lease]:
    """End whatever is rented for a run, and return its leases, closed. Nothing rented is an empty list.

    Raises:
        Survivors: a machine is not proven dead, or may yet appear.
    """
    mine = {lease.lease_id for lease in ledger.open_leases(run)}
    pid = supervisor(run)
    if pid is not None:
        say(f"Telling process {pid}, which sees to {run}, to give its machine back.")
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)  # one that was suspended hears nothing before
        until_s = patience.now_s() + patience.seconds
        while supervisor(run) == pid and patience.now_s() < until_s:
            patience.sleep_s(_POLL_S)
        if supervisor(run) == pid:
            raise Survivors(f"Process {pid} does not leave {run}. End it, then run hotlap stop {run} again.")
    troubles: list[HotlapError] = []
    for lease in ledger.open_leases(run):
        mine.add(lease.lease_id)
        try:
            _end(lease, ledger, settings, provider_of(lease.provider), patience)
        except HotlapError as error:  # one provider's trouble does not spare a machine of another
            troubles.append(error)
    if troubles:
        raise troubles[0]
    leases = ledger.leases(sorted(mine))
    if doubts := [each for each in leases if each.is_open]:
        raise Survivors(
            f"Of {run} a machine may yet appear: {', '.join(NAME_PREFIX + each.lease_id for each in doubts)} was asked "
            f"for, and nobody saw it so far. It stays charged, and hotlap reap goes on looking."
        )
    return leases


def _end(
    lease: Lease,
    ledger: Ledger,
    settings: CloudConfig,
    provider: Provider,
    patience: Patience,
) -> None:
    """Find the machine of a lease whose launcher is gone, end it, and settle. An unseen one is left to the reaper."""
    listing = provider.machines()
    victims = {
        each.machine_id: each.created_at_s for each in listing.machines if each.name == NAME_PREFIX + lease.lease_id
    }
    is_theirs = lease.provider == "local" or lease.owner != rental.owner_of(settings)
    if not victims and is_theirs and not receipts.receipt_path(lease.lease_id).exists():
        # Its absence here proves nothing: a ledger may be shared, and neither homes nor accounts are.
        whose = (
            "is a local one of another home or computer"
            if lease.provider == "local"
            else f"was rented by {lease.owner}"
        )
        raise Survivors(
            f"{lease.machine_id or 'A machine'} of {lease.run} {whose}, and is not seen from here. Run hotlap stop "
            f"{lease.run} there; its time is over at {clock.utc_text(lease.not_after_s)}."
        )
    victims |= {ident: lease.began_s for ident in (lease.machine_id or "").split(",") if ident and ident not in victims}
    if not victims:
        return
    ends = end_all(provider, list(victims.items()), patience)
    if not all(is_dead for _, is_dead in ends.values()):
        raise Survivors(f"{', '.join(victims)} of {lease.provider} is not proven dead. Run the same command again.")
    dead = {ident: evidence for ident, (evidence, _) in ends.items()}
    at_s, price = last_bill(lease, dead, listing.machines, settings)
    closed = ledger.settle(lease.lease_id, at_s, price, "stopped", "ended by hotlap stop")
    proof = {ident: evidence.as_json() for ident, evidence in dead.items()}
    receipts.open_receipt(lease.lease_id).settle(closed, proof)


def last_ended(run: str, ledger: Ledger) -> Lease | None:
    """The run's newest closed lease."""
    leases = [lease for lease in ledger.leases_of(run) if lease.outcome is not None]
    return leases[-1] if leases else None


def require_no_other(run: str) -> None:
    """
    Raises:
        UsageError: another process sees to this run already.
    """
    pid = supervisor(run)
    if pid is not None and pid != os.getpid():
        raise UsageError(f"Process {pid} sees to {run} already. Follow it, or run: hotlap stop {run}.")

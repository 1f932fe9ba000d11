"""Every error a user can meet, drawn.

    HotlapError
    ├── Refused                3   refused, locked, changed, budget, guard
    │   ├── RunLocked              locked
    │   ├── RunChanged             changed
    │   ├── BudgetRefused          budget
    │   └── GuardRefused           guard
    ├── UsageError             2   usage, config, data, missing
    │   ├── ConfigError            config
    │   ├── BadData                data
    │   └── MissingArtifact        missing
    ├── IntegrityError         4   corrupt, pins, audit
    │   ├── CorruptFile            corrupt
    │   ├── PinMismatch            pins
    │   └── AuditFailed            audit
    ├── FetchFailed            5   fetch
    ├── ProviderFailed         5   provider, no_capacity, no_funds, no_permission, provisioning, price, lost, survivors
    │   ├── NotCreated             provider, no_capacity, no_funds
    │   │   ├── NoCapacity             no_capacity
    │   │   └── NoFunds                no_funds
    │   ├── NoPermission           no_permission
    │   ├── RateLimited            provider
    │   ├── AmbiguousCreate        provider
    │   ├── ProvisioningFailed     provisioning
    │   ├── PriceRose              price
    │   ├── MachineLost            lost
    │   └── Survivors              survivors
    ├── TrainingFailed         6   nan, diverged, oom, crash
    │   ├── NonFiniteLoss          nan
    │   ├── Diverged               diverged
    │   ├── OutOfMemory            oom
    │   └── ChildCrashed           crash
    ├── StorageFailed          7   disk_full, read_only, volume_gone
    │   ├── DiskFull               disk_full
    │   ├── ReadOnlyVolume         read_only
    │   └── VolumeGone             volume_gone
    └── NotProven              8   fail, undecided, disturbed
        ├── ProofFailed            fail
        ├── Undecided              undecided
        └── MachineDisturbed       disturbed

A class fixes the exit code and the reason word; `--json` output and the last line on stderr carry both.
Exit codes that are no errors: 0 done, 8 not proven, 75 slice over (call again), 124 overran its cap, 130 second Ctrl-C.
"""

import errno
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

DONE = 0
NOT_PROVEN = 8
SLICE_OVER = 75
OVERRAN = 124
INTERRUPTED = 130


class HotlapError(Exception):
    """Something a user can act on. The message says what, with which value, and the way out."""

    exit_code = 1
    reason = "unexpected"


class UsageError(HotlapError):
    exit_code = 2
    reason = "usage"


class ConfigError(UsageError):
    reason = "config"


class BadData(UsageError):
    reason = "data"


class MissingArtifact(UsageError):
    reason = "missing"


class Refused(HotlapError):
    exit_code = 3
    reason = "refused"


class RunLocked(Refused):
    reason = "locked"


class RunChanged(Refused):
    reason = "changed"


class BudgetRefused(Refused):
    """The ledger has no room for the worst case."""

    reason = "budget"


class GuardRefused(Refused):
    """This machine serves, so nothing is trained on it."""

    reason = "guard"


class IntegrityError(HotlapError):
    exit_code = 4
    reason = "corrupt"


class CorruptFile(IntegrityError):
    reason = "corrupt"


class PinMismatch(IntegrityError):
    reason = "pins"


class AuditFailed(IntegrityError):
    reason = "audit"


class FetchFailed(HotlapError):
    """An artifact's source did not deliver: no network, no such name, no permission."""

    exit_code = 5
    reason = "fetch"


class ProviderFailed(HotlapError):
    """A provider did not do what was asked, did not answer, or answered what cannot be read."""

    exit_code = 5
    reason = "provider"


class NotCreated(ProviderFailed):
    """A definite no to a create: nothing exists and nothing will."""


class NoCapacity(NotCreated):
    reason = "no_capacity"


class NoFunds(NotCreated):
    reason = "no_funds"


class NoPermission(ProviderFailed):
    """A key that is wrong or may not do this. To a create it is as definite a no as `NotCreated`."""

    reason = "no_permission"


class RateLimited(ProviderFailed):
    """Asked too often. To a create it is a definite no, for now."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class AmbiguousCreate(ProviderFailed):
    """The create may or may not have had its effect. It is never sent again; the machine is looked for by name."""


class ProvisioningFailed(ProviderFailed):
    """The machine did not get ready within its provisioning deadline."""

    reason = "provisioning"


class PriceRose(ProviderFailed):
    reason = "price"


class MachineLost(ProviderFailed):
    """The machine ended, restarted or fell silent before its job gave a result."""

    reason = "lost"


class Survivors(ProviderFailed):
    """A machine whose time is over is not proven dead."""

    reason = "survivors"


class TrainingFailed(HotlapError):
    exit_code = 6
    reason = "crash"


class NonFiniteLoss(TrainingFailed):
    reason = "nan"

    def __init__(self, what: str, value: float, step: int, intact_step: int | None = None) -> None:
        """`intact_step`: the one before, unless another is given."""
        super().__init__(
            f"{what} became {value} at step {step}; step {_or_before(intact_step, step)} is intact. "
            f"Lower optim.lr or raise optim.warmup_steps; changed settings start a run of their own."
        )


class Diverged(TrainingFailed):
    reason = "diverged"

    def __init__(self, loss: float, step: int, intact_step: int | None = None, what: str = "Loss") -> None:
        super().__init__(
            f"{what} reached {loss:.4g} nats per token at step {step}, far beyond that of random guessing; "
            f"step {_or_before(intact_step, step)} is intact. Lower optim.lr or raise optim.warmup_steps."
        )


def _or_before(intact_step: int | None, step: int) -> int:
    return step - 1 if intact_step is None else intact_step


class OutOfMemory(TrainingFailed):
    reason = "oom"


class ChildCrashed(TrainingFailed):
    reason = "crash"


class StorageFailed(HotlapError):
    exit_code = 7
    reason = "volume_gone"


class DiskFull(StorageFailed):
    reason = "disk_full"


class ReadOnlyVolume(StorageFailed):
    reason = "read_only"


class VolumeGone(StorageFailed):
    reason = "volume_gone"


class NotProven(HotlapError):
    """A claim was examined and does not stand, or cannot be examined here."""

    exit_code = 8
    reason = "undecided"


class ProofFailed(NotProven):
    """The fresh runs do not bear the claim out."""

    reason = "fail"


class Undecided(NotProven):
    """The machine is too noisy, or too many runs were lost, to say anything."""

    reason = "undecided"


class MachineDisturbed(NotProven):
    """Other work on this machine, or its own wavering, spoils nearly all that is measured here."""

    reason = "disturbed"


_STORAGE_ERRORS: dict[int, tuple[type[StorageFailed], str]] = {
    errno.ENOSPC: (DiskFull, "no space is left; free some and run the same command again"),
    errno.EDQUOT: (DiskFull, "the quota is used up; free some space and run the same command again"),
    errno.EFBIG: (DiskFull, "a file-size limit was hit; raise it and run the same command again"),
    errno.EROFS: (ReadOnlyVolume, "it is mounted read-only; remount it for writing"),
    errno.EACCES: (ReadOnlyVolume, "writing is not permitted; check the folder's owner and mode"),
    errno.EPERM: (ReadOnlyVolume, "writing is not permitted; check the folder's owner and mode"),
    errno.ENOENT: (VolumeGone, "the folder has vanished; mount the volume and run the same command again"),
    errno.ENOTDIR: (VolumeGone, "the folder has vanished; mount the volume and run the same command again"),
    errno.EIO: (VolumeGone, "the volume does not answer; mount it again and run the same command again"),
    errno.ESTALE: (VolumeGone, "the volume does not answer; mount it again and run the same command again"),
    errno.ENODEV: (VolumeGone, "the volume does not answer; mount it again and run the same command again"),
    errno.ENOTCONN: (VolumeGone, "the volume does not answer; mount it again and run the same command again"),
}


@contextmanager
def storage_errors(path: Path) -> Generator[None]:
    """Turn what the operating system says while `path` is written into the storage error a user can act on."""
    try:
        yield
    except OSError as error:
        if (failure := storage_failure(error, f"Cannot write {path}")) is None:
            raise
        raise failure from error


def storage_failure(error: OSError, what: str) -> StorageFailed | None:
    """What a user can act on, if the operating system speaks of a disk or a volume."""
    if error.errno is None or error.errno not in _STORAGE_ERRORS:
        return None
    kind, way_out = _STORAGE_ERRORS[error.errno]
    return kind(f"{what}: {way_out}. Whatever was published before is intact.")

"""Exit codes and reason words are a contract; what an operating system says of a disk becomes words of ours."""

import errno
import inspect
import os
from pathlib import Path

import pytest

from hotlap import errors
from hotlap.errors import DiskFull, HotlapError, ReadOnlyVolume, StorageFailed, VolumeGone, storage_errors

CODES = {
    "HotlapError": (1, "unexpected"),
    "UsageError": (2, "usage"),
    "ConfigError": (2, "config"),
    "BadData": (2, "data"),
    "MissingArtifact": (2, "missing"),
    "Refused": (3, "refused"),
    "RunLocked": (3, "locked"),
    "RunChanged": (3, "changed"),
    "BudgetRefused": (3, "budget"),
    "GuardRefused": (3, "guard"),
    "IntegrityError": (4, "corrupt"),
    "CorruptFile": (4, "corrupt"),
    "PinMismatch": (4, "pins"),
    "AuditFailed": (4, "audit"),
    "FetchFailed": (5, "fetch"),
    "ProviderFailed": (5, "provider"),
    "NotCreated": (5, "provider"),
    "NoCapacity": (5, "no_capacity"),
    "NoFunds": (5, "no_funds"),
    "NoPermission": (5, "no_permission"),
    "RateLimited": (5, "provider"),
    "AmbiguousCreate": (5, "provider"),
    "ProvisioningFailed": (5, "provisioning"),
    "PriceRose": (5, "price"),
    "MachineLost": (5, "lost"),
    "Survivors": (5, "survivors"),
    "TrainingFailed": (6, "crash"),
    "NonFiniteLoss": (6, "nan"),
    "Diverged": (6, "diverged"),
    "OutOfMemory": (6, "oom"),
    "ChildCrashed": (6, "crash"),
    "StorageFailed": (7, "volume_gone"),
    "DiskFull": (7, "disk_full"),
    "ReadOnlyVolume": (7, "read_only"),
    "VolumeGone": (7, "volume_gone"),
    "NotProven": (8, "undecided"),
    "ProofFailed": (8, "fail"),
    "Undecided": (8, "undecided"),
    "MachineDisturbed": (8, "disturbed"),
}


def classes() -> dict[str, type[HotlapError]]:
    return {
        name: value for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, HotlapError)
    }


def test_every_error_keeps_its_exit_code_and_reason():
    assert {name: (kind.exit_code, kind.reason) for name, kind in classes().items()} == CODES


def test_codes_that_are_no_errors():
    assert (errors.DONE, errors.SLICE_OVER, errors.OVERRAN, errors.INTERRUPTED) == (0, 75, 124, 130)
    taken = {kind.exit_code for kind in classes().values()}
    assert not taken & {0, 75, 124, 130}
    assert taken <= set(range(1, 9))


def test_no_error_is_caught_by_accident():
    """Not as an `OSError` or `ValueError`, which the code around a call may rightly handle."""
    for kind in classes().values():
        assert not issubclass(kind, OSError | ValueError | RuntimeError)


def test_training_failures_say_what_stayed_whole_and_what_to_change():
    nan = errors.NonFiniteLoss("Loss", float("nan"), 12)
    diverged = errors.Diverged(31.75, 12)
    for error, value in ((nan, "nan"), (diverged, "31.75")):
        for word in (value, "step 12", "step 11 is intact", "Lower optim.lr"):
            assert word in str(error)


# --- storage ---

MAPPED = {
    errno.ENOSPC: (DiskFull, "free some"),
    errno.EDQUOT: (DiskFull, "quota"),
    errno.EFBIG: (DiskFull, "file-size limit"),
    errno.EROFS: (ReadOnlyVolume, "remount it"),
    errno.EACCES: (ReadOnlyVolume, "owner and mode"),
    errno.EPERM: (ReadOnlyVolume, "owner and mode"),
    errno.ENOENT: (VolumeGone, "vanished"),
    errno.ENOTDIR: (VolumeGone, "vanished"),
    errno.EIO: (VolumeGone, "does not answer"),
    errno.ESTALE: (VolumeGone, "does not answer"),
    errno.ENODEV: (VolumeGone, "does not answer"),
    errno.ENOTCONN: (VolumeGone, "does not answer"),
}


def test_every_mapped_number_is_tested():
    assert set(MAPPED) == set(errors._STORAGE_ERRORS)


@pytest.mark.parametrize("number", MAPPED, ids=errno.errorcode.get)
def test_a_storage_error_names_the_path_and_the_way_out(number: int):
    kind, way_out = MAPPED[number]
    with pytest.raises(kind, match=way_out) as raised, storage_errors(Path("runs/a")):
        raise OSError(number, os.strerror(number))
    assert type(raised.value) is kind
    assert "runs/a" in str(raised.value)
    assert "published before is intact" in str(raised.value)
    assert isinstance(raised.value.__cause__, OSError)
    assert raised.value.__cause__.errno == number


@pytest.mark.parametrize(
    "error",
    [
        FileExistsError(errno.EEXIST, "exists"),
        OSError(errno.EMFILE, "too many open files"),
        OSError("no number"),
        ValueError("a bug"),
        DiskFull("already in words"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_everything_else_passes_unchanged(error: BaseException):
    with pytest.raises(type(error)) as raised, storage_errors(Path("runs/a")):
        raise error
    assert raised.value is error


def test_nested_the_inner_words_stay():
    with pytest.raises(StorageFailed, match="inner"), storage_errors(Path("outer")), storage_errors(Path("inner")):
        raise OSError(errno.ENOSPC, "full")


def test_without_an_error_the_work_is_done_and_other_errors_pass():
    done: list[int] = []
    with storage_errors(Path("runs/a")):
        done.append(1)
    with pytest.raises(ZeroDivisionError), storage_errors(Path("runs/a")):
        done.append(1 // 0)
    assert done == [1]

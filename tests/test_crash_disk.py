"""The crash model itself: it must allow what disks do, forbid what they do not, and catch a careless writer."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crash_disk import KINDS, Call, CrashState, FailingDisk, RecordingDisk, SlowDisk, crash_states

from hotlap import clock, durable
from hotlap.errors import CorruptFile, DiskFull, VolumeGone


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    path = tmp_path / "volume"
    path.mkdir()
    return path


@pytest.fixture
def disk(volume: Path, monkeypatch: pytest.MonkeyPatch) -> RecordingDisk:
    recording = RecordingDisk(volume)
    monkeypatch.setattr(durable, "disk", recording)
    return recording


def record_again(volume: Path, monkeypatch: pytest.MonkeyPatch) -> RecordingDisk:
    """A recording that takes what is there now for safe."""
    recording = RecordingDisk(volume)
    monkeypatch.setattr(durable, "disk", recording)
    return recording


def states_at(disk: RecordingDisk, volume: Path, point: int) -> list[CrashState]:
    return [state for state in crash_states(disk.log, volume) if point in state.points]


def last_states(disk: RecordingDisk, volume: Path) -> list[CrashState]:
    return states_at(disk, volume, len(disk.log))


def contents(states: list[CrashState], name: str) -> set[bytes | None]:
    """What a file may hold; None where it is not there."""
    return {state.tree.get(name) for state in states}


@pytest.fixture
def each_state(tmp_path: Path, volume: Path, disk: RecordingDisk) -> Callable[[], Iterator[tuple[CrashState, Path]]]:
    def built() -> Iterator[tuple[CrashState, Path]]:
        for number, state in enumerate(crash_states(disk.log, volume)):
            yield state, state.materialize(tmp_path / f"state-{number}")

    return built


# --- what a disk may do ---


def test_an_unsynced_file_may_vanish_be_empty_be_torn_or_be_there(volume: Path, disk: RecordingDisk):
    disk.create(volume / "a", b"abcdef")
    assert contents(last_states(disk, volume), "a") == {None, b"", b"abc", b"abcdef", bytes(6)}


def test_a_synced_file_in_an_unsynced_directory_is_whole_or_vanishes(volume: Path, disk: RecordingDisk):
    disk.create(volume / "a", b"abcdef")
    disk.sync(volume / "a")
    assert contents(last_states(disk, volume), "a") == {None, b"abcdef"}


def test_a_file_and_a_name_that_are_both_synced_stay(volume: Path, disk: RecordingDisk):
    disk.create(volume / "a", b"abcdef")
    disk.sync(volume)
    assert contents(last_states(disk, volume), "a") == {b"", b"abc", b"abcdef", bytes(6)}
    disk.sync(volume / "a")
    assert contents(last_states(disk, volume), "a") == {b"abcdef"}


def test_a_kill_keeps_what_was_done_and_part_of_what_was_not(volume: Path, disk: RecordingDisk):
    disk.create(volume / "a", b"abcd")
    killed = [state.tree for state in crash_states(disk.log, volume) if "killed" in state.how]
    assert killed == [{}, {"a": b""}, {"a": b"ab"}, {"a": b"abcd"}]


def test_appended_bytes_and_a_truncation_reach_the_disk_independently(
    volume: Path, disk: RecordingDisk, monkeypatch: pytest.MonkeyPatch
):
    disk.create(volume / "a", b"row1\nro")
    disk = record_again(volume, monkeypatch)
    disk.truncate(volume / "a", 5)
    disk.append(volume / "a", b"row2\n")
    assert (
        contents(last_states(disk, volume), "a")
        == {
            b"row1\nro",  # neither
            b"row1\n",  # cut only
            b"row1\nrow2\n",  # both
            b"row1\nro" + b"w2\n",  # appended where the cut would have been, without it
            b"row1\nro"[:5] + b"ro",  # cut, and half of what was appended
            b"row1\n" + bytes(5),
        }
    )


def test_a_later_page_may_be_there_before_an_earlier_one(volume: Path, disk: RecordingDisk):
    disk.create(volume / "a", b"x" * 9000)
    disk.sync(volume)
    assert bytes(8192) + b"x" * 808 in contents(last_states(disk, volume), "a")


def test_what_is_synced_stays_under_all_that_follows(volume: Path, disk: RecordingDisk):
    durable.append_rows(volume / "log", [{"step": 1}])
    durable.sync_file(volume / "log")
    point = len(disk.log)
    for step in range(2, 5):
        durable.append_rows(volume / "log", [{"step": step, "text": "x" * 3000}])
    for state in crash_states(disk.log, volume):
        if state.last_point >= point:
            log = state.tree["log"]
            assert log and log.startswith(b'{"step": 1}\n'), state.how


def test_unsynced_renames_persist_in_any_order(volume: Path, disk: RecordingDisk, monkeypatch: pytest.MonkeyPatch):
    for name in ("a", "b"):
        disk.create(volume / name, name.encode())
    disk = record_again(volume, monkeypatch)
    disk.rename(volume / "a", volume / "a2")
    disk.rename(volume / "b", volume / "b2")
    names = {tuple(sorted(state.tree)) for state in last_states(disk, volume)}
    assert names == {("a", "b"), ("a2", "b"), ("a", "b2"), ("a2", "b2")}
    disk.sync(volume)
    assert {tuple(sorted(state.tree)) for state in last_states(disk, volume)} == {("a2", "b2")}


def test_a_rename_whose_file_was_never_made_has_no_effect(
    volume: Path, disk: RecordingDisk, monkeypatch: pytest.MonkeyPatch
):
    disk.create(volume / "final", b"old")
    disk = record_again(volume, monkeypatch)
    disk.create(volume / "new", b"new")
    disk.rename(volume / "new", volume / "final")
    trees = [state.tree for state in last_states(disk, volume)]
    assert {"final": b"old"} in trees
    assert {"final": b"new"} in trees
    assert {"final": b""} in trees
    assert all("final" in tree for tree in trees)


def test_a_directory_is_renamed_with_all_it_holds(volume: Path, disk: RecordingDisk, monkeypatch: pytest.MonkeyPatch):
    disk.make_dir(volume / "staged")
    disk.create(volume / "staged" / "a", b"1")
    disk = record_again(volume, monkeypatch)
    disk.create(volume / "staged" / "b", b"2")
    disk.rename(volume / "staged", volume / "final")
    trees = [state.tree for state in last_states(disk, volume)]
    assert {"final": None, "final/a": b"1", "final/b": b"2"} in trees
    assert {"final": None, "final/a": b"1"} in trees, "the rename may come before the new file's name"
    assert {"staged": None, "staged/a": b"1", "staged/b": b"2"} in trees
    assert not any("final" in tree and "staged" in tree for tree in trees)
    disk.sync(volume / "final")
    disk.sync(volume)
    assert all("final/b" in state.tree for state in last_states(disk, volume))


def test_a_directory_whose_own_name_is_not_synced_vanishes_with_what_it_holds(volume: Path, disk: RecordingDisk):
    disk.make_dir(volume / "new")
    disk.create(volume / "new" / "a", b"1")
    disk.sync(volume / "new" / "a")
    disk.sync(volume / "new")
    assert {} in [state.tree for state in last_states(disk, volume)]


def test_a_rename_across_directories_lasts_once_its_new_directory_is_synced(volume: Path, disk: RecordingDisk):
    for name in ("old", "new"):
        disk.make_dir(volume / name)
        disk.sync(volume)
    disk.create(volume / "old" / "a", b"1")
    disk.sync(volume / "old" / "a")
    disk.rename(volume / "old" / "a", volume / "new" / "a")
    disk.sync(volume / "old")
    assert any("new/a" not in state.tree for state in last_states(disk, volume))
    disk.sync(volume / "new")
    assert {tuple(sorted(state.tree)) for state in last_states(disk, volume)} == {("new", "new/a", "old")}


def test_a_removal_may_be_lost(volume: Path, disk: RecordingDisk, monkeypatch: pytest.MonkeyPatch):
    disk.create(volume / "a", b"1")
    disk = record_again(volume, monkeypatch)
    disk.remove(volume / "a")
    assert contents(last_states(disk, volume), "a") == {b"1", None}
    disk.sync(volume)
    assert contents(last_states(disk, volume), "a") == {None}


def test_what_was_there_before_the_recording_is_safe(volume: Path, tmp_path: Path):
    (volume / "deep").mkdir()
    (volume / "deep" / "a").write_bytes(b"1")
    disk = RecordingDisk(volume)
    disk.create(tmp_path / "elsewhere", b"not ours")
    disk.create(volume / "b", b"")
    trees = [state.tree for state in crash_states(disk.log, volume)]
    assert trees == [{"deep": None, "deep/a": b"1"}, {"deep": None, "deep/a": b"1", "b": b""}]


def test_equal_states_come_once_with_every_moment(volume: Path, disk: RecordingDisk):
    for number in range(3):
        durable.replace(volume / "a", str(number % 2).encode())
    states = list(crash_states(disk.log, volume))
    assert len({tuple(sorted(state.tree.items())) for state in states}) == len(states)
    zero = next(state for state in states if state.tree == {"a": b"0"})
    assert zero.points[0] < len(disk.log) // 2 < zero.last_point == len(disk.log)


def test_materialize_builds_the_tree(tmp_path: Path):
    state = CrashState({"a": None, "a/b": b"1", "c": b""}, (0,), "by hand")
    folder = state.materialize(tmp_path / "built")
    assert {path.relative_to(folder).as_posix(): path.is_dir() for path in folder.rglob("*")} == {
        "a": True,
        "a/b": False,
        "c": False,
    }
    assert (folder / "a" / "b").read_bytes() == b"1"


# --- what durable.py promises ---


def stage(folder: Path) -> None:
    durable.make_dirs(folder)
    for name in ("weights", "state"):
        durable.write_synced(folder / name, name.encode() * 400)


def verifies(folder: Path) -> bool:
    try:
        durable.verify(folder)
    except CorruptFile:
        return False
    return True


EachState = Callable[[], Iterator[tuple[CrashState, Path]]]


def test_publish_makes_a_directory_whole_or_not_at_all(volume: Path, disk: RecordingDisk, each_state: EachState):
    stage(volume / "staged")
    durable.publish(volume / "staged", volume / "final", {"step": 1})
    num_states = 0
    for state, folder in each_state():
        num_states += 1
        assert verifies(folder / "final") == (folder / "final").exists(), state.how
        if state.last_point == len(disk.log):
            assert verifies(folder / "final"), state.how
    assert num_states > 20


def test_publish_keeps_what_lies_in_subfolders(volume: Path, disk: RecordingDisk, each_state: EachState):
    stage(volume / "staged" / "sub" / "deeper")
    durable.publish(volume / "staged", volume / "final")
    for state, folder in each_state():
        assert verifies(folder / "final") == (folder / "final").exists(), state.how
        if state.last_point == len(disk.log):
            assert verifies(folder / "final"), state.how


def test_where_renames_are_not_atomic_a_half_renamed_directory_does_not_verify(
    volume: Path, disk: RecordingDisk, tmp_path: Path
):
    stage(volume / "staged")
    durable.publish(volume / "staged", volume / "final")
    halves = 0
    for number, state in enumerate(crash_states(disk.log, volume, has_atomic_renames=False)):
        folder = state.materialize(tmp_path / f"state-{number}")
        names = {path.name for path in (folder / "final").glob("*")}
        halves += "final" in state.tree and names != {"weights", "state", durable.MANIFEST}
        assert verifies(folder / "final") == (names == {"weights", "state", durable.MANIFEST}), state.how
    assert halves


def test_a_removed_directory_is_whole_or_does_not_verify_at_every_kill(
    volume: Path, disk: RecordingDisk, each_state: EachState
):
    stage(volume / "staged")
    durable.publish(volume / "staged", volume / "final")
    durable.remove_tree(volume / "final")
    names = {"weights", "state", durable.MANIFEST}
    for state, folder in each_state():
        if (folder / "final").exists():
            assert verifies(folder / "final") == ({p.name for p in (folder / "final").iterdir()} == names), state.how


def test_replace_leaves_the_old_or_the_new(volume: Path, disk: RecordingDisk, monkeypatch: pytest.MonkeyPatch):
    durable.replace(volume / "a", b"old")
    disk = record_again(volume, monkeypatch)
    durable.replace(volume / "a", b"new")
    assert contents(list(crash_states(disk.log, volume)), "a") == {b"old", b"new"}
    assert contents(last_states(disk, volume), "a") == {b"new"}


def test_a_first_replace_leaves_nothing_or_all(volume: Path, disk: RecordingDisk):
    durable.replace(volume / "a", b"new")
    assert contents(list(crash_states(disk.log, volume)), "a") == {None, b"new"}


def test_rows_that_were_synced_are_read_in_every_state(volume: Path, disk: RecordingDisk, each_state: EachState):
    log = volume / "log"
    synced_at: dict[int, int] = {}
    for step in range(1, 7):
        durable.append_rows(log, [{"step": step}])
        if step % 2 == 0:
            durable.sync_file(log)
            synced_at[len(disk.log)] = step
    for state, folder in each_state():
        rows = durable.read_rows(folder / "log")
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), state.how
        promised = max((step for point, step in synced_at.items() if point <= state.last_point), default=0)
        assert len(rows) >= promised, state.how


def test_a_torn_row_is_cut_off_by_the_next_writer_in_every_state(volume: Path, disk: RecordingDisk, tmp_path: Path):
    durable.append_rows(volume / "log", [{"step": 1}])
    durable.sync_file(volume / "log")
    durable.append_rows(volume / "log", [{"step": 2}])
    for number, state in enumerate(crash_states(disk.log, volume)):
        log = state.materialize(tmp_path / f"state-{number}") / "log"
        before = durable.read_rows(log)
        durable.Disk.sync(disk, log.parent)
        durable.append_rows(log, [{"step": 3}])
        assert durable.read_rows(log) == [*before, {"step": 3}], state.how


def test_a_log_that_was_cut_stays_cut(volume: Path, disk: RecordingDisk, monkeypatch: pytest.MonkeyPatch):
    durable.append_rows(volume / "log", [{"step": 1}, {"step": 2}])
    disk = record_again(volume, monkeypatch)
    durable.cut_to(volume / "log", 12)
    assert contents(last_states(disk, volume), "log") == {b'{"step": 1}\n'}


def test_make_dirs_leaves_every_parent_in_place(volume: Path, disk: RecordingDisk):
    durable.make_dirs(volume / "a" / "b" / "c")
    assert {tuple(sorted(state.tree)) for state in last_states(disk, volume)} == {("a", "a/b", "a/b/c")}


# --- careless writers are caught ---


def write_straight(volume: Path, disk: RecordingDisk) -> None:
    disk.make_dir(volume / "final")
    for name in ("weights", "state"):
        disk.create(volume / "final" / name, b"x" * 100)


def rename_without_sync(volume: Path, disk: RecordingDisk) -> None:
    disk.make_dir(volume / "staged")
    for name in ("weights", "state"):
        disk.create(volume / "staged" / name, b"x" * 100)
    disk.rename(volume / "staged", volume / "final")
    disk.sync(volume)


def sync_files_but_not_their_folder(volume: Path, disk: RecordingDisk) -> None:
    disk.make_dir(volume / "staged")
    for name in ("weights", "state"):
        disk.create(volume / "staged" / name, b"x" * 100)
        disk.sync(volume / "staged" / name)
    disk.rename(volume / "staged", volume / "final")
    disk.sync(volume)


def forget_the_last_sync(volume: Path, disk: RecordingDisk) -> None:
    disk.make_dir(volume / "staged")
    for name in ("weights", "state"):
        disk.create(volume / "staged" / name, b"x" * 100)
        disk.sync(volume / "staged" / name)
    disk.sync(volume / "staged")
    disk.rename(volume / "staged", volume / "final")


WHOLE = {"final": None, "final/weights": b"x" * 100, "final/state": b"x" * 100}


@pytest.mark.parametrize("write", [write_straight, rename_without_sync, sync_files_but_not_their_folder])
def test_a_careless_writer_leaves_a_half_directory_under_its_final_name(
    write: Callable[[Path, RecordingDisk], None], volume: Path, disk: RecordingDisk
):
    write(volume, disk)
    assert any("final" in state.tree and state.tree != WHOLE for state in crash_states(disk.log, volume))


def test_a_writer_that_forgets_the_last_sync_loses_what_it_reported(volume: Path, disk: RecordingDisk):
    forget_the_last_sync(volume, disk)
    assert all("final" not in state.tree or state.tree == WHOLE for state in crash_states(disk.log, volume))
    assert any("final" not in state.tree for state in last_states(disk, volume))


def test_a_log_rewritten_in_place_is_caught(volume: Path, disk: RecordingDisk, monkeypatch: pytest.MonkeyPatch):
    durable.replace(volume / "a", b"old")
    disk = record_again(volume, monkeypatch)
    disk.truncate(volume / "a", 0)
    disk.append(volume / "a", b"new")
    disk.sync(volume / "a")
    assert contents(list(crash_states(disk.log, volume)), "a") > {b"old", b"new"}


# --- disks that fail or are slow ---


def test_a_failing_disk_fails_at_the_call_it_was_told(volume: Path, monkeypatch: pytest.MonkeyPatch):
    disk = FailingDisk(errno.ENOSPC, nth=2, kinds=("create",))
    monkeypatch.setattr(durable, "disk", disk)
    durable.write_synced(volume / "a", b"1")
    with pytest.raises(DiskFull):
        durable.write_synced(volume / "b", b"2")
    durable.write_synced(volume / "c", b"3")
    assert sorted(path.name for path in volume.iterdir()) == ["a", "c"]
    assert disk.num_calls == 3
    assert disk.failed == [Call("create", volume / "b", data=b"2")]


def test_a_failing_disk_can_leave_half_and_stay_full(volume: Path, monkeypatch: pytest.MonkeyPatch):
    (volume / "log").write_bytes(b"1\n")
    disk = FailingDisk(errno.ENOSPC, nth=1, kinds=("create", "append"), leaves_half=True, is_lasting=True)
    monkeypatch.setattr(durable, "disk", disk)
    with pytest.raises(DiskFull):
        durable.write_synced(volume / "a", b"abcd")
    with pytest.raises(DiskFull):
        durable.append_rows(volume / "log", [{"a": 1}])
    assert (volume / "a").read_bytes() == b"ab"
    assert (volume / "log").read_bytes() == b'1\n{"a"'


@pytest.mark.parametrize("kind", KINDS)
def test_a_failing_disk_can_fail_every_kind(kind: str, volume: Path):
    disk = FailingDisk(errno.EIO, nth=1, kinds=(kind,))
    calls: dict[str, Callable[[], None]] = {
        "create": lambda: disk.create(volume / "a", b""),
        "append": lambda: disk.append(volume / "a", b"1"),
        "truncate": lambda: disk.truncate(volume / "a", 0),
        "make_dir": lambda: disk.make_dir(volume / "d"),
        "rename": lambda: disk.rename(volume / "a", volume / "b"),
        "remove": lambda: disk.remove(volume / "d"),
        "sync": lambda: disk.sync(volume),
    }
    for op, call in calls.items():
        if op == kind:
            with pytest.raises(OSError) as raised:
                call()
            assert raised.value.errno == errno.EIO
        elif not (kind == "create" and op in ("truncate", "rename")) and not (kind == "make_dir" and op == "remove"):
            call()
    assert [call.op for call in disk.failed] == [kind]


def test_replace_survives_a_failure_of_each_of_its_calls(volume: Path, monkeypatch: pytest.MonkeyPatch):
    durable.replace(volume / "a", b"old")
    counting = FailingDisk(nth=None)
    monkeypatch.setattr(durable, "disk", counting)
    durable.replace(volume / "a", b"old")
    for nth in range(1, counting.num_calls + 1):
        failing = FailingDisk(errno.EIO, nth=nth, leaves_half=True)
        monkeypatch.setattr(durable, "disk", failing)
        with pytest.raises(VolumeGone):
            durable.replace(volume / "a", b"new")
        was_last_sync = failing.failed[0].op == "sync" and failing.failed[0].path == volume
        assert (volume / "a").read_bytes() == (b"new" if was_last_sync else b"old")
        assert [path.name for path in volume.iterdir()] == ["a"]
        monkeypatch.setattr(durable, "disk", durable.Disk())
        durable.replace(volume / "a", b"old")


def test_a_slow_disk_sleeps(volume: Path):
    disk = SlowDisk(0.05, kinds=("sync",))
    started_s = clock.monotonic_s()
    disk.create(volume / "a", b"")
    disk.sync(volume / "a")
    disk.sync(volume)
    assert clock.monotonic_s() - started_s >= 0.1

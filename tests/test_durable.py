"""Published directories and logs: damage is found, a full or read-only volume is told, nothing whole is lost."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest
from crash_disk import FailingDisk
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hotlap import durable
from hotlap.errors import CorruptFile, DiskFull, HotlapError, RunLocked, StorageFailed, UsageError

FACTS = {
    "step": 40,
    "tiny": 1e-05,
    "huge": 1.7976931348623157e308,
    "text": '\u001f ä 漢 "quoted" \\',
    "none": None,
    "yes": True,
    "nested": {"list": [1, -0.0, 5e-324]},
}


def stage(parent: Path, files: dict[str, bytes], name: str = "staged") -> Path:
    staged = parent / name
    for path, data in files.items():
        durable.make_dirs((staged / path).parent)
        durable.write_synced(staged / path, data)
    return staged


def publish(parent: Path, files: dict[str, bytes]) -> Path:
    durable.publish(stage(parent, files), parent / "final", FACTS)
    return parent / "final"


@pytest.fixture
def published(tmp_path: Path) -> Path:
    return publish(tmp_path, {"weights": bytes(range(256)) * 8, "state.json": b"{}\n", "empty": b"", "sub/deep": b"x"})


# --- damage ---


def test_what_was_published_verifies_with_its_facts(published: Path):
    assert durable.verify(published) == FACTS
    manifest = durable.read_manifest(published)
    assert set(manifest["files"]) == {"weights", "state.json", "empty", "sub/deep"}
    assert manifest["files"]["weights"]["bytes"] == 2048


FLIPPED = {
    "weights": bytes(range(256)) * 20,
    "one": b"\x00",
    "rows.jsonl": b'{"a":1}\n' * 9,
    "sub/manifest.json": b'{"not": "ours"}\n',
}


@pytest.fixture(scope="module")
def flippable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("flipped"), FLIPPED)


@contextmanager
def flipped_bit(path: Path, position: int) -> Generator[None]:
    """One bit is the other one, in place."""
    with path.open("r+b", buffering=0) as file:
        file.seek(position // 8)
        before = file.read(1)
        file.seek(position // 8)
        file.write(bytes([before[0] ^ 1 << position % 8]))
        try:
            yield
        finally:
            file.seek(position // 8)
            file.write(before)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found(flippable: Path, data: st.DataObject):
    path = flippable / data.draw(st.sampled_from([*sorted(FLIPPED), durable.MANIFEST]))
    position = data.draw(st.integers(0, path.stat().st_size * 8 - 1))
    with flipped_bit(path, position), pytest.raises(CorruptFile):
        durable.verify(flippable)
    assert durable.verify(flippable) == FACTS


def test_every_bit_of_a_manifest_counts(tmp_path: Path):
    """Also those whose flip leaves JSON with the same value, as between 1e-05 and 1E-05."""
    facts = {"lr": 1e-05, "text": "\u001f"}
    folder = tmp_path / "final"
    durable.publish(stage(tmp_path, {"a": b"1"}), folder, facts)
    path = folder / durable.MANIFEST
    for position in range(path.stat().st_size * 8):
        with flipped_bit(path, position), pytest.raises(CorruptFile):
            durable.read_manifest(folder)
    assert durable.verify(folder) == facts


@pytest.mark.parametrize(
    "text", [b"", b"null", b"[]", b'"text"', b"7", b"{}", b"{" * 100_000, b"\xff\xfe", b'{"seal": 1}']
)
def test_a_manifest_that_is_something_else_is_damaged(published: Path, text: bytes):
    (published / durable.MANIFEST).write_bytes(text)
    with pytest.raises(CorruptFile, match="damaged"):
        durable.read_manifest(published)


def test_a_manifest_of_a_later_format_does_not_verify(published: Path):
    body = durable.read_manifest(published) | {"format": 2}
    seal = durable.sha256_bytes(durable.canonical_json(body).encode())
    (published / durable.MANIFEST).write_text(durable.canonical_json(body | {"seal": seal}) + "\n")
    with pytest.raises(CorruptFile):
        durable.verify(published)


@pytest.mark.parametrize("name", ["weights", "empty", "sub/deep"])
def test_a_missing_file_is_named(published: Path, name: str):
    (published / name).unlink()
    with pytest.raises(CorruptFile, match=f"{name} is missing"):
        durable.verify(published)


@pytest.mark.parametrize("name", ["extra", "sub/extra", "sub/manifest.json"])
def test_an_extra_file_is_named(published: Path, name: str):
    (published / name).write_bytes(b"")
    with pytest.raises(CorruptFile, match=f"{name} was not written by hotlap"):
        durable.verify(published)


def test_a_truncated_or_longer_file_is_named_with_both_sizes(published: Path):
    for size in (0, 2047, 2049):
        os.truncate(published / "weights", size)
        with pytest.raises(CorruptFile, match=f"weights has {size} bytes, not 2048"):
            durable.verify(published)


def test_a_directory_in_the_place_of_a_file_is_found(published: Path):
    (published / "state.json").unlink()
    (published / "state.json").mkdir()
    with pytest.raises(CorruptFile, match=r"state\.json is missing"):
        durable.verify(published)


def test_what_has_no_manifest_does_not_exist(tmp_path: Path):
    (tmp_path / "plain-file").write_bytes(b"")
    (tmp_path / "folder" / durable.MANIFEST).mkdir(parents=True)
    for name in ("plain-file", "nowhere", "folder"):
        with pytest.raises(CorruptFile):
            durable.verify(tmp_path / name)


# --- publish ---


def test_of_two_publishers_one_wins(tmp_path: Path):
    stage(tmp_path, {"a": b"first"}, "one")
    stage(tmp_path, {"a": b"second"}, "two")
    durable.publish(tmp_path / "one", tmp_path / "final")
    with pytest.raises(FileExistsError):
        durable.publish(tmp_path / "two", tmp_path / "final")
    durable.verify(tmp_path / "final")
    assert (tmp_path / "final" / "a").read_bytes() == b"first"


def test_an_empty_directory_of_that_name_is_not_replaced(tmp_path: Path):
    (tmp_path / "final").mkdir()
    with pytest.raises(FileExistsError):
        durable.publish(stage(tmp_path, {"a": b"1"}), tmp_path / "final")
    assert not any((tmp_path / "final").iterdir())


def test_of_many_publishers_at_once_one_wins(tmp_path: Path):
    num_publishers = 8
    staged = [stage(tmp_path, {"a": str(number).encode()}, f"staged-{number}") for number in range(num_publishers)]
    start = threading.Barrier(num_publishers)
    won: list[Path] = []

    def race(folder: Path) -> None:
        start.wait()
        try:
            durable.publish(folder, tmp_path / "final")
        except FileExistsError:
            return
        won.append(folder)

    threads = [threading.Thread(target=race, args=(folder,)) for folder in staged]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    durable.verify(tmp_path / "final")
    assert (tmp_path / "final" / "a").read_text() == won[0].name.removeprefix("staged-")


def test_who_may_no_longer_publish_leaves_nothing_visible(tmp_path: Path):
    def refuse() -> None:
        raise RunLocked("taken over")

    with pytest.raises(RunLocked):
        durable.publish(stage(tmp_path, {"a": b"1"}), tmp_path / "final", before_rename=refuse)
    assert not (tmp_path / "final").exists()


def test_facts_that_are_no_json_are_refused_before_anything_is_visible(tmp_path: Path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        durable.publish(stage(tmp_path, {"a": b"1"}), tmp_path / "final", {"loss": float("nan")})
    assert not (tmp_path / "final").exists()


@pytest.mark.parametrize("kinds", [("create",), ("sync",), ("rename",)])
def test_publish_on_a_failing_disk_shows_all_or_nothing(
    tmp_path: Path, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    for nth in range(1, 5):
        staged = stage(tmp_path, {"a": b"1", "sub/b": b"2"}, f"staged-{nth}")
        failing = FailingDisk(errno.ENOSPC, nth=nth, kinds=kinds, leaves_half=True)
        monkeypatch.setattr(durable, "disk", failing)
        final = tmp_path / f"final-{nth}"
        try:
            durable.publish(staged, final)
        except DiskFull:
            assert failing.failed
        monkeypatch.setattr(durable, "disk", durable.Disk())
        if final.exists():
            durable.verify(final)
        else:
            assert failing.failed


def test_remove_tree_takes_the_manifest_first(published: Path, monkeypatch: pytest.MonkeyPatch):
    failing = FailingDisk(errno.EIO, nth=2, kinds=("remove",))
    monkeypatch.setattr(durable, "disk", failing)
    with pytest.raises(StorageFailed):
        durable.remove_tree(published)
    with pytest.raises(CorruptFile, match="never completed"):
        durable.verify(published)
    assert (published / "weights").exists()
    durable.remove_tree(published)
    assert not published.exists()


def test_remove_tree_does_not_follow_links(tmp_path: Path, published: Path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_bytes(b"1")
    (published / "link").symlink_to(tmp_path / "kept")
    durable.remove_tree(published)
    assert (tmp_path / "kept" / "file").exists()


# --- single files ---


def test_replace_puts_one_file_in_the_place_of_another(tmp_path: Path):
    durable.replace(tmp_path / "a", b"old")
    durable.replace(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_of_many_who_replace_a_file_at_once_one_whole_file_stays(tmp_path: Path):
    """Threads of one process, which a name from the process's number would let into each other's half-written file."""
    contents = [bytes([number]) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(len(contents)) as pool:
        for _ in range(20):
            list(pool.map(lambda data: durable.replace(tmp_path / "a", data), contents))
            assert (tmp_path / "a").read_bytes() in contents
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_write_synced_never_overwrites(tmp_path: Path):
    durable.write_synced(tmp_path / "a", b"1")
    with pytest.raises(FileExistsError):
        durable.write_synced(tmp_path / "a", b"2")
    assert (tmp_path / "a").read_bytes() == b"1"


def test_make_dirs_makes_what_is_missing(tmp_path: Path):
    durable.make_dirs(tmp_path / "a" / "b")
    durable.make_dirs(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_make_dirs_says_when_a_file_is_in_the_way(tmp_path: Path):
    (tmp_path / "runs").write_bytes(b"")
    for path in (tmp_path / "runs", tmp_path / "runs" / "a"):
        with pytest.raises(UsageError, match="runs is a file where a folder is needed"):
            durable.make_dirs(path)


def test_make_dirs_accepts_that_another_was_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Raced(durable.Disk):
        def make_dir(self, path: Path) -> None:
            path.mkdir()
            super().make_dir(path)

    monkeypatch.setattr(durable, "disk", Raced())
    durable.make_dirs(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_canonical_json_is_the_same_for_the_same_value():
    assert (
        durable.canonical_json({"b": 1, "a": "ä"}) == durable.canonical_json({"a": "ä", "b": 1}) == '{"a": "ä", "b": 1}'
    )
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            durable.canonical_json(value)


def test_sha256_of_a_file_is_that_of_its_bytes(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"abc")
    assert durable.sha256_file(tmp_path / "a") == durable.sha256_bytes(b"abc")
    assert durable.sha256_bytes(b"abc").startswith("ba7816bf8f01cfea")


# --- logs ---

ROWS = [{"step": 1, "loss": 0.1 + 0.2}, {"step": 2, "text": "ä\n\u2028"}, {"step": 3, "loss": 5e-324}]


def test_rows_come_back_as_they_were_written(tmp_path: Path):
    log = tmp_path / "log"
    assert durable.read_rows(log) == []
    assert durable.append_rows(log, ROWS[:1]) == log.stat().st_size
    before = log.stat().st_size
    assert durable.append_rows(log, ROWS[1:]) == log.stat().st_size - before
    assert durable.read_rows(log) == ROWS


VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.dictionaries(st.text(max_size=6), VALUES | st.text(max_size=6), max_size=3), max_size=3))
@example(rows=[{"": "\n"}])
@example(rows=[{"\u0085\u2029": "\r\n"}])
def test_any_row_comes_back_from_one_line(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]]):
    log = tmp_path_factory.getbasetemp() / "any-row.jsonl"
    log.unlink(missing_ok=True)
    durable.append_rows(log, rows)
    assert durable.read_rows(log) == rows
    assert log.read_bytes().count(b"\n") == len(rows)


def test_a_row_that_is_no_json_is_refused_and_nothing_is_written(tmp_path: Path):
    durable.append_rows(tmp_path / "log", ROWS)
    with pytest.raises(ValueError, match="not JSON compliant"):
        durable.append_rows(tmp_path / "log", [{"loss": 1.0}, {"loss": float("nan")}])
    assert durable.read_rows(tmp_path / "log") == ROWS


def test_a_torn_last_row_is_skipped_and_then_cut_off_wherever_it_was_torn(tmp_path: Path):
    log = tmp_path / "log"
    durable.append_rows(log, ROWS)
    whole = log.read_bytes()
    start_of_last = whole.rfind(b"\n", 0, -1) + 1
    for length in range(start_of_last, len(whole)):
        log.write_bytes(whole[:length])
        assert durable.read_rows(log) == ROWS[:2]
        assert durable.end_of_last_row(log) == start_of_last
        durable.append_rows(log, ROWS[2:])
        assert log.read_bytes() == whole


def test_zeros_at_the_end_are_a_torn_row(tmp_path: Path):
    log = tmp_path / "log"
    durable.append_rows(log, ROWS)
    with log.open("ab") as file:
        file.write(bytes(5000))
    assert durable.read_rows(log) == ROWS
    durable.append_rows(log, ROWS)
    assert durable.read_rows(log) == ROWS * 2


def test_a_torn_row_longer_than_a_reading_block_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(durable, "_CHUNK_BYTES", 16)
    log = tmp_path / "log"
    for text in (b"", b"x" * 15, b"x" * 16, b"x" * 100):
        log.write_bytes(b'{"a":1}\n' + text)
        assert durable.end_of_last_row(log) == 8
        log.write_bytes(text)
        assert durable.end_of_last_row(log) == 0


@pytest.mark.parametrize("damage", [b'{"step": 1', b"\x00" * 12, b"\xff\xfe", b"", b"{]"])
def test_damage_before_the_last_row_is_an_error_with_its_line(tmp_path: Path, damage: bytes):
    log = tmp_path / "log"
    log.write_bytes(b'{"step":0}\n' + damage + b'\n{"step":2}\n')
    with pytest.raises(CorruptFile, match="line 2"):
        durable.read_rows(log)


def test_cut_to_takes_a_log_back_and_never_forward(tmp_path: Path):
    log = tmp_path / "log"
    durable.append_rows(log, ROWS)
    size = log.stat().st_size
    durable.cut_to(log, size)
    assert durable.read_rows(log) == ROWS
    durable.cut_to(log, durable.append_rows(tmp_path / "first", ROWS[:1]))
    assert durable.read_rows(log) == ROWS[:1]
    with pytest.raises(CorruptFile, match="were published"):
        durable.cut_to(log, size)
    durable.cut_to(tmp_path / "nowhere", 0)
    with pytest.raises(CorruptFile, match="has 0 bytes"):
        durable.cut_to(tmp_path / "nowhere", 1)


# --- volumes that are full or may not be written, for real ---


PRELUDE = """
import os, resource, subprocess, sys
from pathlib import Path
from hotlap import durable
from hotlap.errors import *
volume = Path(sys.argv[1])

def expect(kind, call, *args):
    try:
        call(*args)
    except kind as error:
        assert "intact" in str(error), error
        return error
    raise AssertionError(f"{call.__name__} did not raise {kind.__name__}")
"""


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def mounting(options: str, folder: Path) -> list[str]:
    """The start of a command that finds a file system of its own in `folder`, gone when the command ends."""
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    return [*namespace, "sh", "-c", 'mount -t tmpfs -o "$0" tmpfs "$1" && shift && exec "$@"', options, str(folder)]


@pytest.fixture(scope="module")
def why_no_mount(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    try:
        done = run([*mounting("size=64k", tmp_path_factory.mktemp("probe")), "true"])
    except FileNotFoundError:
        return "there is no unshare on this system"
    return done.stderr.strip() or "mounting failed" if done.returncode else None


SmallVolume = Callable[[str], None]


@pytest.fixture
def run_in_small_volume(tmp_path: Path, why_no_mount: str | None) -> SmallVolume:
    """Runs a script on a tmpfs of 256 KiB; where none may be mounted, under a limit on the size of files."""

    def run_script(script: str) -> None:
        limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n" if why_no_mount else ""
        python = [sys.executable, "-c", PRELUDE + limit + dedent(script), str(tmp_path)]
        done = run(python if why_no_mount else [*mounting("size=256k", tmp_path), *python])
        assert done.returncode == 0, done.stderr

    return run_script


def test_a_full_volume_keeps_what_was_published_and_says_so(run_in_small_volume: SmallVolume):
    run_in_small_volume(
        """
        staged = volume / "staged"
        durable.make_dirs(staged)
        durable.write_synced(staged / "a", b"1" * 100_000)
        durable.publish(staged, volume / "first", {"step": 1})
        durable.make_dirs(staged)
        error = expect(DiskFull, durable.write_synced, staged / "a", b"2" * 300_000)
        assert error.exit_code == 7 and error.reason == "disk_full"
        assert durable.verify(volume / "first") == {"step": 1}
        durable.remove_tree(staged)
        durable.make_dirs(staged)
        durable.write_synced(staged / "a", b"2" * 50_000)
        durable.publish(staged, volume / "second")
        durable.verify(volume / "second")
        """
    )


def test_replace_on_a_full_volume_changes_nothing(run_in_small_volume: SmallVolume):
    run_in_small_volume(
        """
        durable.replace(volume / "a", b"old")
        error = expect(DiskFull, durable.replace, volume / "a", b"2" * 300_000)
        assert str(volume / "a:") in str(error), error
        assert (volume / "a").read_bytes() == b"old"
        assert [path.name for path in volume.iterdir()] == ["a"]
        """
    )


def test_a_log_on_a_full_volume_keeps_its_rows(run_in_small_volume: SmallVolume):
    run_in_small_volume(
        """
        log = volume / "log"
        durable.append_rows(log, [{"step": 1}])
        expect(DiskFull, durable.append_rows, log, [{"text": "x" * 300_000}])
        assert durable.read_rows(log) == [{"step": 1}]
        durable.append_rows(log, [{"step": 2}])
        assert durable.read_rows(log) == [{"step": 1}, {"step": 2}]
        """
    )


def test_too_little_space_is_told_beforehand_with_both_numbers(tmp_path: Path):
    needs = durable.free_bytes(tmp_path) + 10**12
    durable.require_free(tmp_path, 1)
    with pytest.raises(DiskFull, match=f"needs {needs:,} bytes and has [0-9,]+ free"):
        durable.require_free(tmp_path, needs)


READ_ONLY = """
    for call in (
        lambda: durable.write_synced(volume / "a", b""),
        lambda: durable.replace(volume / "a", b""),
        lambda: durable.append_rows(volume / "log", [{}]),
        lambda: durable.make_dirs(volume / "x" / "y"),
    ):
        error = expect(ReadOnlyVolume, call)
        assert error.exit_code == 7 and error.reason == "read_only"
        assert str(volume) in str(error), error
"""


def test_a_volume_mounted_read_only_is_told(tmp_path: Path, why_no_mount: str | None):
    if why_no_mount:
        pytest.skip(f"no read-only file system can be mounted: {why_no_mount}")
    python = [sys.executable, "-c", PRELUDE + dedent(READ_ONLY), str(tmp_path)]
    done = run([*mounting("ro,size=64k", tmp_path), *python])
    assert done.returncode == 0, done.stderr


def test_a_folder_without_permission_is_told(tmp_path: Path):
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(0o555)
    # Root may write anywhere, unless it gave that up.
    humbly = ["setpriv", "--bounding-set=-dac_override", "--no-new-privs"] if os.geteuid() == 0 else []
    try:
        refusal = run([*humbly, "true"]).stderr
    except FileNotFoundError:
        refusal = "there is no setpriv on this system"
    if refusal:
        pytest.skip(f"root cannot give up its right to write anywhere: {refusal.strip()}")
    done = run([*humbly, sys.executable, "-c", PRELUDE + dedent(READ_ONLY), str(folder)])
    assert done.returncode == 0, done.stderr


def test_a_volume_that_went_away_is_told(tmp_path: Path):
    for call in (
        lambda: durable.write_synced(tmp_path / "gone" / "a", b""),
        lambda: durable.append_rows(tmp_path / "gone" / "log", [{}]),
        lambda: durable.free_bytes(tmp_path / "gone"),
        lambda: durable.sync_file(tmp_path / "gone" / "log"),
    ):
        with pytest.raises(StorageFailed) as raised:
            call()
        assert raised.value.reason == "volume_gone"
        assert isinstance(raised.value.__cause__, FileNotFoundError)


def test_messages_say_what_and_what_to_do(published: Path):
    (published / "weights").unlink()
    with pytest.raises(HotlapError) as raised:
        durable.verify(published)
    assert str(published) in str(raised.value)
    assert "weights" in str(raised.value)

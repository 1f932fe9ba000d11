"""Bug reports B09, B10, B11 and B13: what must be true of checkpoints on a disk that is torn, full, gone or slow."""

import errno
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from crash_disk import FailingDisk, RecordingDisk
from tiny import tiny_config
from zygote import SliceProcess, Zygote

from hotlap import checkpoint, clock, durable, runs
from hotlap.checkpoint import Checkpoint, CheckpointStore
from hotlap.config import RunConfig
from hotlap.errors import AuditFailed, CorruptFile, DiskFull
from hotlap.runs import RunFolder

pytestmark = pytest.mark.torch

MakeConfig = Callable[..., RunConfig]
TOLD = "patches:as_told"
MB = 1_000_000


def store_in(folder: Path, slice_number: int = 1, keep: int = 3) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", slice_number, keep, lambda: None)


def content(step: int, num_bytes: int = 50_000) -> dict[str, bytes]:
    """What the files of a step hold, so that a mixture of two is seen."""
    return {name: (f"{name} of {step} " * num_bytes).encode()[:num_bytes] for name in ("adapter", "optimizer")}


def save(store: CheckpointStore, step: int, num_bytes: int = 50_000, best: int | None = None) -> Checkpoint:
    facts = {"best": {"checkpoint": store.name_of(best)} if best is not None else None}
    return store.publish(step, lambda: content(step, num_bytes).items(), facts, 2 * num_bytes)


def steps_in(folder: Path) -> list[int]:
    """Of the checkpoints that are there, every one of which must verify and hold what its step wrote."""
    return steps_of((folder / "checkpoints").glob("step-*"))


def steps_of(paths: Iterable[Path]) -> list[int]:
    found = [checkpoint.read(path) for path in paths]
    for each in found:
        for name in ("adapter", "optimizer"):
            data = (each.folder / name).read_bytes()
            assert data == content(each.step, len(data))[name]
    return sorted(each.step for each in found)


def staged_in(folder: Path) -> list[str]:
    return [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]


def verified_steps(config: RunConfig) -> list[int]:
    """Every checkpoint of a run must verify, and nothing half-written may lie about."""
    run = RunFolder(config.run_folder)
    assert not staged_in(run.path)
    return sorted(checkpoint.read(path).step for path in run.checkpoints.iterdir())


def failed(process: SliceProcess, code: int, reason: str) -> str:
    assert process.status == code, process.talk()
    result = process.result()
    assert (result["exit_code"], result["reason"]) == (code, reason)
    assert f"hotlap: exit {code} {reason}: " in process.talk().splitlines()[-1]
    assert "Traceback" not in process.talk()
    return result["message"]


def finish(process: SliceProcess) -> dict[str, Any]:
    assert process.status == 0, process.talk()
    return process.result()


# --- B09: the newest checkpoint is bad ---


def weights_of(newest: Path) -> Path:
    return newest / "adapter_model.safetensors"


def delete_a_file(newest: Path) -> None:
    weights_of(newest).unlink()


def halve_the_weights(newest: Path) -> None:
    os.truncate(weights_of(newest), weights_of(newest).stat().st_size // 2)


def empty_the_weights(newest: Path) -> None:
    os.truncate(weights_of(newest), 0)


def flip_one_byte(newest: Path) -> None:
    data = bytearray(weights_of(newest).read_bytes())
    data[len(data) // 2] ^= 0x10
    weights_of(newest).write_bytes(data)


def leave_only_the_staging(newest: Path) -> None:
    (newest / "manifest.json").unlink()
    newest.rename(newest.with_name(f".staging-{newest.name}"))


DAMAGES = {
    delete_a_file: "adapter_model.safetensors is missing",
    halve_the_weights: "bytes, not",
    empty_the_weights: "has 0 bytes, not",
    flip_one_byte: "has other bytes than were written",
    leave_only_the_staging: None,
}


@dataclass(frozen=True)
class ThreeGood:
    """A run with checkpoints of its steps 4, 5 and 6, and the hash of the adapter that it ends with."""

    config: RunConfig
    adapter: str


def adapter_hash(config: RunConfig) -> str:
    return durable.sha256_file(config.run_folder / "adapter" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def three_good(zygote: Zygote, tiny_model: Path, f3: Path, tmp_path_factory: pytest.TempPathFactory) -> ThreeGood:
    folder = tmp_path_factory.mktemp("b09")
    config = tiny_config(tiny_model, f3, folder / "runs", train__max_steps=8, checkpoint={"every_s": 1e-6, "keep": 3})
    told = {"TEST_PUBLISH_IN_STEP": "1", "HOTLAP_HOME": str(folder / "home")}
    process = zygote.run(config, TOLD, TEST_STOP_AT="6", **told)
    assert process.status == 75, process.talk()
    assert verified_steps(config) == [4, 5, 6]
    whole = config.model_copy(update={"output_dir": str(folder / "whole")})
    shutil.copytree(config.output_dir, whole.output_dir)
    finish(zygote.run(whole, TOLD, **told))
    return ThreeGood(config, adapter_hash(whole))


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_b09_a_bad_newest_checkpoint_is_passed_over(
    zygote: Zygote, three_good: ThreeGood, tmp_path: Path, damage: Callable[[Path], None]
):
    config = three_good.config.model_copy(update={"output_dir": str(tmp_path / "runs")})
    shutil.copytree(three_good.config.output_dir, config.output_dir)
    checkpoints = config.run_folder / "checkpoints"
    newest = max(checkpoints.iterdir())
    damage(newest)
    newest_by_name = max(checkpoints.iterdir(), key=lambda path: path.name.removeprefix(".staging-"))
    with pytest.raises(CorruptFile):
        durable.verify(newest_by_name)
    process = zygote.run(config)
    assert finish(process)["resumed_at"] == 5
    why = DAMAGES[damage]
    assert (f"Checkpoint {newest.name} is passed over" in process.talk()) == (why is not None)
    assert (why or "") in process.talk()
    assert not newest.exists()
    assert 8 in verified_steps(config)
    assert adapter_hash(config) == three_good.adapter


def save_until_killed(folder: Path, acknowledge: int) -> None:
    """What a slice does to its disk: resume, tidy up, publish step after step. Tells each that is published."""
    store = store_in(folder, slice_number=len(list(folder.iterdir())) + 1)
    (folder / f"slice-{os.getpid()}").mkdir()
    newest = store.newest(lambda text: None)
    store.clean()
    step = newest.step if newest else 0
    while True:
        step += 1
        save(store, step)
        os.write(acknowledge, f"{step}\n".encode())


def kill_while_saving(folder: Path, chance: random.Random) -> int:
    """Kills it somewhere in the save or two after its first. Returns the last step that was told to be published."""
    reader, writer = os.pipe()
    began_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            save_until_killed(folder, writer)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as told:
        first = int(told.readline())
        time.sleep(chance.uniform(0.0, 1.5) * (time.monotonic() - began_s))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "it failed before it was killed"
        return max(map(int, told.read().split()), default=first)


def test_b09_twenty_kills_while_saving_lose_no_published_step(tmp_path: Path):
    chance = random.Random(9)
    num_torn = published = 0
    for _ in range(20):
        told = kill_while_saving(tmp_path, chance)
        passed_over: list[str] = []
        newest = store_in(tmp_path).newest(passed_over.append)
        assert not passed_over, "what is visible is whole"
        with_manifest = [path.parent for path in tmp_path.glob("checkpoints/step-*/manifest.json")]
        assert newest and newest.step == max(steps_of(with_manifest))
        assert newest.step in (told, told + 1)
        num_torn += len(staged_in(tmp_path))
        published = newest.step
    assert published >= 20
    assert num_torn >= 3, "too few kills hit a save to mean anything"
    store = store_in(tmp_path, slice_number=99)
    store.newest(pytest.fail)
    store.clean()
    save(store, published + 1)
    assert not staged_in(tmp_path)
    assert len(steps_in(tmp_path)) == 3, "and what a kill left half removed is gone"


# --- B10: the disk is full, read-only or gone ---


@dataclass(frozen=True)
class Volume:
    """A file system of its own."""

    folder: Path

    def fill(self) -> Path:
        filler = self.folder / "filler"
        with filler.open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(4096))
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    return filler

    def remount_read_only(self) -> None:
        until = time.monotonic() + 10
        while subprocess.run(["mount", "-o", "remount,ro", self.folder], capture_output=True).returncode:
            assert time.monotonic() < until, "somebody keeps a file open for writing"
            time.sleep(0.005)

    def vanish(self) -> None:
        subprocess.run(["umount", "--lazy", self.folder], check=True)


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    """3 MB of memory as a disk."""
    volume = Volume(tmp_path / "volume")
    volume.folder.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", volume.folder], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small file system cannot be mounted here: {error}")
    yield volume
    if os.path.ismount(volume.folder):
        volume.vanish()


def test_b10_a_fourth_checkpoint_on_a_full_disk_takes_the_place_of_old_ones(volume: Volume):
    store = store_in(volume.folder)
    for step in (1, 2, 3):
        save(store, step, 470_000)
    assert steps_in(volume.folder) == [1, 2, 3]
    naive = volume.folder / "step-4"
    with pytest.raises(OSError, match="No space left"):
        naive.write_bytes(bytes(MB))
    assert 0 < naive.stat().st_size < MB, "writing first and looking later leaves a torn file"
    naive.unlink()
    save(store, 4, 470_000)
    assert steps_in(volume.folder) == [3, 4]


def test_b10_a_checkpoint_that_never_fits_says_so_and_costs_no_newest(volume: Volume):
    store = store_in(volume.folder)
    save(store, 1, 470_000)
    save(store, 2, 470_000)
    with pytest.raises(DiskFull) as raised:
        save(store, 3, 2 * MB)
    assert "needs 4,000,000 bytes" in str(raised.value)
    assert f"{durable.free_bytes(volume.folder):,} are free" in str(raised.value)
    assert steps_in(volume.folder) == [2] and not staged_in(volume.folder)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_b10_space_that_runs_out_half_way_through_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int):
    """A quota, which `statvfs` does not tell."""
    store = store_in(tmp_path)
    save(store, 1)
    save(store, 2)
    failing = FailingDisk(nth=nth, kinds=("create",), leaves_half=True, is_lasting=True)
    monkeypatch.setattr(durable, "disk", failing)
    with pytest.raises(DiskFull, match=r"needs 100,000 bytes and [\d,]+ are free \(a quota may allow less\)"):
        save(store, 3)
    assert len(failing.failed) == 2, "tried again after old checkpoints were given up"
    monkeypatch.setattr(durable, "disk", durable.Disk())
    assert steps_in(tmp_path) == [2] and not staged_in(tmp_path)
    assert store_in(tmp_path, slice_number=2).newest(pytest.fail) is not None


def test_b10_space_that_suffices_once_old_checkpoints_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = store_in(tmp_path)
    save(store, 1)
    save(store, 2)
    monkeypatch.setattr(durable, "disk", FailingDisk(nth=2, kinds=("create",), leaves_half=True))
    save(store, 3)
    assert steps_in(tmp_path) == [2, 3]


NUM_STEPS = 36
"""Enough for the metrics to need another page of the volume."""


def on_volume(make_config: MakeConfig, volume: Volume, every_s: float = 0.01) -> RunConfig:
    return make_config(output_dir=volume.folder / "runs", train__max_steps=NUM_STEPS, checkpoint__every_s=every_s)


def started(zygote: Zygote, config: RunConfig, go: Path, **told: str) -> SliceProcess:
    """A slice that has published step 0 and made step 3, and makes the next when `go` is there."""
    process = zygote.start(config, TOLD, {"TEST_WAIT_BEFORE": f"4 {go}", **told})
    process.wait_for("published")
    process.wait_for("step", step=3)
    return process


def test_b10_a_slice_on_a_full_disk_ends_with_words_and_goes_on_later(
    zygote: Zygote, make_config: MakeConfig, volume: Volume, tmp_path: Path
):
    """The metrics meet the full disk first; they must not be what ends it, nor may they be lost."""
    config = on_volume(make_config, volume, every_s=1e3)
    process = started(zygote, config, tmp_path / "go", TEST_RETRY_FOR_S="0.3")
    filler = volume.fill()
    (tmp_path / "go").touch()
    process.wait()
    message = failed(process, 7, "disk_full")
    assert "it needs " in message and "are free" in message and "Free some space" in message
    assert "its metrics wait in memory" in process.talk()
    assert process.result()["step"] == NUM_STEPS, "training goes on while there is time"
    assert verified_steps(config) == [0]
    filler.unlink()
    assert finish(zygote.run(config))["resumed_at"] == 0
    rows = durable.read_rows(RunFolder(config.run_folder).metrics)
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))


def test_b10_a_slice_waits_for_space_and_loses_nothing(
    zygote: Zygote, make_config: MakeConfig, volume: Volume, tmp_path: Path
):
    config = on_volume(make_config, volume, every_s=1e3)
    process = started(zygote, config, tmp_path / "go", TEST_RETRY_FOR_S="100")
    filler = volume.fill()
    (tmp_path / "go").touch()
    process.wait_for("step", step=NUM_STEPS)
    process.wait_for_talk("its metrics wait in memory")
    time.sleep(0.3)
    assert not process.is_over()
    filler.unlink()
    process.wait()
    assert finish(process)["resumed_at"] == 0
    rows = durable.read_rows(RunFolder(config.run_folder).metrics)
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert NUM_STEPS in verified_steps(config)


def test_b10_a_file_size_limit_reads_like_a_full_disk(zygote: Zygote, make_config: MakeConfig):
    config = make_config(lora={"rank": 8}, train__max_steps=3)
    process = zygote.run(config, TOLD, TEST_FILE_BYTES="50000", TEST_RETRY_FOR_S="0")
    assert "it needs " in failed(process, 7, "disk_full")
    assert verified_steps(config) == [0]
    assert runs.slice_state(RunFolder(config.run_folder), 1).ending == "disk_full"
    assert finish(zygote.run(config))["step"] == 3


def test_b10_a_volume_that_turns_read_only(zygote: Zygote, make_config: MakeConfig, volume: Volume, tmp_path: Path):
    config = on_volume(make_config, volume)
    process = started(zygote, config, tmp_path / "go", TEST_PUBLISH_IN_STEP="1")
    volume.remount_read_only()
    (tmp_path / "go").touch()
    process.wait()
    assert "remount it for writing" in failed(process, 7, "read_only")
    assert 0 < process.result()["step"] < NUM_STEPS
    subprocess.run(["mount", "-o", "remount,rw", volume.folder], check=True)
    newest = runs.newest_checkpoint(RunFolder(config.run_folder), pytest.fail)
    assert newest is not None
    assert finish(zygote.run(config))["resumed_at"] == newest.step


def test_b10_a_volume_that_vanishes(zygote: Zygote, make_config: MakeConfig, volume: Volume, tmp_path: Path):
    """Its mount point is an ordinary folder from then on, on a disk with plenty of space: nothing may land there."""
    config = on_volume(make_config, volume)
    process = started(zygote, config, tmp_path / "go")
    volume.vanish()
    (tmp_path / "go").touch()
    process.wait()
    assert "run the same command again" in failed(process, 7, "volume_gone")
    assert list(volume.folder.iterdir()) == []


def test_b10_a_run_folder_that_is_removed(zygote: Zygote, make_config: MakeConfig, tmp_path: Path):
    config = make_config(train__max_steps=NUM_STEPS, checkpoint__every_s=0.01)
    process = started(zygote, config, tmp_path / "go")
    config.run_folder.rename(tmp_path / "elsewhere")
    (tmp_path / "go").touch()
    process.wait()
    assert "run the same command again" in failed(process, 7, "volume_gone")
    assert not config.run_folder.exists()
    (tmp_path / "elsewhere").rename(config.run_folder)
    assert finish(zygote.run(config))["step"] == NUM_STEPS


# --- B11: which checkpoints are kept ---

STEPS = (9800, 9900, 10000, 10100)


def same_times(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))


def reversed_times(folder: Path) -> None:
    for age, path in enumerate(sorted(folder.iterdir())):
        os.utime(path, (1e9 - age, 1e9 - age))


def times_as_they_are(folder: Path) -> None:
    pass


@pytest.mark.parametrize("slices", ["one slice", "a slice each"])
@pytest.mark.parametrize("set_times", [same_times, reversed_times, times_as_they_are], ids=lambda f: f.__name__)
def test_b11_the_newest_by_step_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_times: Callable[[Path], None], slices: str
):
    """And the clock is set back by an hour before the last one is saved."""
    folder = tmp_path / "checkpoints"
    store = store_in(tmp_path)
    for number, step in enumerate(STEPS, start=1):
        if slices == "a slice each":
            store = store_in(tmp_path, slice_number=number)
            store.newest(pytest.fail)
        if step == STEPS[-1]:
            set_times(folder)
            by_time = [path.name for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)]
            by_step = [path.name for path in sorted(folder.iterdir())]
            assert (by_time[0] != by_step[0]) == (set_times is reversed_times), "the naive choice deletes the newest"
            monkeypatch.setattr(clock, "wall_s", lambda: time.time() - 3600.0)
        save(store, step)
    assert max(f"checkpoint-{step}" for step in STEPS) == "checkpoint-9900", "so does the order of strings"
    assert steps_in(tmp_path) == [9900, 10000, 10100]


def test_b11_the_best_so_far_is_never_deleted(tmp_path: Path):
    store = store_in(tmp_path, keep=1)
    for step in STEPS:
        save(store, step, best=9800)
    assert steps_in(tmp_path) == [9800, 10100]


def test_b11_not_even_when_the_disk_is_full_and_a_better_one_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = store_in(tmp_path)
    for step in STEPS[:3]:
        save(store, step, best=9800)
    monkeypatch.setattr(durable, "disk", FailingDisk(nth=2, kinds=("create",), is_lasting=True))
    with pytest.raises(DiskFull):
        save(store, STEPS[3], best=STEPS[3])
    monkeypatch.setattr(durable, "disk", durable.Disk())
    assert steps_in(tmp_path) == [9800, 10000]


def test_b11_nothing_is_deleted_until_the_new_one_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = store_in(tmp_path)
    for step in STEPS[:3]:
        save(store, step)
    with pytest.raises(AuditFailed):
        store.publish(STEPS[3], lambda: content(STEPS[3]).items(), {}, 0, inspect=refuse)
    assert steps_in(tmp_path) == list(STEPS[:3])
    recorder = RecordingDisk()
    monkeypatch.setattr(durable, "disk", recorder)
    save(store, STEPS[3])
    kinds = [call.op for call in recorder.log]
    assert "remove" not in kinds[: kinds.index("rename") + 2], "the rename, and the sync that makes it last"


def refuse(staged: Path) -> None:
    raise AuditFailed(f"{staged} is not what was asked for")


def test_b11_a_best_that_could_not_be_saved_leaves_the_one_before(zygote: Zygote, make_config: MakeConfig):
    """Step 4 is better than step 2, and its checkpoint meets a full disk; by step 5 that has passed."""
    config = make_config(
        train__max_steps=5, data__eval_examples=4, eval__every_steps=2, checkpoint={"every_s": 1e3, "keep": 1}
    )
    told = {"TEST_VAL_LOSSES": "3.0 2.0 4.0", "TEST_DISK_IS_FULL_FOR": "4", "TEST_PUBLISH_IN_STEP": "1"}
    process = zygote.run(config, TOLD, **told)
    result = finish(process)
    assert "Step 4 was the best so far and could not be saved" in process.talk()
    assert (result["best"]["step"], result["best"]["val_loss"]) == (2, 3.0)
    assert durable.verify(config.run_folder / "best")["step"] == 2
    assert verified_steps(config) == [2, 5]


# --- B13: adapters that hold nothing ---


def test_b13_saving_nothing_is_no_error_to_the_library(tmp_path: Path):
    from hotlap.train import model

    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(model.save_tensors({}))
    assert path.stat().st_size < 443 and model.load_tensors(path) == {}, "the naive save succeeds"


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("empty", "holds 0 tensors where the adapter has 28"),
        ("half", "holds 14 tensors where the adapter has 28"),
        ("zero", "every LoRA B is zero after 5 updates"),
    ],
)
def test_b13_an_adapter_that_is_not_whole_is_an_error(zygote: Zygote, make_config: MakeConfig, how: str, why: str):
    config = make_config(train__max_steps=5)
    process = zygote.run(config, TOLD, TEST_ADAPTER=how)
    assert why in failed(process, 4, "audit")
    assert verified_steps(config) == [0]
    assert not (config.run_folder / "adapter").exists()
    assert finish(zygote.run(config))["resumed_at"] == 0
    assert 5 in verified_steps(config)


def test_b13_what_is_published_holds_every_tensor(zygote: Zygote, make_config: MakeConfig):
    """Seven linear modules in each of two layers, A and B of each, all finite, and some B moved."""
    import torch

    from hotlap.train import model

    config = make_config(train__max_steps=5)
    finish(zygote.run(config))
    tensors = model.load_tensors(config.run_folder / "adapter" / model.ADAPTER_FILE)
    assert len(tensors) == 2 * 7 * 2
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
    assert any(bool(tensor.any()) for name, tensor in tensors.items() if "lora_B" in name)

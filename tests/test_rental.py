"""Rules of a launch: which image, what a name means, who sees to a run; a replaced book; a suspended guardian."""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from money import make_lease

from hotlap import clock
from hotlap.cli import launch_offers
from hotlap.cloud import launches, rental
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.local import LocalProvider
from hotlap.cloud.machine_files import MachineFolder
from hotlap.cloud.modal import TRAITS as MODAL
from hotlap.cloud.provider import ANYWHERE, Offer, Start, Tags
from hotlap.cloud.runpod import TRAITS as RUNPOD
from hotlap.cloud.runpod import Runpod
from hotlap.cloud.runpod_shapes import create_body
from hotlap.cloud.ssh import TRAITS as SSH
from hotlap.config import CloudConfig, RunConfig
from hotlap.config_cloud import DEFAULT_IMAGE, DEFAULT_IMAGE_CUDA, ModalConfig
from hotlap.config_model import LoraConfig
from hotlap.errors import ConfigError, RunChanged, UsageError, VolumeGone
from hotlap.testing.bodies import complaints
from hotlap.testing.fake_runpod import FakeRunpod

pytestmark = pytest.mark.long

PINNED = f"someone/pytorch@sha256:{1:064}"


def test_an_image_is_named_by_its_digest() -> None:
    settings = CloudConfig(modal=ModalConfig(image=PINNED))
    assert rental.image_of(RUNPOD, PINNED, settings) == PINNED
    assert rental.image_of(MODAL, None, settings) == PINNED
    assert rental.image_of(SSH, None, settings) is None
    for loose in ("someone/pytorch", "someone/pytorch:2.8", "someone/pytorch@sha256:12", f"{PINNED} "):
        with pytest.raises(ConfigError, match="imagetools inspect someone/pytorch"):
            rental.image_of(RUNPOD, loose, settings)
    # Who names none has one that is pinned as well, and a machine whose driver is new enough for it.
    assert rental.image_of(RUNPOD, None, settings) == DEFAULT_IMAGE
    start = Start(("true",), image=DEFAULT_IMAGE)
    body = create_body(Offer("runpod", "NVIDIA L40S", None, 860_000), Tags("0d" * 8, "me", "n", 1), start)
    assert body["gpu"]["minCudaVersion"] == DEFAULT_IMAGE_CUDA and complaints(body, "2026-10") == []


class NewerLora(LoraConfig):
    is_new: bool = False
    new_ratio: float | None = None


class OtherLora(LoraConfig):
    rank: int = 8


class Newer(RunConfig):
    lora: NewerLora = NewerLora()  # pyright: ignore[reportIncompatibleVariableOverride]


class Other(RunConfig):
    lora: OtherLora = OtherLora()  # pyright: ignore[reportIncompatibleVariableOverride]


def test_a_newer_hotlap_knows_a_run_by_its_settings_unless_a_default_of_them_changed() -> None:
    words: dict[str, Any] = {"base_model": "m", "dataset": "d.jsonl", "run": "mine"}
    ours, newer, other = RunConfig(**words), Newer(**words), Other(**words)
    spelled_out = RunConfig(**words, lora=LoraConfig(rank=16))
    assert spelled_out.settings_digest == ours.settings_digest == newer.settings_digest
    assert newer.trajectory_digest != ours.trajectory_digest
    assert other.settings_digest != ours.settings_digest


def test_a_name_with_other_settings_is_not_done_and_rents_nothing() -> None:
    config = RunConfig(base_model="m", dataset="d.jsonl", run="mine")
    other = config.model_copy(update={"lora": config.lora.model_copy(update={"rank": 99})})
    moved = config.model_copy(update={"dataset": "/workspace/d.jsonl"})
    with FakeRunpod() as cloud:
        provider = Runpod("full-key", cloud.url)
        done = make_lease(outcome="done", settings=config.settings_digest)
        assert rental.is_done(config, provider, done) and rental.is_done(moved, provider, done)
        with pytest.raises(RunChanged, match="other settings"):
            rental.is_done(other, provider, done)
        # A lease that a wrong setting ended says nothing about those that correct it, an old one nothing about any.
        failed = make_lease(outcome="config", settings=config.settings_digest)
        assert not rental.is_done(other, provider, failed)
        assert rental.is_done(other, provider, make_lease(outcome="done"))
        provider.close()


def test_one_process_sees_to_a_run(home: Path) -> None:
    """The lock ends with its holder, however that ends."""
    program = "from hotlap.cloud import launches; launches.record('mine'); print('ready', flush=True); input()"
    argv = [sys.executable, "-c", program]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout and other.stdout.readline() == "ready\n"
        # Even while its word is not to be read, as between two writers.
        launches.launch_file("mine").write_text("{")
        with pytest.raises(UsageError, match="sees to mine already"):
            launches.record("mine")
        other.kill()
    launches.record("mine")
    launches.record("mine")
    assert launches.supervisor("mine") == os.getpid()


def test_a_replaced_book_is_said_and_an_older_one_goes_on(tmp_path: Path, home: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(CloudConfig(), f"sqlite:///{path}")
    ledger.hold(make_lease())
    ledger.close()
    with sqlite3.connect(path) as book:
        book.execute("ALTER TABLE leases DROP COLUMN settings")
    book.close()
    ledger = Ledger(CloudConfig(), f"sqlite:///{path}")
    (lease,) = ledger.open_leases()
    assert lease.settings is None
    ledger.close()
    path.unlink()
    ledger = Ledger(CloudConfig(), f"sqlite:///{path}")
    with pytest.raises(VolumeGone, match="replaced while a machine was rented"):
        ledger.settle(lease.lease_id, lease.began_s + 1.0)
    ledger.close()


def test_a_suspended_guardian_and_machine_are_ended(home: Path) -> None:
    provider = LocalProvider(grace_s=0.2)
    tags = Tags("0e" * 8, "me", "n", int(clock.wall_s()) + 60)
    machine = provider.create(provider.offers()[0], tags, Start(("sleep", "60")))
    pid = MachineFolder(home / "machines" / machine.machine_id).guardian_pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert provider.terminate(machine.machine_id)
    assert provider.machines().machines == () and not Path(f"/proc/{pid}").exists()


def test_offers_that_fit_come_first_by_the_price_of_a_slice() -> None:
    config = RunConfig(base_model="m", dataset="d.jsonl")
    with FakeRunpod() as cloud:
        provider = Runpod("full-key", cloud.url)
        rows = launch_offers.ranked(config, provider, ANYWHERE, int(40e9))
        unknown = launch_offers.ranked(config, provider, ANYWHERE, None)
        provider.close()
    fitting = [row for row in rows if row["fits"]]
    assert rows[: len(fitting)] == fitting and 0 < len(fitting) < len(rows)
    assert (
        min(row["memory_gb"] for row in fitting) == 48 and max(row["memory_gb"] for row in rows[len(fitting) :]) == 24
    )
    prices = [row["usd_per_slice"] for row in fitting]
    assert prices == sorted(prices)
    # 490 s, of which each minute counts that is begun, at 105 % of the price.
    assert fitting[0]["usd_per_slice"] == pytest.approx(fitting[0]["usd_per_hour"] * 1.05 * 540 / 3600, rel=1e-4)
    assert {row["fits"] for row in unknown} == {None}

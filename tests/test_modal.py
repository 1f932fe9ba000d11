"""Modal's own SDK against a fake of its server: what is asked for, what an answer means, and ends without anybody."""

import json
import os
import random
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hotlap import clock, durable
from hotlap.cli import cli
from hotlap.cloud import preparing
from hotlap.cloud.launcher import Job, Launcher, LeaseEnd, Stops, World, plan_of
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.modal import CPUS, MEMORY_MIB, ModalProvider, sdk
from hotlap.cloud.modal_volume import ModalVolume
from hotlap.cloud.proof import Patience
from hotlap.cloud.provider import Offer, Start, Tags, Where
from hotlap.cloud.reaper import Reaper
from hotlap.cloud.rental import boot_env
from hotlap.cloud.runpod_shapes import boot_argv
from hotlap.config import CloudConfig
from hotlap.config_cloud import CLOUD_TOML, ModalConfig
from hotlap.errors import (
    AmbiguousCreate,
    ConfigError,
    CorruptFile,
    MissingArtifact,
    NoCapacity,
    NoPermission,
    NotCreated,
    ProviderFailed,
)
from hotlap.testing import fake_modal
from hotlap.testing.fake_modal import FakeModal

pytestmark = pytest.mark.long

OFFER = Offer("modal", "L40S", None, 3_300_000)
SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


def tags_of(ttl_s: float = 60.0) -> Tags:
    return Tags("0d" * 8, "me", "nonce", int(clock.wall_s() + ttl_s))


@pytest.fixture
def provider(modal_cloud: FakeModal) -> Iterator[ModalProvider]:
    provider = ModalProvider(ModalConfig())
    yield provider
    provider.close()


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(CloudConfig(), f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    yield ledger
    ledger.close()


def launch(provider: ModalProvider, ledger: Ledger, job: Job, words: list[str]) -> LeaseEnd:
    return Launcher(provider, ledger, CloudConfig(), "me", Stops(), World(say=words.append)).launch(job, [OFFER])


def job_of(provider: ModalProvider, *argv: str, **changes: object) -> Job:
    plan = plan_of(Job("run", 20.0, Start(argv)), provider.traits)
    env = boot_env(plan, provider.traits)
    start = Start(boot_argv(argv), env, image="image", volume_id="vol", volume_path=preparing.VOLUME, **changes)
    return Job("run", 20.0, start)


def test_a_job_runs_in_a_sandbox_that_is_bounded_and_its_end_is_proven(
    modal_cloud: FakeModal, provider: ModalProvider, ledger: Ledger
) -> None:
    modal_cloud.volumes.add("vol")
    words: list[str] = []
    job = job_of(provider, "sh", "-c", "echo it ran; echo x > /workspace/kept", has_network=False)
    end = launch(provider, ledger, job, words)
    assert end.end and end.end.result and end.end.result["exit_code"] == 0, (end, words)
    assert any("it ran" in word for word in words)
    (sandbox,) = modal_cloud.sandboxes.values()
    asked = sandbox.definition
    assert sandbox.result is not None and modal_cloud.alive() == []
    assert end.lease.not_after_s - sandbox.created_at_s - 2 < asked.timeout_secs <= end.lease.not_after_s
    assert asked.name == f"hotlap-{end.lease.lease_id}" and sandbox.tags["HOTLAP_NONCE"] == end.lease.nonce
    assert asked.network_access.network_access_type == asked.network_access.BLOCKED
    assert [mount.mount_path for mount in asked.volume_mounts] == ["/workspace"]
    resources = asked.resources
    assert (resources.milli_cpu, resources.memory_mb) == (resources.milli_cpu_max, resources.memory_mb_max)
    assert resources.gpu_config.gpu_type == "L40S" and not asked.idle_timeout_secs
    assert end.lease.state == "settled" and 0 < end.lease.usd_micros < 100_000


def test_a_lost_answer_leaves_one_sandbox_and_it_is_adopted(
    modal_cloud: FakeModal, provider: ModalProvider, ledger: Ledger
) -> None:
    modal_cloud.volumes.add("vol")
    modal_cloud.faults["SandboxCreate"] = ["lost"]
    words: list[str] = []
    end = launch(provider, ledger, job_of(provider, "echo", "it ran"), words)
    assert end.end and end.end.kind == "result", (end, words)
    assert modal_cloud.requests.count("SandboxCreate") == 2 and len(modal_cloud.sandboxes) == 1
    assert any("instead of asking again" in word for word in words)


def test_what_is_not_scheduled_in_our_time_is_ended_and_a_definite_no(
    modal_cloud: FakeModal, provider: ModalProvider
) -> None:
    modal_cloud.faults["SandboxCreate"] = ["no_capacity"]
    provider = ModalProvider(ModalConfig(), create_s=1.0)
    with pytest.raises(NoCapacity, match="not scheduled within 1 s"):
        provider.create(OFFER, tags_of(), Start(SLEEP, image="image"))
    (sandbox,) = modal_cloud.sandboxes.values()
    assert sandbox.result is not None and provider.machines().machines == ()
    provider.close()


@pytest.mark.parametrize(
    ("request_name", "status", "kind"),
    [
        ("SandboxCreate", "UNAUTHENTICATED", NoPermission),
        ("SandboxCreate", "INVALID_ARGUMENT", NotCreated),
        ("SandboxCreate", "RESOURCE_EXHAUSTED", NoCapacity),
        ("SandboxCreate", "ALREADY_EXISTS", AmbiguousCreate),
        ("SandboxCreate", "DATA_LOSS", AmbiguousCreate),
        ("ImageGetOrCreate", "DATA_LOSS", NotCreated),
        ("VolumeGetOrCreate", "", NotCreated),
    ],
)
def test_a_refusal_is_told_from_a_doubt(
    modal_cloud: FakeModal, provider: ModalProvider, request_name: str, status: str, kind: type[ProviderFailed]
) -> None:
    if status:
        modal_cloud.volumes.add("vol")
        modal_cloud.faults[request_name] = [status] * 20
    with pytest.raises(ProviderFailed) as raised:
        provider.create(OFFER, tags_of(), Start(SLEEP, image="image", volume_id="vol"))
    assert type(raised.value) is kind, raised.value


@pytest.mark.parametrize("status", ["UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND", "INVALID_ARGUMENT"])
def test_what_befalls_the_wait_behind_a_create_is_no_word_about_the_create(
    modal_cloud: FakeModal, provider: ModalProvider, status: str
) -> None:
    modal_cloud.faults["SandboxCreate"] = ["no_capacity"]
    for request_name in ("SandboxGetTaskId", "SandboxTerminate"):
        modal_cloud.faults[request_name] = [status] * 20
    with pytest.raises(AmbiguousCreate):
        provider.create(OFFER, tags_of(), Start(SLEEP, image="image"))
    assert len(modal_cloud.alive()) == 1


def test_the_server_ends_it_at_its_time_and_boot_before_that(modal_cloud: FakeModal, provider: ModalProvider) -> None:
    provider.create(OFFER, tags_of(6.0), Start(SLEEP, image="image"))
    wait_until(lambda: modal_cloud.alive() == [])
    (sandbox,) = modal_cloud.sandboxes.values()
    assert sandbox.result.status == sandbox.result.GENERIC_STATUS_TIMEOUT
    # With boot in it, a machine that nobody watches ends after its job, long before its time.
    start = Start(boot_argv(("true",)), {"HOTLAP_CAP_S": "30", "HOTLAP_LEAVES": "1", "HOTLAP_LINGER_S": "0.2"})
    provider.create(OFFER, tags_of(60.0), Start(start.argv, start.env, image="image"))
    wait_until(lambda: modal_cloud.alive() == [])
    *_, sandbox = modal_cloud.sandboxes.values()
    assert sandbox.result.status == sandbox.result.GENERIC_STATUS_SUCCESS
    assert clock.wall_s() - sandbox.created_at_s < 50.0


def test_a_clock_that_is_set_back_makes_no_sandbox_live_longer(
    modal_cloud: FakeModal, provider: ModalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = provider.machines().now_s
    monkeypatch.setattr(clock, "wall_s", lambda: time.time() - 3600.0)
    provider.create(OFFER, Tags("0d" * 8, "me", "nonce", int(now_s) + 60), Start(SLEEP, image="image"))
    (sandbox,) = modal_cloud.sandboxes.values()
    assert sandbox.definition.timeout_secs <= 60


def test_the_reaper_finds_every_page_and_ends_what_is_past_its_time(
    modal_cloud: FakeModal, provider: ModalProvider
) -> None:
    for number in range(5):
        tags = Tags(f"{number:016x}", "me", "n", int(clock.wall_s()) + 60)
        provider.create(OFFER, tags, Start(SLEEP, image="image"))
    assert len(provider.machines().machines) == 5
    for sandbox in list(modal_cloud.sandboxes.values())[:3]:
        born_s = int(sandbox.created_at_s) - 20
        sandbox.tags |= {"HOTLAP_CREATED": str(born_s), "HOTLAP_NOT_AFTER": str(born_s + 10)}
    report = Reaper(provider, None, CloudConfig(), "me").reap(Patience(60.0, clock.monotonic_s, clock.sleep_s))
    assert report.is_clean and len(report.doomed) == 3
    assert len(modal_cloud.alive()) == 2


def test_a_volume_s_files_come_and_go_once_and_are_checked(
    modal_cloud: FakeModal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/train.jsonl").write_bytes(b"x" * 100_000)
    Path("data/empty").write_bytes(b"")

    def volume(*words: str) -> Result:
        return CliRunner().invoke(cli, ["volume", words[0], "--volume-id", "modal:vol", *words[1:]])

    assert volume("put", "data", "data").stderr.count("put: ") == 2
    assert volume("put", "data/train.jsonl", "data/train.jsonl").stderr.startswith("there already")
    assert json.loads(volume("ls", "data", "--json").stdout) == [
        {"key": "data/empty", "bytes": 0},
        {"key": "data/train.jsonl", "bytes": 100_000},
    ]
    assert volume("get", "data/train.jsonl", "back").exit_code == 0
    assert Path("back").read_bytes() == b"x" * 100_000
    assert volume("get", "data/train.jsonl", "back").stderr.startswith("here already")
    modal_cloud.files["data/train.jsonl"] = b"y" * 100_000
    damaged = volume("get", "data/train.jsonl", "other")
    assert isinstance(damaged.exception, CorruptFile) and not Path("other").exists()
    assert isinstance(volume("get", "data/none", "none").exception, MissingArtifact)
    # What a machine wrote since has no hash any more, and what it removed is put there again.
    os.utime(tmp_path / "modal" / "volume" / "data/train.jsonl", (2_000_000_000, 2_000_000_000))
    assert volume("get", "data/train.jsonl", "other").exit_code == 0 and Path("other").read_bytes() == b"y" * 100_000
    del modal_cloud.files["data/empty"]
    assert volume("put", "data/empty", "data/empty").stderr.startswith("put: ")


def test_a_download_that_was_cut_goes_on_with_the_block_it_was_in(
    modal_cloud: FakeModal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdk().volume, "BLOCK_SIZE", 64 << 10)
    monkeypatch.setattr(fake_modal, "BLOCK_BYTES", 64 << 10)
    data = random.Random(0).randbytes(300_000)
    modal_cloud.volumes.add("vol")
    modal_cloud.files["runs/mine/adapter.bin"] = data  # a machine wrote it, so there is no hash of it
    append, num_left = durable.disk.append, [2]

    def dying(path: Path, chunk: bytes) -> None:
        if num_left[0] == 0:
            append(path, chunk[:1000])
            raise KeyboardInterrupt
        num_left[0] -= 1
        append(path, chunk)

    monkeypatch.setattr(durable.disk, "append", dying)
    with pytest.raises(KeyboardInterrupt):
        ModalVolume("vol").get("runs/mine/adapter.bin", tmp_path / "back")
    monkeypatch.setattr(durable.disk, "append", append)
    (part,) = tmp_path.glob(".back.*.part")
    assert part.stat().st_size == 2 * (64 << 10) + 1000 and not (tmp_path / "back").exists()
    modal_cloud.blocks_sent.clear()
    assert ModalVolume("vol").get("runs/mine/adapter.bin", tmp_path / "back") is True
    assert sorted(modal_cloud.blocks_sent) == [2 * (64 << 10), 3 * (64 << 10), 4 * (64 << 10)]
    assert (tmp_path / "back").read_bytes() == data and list(tmp_path.glob(".back*")) == []
    # A file that is another by now is not put behind the part of the one before.
    part.write_bytes(b"of the other")
    modal_cloud.files["runs/mine/adapter.bin"] = data[:200_000]
    assert ModalVolume("vol").get("runs/mine/adapter.bin", tmp_path / "back") is True
    assert (tmp_path / "back").read_bytes() == data[:200_000]


def wait_until(is_so: Callable[[], bool], patience_s: float = 60.0) -> None:
    until_s = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < until_s, "it did not come to be"
        time.sleep(0.02)


def test_a_price_that_is_not_known_is_refused(provider: ModalProvider, modal_cloud: FakeModal) -> None:
    with pytest.raises(ConfigError, match="region_factor"):
        provider.offers("L40S", Where(regions=("us-east",)))
    dearer = ModalProvider(ModalConfig(region_factor=1.75))
    (offer,) = dearer.offers("L40S", Where(regions=("us-east",)))
    assert offer.usd_micros_per_hour == 5_775_000 and offer.region == "us-east"
    dearer.close()


def test_the_prices_are_those_of_a_sandbox_with_all_that_is_asked_for() -> None:
    """By the second: a GPU as listed, cores and memory at the rates of sandboxes, three times those of functions."""
    gpus = {"T4": 0.000164, "L4": 0.000222, "A10": 0.000306, "L40S": 0.000542, "A100-40GB": 0.000583}
    gpus |= {"A100-80GB": 0.000694, "H100": 0.001097, "H200": 0.001261, "B200": 0.001736}
    beside = CPUS * 0.00003942 + MEMORY_MIB / 1024 * 0.00000672
    prices = ModalConfig().usd_per_hour
    assert prices.keys() == gpus.keys()
    assert all(0 <= prices[name] - 3600 * (usd + beside) < 0.011 for name, usd in gpus.items())
    assert CloudConfig.model_validate(tomllib.loads(CLOUD_TOML)) == CloudConfig()


def test_a_launch_needs_neither_volume_nor_image_and_says_of_which_day_its_prices_are(modal_cloud: FakeModal) -> None:
    words = ["launch", "--on", "modal", "--base-model", "m", "--dataset", "d", "--dry-run", "--json"]
    told = CliRunner().invoke(cli, words)
    assert told.exit_code == 0, told.output
    assert "these are of 2026-10-08" in told.stderr and "if it cannot be pulled, nothing is made" in told.stderr
    assert json.loads(told.stdout)["num_machines"] == 2
    assert modal_cloud.sandboxes == {} and modal_cloud.volumes == set()

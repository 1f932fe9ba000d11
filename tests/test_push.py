"""Pushing: one commit on a real client and a hub on loopback, with a card that tells everything but this machine."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from hotlap import durable, errors
from hotlap.export import push
from hotlap.export.folders import Tuned
from hotlap.runs import Identity, RunFolder

WEIGHTS = b"weights" * 1000


@dataclass
class Hub:
    """What was made, uploaded and committed."""

    made: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    uploads: dict[str, bytes] = field(default_factory=dict[str, bytes])
    commits: list[list[dict[str, Any]]] = field(default_factory=list[list[dict[str, Any]]])
    tokens: set[str | None] = field(default_factory=set[str | None])
    status: int = 200
    url: str = ""


class HubHandler(BaseHTTPRequestHandler):
    hub: Hub

    def do_POST(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.tokens.add(self.headers.get("Authorization"))
        if hub.status != 200:
            return self._send(hub.status, {"error": "no"})
        if path == "/api/repos/create":
            hub.made.append(json.loads(data))
            return self._send(200, {"url": f"{hub.url}/org/mine", "name": "org/mine"})
        if "/preupload/" in path:
            names = [each["path"] for each in json.loads(data)["files"]]
            modes = {True: "lfs", False: "regular"}
            files = [{"path": n, "uploadMode": modes[n.endswith(".safetensors")], "shouldIgnore": False} for n in names]
            return self._send(200, {"files": files})
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(data)["objects"]
            actions = [
                {**each, "actions": {"upload": {"href": f"{hub.url}/store/{each['oid']}", "header": {}}}}
                for each in objects
            ]
            return self._send(200, {"transfer": "basic", "objects": actions})
        if path == "/api/validate-yaml":
            return self._send(200, {"errors": [], "warnings": []})
        assert "/commit/" in path, path
        hub.commits.append([json.loads(line) for line in data.splitlines()])
        return self._send(
            200, {"commitUrl": f"{hub.url}/org/mine/commit/c0ffee", "commitOid": "c0ffee", "success": True}
        )

    def do_PUT(self) -> None:
        self.hub.uploads[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
        self._send(200, {})

    def do_GET(self) -> None:
        self._send(self.hub.status, {"id": "org/mine", "sha": "0" * 40, "siblings": []})

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    import huggingface_hub.constants

    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (HubHandler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def tuned(tmp_path: Path) -> Tuned:
    """A finished run of step 20 whose name and paths are a stranger's."""
    run = RunFolder(tmp_path / "runs" / "my<b>|run")
    staged = run.path / ".staging"
    durable.make_dirs(staged)
    for name, data in (("adapter_config.json", b"{}"), ("adapter_model.safetensors", WEIGHTS), ("optimizer.bin", b"o")):
        durable.write_synced(staged / name, data)
    durable.publish(staged, run.adapter, {"step": 20})
    durable.append_rows(
        run.metrics, [{"step": 20, "loss": 1.5}, {"step": 20, "val_loss": 1.25}, {"step": 30, "loss": 9.0}]
    )
    pins = {"model.safetensors": {"sha256": "b" * 64}, "config.json": {"sha256": "c" * 64}}
    identity = Identity(
        trajectory={
            "base_model": "org/base@main",
            "dataset": str(tmp_path / "secret.jsonl"),
            "data": {"seq_len": 64, "chat_template": str(tmp_path)},
            "lora": {"rank": 4, "init_from": str(tmp_path)},
            "optim": {"lr": 0.001},
        },
        seed=7,
        base_pins=pins,
        data_pins={"dataset": {"train.jsonl": {"sha256": "d" * 64}}},
        packed={"train": "f" * 8},
        num_rows=1,
        num_steps=40,
        num_threads=1,
        created_at="2026-11-30T09:00:00Z",
    )
    identity.write(run)
    return Tuned(run.path, "org/base@main", tmp_path / "base", run.adapter, 20, {}, None, identity.packed)


def card(tuned: Tuned, cost: push.Cost | None = None) -> str:
    identity = push.runs.read_identity(RunFolder(tuned.run))
    assert identity
    return push.card_of(tuned, identity, {"step": 20}, [], cost)


def test_the_card_tells_where_the_model_came_from_and_nothing_of_this_machine(tuned: Tuned, tmp_path: Path) -> None:
    text = card(tuned, push.Cost(3, 600, 90_000))
    head = yaml.safe_load(text.split("---")[1])
    assert head == {"base_model": "org/base", "library_name": "peft", "tags": ["hotlap", "lora"]}
    for words in ("b" * 64, "d" * 64, "f" * 8, '"lr": 0.001', "1.2500", "step 20 of 40, seed 7", "$0.0900", "10.0"):
        assert words in text, words
    assert "9.0" not in text and str(tmp_path) not in text
    assert "# my&lt;b&gt; run" in text
    assert "nothing: no rented machine" in card(tuned)


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub 2.4's own, of its client
def test_one_commit_with_the_card_and_the_adapter_alone(hub: Hub, tuned: Tuned) -> None:
    said: list[str] = []
    url = push.push(tuned, tuned.adapter, "org/mine", True, card(tuned), said.append)
    assert url == f"{hub.url}/org/mine/commit/c0ffee"
    assert hub.made[0]["visibility"] == "private" and hub.tokens == {"Bearer hf_secret"}
    (commit,) = hub.commits
    files = {line["value"]["path"]: line for line in commit if line["key"] in ("file", "lfsFile")}
    assert set(files) == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert base64.b64decode(files["README.md"]["value"]["content"]).decode() == card(tuned)
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    assert files["adapter_model.safetensors"]["value"]["oid"] == digest and hub.uploads == {digest: WEIGHTS}
    assert "hf_secret" not in " ".join(said)


def test_what_cannot_be_pushed_is_one_line_with_the_way_out(
    hub: Hub, tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(line: str) -> None:
        assert "hf_secret" not in line

    with pytest.raises(errors.UsageError, match="no repository's name"):
        push.push(tuned, tuned.adapter, "../evil", True, "", say)
    hub.status = 403
    with pytest.raises(errors.FetchFailed, match=r"answered 403 .*HF_TOKEN may write") as failure:
        push.push(tuned, tuned.adapter, "org/mine", True, "", say)
    assert "hf_secret" not in str(failure.value)
    (tuned.adapter / "adapter_model.safetensors").write_bytes(b"other")
    with pytest.raises(errors.CorruptFile):
        push.push(tuned, tuned.adapter, "org/mine", True, "", say)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(errors.UsageError, match="Set HF_TOKEN"):
        push.push(tuned, tuned.adapter, "org/mine", True, "", say)
    assert hub.commits == []

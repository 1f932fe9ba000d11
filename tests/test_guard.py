"""Who serves is not disturbed: markers, inference servers, and what holds the device."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hotlap import guard
from hotlap.config import CloudConfig, RunConfig
from hotlap.config_cloud import GuardConfig
from hotlap.errors import GuardRefused
from hotlap.guard import ServerProcess, kind_of, serving_reason

SERVES = CloudConfig()


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("vllm serve meta/llama", "vLLM"),
        ("/usr/bin/python3 /opt/bin/vllm serve x", "vLLM"),
        ("python3.11 -m vllm.entrypoints.openai.api_server --model x", "vLLM"),
        ("VLLM::EngineCore", "vLLM"),
        ("python -u -m sglang.launch_server --model-path x", "SGLang"),
        ("sglang::scheduler", "SGLang"),
        ("text-generation-launcher --model-id x", "TGI"),
        ("/opt/venv/bin/python /opt/venv/bin/text-generation-server serve x", "TGI"),
        ("/usr/local/bin/ollama serve", "Ollama"),
        ("/usr/local/bin/ollama runner --model x", "Ollama"),
        ("./llama-server -m x.gguf", "llama-server"),
        ("tritonserver --model-repository=/m", "Triton"),
        ("vllm bench throughput", None),
        ("python -m vllm.benchmarks.x", None),
        ("ollama pull llama3", None),
        ("vim llama-server.md", None),
        ("grep vllm serve", None),
        ("python train.py --note vllm serve", None),
        ("llama-cli -m x.gguf", None),
        ("", None),
    ],
)
def test_servers_are_known_by_their_command_lines(line: str, kind: str | None) -> None:
    assert kind_of(line.split(" ")) == kind


@pytest.mark.parametrize("uses_accelerator", [True, False])
def test_a_marker_is_enough(uses_accelerator: bool) -> None:
    assert "HOTLAP_SERVING is 1" in (serving_reason({"HOTLAP_SERVING": "1"}, False, [], uses_accelerator) or "")
    assert "/etc/hotlap/serving is there" in (serving_reason({}, True, [], uses_accelerator) or "")
    assert serving_reason({"HOTLAP_SERVING": "0"}, False, [], uses_accelerator) is None
    assert serving_reason({}, False, [], uses_accelerator) is None


@pytest.mark.parametrize(
    ("listens", "devices", "uses_accelerator", "is_refused"),
    [
        (True, frozenset(), False, True),
        (False, frozenset(), False, False),
        (None, None, False, True),
        (True, frozenset(), True, False),
        (False, frozenset({"/dev/nvidia0"}), True, True),
        (None, None, True, True),
    ],
)
def test_a_server_counts_by_what_it_holds(
    listens: bool | None, devices: frozenset[str] | None, uses_accelerator: bool, is_refused: bool
) -> None:
    reason = serving_reason({}, False, [ServerProcess(7, "vLLM", listens, devices)], uses_accelerator)
    assert (reason is not None) is is_refused
    assert reason is None or "vLLM (process 7)" in reason


@pytest.fixture
def serve(tmp_path: Path) -> object:
    """Start a program called llama-server that does, or does not, listen."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "llama-server").symlink_to(sys.executable)

    def start(listens: bool) -> int:
        bind = "s.bind(('127.0.0.1', 0)); s.listen()" if listens else "pass"
        code = f"import socket, time; s = socket.socket(); {bind}; print('up', flush=True); time.sleep(60)"
        process = subprocess.Popen([str(tmp_path / "llama-server"), "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout and process.stdout.readline()
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_server_that_listens_on_this_processor_is_found(serve: Callable[[bool], int]) -> None:
    idle, busy = serve(False), serve(True)
    found = {server.pid: server for server in guard.server_processes()}
    assert (found[idle].listens, found[busy].listens) == (False, True)
    with pytest.raises(
        GuardRefused, match=f"llama-server .process {busy}. .*guard.train_beside_serving = true"
    ) as raised:
        guard.require_not_serving(SERVES)
    assert (raised.value.exit_code, raised.value.reason) == (3, "guard")


def test_the_override_is_a_line_of_the_file(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("HOTLAP_SERVING", "1")
    with pytest.raises(GuardRefused, match=str(home / "cloud.toml")):
        guard.require_not_serving()
    (home / "cloud.toml").write_text("[guard]\ntrain_beside_serving = true\n")
    guard.require_not_serving()
    guard.require_not_serving(CloudConfig(guard=GuardConfig(train_beside_serving=True)))


def test_a_hidden_accelerator_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert guard.has_accelerator() is False


@pytest.mark.torch
def test_a_slice_refuses_before_it_takes_the_lock(
    zygote: object, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    process = zygote.run(make_config(), HOTLAP_SERVING="1")  # type: ignore[attr-defined]
    assert process.status == 3 and process.result()["reason"] == "guard"
    assert not list((tmp_path / "runs" / "tiny").glob("slices/*"))


def test_open_files_that_cannot_be_read_are_unknown(tmp_path: Path) -> None:
    """As root there are none, so the folder itself is missing."""
    folder = tmp_path / "77"
    folder.mkdir()
    (folder / "cmdline").write_bytes(b"tritonserver\0--x\0")
    (server,) = guard.server_processes(tmp_path)
    assert server == ServerProcess(77, "Triton", None, None)


def test_sockets_are_read_as_the_system_lists_them() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        inode = f"socket:[{os.fstat(listener.fileno()).st_ino}]"
        folder = Path("/proc/self")
        assert inode in guard._listening_sockets(folder)
        assert inode in (guard._open_files(folder) or set())

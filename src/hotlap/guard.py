"""Refuse to train on a machine that serves: whoever waits for an answer comes first.

A machine serves when somebody said so (`HOTLAP_SERVING=1`, or the file `/etc/hotlap/serving`), when a `hotlap serve`
that lives here has said so (a file in `$HOTLAP_HOME/serving`; that of a dead one counts for nothing), or when an
inference server holds what training would use. With an accelerator, that is a server process with one of its device
files open; without, it is a server process that listens. A server whose open files cannot be read, being another
user's, counts as one that does. Other programs that use the device are not looked for.
"""

import contextlib
import json
import os
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotlap import clock, durable
from hotlap.config import CloudConfig, hotlap_home, load_cloud
from hotlap.errors import GuardRefused

MARKER = Path("/etc/hotlap/serving")
_PROGRAMS = {
    "llama-server": "llama-server",
    "tritonserver": "Triton",
    "text-generation-launcher": "TGI",
    "text-generation-router": "TGI",
    "text-generation-server": "TGI",
}
_WITH_COMMAND = {
    ("vllm", "serve"): "vLLM",
    ("sglang", "serve"): "SGLang",
    ("ollama", "serve"): "Ollama",
    ("ollama", "runner"): "Ollama",
}
_MODULES = {
    "vllm.entrypoints": "vLLM",
    "sglang.launch_server": "SGLang",
    "sglang.srt": "SGLang",
    "text_generation_server": "TGI",
}
_TITLES = {"vllm::": "vLLM", "sglang::": "SGLang"}
"""What their worker processes call themselves."""

_DEVICE = re.compile(r"/dev/(nvidia\d+|kfd|dri/renderD\d+)")
_LISTENING = "0A"


@dataclass(frozen=True)
class ServerProcess:
    """An inference server that runs here. None: its open files cannot be read."""

    pid: int
    kind: str
    listens: bool | None
    devices: frozenset[str] | None


def require_not_serving(settings: CloudConfig | None = None) -> None:
    """
    Raises:
        GuardRefused: this machine serves, and `cloud.toml` does not say to train all the same.
    """
    if (settings or load_cloud()).guard.train_beside_serving:
        return
    reason = serving_reason(os.environ, MARKER.exists(), list(server_processes()), has_accelerator())
    reason = reason or next(own_servers(), None)
    if reason is not None:
        raise GuardRefused(
            f"Nothing is trained here: {reason}. Train on another machine (hotlap launch), or, if you mean it, set "
            f"guard.train_beside_serving = true in {hotlap_home() / 'cloud.toml'}."
        )


def serving_reason(
    env: Mapping[str, str], is_marked: bool, servers: Iterable[ServerProcess], uses_accelerator: bool
) -> str | None:
    """Why this machine counts as one that serves, or None."""
    if env.get("HOTLAP_SERVING", "") not in ("", "0"):
        return f"HOTLAP_SERVING is {env['HOTLAP_SERVING']}, so this machine serves"
    if is_marked:
        return f"{MARKER} is there, so this machine serves"
    for server in servers:
        if uses_accelerator and (server.devices is None or server.devices):
            device = "an accelerator" if server.devices is None else min(server.devices)
            return f"{server.kind} (process {server.pid}) holds {device}"
        if not uses_accelerator and server.listens is not False:
            return f"{server.kind} (process {server.pid}) serves from this machine's processor"
    return None


def kind_of(argv: Sequence[str]) -> str | None:
    """The inference server that a command line starts, or None."""
    if not argv or not argv[0]:
        return None
    for title, kind in _TITLES.items():
        if argv[0].lower().startswith(title):
            return kind
    words = [Path(argv[0]).name, *argv[1:]]
    if re.fullmatch(r"python[\d.]*", words[0]):
        words = [word for word in words[1:] if word != "-u"]
        if words[:1] == ["-m"] and len(words) > 1:
            return next((kind for module, kind in _MODULES.items() if f"{words[1]}.".startswith(f"{module}.")), None)
        words = [Path(words[0]).name, *words[1:]] if words else [""]
    return _PROGRAMS.get(words[0]) or _WITH_COMMAND.get((words[0], words[1] if len(words) > 1 else ""))


# --- `hotlap serve` ---


@contextlib.contextmanager
def serving(what: str) -> Generator[None]:
    """While this lasts, nothing of this home is trained on this machine, because this process serves `what`."""
    pid = os.getpid()
    path = hotlap_home() / "serving" / f"{pid}.json"
    mark = {"pid": pid, "birth": clock.process_birth(pid), "boot": clock.boot_id(), "what": what}
    durable.make_dirs(path.parent)
    durable.replace(path, (durable.canonical_json(mark) + "\n").encode())
    try:
        yield
    finally:
        durable.disk.remove(path)


def own_servers() -> Iterator[str]:
    """Every living `hotlap serve` of this home on this machine, in words. Marks that others left are passed over."""
    for path in (hotlap_home() / "serving").glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, ProcessLookupError):
            mark = json.loads(path.read_bytes())
            if mark["boot"] == clock.boot_id() and clock.process_birth(mark["pid"]) == mark["birth"]:
                yield f"hotlap serve (process {mark['pid']}) serves {mark['what']} from this machine"


# --- what this machine tells ---


def has_accelerator() -> bool:
    """Whether there is a device that training would take; `CUDA_VISIBLE_DEVICES` set to nothing hides it."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def server_processes(proc: Path = Path("/proc")) -> Iterator[ServerProcess]:
    for folder in proc.glob("[0-9]*"):
        kind = None
        with contextlib.suppress(OSError):
            kind = kind_of((folder / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0"))
        if kind is not None:
            files = _open_files(folder)
            listens = None if files is None else bool(files & _listening_sockets(folder))
            devices = None if files is None else frozenset(name for name in files if _DEVICE.fullmatch(name))
            yield ServerProcess(int(folder.name), kind, listens, devices)


def _open_files(folder: Path) -> set[str] | None:
    found: set[str] = set()
    try:
        for path in (folder / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed in between
                found.add(str(path.readlink()))
    except OSError:
        return None
    return found


def _listening_sockets(folder: Path) -> set[str]:
    """Those of the process's network, named as its open files name them."""
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for row in (folder / "net" / table).read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == _LISTENING:
                    found.add(f"socket:[{fields[9]}]")
    return found

"""Tools that want other versions than we do, each in an environment of its own under `$HOTLAP_HOME/tools`.

An environment without its marker was never completed, and is made anew. It cannot be moved, so it is built in place.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hotlap import durable, sources
from hotlap.config import hotlap_home
from hotlap.errors import DONE, FetchFailed, MissingArtifact, UsageError
from hotlap.export.task import Say

_READY = "ready.json"


@dataclass(frozen=True)
class Tool:
    """Packages that make up a tool, in versions that were tried together."""

    name: str
    requirements: tuple[str, ...]

    @property
    def folder(self) -> Path:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        digest = durable.sha256_bytes(durable.canonical_json([*self.requirements, version]).encode())
        return hotlap_home() / "tools" / f"{self.name}-{digest[:8]}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


TOOLS = {
    "fp8": Tool(
        "fp8",
        ("llmcompressor==0.14.0.1", "compressed-tensors==0.19.0", "transformers==5.17.0", "torch==2.13.0"),
    )
}


def locate(name: str) -> Path:
    """The Python of a tool's environment.

    Raises:
        MissingArtifact: it is not here; the message names the command that brings it.
    """
    tool = TOOLS[name]
    if not (tool.folder / _READY).exists():
        raise MissingArtifact(f"The tool {name} is not on this machine yet. Run `hotlap prefetch --tool {name}` once.")
    return tool.python


def install(name: str, say: Say) -> Path:
    """The Python of a tool's environment, after making that if it is not here. Packages come from pip's index.

    Raises:
        UsageError: there is no such tool.
        FetchFailed: a package did not arrive.
    """
    if name not in TOOLS:
        raise UsageError(f"There is no tool {name!r}. Tools: {', '.join(TOOLS)}.")
    tool = TOOLS[name]
    if (tool.folder / _READY).exists():
        say(f"{tool.folder} is here.")
        return tool.python
    if tool.folder.exists():
        durable.remove_tree(tool.folder)
    durable.make_dirs(tool.folder.parent)
    say(f"Installing {', '.join(tool.requirements)} into {tool.folder}; this is done once and takes minutes.")
    _run("The environment", [sys.executable, "-m", "venv", str(tool.folder)], say)
    pip = [str(tool.python), "-m", "pip", "--disable-pip-version-check"]
    _run("The installation", [*pip, "install", "--quiet", "--progress-bar=off", *tool.requirements], say)
    listed = subprocess.run([*pip, "list", "--format=json"], capture_output=True, text=True, check=True)
    packages = {entry["name"]: entry["version"] for entry in json.loads(listed.stdout)}
    durable.replace(tool.folder / _READY, (durable.canonical_json(packages) + "\n").encode())
    return tool.python


def _run(what: str, argv: list[str], say: Say) -> None:
    exit_code, lines = sources.run_to_end(what, argv, lambda line: None)
    if exit_code != DONE:
        why = next((line for line in reversed(lines) if line.startswith("ERROR:")), "".join(lines[-1:]))
        raise FetchFailed(f"{what} failed: {why[:300]}. Check the network and the package index, {sources.AGAIN}")

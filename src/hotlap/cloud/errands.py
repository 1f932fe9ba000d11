"""What a rented machine may be sent for besides slices: trials of a study, and the runs of a verification."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from hotlap import durable
from hotlap.cloud import boot
from hotlap.cloud.launcher import Job, plan_of
from hotlap.cloud.provider import Provider, Start, Traits
from hotlap.cloud.rental import boot_env
from hotlap.cloud.ssh import SshProvider

START_S = 20.0
"""Of a machine's time, what passes until the command has begun, and from its last trial to its end."""


@dataclass(frozen=True)
class Errand:
    """A command, the files that it needs written, and the longest it may take."""

    run: str
    cap_s: float
    argv: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    needs_network: bool = True


def root_of(provider: Provider, volume: str) -> str:
    """Where an errand's paths begin: here, in a box's home, or on the volume."""
    if isinstance(provider, SshProvider):
        return provider.box()["home"]
    return str(Path.cwd()) if provider.traits.name == "local" else volume


def research(name: str, text: str, num_trials: int | None, cap_s: float, root: str) -> Errand:
    """As many trials of a study as fit into the cap. Its journal lies in `studies` below the root, and goes on.

    `text` is the study's TOML, which is brought along.
    """
    place = str(PurePosixPath(root) / ".hotlap" / "studies" / f"{name}.toml")
    trials = () if num_trials is None else ("--trials", str(num_trials))
    minutes = f"{max(0.1, (cap_s - START_S) / 60.0):.3f}"
    folder = str(PurePosixPath(root) / "studies")
    command = ("python", "-m", "hotlap", "research", "run", place, *trials, "--minutes", minutes)
    return Errand(f"research-{name}"[:64], cap_s, (*command, "--output-dir", folder), {place: text})


def measured_folder(submission: str, code_sha256: str) -> str:
    """Where what is measured of a submission comes to, below the root. Named after its code as well: runs of what was
    edited since must not count."""
    return f"verifications/{PurePosixPath(submission).name}-{code_sha256[:12]}"


def verification(
    submission: str,
    code_sha256: str,
    track_id: str,
    num_runs: int,
    cap_s: float,
    root: str,
    module: str = "hotlap.speedrun.remote",
) -> Errand:
    """Fresh runs of a submission that lies below the root, beside its contest's `tracks`."""
    folder = PurePosixPath(root) / submission
    out = str(PurePosixPath(root) / measured_folder(submission, code_sha256))
    words = (str(folder), "--track", track_id, "--runs", str(num_runs), "--out", out)
    return Errand(f"verify-{folder.name}"[:64], cap_s, ("python", "-m", module, *words), needs_network=False)


def place_of(provider: Provider) -> tuple[str, tuple[str, ...]]:
    """On this machine or a box of one's own: the Python there, and the words that run boot."""
    if isinstance(provider, SshProvider):
        box = provider.box()
        return box["python"], (box["python"], "-S", "-I", box["boot"])
    return sys.executable, (sys.executable, "-S", "-I", boot.__file__)


def job_of(errand: Errand, traits: Traits, python: str, boot_words: tuple[str, ...]) -> Job:
    order = durable.canonical_json({"files": dict(errand.files), "argv": list(errand.argv)})
    argv = (*boot_words, python, "-m", "hotlap.cloud.errand", order)
    plan = plan_of(Job(errand.run, errand.cap_s, Start(argv)), traits)
    start = Start(argv, boot_env(plan, traits), has_network=errand.needs_network or not traits.blocks_network)
    return Job(errand.run, errand.cap_s, start)

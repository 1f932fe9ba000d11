"""What a rented machine may be sent for besides slices: trials of a study, and the runs of a verification.

Where no volume has hotlap, one request takes all of it: what the errand uses of hotlap, the files it works on, and what
is here of its results already. The machine makes the environment on its own disk, and results come back by its log.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from hotlap import durable
from hotlap.cloud import arrive, boot, bundle
from hotlap.cloud.launcher import Job, plan_of
from hotlap.cloud.parcel import Parcel
from hotlap.cloud.provider import Provider, Start, Traits
from hotlap.cloud.rental import boot_env
from hotlap.cloud.runpod_shapes import MAX_ARGV_BYTES, boot_argv, packed
from hotlap.cloud.ssh import SshProvider
from hotlap.errors import UsageError

START_S = 20.0
"""Of a machine's time, what passes until the command has begun, and from its last trial to its end."""

INSTALL_S = 240.0
"""Of the time of a machine without a volume, what its environment may take."""

HERE = "."
"""Where the paths of an errand without a volume begin: in a folder of its machine's disk."""

KEPT_OF_A_STUDY = ("experiments.jsonl", "secret")
"""Its journal, and what all seeds come from. Everything else in its folder is made of these."""

_DISK = "hotlap"


@dataclass(frozen=True)
class Errand:
    """A command, the files that it needs written, and the longest it may take."""

    run: str
    cap_s: float
    argv: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    needs_network: bool = True
    extra: str = "train"
    """Of hotlap, what it needs installed."""

    brings: tuple[str, ...] = ()
    """Patterns of what is to come back where no volume keeps it."""

    @property
    def results(self) -> str:
        """The folder in which that lies."""
        return str(PurePosixPath(self.brings[0]).parent)


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
    argv = (*command, "--output-dir", folder)
    brings = tuple(f"studies/{name}/{file}" for file in KEPT_OF_A_STUDY)
    return Errand(f"research-{name}"[:64], cap_s, argv, {place: text}, extra="gpt", brings=brings)


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
    argv, name = ("python", "-m", module, *words), f"verify-{folder.name}"[:64]
    measured = measured_folder(submission, code_sha256)
    brings = tuple(f"{measured}/{pattern}" for pattern in ("*", "run-*/*", "code/**/*"))
    return Errand(name, cap_s, argv, needs_network=False, brings=brings)


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


def room_in(argv: Sequence[str]) -> int:
    """How many bytes a request with this command has left."""
    return MAX_ARGV_BYTES - len(json.dumps(argv).encode())


def job_by_request(errand: Errand, kept: Mapping[str, bytes], sent: Parcel, traits: Traits, image: str | None) -> Job:
    """The same on a machine without a volume. `kept` are the files that it works on, by their paths below `HERE`.

    Raises:
        UsageError: it does not fit into one request.
    """
    order: dict[str, Any] = {"files": dict(errand.files), "argv": list(errand.argv), "brings": list(errand.brings)}
    order |= {"home": _DISK, "bundle": bundle.packed(kept)}
    command = ["-m", "hotlap.cloud.errand", durable.canonical_json(order)]
    arriving = {"part": (0, 1, "".join(sent.parts())), "install": (errand.extra, [command])}
    words = (_DISK, sent.digest, sent.file_name, json.dumps(arriving))
    argv = boot_argv(("python3", "-I", "-c", packed(arrive.__file__), *words))
    num_bytes = MAX_ARGV_BYTES - room_in(argv)
    if num_bytes > MAX_ARGV_BYTES:
        raise UsageError(
            f"{errand.run} with its files and what is here of {errand.results} has {num_bytes} bytes, and one request "
            f"takes {MAX_ARGV_BYTES}. Bring it by a network volume: --volume-id V."
        )
    cap_s = errand.cap_s + INSTALL_S
    plan = plan_of(Job(errand.run, cap_s, Start(argv)), traits)
    return Job(errand.run, cap_s, Start(argv, boot_env(plan, traits), image=image))

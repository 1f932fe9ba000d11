"""What is installed where a submission runs: the track's lock, and the packages it declares, apart from ours.

An environment is built before any clock starts, by pip, from wheels only, so that nothing of a package runs here. It
lies in `$HOTLAP_HOME/environments/HASH/`, by the hash of everything it is made of; one without its account was cut
while it was built, and is made anew from what pip has in its cache. A verification that finds all its environments
fetches nothing. Where pip looks is the user's: its own files and `PIP_` variables.

A run sees only its environment; evaluation sees the track's alone, without what a submission asked for.
"""

import json
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import hotlap
from hotlap import clock, durable
from hotlap.child import run_child
from hotlap.config import hotlap_home
from hotlap.errors import FetchFailed, MissingArtifact, PinMismatch
from hotlap.speedrun.stopping import require_not_stopped
from hotlap.speedrun.track import Track

EXTRA = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._,-]+\])?==[A-Za-z0-9][A-Za-z0-9.!+_-]*")
"""A package that a submission may ask for: a name and one version, neither an address nor an option."""

_FORMAT = 1
_BUILD_S = 3600.0
_ACCOUNT = "environment.json"
_PASSED_ON = ("PATH", "HOME", "LANG", "TMPDIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Environment:
    python: Path
    folders: tuple[Path, ...]
    """What has to be seen for `python` to start and import, besides the operating system."""
    lock_sha256: str | None
    """None: hotlap's own."""
    packages: dict[str, str]
    """Everything that is installed, and its version."""

    def as_json(self) -> dict[str, Any]:
        return {"lock_sha256": self.lock_sha256, "packages": self.packages}


def own() -> Environment:
    """The one that hotlap runs in. On a rented machine that leans on the packages of the image."""
    places = [Path(place) for place in sys.path if place]
    packages = [place for place in places if place.name in ("site-packages", "dist-packages") and place.is_dir()]
    return Environment(Path(sys.executable), (Path(sys.prefix), package_folder(), *packages), None, _installed(places))


def package_folder() -> Path:
    """Where hotlap's own modules lie, for an environment that is to run its trainer."""
    return Path(hotlap.__file__).parent


def package_sha256() -> str:
    """Of hotlap's own modules: the trainer of every recipe, which a version's number does not tell from a change."""
    sources = {path.relative_to(package_folder()): path for path in package_folder().rglob("*.py")}
    hashes = {name.as_posix(): durable.sha256_file(path) for name, path in sources.items()}
    return durable.sha256_bytes(durable.canonical_json(hashes).encode())


def of_track(track: Track, extras: Sequence[str], say: Say) -> Environment:
    """The environment of a track with the packages of one submission, built if it is not there yet.

    Raises:
        MissingArtifact: the track's lock has to be brought first.
        PinMismatch: it is another one.
        FetchFailed: pip did not deliver, or the packages do not go together.
    """
    lock = track.lock
    if lock is None and not extras:
        return own()
    if lock is None:
        text = "".join(f"{name}=={version}\n" for name, version in sorted(own().packages.items()) if name != "hotlap")
    else:
        text = _lock_text(track, lock)
    return build(text, extras, say)


def _lock_text(track: Track, lock: Path) -> str:
    if not lock.is_file():
        raise MissingArtifact(
            f"Track {track.spec.id} pins an environment that is not shipped here. Put {lock.name} of "
            f"{track.spec.source} to {lock}."
        )
    public = track.pins.public
    if public is not None and durable.sha256_file(lock) != public.env_lock_sha256:
        raise PinMismatch(f"{lock} is not the environment that track {track.spec.id} pins. Bring it anew.")
    return lock.read_text(encoding="utf-8")


def build(lock_text: str, extras: Sequence[str], say: Say) -> Environment:
    """
    Raises:
        FetchFailed: pip did not deliver, or the packages do not go together.
    """
    lock_sha256 = durable.sha256_bytes(lock_text.encode())
    identity = {
        "format": _FORMAT,
        "lock": lock_sha256,
        "extras": sorted(extras),
        "python": [sys.base_prefix, platform.python_version(), platform.machine()],
    }
    key = durable.sha256_bytes(durable.canonical_json(identity).encode())[:16]
    folder = hotlap_home() / "environments" / key
    account = folder / _ACCOUNT
    if not account.is_file():
        say(f"building environment {key}: {len(lock_text.splitlines())} pinned packages and {len(extras)} more; once")
        _install(folder, lock_text, extras)
        facts = {**identity, "packages": _installed(list(folder.glob("lib/python*/site-packages")))}
        durable.replace(account, (json.dumps(facts, indent=1, sort_keys=True) + "\n").encode())
    packages = json.loads(account.read_bytes())["packages"]
    return Environment(folder / "bin" / "python", (folder,), lock_sha256, packages)


def _install(folder: Path, lock_text: str, extras: Sequence[str]) -> None:
    if folder.exists():
        durable.remove_tree(folder)
    durable.make_dirs(folder.parent)
    _run([sys.executable, "-I", "-m", "venv", "--without-pip", str(folder)])
    wanted = folder / "requirements.txt"
    durable.replace(wanted, (lock_text.rstrip("\n") + "\n" + "".join(f"{each}\n" for each in sorted(extras))).encode())
    pip = [sys.executable, "-I", "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    _run([*pip, "--no-input", "--quiet", "--only-binary", ":all:", "--requirement", str(wanted)])
    os.sync()  # thousands of files; the account that follows says that they are there


def _run(argv: list[str]) -> None:
    """A module in isolated mode: the contest's folder, where strangers' files lie, is not searched for it."""
    names = [name for name in os.environ if name in _PASSED_ON or name.startswith("PIP_") or "proxy" in name.lower()]
    env = {name: os.environ[name] for name in names}
    end = run_child(argv, clock.Deadline(clock.monotonic_s() + _BUILD_S), env=env)
    require_not_stopped(end)
    if end.exit_code != 0:
        raise FetchFailed(
            f"The environment cannot be built; {argv[3]} ended with code {end.exit_code}: "
            f"{end.last_words[-800:]} Check the network, pip's configuration and the packages' versions."
        )


def _installed(places: Sequence[Path]) -> dict[str, str]:
    """Packages by name, read from their files: nothing is imported."""
    found = {each.metadata["Name"]: each.version for each in metadata.distributions(path=[str(p) for p in places])}
    return dict(sorted((name, version) for name, version in found.items() if name))

"""The local provider: a machine is a group of processes on this one, with a volume, a death date and a real end.

It rents out what is there already, so that a launch can be rehearsed for nothing; and it is complete, so that whatever
is promised of providers can be tried on it.
"""

import contextlib
import os
import secrets
import signal
import subprocess
from pathlib import Path

from hotlap import clock, durable
from hotlap.cloud import guardian
from hotlap.cloud.machine_files import MachineFolder
from hotlap.cloud.provider import (
    ANYWHERE,
    Listing,
    ListingBroken,
    LogPage,
    Machine,
    Offer,
    Start,
    State,
    Tags,
    Traits,
    Where,
    read_tags,
)
from hotlap.config import hotlap_home
from hotlap.config_cloud import LocalConfig
from hotlap.errors import AmbiguousCreate, NotCreated, ProviderFailed
from hotlap.secrecy import names_a_secret

TRAITS = Traits(
    name="local",
    has_hard_ttl=True,
    # The folder of a machine is removed by whoever saw that its whole process tree is reaped.
    proof_listings=1,
    proof_gap_s=0.0,
    proof_s=15.0,
    visibility_s=0.0,
    poll_s=0.05,
    provisioning_s=30.0,
    needs_volume=False,
    restarts=False,
)
_APPEAR_S = 20.0
_KILL_PATIENCE_S = 4.0
_POLL_S = 0.01

# Everything else of the environment stays here, keys and passwords above all.
_ENV_NAMES = (
    *("PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH"),
    *("HOTLAP_HOME", "HOTLAP_SERVING"),
)
_ENV_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME")

_guardians: list["subprocess.Popen[bytes]"] = []
"""Those that this process started, so that they are reaped when they end."""


class LocalProvider:
    """See `Provider`. The home holds the machines, so other processes with the same home see and end them."""

    def __init__(
        self, settings: LocalConfig | None = None, home: Path | None = None, grace_s: float = guardian.GRACE_S
    ) -> None:
        self._settings = settings or LocalConfig()
        self._grace_s = grace_s
        self._folder = (home or hotlap_home()) / "machines"

    @property
    def traits(self) -> Traits:
        return TRAITS

    def offers(self, gpu: str | None = None, where: Where = ANYWHERE) -> list[Offer]:
        del where  # there is one place
        offer = Offer(
            provider="local",
            gpu="local",
            region=None,
            usd_micros_per_hour=self._settings.usd_micros_per_hour,
            num_gpus=self._settings.num_gpus,
        )
        return [offer] if gpu in (None, offer.gpu) else []

    def create(self, offer: Offer, tags: Tags, start: Start) -> Machine:
        machine_id = f"local-{secrets.token_hex(6)}"
        folder = MachineFolder(self._folder / machine_id)
        staged = MachineFolder(self._folder / f".staging-{machine_id}")
        staged.stage(
            {
                "machine_id": machine_id,
                "name": tags.name,
                "created_at_s": clock.wall_s(),
                "not_after_s": tags.not_after_s,
                "usd_micros_per_hour": offer.usd_micros_per_hour,
                "grace_s": self._grace_s,
                "argv": list(start.argv),
                "env": {**start.env, **tags.env},
            }
        )
        process = subprocess.Popen(
            guardian.order(staged.path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_environment(start),
            start_new_session=True,
        )
        _guardians[:] = [each for each in _guardians if each.poll() is None] + [process]
        patience = clock.Deadline(clock.monotonic_s() + _APPEAR_S)
        while not folder.path.exists():
            if process.poll() is not None and not folder.path.exists():
                with contextlib.suppress(FileNotFoundError):
                    durable.remove_tree(staged.path)
                raise NotCreated(f"The local machine did not start: its time, until {tags.not_after_s}, may be over.")
            if patience.is_over():
                raise AmbiguousCreate(f"The local machine {machine_id} did not appear within {_APPEAR_S:.0f} s.")
            clock.sleep_s(_POLL_S)
        return self._machine(folder)

    def machines(self) -> Listing:
        found, damaged = list[Machine](), list[Path]()
        for path in sorted(self._folder.glob("local-*")):
            try:
                if (folder := MachineFolder(path)).is_here():
                    found.append(self._machine(folder))
            except FileNotFoundError:  # ended in between
                continue
            except (ValueError, KeyError, TypeError):
                damaged.append(path)
        listing = Listing(clock.wall_s(), tuple(found))
        if damaged:
            raise ListingBroken(
                f"The files of {damaged[0]} are damaged, so what it is cannot be told. See that nothing of it runs "
                f"any more, and remove the folder.",
                listing,
            )
        return listing

    def terminate(self, machine_id: str) -> bool:
        """Waits for the reaping, and removes the machine's folder after it: absence is proof."""
        folder = MachineFolder(self._folder / _checked(machine_id))
        try:
            facts = folder.facts()
            lease = facts["env"]["HOTLAP_LEASE"]
            patience = clock.Deadline(clock.monotonic_s() + facts["grace_s"] + _KILL_PATIENCE_S)
            pid = folder.guardian_pid()
            if pid is not None and folder.dead() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
                    os.kill(pid, signal.SIGCONT)  # a suspended one would not hear it
            while folder.dead() is None and not patience.is_over():
                if folder.guardian_pid() is None and folder.dead() is None and not _kill_tagged(lease):
                    how = {"why": "its guardian had died, and the rest was killed", "exit_code": None}
                    folder.write_dead({**how, "at_s": clock.wall_s()})
                clock.sleep_s(_POLL_S)
            if folder.dead() is not None:
                durable.remove_tree(folder.path)
        except FileNotFoundError:
            return False
        _reap_guardians(pid)
        return True

    def logs(self, machine_id: str, cursor: str = "") -> LogPage:
        start = int(cursor or 0)
        try:
            with MachineFolder(self._folder / _checked(machine_id)).log.open("rb") as file:
                file.seek(start)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return LogPage((), cursor)
        lines = whole.decode(errors="replace").split("\n") if newline else []
        return LogPage(tuple(lines), str(start + len(whole) + len(newline)))

    def close(self) -> None:
        """Nothing is held open."""

    def _machine(self, folder: MachineFolder) -> Machine:
        facts = folder.facts()
        tags = read_tags(facts["env"], facts["created_at_s"])
        problems = list(tags.problems)
        state: State = "running"
        dead = folder.dead()
        if dead:
            state = "exited"
        elif folder.guardian_pid() is None and not folder.dead():
            state = "error"
            problems.append("its guardian is gone, so nothing ends it at its time but hotlap reap")
        return Machine(
            machine_id=facts["machine_id"],
            name=facts["name"],
            state=state,
            created_at_s=facts["created_at_s"],
            lease_id=tags.lease_id,
            owner=tags.owner,
            nonce=tags.nonce,
            not_after_s=tags.not_after_s,
            usd_micros_per_hour=facts["usd_micros_per_hour"],
            is_up=state == "running",
            problems=tuple(problems),
            ended_at_s=dead["at_s"] if dead else None,
        )


def _checked(machine_id: str) -> str:
    if not machine_id.startswith("local-") or "/" in machine_id:
        raise ProviderFailed(f"{machine_id!r} is no local machine; hotlap machines lists them.")
    return machine_id


def _reap_guardians(pid: int | None) -> None:
    """Take note of the end of those that this process started. One that was just told to end leaves in a moment."""
    for process in _guardians:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_KILL_PATIENCE_S if process.pid == pid else 0.0)


def _environment(start: Start) -> dict[str, str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if name in _ENV_NAMES or (name.startswith(_ENV_PREFIXES) and not names_a_secret(name))
    }
    for name, ref in start.secret_refs.items():
        if ref not in os.environ:
            raise NotCreated(f"The secret {ref} is not set in this environment; set it, or do not ask for {name}.")
        env[name] = os.environ[ref]
    return env


def _kill_tagged(lease_id: str) -> int:
    """Kill what carries the lease in its environment; how many there were."""
    num_found = 0
    for pid in guardian.pids_with(f"HOTLAP_LEASE={lease_id}"):
        if pid != os.getpid():
            num_found += 1
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    return num_found

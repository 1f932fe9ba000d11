"""A box of one's own, reached by `ssh`: rented out as if it were a provider's, with the same worker, TTL and proof.

hotlap is installed there (`ssh.python` in cloud.toml names the interpreter that has it), and each request is one `ssh`
that runs `hotlap.cloud.far`. Whoever may log in may list, judge and end what runs there.
"""

import contextlib
import json
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hotlap import durable
from hotlap.cloud import local
from hotlap.cloud.provider import (
    ANYWHERE,
    Listing,
    ListingBroken,
    LogPage,
    Machine,
    Offer,
    Start,
    Tags,
    Traits,
    Where,
)
from hotlap.cloud.volume import CHUNK_BYTES, Item, begun, finish
from hotlap.config_cloud import SshConfig
from hotlap.errors import (
    AmbiguousCreate,
    ConfigError,
    HotlapError,
    MissingArtifact,
    NotCreated,
    ProviderFailed,
)

TRAITS = replace(local.TRAITS, name="ssh", proof_s=60.0, poll_s=1.0, provisioning_s=60.0)
"""As on this machine, but slower: a listing waits for whatever is being made there, so what is missing from it does
not exist, and the folder is removed by whoever saw that the whole process tree is reaped."""

_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
VOLUME = "ssh:"
"""Names the login's home there as a volume."""

_PATIENCE_S = 60.0
"""For one request, `ssh` to answer, and between two chunks of a file; ending a machine waits until it is reaped."""


class _NotGreeted(ProviderFailed):
    """The box did not greet, so the order was not sent."""


class SshProvider:
    """See `Provider`."""

    def __init__(self, settings: SshConfig, patience_s: float = _PATIENCE_S) -> None:
        """
        Raises:
            ConfigError: no box is named.
        """
        if settings.host is None:
            raise ConfigError('No box is named. Name one in cloud.toml: under [ssh], host = "me@box".')
        self._settings, self._host, self._patience_s = settings, settings.host, patience_s
        self._box: dict[str, str] | None = None

    @property
    def traits(self) -> Traits:
        return TRAITS

    def box(self) -> dict[str, str]:
        """What a job must know of the box: `python`, `boot` and `home` are places there.

        Raises:
            ProviderFailed: it does not answer.
        """
        if self._box is None:
            self.machines()
        assert self._box is not None
        return self._box

    def offers(self, gpu: str | None = None, where: Where = ANYWHERE) -> list[Offer]:
        del where  # there is one place
        usd_micros = self._settings.usd_micros_per_hour
        offer = Offer("ssh", "box", None, usd_micros, num_gpus=self._settings.num_gpus)
        return [offer] if gpu in (None, offer.gpu) else []

    def create(self, offer: Offer, tags: Tags, start: Start) -> Machine:
        order = {
            "offer": vars(offer),
            "tags": vars(tags),
            "argv": list(start.argv),
            "env": dict(start.env),
            "secret_refs": dict(start.secret_refs),
        }
        try:
            return _machine(self.ask("create", order))
        except _NotGreeted as error:
            raise NotCreated(f"{error} Nothing was made.") from None
        except NotCreated:
            raise
        except ProviderFailed as error:
            raise AmbiguousCreate(f"The answer to the create of {tags.name} was lost: {error}") from None

    def machines(self) -> Listing:
        return _listing(self.ask("machines", {}))

    def terminate(self, machine_id: str) -> bool:
        return bool(self.ask("terminate", {"machine_id": machine_id}))

    def logs(self, machine_id: str, cursor: str = "") -> LogPage:
        page = self.ask("logs", {"machine_id": machine_id, "cursor": cursor})
        return LogPage(tuple(page["lines"]), page["cursor"])

    def close(self) -> None:
        """Nothing is held open."""

    # --- one request ---

    def _command(self, what: str) -> list[str]:
        options = [word for option in _OPTIONS for word in ("-o", option)]
        if self._settings.config_file is not None:
            options += ["-F", self._settings.config_file]
        return [
            "ssh",
            "-T",
            *options,
            "--",
            self._host,
            shlex.join([self._settings.python, "-m", "hotlap.cloud.far", what]),
        ]

    def ask(
        self, what: str, order: dict[str, Any], send: Iterable[bytes] = (), take: Callable[[bytes], None] | None = None
    ) -> Any:
        """One request's answer. `send` follows the order; whatever follows the answer is given to `take`.

        Raises:
            ProviderFailed: the box does not do as asked.
        """
        process = subprocess.Popen(
            self._command(what), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        watch = _Watch(self._patience_s, process.kill)
        try:
            assert process.stdin and process.stdout
            greeting = process.stdout.readline()
            if not greeting.endswith(b"\n"):
                raise _NotGreeted(self._trouble(process))
            self._box = _parsed(greeting, self._host, _NotGreeted)
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(order).encode() + b"\n")
                process.stdin.flush()
                for chunk in send:
                    process.stdin.write(chunk)
                    process.stdin.flush()
                    watch.begin_again()
            line = process.stdout.readline()
            if not line.endswith(b"\n"):
                raise ProviderFailed(self._trouble(process))
            answer = _answer_in(_parsed(line, self._host, ProviderFailed))
            while take and (chunk := process.stdout.read(CHUNK_BYTES)):
                take(chunk)
                watch.begin_again()
            return answer
        finally:
            watch.end()
            process.kill()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
            process.wait()

    def _trouble(self, process: "subprocess.Popen[bytes]") -> str:
        """What went wrong, in `ssh`'s own last words."""
        assert process.stderr
        said = process.stderr.read().decode(errors="replace").strip().splitlines()
        words = said[-1][:200] if said else f"no answer within {self._patience_s:.0f} s"
        python = self._settings.python
        return (
            f"The box {self._host} does not do as asked: {words}. Try: ssh {self._host} {python} -m hotlap --version; "
            f"hotlap must be installed there, and ssh must ask for no password. ssh.python in cloud.toml names its "
            f"interpreter."
        )


class _Watch:
    """Ends a request that has not moved for so long."""

    def __init__(self, seconds: float, end: Callable[[], None]) -> None:
        self._seconds, self._end = seconds, end
        self._timer = threading.Timer(seconds, end)
        self._timer.start()

    def begin_again(self) -> None:
        self._timer.cancel()
        self._timer = threading.Timer(self._seconds, self._end)
        self._timer.start()

    def end(self) -> None:
        self._timer.cancel()


def _parsed(line: bytes, host: str, trouble: type[ProviderFailed]) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        said = line[:80].decode(errors="replace")
        raise trouble(f"{host} says {said!r}. A login there must print nothing: correct its shell's start-up.")
    return value


def _answer_in(tree: dict[str, Any]) -> Any:
    if "error" not in tree:
        return tree["is"]
    if tree["error"] == "ListingBroken":
        raise ListingBroken(tree["message"], _listing(tree["seen"]))
    kinds: dict[str, type[HotlapError]] = {"NotCreated": NotCreated, "MissingArtifact": MissingArtifact}
    raise kinds.get(tree["error"], ProviderFailed)(str(tree["message"]))


def _machine(facts: dict[str, Any]) -> Machine:
    row: dict[str, Any] = dict(facts)
    row["problems"] = tuple(row["problems"])
    return Machine(**row)


def _listing(facts: dict[str, Any]) -> Listing:
    return Listing(float(facts["now_s"]), tuple(_machine(each) for each in facts["machines"]))


class BoxVolume:
    """See `Volume`. The home of the login there, in which the runs of a box lie."""

    def __init__(self, box: SshProvider) -> None:
        self._box = box

    def ls(self, prefix: str = "") -> list[Item]:
        return [Item(**row) for row in self._box.ask("files", {"prefix": prefix})]

    def put(self, source: Path, key: str) -> bool:
        digest = durable.sha256_file(source)
        if self._hash_of(key) == digest:
            return False
        order = {"key": key, "num_bytes": source.stat().st_size, "sha256": digest}
        order["begin"] = begin = self._box.ask("begun", order)
        with source.open("rb") as file:
            file.seek(begin)
            self._box.ask("put", order, send=iter(lambda: file.read(CHUNK_BYTES), b""))
        return True

    def get(self, key: str, target: Path) -> bool:
        digest = self._hash_of(key)
        if digest is None:
            raise MissingArtifact(f"There is no {key} on the box. hotlap volume ls shows what there is.")
        if target.is_file() and durable.sha256_file(target) == digest:
            return False
        part, begin = begun(target, digest)
        self._box.ask("get", {"key": key, "begin": begin}, take=lambda chunk: durable.disk.append(part, chunk))
        finish(part, target, digest, f"{key} of the box")
        return True

    def _hash_of(self, key: str) -> str | None:
        return self._box.ask("hash", {"key": key})

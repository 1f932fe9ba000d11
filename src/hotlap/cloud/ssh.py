"""A box of one's own, reached by `ssh`: rented out as if it were a provider's, with the same worker, TTL and proof.

hotlap is installed there (`ssh.python` in cloud.toml names the interpreter that has it), and each request is one `ssh`
that runs `hotlap.cloud.far`. Whoever may log in may list, judge and end what runs there.
"""

import contextlib
import json
import shlex
import subprocess
import threading
from dataclasses import replace
from typing import Any

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
from hotlap.config_cloud import SshConfig
from hotlap.errors import AmbiguousCreate, ConfigError, NotCreated, ProviderFailed

TRAITS = replace(local.TRAITS, name="ssh", proof_s=60.0, poll_s=1.0, provisioning_s=60.0)
"""As on this machine, but slower: a listing waits for whatever is being made there, so what is missing from it does
not exist, and the folder is removed by whoever saw that the whole process tree is reaped."""

_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
_PATIENCE_S = 60.0
"""For one request, `ssh` to answer; ending a machine waits until it is reaped."""


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
            return _machine(self._ask("create", order))
        except _NotGreeted as error:
            raise NotCreated(f"{error} Nothing was made.") from None
        except NotCreated:
            raise
        except ProviderFailed as error:
            raise AmbiguousCreate(f"The answer to the create of {tags.name} was lost: {error}") from None

    def machines(self) -> Listing:
        return _listing(self._ask("machines", {}))

    def terminate(self, machine_id: str) -> bool:
        return bool(self._ask("terminate", {"machine_id": machine_id}))

    def logs(self, machine_id: str, cursor: str = "") -> LogPage:
        page = self._ask("logs", {"machine_id": machine_id, "cursor": cursor})
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

    def _ask(self, what: str, order: dict[str, Any]) -> Any:
        process = subprocess.Popen(
            self._command(what), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        watch = threading.Timer(self._patience_s, process.kill)
        watch.start()
        try:
            assert process.stdin and process.stdout
            greeting = process.stdout.readline()
            if not greeting.endswith("\n"):
                raise _NotGreeted(self._trouble(process))
            self._box = _parsed(greeting, self._host, _NotGreeted)
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(order) + "\n")
                process.stdin.flush()
            line = process.stdout.readline()
            if not line.endswith("\n"):
                raise ProviderFailed(self._trouble(process))
            return _answer_in(_parsed(line, self._host, ProviderFailed))
        finally:
            watch.cancel()
            process.kill()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
            process.wait()

    def _trouble(self, process: "subprocess.Popen[str]") -> str:
        """What went wrong, in `ssh`'s own last words."""
        assert process.stderr
        said = process.stderr.read().strip().splitlines()
        words = said[-1][:200] if said else f"no answer within {self._patience_s:.0f} s"
        python = self._settings.python
        return (
            f"The box {self._host} does not do as asked: {words}. Try: ssh {self._host} {python} -m hotlap --version; "
            f"hotlap must be installed there, and ssh must ask for no password. ssh.python in cloud.toml names its "
            f"interpreter."
        )


def _parsed(line: str, host: str, trouble: type[ProviderFailed]) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise trouble(f"{host} says {line[:80]!r}. A login there must print nothing: correct its shell's start-up.")
    return value


def _answer_in(tree: dict[str, Any]) -> Any:
    if "error" not in tree:
        return tree["is"]
    if tree["error"] == "ListingBroken":
        raise ListingBroken(tree["message"], _listing(tree["seen"]))
    kind = NotCreated if tree["error"] == "NotCreated" else ProviderFailed
    raise kind(str(tree["message"]))


def _machine(facts: dict[str, Any]) -> Machine:
    row: dict[str, Any] = dict(facts)
    row["problems"] = tuple(row["problems"])
    return Machine(**row)


def _listing(facts: dict[str, Any]) -> Listing:
    return Listing(float(facts["now_s"]), tuple(_machine(each) for each in facts["machines"]))

"""The box's end of the `ssh` provider: its machines, made, listed, ended and read for one order that comes by a line,
and files of the login's home.

    python -m hotlap.cloud.far create|machines|terminate|logs|files|hash|get|begun|put

It greets with a line of JSON about this box and then waits for the order, so whoever has no greeting has sent nothing.
The answer is a line of JSON too. A file's bytes follow the order, or the answer. From its greeting to its answer a
create keeps listings waiting: one that was cut off from whoever ordered it is over, one way or the other, when the next
listing is read. A machine is one of the local provider's, in a folder of its own, with a guardian that ends it at its
time, whatever becomes of the connection.
"""

import contextlib
import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable, Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hotlap
from hotlap import durable
from hotlap.cloud import boot
from hotlap.cloud.local import LocalProvider
from hotlap.cloud.provider import Listing, ListingBroken, Offer, Start, Tags
from hotlap.cloud.volume import CHUNK_BYTES, FolderVolume, begun, finish
from hotlap.config import hotlap_home
from hotlap.errors import HotlapError, ProviderFailed

Order = dict[str, Any]

_ORDER_S = 20
"""How long an order may take to come after the greeting: a connection can break without a word."""


def greeting() -> dict[str, str]:
    """What the other end must know of this box to write a job for it."""
    home = str(Path.home())
    return {"hotlap": hotlap.__version__, "python": sys.executable, "boot": boot.__file__, "home": home}


def _create(provider: LocalProvider, order: Order) -> Any:
    start = Start(tuple(order["argv"]), env=order["env"], secret_refs=order["secret_refs"])
    return asdict(provider.create(Offer(**order["offer"]), Tags(**order["tags"]), start))


def _list(provider: LocalProvider, _order: Order) -> Any:
    return _listed(provider.machines())


def _terminate(provider: LocalProvider, order: Order) -> Any:
    return provider.terminate(order["machine_id"])


def _logs(provider: LocalProvider, order: Order) -> Any:
    return asdict(provider.logs(order["machine_id"], order["cursor"]))


def _files(_provider: LocalProvider, order: Order) -> Any:
    return [asdict(item) for item in _home().ls(order["prefix"])]


def _hash(_provider: LocalProvider, order: Order) -> Any:
    path = _home().place(order["key"])
    return durable.sha256_file(path) if path.is_file() else None


def _get(_provider: LocalProvider, order: Order) -> Any:
    return _home().place(order["key"]).stat().st_size


def _send_file(order: Order) -> None:
    with _home().place(order["key"]).open("rb") as file:
        file.seek(order["begin"])
        while chunk := file.read(CHUNK_BYTES):
            sys.stdout.buffer.write(chunk)


def _begun(_provider: LocalProvider, order: Order) -> Any:
    return begun(_home().place(order["key"]), order["sha256"])[1]


def _put(_provider: LocalProvider, order: Order) -> Any:
    path = _home().place(order["key"])
    part, num_here = begun(path, order["sha256"])
    left = max(0, order["num_bytes"] - num_here)
    if num_here != order["begin"]:
        raise ProviderFailed(f"Somebody else brings {order['key']} just now. Run the same command again.")
    while left and (chunk := sys.stdin.buffer.read(min(left, CHUNK_BYTES))):
        durable.disk.append(part, chunk)
        left -= len(chunk)
    finish(part, path, order["sha256"], str(path))
    return order["num_bytes"]


def _home() -> FolderVolume:
    return FolderVolume(Path.home())


_ACTS: dict[str, Callable[[LocalProvider, Order], Any]] = {
    "create": _create,
    "machines": _list,
    "terminate": _terminate,
    "logs": _logs,
    "files": _files,
    "hash": _hash,
    "get": _get,
    "begun": _begun,
    "put": _put,
}


def _listed(listing: Listing) -> dict[str, Any]:
    return asdict(listing)


@contextlib.contextmanager
def _in_turn(what: str) -> Generator[None]:
    kind = {"create": fcntl.LOCK_EX, "machines": fcntl.LOCK_SH}.get(what)
    if kind is None:
        yield
        return
    path = hotlap_home() / "rented" / ".turn"
    durable.make_dirs(path.parent)
    with contextlib.suppress(FileExistsError):
        durable.disk.create(path, b"")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)


def main(argv: list[str]) -> None:
    what = argv[0]
    with _in_turn(what):
        print(json.dumps(greeting()), flush=True)
        signal.alarm(_ORDER_S)
        line = sys.stdin.buffer.readline()
        signal.alarm(0)
        if line.endswith(b"\n"):  # else it was cut off before it was whole, and nothing was ordered
            _answer(what, json.loads(line))


def _answer(what: str, order: Order) -> None:
    provider = LocalProvider(home=hotlap_home() / "rented")
    answer: dict[str, Any]
    try:
        answer = {"is": _ACTS[what](provider, order)}
    except ListingBroken as error:
        answer = {"error": "ListingBroken", "message": str(error), "seen": _listed(error.seen)}
    except HotlapError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more; the machine's folder tells it all
        print(json.dumps(answer), flush=True)
        if what == "get" and "is" in answer:
            _send_file(order)


if __name__ == "__main__":
    main(sys.argv[1:])

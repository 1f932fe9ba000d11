"""The box's end of the `ssh` provider: its machines, made, listed, ended and read for one order that comes by a line.

    python -m hotlap.cloud.far create|machines|terminate|logs

It greets with a line of JSON about this box and then waits for the order, so whoever has no greeting has sent nothing.
The answer is a line of JSON too. From its greeting to its answer a create keeps listings waiting: one that was cut off
from whoever ordered it is over, one way or the other, when the next listing is read. A machine is one of the local
provider's, in a folder of its own, with a guardian that ends it at its time, whatever becomes of the connection.
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
from hotlap.config import hotlap_home
from hotlap.errors import HotlapError

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


_ACTS: dict[str, Callable[[LocalProvider, Order], Any]] = {
    "create": _create,
    "machines": _list,
    "terminate": _terminate,
    "logs": _logs,
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
        line = sys.stdin.readline()
        signal.alarm(0)
        if line.endswith("\n"):  # else it was cut off before it was whole, and nothing was ordered
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


if __name__ == "__main__":
    main(sys.argv[1:])

"""The box's end of the `ssh` provider: its machines, made, listed, ended and read for one order that comes by a line.

    python -m hotlap.cloud.far

It greets with a line of JSON about this box and then waits for the order, so whoever has no greeting has sent nothing.
The answer is a line of JSON too. A machine is one of the local provider's, in a folder of its own, with a guardian
that ends it at its time, whatever becomes of the connection.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hotlap
from hotlap.cloud import boot
from hotlap.cloud.local import LocalProvider
from hotlap.cloud.provider import Listing, ListingBroken, Offer, Start, Tags
from hotlap.config import hotlap_home
from hotlap.errors import HotlapError

Order = dict[str, Any]


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


def main() -> None:
    print(json.dumps(greeting()), flush=True)
    line = sys.stdin.readline()
    if not line.endswith("\n"):  # cut off before it was whole, so nothing was ordered
        return
    order = json.loads(line)
    provider = LocalProvider(home=hotlap_home() / "rented")
    answer: dict[str, Any]
    try:
        answer = {"is": _ACTS[order["do"]](provider, order)}
    except ListingBroken as error:
        answer = {"error": "ListingBroken", "message": str(error), "seen": _listed(error.seen)}
    except HotlapError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

"""Launchers in processes of their own, against emulators in another, that kill themselves where they are told to.

`python dying_launcher.py ORDERS`, orders being JSON rows of url, home and point. Each is a fork of this process, which
has imported everything; their exit codes are printed in turn. Time is the emulator's, the death is a real SIGKILL.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from stage import CAP_S, OWNER

from hotlap.cloud import launcher, receipts
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.provider import Offer, Start
from hotlap.cloud.runpod import Runpod
from hotlap.config import CloudConfig

POINTS: dict[str, tuple[type, str, str, int]] = {
    "before the intent": (Ledger, "hold", "before", 1),
    "after the hold": (Ledger, "hold", "after", 1),
    "before the receipt": (receipts.Receipt, "note", "before", 1),
    "after the intent": (receipts.Receipt, "note", "after", 1),
    "before the create": (Runpod, "create", "before", 1),
    "before the id is kept": (Ledger, "note_machine", "before", 1),
    "after the id is kept": (Ledger, "note_machine", "after", 1),
    "while it gets ready": (Runpod, "logs", "after", 2),
    "while it runs": (Runpod, "logs", "after", 15),
    "before the delete": (Runpod, "terminate", "before", 1),
    "after the delete": (Runpod, "terminate", "after", 1),
    "before the settlement": (Ledger, "settle", "before", 1),
    "after the settlement": (Ledger, "settle", "after", 1),
    "before the last receipt": (receipts.Receipt, "settle", "before", 1),
}
"""Class, method, before or after it, and which call of it."""


def die_at(kind: type, method: str, when: str, nth: int) -> None:
    original: Callable[..., Any] = getattr(kind, method)
    num_calls = 0

    def fatal(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == nth and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = original(*args, **kwargs)
        if num_calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(kind, method, fatal)


def main(url: str, home: Path, point: str) -> None:
    control = httpx.Client(base_url=url.removesuffix("/v2"), trust_env=False)

    def now_s() -> float:
        return float(control.get("/_ctl/clock").json())

    def sleep_s(seconds: float) -> None:
        control.post("/_ctl/advance", json={"seconds": seconds})

    if point in POINTS:
        die_at(*POINTS[point])
    provider = Runpod("full-key", url, sleep_s=sleep_s)
    provider._http.headers["x-pid"] = str(os.getpid())
    settings = CloudConfig()
    ledger = Ledger(settings, f"sqlite:///{home / 'ledger.sqlite'}")
    world = launcher.World(now_s=now_s, wall_s=now_s, sleep_s=sleep_s)
    launcher._LONGEST_NAP_S = 5.0
    lead = launcher.Launcher(provider, ledger, settings, OWNER, launcher.Stops(), world)
    env = {"HOTLAP_CAP_S": str(CAP_S + launcher.JOB_MARGIN_S)}
    job = launcher.Job("run", CAP_S, Start(("job",), env, image="img"))
    lead.launch(job, [Offer("runpod", "NVIDIA L40S", None, 860_000, cloud="SECURE")])


def fork(url: str, home: str, point: str) -> int:
    pid = os.fork()
    if pid == 0:
        os.environ["HOTLAP_HOME"] = home
        try:
            main(url, Path(home), point)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    for order in json.loads(sys.argv[1]):
        print(fork(*order), flush=True)

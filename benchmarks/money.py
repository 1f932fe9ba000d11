"""What safety costs: a hold beside a bare synced insert and in a full book, a sweep of 1,000 machines, a local launch.

`python -m benchmarks.money`. Prints one JSON object. What is compared is measured in turns, in the same run.
"""

import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from money import NOON_S, make_lease

from benchmarks import spread
from hotlap.cloud import launcher, local, rental
from hotlap.cloud.ledger import _LEASES, Ledger
from hotlap.cloud.proof import Patience
from hotlap.cloud.provider import Start
from hotlap.cloud.reaper import Reaper
from hotlap.config_cloud import BudgetConfig, CloudConfig, LimitsConfig

ROUNDS, BATCH = 15, 20
RICH = CloudConfig(
    limits=LimitsConfig(max_live_machines=100_000),
    budget=BudgetConfig(gpu_minutes_per_day=1e9, usd_per_day=1e9, gpu_minutes_per_run=1e9, usd_per_run=1e9),
)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        os.environ["HOTLAP_HOME"] = name
        report = {
            "hold": holds(home),
            "sweep of 1000 machines on 10 pages": sweep(),
            "local launch": launch(home),
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),
        }
    print(json.dumps(report, indent=1))


def holds(home: Path) -> dict[str, object]:
    """Milliseconds of each act, in turns: of every round the median."""
    bare = sqlite3.connect(home / "bare.sqlite", isolation_level=None)
    for pragma in ("journal_mode=WAL", "synchronous=FULL"):
        bare.execute(f"PRAGMA {pragma}")
    bare.execute("CREATE TABLE rows (a TEXT, b INTEGER, c TEXT)")
    books = {rows: book(home, rows) for rows in (100, 100_000)}
    numbers = iter(range(10**9))

    def insert() -> None:
        bare.execute("BEGIN IMMEDIATE")
        bare.execute("INSERT INTO rows VALUES (?, ?, ?)", (str(next(numbers)), 1, "x" * 200))
        bare.execute("COMMIT")

    def hold(rows: int) -> Callable[[], None]:
        def once() -> None:
            lease_id = f"n{next(numbers)}"
            opened.append((rows, lease_id))
            books[rows].hold(make_lease(lease_id))

        return once

    opened: list[tuple[int, str]] = []
    acts = {"bare insert": insert, "hold at 100": hold(100), "hold at 100,000": hold(100_000)}
    times: dict[str, list[float]] = {name: [] for name in acts}
    for round_number in range(ROUNDS + 1):
        batch: dict[str, list[float]] = {name: [] for name in acts}
        for _ in range(BATCH):
            for name, act in acts.items():
                batch[name].append(timed(act))
                for rows, lease_id in opened:  # not timed; a few machines live at a time, not hundreds
                    books[rows].settle(lease_id, NOON_S + 1)
                opened.clear()
        if round_number:
            for name, values in batch.items():
                times[name].append(statistics.median(values))
    base, small, large = times.values()
    return {
        **{f"{name} ms": spread([value * 1e3 for value in values]) for name, values in times.items()},
        "hold over bare insert": spread([a / b for a, b in zip(small, base, strict=True)]),
        "at 100,000 rows over at 100": spread([a / b for a, b in zip(large, small, strict=True)]),
    }


def book(home: Path, num_rows: int) -> Ledger:
    """A ledger with so many settled leases of one day."""
    ledger = Ledger(RICH, f"sqlite:///{home / f'{num_rows}.sqlite'}")
    rows = [
        {**vars(make_lease(f"old{n}")), "day": "2027-01-15", "state": "settled", "ended_s": NOON_S}
        for n in range(num_rows)
    ]

    def fill(db: Any, _is_again: bool) -> None:
        for start in range(0, num_rows, 10_000):
            db.execute(_LEASES.insert(), rows[start : start + 10_000])

    ledger._write(fill)
    return ledger


def sweep() -> dict[str, object]:
    """Seconds of a pass that finds nothing doomed, over HTTP, ten pages of a hundred."""
    from hotlap.cloud.provider import Tags
    from hotlap.cloud.runpod import Runpod
    from hotlap.testing.containers import silent
    from hotlap.testing.fake_clock import FakeClock
    from hotlap.testing.fake_runpod import FakeRunpod
    from hotlap.testing.faults import Active

    clock = FakeClock()
    with FakeRunpod(clock, runtime=silent, per_minute=100_000) as cloud:
        for number in range(1000):
            tags = Tags(f"{number:016x}", "me", "n", int(clock.now_s()) + 3600)
            body = {"name": tags.name, "image": "i", "gpu": {"id": "NVIDIA L40S"}, "env": tags.env, "disk": 20}
            cloud.park.create(body, clock.now_s(), 0.86, Active([]))
        clock.sleep_s(60.0)
        ledger = Ledger(RICH)
        reaper = Reaper(Runpod("full-key", cloud.url, sleep_s=clock.sleep_s), ledger, RICH, "me")
        times: list[float] = []
        for _ in range(6):
            began_s = time.perf_counter()
            report = reaper.reap(Patience(1.0, clock.now_s, clock.sleep_s))
            times.append(time.perf_counter() - began_s)
            assert report.is_clean and report.doomed == [], report.failure
        pages = len(cloud.calls("GET /v2/pods")) / 6
    return {"seconds": spread(times[1:]), "pages": pages}


def launch(home: Path) -> dict[str, object]:
    """Seconds from before the hold until after the settlement, of a job that does nothing, less the job alone."""
    settings = CloudConfig()
    ledger = Ledger(RICH)
    provider = local.LocalProvider(home=home)
    argv = (sys.executable, "-S", "-I", rental.boot.__file__, sys.executable, "-c", "pass")
    job_alone = [sys.executable, "-c", "pass"]
    times: list[float] = []
    for number in range(9):
        alone_s = timed(lambda: subprocess.run(job_alone, check=True))
        job = launcher.Job(f"bench-{number}", 60.0, Start(argv, {"HOTLAP_CAP_S": "60"}))
        lead = launcher.Launcher(provider, ledger, settings, "me", launcher.Stops(), launcher.World())
        began_s = time.perf_counter()
        end = lead.launch(job, provider.offers())
        took_s = time.perf_counter() - began_s
        assert end.end is not None and end.end.kind == "result"
        if number:
            times.append(took_s - alone_s)
    return {"seconds added": spread(times)}


def timed(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()

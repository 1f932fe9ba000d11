"""Seeded fault schedules against the emulator: no orphan, no double create, and the meter never ahead of the ledger.

`python -m benchmarks.faults --schedules 500`. Prints one JSON object; exits 1 if any schedule ended badly.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from schedules import draw, play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    options = parser.parse_args()
    began_s = time.monotonic()
    endings, kinds = Counter[str](), Counter[str]()
    wrong: list[dict[str, object]] = []
    cost = charged = num_requests = 0
    for seed in range(options.seed, options.seed + options.schedules):
        home = Path(tempfile.mkdtemp(prefix="hotlap-faults-"))
        os.environ["HOTLAP_HOME"] = str(home)
        outcome = play(draw(seed), home)
        shutil.rmtree(home)
        endings[outcome.ending] += 1
        kinds.update(fault.kind for fault in outcome.schedule.faults)
        cost, charged = cost + outcome.cost_usd_micros, charged + outcome.charged_usd_micros
        num_requests += outcome.num_requests
        if outcome.wrong:
            wrong.append({"seed": seed, "ending": outcome.ending, "wrong": outcome.wrong})
            print(json.dumps(wrong[-1]), file=sys.stderr)
    report = {
        "schedules": options.schedules,
        "wrong": wrong,
        "endings": dict(endings.most_common()),
        "faults": dict(kinds.most_common()),
        "cost_usd": round(cost / 1e6, 4),
        "charged_usd": round(charged / 1e6, 4),
        "requests": num_requests,
        "wall_s": round(time.monotonic() - began_s, 1),
    }
    print(json.dumps(report, indent=1))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

"""How long `hotlap --help` takes, beside the interpreter alone and beside click alone, interleaved.

`python -m benchmarks.startup`. Prints one JSON object: medians, ranges, and the ratio pair by pair.
"""

import json
import os
import subprocess
import sys
import time

from benchmarks import spread

COMMANDS = {
    "hotlap --help": [sys.executable, "-m", "hotlap", "--help"],
    "python -c 'import click'": [sys.executable, "-c", "import click"],
    "python -c pass": [sys.executable, "-c", "pass"],
}
REPEATS = 15


def main() -> None:
    times_s: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for repeat in range(REPEATS + 1):
        for name, argv in COMMANDS.items():
            began_s = time.perf_counter()
            subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
            if repeat:  # the first fills the page cache
                times_s[name].append(time.perf_counter() - began_s)
    ours, theirs = times_s["hotlap --help"], times_s["python -c 'import click'"]
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    print(json.dumps({
        "seconds": {name: spread(values) for name, values in times_s.items()},
        "hotlap over click": spread(ratios), "repeats": REPEATS, "cores": os.cpu_count(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()

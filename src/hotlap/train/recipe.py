"""A contest's recipe: a whole run as one slice of one process, and its adapter as two plain files.

`python -m hotlap.train.recipe CONFIG.json OUTPUT`. The caller is the watchdog and owns the clock.
"""

import json
import os
import sys
from pathlib import Path

from hotlap import clock, durable, runs
from hotlap.config import load_run_json
from hotlap.errors import DONE
from hotlap.train import slice as one_slice
from hotlap.train.channel import events, say
from hotlap.train.context import Context
from hotlap.train.stop import StopSignals
from hotlap.train.timeline import Timeline

_FILES = ("adapter_config.json", "adapter_model.safetensors")


def main() -> int:
    config = load_run_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    started_s = clock.process_started_s()
    stop = StopSignals(config.slice.grace_s)
    stop.install()
    deadline = clock.Deadline(started_s + config.slice.cap_s)
    context = Context(config, deadline, stop, Timeline(started_s), events(), say, draw_seed=lambda: config.seed or 0)
    result = one_slice.run_slice(context)
    say(f"{result['reason']}: {result['message']}; {result['timeline']['phases_s']}")
    if result["exit_code"] == DONE:
        measured = {"num_tokens": result["num_tokens"], "phases_s": result["timeline"]["phases_s"]}
        say(f"measured {json.dumps(measured)}")
        adapter = runs.RunFolder(config.run_folder).adapter
        for name in _FILES:
            durable.write_synced(Path(sys.argv[2]) / name, (adapter / name).read_bytes())
    return result["exit_code"]


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # the interpreter's shutdown would only take time, on the contest's clock

"""One slice, a transaction: lock the run, resume, train until the clock says stop, publish, exit 0 or 75.

`python -m hotlap.train.slice ORDER`, with the order as JSON: `config`, and `deadline_at_s` on the monotonic clock
if the cap began before this process did. Events go to standard output as JSON lines, talk to standard error, and the
last event is the `result` that is also in the run's `slices/NUMBER/result.json`.
"""

import faulthandler
import json
import os
import secrets
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from hotlap import child, clock, durable, guard, runs
from hotlap.config import RunConfig, load_run_json
from hotlap.errors import DONE, SLICE_OVER, HotlapError, RunLocked, StorageFailed
from hotlap.train.channel import events, say
from hotlap.train.context import Context
from hotlap.train.lean import lean_imports
from hotlap.train.preload import importing
from hotlap.train.stop import GivenUp, StopSignals
from hotlap.train.timeline import Timeline

_LOCK_GRACE_S = 30.0
_LAST_RESORT_S = 2.0


def main(argv: list[str] | None = None, draw_seed: Callable[[], int] = lambda: secrets.randbelow(2**31)) -> None:
    """Run the slice that the first argument orders and end the process with its exit code."""
    started_s = clock.process_started_s()
    order = json.loads((argv or sys.argv[1:])[0])
    config = load_run_json(json.dumps(order["config"]))
    deadline = clock.Deadline(order.get("deadline_at_s") or started_s + config.slice.cap_s)
    stop = StopSignals(config.slice.grace_s)
    stop.install()
    child.die_with_parent()
    # The parent is the watchdog. Should it be gone, this ends a hung slice without needing the interpreter.
    faulthandler.dump_traceback_later(deadline.remaining_s() + _LAST_RESORT_S, exit=True)
    context = Context(config, deadline, stop, Timeline(started_s), events(), say, draw_seed)
    result = run_slice(context)
    context.emit(result)
    say(f"hotlap: exit {result['exit_code']} {result['reason']}: {result['message']}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(result["exit_code"])  # nothing is left to do that the interpreter's shutdown would do


def run_slice(context: Context) -> dict[str, Any]:
    """Everything between start and exit. Returns the `result` event; errors of ours become one, a bug does not."""
    run = runs.RunFolder(context.config.run_folder)
    lock = None
    facts: dict[str, Any] = {}
    try:
        if runs.is_finished(run):
            facts["step"] = _require_same_run(run, context)
            ending = "done"
        else:
            guard.require_not_serving()
            lock = runs.acquire(run, context.deadline.remaining_s() + _LOCK_GRACE_S, context.say)
            facts["slice_number"] = lock.number
            ending = _train(run, lock, context, facts)
        code, message = (DONE, "the run is done") if ending == "done" else (SLICE_OVER, "call again to go on")
    except GivenUp:
        code, ending, message = SLICE_OVER, "stopped", "stopped before the first step"
    except clock.OutOfTime as error:
        way_out = "call again to go on, or let hotlap preview prepare the data without a cap"
        code, ending, message = SLICE_OVER, "slice_over", f"the data is not ready: {error}; {way_out}"
    except HotlapError as error:
        code, ending, message = error.exit_code, error.reason, str(error)
    result = {
        "event": "result",
        "run": run.name,
        "exit_code": code,
        "reason": ending,
        "message": message,
        **facts,
        "ended_at_s": clock.wall_s(),
        "timeline": context.timeline.as_json(),
    }
    if lock is not None and ending != RunLocked.reason:
        _release(lock, result, context.say)
    return result


def _release(lock: runs.RunLock, result: dict[str, Any], say: Callable[[str], None]) -> None:
    """A volume that takes no account must not hide how the slice ended."""
    try:
        lock.release(result)
    except StorageFailed as error:
        say(f"The slice's account is not kept. {error}")


def _require_same_run(run: runs.RunFolder, context: Context) -> int:
    """A finished run is not trained again, but other settings are refused as at any time. Returns its last step."""
    from hotlap.train.opening import open_run

    open_run(run, context, lambda: None)
    return durable.read_manifest(run.adapter)["facts"]["step"]


def _train(run: runs.RunFolder, lock: runs.RunLock, context: Context, facts: dict[str, Any]) -> str:
    """The ending's reason word; what the slice did goes into `facts`, also when it fails."""
    with context.stop.may_give_up():
        with context.timeline.phase("data"):
            from hotlap.train.opening import open_run

            if context.config.techniques.overlap:
                context.preload.start()
            opened = open_run(run, context, lock.require)
        with context.timeline.phase("imports"):
            context.preload.finish()
            with importing(), lean_imports() if _is_lean(context.config) else nullcontext():
                from hotlap.train.loop import Loop
    loop = Loop(run, lock, opened, context)
    facts |= {"resumed_at": loop.resumed_at, "num_run_steps": loop.num_steps}
    times = {"deadline_at_s": context.deadline.at_s, "elapsed_s": context.timeline.elapsed_s()}
    context.emit({"event": "start", "run": run.name, "pid": os.getpid(), **facts, **times})
    try:
        return loop.run()
    finally:
        steps_s = context.timeline.as_json()["phases_s"]["steps"]
        facts |= {
            "step": loop.progress.step,
            "best": loop.progress.best,
            "num_tokens": loop.num_tokens,
            "tokens_per_s": round(loop.num_tokens / steps_s, 1) if steps_s else None,
        }


def _is_lean(config: RunConfig) -> bool:
    """Quantized weights need bitsandbytes, and Liger's kernels the compiler."""
    techniques = config.techniques
    return techniques.lean_imports and not techniques.kernels and config.model.quantization is None


if __name__ == "__main__":
    main()

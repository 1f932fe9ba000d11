"""One slice on a machine that was rented for it: `python -m hotlap.cloud.worker ORDER`, after `boot`.

ORDER is JSON: `config`, a run's configuration, and `cap_s`, the slice's longest life. The slice is watched as
everywhere else. Its events go to standard output as machine lines, its talk to standard error, and the last line is
the `result`, whose exit code is also this process's.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from hotlap import clock, supervise
from hotlap.cloud.provider import LINE_PREFIX
from hotlap.config import RunConfig
from hotlap.errors import ConfigError, HotlapError

Emit = Callable[[dict[str, Any]], None]


def main(argv: list[str] | None = None) -> int:
    began_s = clock.process_started_s()
    try:
        config = config_of((argv or sys.argv[1:])[0])
        end = supervise.run_slice(config, emit, say, began_s)
        result = result_of(end)
    except HotlapError as error:
        result = {"exit_code": error.exit_code, "reason": error.reason, "message": str(error)}
    emit({"event": "result", **result})
    return int(result["exit_code"])


def config_of(order: str) -> RunConfig:
    """The run's configuration with its slice cut to the order's cap.

    Raises:
        ConfigError: the order cannot be read.
    """
    try:
        fields = json.loads(order)
        config = RunConfig.model_validate_json(json.dumps(fields["config"]))
        cap_s = min(config.slice.cap_s, float(fields["cap_s"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"The worker's order cannot be read: {error}. Launch with the hotlap of this image."
        ) from None
    if cap_s <= 0.0:
        raise ConfigError(f"The order gives the slice {cap_s:g} s; launch again with a longer TTL.")
    return config.model_copy(update={"slice": config.slice.model_copy(update={"minutes": cap_s / 60.0})})


def result_of(end: supervise.SliceEnd) -> dict[str, Any]:
    """The result: the slice's own account, under the exit code and reason that its parent saw."""
    told = end.result or {}
    code = end.exit_code if end.exit_code >= 0 else 6
    message = told.get("message") or f"The slice gave no account of itself. {end.end.last_words}".strip()
    seen = {"exit_code": code, "reason": end.reason, "message": message}
    return {**told, **seen, "slice_number": end.number, "wall_s": round(end.wall_s, 3)}


def emit(event: dict[str, Any]) -> None:
    try:
        print(LINE_PREFIX + json.dumps(event), flush=True)
    except BrokenPipeError:  # nobody listens any more; the run's files tell it all
        return


def say(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        return


if __name__ == "__main__":
    code = main()
    # Nothing is left to do that the interpreter's shutdown would do.
    os._exit(code)

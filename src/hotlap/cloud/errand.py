"""A command as a rented machine's job: a study's trials, or a verification. `python -m hotlap.cloud.errand ORDER`.

ORDER is JSON: `files`, paths here and their texts, are written first; `argv` is run with this Python in the place of
`python`. What it says is talk, and its last `hotlap: exit CODE REASON: MESSAGE` is the result.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from hotlap import durable
from hotlap.cloud.provider import LINE_PREFIX
from hotlap.cloud.worker import emit
from hotlap.errors import SLICE_OVER, HotlapError

_LAST_WORDS = re.compile(r"hotlap: exit (\d+) (\w+): (.*)")


def main(argv: list[str]) -> int:
    order: dict[str, Any] = json.loads(argv[0])
    # The command hears of its end from boot, as a member of this group, and says how it took it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        for path, text in order["files"].items():
            durable.make_dirs(Path(path).parent)
            durable.replace(Path(path), text.encode())
        result = run([sys.executable if word == "python" else word for word in order["argv"]])
    except HotlapError as error:
        result = {"exit_code": error.exit_code, "reason": error.reason, "message": str(error)}
    emit({"event": "result", **result})
    return int(result["exit_code"])


def run(argv: list[str]) -> dict[str, Any]:
    """Run a command to its end, pass on what it says, and return the result it named."""
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, restore_signals=True
    )
    told: tuple[str, str, str] | None = None
    assert process.stdout is not None
    with process.stdout as stream:
        for raw in stream:
            line = raw.decode(errors="replace").rstrip("\n")
            found = _LAST_WORDS.fullmatch(line)
            told = (found[1], found[2], found[3]) if found else told
            # What a command prints must not pass for a machine's line.
            print(f"| {line}" if line.startswith(LINE_PREFIX) else line, flush=True)
    code = process.wait()
    if told is None or int(told[0]) != code:
        done = code == 0
        message = "" if done else f"The command ended with exit code {code} and no word of its own."
        return {"exit_code": code if code >= 0 else 6, "reason": "done" if done else "crash", "message": message}
    # A verification that was cut goes on where it was, as a slice does.
    reason = "slice_over" if (code, told[1]) == (SLICE_OVER, "stopped") else told[1]
    return {"exit_code": code, "reason": reason, "message": told[2]}


if __name__ == "__main__":
    code = main(sys.argv[1:])
    os._exit(code)

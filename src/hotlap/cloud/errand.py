"""A command as a rented machine's job: a study's trials, or a verification. `python -m hotlap.cloud.errand ORDER`.

ORDER is JSON: `files`, paths here and their texts, are written first; `argv` is run with this Python in the place of
`python`. What it says is talk, and its last `hotlap: exit CODE REASON: MESSAGE` is the result.

Where no volume keeps anything the order has more: `home`, a folder to be made, in which all this happens; `bundle`,
files for it; and `brings`, patterns of the files that are wanted back. They are sent as they come to be, so that what a
machine did before it was lost is not lost with it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotlap import durable
from hotlap.cloud import bundle
from hotlap.cloud.provider import LINE_PREFIX
from hotlap.errors import SLICE_OVER, HotlapError

_BRING_EVERY_S = 15.0
_LAST_WORDS = re.compile(r"hotlap: exit (\d+) (\w+): (.*)")


def main(argv: list[str]) -> int:
    order: dict[str, Any] = json.loads(argv[0])
    # The command hears of its end from boot, as a member of this group, and says how it took it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        if "home" in order:
            _move_into(Path(order["home"]).absolute())
        bundle.write(Path(), bundle.unpacked(order["bundle"]) if "bundle" in order else {})
        bundle.write(Path(), {path: text.encode() for path, text in order["files"].items()})
        with _Bringing(order.get("brings", ())):
            result = run([sys.executable if word == "python" else word for word in order["argv"]])
    except HotlapError as error:
        result = {"exit_code": error.exit_code, "reason": error.reason, "message": str(error)}
    _emit({"event": "result", **result})
    return int(result["exit_code"])


def _move_into(folder: Path) -> None:
    durable.make_dirs(folder)
    os.chdir(folder)
    os.environ["HOTLAP_HOME"] = str(folder / ".hotlap" / "home")


class _Bringing:
    """While it lasts, and once more at its end, files that are new or changed go out among this machine's lines."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns, self._sent = patterns, bundle.read(Path(), patterns)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> None:
        if self._patterns:
            self._thread.start()

    def __exit__(self, *_error: object) -> None:
        if self._patterns:
            self._is_over.set()
            self._thread.join()
            self._send()

    def _follow(self) -> None:
        while not self._is_over.wait(_BRING_EVERY_S):
            self._send()

    def _send(self) -> None:
        try:
            files = bundle.read(Path(), self._patterns)
        except OSError:  # one went while it was read; it is read again
            return
        changed = {name: data for name, data in files.items() if self._sent.get(name) != data}
        self._sent |= changed
        for event in bundle.events(changed) if changed else ():
            _emit(event)


def _emit(event: dict[str, Any]) -> None:
    _say(LINE_PREFIX + json.dumps(event))


def _say(line: str) -> None:
    """In one piece, for two threads speak."""
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # nobody listens any more; the files tell it all
        return


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
            _say(f"| {line}" if line.startswith(LINE_PREFIX) else line)
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

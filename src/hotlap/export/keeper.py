"""Keep a server no longer than the `hotlap serve` that wants it.

`python -m hotlap.export.keeper PARENT GRACE_S COMMAND...`. A process that is killed outright cannot end its child, and
a server does not always end when it is asked: vLLM does not listen while it starts. So this process stands between the
two, in one group with the server and all that it starts. Asked to end, or left by PARENT (which Linux tells it), it
asks the server, and after GRACE_S kills the group.
"""

import contextlib
import os
import signal
import subprocess
import sys
from types import FrameType

from hotlap import child

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: list[str]) -> int:
    """The server's exit code; a signal that ended it ends this process too."""
    parent, grace_s, command = int(argv[0]), float(argv[1]), argv[2:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)  # until there is a server to pass them on to
    child.die_with_parent(parent)
    server = subprocess.Popen([sys.executable, "-m", "hotlap.tether", str(os.getpid()), *command])
    was_asked = False

    def ask(_number: int, _frame: FrameType | None) -> None:
        nonlocal was_asked
        if not was_asked:
            was_asked = True
            server.terminate()
            signal.setitimer(signal.ITIMER_REAL, grace_s)

    signal.signal(signal.SIGALRM, lambda _number, _frame: child.kill_group(os.getpid()))
    for number in _STOPS:
        signal.signal(number, ask)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    code = server.wait()
    if was_asked:
        child.kill_group(os.getpid())  # whatever the server has started
    if code < 0:
        with contextlib.suppress(OSError):  # of SIGKILL, which cannot be handled
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

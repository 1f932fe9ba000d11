"""Run a command that ends with the process that watches it: `python -m hotlap.tether PARENT COMMAND...`.

Who is killed outright cannot end its children, and a trial that is left over would disturb the next study's, a server
keep its port. So Linux is asked to end this process with its parent, and then it becomes the command, with no signal
held back from it. Elsewhere it only becomes it.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with(parent: int, number: int) -> None:
    """From now on this process receives the signal when its parent dies; at once, if that died in between."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        signal.raise_signal(number)


def main(argv: list[str]) -> None:
    parent, command = int(argv[0]), argv[1:]
    end_with(parent, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])

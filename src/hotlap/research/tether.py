"""Run a trial that ends with the study that watches it: `python -m hotlap.research.tether PARENT COMMAND...`.

A study killed outright cannot end its trials, and one that is left over would disturb the trials of the next start.
So Linux is asked to end this process with its parent, and then it becomes the trial. Elsewhere it only becomes it.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    parent, command = int(argv[0]), argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)  # it died in between
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])

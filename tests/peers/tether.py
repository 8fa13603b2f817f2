"""Runs a command that the kernel kills when its parent dies: `python tether.py java -cp ...`.

A test run that is killed cannot clean up, and a broker left behind would hold ports and memory for ever.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> None:
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    if os.getppid() != parent:
        sys.exit("the parent died before its child was tethered")
    os.execvp(command[0], command)  # noqa: S606 - replacing this process is the point


if __name__ == "__main__":
    main(sys.argv[1:])

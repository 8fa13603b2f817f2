"""Runs a program, as `nobody` if this is root, that the kernel kills when its parent dies. PostgreSQL refuses root.

A script of its own with the standard library alone: `nobody` may not be able to read anything but the program.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> None:
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.setgroups([])
        os.setgid(nobody.pw_gid)
        os.setuid(nobody.pw_uid)
    # After the change of user, which would undo it.
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    if os.getppid() != parent:
        sys.exit("the parent died before its child was tethered")
    os.execv(command[0], command)  # noqa: S606 - replacing this process is the point


if __name__ == "__main__":
    main(sys.argv[1:])

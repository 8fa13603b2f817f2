"""Becomes the nats-server, and leaves a small watcher behind that ends the server when its owner is gone.

`keylane.server.process` runs this file as a script with a bare Python (no site, no import of keylane), so that it costs
some ten milliseconds. It forks once, then execs nats-server in its place:

    owner ── nats-server (the owner's own child: its pid, signals and exit status are the real ones)
               └─ watcher (waits at the read end of a pipe whose write end only the owner holds)

When the owner ends in any way, SIGKILL included, the kernel closes the pipe; the watcher wakes, sends the
server SIGTERM, then SIGKILL, and removes the store directory if it was a temporary one.

The server cannot outlive its watcher either: it holds the read end of a second pipe, whose write end only the watcher
holds, and on Linux it has asked the kernel for SIGKILL when that end is closed (F_SETSIG). So whatever is killed first,
no server is left behind.

PR_SET_PDEATHSIG does not work: it fires when the *thread* that started the child ends, so a server started from a
worker thread would die while it is in use. The pipe alone does not work either: a child that the owner forked without
exec (multiprocessing) holds a copy of the write end and keeps the pipe open. So once a second the watcher also checks
whether the server still belongs to the owner. Before it signals, the watcher checks that the server is still its own
parent, so that it does not hit another process that got the server's old pid.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import time

DISMISSED = b"."
_PRIVATE = 0o077  # only the server's user may read what it stores
_LOOK_EVERY_S = 1.0
_TERM_GRACE_S = 3.0
_KILL_GRACE_S = 5.0
_STEP_S = 0.02


def become_server(pipe_fd: int, lock_fd: int, owner_pid: int, doomed_dir: str, command: list[str]) -> None:
    """Write our pid into the lock file, leave the watcher, and turn into `command`.

    The lock file stays open across exec: the lock lasts exactly as long as the server does.
    """
    server_pid = os.getpid()
    os.umask(_PRIVATE)
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, b"%d\n" % server_pid, 0)
    watcher_ended_fd, watcher_fd = os.pipe()
    if os.fork() == 0:
        os.close(lock_fd)
        os.close(watcher_ended_fd)
        watch(pipe_fd, server_pid, owner_pid, doomed_dir)
        os._exit(0)
    os.close(pipe_fd)
    os.close(watcher_fd)
    end_with_watcher(watcher_ended_fd, server_pid)
    os.set_inheritable(lock_fd, True)
    os.execv(command[0], command)  # noqa: S606 - no shell wanted


def end_with_watcher(watcher_ended_fd: int, server_pid: int) -> None:
    """Let the kernel kill this process, even after exec, when the write end of the pipe is closed."""
    if not hasattr(fcntl, "F_SETSIG"):  # Linux has it, other systems do not
        return
    os.set_inheritable(watcher_ended_fd, True)
    fcntl.fcntl(watcher_ended_fd, fcntl.F_SETOWN, server_pid)
    fcntl.fcntl(watcher_ended_fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(watcher_ended_fd, fcntl.F_SETFL, fcntl.fcntl(watcher_ended_fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([watcher_ended_fd], [], [], 0)[0]:  # it ended before we asked
        os.kill(server_pid, signal.SIGKILL)


def watch(pipe_fd: int, server_pid: int, owner_pid: int, doomed_dir: str) -> None:
    """Wait until the owner dismisses us or is gone; in the second case end the server."""
    while True:
        readable, _, _ = select.select([pipe_fd], [], [], _LOOK_EVERY_S)
        if readable:
            if os.read(pipe_fd, 1) == DISMISSED:
                return
            break
        if os.getppid() == server_pid and parent_of(server_pid) not in {owner_pid, None}:
            break
    end_server(server_pid)
    if doomed_dir:
        import shutil  # noqa: PLC0415 - only the rare path pays for it

        shutil.rmtree(doomed_dir, ignore_errors=True)


def parent_of(pid: int) -> int | None:
    """Return the parent of `pid`, or None if the system does not report it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[1])
    except OSError:
        return None


def end_server(server_pid: int) -> None:
    """SIGTERM, then SIGKILL; returns when the server is gone or both graces have passed."""
    for signal_number, grace_s in ((signal.SIGTERM, _TERM_GRACE_S), (signal.SIGKILL, _KILL_GRACE_S)):
        deadline = time.monotonic() + grace_s
        if os.getppid() == server_pid:
            os.kill(server_pid, signal_number)
        while os.getppid() == server_pid and time.monotonic() < deadline:
            time.sleep(_STEP_S)


if __name__ == "__main__":
    become_server(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])

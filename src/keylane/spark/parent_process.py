"""Whether the JVM that this process works for still runs, and still waits for it.

Spark runs a query's driver-side Python in a child process and talks to it over a socket. A JVM that is killed, or a
query that is stopped while Python works, tells the child nothing: it would run for ever.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from types import FrameType

_LONGEST_END_S = 15


class ParentProcess:
    """The process that started this one, and its end of the socket where there is one. A check costs two system calls.

    Outside Spark's workers only the parent counts.
    """

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._socket = _socket_to_spark()

    def __repr__(self) -> str:
        return f"<ParentProcess {self._parent} {'gone' if self.is_gone() else 'there'}>"

    def is_gone(self) -> bool:
        return os.getppid() != self._parent or (self._socket is not None and _is_closed(self._socket))


def end_properly(end: Callable[[], None]) -> None:
    """Let SIGTERM, with which Spark ends the child of a query that is over, run `finally` blocks first, and then `end`.

    Spark calls the reader's `stop()` in such a block; without this, only when the JVM is gone. SIGTERM may also come
    while `stop()` runs already, because Spark has closed the socket before: so `end` is called once more before the
    process exits. Works in the main thread of Spark's own child process; elsewhere, and where the program has its own
    handler, nothing changes.
    """
    if (
        _spark_peer() is not None
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, _exit)
        atexit.register(end)


def _exit(number: int, _: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Spark sends it twice, a few milliseconds apart
    signal.alarm(_LONGEST_END_S)  # the default action of that signal ends the process, whatever it waits for
    sys.exit(128 + number)


def _is_closed(link: socket.socket) -> bool:
    """Whether the other side closed it; what it sent stays to be read."""
    try:
        return link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _socket_to_spark() -> socket.socket | None:
    """A second handle of the socket over which Spark calls this process, or None outside of Spark's workers."""
    peer = _spark_peer()
    if peer is None:
        return None
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):  # the listing's own handle is gone, and others may go meanwhile
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                link = socket.socket(fileno=os.dup(int(name)))
                if _peer_of(link) == peer:
                    return link  # left as it is: both handles share the flag that makes a socket not block
                link.close()
    return None


def _peer_of(link: socket.socket) -> str | None:
    """The port on this machine, or the path, of the other side."""
    try:
        name = link.getpeername()
    except OSError:
        return None
    if not isinstance(name, tuple):
        return str(name)
    return str(name[1]) if ip_address(name[0]).is_loopback else None


def _spark_peer() -> str | None:
    """The path or port at which Spark awaits its child, or None outside of Spark's children."""
    return os.environ.get("PYTHON_WORKER_FACTORY_SOCK_PATH") or os.environ.get("PYTHON_WORKER_FACTORY_PORT") or None

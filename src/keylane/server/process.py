"""One running nats-server process: the lock on its store, its start under guard, its end.

Owns the lock file, the pipe to the watcher (see `watchdog`) and the signals. Knows nothing about ports, health or
configuration.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from keylane.errors import InvalidInput, ServerStartFailed, StoreInUse
from keylane.server import watchdog

LOCK_NAME = "server.lock"
PRIVATE_FILE = 0o600
_KILL_DEADLINE_S = 10.0


class GuardedProcess:
    """A nats-server that cannot outlive this process.

    It inherits `lock_fd`, the held lock on its store; the caller closes its own copy. `doomed_dir` is removed
    if this process goes away without `dismiss_watcher()`.
    """

    def __init__(self, command: list[str], *, lock_fd: int, output: Path, doomed_dir: Path | None) -> None:
        read_fd, self._pipe_fd = os.pipe()
        guard_args = [str(read_fd), str(lock_fd), str(os.getpid()), str(doomed_dir or "")]
        try:
            with open(output, "ab", opener=open_private) as log:
                self._process = subprocess.Popen(  # noqa: S603 - our own guard and a checked binary
                    [sys.executable, "-I", "-S", watchdog.__file__, *guard_args, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(read_fd, lock_fd),
                    start_new_session=True,
                )
        except OSError as error:
            os.close(self._pipe_fd)
            raise ServerStartFailed(f"cannot start {command[0]}: {error}") from error
        finally:
            os.close(read_fd)
        self._dismissed = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """The exit code, or None while the process runs."""
        return self._process.poll()

    def terminate(self, timeout_s: float) -> None:
        """SIGTERM, wait up to `timeout_s`, then SIGKILL."""
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self._process.kill()
        self._process.wait(_KILL_DEADLINE_S)

    def dismiss_watcher(self) -> None:
        """Tell the watcher that nothing is left to guard. Call it after the process has ended."""
        if not self._dismissed:
            self._dismissed = True
            try:
                os.write(self._pipe_fd, watchdog.DISMISSED)
            except BrokenPipeError:
                pass  # the watcher is already gone
            finally:
                os.close(self._pipe_fd)


def open_private(path: str, flags: int) -> int:
    """An `opener` for files that only their user may read: they may contain passwords."""
    fd = os.open(path, flags, PRIVATE_FILE)
    os.fchmod(fd, PRIVATE_FILE)  # the file may exist already
    return fd


def lock_store(store_dir: Path) -> int:
    """Take the lock on a store and return its open file, or raise `StoreInUse` with the process that has it.

    The kernel drops the lock when the last process that has the file open ends, so it is never stale.
    """
    path = store_dir / LOCK_NAME
    try:
        lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidInput(
            f"store directory {str(store_dir)!r} cannot be written ({error.strerror}). "
            "Give a directory that you may write to"
        ) from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock_fd, 32, 0).decode().strip() or "unknown, it is just starting"
        os.close(lock_fd)
        raise StoreInUse(
            f"store directory {str(store_dir)!r} is in use by a running nats-server (pid {holder}). "
            "Stop that server or give another store directory"
        ) from None
    return lock_fd

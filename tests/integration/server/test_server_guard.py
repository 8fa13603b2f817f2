"""No server is left behind: its owner is killed in every nasty way, and the server must go too."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import permutations
from pathlib import Path

import pytest

from keylane.core.run_state import RunState
from keylane.server import NatsServer
from tests.waiter import wait_until

DEADLINE_S = 30.0

# The server is started in a thread that ends at once: a guard tied to the thread would end it too early.
START_IN_A_THREAD = """
import os, sys, threading
from keylane.server import NatsServer
servers = []
thread = threading.Thread(target=lambda: servers.append(NatsServer.start()))
thread.start()
thread.join()
"""
# The forked child has a copy of everything that the owner holds open, and outlives it.
FORK_A_CHILD = "if os.fork() == 0:\n    sys.stdin.read()\n    os._exit(0)\n"
REPORT = "print(servers[0].port, servers[0].pid, servers[0].store_dir, flush=True)\n"
WAIT_FOR_STDIN = "sys.stdin.read()\n"


class Owner:
    """Another Python process that owns a server, and a socket to that server."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        port, pid, store_dir = process.stdout.readline().split()
        self.server_pid, self.store_dir = int(pid), Path(store_dir)
        self.link = socket.create_connection(("127.0.0.1", int(port)), timeout=DEADLINE_S)

    def wait_server_gone(self) -> None:
        """Wait until the link ends; a server that had not yet accepted it resets it, which is as good."""
        with suppress(ConnectionResetError):
            while self.link.recv(4096):
                pass


@contextmanager
def owner(script: str) -> Iterator[Owner]:
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            owned = Owner(process)
            with owned.link:
                yield owned
        finally:
            process.kill()


def is_running(pid: int) -> bool:
    """Whether the process lives (one that ended but was not yet collected by its parent does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    "script",
    [START_IN_A_THREAD + REPORT, START_IN_A_THREAD + FORK_A_CHILD + REPORT],
    ids=["alone", "with a forked child"],
)
def test_no_server_outlives_an_owner_that_is_killed(script: str) -> None:
    with owner(script + WAIT_FOR_STDIN) as owned:
        assert is_running(owned.server_pid)
        os.kill(owned.process.pid, signal.SIGKILL)
        owned.wait_server_gone()
        wait_until(lambda: not is_running(owned.server_pid))
        wait_until(lambda: not owned.store_dir.exists())


def test_no_server_outlives_an_owner_that_ends_without_stop() -> None:
    with owner(START_IN_A_THREAD + REPORT + "sys.stdin.readline()\n") as owned:
        assert owned.process.stdin is not None
        owned.process.stdin.write("end\n")
        owned.process.stdin.flush()
        owned.wait_server_gone()
        wait_until(lambda: not is_running(owned.server_pid))
        wait_until(lambda: not owned.store_dir.exists())
        assert owned.process.wait(DEADLINE_S) == 0


def watcher_of(server_pid: int) -> int:
    (watcher,) = Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text().split()
    return int(watcher)


@pytest.mark.parametrize("order", [*permutations(("owner", "watcher", "server"))], ids="-".join)
@pytest.mark.parametrize("script", [START_IN_A_THREAD, START_IN_A_THREAD + FORK_A_CHILD], ids=["alone", "forked child"])
def test_nothing_is_left_behind_in_whatever_order_they_are_killed(script: str, order: tuple[str, ...]) -> None:
    with owner(script + REPORT + WAIT_FOR_STDIN) as owned:
        pids = {"owner": owned.process.pid, "server": owned.server_pid, "watcher": watcher_of(owned.server_pid)}
        os.kill(pids[order[0]], signal.SIGKILL)
        if order[0] != "server":  # by itself, without the next kill
            owned.wait_server_gone()
            wait_until(lambda: not is_running(pids["server"]))
        for name in order[1:]:
            if is_running(pids[name]):
                os.kill(pids[name], signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, pids.values())))


def test_a_stopped_server_does_not_outlive_its_watcher() -> None:
    with owner(START_IN_A_THREAD + REPORT + WAIT_FOR_STDIN) as owned:
        watcher = watcher_of(owned.server_pid)
        os.kill(owned.server_pid, signal.SIGSTOP)
        os.kill(watcher, signal.SIGKILL)
        wait_until(lambda: not is_running(owned.server_pid))


def test_an_owner_hears_that_its_watcher_was_killed() -> None:
    with NatsServer.start() as server:
        os.kill(watcher_of(server.pid), signal.SIGKILL)
        wait_until(lambda: server.state is RunState.ENDED)
        server.restart()
        assert server.monitor("healthz") == {"status": "ok"}


def test_a_server_that_ignores_sigterm_is_killed_with_its_owner() -> None:
    """A stopped process does not act on SIGTERM: the watcher has to go on to SIGKILL."""
    with owner(START_IN_A_THREAD + REPORT + WAIT_FOR_STDIN) as owned:
        os.kill(owned.server_pid, signal.SIGSTOP)
        os.kill(owned.process.pid, signal.SIGKILL)
        wait_until(lambda: not is_running(owned.server_pid))


def test_a_server_outlives_the_thread_that_started_it() -> None:
    started: list[NatsServer] = []
    thread = threading.Thread(target=lambda: started.append(NatsServer.start()))
    thread.start()
    thread.join(DEADLINE_S)
    with started[0] as server:
        assert server.monitor("healthz") == {"status": "ok"}


def test_stop_leaves_no_watcher_behind() -> None:
    server = NatsServer.start()
    watcher = watcher_of(server.pid)
    assert is_running(watcher)
    server.stop()
    wait_until(lambda: not is_running(watcher))

"""A real PostgreSQL for the tests: from the package pgserver, or from PATH where that has no build.

Only the programs of pgserver are used. Its own way of starting them, as root, adds a user to the machine and opens the
directories above the checkout to everybody; here root runs a copy of the programs as `nobody`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psycopg

from keylane.server.ports import ReservedPort
from tests.peers.presence import PeerBroken, PeerMissing

_TETHER = Path(__file__).with_name("tethered_nobody.py")
_START_S = 40.0
_STOP_S = 10.0
_SETTINGS = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
fsync = off
synchronous_commit = off
full_page_writes = off
max_connections = 200
shared_buffers = 32MB
log_min_messages = fatal
"""


def find_postgres() -> Path:
    """The directory with `bin/postgres` and `bin/initdb`."""
    found = find_spec("pgserver")
    if found is not None and found.origin is not None:
        return Path(found.origin).parent / "pginstall"
    program = shutil.which("postgres")
    if program is not None:
        return Path(program).resolve().parent.parent
    raise PeerMissing("PostgreSQL is missing: install pgserver (pip), or put postgres and initdb on PATH")


@contextmanager
def postgres() -> Iterator[str]:
    """Runs a server for as long as the block lasts; gives `user@host:port`."""
    home = find_postgres()
    with tempfile.TemporaryDirectory(prefix="keylane-pg-", ignore_cleanup_errors=True) as place:
        directory = Path(place)
        if os.geteuid() == 0:
            home = _copy_for_nobody(home, directory)
        data = directory / "data"
        _run(home, ["initdb", "-D", str(data), "-U", "keylane", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"])
        with (data / "postgresql.conf").open("a") as settings:
            settings.write(_SETTINGS)
        reserved = ReservedPort()
        try:
            server = _start(home, data, directory / "log", reserved.number)
            try:
                yield f"keylane@127.0.0.1:{reserved.number}"
            finally:
                _stop(server)
        finally:
            reserved.release()


def _start(home: Path, data: Path, log: Path, port: int) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        command = _as_child(home, ["postgres", "-D", str(data), "-p", str(port)])
        server = subprocess.Popen(command, stdout=output, stderr=output, cwd="/")
    try:
        _wait_until_it_answers(server, port, log)
    except BaseException:
        _stop(server)
        raise
    return server


def _copy_for_nobody(home: Path, directory: Path) -> Path:
    """The checkout may lie where only root can look."""
    nobody = pwd.getpwnam("nobody")
    if home.name == "pginstall":
        packages = home.parent.parent
        for part in ("pgserver/pginstall", "pgserver.libs"):  # the programs look for the libraries beside the package
            if (packages / part).exists():
                leave_out = shutil.ignore_patterns("include")
                shutil.copytree(packages / part, directory / part, symlinks=True, ignore=leave_out)
        home = directory / "pgserver" / "pginstall"
        for path in directory.rglob("*"):
            if not path.is_symlink():
                path.chmod(0o755)
    os.chown(directory, nobody.pw_uid, nobody.pw_gid)
    return home


def _as_child(home: Path, command: list[str]) -> list[str]:
    return [sys.executable, str(_TETHER), str(home / "bin" / command[0]), *command[1:]]


def _run(home: Path, command: list[str]) -> None:
    done = subprocess.run(_as_child(home, command), capture_output=True, text=True, timeout=60, cwd="/", check=False)
    if done.returncode != 0:
        raise PeerBroken(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def _wait_until_it_answers(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + _START_S
    while True:
        try:
            psycopg.connect(f"postgresql://keylane@127.0.0.1:{port}/postgres", connect_timeout=5).close()
        except psycopg.OperationalError as error:
            if server.poll() is not None or time.monotonic() > end:
                raise PeerBroken(f"PostgreSQL did not start: {error}\n{log.read_text()}") from error
            time.sleep(0.05)
        else:
            return


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGINT)  # do not wait for clients
    try:
        server.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()

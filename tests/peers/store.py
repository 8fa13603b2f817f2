"""The directory `.peers/`: things built or fetched once and kept until what they are made from changes.

Owns the keys, the lock between processes and the running of build tools with a deadline.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.peers.presence import PeerBroken

REPOSITORY = Path(__file__).resolve().parents[2]
PEERS = REPOSITORY / ".peers"

Say = Callable[[str], None]


def silent(_line: str) -> None:
    """Says nothing: for callers inside a test."""


def content_key(files: Iterable[Path], *facts: str) -> str:
    """A hash of the files' names and contents and of the given facts."""
    digest = hashlib.sha256()
    for fact in facts:
        digest.update(fact.encode() + b"\0")
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def kept(name: str, key: str, build: Callable[[Path], None]) -> Path:
    """`.peers/<name>` made by `build(directory)`, unless it is already there with the same key.

    A build that fails leaves nothing behind, so the next caller starts clean.
    """
    directory = PEERS / name
    if _has_key(directory, key):
        return directory
    with _lock(name):
        if _has_key(directory, key):
            return directory
        draft = directory.with_name(directory.name + ".draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            build(draft)
            (draft / ".key").write_text(key)
            shutil.rmtree(directory, ignore_errors=True)
            draft.rename(directory)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return directory


def run_tool(
    command: list[str],
    *,
    cwd: Path,
    environ: Mapping[str, str],
    timeout_s: float,
    on_line: Say,
) -> None:
    """Runs a build tool and hands on its output line by line; PeerBroken with the end of it on failure."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    expired = threading.Event()

    def give_up() -> None:
        expired.set()
        process.kill()

    deadline = threading.Timer(timeout_s, give_up)
    deadline.start()
    lines: list[str] = []
    try:
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip())
                on_line(lines[-1])
    finally:
        deadline.cancel()
    if process.returncode != 0:
        why = f"no end after {timeout_s:.0f} s" if expired.is_set() else f"exit code {process.returncode}"
        tail = "\n".join(lines[-20:])
        raise PeerBroken(f"`{' '.join(command)}` failed ({why}):\n{tail}")


def _has_key(directory: Path, key: str) -> bool:
    stored = directory / ".key"
    return stored.is_file() and stored.read_text() == key


@contextmanager
def _lock(name: str) -> Iterator[None]:
    PEERS.mkdir(exist_ok=True)
    flat = name.replace("/", "-")
    with (PEERS / f".{flat}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

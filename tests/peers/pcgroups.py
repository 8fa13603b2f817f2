"""Members of consumer groups written in Go: runs `pcgroups-peer` and reads what it prints.

Owns the processes it starts. Says nothing about groups itself: every answer is the reference library's.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.peers import tether
from tests.peers.presence import PeerBroken

_ANSWER_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message as a Go member saw it; `sequence` is that of the stream it reads."""

    subject: str
    sequence: int
    consumer_sequence: int
    delivered: int
    pin: str
    data: str
    member: str
    time: str


class GoMember:
    """A running `consume`."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self._process = process
        self._errors = errors
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"pcgroups-peer-{process.pid}")
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def take(self, count: int, *, timeout_s: float) -> list[Delivery]:
        """The next `count` messages; PeerBroken where the deadline passes or the member ends before."""
        deadline = time.monotonic() + timeout_s
        taken: list[Delivery] = []
        while len(taken) < count:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise PeerBroken(f"{len(taken)} of {count} messages after {timeout_s} s") from None
            if line is None:
                self._lines.put(None)
                raise PeerBroken(f"the Go member ended after {len(taken)} of {count}: {self._errors.read_text()}")
            taken.append(Delivery(**json.loads(line)))
        return taken

    def wait(self, *, timeout_s: float) -> int:
        """The exit code of a member that ends by itself."""
        return self._process.wait(timeout_s)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that is not enough."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.wait()
        self._reader.join()

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)


class PcgroupsPeer:
    """The program at work on one server.

    >>> peer.ask("filters", members="a,b", max_members=4, member="a")  # doctest: +SKIP
    ['0.>', '1.>']
    """

    def __init__(self, program: Path, url: str, directory: Path) -> None:
        self._program = program
        self._url = url
        self._directory = directory

    def ask(self, subcommand: str, **options: object) -> Any:
        """Runs a subcommand to its end and returns the JSON it printed."""
        try:
            answer = subprocess.run(
                self._command(subcommand, options),
                capture_output=True,
                text=True,
                timeout=_ANSWER_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise PeerBroken(f"pcgroups-peer {subcommand}: no answer after {_ANSWER_TIMEOUT_S} s") from None
        if answer.returncode != 0:
            raise PeerBroken(answer.stderr.strip())
        return json.loads(answer.stdout)

    @contextmanager
    def member(self, name: str, **options: object) -> Iterator[GoMember]:
        """A member that consumes until the block ends."""
        errors = self._directory / f"{name}-{time.monotonic_ns()}.err"
        with errors.open("w") as err:
            process = subprocess.Popen(
                [sys.executable, tether.__file__, *self._command("consume", options | {"member": name})],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
            )
        running = GoMember(process, errors)
        try:
            yield running
        finally:
            running.stop()

    def _command(self, subcommand: str, options: dict[str, object]) -> list[str]:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        return [str(self._program), subcommand, f"--url={self._url}", *flags]

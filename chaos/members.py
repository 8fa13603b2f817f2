"""Member processes, keylane's and the Go reference's: started, watched and ended by whoever makes the trouble.

Each writes its evidence into a file of its own. They are tethered: the kernel ends them with this process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.peers import tether
from tests.peers.go import program
from tests.peers.store import REPOSITORY

Peer = Literal["keylane", "go"]

_READY_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 15.0
_LOOK_EVERY_S = 0.005


class RunBroken(Exception):
    """The run could not be judged: a process died or did not answer."""


@dataclass(frozen=True, slots=True)
class Group:
    """What a member needs to know to join."""

    url: str
    stream: str
    group: str
    kind: Literal["elastic", "static"] = "elastic"


class MemberProcess:
    """One instance of a member."""

    def __init__(
        self, member: str, name: str, process: asyncio.subprocess.Process, evidence: Path, errors: Path
    ) -> None:
        self.member = member
        self.name = name
        """Of this very process: an instance that is started again has another one."""
        self.evidence = evidence
        self.errors = errors
        self._process = process
        self._expected_to_end = False

    def __repr__(self) -> str:
        return f"<MemberProcess {self.name} of {self.member} pid={self._process.pid}>"

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    @property
    def ended_by_itself(self) -> bool:
        return self._process.returncode is not None and not self._expected_to_end

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    @property
    def resident_bytes(self) -> int:
        """How much memory it has now."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    async def ready(self) -> None:
        """Wait until it has joined."""
        async with deadline(_READY_TIMEOUT_S, f"{self!r} did not join"):
            while b"ready\n" not in self.evidence.read_bytes()[:4096]:
                self.check()
                await asyncio.sleep(_LOOK_EVERY_S)

    async def handled_something_after(self, size: int, timeout_s: float) -> None:
        """Wait until its evidence is longer than this."""
        async with deadline(timeout_s, f"{self!r} handled nothing"):
            while self.evidence.stat().st_size <= size:
                self.check()
                await asyncio.sleep(_LOOK_EVERY_S)

    def check(self) -> None:
        """RunBroken if it ended by itself."""
        if self.ended_by_itself:
            raise RunBroken(f"{self!r} ended ({self._process.returncode}): {self.last_words}")

    @property
    def last_words(self) -> str:
        """The end of its log."""
        return self.errors.read_text()[-2000:]

    async def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> bool:
        """SIGTERM, and SIGKILL if that is not enough: then False. Returns when it is gone."""
        self._expected_to_end = True
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            await self.kill()
            return False
        return True

    def freeze(self) -> None:
        """SIGSTOP: it stands still and keeps all it has, its links included."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self._expected_to_end = True
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@dataclass(slots=True)
class Members:
    """All processes of a run; `started` keeps also those that ended, because their evidence counts."""

    group: Group
    directory: Path
    ack_wait_s: float = 0.0
    max_ack_pending: int | None = None
    """None: keylane's default; the Go reference keeps order with one message in flight only, so it gets 1."""
    work_s: float = 0.0
    """How long a message takes to handle."""
    options: tuple[str, ...] = ()
    """More of them for keylane's own worker."""
    program: tuple[str, ...] = ()
    """A command that is started instead of the worker, with the name of the member."""
    started: list[MemberProcess] = field(default_factory=list)

    async def start(self, member: str, peer: Peer = "keylane", name: str | None = None) -> MemberProcess:
        """Start an instance. It may still be on its way to join: see `ready`."""
        name = name or f"{self.group.stream}-{member}-{len(self.started)}"
        evidence, errors = self.directory / f"{name}.evidence", self.directory / f"{name}.errors"
        with evidence.open("wb") as out, errors.open("wb") as err:
            process = await asyncio.create_subprocess_exec(
                sys.executable, tether.__file__, *self._command(member, peer, name),
                stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err, cwd=REPOSITORY,
            )  # fmt: skip
        one = MemberProcess(member, name, process, evidence, errors)
        self.started.append(one)
        return one

    def check(self) -> None:
        for one in self.started:
            one.check()

    async def stop(self) -> None:
        await asyncio.gather(*(one.stop() for one in self.started))

    async def kill(self) -> None:
        await asyncio.gather(*(one.kill() for one in self.started))

    def _command(self, member: str, peer: Peer, name: str) -> Sequence[str]:
        if self.program:
            return [*self.program, "--member", member]
        where = ["--url", self.group.url, "--stream", self.group.stream, "--group", self.group.group]
        pending = self.max_ack_pending if self.max_ack_pending is not None or peer == "keylane" else 1
        how = ["--member", member] + (["--max-ack-pending", str(pending)] if pending is not None else [])
        if peer == "keylane":
            wait = ["--ack-wait", str(self.ack_wait_s), "--work", str(self.work_s), "--instance", name]
            return [sys.executable, "-m", "chaos.worker", *where, *how, *wait, *self.options]
        wait = ["--ack-wait", f"{self.ack_wait_s}s", "--sleep", f"{self.work_s}s"]
        program_path = str(program("pcgroups-peer"))
        return [program_path, "consume", *where, *how, *wait, "--kind", self.group.kind, "--evidence"]


@asynccontextmanager
async def members(
    group: Group,
    directory: Path,
    *,
    ack_wait_s: float = 0.0,
    max_ack_pending: int | None = None,
    work_s: float = 0.0,
    options: Sequence[str] = (),
    program: Sequence[str] = (),
) -> AsyncIterator[Members]:
    """Processes for as long as the block lasts; whatever is still there at its end is killed."""
    running = Members(group, directory, ack_wait_s, max_ack_pending, work_s, tuple(options), tuple(program))
    try:
        yield running
    finally:
        await running.kill()


@asynccontextmanager
async def deadline(timeout_s: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise RunBroken(f"{what} within {timeout_s:.0f} s") from error

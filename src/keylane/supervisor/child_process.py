"""One worker process as its supervisor sees it: its start, what it reports, the end of its output, its own end."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

from keylane.errors import SupervisorFailed
from keylane.supervisor import child

_PROGRAM = f"from {child.__name__} import main; main()"
"""Not `-m`: the module is part of the package that it imports."""
_LAST_LINES = 20
_LONGEST_REPORT = 64 << 20
_CHUNK = 1 << 16

EventReport = Callable[[str, str, dict[str, Any]], None]
"""Name, text, facts."""


class ChildProcess:
    """A running worker process."""

    def __init__(self, process: asyncio.subprocess.Process, control_fd: int, on_event: EventReport) -> None:
        self._process = process
        self._control_fd = control_fd
        self._on_event = on_event
        self._ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self.loaded = asyncio.Event()
        """It has loaded what it needs, or it has ended: `failure` says which."""
        self.ready = asyncio.Event()
        """It is at work, or it has ended."""
        self.ready_at: float | None = None
        self.failure: str | None = None
        """The error that it reported."""
        self.failure_kind = ""
        self.is_failure_transient = False
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        """Of its stderr."""
        self._end: asyncio.Task[int] | None = None

    @classmethod
    async def start(cls, settings: dict[str, Any], stop_timeout_s: float, on_event: EventReport) -> ChildProcess:
        control_read, control_write = os.pipe()
        report_read, report_write = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                _PROGRAM,
                str(control_read),
                str(report_write),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(control_read, report_write),
                start_new_session=True,  # Ctrl-C in a terminal is for the supervisor alone
            )
        except OSError as error:
            os.close(control_write)
            os.close(report_read)
            raise SupervisorFailed(f"cannot start a worker process: {error}") from error
        finally:
            os.close(control_read)
            os.close(report_write)
        self = cls(process, control_write, on_event)
        self._tell({"settings": settings, "stop_timeout_s": stop_timeout_s})
        self._end = asyncio.create_task(self._follow(report_read), name=f"worker process {process.pid}")
        return self

    def __repr__(self) -> str:
        return f"<ChildProcess {self.pid} {'ready' if self.ready_at else 'starting'}>"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._end is not None and not self._end.done()

    @property
    def at_work_s(self) -> float:
        return monotonic() - self.ready_at if self.ready_at is not None else 0.0

    def go(self) -> None:
        """Let it begin its work."""
        self._tell({"do": "go"})

    async def ask(self, what: str, timeout_s: float) -> Any:
        """Its answer, or None if it gives none in time."""
        number = next(self._ids)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._tell({"do": "ask", "what": what, "id": number})
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            return None
        finally:
            self._asked.pop(number, None)

    def terminate(self) -> None:
        """Ask it to drain and end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def wait(self) -> int:
        """Its exit code, when it has ended and all that it wrote is read."""
        assert self._end is not None
        return await asyncio.shield(self._end)

    def reason(self, code: int) -> str:
        """Why it ended, in words."""
        by = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        last = next((line for line in reversed(self.last_lines) if line.strip()), "") if code > 0 else ""
        detail = self.failure or last.strip()
        return f"{by}: {detail}" if detail else by

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _tell(self, message: dict[str, Any]) -> None:
        if self._control_fd < 0:
            return  # it has ended
        with suppress(BrokenPipeError):  # it is ending
            os.write(self._control_fd, json.dumps(message).encode() + b"\n")

    async def _follow(self, report_fd: int) -> int:
        loop = asyncio.get_running_loop()
        reports = asyncio.StreamReader(limit=_LONGEST_REPORT)
        with os.fdopen(report_fd, "rb") as pipe:
            transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reports), pipe)
            try:
                copying = asyncio.create_task(self._copy_stderr())
                reading = asyncio.create_task(self._read_reports(reports))
                code = await self._process.wait()
                # What it started itself may still hold its pipes: a moment for what is on its way, no more.
                _, late = await asyncio.wait({copying, reading}, timeout=1.0)
                for task in late:
                    task.cancel()
            finally:
                transport.close()
                os.close(self._control_fd)
                self._control_fd = -1
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(None)
        self.loaded.set()
        self.ready.set()
        return code

    async def _read_reports(self, reports: asyncio.StreamReader) -> None:
        async for line in reports:
            report = json.loads(line)
            match report["kind"]:
                case child.LOADED:
                    self.loaded.set()
                case child.READY:
                    self.ready_at = self.ready_at or monotonic()
                    self.ready.set()
                    self._on_event(report["name"], report["text"], report["facts"])
                case child.FAILED:
                    self.failure, self.failure_kind = report["text"], report["error"]
                    self.is_failure_transient = report["is_transient"]
                case child.ANSWER:
                    answer = self._asked.get(report["id"])
                    if answer is not None and not answer.done():
                        answer.set_result(report["value"])
                case _:
                    self._on_event(report["name"], report["text"], report["facts"])

    async def _copy_stderr(self) -> None:
        assert self._process.stderr is not None
        rest = b""
        while chunk := await self._process.stderr.read(_CHUNK):
            with suppress(OSError):  # nobody reads it any more
                sys.stderr.buffer.write(chunk)
                sys.stderr.flush()
            *whole, rest = (rest + chunk[-_CHUNK:]).split(b"\n")
            rest = rest[-_CHUNK:]
            self.last_lines.extend(line.decode("utf-8", "replace") for line in whole)
        if rest:
            self.last_lines.append(rest.decode("utf-8", "replace"))

"""What runs in a worker process: `main`, with the numbers of its control pipe and of its report pipe as arguments.

The supervisor writes JSON lines to the control pipe: first the settings, later `go` and requests. The worker reports by
JSON lines on the other. A thread reads the control pipe, so that requests are answered while a handler blocks the event
loop. When the supervisor is gone, however it ended, the kernel closes the pipe: the worker then drains as after
SIGTERM, and ends at the latest when its time to stop is over. No worker outlives its supervisor for longer than that.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from io import TextIOWrapper
from typing import Any

from keylane.errors import InvalidInput, KeylaneError
from keylane.lazy import deferred
from keylane.loop import run

LOADED, READY, FAILED, EVENT, ANSWER = "loaded", "ready", "failed", "event", "answer"
"""What a report is about."""
FAILED_EXIT = 1


class SupervisorLink:
    """A worker's line to its supervisor."""

    def __init__(self, control_fd: int, report_fd: int) -> None:
        self._control = os.fdopen(control_fd, "rb", buffering=0)
        self._report_fd = report_fd
        for fd in (control_fd, report_fd):
            os.set_inheritable(fd, False)  # what the worker starts must not hold the pipes open
        self._writing = threading.Lock()
        self._answers: dict[str, Callable[[], object]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._go: asyncio.Event | None = None
        self._has_gone = False
        self.settings: dict[str, Any] = {}
        self.stop_timeout_s = 0.0

    def start(self) -> None:
        """Read the settings, and from then on what the supervisor asks for."""
        lines = self._lines()
        first = json.loads(next(lines))
        self.settings, self.stop_timeout_s = first["settings"], first["stop_timeout_s"]
        threading.Thread(target=self._read, args=(lines,), name="supervisor", daemon=True).start()

    async def loaded(self) -> None:
        """Everything that can be checked is right. Returns when the supervisor wants the worker to begin."""
        self._loop, self._go = asyncio.get_running_loop(), asyncio.Event()
        if self._has_gone:
            self._go.set()
        self._report(LOADED)
        await self._go.wait()

    def ready(self, text: str, **facts: object) -> None:
        """The worker is at work."""
        self._report(READY, name=READY, text=text, facts=facts)

    def event(self, name: str, text: str, **facts: object) -> None:
        """Something has happened: one line of the supervisor's output."""
        self._report(EVENT, name=name, text=text, facts=facts)

    def answer(self, what: str, give: Callable[[], object]) -> None:
        """Answer requests for `what`. `give` is called in a thread, and returns what JSON can hold."""
        self._answers[what] = give

    def failed(self, error: KeylaneError) -> None:
        self._report(
            FAILED,
            text=" ".join(str(error).split()),
            error="InvalidInput" if isinstance(error, InvalidInput) else type(error).__name__,
            is_transient=error.is_transient,
        )

    def _report(self, kind: str, **content: object) -> None:
        line = json.dumps({"kind": kind, **content}).encode() + b"\n"
        with self._writing:
            try:
                view = memoryview(line)
                while view:
                    view = view[os.write(self._report_fd, view) :]
            except BrokenPipeError:
                pass  # the supervisor is gone, and the other thread ends this process

    def _lines(self) -> Iterator[bytes]:
        rest = b""
        while chunk := self._control.read(1 << 16):
            *whole, rest = (rest + chunk).split(b"\n")
            yield from whole

    def _read(self, lines: Iterator[bytes]) -> None:
        for line in lines:
            wanted = json.loads(line)
            if wanted["do"] == "go":
                self._has_gone = True
                if self._loop is not None and self._go is not None:
                    self._loop.call_soon_threadsafe(self._go.set)
            else:
                give = self._answers.get(wanted["what"])
                self._report(ANSWER, id=wanted["id"], value=give() if give is not None else None)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self.stop_timeout_s)
        os._exit(FAILED_EXIT)


def main() -> None:
    sys.path.insert(0, os.getcwd())  # as `python` itself does: the handler is in the user's directory
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, TextIOWrapper):  # workers share it: whole lines, each as soon as it is written
            output.reconfigure(line_buffering=True, write_through=False)
    link = SupervisorLink(int(sys.argv[1]), int(sys.argv[2]))
    link.start()
    module, _, function = link.settings["target"].partition(":")
    with deferred("aiohttp"):  # nats-py imports it where it is installed, which takes longer than all the rest
        loaded = import_module(module)
    try:
        run(getattr(loaded, function)(link, link.settings))
    except KeylaneError as error:
        link.failed(error)
        sys.exit(FAILED_EXIT)

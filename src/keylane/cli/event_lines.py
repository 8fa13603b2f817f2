"""The output of `consume` commands: one line for each event, as text or JSON, and how signals end them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import typer

from keylane.cli.command import INTERRUPTED, run_loop
from keylane.cli.formatting import as_utc, json_text


class EventLines:
    """Prints one line for each event."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.stop = asyncio.Event()
        """Set by a signal, and when the pipe that reads the lines is closed."""
        self.failure: OSError | None = None

    def write(self, event: str, text: str, /, **facts: Any) -> None:
        now = datetime.now(UTC)
        line = (
            json_text({"time": as_utc(now), "event": event} | facts)
            if self.as_json
            else f"{now.astimezone():%H:%M:%S.%f}"[:-3] + f"  {text}"
        )
        try:
            print(line, flush=True)
        except OSError as error:  # the pipe was closed
            self.failure = self.failure or error
            self.stop.set()


@contextmanager
def stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """The first signal sets `stop`, the second ends the process."""
    loop = asyncio.get_running_loop()

    def request_stop() -> None:
        if stop.is_set():
            with suppress(OSError):  # nobody reads the lines any more
                sys.stdout.flush()
            os._exit(INTERRUPTED)  # at once: tasks that are cut off would still say so on stderr
        stop.set()

    is_main = threading.current_thread() is threading.main_thread()  # only there signals can be handled
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    for number in numbers:
        loop.add_signal_handler(number, request_stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def wait_for_end(
    lines: EventLines, wait: Coroutine[Any, Any, object], stop: Callable[[], Awaitable[None]]
) -> None:
    """Await `wait`, the end of a consumer; a signal stops it. Raises the error that ended it."""
    with stop_on_signals(lines.stop):
        # Not in a task group: whichever ends first decides how the other one ends.
        ended, stopped = asyncio.create_task(wait), asyncio.create_task(lines.stop.wait())
        try:
            await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                lines.write("stopping", "stopping: what is at work is finished first; Ctrl-C again ends at once")
                await stop()
            await ended
        finally:
            stopped.cancel()
            ended.cancel()
            await asyncio.gather(stopped, ended, return_exceptions=True)


def run_consumer(work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; an interruption before it listens to signals ends the command with exit code 130."""
    try:
        run_loop(work)
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(INTERRUPTED) from None

"""A connection for code that is not async: one per process and address, on an event loop in a thread of its own.

Spark calls sources and sinks from plain functions, in workers that live for many tasks. The connection outlives the
task, and its thread answers the server's pings in between. A forked process makes its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from keylane.errors import Disconnected, RequestTimeout
from keylane.jetstream import Connection, connect
from keylane.spark.address import Address

T = TypeVar("T")

CALL_TIMEOUT_S = 60.0

_links: dict[tuple[int, Address], SyncConnection] = {}
_making = threading.Lock()


class SyncConnection:
    """A connection and its thread. Made by `shared_connection`; lives until the process ends."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="keylane-link", daemon=True)
        self._thread.start()
        try:
            self.connection: Connection = self.call(connect(**address.arguments(shipped_files()), name="keylane-spark"))
        except BaseException:
            self._end_thread()
            raise

    def __repr__(self) -> str:
        return f"<SyncConnection {self.connection.server}>"

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the connection's loop."""
        if self._loop.is_closed():
            work.close()
            raise Disconnected("this process has closed its connection")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def soon(self, work: Callable[[], None]) -> None:
        """Call a short function on the connection's loop; returns at once."""
        if self._loop.is_closed():
            raise Disconnected("this process has closed its connection")
        self._loop.call_soon_threadsafe(work)

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = CALL_TIMEOUT_S) -> T:
        """Run a coroutine on the connection's loop and wait for its result."""
        running = self.start(work)
        try:
            return running.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if running.done():
                raise  # raised by the work itself
            running.cancel()
            raise RequestTimeout(f"the server's answer took longer than {timeout_s:g} s") from None
        except concurrent.futures.CancelledError:
            raise Disconnected("the connection was closed while it was waited for") from None

    def close(self) -> None:
        """Close the connection and end the thread."""
        _links.pop((os.getpid(), self.address), None)
        self.call(self.connection.close())
        self._end_thread()

    def _end_thread(self) -> None:
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result(CALL_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_TIMEOUT_S)
        self._loop.close()


async def _end_tasks() -> None:
    """A task that is left on a loop that is closed fails when it is collected, whoever is at work then."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def shared_connection(address: Address) -> SyncConnection:
    """This process's connection to the address; a new one if the old one was closed for good."""
    key = (os.getpid(), address)
    with _making:
        link = _links.get(key)
        if link is None or link.connection.is_closed:
            link = _links[key] = SyncConnection(address)
        return link


def shipped_files() -> Path | None:
    """The directory of `--files` in this process, if it is one of Spark's."""
    from pyspark import SparkContext, SparkFiles  # noqa: PLC0415 - slow to import, and only known inside Spark

    if not SparkFiles._is_running_on_worker and SparkContext._active_spark_context is None:
        return None
    root = Path(SparkFiles.getRootDirectory() or ".")
    # The process that plans a stream gets the name of a directory below it that does not exist.
    return root if root.is_dir() else root.parent

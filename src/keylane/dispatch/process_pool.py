"""Plain functions in processes of our own, for handlers that need the CPU.

Written by hand because `ProcessPoolExecutor` fails all its calls when one process dies, so that messages would be
blamed for another's crash, and because it cannot end a call. Here a call has a process to itself: what dies or is
killed is this one call.

A process ends with its pool, and with the program that has the pool, however that ends.
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, NamedTuple, TypeVar

from keylane.dispatch.error_text import error_line, traceback_text
from keylane.errors import HandlerProcessDied, InvalidInput, RemoteError

T = TypeVar("T")

Answer = BaseException | bytes | None
"""What a function in another process raised, or the bytes that it returned; None: anything else."""

_spawn = multiprocessing.get_context("spawn")  # a fork of a program with threads may hang
_END_S = 2.0


class ProcessPool(Generic[T]):
    """Runs one function, in up to `size` processes at once. They start when they are needed.

    A call that takes longer than `time_limit_s` is ended. The start of its process does not count.
    """

    def __init__(self, function: Callable[[T], Any], size: int, time_limit_s: float | None = None) -> None:
        self._pickled = _pickled(function)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="keylane-process")
        self._time_limit_s = time_limit_s
        self._free: list[_Process] = []
        self._busy: set[_Process] = set()
        self._closed = False

    async def start(self) -> None:
        """Start one process. Raises if it cannot run the function, before a message fails for that reason."""
        process = await self._started()
        self._free.append(process)

    async def run(self, item: T) -> bytes | None:
        """Returns what the function returned, if that is bytes. Raises what it raised.

        If this is cancelled, the process is killed.
        """
        pickled = pickle.dumps(item)
        process = self._free.pop() if self._free else await self._started()
        call = self._in_thread(process, lambda: process.call(pickled))
        answer = await (call if self._time_limit_s is None else within(self._time_limit_s, call))
        if process.is_alive:
            self._free.append(process)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def _started(self) -> _Process:
        process = _Process(self._pickled)
        error = await self._in_thread(process, process.start)
        if isinstance(error, BaseException):
            process.kill()
            raise error
        return process

    async def _in_thread(self, process: _Process, do: Callable[[], Answer]) -> Answer:
        self._busy.add(process)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, do)
        except BaseException:
            process.kill()
            raise
        finally:
            self._busy.discard(process)

    async def close(self) -> None:
        """End all processes. Returns when they are gone."""
        if self._closed:
            return
        self._closed = True
        for process in self._busy:
            process.kill()
        free, self._free = self._free, []
        # A thread whose process was killed reaps it before it ends.
        await asyncio.to_thread(_end_all, free)
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)


def _pickled(function: Callable[[T], Any]) -> bytes:
    try:
        return pickle.dumps(function)
    except Exception as error:
        raise InvalidInput(
            f"handler is {function!r}, which cannot be sent to another process ({error_line(error)}): with "
            "executor='process', give a function that is defined at the top level of a module"
        ) from error


def _end_all(processes: list[_Process]) -> None:
    for process in processes:
        process.hang_up()
    for process in processes:
        process.end()


class _Process:
    """One process, used by one thread at a time; `kill` may come from another."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled
        self._lock = threading.Lock()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection[bytes, _Failure | bytes | None] | None = None
        self.is_alive = True

    def start(self) -> Answer:
        """Returns why it cannot be used."""
        try:
            with self._lock:
                if not self.is_alive:
                    return HandlerProcessDied("the process of the handler was ended before it began")
                self._connection, theirs = _spawn.Pipe()
                self._process = _spawn.Process(target=_serve, args=(theirs,), name="keylane-handler", daemon=True)
                self._process.start()
                theirs.close()
            return self._ask(self._pickled)
        except (EOFError, OSError):
            return self._died(
                "could not start. Its standard error says why; a program that starts processes needs "
                "`if __name__ == '__main__':` around what it runs"
            )

    def call(self, item: bytes) -> Answer:
        """What the function raised for this item, if it did, or else the bytes that it returned."""
        try:
            return self._ask(item)
        except (EOFError, OSError):
            return self._died("ended before the handler was done")

    def kill(self) -> None:
        with self._lock:
            self.is_alive = False
            if self._process is not None:
                self._process.kill()

    def hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def end(self) -> None:
        if self._process is not None:
            self._process.join(_END_S)
            self._process.kill()
            self._process.join(_END_S)

    def _ask(self, item: bytes) -> Answer:
        assert self._connection is not None
        self._connection.send_bytes(item)
        answer = self._connection.recv()
        return answer.as_error() if isinstance(answer, _Failure) else answer

    def _died(self, how: str) -> HandlerProcessDied:
        self.kill()
        self.hang_up()
        self.end()
        code = self._process.exitcode if self._process is not None else None
        return HandlerProcessDied(f"the process of the handler (exit code {code}) {how}")


# ---- in the other process -----------------------------------------------------------------------------


class _Failure(NamedTuple):
    """An exception that leaves its process."""

    pickled: bytes | None
    """None: it cannot be sent."""
    line: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # noqa: S301 - our own
        except Exception:  # noqa: BLE001 - an exception of a user's own class may do anything here
            pickled = None
        return cls(pickled, error_line(error), traceback_text(error))

    def as_error(self) -> BaseException:
        cause = RemoteError(f"in the process of the handler:\n{self.traceback}")
        try:
            error = RemoteError(self.line) if self.pickled is None else pickle.loads(self.pickled)  # noqa: S301 - ours
        except Exception:  # noqa: BLE001 - as above
            error = RemoteError(self.line)
        assert isinstance(error, BaseException)
        error.__cause__ = cause
        return error


def _serve(connection: Connection[_Failure | bytes | None, bytes]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal: our program decides
    threading.Thread(target=_end_with_the_program, daemon=True).start()
    function: list[Callable[[Any], Any]] = []

    def load(pickled: bytes) -> None:
        function.append(pickle.loads(pickled))  # noqa: S301 - from our own program

    def call(pickled: bytes) -> bytes | None:
        result = function[0](pickle.loads(pickled))  # noqa: S301 - from our own program
        if inspect.iscoroutine(result):
            result.close()
            raise TypeError("the handler returned a coroutine: with executor='process' it must be a plain function")
        return result if isinstance(result, bytes) else None

    step: Callable[[bytes], bytes | None] = load
    while True:
        try:
            received = connection.recv_bytes()
        except EOFError:
            return
        connection.send(_answer(step, received))
        step = call


def _answer(step: Callable[[bytes], bytes | None], received: bytes) -> _Failure | bytes | None:
    try:
        return step(received)
    except BaseException as error:  # noqa: BLE001 - sent to where the message came from
        return _Failure.of(error)


def _end_with_the_program() -> None:
    program = multiprocessing.parent_process()
    assert program is not None
    wait([program.sentinel])
    os._exit(1)


async def within(limit_s: float, doing: Awaitable[T]) -> T:
    """Await `doing`; after `limit_s` cancel it and raise a `TimeoutError`, unless it returns nevertheless."""
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await doing
    except (TimeoutError, asyncio.CancelledError) as error:
        # A task group of the handler may have marked the task: then the timeout lets its own cancellation through.
        if not limit.expired():
            raise
        raise TimeoutError(f"the handler was not done within its time_limit_s of {limit_s:g} s") from error

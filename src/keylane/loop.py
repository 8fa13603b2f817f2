"""`keylane.run`: asyncio.run on uvloop, if it is installed (`pip install keylane[fast]`); signals end it cleanly.

SIGINT (Ctrl-C) and SIGTERM cancel the main coroutine: its `async with` blocks drain, ack and hand over, and the process
exits with code 0, as other workers do. A second signal ends the process at once, by that signal.

With one message in flight every message costs a full turn of the event loop, and uvloop's turn is twice as fast.
The garbage collector runs less often: thousands of messages come and go every second and none is part of a reference
cycle, so it would find nothing and take a tenth of a member's time.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

_log = logging.getLogger("keylane")

_GC_THRESHOLDS = (20_000, 20, 20)
_DEFAULTS: dict[signal.Signals, Callable[[int, FrameType | None], Any] | signal.Handlers] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a program's main coroutine and return its result.

    The first SIGINT or SIGTERM cancels it. If it then ends, `run` raises `SystemExit(0)`. The second ends the process
    at once. `run` leaves alone a signal that the program itself handles or ignores. Outside the main thread it handles
    no signal: cancel the coroutine from outside.

    >>> keylane.run(main())
    """
    gc.set_threshold(*_GC_THRESHOLDS)
    with _Signals() as signals, asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            return runner.run(signals.run(main))
        except asyncio.CancelledError:
            if signals.first is None:
                raise
    raise SystemExit(0)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop where it is installed, else None for asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Signals:
    """Handlers of SIGINT and SIGTERM for the duration of the block.

    Not `loop.add_signal_handler`: a second signal must end the process even if the event loop is blocked.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._task: asyncio.Task[Any] | None = None

    async def run(self, main: Coroutine[Any, Any, T]) -> T:
        if self.first is not None:
            main.close()
            raise asyncio.CancelledError
        self._task = asyncio.current_task()
        try:
            return await main
        finally:
            self._task = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number, default in _DEFAULTS.items():
                if signal.getsignal(number) == default:
                    signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, default in _DEFAULTS.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, default)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.first is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.first = signal.Signals(number)
        if self._task is not None:
            self._task.get_loop().call_soon_threadsafe(self._cancel, self._task)

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        assert self.first is not None
        _log.info("%s: stopping cleanly; another signal ends the process at once", self.first.name)
        task.cancel()

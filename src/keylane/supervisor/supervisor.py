"""All worker processes of one command: started, watched, started again when they end, replaced one by one, stopped.

The first worker loads alone: what is wrong with the target ends everything before a worker has begun. Later a worker
that ends by itself is started again, by the rules of `core/process_restarts.py`.

Signals: SIGTERM and SIGINT drain all workers, a second one ends them at once. SIGHUP replaces them one by one: the new
process loads while the old one still works; the old one drains; the new one begins, and the next worker's turn comes
when it is at work. Where the new one cannot load, the old one goes on.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from keylane.core.process_restarts import Restarts
from keylane.errors import InvalidInput, KeylaneError, SupervisorFailed
from keylane.supervisor.child_process import ChildProcess, EventReport

_KILL_AFTER_S = 5.0
"""A worker ends by itself within its stop timeout; this much later it is killed."""
_READY_S = 60.0
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorTarget:
    """What the worker processes do."""

    function: str
    """`module:function`, an async function of a `SupervisorLink` and the settings."""
    settings: Callable[[int], dict[str, Any]]
    """The settings of the worker with this number, which JSON can hold."""


class Supervisor:
    """Runs `workers` processes until it is stopped."""

    def __init__(
        self, target: SupervisorTarget, workers: int, *, report: EventReport, stop_timeout_s: float = 25.0
    ) -> None:
        """`report`: told of every event as it happens."""
        if workers < 1:
            raise InvalidInput(f"workers is {workers}: at least 1 worker process is needed")
        self._target = target
        self._report = report
        self._stop_timeout_s = stop_timeout_s
        self._slots = [_Slot(number, self) for number in range(workers)]
        self._first_loaded = asyncio.Event()
        self._stopping = asyncio.Event()
        self._was_ready = False
        self._failure: KeylaneError | None = None
        self._roll_wanted = asyncio.Event()
        self.restarts = 0
        """Workers that ended by themselves, so far."""

    # ---- life -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until a signal or `stop`. Raises the error that keeps the workers from beginning."""
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGTERM: self._signalled, signal.SIGINT: self._signalled, signal.SIGHUP: self.roll}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            async with asyncio.TaskGroup() as tasks:
                rolling = tasks.create_task(self._roll())
                keeping = [tasks.create_task(slot.keep(), name=f"worker {slot.number}") for slot in self._slots]
                await self._stopping.wait()
                self._first_loaded.set()
                rolling.cancel()
                await asyncio.gather(*(slot.stop() for slot in self._slots))
                await asyncio.gather(*keeping)
        finally:
            for slot in self._slots:
                slot.kill()
            for number in handlers:
                loop.remove_signal_handler(number)
        if self._failure is not None:
            raise self._failure
        self._report("stopped", "stopped", {})

    def stop(self) -> None:
        """Drain all workers and end."""
        if not self._stopping.is_set():
            running = sum(slot.process is not None for slot in self._slots)
            workers = "1 worker" if running == 1 else f"{running} workers"
            self._report("stopping", f"stopping {workers}; another signal ends them at once", {})
            self._stopping.set()

    def roll(self) -> None:
        """Replace all workers, one by one."""
        self._roll_wanted.set()

    async def ask(self, what: str, timeout_s: float = 2.0) -> dict[int, Any]:
        """What each worker answers, by its number; None where it gives no answer in time, or does not run."""
        return dict(
            zip(
                range(len(self._slots)),
                await asyncio.gather(*(slot.ask(what, timeout_s) for slot in self._slots)),
                strict=True,
            )
        )

    @property
    def ready(self) -> list[bool]:
        """For each worker whether it is at work."""
        return [slot.process is not None and slot.process.ready_at is not None for slot in self._slots]

    @property
    def crash_loops(self) -> list[str]:
        """Why workers end again and again."""
        return [f"worker {slot.number}: {slot.crash_loop}" for slot in self._slots if slot.crash_loop]

    def _signalled(self) -> None:
        if self._stopping.is_set():
            for slot in self._slots:
                slot.kill()
            os._exit(_INTERRUPTED)
        self.stop()

    async def _roll(self) -> None:
        while True:
            await self._roll_wanted.wait()
            self._roll_wanted.clear()
            count = len(self._slots)
            self._report("rolling", f"replacing {count} workers, one by one", {"workers": count})
            for slot in self._slots:
                if not await slot.replace():
                    self._report("rolling_stopped", f"worker {slot.number} is not replaced: the others stay", {})
                    break
            else:
                self._report("rolled", f"all {count} workers are replaced", {"workers": count})

    # ---- what its workers ask of it ---------------------------------------------------------------------------

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    async def may_start(self, number: int) -> None:
        if number:
            await self._first_loaded.wait()

    def loaded(self) -> None:
        self._first_loaded.set()

    def was_ready(self) -> None:
        self._was_ready = True

    async def start_process(self, number: int) -> ChildProcess:
        def report(name: str, text: str, facts: dict[str, Any]) -> None:
            self._report(name, f"worker {number}: {text}", {"worker": number} | facts)

        settings = {"target": self._target.function} | self._target.settings(number)
        process = await ChildProcess.start(settings, self._stop_timeout_s, report)
        report("started", f"started as process {process.pid}", {"pid": process.pid})
        return process

    async def end_process(self, process: ChildProcess) -> None:
        """Let it drain, and kill it if it does not end in time."""
        process.terminate()
        try:
            async with asyncio.timeout(self._stop_timeout_s + _KILL_AFTER_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def ended(self, slot: _Slot, process: ChildProcess, code: int) -> bool:
        """Report an end. Returns whether the process is to be started again."""
        facts: dict[str, Any] = {"worker": slot.number, "pid": process.pid, "code": code}
        if self.is_stopping or slot.is_replaced:
            self._report("exited", f"worker {slot.number}: ended, {process.reason(code)}", facts)
            return not self.is_stopping
        if not self._was_ready and process.failure is not None and not process.is_failure_transient:
            kind = InvalidInput if process.failure_kind == InvalidInput.__name__ else SupervisorFailed
            self._failure = kind(process.failure)
            self._stopping.set()
            return False
        return True

    def report_failed_replacement(self, number: int, reason: str) -> None:
        facts = {"worker": number, "reason": reason}
        self._report("replacement_failed", f"worker {number}: the new process cannot load ({reason})", facts)

    def report_restart(self, slot: _Slot, process: ChildProcess, code: int, pause_s: float) -> None:
        self.restarts += 1
        reason = process.reason(code)
        facts: dict[str, Any] = {
            "worker": slot.number,
            "pid": process.pid,
            "code": code,
            "reason": reason,
            "restart_in_s": pause_s,
            "stderr": list(process.last_lines),
        }
        if slot.crash_loop:
            facts["failures"] = slot.restarts.failures
            name, what = "crash_loop", f"crash loop, {slot.restarts.failures} ends soon after the start; last {reason}"
        else:
            name, what = "exited", f"ended by itself, {reason}"
        self._report(name, f"worker {slot.number}: {what}; starting again in {pause_s:g} s", facts)


class _Slot:
    """One worker: the process that it has now, and the one that is to replace it."""

    def __init__(self, number: int, supervisor: Supervisor) -> None:
        self.number = number
        self._supervisor = supervisor
        self.restarts = Restarts()
        self.crash_loop: str | None = None
        self.process: ChildProcess | None = None
        self._next: ChildProcess | None = None
        """Loaded, and not yet at work."""
        self._has_next = asyncio.Event()

    @property
    def is_replaced(self) -> bool:
        """Whether the next process is loaded and waits for the end of this one."""
        return self._has_next.is_set()

    async def keep(self) -> None:
        """Until the supervisor stops."""
        supervisor = self._supervisor
        await supervisor.may_start(self.number)
        while not supervisor.is_stopping:
            process = self._take_next() or await supervisor.start_process(self.number)
            self.process = process
            code = await self._work(process)
            self.process = None
            if not supervisor.ended(self, process, code):
                return
            if self.is_replaced:
                self.restarts = Restarts()
                continue
            pause_s, is_loop = self.restarts.ended(process.at_work_s)
            self.crash_loop = process.reason(code) if is_loop else None
            supervisor.report_restart(self, process, code, pause_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._has_next.wait()

    async def _work(self, process: ChildProcess) -> int:
        if self._supervisor.is_stopping:  # it was being started
            await self._supervisor.end_process(process)
        await process.loaded.wait()
        if process.is_running:
            self._supervisor.loaded()
            process.go()
        await process.ready.wait()
        if process.ready_at is not None:
            self._supervisor.was_ready()
            self.crash_loop = None
        return await process.wait()

    async def replace(self) -> bool:
        """Put a new process in the place of this one; False, with the old one at work, if it cannot load."""
        process = await self._supervisor.start_process(self.number)
        self._next = process
        try:
            await process.loaded.wait()
        except asyncio.CancelledError:
            process.kill()
            raise
        if not process.is_running:
            self._next = None
            reason = process.reason(await process.wait())
            self._supervisor.report_failed_replacement(self.number, reason)
            return False
        self._has_next.set()
        if self.process is not None:
            await self._supervisor.end_process(self.process)
        with suppress(TimeoutError):
            async with asyncio.timeout(_READY_S):
                await process.ready.wait()
        return process.ready_at is not None

    async def stop(self) -> None:
        self._has_next.set()  # ends the pause before a restart
        found = [process for process in (self.process, self._next) if process is not None]
        await asyncio.gather(*(self._supervisor.end_process(process) for process in found))

    def kill(self) -> None:
        for process in (self.process, self._next):
            if process is not None:
                process.kill()

    async def ask(self, what: str, timeout_s: float) -> Any:
        return await self.process.ask(what, timeout_s) if self.process is not None else None

    def _take_next(self) -> ChildProcess | None:
        process, self._next = self._next, None
        self._has_next.clear()
        return process

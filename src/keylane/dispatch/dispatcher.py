"""Workers over lanes: one handler on many messages, one at a time in each lane.

Owns the worker tasks, which message each of them has, and when a failed one is retried. Its `Policy` decides what
becomes of a message: a group acks, Marshal moves an offset.

Workers are long-lived tasks. One that finds the next message ready goes on without a turn of the event loop, so a
handler that never waits costs no task per message; one that waits lets the others take over.

A handler runs in its worker's task and can leave marks there: a task group, a timeout or a cancel scope that failed, or
a call of `current_task().cancel()`, may leave a count in `cancelling()` or a cancellation that is still to come. So
- only `_cancelled` says that a cancellation is ours. Any other one that comes out of a handler is its own failure;
- a worker that a handler has marked ends after its message, and a new one takes its place;
- whatever we must wait for on behalf of a message (a dead letter) is awaited in a task that no handler has run in.

What cannot count as a failed try, such as a `BaseException` of the user's own, ends all: `crash` says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

from keylane.core.lanes import RUNNING, Entry, Lanes
from keylane.dispatch.error_text import error_line
from keylane.errors import HandlerCrashed, KeylaneError
from keylane.retrying import backoff_s

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

Settling = Callable[[], Coroutine[Any, Any, str]]
"""Settles a message in a task of its own; gives the outcome."""

_CANCEL_S = 2.0
_HELD = 1 << 40
_STANDSTILL_S = 0.25
_LONGEST_TURN_S = 0.02
_LOOK_AGAIN_S = 0.01


class Policy(Protocol[T]):
    """Decides what becomes of messages. Each call returns the outcome, for the journal; none of them blocks."""

    def may_go_on(self) -> bool:
        """Whether messages may start. Called after an idle time, because this process may have stood still, and before
        every start while `Dispatcher.guard` asks for it."""
        ...

    def returned(self, entry: Entry[T], given: T) -> str:
        """The handler returned. `given` is what it got; `entry.item` may be a later delivery of it."""
        ...

    def failed(self, entry: Entry[T], given: T, error: BaseException) -> str | Settling:
        """The handler raised."""
        ...

    def cancelled(self, entry: Entry[T], given: T) -> str:
        """We cancelled the handler, and it did not return."""
        ...

    def crashed(self, entry: Entry[T], given: T, error: BaseException) -> None:
        """The handler raised an error that ends all. The message is out of its lane, and nothing starts any more."""
        ...


class OutcomeJournal(Protocol[T_contra]):
    """Records the outcome of every try."""

    def now_ns(self) -> int: ...

    def note(self, message: T_contra, outcome: str, started_ns: int, ended_ns: int) -> None: ...


class HandlerSlots:
    """How many handlers may run in several dispatchers together. They take turns when there are too few slots."""

    __slots__ = ("_is_held", "_waiting", "free")

    def __init__(self, slots: int) -> None:
        self.free = slots
        """Below 1: nothing starts."""
        self._is_held = False
        self._waiting: deque[Dispatcher[Any]] = deque()

    def __repr__(self) -> str:
        return f"<HandlerSlots {self.free} free, {len(self._waiting)} dispatchers wait>"

    def wait(self, dispatcher: Dispatcher[Any]) -> None:
        """Wake this dispatcher when a slot is free."""
        if dispatcher not in self._waiting:
            self._waiting.append(dispatcher)

    def give_back(self) -> None:
        self.free += 1
        while self._waiting and self.free > 0:
            if self._waiting.popleft().wake():
                return

    def hold(self, held: bool) -> None:
        """Let nothing start, or let it start again. Running handlers go on."""
        if held != self._is_held:
            self._is_held = held
            self.free += -_HELD if held else _HELD
            while self._waiting and self.free > 0:
                self._waiting.popleft().wake()


class Dispatcher(Generic[T]):
    """The workers of one member or consumer."""

    def __init__(
        self,
        run: Callable[[T], Awaitable[Any]],
        lanes: Lanes[T],
        policy: Policy[T],
        *,
        name: str,
        concurrency: int,
        log: logging.Logger,
        admit: Callable[[Entry[T]], bool] | None = None,
        journal: OutcomeJournal[T] | None = None,
        slots: HandlerSlots | None = None,
        grace_s: float = 1.0,
        on_idle: Callable[[], None] | None = None,
        on_returned: Callable[[float], object] | None = None,
        on_outcome: Callable[[str], None] | None = None,
    ) -> None:
        """`name`: whose messages these are, for errors and logs.

        `admit`: called before each message starts; if it returns False, it has postponed or released the entry.
        `slots`: shared with other dispatchers, whose handlers count too.
        `grace_s`: how long the other handlers may go on after a crash.
        `on_idle`: called when a worker finds nothing to start: once for a batch of handlers that never wait.
        `on_returned`: called for every handler that returned, with its seconds. `on_outcome`: called for the others.
        """
        self.lanes = lanes
        self._name = name
        self._run = run
        self._policy = policy
        self._concurrency = concurrency
        self._log = log
        self._admit = admit
        self._journal = journal
        self._slots = slots
        self._grace_s = grace_s
        self._on_idle = on_idle
        self._on_returned, self._on_outcome = on_returned, on_outcome
        self._loop = asyncio.get_running_loop()
        self._workers: set[asyncio.Task[None]] = set()
        self._settling: set[asyncio.Task[None]] = set()
        self._at_work: dict[asyncio.Task[None], Entry[T]] = {}
        self._cancelled: set[Entry[T]] = set()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._nudge: asyncio.Handle | None = None
        self._last_resort: asyncio.TimerHandle | None = None
        self._retry = RetryTimer(self._due, self.wake)
        self._some_end = asyncio.Event()
        self._ends_awaited = 0
        self._turn_ends = monotonic() + _LONGEST_TURN_S
        self._ending = False
        self._is_guarded = False
        self.is_closed = False
        self.crash: asyncio.Future[HandlerCrashed] = self._loop.create_future()
        """Has a result once a handler has ended all. Nothing starts any more; `close` is due."""

    def __repr__(self) -> str:
        return f"<Dispatcher {self.lanes!r}, {len(self._workers)} workers, {len(self._at_work)} at work>"

    @property
    def starts(self) -> bool:
        """Whether messages still start: neither closed nor crashed."""
        return not self._ending

    @property
    def at_work(self) -> Collection[Entry[T]]:
        """The messages that have started and are not settled."""
        return self._at_work.values()

    # ---- what a policy and its owner ask of it ------------------------------------------------------

    def wake(self) -> bool:
        """Let something start, if something is ready. Returns whether something is."""
        if self._ending or not self.lanes.ready:
            return False
        while self._idle:
            waiter = self._idle.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return True
        if len(self._workers) < self._concurrency:
            worker = asyncio.create_task(self._work())
            self._workers.add(worker)
            worker.add_done_callback(self._left)
        return True

    def guard(self, guarded: bool) -> None:
        """Ask the policy before every start, not only after an idle time. Call `wake` when its answer may change."""
        self._is_guarded = guarded
        self.wake()

    def now(self) -> float:
        """The time of the event loop's clock, for `retry_at`."""
        return self._loop.time()

    def retry_at(self, when: float) -> None:
        """A message may run again at this time of the event loop's clock."""
        self._retry.set(when)

    def cancel(self, entries: Iterable[Entry[T]]) -> None:
        """Cancel the handlers of these; `Policy.cancelled` is called for those that do not return."""
        wanted = set(entries)
        self._cancelled.intersection_update(self._at_work.values())  # a handler may have swallowed an earlier one
        for task, entry in list(self._at_work.items()):
            if entry in wanted:
                self._cancelled.add(entry)
                task.cancel()

    async def some_end(self) -> None:
        """Wait until a message has ended, or `notify` was called."""
        self._ends_awaited += 1
        self._some_end.clear()
        try:
            await self._some_end.wait()
        finally:
            self._ends_awaited -= 1

    def notify(self) -> None:
        """Wake all that wait in `some_end`."""
        self._some_end.set()

    async def close(self) -> None:
        """End now: running handlers are cancelled."""
        self.is_closed = self._ending = True
        self.notify()
        self._retry.cancel()
        for timer in (self._nudge, self._last_resort):
            if timer is not None:
                timer.cancel()
        self._cancelled.update(self._at_work.values())
        tasks = self._workers | self._settling
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_CANCEL_S)
            if late:
                self._log.error("%d handlers did not end within %g s of being cancelled", len(late), _CANCEL_S)
        self.crash.cancel()

    # ---- workers ------------------------------------------------------------------------------------

    async def _work(self) -> None:  # noqa: C901, PLR0912, PLR0915 - runs once for every message: written out
        me = asyncio.current_task()
        assert me is not None
        at_work, run, journal, admit, slots = self._at_work, self._run, self._journal, self._admit, self._slots
        returned, cancelling, on_returned = self._policy.returned, me.cancelling, self._on_returned
        began = 0.0
        has_waited = True
        while not self._ending:
            now = monotonic()
            if began and on_returned is not None:
                on_returned(now - began)  # here, because the clock is read here anyway
                began = 0.0
            if now > self._turn_ends:
                if now > self._turn_ends + _STANDSTILL_S and not self._policy.may_go_on():
                    await asyncio.sleep(_LOOK_AGAIN_S)
                    continue
                self._turn_ends = now + _LONGEST_TURN_S
                if not has_waited:
                    await asyncio.sleep(0)  # handlers that never wait must leave the loop to others now and then
                    has_waited = True
                    continue
            has_waited = False
            if self._is_guarded and not self._policy.may_go_on():
                entry = None
            elif slots is None or slots.free > 0:
                entry = self.lanes.take()
            else:
                slots.wait(self)
                entry = None
            if entry is None:
                if self._on_idle is not None:
                    self._on_idle()
                waiter = self._loop.create_future()
                self._idle.append(waiter)
                await waiter
                has_waited = True
                continue
            if admit is not None and not admit(entry):
                continue
            if self._nudge is None and self.lanes.ready:
                # If this handler waits, the next turn of the loop lets another worker go on.
                self._nudge = self._loop.call_soon(self._wake_another)
            at_work[me] = entry
            given = entry.item
            if slots is not None:
                slots.free -= 1
            started_ns = journal.now_ns() if journal is not None else 0
            try:
                await run(given)
            except BaseException as error:  # noqa: BLE001 - a handler may raise anything
                outcome = self._raised(entry, given, started_ns, error)
                if self._on_outcome is not None and outcome:
                    self._on_outcome(outcome)
            else:
                outcome = returned(entry, given)
                began = now
            del at_work[me]
            if slots is not None:
                slots.give_back()
            if journal is not None and outcome:
                journal.note(given, outcome, started_ns, journal.now_ns())
            if self._ends_awaited:
                self._some_end.set()
            # Up to Python 3.12 a cancellation that is still to come survives `uncancel`: only the field tells.
            if cancelling() or me._must_cancel:  # type: ignore[attr-defined]
                if began and on_returned is not None:
                    on_returned(monotonic() - began)
                return

    def _due(self, now: float) -> float | None:
        return self.lanes.due(now)  # the lanes of now: their owner may replace them

    def _wake_another(self) -> None:
        self._nudge = None
        self.wake()

    def _raised(self, entry: Entry[T], given: T, started_ns: int, error: BaseException) -> str:
        """Settle a message whose handler raised. Returns the outcome, or nothing while a task settles it."""
        if _ends_the_program(error) or (isinstance(error, GeneratorExit) and not self._loop.is_running()):
            raise error
        if entry in self._cancelled:
            if not isinstance(error, asyncio.CancelledError):
                self._log.info("%r: its handler was cancelled and raised %s", given, error_line(error), exc_info=error)
            self._cancelled.discard(entry)
            return self._policy.cancelled(entry, given)
        if _is_failure(error):
            outcome = self._policy.failed(entry, given, error)
            if isinstance(outcome, str):
                return outcome
            self._settle_apart(entry, given, started_ns, outcome)
            return ""
        self._end_all(f"the handler raised {error_line(error)}, which is no Exception, on {given!r}", error)
        self.lanes.release(entry)
        self._policy.crashed(entry, given, error)
        return "failed"

    def _settle_apart(self, entry: Entry[T], given: T, started_ns: int, settling: Settling) -> None:
        task = asyncio.create_task(self._settle(entry, given, started_ns, settling))
        if not task.done():
            self._settling.add(task)
            self._at_work[task] = entry
        task.add_done_callback(self._left)

    async def _settle(self, entry: Entry[T], given: T, started_ns: int, settling: Settling) -> None:
        me = asyncio.current_task()
        assert me is not None
        try:
            outcome = await settling()
        except asyncio.CancelledError:
            if entry not in self._cancelled:
                raise
            outcome = self._policy.cancelled(entry, given)
        self._at_work.pop(me, None)
        self._cancelled.discard(entry)
        if self._on_outcome is not None:
            self._on_outcome(outcome)
        if self._journal is not None:
            self._journal.note(given, outcome, started_ns, self._journal.now_ns())
        self.notify()

    def _left(self, task: asyncio.Task[None]) -> None:
        """A task has ended. If it raised, or has not settled its message, everything ends with an error."""
        self._workers.discard(task)
        self._settling.discard(task)
        entry = self._at_work.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None and _ends_the_program(error):
            return
        ours = self._ending or entry is None or entry in self._cancelled
        if error is not None or not ours:
            what = "a task was cancelled" if error is None else f"{error_line(error)} was raised"
            of = "a message" if entry is None else repr(entry.item)
            self._end_all(f"{what} where the outcome of {of} was settled", error)
        if entry is not None:
            self._cancelled.discard(entry)
            if entry.state is RUNNING:
                self.lanes.release(entry)
        self.notify()
        self.wake()

    def _end_all(self, what: str, error: BaseException | None) -> None:
        """Start nothing more; running handlers may end within the grace period."""
        self._log.error("%s ends: %s", self._name, what, exc_info=error)
        self._ending = True
        if not self.crash.done():
            crash = HandlerCrashed(f"{self._name} has ended: {what}. Its message is not done and comes again")
            crash.__cause__ = error
            self.crash.set_result(crash)
            self._last_resort = self._loop.call_later(self._grace_s, self._cancel_all)

    def _cancel_all(self) -> None:
        self.cancel(self._at_work.values())


class RetryTimer:
    """One timer for all retries, set for the next one.

    `due(now)` makes ready what is due and returns when the next retry is due; `wake` wakes workers.
    """

    def __init__(self, due: Callable[[float], float | None], wake: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._due = due
        self._wake = wake
        self._handle: asyncio.Handle | None = None
        self._rings_at = 0.0  # uvloop's handle of a time that is past does not know it

    def __repr__(self) -> str:
        return f"<RetryTimer {'idle' if self._handle is None else f'at {self._rings_at:.3f}'}>"

    def set(self, retry_at: float) -> None:
        """Add a retry at this time of the event loop's clock."""
        if self._handle is None or retry_at < self._rings_at:
            self.cancel()
            self._rings_at = retry_at
            self._handle = self._loop.call_at(retry_at, self._rings)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _rings(self) -> None:
        self._handle = None
        following = self._due(self._loop.time())
        if following is not None:
            self.set(following)
        self._wake()


DeadLetterStore = Callable[[T, BaseException, int], Awaitable[None]]
"""Stores a message elsewhere, with the error and the number of tries. Raises a `KeylaneError` if that fails."""


async def store_dead_letter(
    store: DeadLetterStore[T],
    message: Callable[[], T],
    error: BaseException,
    tries: int,
    *,
    log: logging.Logger,
    until: Callable[[], bool] = lambda: False,
    purpose: str = "as a dead letter",
) -> bool:
    """Store a message that is given up, or tried later: its lane goes on only when it is safe elsewhere.

    Tries until it has succeeded, or until `until` says that the message is no longer ours: then False.
    """
    failures = 0
    while not until():
        try:
            await store(message(), error, tries)
        except KeylaneError as problem:
            failures += 1
            pause_s = backoff_s(failures)
            log.error("%r cannot be stored %s, trying again in %g s: %s", message(), purpose, pause_s, problem)  # noqa: TRY400
            await asyncio.sleep(pause_s)
        else:
            return True
    return False


def _ends_the_program(error: BaseException) -> bool:
    return isinstance(error, SystemExit | KeyboardInterrupt)


def _is_failure(error: BaseException) -> bool:
    """Whether it counts as a failed try. A cancellation that is not ours does."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_failure(one) for one in error.exceptions)
    return isinstance(error, Exception | asyncio.CancelledError)

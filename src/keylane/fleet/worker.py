"""A worker of a fleet, from `join` to its end: performs what `core/fleet_worker.py` decides.

Owns the store, one reader for each of its partitions, and their order of steps. What may pass (a link that is down, a
server that starts) is tried again; what cannot pass ends the worker with its reason.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar

from keylane.core.fleet_events import (
    ChangeToken,
    ClosePartition,
    DrainPartition,
    FleetAction,
    FleetEvent,
    FleetSignal,
    OpenPartition,
    PartitionDrained,
    PartitionPinned,
    PartitionUnpinned,
    ReadFailed,
    ReadRecords,
    RecordHint,
    ReportState,
    SetTimer,
    SpecRefused,
    StartPartition,
    StopEverything,
    TableFollowed,
    UnpinPartition,
    WorkerEnded,
    WorkerState,
    WriteRecord,
)
from keylane.core.fleet_lease import WorkerIdentity
from keylane.core.fleet_names import partition_consumer
from keylane.core.fleet_partitions import Partition
from keylane.core.fleet_records import ASSIGNMENT, TABLE, FleetAssignment, FleetSpec
from keylane.core.fleet_view import FleetView
from keylane.core.fleet_worker import FleetWorker, step
from keylane.core.pull_budget import PullBudget
from keylane.dispatch import HandlerCall, HandlerSlots
from keylane.errors import CopyMissing, FleetEnded, FleetError, KeylaneError, NotFound, RevisionConflict
from keylane.fleet.claimer import PartitionClaimer
from keylane.fleet.consumer_limit import CreationPace
from keylane.fleet.consumer_probe import ConsumerProbe
from keylane.fleet.lag import PartitionLag, partition_lag
from keylane.fleet.origin import PartitionOrigin
from keylane.fleet.partition_reader import MOST_BYTES, PartitionReader, ReaderOptions
from keylane.fleet.partition_table import FleetPartitions
from keylane.fleet.planner import FleetPlanner
from keylane.fleet.positions import CHECKPOINT_S, PositionStore
from keylane.fleet.store import FleetStore
from keylane.fleet.worker_consumer import UpdateCounts
from keylane.fleet.worker_layout import Holder, WorkerLayout, WorkerLayoutOptions
from keylane.fleet.worker_reader import WorkerReader
from keylane.hooks import call_hook
from keylane.jetstream import Connection, ConnectionHooks, check_seconds, consumers
from keylane.processing.delayed_retries import DelayedRetries
from keylane.processing.handler_hooks import HandlerHooks
from keylane.processing.handler_options import Commits, HandlerOptions
from keylane.processing.joined import STOP_TIMEOUT_S, Joined
from keylane.processing.key_parking import KeyOwner, KeyParking, KeyRelease
from keylane.processing.message import GroupMessage, Placing
from keylane.processing.message_processor import MessageProcessor
from keylane.processing.retry_reader import RetryReader
from keylane.retrying import Backoff

_log = logging.getLogger("keylane.fleet")

_CLOSE_S = 5.0
_OPENED_AT_ONCE = 8
"""Partitions. More would stand in the server's way, and in that of the renewal of the lease."""
_LOOK_AGAIN_S = 0.5
"""At the partitions themselves, after a failure or while another worker leads."""
_TIMER_STEP_S = 0.001
_TABLE_LEASES = 3.0
"""Between reads of the partition table that nobody has told of, in lease_s."""
_TO_BE_MADE = "consumers of its partitions to be made"
_PIN_REQUESTS = 16
"""At once, of one worker whose store does not answer."""

T = TypeVar("T")

PartitionAction = OpenPartition | StartPartition | ChangeToken | UnpinPartition | DrainPartition | ClosePartition


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHooks(HandlerHooks):
    """Called when something happens to a worker. Plain functions; they must return at once."""

    on_state: Callable[[WorkerState, str | None], None] | None = None
    """The state changed, or what the worker waits for: `worker.state` and `worker.waiting_for`."""
    on_partitions: Callable[[tuple[str, ...], tuple[str, ...]], None] | None = None
    """The partitions that are handled here, before and after."""
    on_source: Callable[[str | None], None] | None = None
    """What is wrong with the source of the partitions, as the leader sees it; None: nothing any more."""
    on_assignment: Callable[[FleetAssignment, frozenset[str]], None] | None = None
    """The worker follows another assignment; with the partitions that it gives to this worker."""
    on_consumer_update: Callable[[float, KeylaneError | None], None] | None = None
    """A consumer was created, opened or changed, in so many seconds, or that failed."""


class PartitionKeeper(Protocol):
    """What the leader does about the partitions themselves."""

    def watch(self, changed: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        """Call `changed` when there may be something to do."""

    async def tend(self) -> float:
        """Do what is due. Returns the seconds until the next look."""


class Worker(Joined):
    """The handle of a joined worker."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        fleet: str,
        *,
        spec: FleetSpec,
        identity: WorkerIdentity,
        planner: Callable[[float], FleetPlanner],
        partitions: FleetPartitions,
        place_of: Callable[[Partition], Placing],
        reader_options: ReaderOptions,
        call: HandlerCall[GroupMessage],
        handling: HandlerOptions,
        worker_layout: WorkerLayoutOptions,
        hooks: WorkerHooks,
        stop_timeout_s: float,
        checkpoint_s: float = CHECKPOINT_S,
        parking: KeyParking | None = None,
        retries: DelayedRetries | None = None,
    ) -> None:
        super().__init__(stop_timeout_s, _log)
        self.stream, self.fleet = stream, fleet
        self._connection = connection
        self._parking = parking
        self._retry_reader: RetryReader | None = None
        self._partitions = partitions
        self._keepers: list[PartitionKeeper] = []
        self._source_problem: str | None = None
        self._failed_look: str | None = None
        self._place_of = place_of
        self._reader_options = reader_options
        self._call = call
        self._handling = handling
        self._hooks = hooks
        self._slots = HandlerSlots(handling.concurrency)
        if retries is not None:
            self._retry_reader = RetryReader(
                retries,
                call,
                handling,
                slots=self._slots,
                member=lambda: self.id or fleet,
                from_queue=reader_options.stream != stream,
                on_crash=self._retry_crashed,
            )
        self._budget = PullBudget(reader_options.max_ack_pending, MOST_BYTES)
        offset_s = time.time() - _clock()
        self._core = FleetWorker(spec=spec, identity=identity, planner=planner(offset_s), clock_offset_s=offset_s)
        self._store = FleetStore(connection, stream, fleet, timeout_s=spec.lease_s / 3, hinted=self._hinted)
        self.claimer = PartitionClaimer(
            self._core,
            self._store,
            is_partition=lambda one: self._partitions.partition_of(one) is not None,
            clock=_clock,
        )
        """Whether this worker owns a partition by the store, and claims of other work under its lease."""
        self._table_hinted = asyncio.Event()
        self._layout: WorkerLayout | None = None
        if spec.layout == "worker":
            self._layout = WorkerLayout(
                connection,
                self._store,
                fleet,
                worker_layout,
                may_change=lambda: self._core.may_start(_clock()),
                on_trouble=self._ask_leader,
                failed=self._leave,
                updated=self._consumer_updated,
                on_delivered=hooks.on_delivered,
            )
        self._positions: tuple[str, PositionStore] | None = None
        self._checkpoint_s = checkpoint_s
        self._pace = CreationPace(self._creations_wait)
        self._runs: dict[str, _PartitionRun] = {}
        self._opening = asyncio.Semaphore(_OPENED_AT_ONCE)
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._failure: KeylaneError | None = None
        self._stopping = False
        self._is_orderly = False
        self._is_unconfirmed = False
        self._pin_requests = asyncio.Semaphore(_PIN_REQUESTS)
        self._shown_partitions: tuple[str, ...] = ()
        self._showing: asyncio.Handle | None = None
        self._shown_assignment: FleetAssignment | None = None
        self.state = WorkerState.JOINING
        self.waiting_for: str | None = None
        """What this worker waits for, in words; None while it waits for nothing but messages."""
        self._main: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        waits = f", waiting for {self.waiting_for}" if self.waiting_for else ""
        what = f"{self.state}{waits}, {len(self._runs)} partitions"
        return f"<Worker {self.id or '?'} of {self.stream}/{self.fleet}, {what}>"

    @property
    def id(self) -> str | None:
        """`<prefix>-<n>`; None while it has none."""
        return self._core.worker_id

    @property
    def acks(self) -> Commits:
        """How this worker commits: `message` where the server refused the other."""
        return self._handling.commits

    @property
    def is_leader(self) -> bool:
        return self.state is WorkerState.LEADING

    @property
    def partitions(self) -> tuple[str, ...]:
        """The partitions that are handled here now."""
        return tuple(sorted((one for one, run in self._runs.items() if run.token), key=_natural))

    @property
    def consumer_counts(self) -> UpdateCounts | None:
        """Changes of the worker's consumer so far; None in layout `partition`, where nothing of a consumer changes."""
        return self._layout.counts if self._layout is not None else None

    @property
    def max_subjects(self) -> int | None:
        """How many subjects the worker's consumer may have; None in layout `partition`."""
        return self._layout.max_subjects if self._layout is not None else None

    async def lag_of(self, partition_id: str) -> PartitionLag:
        """How far behind one of its partitions is, as the server says now."""
        partition = self._partitions.partition_of(partition_id)
        assert partition is not None
        if self._layout is not None:
            return await self._layout.lag_of(partition)
        stream = self._reader_options.stream
        info = await consumers.info(self._connection, stream, partition_consumer(self.fleet, partition_id))
        return await partition_lag(self._connection, partition.filter, info)

    # ---- life -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._main = asyncio.create_task(self._run(), name=f"worker of {self.stream}/{self.fleet}")

    def keep(self, keeper: PartitionKeeper) -> None:
        """Let this do the leader's part about the partitions, while this worker leads. To be called before `start`."""
        self._keepers.append(keeper)

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Finish what is at work, hand every partition over, and end. What has not started goes to the next.

        Handlers that are still at work after `timeout_s` are cancelled; their messages go to the next as well.
        """
        check_seconds(timeout_s, "timeout_s")
        self._stopping = True
        self._stop_retries()
        self._tell(FleetSignal.STOP)
        done, _ = await asyncio.wait({self._ended}, timeout=timeout_s)
        if not done:
            _log.warning("%r: handlers still at work after %g s are cancelled", self, timeout_s)
            self._over.set()
            if self._retry_reader is not None:
                await self._retry_reader.cut()
        await asyncio.wait({self._ended})

    async def _run(self) -> None:
        unobserve = self._connection.observe(ConnectionHooks(on_close=self._connection_closed))
        try:
            async with self._store, asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                helpers = [tasks.create_task(self._keep_partitions(one)) for one in self._keepers]
                helpers += [tasks.create_task(work) for work in self._upkeep()]
                if not self._partitions.is_fixed:
                    self._partitions.changed = self._follow_table
                    self._follow_table()
                    helpers.append(tasks.create_task(self._read_table()))
                retrying = tasks.create_task(self._retry_reader.run()) if self._retry_reader is not None else None
                self._tell(FleetSignal.STOP if self._stopping else FleetSignal.TIMER)
                await self._over.wait()
                if retrying is not None:
                    await self._end_retries(retrying)
                for helper in helpers:
                    helper.cancel()
                await self._close_all()
        except asyncio.CancelledError:  # the program ends
            self._ended.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - it ends this worker, and whoever waits for it is told
            self._fail(error)
        finally:
            unobserve()
            self._tasks = None
            if self._timer is not None:
                self._timer.cancel()
            for run in self._runs.values():
                await run.processor.close()
            if self._layout is not None:
                await self._layout.leave()
            await self._call.close()
            self._end()

    def _upkeep(self) -> list[Coroutine[Any, Any, None]]:
        releases = [self._parking.watch(self._owner_of, self._call.handle)] if self._parking is not None else []
        return [*releases, *self._layout_upkeep()]

    def _layout_upkeep(self) -> list[Coroutine[Any, Any, None]]:
        if self._layout is not None:
            looking = self._layout.look_after_others(self._core.view, lambda: self.is_leader, self._core.spec.lease_s)
            return [self._layout.keep_positions(self._checkpoint_s), looking]
        return [self._keep_positions(), self._probe().run()] if self._reader_options.is_checkpointed else []

    def _owner_of(self, wish: KeyRelease) -> KeyOwner | None:
        """This worker, if it handles the key now."""
        partition = self._partitions.partition_of_key(wish.subject, wish.key)
        run = self._runs.get(partition) if partition is not None else None
        if run is None or not run.token or not run.may_start() or self._stopping:
            return None
        return KeyOwner(run.partition, run.processor, run.origin)

    def _ask_leader(self, trouble: str) -> None:
        """What this worker cannot do goes with the next renewal of its lease; empty: it can again."""
        if trouble and trouble != self._core.lease.trouble:
            _log.warning("%r: %s", self, trouble)
        self._core.lease.trouble = trouble

    async def _close_all(self) -> None:
        """What is being closed gives its pins back, or the next owners wait for them; the rest is cut off."""
        running = {run.task for run in self._runs.values()}
        if running and self._is_orderly:
            await asyncio.wait(running, timeout=_CLOSE_S)
        for task in running:
            task.cancel()

    def _end(self) -> None:
        if self._ended.done():
            return
        if self._failure is not None:
            self._ended.set_exception(self._failure)
            self._ended.exception()  # seen: whoever waits gets it, and nobody has to
        else:
            self._ended.set_result("stopped")
        self._call_hook(self._hooks.on_ended, str(self._failure) if self._failure is not None else "stopped")

    def _leave(self, error: KeylaneError) -> None:
        """End the worker for an error that cannot pass, in order: what it has goes to others at once."""
        if self._failure is None:
            _log.error("%r leaves: %s", self, error)
        self._failure = self._failure or error
        if not self._stopping:
            self._stopping = True
            self._stop_retries()
            self._loop.call_later(self._core.spec.lease_s + _CLOSE_S, self._over.set)
            self._loop.call_soon(self._tell, FleetSignal.STOP)

    def _fail(self, error: Exception) -> None:
        """End the worker now. Its lease runs out, and then others take its partitions."""
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if not isinstance(error, KeylaneError):
            _log.error("worker of %s/%s failed", self.stream, self.fleet, exc_info=error)
            failed = FleetEnded(f"{self!r} failed: {error!r}")
            failed.__cause__ = error
            error = failed
        self._failure = self._failure or error
        self._over.set()

    def _connection_closed(self, reason: str) -> None:
        if not self._stopping:
            self._fail(FleetEnded(f"{self!r}: the connection is closed ({reason}); connect again and join again"))

    # ---- events and actions -----------------------------------------------------------------------------------

    def _tell(self, event: FleetEvent) -> None:
        if self._tasks is None:
            return  # it has ended
        now = _clock()
        try:
            actions = step(self._core, event, now)
            self._guard(now)
            for action in actions:
                self._perform(action)
            if self._core.view.assignment is not self._shown_assignment:
                self._show_assignment()
        except Exception as error:  # noqa: BLE001 - called by timers and by the socket, which would only log it
            self._fail(error)

    def _guard(self, now: float) -> None:
        """Without a confirmed lease another worker may own the partitions by now: only their pins tell."""
        unconfirmed = self._core.is_unconfirmed(now)
        self._slots.hold(not unconfirmed and not self._core.may_start(now))
        if unconfirmed != self._is_unconfirmed:
            self._is_unconfirmed = unconfirmed
            for run in self._runs.values():
                run.guard(unconfirmed)

    def _perform(self, action: FleetAction) -> None:
        assert self._tasks is not None
        match action:
            case ReadRecords():
                self._tasks.create_task(self._read(action))
            case WriteRecord():
                self._tasks.create_task(self._write(action))
            case SetTimer(at):
                self._set_timer(at)
            case StopEverything(why):
                _log.warning("%r stops handling: %s", self, why)
                self._tasks.create_task(self._stop_everything())
            case ReportState(state, waiting_for):
                self._report(state, waiting_for)
            case SpecRefused(differences):
                self._fail(
                    FleetError(
                        f"fleet {self.fleet!r} of stream {self.stream!r} exists with other settings: "
                        f"{'; '.join(differences)}. Join with the same settings, or choose another name"
                    )
                )
            case WorkerEnded(orderly):
                if not orderly:
                    _log.warning("%r: the store did not take the end of the lease; it expires", self)
                self._is_orderly = orderly
                self._over.set()
            case _:
                self._run_of(action.partition).do(action)

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        left_s = at - _clock()
        if left_s > 0:
            # It may ring a little early: uvloop counts in milliseconds, by a clock of its own.
            self._timer = self._loop.call_later(left_s + _TIMER_STEP_S, self._set_timer, at)
        else:
            self._timer = None
            self._loop.call_soon(self._tell, FleetSignal.TIMER)

    async def _read(self, action: ReadRecords) -> None:
        found = await self._store.read(action)
        if ASSIGNMENT in action.keys and not self._partitions.is_fixed and not isinstance(found, ReadFailed):
            # Only then: whoever is given a partition knows what it is, and how far it goes (FleetView.all_follow).
            try:
                await self._partitions.read()
            except KeylaneError as error:
                _log.debug("%r: the partition table cannot be read: %s", self, error)
                found = ReadFailed(action.keys)
        self._tell(found)

    async def _write(self, action: WriteRecord) -> None:
        self._tell(await self._store.write(action))

    async def _stop_everything(self) -> None:
        runs, self._runs = list(self._runs.values()), {}
        await asyncio.gather(*(run.abandon() for run in runs))
        if self._layout is not None:
            await self._layout.leave()
        self._show_partitions()
        self._tell(FleetSignal.HANDLERS_ENDED)

    # ---- the table of partitions --------------------------------------------------------------------------------

    def _hinted(self, hint: RecordHint) -> None:
        if hint.key == TABLE:
            self._table_hinted.set()
        elif self._core.hears(hint, _clock()):
            self._tell(hint)

    async def _read_table(self) -> None:
        """A hint may be lost: the table is also read now and then."""
        while True:
            await _wait_for(self._table_hinted, _TABLE_LEASES * self._core.spec.lease_s)
            await self._reported(self._partitions.read())

    def _follow_table(self) -> None:
        """In every reader first, then the lease says so."""
        for run in self._runs.values():
            run.reader.limit(self._partitions.last_of(run.partition))
        self._tell(TableFollowed(self._partitions.table.version, self._partitions.opened))

    async def _keep_partitions(self, keeper: PartitionKeeper) -> None:
        changed = asyncio.Event()
        async with keeper.watch(changed.set):
            while True:
                pause_s = None
                if self.leads_surely():
                    pause_s = await self._reported(keeper.tend())
                await _wait_for(changed, _LOOK_AGAIN_S if pause_s is None else pause_s)

    async def _reported(self, call: Coroutine[object, object, T]) -> T | None:
        """What concerns the partitions themselves ends no worker: it is reported, and tried again at the next look."""
        try:
            done = await call
        except RevisionConflict:
            self._table_hinted.set()  # somebody else has written the table: read it
            return None
        except KeylaneError as error:
            self._failed_look = f"the partitions of {self.stream}/{self.fleet} are not looked after: {error}"
            self.report_source(self._failed_look)
            return None
        if self._failed_look is not None and self._failed_look == self._source_problem:
            self.report_source(None)
        return done

    def leads_surely(self) -> bool:
        """Whether nobody else can lead now."""
        now, leadership = _clock(), self._core.leadership
        return leadership is not None and leadership.is_leading(now) and self._core.lease.is_sure(now)

    @property
    def view(self) -> FleetView:
        """What this worker knows of its fleet."""
        return self._core.view

    def report_source(self, problem: str | None) -> None:
        if problem == self._source_problem:
            return
        self._source_problem = problem
        if problem is None:
            _log.info("%r: the source of the partitions is good again", self)
        else:
            _log.warning("%r: %s", self, problem)
        self._call_hook(self._hooks.on_source, problem)

    # ---- partitions ---------------------------------------------------------------------------------------------

    def _run_of(self, partition_id: str) -> _PartitionRun:
        run = self._runs.get(partition_id)
        if run is None:
            partition = self._partitions.partition_of(partition_id)
            if partition is None:
                raise FleetError(
                    f"the assignment of fleet {self.fleet!r} names partition {partition_id!r}, which its source does "
                    "not have"
                )
            run = self._runs[partition_id] = self._new_run(partition)
        return run

    def _new_run(self, partition: Partition) -> _PartitionRun:
        assert self._tasks is not None
        assert self.id is not None
        origin = PartitionOrigin(
            self._connection,
            (self.stream, self.fleet, self.id),
            instance=self._core.lease.instance,
            partition=partition.id,
            wait=self._handler_waits,
            is_owner=self.claimer.is_owner,
            from_copy=self._reader_options.stream != self.stream,
        )
        name = f"partition {partition.id} of {self.stream}/{self.fleet}"
        processor = MessageProcessor(
            self._call, self._handling, name, on_crash=lambda: self._crashed(partition.id), slots=self._slots
        )
        run = _PartitionRun(
            self._core,
            processor,
            self._tasks,
            self._pin_requests,
            tell=self._tell,
            over=self._closed,
            started=self._show_soon,
            opening=self._opening,
            reads_copy=self._reader_options.stream != self.stream,
            is_open=lambda: self._partitions.opened is None or partition.id in self._partitions.opened,
            failed=self._leave,
            updated=self._consumer_updated,
        )
        processor.may_start = run.may_start
        processor.guard(self._is_unconfirmed)  # its pin is not known from before: nothing of it starts
        run.reader = self._new_reader(run, partition, processor, origin)
        run.reader.limit(self._partitions.last_of(partition.id))
        run.partition = partition.id
        run.origin = origin
        run.task = self._tasks.create_task(run.work(), name=name)
        return run

    def _new_reader(
        self, run: _PartitionRun, partition: Partition, processor: MessageProcessor, origin: PartitionOrigin
    ) -> PartitionReader | WorkerReader:
        place = self._place_of(partition)
        if self._layout is not None:
            assert self.id is not None
            number = self._core.lease.worker
            assert number is not None
            return self._layout.reader(
                Holder(self.id, number, self._core.lease.instance),
                partition,
                processor,
                place=place,
                origin=origin,
                ready=lambda: self._tell(PartitionPinned(partition.id)),
            )
        return PartitionReader(
            self._connection,
            partition,
            partition_consumer(self.fleet, partition.id),
            self._reader_options,
            processor,
            place=place,
            origin=origin,
            pinned=run.pinned,
            unpinned=run.unpinned,
            lost=run.reopen,
            redelivered=run.reset,
            positions=self._position_store(),
            pace=self._pace,
            budget=self._budget,
        )

    def _position_store(self) -> PositionStore | None:
        """Of the present lease. A work queue needs none: what is handled is gone."""
        if not self._reader_options.is_checkpointed or self._reader_options.is_queue:
            return None
        number, instance = self._core.lease.worker, self._core.lease.instance
        assert number is not None
        if self._positions is None or self._positions[0] != instance:
            store = PositionStore(self._connection, self._store, self._reader_options.stream, number, instance)
            self._positions = instance, store
        return self._positions[1]

    async def _keep_positions(self) -> None:
        """Record how far the partitions are handled: what is handled later may be repeated if a consumer is lost."""
        while True:
            await asyncio.sleep(self._checkpoint_s)
            owned = {run.partition: run.reader.position for run in self._runs.values() if run.token}
            if self._positions is None or not owned:
                continue
            try:
                known = {partition: position for partition, position in owned.items() if position}
                await self._positions[1].write(known, frozenset(owned))
            except KeylaneError as error:
                _log.warning("%r: its positions are not recorded, so more may be repeated: %s", self, error)

    def _probe(self) -> ConsumerProbe:
        def lost(reader: PartitionReader) -> None:
            for run in self._runs.values():
                if run.reader is reader and run.token:
                    run.reopen(None)

        def owned() -> list[PartitionReader]:
            readers = (run.reader for run in self._runs.values() if run.token)
            return [one for one in readers if isinstance(one, PartitionReader)]

        return ConsumerProbe(self._connection, owned, lost)

    def _closed(self, run: _PartitionRun) -> None:
        if self._runs.get(run.partition) is run:
            del self._runs[run.partition]
        self._show_soon()

    async def _end_retries(self, retrying: asyncio.Task[None]) -> None:
        assert self._retry_reader is not None
        self._retry_reader.stop()
        if self._is_orderly:
            await asyncio.wait({retrying}, timeout=self._stop_timeout_s)
        await self._retry_reader.cut()

    def _stop_retries(self) -> None:
        if self._retry_reader is not None:
            self._retry_reader.stop()

    def _retry_crashed(self) -> None:
        if self._retry_reader is not None and self._retry_reader.crash is not None:
            self._leave(self._retry_reader.crash)

    def _crashed(self, partition_id: str) -> None:
        run = self._runs.get(partition_id)
        if run is not None and run.processor.crash is not None:
            self._leave(run.processor.crash)

    # ---- what is shown --------------------------------------------------------------------------------------------

    def _report(self, state: WorkerState, waiting_for: str | None) -> None:
        if waiting_for is not None and self._store.failure is not None:
            waiting_for = f"{waiting_for} ({self._store.failure})"
        _log.log(
            logging.WARNING if state.is_degraded and state is not self.state else logging.INFO,
            "worker %s of %s/%s: %s%s",
            self.id or "?",
            self.stream,
            self.fleet,
            state,
            f", waiting for {waiting_for}" if waiting_for else "",
        )
        self.state, self.waiting_for = state, waiting_for
        self._call_hook(self._hooks.on_state, state, waiting_for)

    def _creations_wait(self, waiting: int) -> None:
        if self.waiting_for is None or self.waiting_for.endswith(_TO_BE_MADE):
            self._report(self.state, f"{waiting} {_TO_BE_MADE}" if waiting else None)

    def _handler_waits(self, waiting_for: str | None) -> None:
        if waiting_for is not None:
            _log.warning("%r: a handler waits for %s", self, waiting_for)

    def _show_soon(self) -> None:
        """Once for all partitions that change in this turn: there may be thousands."""
        if self._showing is None:
            self._showing = self._loop.call_soon(self._show_partitions)

    def _show_partitions(self) -> None:
        self._showing = None
        before, self._shown_partitions = self._shown_partitions, self.partitions
        if before != self._shown_partitions:
            self._call_hook(self._hooks.on_partitions, before, self._shown_partitions)

    def _show_assignment(self) -> None:
        self._shown_assignment = assignment = self._core.view.assignment
        if assignment is not None and self._core.lease.worker is not None:
            mine = assignment.partitions_of(self._core.lease.worker, self._core.lease.instance)
            self._call_hook(self._hooks.on_assignment, assignment, mine)

    def _consumer_updated(self, seconds: float, error: KeylaneError | None) -> None:
        self._call_hook(self._hooks.on_consumer_update, seconds, error)

    def _call_hook(self, hook: Callable[..., None] | None, *about: object) -> None:
        call_hook(hook, *about, log=_log, who=self)


class _Repair(Enum):
    """What a reader asks for itself."""

    OPEN = "open again"
    RESET = "reset the consumer"


class _PartitionRun:
    """The actions on one partition, one after the other."""

    reader: PartitionReader | WorkerReader
    partition: str
    origin: PartitionOrigin
    task: asyncio.Task[None]

    def __init__(
        self,
        core: FleetWorker,
        processor: MessageProcessor,
        tasks: asyncio.TaskGroup,
        pin_requests: asyncio.Semaphore,
        *,
        tell: Callable[[FleetEvent], None],
        over: Callable[[_PartitionRun], None],
        started: Callable[[], None],
        opening: asyncio.Semaphore,
        reads_copy: bool,
        is_open: Callable[[], bool],
        failed: Callable[[KeylaneError], None],
        updated: Callable[[float, KeylaneError | None], None],
    ) -> None:
        """`opening`: held while a partition is opened. `is_open`: whether anybody may own the partition."""
        self._updated = updated
        self.processor = processor
        self._reads_copy = reads_copy
        self._is_open = is_open
        self._core = core
        self._tasks = tasks
        self._pin_requests = pin_requests
        self._sure_pin: str | None = None
        """The last pin that it got while the lease was sure."""
        self._trusted_pin: str | None = None
        """While the lease is not confirmed: the pin that it had before."""
        self._pin_confirmed_at: float | None = None
        self._is_asking = False
        self._is_aside = False
        self.token = 0
        self._tell = tell
        self._over = over
        self._started = started
        self._opening = opening
        self._failed = failed
        self._has_failed = False
        self._actions: asyncio.Queue[PartitionAction | _Repair] = asyncio.Queue()

    def do(self, action: PartitionAction) -> None:
        self._actions.put_nowait(action)

    def reopen(self, error: KeylaneError | None) -> None:
        """The feed has ended by itself: its consumer was deleted, or the connection is closed."""
        _log.warning("%r has ended (%s); opening it again", self.reader, error)
        self._actions.put_nowait(_Repair.OPEN)

    def reset(self) -> None:
        self._actions.put_nowait(_Repair.RESET)

    def guard(self, unconfirmed: bool) -> None:
        """Begin or end to ask for the pin before every start.

        Only the pin of before counts: whoever takes the partition over clears it first, no earlier than others may
        expire the lease. A pin that this worker got after that may be one under another owner's claim. So a pin is
        noted when it comes, not here: this may be called late, by a process that stood still.
        """
        self._trusted_pin = self._sure_pin if unconfirmed else None
        self._pin_confirmed_at = None
        self.processor.guard(unconfirmed)
        if unconfirmed:
            return
        self._sure_pin = self.reader.pin_id
        if self._is_aside:
            self._is_aside = False
            self._actions.put_nowait(_Repair.OPEN)

    def pinned(self) -> None:
        """A message came under a new pin."""
        now = _clock()
        is_sure = self._core.lease.is_sure(now) and not self._core.is_unconfirmed(now)
        self._sure_pin = self.reader.pin_id if is_sure else None
        self._tell(PartitionPinned(self.partition))

    def unpinned(self) -> None:
        """The server has refused the pin."""
        self._sure_pin = None
        self._tell(PartitionUnpinned(self.partition))

    def may_start(self) -> bool:
        now = _clock()
        if self._core.may_start(now, self._pin_confirmed_at):
            return True
        if self._core.is_unconfirmed(now) and not self._is_asking and not self._is_aside:
            self._is_asking = True
            self._tasks.create_task(self._confirm_pin(), name=f"pin of partition {self.partition}")
        return False

    async def _confirm_pin(self) -> None:
        """While the store does not answer and messages wait: ask the server whether the pin is still ours."""
        trust_s = self._core.pin_trust_s
        try:
            while self._core.is_unconfirmed(_clock()) and self.processor.has_messages and not self._is_aside:
                async with self._pin_requests:
                    asked_at = _clock()
                    is_ours = await self._asks_pin()
                if is_ours:
                    self._pin_confirmed_at = asked_at
                    self.processor.guard(True)
                elif is_ours is not None and self._core.is_unconfirmed(_clock()):
                    _log.warning("partition %s: its pin is gone, another worker may have it", self.partition)
                    self._is_aside = True
                    await self.reader.step_aside()
                await asyncio.sleep(trust_s / 2)
        finally:
            self._is_asking = False
        self.processor.guard(self._core.is_unconfirmed(_clock()))

    async def _asks_pin(self) -> bool | None:
        """None: the server does not tell."""
        if self._trusted_pin is None:
            return False
        try:
            return await self.reader.has_pin(self._trusted_pin, self._core.spec.lease_s / 3)
        except KeylaneError as error:
            _log.debug("partition %s: the server does not tell whose pin it is: %s", self.partition, error)
            return None

    async def work(self) -> None:
        while True:
            action = await self._actions.get()
            if not self._has_failed:
                try:
                    await self._retried(action)
                except KeylaneError as error:  # it cannot pass
                    self._has_failed = True
                    self._failed(error)
            if self._has_failed:
                await self._give_up(action)
            if isinstance(action, ClosePartition) and self._actions.empty():
                break
        await self.processor.close()
        self._over(self)

    async def _give_up(self, action: PartitionAction | _Repair) -> None:
        """The worker leaves: nothing of this partition starts any more, and what it is asked for is answered."""
        self.token = 0
        await self.reader.drain(lost=True)
        match action:
            case DrainPartition():
                self._tell(PartitionDrained(self.partition))
                self._started()
            case ClosePartition():
                await self.reader.close()

    async def abandon(self) -> None:
        """The lease is lost: handlers have their grace to end, nothing is released."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.token = 0
        await self.reader.drain(lost=True)
        try:
            await self.reader.close()
        finally:
            await self.processor.close()

    async def _retried(self, action: PartitionAction | _Repair) -> None:
        name = action.value if isinstance(action, _Repair) else type(action).__name__
        backoff = Backoff(f"partition {self.partition}: {name}", log=_log)
        while True:
            begun, opens = time.monotonic(), action is _Repair.OPEN or isinstance(action, OpenPartition)
            try:
                await self._perform(action)
            except KeylaneError as error:
                if opens:
                    self._updated(time.monotonic() - begun, error)
                await backoff.after(error)
            else:
                if opens:
                    self._updated(time.monotonic() - begun, None)
                backoff.succeeded()
                return

    async def _open(self, opening: Callable[[], Awaitable[None]]) -> None:
        try:
            await opening()
        except NotFound as error:
            if self._reads_copy:
                raise CopyMissing(f"the copy that the fleet reads is gone: {error}") from error
            raise

    async def _perform(self, action: PartitionAction | _Repair) -> None:  # noqa: C901 - a case for each action
        match action:
            case _Repair.OPEN:
                async with self._opening:
                    if self._is_open():  # else its generation is over, and nobody makes its consumer again
                        await self._open(self.reader.reopen)
            case _Repair.RESET:
                await self.reader.reset()
            case OpenPartition():
                async with self._opening:
                    await self._open(self.reader.open)
            case StartPartition(_, token, force):
                if force:
                    await self.reader.take_pin()
                    await asyncio.sleep(self._core.pin_trust_s)
                await self.reader.start(token)
                self.token = token
                self._started()
            case ChangeToken(_, token):
                self.reader.change_token(token)
                self.token = token
            case UnpinPartition():
                async with self._opening:
                    if not self._is_aside:  # else another one may have it; if not, the next refusal asks again
                        await self.reader.take_pin()
            case DrainPartition(_, lost):
                self.token = 0
                await self.reader.drain(lost=lost)
                self._tell(PartitionDrained(self.partition))
                self._started()
            case ClosePartition():
                with suppress(NotFound):  # the consumer of a generation that is over
                    await self.reader.close()


async def _wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Until the event is set, which this clears, or the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    event.clear()


def identity_of(name: str | None, labels: Iterable[str]) -> WorkerIdentity:
    return WorkerIdentity(
        run=secrets.token_hex(8), name=name or "", host=socket.gethostname(), labels=tuple(sorted(labels))
    )


def _clock() -> float:
    """Seconds, also while the machine sleeps, where the system has such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _natural(partition_id: str) -> tuple[int, str]:
    return (int(partition_id), "") if partition_id.isdecimal() else (1 << 62, partition_id)

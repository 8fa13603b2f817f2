"""One partition as a worker reads it through the consumer that all its partitions share (layout `worker`).

The order of steps on a move: the old owner finishes what has begun, writes how far the partition is handled, has its
filter removed, and releases its claim. The new one claims, reads the position, has the filter added, and then:
- on a work queue the consumer is rewound: everything that was not acked comes in order, and what the position says is
  handled is acked without a handler;
- on a stream with limits the consumer delivers the end of the stream only. What is below is read by a `CatchUp`;
  meanwhile what the consumer delivers above is held, and follows when the catch-up has arrived there.

After a crash the last written position counts: messages above it come again, none is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import Enum, auto

from keylane.core.fleet_names import worker_in
from keylane.core.fleet_partitions import Partition
from keylane.core.fleet_records import HandledBut
from keylane.core.partition_deliveries import PartitionDeliveries
from keylane.errors import KeylaneError, NotFound, SubjectCapExceeded
from keylane.fleet.catch_up import CatchUp
from keylane.fleet.origin import PartitionOrigin
from keylane.fleet.positions import PositionStore
from keylane.fleet.shared_consumer import ConsumerTerms
from keylane.fleet.worker_consumer import WorkerConsumer
from keylane.jetstream import Connection, Message, consumers
from keylane.processing.message import GroupMessage, Placing
from keylane.processing.message_processor import MessageProcessor
from keylane.retrying import Backoff

_log = logging.getLogger("keylane.fleet")

_CAP_S = 1.0
_MOST_HELD = 64
"""Messages of one partition that wait for its catch-up: they count against what the consumer may have in flight."""


class _Mode(Enum):
    IDLE = auto()
    GAINING = auto()
    """Claimed, and not admitted yet: what arrives comes again, or is read by the catch-up."""
    CATCHING_UP = auto()
    STARTED = auto()
    DRAINING = auto()


class WorkerReader:
    """The reader of one partition, from `open` to `close`."""

    def __init__(
        self,
        connection: Connection,
        partition: Partition,
        consumer: WorkerConsumer,
        positions: PositionStore,
        processor: MessageProcessor,
        *,
        fleet: str,
        terms: ConsumerTerms,
        place: Placing,
        origin: PartitionOrigin,
        ready: Callable[[], None],
        on_trouble: Callable[[str], None],
        failed: Callable[[KeylaneError], None],
    ) -> None:
        """`ready`: called when there is no need to clear anybody's pin: this layout has none.

        `on_trouble`: told what the leader should know. `failed`: told what cannot pass.
        """
        self._connection = connection
        self._fleet = fleet
        self._partition = partition
        self._consumer = consumer
        self._positions = positions
        self._terms = terms
        self._processor = processor
        self._place = place
        self._origin = origin
        self._ready = ready
        self._on_trouble = on_trouble
        self._failed = failed
        self._mode = _Mode.IDLE
        self._deliveries = PartitionDeliveries(0)
        self._known = False
        """The position was read, so that `position` is one."""
        self._held: dict[int, Message] = {}
        self._join_at = 0
        self._final: int | None = None
        self._final_gap: HandledBut | None = None
        self._gaining: asyncio.Task[None] | None = None
        self._catching: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return (
            f"<WorkerReader {self._terms.stream}/{self._partition.id} {self._mode.name.lower()} {self._deliveries!r}>"
        )

    @property
    def position(self) -> int | None:
        """Everything of the partition up to this sequence is handled; None while it is not known."""
        if self._final is not None:
            return self._final
        return self._deliveries.position if self._known else None

    # ---- life -----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Nothing can be prepared: the filter may be added only when the owner before has removed it."""

    async def reopen(self) -> None:
        """The consumer makes itself again."""

    async def take_pin(self) -> None:
        """The owner before is gone without a release: delete its consumer, whose filter would block ours."""
        async for info in consumers.list_all(self._connection, self._terms.stream):
            filters = info.config.filter_subjects or (info.config.filter_subject,)
            is_ours = info.name.split("=")[0] == self._consumer.worker_id
            if self._partition.filter in filters and not is_ours and worker_in(info.name, self._fleet) is not None:
                _log.info("%r: deleting consumer %s of a worker that is gone", self, info.name)
                with suppress(NotFound):  # another partition's new owner was quicker
                    await consumers.delete(self._connection, self._terms.stream, info.name)

    def limit(self, last: int | None) -> None:
        """Partitions of another generation are refused before: a fleet of this layout is not repartitioned."""
        assert last is None, f"partition {self._partition.id} ends at {last}"

    @property
    def pin_id(self) -> str | None:
        """A pin of the shared consumer says nothing about one partition: without the store nothing starts."""
        return None

    async def has_pin(self, pin_id: str, timeout_s: float) -> bool:
        return False

    async def step_aside(self) -> None:
        """Nobody waits for a pin: whoever takes the partition over deletes the consumer."""

    async def reset(self) -> None:
        """Never asked for: what comes again is recognised."""

    async def start(self, token: int) -> None:
        """Handle the partition with this token, as soon as the consumer has it."""
        await self._stop_work()
        self._origin.token = token
        self._final, self._known = None, False
        self._mode = _Mode.GAINING
        self._join_at = 0
        self._drop_held()
        self._ready()
        self._gaining = asyncio.create_task(
            self._retried("begin to read it", self._gain), name=f"gain partition {self._partition.id}"
        )

    def change_token(self, token: int) -> None:
        self._origin.token = token

    async def _retried(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await Backoff(f"partition {self._partition.id}: {what}", log=_log).call(work)
        except KeylaneError as error:
            self._failed(error)

    async def _gain(self) -> None:
        self._deliveries = PartitionDeliveries(*await self._positions.handled_of(self._partition.id))
        self._known = True
        has_told = False
        try:
            while True:
                try:
                    await self._consumer.add(self._partition.filter, self)
                except SubjectCapExceeded as error:
                    has_told = True
                    self._on_trouble(str(error))
                    await asyncio.sleep(_CAP_S)
                else:
                    return
        finally:
            if has_told:  # also if the partition goes to another worker
                self._on_trouble("")

    async def drain(self, *, lost: bool) -> None:
        """Start nothing more, wait until nothing runs, write how far it is handled, have the filter removed.

        `lost`: another worker owns the partition by now. Handlers have their grace to end, and nothing is written.
        """
        await self._stop_work()
        self._mode = _Mode.DRAINING
        self._drop_held()
        if lost:
            self._origin.token = 0
            self._known = False
            self._processor.revoke()
            self._pass_on(await self._processor.let_go())
            self._consumer.drop(self._partition.filter)
            self._mode = _Mode.IDLE
            return
        dropped = await self._processor.finish_without_gaps()
        if self._final is None and self._known:
            self._final = self._deliveries.position
            self._final_gap = self._deliveries.gap if not self._terms.is_queue else None
        if self._final is not None:
            name, gap = self._partition.id, self._final_gap
            await self._positions.write({name: self._final}, gaps={name: gap} if gap is not None else None)
        self._pass_on(dropped)
        await self._consumer.remove(self._partition.filter)

    async def close(self) -> None:
        await self._stop_work()
        self._mode = _Mode.IDLE
        self._drop_held()
        self._origin.token = 0
        self._known, self._final = False, None
        self._pass_on(self._processor.forget())
        self._consumer.drop(self._partition.filter)
        self._origin.pin_id = None

    def _pass_on(self, dropped: list[GroupMessage]) -> None:
        """They come again elsewhere. Unacked they would count against what the other partitions may have in flight."""
        for message in dropped:
            if not self._terms.is_queue and not message.delivery.settled:
                message.delivery.ack()

    def _drop_held(self) -> None:
        held, self._held = self._held, {}
        for message in held.values():
            message.ack()

    async def _stop_work(self) -> None:
        tasks = [one for one in (self._gaining, self._catching) if one is not None]
        self._gaining = self._catching = None
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- what the consumer says ---------------------------------------------------------------------------------

    def pinned(self, pin_id: str | None) -> None:
        self._origin.pin_id = pin_id

    def admitted(self, last_sequence: int) -> None:
        if self._mode not in (_Mode.GAINING, _Mode.CATCHING_UP):
            return
        if self._terms.is_queue:
            self._mode = _Mode.STARTED
            return
        self._join_at = max(self._join_at, last_sequence)
        if self._mode is _Mode.GAINING:
            self._mode = _Mode.CATCHING_UP
            self._catching = asyncio.create_task(
                self._retried("catch up", self._catch_up), name=f"catch up partition {self._partition.id}"
            )

    def interrupted(self) -> None:
        """What runs goes on. `admitted` follows, and says how far to read from where the deliveries ended."""
        if self._catching is not None:
            self._catching.cancel()
        self._drop_held()
        if self._mode in (_Mode.STARTED, _Mode.CATCHING_UP):
            self._mode = _Mode.GAINING

    async def stream_made_anew(self) -> None:
        await self._processor.start_anew()
        self._deliveries = PartitionDeliveries(0)
        self._join_at = 0

    async def _catch_up(self) -> None:
        reading = CatchUp(
            self._connection,
            self._consumer.worker_id,
            self._partition.filter,
            self._terms,
            after=lambda: self._deliveries.position,
            offered=lambda: self._deliveries.highest,
            upto=lambda: self._join_at,
            take=self._take_earlier,
        )
        await reading.run()
        # Nothing is awaited from here on: what arrives next must find it done.
        self._mode = _Mode.STARTED
        held, self._held = self._held, {}
        if held:
            self._offer([held[sequence] for sequence in sorted(held)])

    # ---- messages -----------------------------------------------------------------------------------------------

    def take(self, batch: list[Message]) -> None:
        match self._mode:
            case _Mode.STARTED:
                self._offer(batch)
            case _Mode.CATCHING_UP:
                self._hold(batch)
            case _:
                self._pass_over(batch)

    def _take_earlier(self, batch: list[Message]) -> None:
        """Of the catch-up. One that ends may still deliver what was on its way: that is not handled here any more."""
        if self._mode is _Mode.CATCHING_UP:
            self._offer(batch)

    def _offer(self, batch: list[Message]) -> None:
        place, origin, deliveries = self._place, self._origin, self._deliveries
        messages, now = [], time.time()
        for one in batch:
            if deliveries.is_handled(one.sequence):
                deliveries.passed(one.sequence)
                one.ack()
            else:
                deliveries.offered(one.sequence, one)
                messages.append(GroupMessage(one, place(one.raw_subject), origin, now))
        if messages:
            self._processor.offer(messages)

    def _hold(self, batch: list[Message]) -> None:
        for one in batch:
            if one.sequence <= self._join_at:
                one.ack()  # the catch-up has it
            else:
                self._held[one.sequence] = one
        if len(self._held) > _MOST_HELD:
            held, self._held = self._held, {}
            self._join_at = max(held)
            for one in held.values():
                one.ack()

    def _pass_over(self, batch: list[Message]) -> None:
        """They come again, here or elsewhere. Those that were handled here are acked."""
        for one in batch:
            if not self._terms.is_queue:
                self._join_at = max(self._join_at, one.sequence)
                one.ack()
            elif self._known and self._deliveries.is_handled(one.sequence):
                one.ack()

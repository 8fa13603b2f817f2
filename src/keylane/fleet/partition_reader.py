"""One partition as a worker reads it: a pinned consumer with one filter that is created once and never changed.

Only who pulls moves. A reader that is opened waits as the server's standby. Started, it hands what arrives to the
handler, with the fencing token of its claim. Drained, it has finished what ran and the server has its acks. Closed, it
has given the pin back, and the next owner gets messages within milliseconds.

The claim decides who may handle, never the pin: what arrives before `start` waits here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from keylane.core.fleet_partitions import Partition
from keylane.errors import FleetError, KeylaneError, NotFound
from keylane.fleet.origin import PartitionOrigin
from keylane.jetstream import (
    Connection,
    ConsumerConfig,
    ConsumerInfo,
    Feed,
    FeedOptions,
    Message,
    PinOptions,
    consumers,
    open_feed,
)
from keylane.processing.message import GroupMessage, Placing
from keylane.processing.message_processor import MessageProcessor

_log = logging.getLogger("keylane.fleet")

PIN_GROUP = "fleet"
_QUORUM_AGE_S = 2.0
"""Servers of a cluster exchange heartbeats every second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderOptions:
    """What all partitions of a worker share."""

    stream: str
    is_queue: bool
    """A work queue, which deletes what is acked."""
    ack_wait_s: float
    max_ack_pending: int
    pin_timeout_s: float
    on_delivered: Callable[[list[Message]], None] | None = None

    def consumer(self, name: str, subject_filter: str, start: int | None) -> ConsumerConfig:
        return ConsumerConfig(
            durable_name=name,
            filter_subject=subject_filter,
            deliver_policy="all" if start is None else "by_start_sequence",
            opt_start_seq=start,
            ack_policy="explicit",
            ack_wait_s=self.ack_wait_s,
            max_deliver=-1,
            max_ack_pending=self.max_ack_pending,
            max_waiting=256,
            priority_groups=(PIN_GROUP,),
            priority_policy="pinned_client",
            priority_timeout_s=self.pin_timeout_s,
        )


class _Mode(Enum):
    HOLDING = auto()
    """Not claimed: what arrives waits here."""
    STARTED = auto()
    DRAINING = auto()
    """Nothing more starts: what arrives comes again, to the next owner."""


class PartitionReader:
    """The reader of one partition, from `open` to `close`."""

    def __init__(
        self,
        connection: Connection,
        partition: Partition,
        consumer: str,
        options: ReaderOptions,
        processor: MessageProcessor,
        *,
        place: Placing,
        origin: PartitionOrigin,
        pinned: Callable[[], None],
        unpinned: Callable[[], None],
        lost: Callable[[KeylaneError | None], None],
    ) -> None:
        """`pinned`: called when a message comes under a new pin. `unpinned`: when the server has refused ours. `lost`:
        when the feed ends by itself."""
        self._connection = connection
        self._partition = partition
        self._consumer = consumer
        self._options = options
        self._processor = processor
        self._place = place
        self._origin = origin
        self._pinned = pinned
        self._unpinned = unpinned
        self._lost = lost
        self._feed: Feed | None = None
        self._feed_end: asyncio.Task[None] | None = None
        self._mode = _Mode.HOLDING
        self._held: list[Message] = []
        self._last: int | None = None
        self._beyond: dict[int, Message] = {}
        """What came after `_last`: not for this generation, unless the limit moves."""
        self._floor = 0
        """Everything of the partition up to this sequence was handled when the consumer was last looked at."""
        self._highest = 0

    def __repr__(self) -> str:
        return f"<PartitionReader {self._options.stream}/{self._consumer} {self._mode.name.lower()} {self._feed!r}>"

    @property
    def is_open(self) -> bool:
        return self._feed is not None

    # ---- life -----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Create the consumer if it is missing, and pull: as a standby, until whoever is pinned gives the pin back."""
        self._drop_waiting()  # what came while the last feed was closed: something before it may have been passed over
        await self._ensure_consumer()
        options = self._options
        expires_s = options.pin_timeout_s / 2
        feed_options = FeedOptions(
            max_messages=options.max_ack_pending,
            expires_s=expires_s,
            heartbeat_s=expires_s / 2,
            pull_fields={"group": PIN_GROUP},
            pin=PinOptions(
                group=PIN_GROUP,
                timeout_s=options.pin_timeout_s,
                reset_on_takeover=True,
                on_pinned=self._got_pin,
                on_unpinned=self._lost_pin,
            ),
            on_messages=self._take,
            around_reset=self._processor.around_reset,
        )
        self._feed = await open_feed(self._connection, options.stream, self._consumer, feed_options)
        self._feed_end = asyncio.create_task(self._feed.wait(), name=f"end of {self._consumer}")
        self._feed_end.add_done_callback(self._feed_ended)

    async def reopen(self) -> None:
        """The feed has ended by itself. What was not handled comes again; the claim stays as it is."""
        feed, self._feed = self._feed, None
        self._feed_end = None
        if feed is not None:
            await feed.drain(0)
        await self.open()

    async def _ensure_consumer(self) -> None:
        """One that was deleted while this worker had the partition begins where this worker is."""
        start = None if self._options.is_queue else self._resume_at() if self._floor else self._partition.first or None
        wanted = self._options.consumer(self._consumer, self._partition.filter, start)
        stream = self._options.stream
        try:
            info = await consumers.info(self._connection, stream, self._consumer)
        except NotFound:
            info = await consumers.create(self._connection, stream, wanted, action="create")
        found = info.config
        if found.filter_subject != wanted.filter_subject or found.priority_groups != wanted.priority_groups:
            raise FleetError(
                f"consumer {self._consumer!r} of stream {stream!r} is not this fleet's: its filter is "
                f"{found.filter_subject!r}, and the fleet needs {wanted.filter_subject!r}. Delete it, or choose "
                "another name for the fleet"
            )
        self._floor = max(self._floor, info.ack_floor)

    def _resume_at(self) -> int:
        return self._processor.lowest_waiting or max(self._floor, self._highest) + 1

    async def start(self, token: int) -> None:
        """Handle the partition with this token."""
        self._origin.token = token
        self._mode = _Mode.STARTED
        held, self._held = self._held, []
        if held:
            self._take(held)

    def limit(self, last: int | None) -> None:
        """Start nothing that comes after this sequence; None: no limit. What came before the limit goes on."""
        self._last = last
        beyond, self._beyond = self._beyond, {}
        if beyond and self._mode is _Mode.STARTED:
            self._take([beyond[sequence] for sequence in sorted(beyond)])

    async def take_pin(self) -> None:
        """Clear the pin of whoever has it, unless it is ours, and have all that is not acked delivered again."""
        feed = self._feed
        assert feed is not None
        try:
            if feed.pin_id is None or self._pin_of(await self._info()) != feed.pin_id:
                await feed.take_pin()
        except NotFound as error:
            # It was deleted, and the feed ends; or a cluster that has lost a server does not know it for a moment.
            _log.warning("%r: the pin is not taken: %s", self, error)

    async def has_pin(self, timeout_s: float) -> bool:
        """Whether the server confirms now that the pin is ours.

        The leader of the consumer answers. One that was cut off from the other servers does not know yet that it was
        replaced; another is elected when they have heard nothing of it for 4 s. So it must have heard from them since.
        """
        feed = self._feed
        if feed is None or feed.pin_id is None:
            return False
        info = await consumers.info(self._connection, self._options.stream, self._consumer, timeout_s=timeout_s)
        return self._pin_of(info) == feed.pin_id and info.quorum_age_s < _QUORUM_AGE_S

    async def drain(self, *, lost: bool) -> None:
        """Start nothing more, wait until nothing runs, have the acks confirmed.

        `lost`: another worker owns the partition by now. Handlers have their grace to end, and no ack is waited for.
        """
        self._mode = _Mode.DRAINING
        self._drop_waiting()
        if lost:
            self._origin.token = 0
            self._processor.revoke()
            await self._processor.let_go()
            return
        if self._options.is_queue:
            await self._processor.let_go()
        else:
            await self._processor.finish_without_gaps()
        await self._processor.acks_sent()
        if self._feed is not None and self._feed.is_pinned:
            await self._feed.settle()

    async def close(self) -> None:
        """Stop pulling, and give the pin back if it is ours."""
        feed, self._feed = self._feed, None
        end, self._feed_end = self._feed_end, None
        self._mode = _Mode.HOLDING
        self._drop_waiting()
        self._origin.token = 0
        self._processor.forget()
        self._processor.forget_acks()
        if end is not None and not end.cancel() and not end.cancelled():
            end.exception()  # seen: it is being let go of
        if feed is not None:
            if feed.is_pinned and self._connection.is_connected:
                await feed.drain(0)
                await self._make_deliverable(feed)
            await feed.close()
        self._origin.pin_id = None

    async def _make_deliverable(self, feed: Feed) -> None:
        """What was delivered and not handled would otherwise come again after ack_wait only."""
        try:
            info = await self._info()
            if self._pin_of(info) == feed.pin_id and info.num_ack_pending:
                await consumers.reset(self._connection, self._options.stream, self._consumer)
        except KeylaneError as error:
            _log.warning("%r: what was not handled may come again as late as its ack wait: %s", self, error)

    # ---- what the feed says -----------------------------------------------------------------------------------

    def _take(self, batch: list[Message]) -> None:
        if self._options.on_delivered is not None and self._mode is not _Mode.HOLDING:
            self._options.on_delivered(batch)
        if self._mode is _Mode.HOLDING:
            self._held += batch
            return
        if self._last is not None:
            last = self._last
            self._beyond |= {one.sequence: one for one in batch if one.sequence > last}
            batch = [one for one in batch if one.sequence <= last]
            if not batch:
                return
        place, origin = self._place, self._origin
        messages = [GroupMessage(one, place(one.raw_subject), origin) for one in batch]
        if self._mode is _Mode.STARTED:
            self._highest = max(self._highest, batch[-1].sequence)
            self._processor.offer(messages)
        else:
            self._processor.pass_over(messages)

    def _drop_waiting(self) -> None:
        """It comes again, here or to whoever is next."""
        self._held.clear()
        self._beyond.clear()

    def _got_pin(self, pin_id: str) -> None:
        self._origin.pin_id = pin_id
        self._pinned()

    def _lost_pin(self, _pin_id: str) -> None:
        """What has not begun comes again, to whoever is pinned: here, or to a worker that claims the partition."""
        self._origin.pin_id = None
        self._drop_waiting()
        self._processor.forget()
        self._unpinned()

    def _feed_ended(self, end: asyncio.Task[None]) -> None:
        if end.cancelled() or self._feed_end is not end:
            return
        error = end.exception()
        self._processor.forget()
        self._lost(error if isinstance(error, KeylaneError) else None)

    # ---- small things -------------------------------------------------------------------------------------------

    async def _info(self) -> ConsumerInfo:
        return await consumers.info(self._connection, self._options.stream, self._consumer)

    @staticmethod
    def _pin_of(info: ConsumerInfo) -> str | None:
        return next((one.pinned_client_id for one in info.priority_groups if one.group == PIN_GROUP), None)

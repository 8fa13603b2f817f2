"""One partition as a worker reads it: a pinned consumer with one filter that is created once and never changed.

Only who pulls moves. A reader that is opened waits as the server's standby. Started, it hands what arrives to the
handler, with the fencing token of its claim. Drained, it has finished what ran and the server has its acks. Closed, it
has given the pin back, and the next owner gets messages within milliseconds.

The claim decides who may handle, never the pin: what arrives before `start` waits here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto

from keylane.core.fleet_partitions import Partition
from keylane.core.pull_budget import PullBudget, PullShare
from keylane.errors import ApiError, FleetError, KeylaneError, NotFound, RequestTimeout
from keylane.fleet.consumer_limit import TOO_MANY_CONSUMERS, CreationPace, ensure_room
from keylane.fleet.origin import PartitionOrigin
from keylane.fleet.pinned_consumer import PIN_GROUP, pin_in, pinned_consumer
from keylane.fleet.positions import PositionStore
from keylane.jetstream import (
    Connection,
    ConsumerConfig,
    ConsumerInfo,
    Feed,
    FeedOptions,
    Message,
    PinOptions,
    SharedBudget,
    consumers,
    open_feed,
)
from keylane.processing.feed_callbacks import FeedCallbacks
from keylane.processing.handler_options import Commits
from keylane.processing.message import GroupMessage, Placing, PrefixMessage
from keylane.processing.message_processor import MessageProcessor

_log = logging.getLogger("keylane.fleet")

_ANSWER_S = 1.0
_LEFT_TO_OWNER_S = 3.0
_EXISTS = 10148
_CREATE_TRIES = 5
_CREATE_PAUSE_S = 0.1
_LOOKS = 2
"""What an owner left behind is looked for when a partition is taken over; after that the lease is what ends owners."""
_LEAST_ACK_PENDING = 1000
"""Of a consumer, which never changes: workers with any budget read it, and ask for no more than that."""
MOST_BYTES = 32 * 1024 * 1024
"""In flight, of a worker over all its partitions."""
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
    """Of a worker, over all its partitions."""
    pin_timeout_s: float
    commits: Commits = "message"
    is_checkpointed: bool = False
    """Consumers are in memory with one replica; positions are kept in the fleet's bucket."""
    on_delivered: Callable[[list[Message]], None] | None = None

    def consumer(self, name: str, subject_filter: str, start: int | None) -> ConsumerConfig:
        return pinned_consumer(
            self,
            subject_filter,
            start,
            durable_name=name,
            ack_policy="all" if self.commits == "prefix" else "explicit",
            max_ack_pending=max(self.max_ack_pending, _LEAST_ACK_PENDING),
            num_replicas=1 if self.is_checkpointed else None,
            mem_storage=True if self.is_checkpointed else None,
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
        redelivered: Callable[[], None],
        pace: CreationPace,
        budget: PullBudget,
        positions: PositionStore | None = None,
    ) -> None:
        """`pinned`: called when a message comes under a new pin. `unpinned`: when the server has refused ours. `lost`:
        when the feed ends by itself. `redelivered`: when `reset` is due. `budget`: of all partitions of the worker.
        `positions`: of the owners before.
        """
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
        self._callbacks = FeedCallbacks()
        self._feed: Feed | None = None
        self._feed_end: asyncio.Task[str] | None = None
        self._mode = _Mode.HOLDING
        self._has_begun = False
        """Something was handed to the processor since `start`: from then on this owner knows best where it is."""
        self._held: list[Message] = []
        self._passed_over = 0
        """What came while draining and is not acked: it is in flight until the consumer is reset."""
        self._budget = budget
        self._share: PullShare | None = budget.share()  # now: those that are opened first must leave something
        processor.call_at_low_water(self._refill)
        self._message = PrefixMessage if options.commits == "prefix" else GroupMessage
        self._progress = processor.progress
        """None on a work queue, which has no positions: what is handled is gone."""
        self._pace = pace
        self._positions = positions if self._progress is not None else None
        if self._progress is not None:
            self._progress.redelivered = redelivered
            self._progress.learned(max(partition.first - 1, 0))
        self.server: str | None = None
        """The server that has the consumer, in a cluster."""
        self.seen_floor = 0
        self._was_without_pull = False
        self._was_delivered_to = False
        self._unanswered_since: float | None = None
        self._last: int | None = None
        self._beyond: dict[int, Message] = {}
        """What came after `_last`: not for this generation, unless the limit moves."""

    def __repr__(self) -> str:
        return f"<PartitionReader {self._options.stream}/{self._consumer} {self._mode.name.lower()} {self._feed!r}>"

    @property
    def is_open(self) -> bool:
        return self._feed is not None

    # ---- life -----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Create the consumer if it is missing, and pull: as a standby, until whoever is pinned gives the pin back."""
        self._callbacks.renew()
        self._drop_waiting()
        self._passed_over = 0
        if self._share is None:
            self._share = self._budget.share()
        self._share.clear()
        info = await self._ensure_consumer()
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
                resume_at=self._resume_at,
                looks=_LOOKS,
                on_pinned=self._callbacks.of_current(self._got_pin),
                on_unpinned=self._callbacks.of_current(self._lost_pin),
            ),
            on_messages=self._callbacks.of_current(self._take),
            budget=SharedBudget(share=self._share, in_flight=self._in_flight, on_window=self._processor.set_window),
            around_reset=self._around_reset,
        )
        self._feed = await open_feed(self._connection, options.stream, self._consumer, feed_options, known=info)
        self._feed_end = asyncio.create_task(self._feed.wait(), name=f"end of {self._consumer}")
        self._feed_end.add_done_callback(self._feed_ended)

    async def reopen(self) -> None:
        """The feed has ended by itself. What was not handled comes again; the claim stays as it is."""
        self._callbacks.renew()
        feed, self._feed = self._feed, None
        end, self._feed_end = self._feed_end, None
        if end is not None and not end.cancel() and not end.cancelled():
            end.exception()  # seen: it is why this is called
        if feed is not None:
            pin_id = feed.pin_id
            await feed.drain(0)
            self._processor.forget()
            self._processor.end_run()
            if self._options.is_checkpointed and pin_id is not None:
                await self._return_pin(pin_id)
        await self.open()

    async def _return_pin(self, pin_id: str) -> None:
        """The consumer may be well after all: then its pin would keep the next feed out."""
        try:
            if pin_in(await self._info(_ANSWER_S)) == pin_id:
                await consumers.unpin(self._connection, self._options.stream, self._consumer, PIN_GROUP)
        except (NotFound, RequestTimeout) as error:
            _log.debug("%r: %s", self, error)

    def was_delivered_to(self) -> bool:
        """Whether a message came since this was last asked."""
        found, self._was_delivered_to = self._was_delivered_to, False
        return found

    async def is_well(self, timeout_s: float) -> bool:
        """Whether the consumer is where it was, and has a pull of this reader. Raises if it does not answer."""
        feed, before = self._feed, self.seen_floor
        if feed is None:
            return True  # it is being opened
        info = await self._info(timeout_s)
        self.server, self.seen_floor = info.leader, info.ack_floor
        is_without_pull = not info.num_waiting and not info.num_pending and not info.num_ack_pending
        was_without_pull, self._was_without_pull = self._was_without_pull, is_without_pull
        return info.ack_floor >= before and not (is_without_pull and was_without_pull)

    async def _ensure_consumer(self) -> ConsumerInfo:
        """One that was deleted while this worker had the partition begins where this worker is."""
        stream, checkpointed = self._options.stream, self._options.is_checkpointed
        wanted = self._options.consumer(self._consumer, self._partition.filter, None)
        try:
            info = await self._info(_ANSWER_S if checkpointed else None)
        except NotFound:
            info = await self._create()
        except RequestTimeout:
            if not checkpointed or not self._may_replace():
                raise
            _log.warning("%r: its consumer does not answer, and is made again", self)
            consumers.post_delete(self._connection, stream, self._consumer)  # nobody would answer
            info = await self._create()
        self._unanswered_since = None
        if checkpointed and self._mode is _Mode.STARTED and self._progress is not None:
            position = self._progress.advance()
            if info.ack_floor < position:  # its server came back without what it had
                await consumers.reset(self._connection, stream, self._consumer, sequence=position + 1)
        self.server, self.seen_floor = info.leader, info.ack_floor
        found = info.config
        if found.filter_subject != wanted.filter_subject or found.priority_groups != wanted.priority_groups:
            raise FleetError(
                f"consumer {self._consumer!r} of stream {stream!r} is not this fleet's: its filter is "
                f"{found.filter_subject!r}, and the fleet needs {wanted.filter_subject!r}. Delete it, or choose "
                "another name for the fleet"
            )
        if found.ack_policy != wanted.ack_policy:
            raise FleetError(
                f"consumer {self._consumer!r} of stream {stream!r} has the ack policy {found.ack_policy!r}, and the "
                f"fleet needs {wanted.ack_policy!r}: delete it, or choose another name for the fleet"
            )
        if self._progress is not None:
            self._progress.learned(info.ack_floor)
        return info

    def _may_replace(self) -> bool:
        """Whether a consumer that does not answer is lost: the owner says so at once, others give it time for that."""
        now = time.monotonic()
        since = self._unanswered_since = self._unanswered_since or now
        return self._mode is _Mode.STARTED or now - since > _LEFT_TO_OWNER_S

    async def _create(self) -> ConsumerInfo:
        await self._learn_position()
        position = self._progress.advance() if self._progress is not None else 0
        start = position + 1 if position else None
        wanted = self._options.consumer(self._consumer, self._partition.filter, start)
        has_asked_for_room = False
        for _ in range(_CREATE_TRIES):
            try:
                async with self._pace.turn():
                    return await consumers.create(self._connection, self._options.stream, wanted, action="create")
            except ApiError as error:
                if error.err_code == TOO_MANY_CONSUMERS and not has_asked_for_room:
                    has_asked_for_room = True
                    await ensure_room(self._connection, self._options.stream, [self._consumer])
                    continue
                if error.err_code != _EXISTS:
                    raise
            await asyncio.sleep(_CREATE_PAUSE_S)
            with suppress(NotFound, RequestTimeout):  # somebody was quicker; or the one that is lost is still there
                return await self._info(_ANSWER_S)
        raise RequestTimeout(f"consumer {self._consumer!r} is there and does not answer")

    async def _learn_position(self) -> None:
        if self._positions is not None and self._progress is not None:
            self._progress.learned(await self._positions.position_of(self._partition.id))

    @property
    def position(self) -> int:
        """Everything of the partition up to here is handled."""
        return self._progress.advance() if self._progress is not None else 0

    async def start(self, token: int) -> None:
        """Handle the partition with this token."""
        await self._learn_position()
        self._origin.token = token
        if self._mode is _Mode.DRAINING and self._feed is not None and self._feed.is_pinned:
            # What was passed over must come before what is newer. Until then it is passed over as well: if the reset
            # fails, this is tried again.
            await self.reset()
        self._mode = _Mode.STARTED
        held, self._held = self._held, []
        if held:
            self._take(held)

    def change_token(self, token: int) -> None:
        """Go on with this token."""
        self._origin.token = token

    async def reset(self) -> None:
        """Have everything that is not handled delivered again, in order."""
        if self._feed is not None:
            position = self._progress.advance() if self._progress is not None else 0
            await self._feed.reset(position + 1 if position else None)

    def _resume_at(self) -> int | None:
        """Where this owner is, if it has begun. A work queue has only what is not handled, or was just acked here."""
        if not self._has_begun:
            return None
        if self._progress is None:
            return 1
        position = self._progress.advance()
        return position + 1 if position else None

    def limit(self, last: int | None) -> None:
        """Start nothing that comes after this sequence; None: no limit. What came before the limit goes on."""
        self._last = last
        beyond, self._beyond = self._beyond, {}
        if beyond and self._mode is _Mode.STARTED:
            self._take([beyond[sequence] for sequence in sorted(beyond)])

    async def take_pin(self) -> None:
        """Clear the pin of whoever has it, unless it is ours, and have all that is not acked delivered again."""
        if self._feed is None:  # it stepped aside
            await self.reopen()
        feed = self._feed
        assert feed is not None
        try:
            info = await self._info()
            pin = pin_in(info)
            is_idle = pin is None and not info.num_pending and not info.num_ack_pending
            if not is_idle and (pin is None or pin != feed.pin_id):  # idle, as most are: the next message comes here
                await feed.take_pin()
        except NotFound as error:
            # It was deleted, and the feed ends; or a cluster that has lost a server does not know it for a moment.
            _log.warning("%r: the pin is not taken: %s", self, error)

    @property
    def pin_id(self) -> str | None:
        return self._feed.pin_id if self._feed is not None else None

    async def has_pin(self, pin_id: str, timeout_s: float) -> bool:
        """Whether the server confirms now that this pin holds.

        The leader of the consumer answers. One that was cut off from the other servers does not know yet that it was
        replaced; another is elected when they have heard nothing of it for 4 s. So it must have heard from them since.
        """
        info = await consumers.info(self._connection, self._options.stream, self._consumer, timeout_s=timeout_s)
        return pin_in(info) == pin_id and info.quorum_age_s < _QUORUM_AGE_S

    async def step_aside(self) -> None:
        """Stop pulling, so that another worker gets the pin. `reopen` ends it."""
        self._callbacks.renew()  # what still arrives would be handled before what is dropped here
        feed, self._feed = self._feed, None
        end, self._feed_end = self._feed_end, None
        self._origin.pin_id = None
        self._drop_waiting()
        self._processor.forget()
        self._processor.end_run()
        if end is not None and not end.cancel() and not end.cancelled():
            end.exception()  # seen: it is being let go of
        if feed is not None:
            await feed.stop()
        if self._share is not None:
            self._share.clear()

    async def drain(self, *, lost: bool) -> None:
        """Start nothing more, wait until nothing runs, have the acks confirmed.

        `lost`: another worker owns the partition by now. Handlers have their grace to end, and no ack is waited for.
        """
        self._mode = _Mode.DRAINING
        self._has_begun = False
        self._drop_waiting()
        if lost:
            self._origin.token = 0
            self._processor.end_run()
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
        if self._positions is not None and self._progress is not None and self.position:
            await self._positions.write({self._partition.id: self.position})

    async def close(self) -> None:
        """Stop pulling, and give the pin back if it is ours."""
        self._callbacks.renew()
        feed, self._feed = self._feed, None
        end, self._feed_end = self._feed_end, None
        self._mode = _Mode.HOLDING
        self._has_begun = False
        self._drop_waiting()
        self._origin.token = 0
        self._processor.forget()
        self._processor.forget_acks()
        if end is not None and not end.cancel() and not end.cancelled():
            end.exception()  # seen: it is being let go of
        if feed is not None:
            if feed.is_pinned and self._connection.is_connected:
                await feed.hand_over()
            else:
                await feed.stop()
        self._origin.pin_id = None
        if self._share is not None:
            self._share.close()
            self._share = None

    # ---- what the feed says -----------------------------------------------------------------------------------

    def _take(self, batch: list[Message]) -> None:
        self._was_delivered_to = True
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
        make, place, origin = self._message, self._place, self._origin
        now = time.time()
        messages = [make(one, place(one.raw_subject), origin, now) for one in batch]
        if self._mode is _Mode.STARTED:
            self._has_begun = True
            self._processor.offer(messages)
        else:
            self._processor.pass_over(messages)
            if self._options.commits == "message":  # else what is not committed is counted
                self._passed_over += sum(not one.delivery.settled for one in messages)

    def _in_flight(self) -> int:
        return self._processor.in_flight + len(self._held) + len(self._beyond) + self._passed_over

    def _refill(self) -> None:
        if self._feed is not None:
            self._feed.refill()

    @contextmanager
    def _around_reset(self) -> Iterator[None]:
        self._drop_waiting()
        self._passed_over = 0
        with self._processor.around_reset():
            yield

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
        self._passed_over = 0
        self._processor.forget()
        self._processor.end_run()
        self._unpinned()

    def _feed_ended(self, end: asyncio.Task[str]) -> None:
        if end.cancelled() or self._feed_end is not end:
            return
        error = end.exception()
        self._processor.forget()
        self._processor.end_run()
        self._lost(error if isinstance(error, KeylaneError) else None)

    # ---- small things -------------------------------------------------------------------------------------------

    async def _info(self, timeout_s: float | None = None) -> ConsumerInfo:
        return await consumers.info(self._connection, self._options.stream, self._consumer, timeout_s=timeout_s)

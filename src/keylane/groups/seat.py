"""A member's consumer as one instance holds it: taken, moved to other partitions, left.

Level-triggered: `approach` is told which consumer there should be and does the next step towards it. It knows nothing
of groups and their records.

How partitions move in an elastic group (docs/groups.md has the reasons):
- losing some: their messages are no longer started, those at work finish, their acks are confirmed, then the consumer's
  filters are narrowed and the consumer is reset, which lets go of what was delivered and not started;
- gaining some: the filters are widened as soon as the server allows it, that is, after the others let go; then the
  consumer is rewound to the start of the queue, which brings the moved partitions' oldest messages first.
Messages of partitions that stay are not interrupted: what a reset delivers again is recognised by the lanes.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from nats.errors import Error as NatsError

from keylane.errors import ApiError, ConsumerGone, GroupConflict, GroupEnded, KeylaneError, NotFound, RequestTimeout
from keylane.groups import shape
from keylane.groups.gate import Gate
from keylane.groups.handling import Handling
from keylane.groups.message import GroupMessage, Placing
from keylane.jetstream import consumers, streams
from keylane.jetstream.connection import Connection
from keylane.jetstream.consumers import ConsumerConfig, ConsumerInfo
from keylane.jetstream.feed import Feed, FeedOptions, open_feed
from keylane.jetstream.message import Message
from keylane.jetstream.pinning import PinOptions

_log = logging.getLogger("keylane.groups")

_FILTERS_OVERLAP = 10100
_EXISTS_DIFFERENTLY = 10148
_CONSUMER_MISSING = (10014, 10149)
_NOT_CHANGEABLE = 10012
_TAKEN_RETRY_S = 0.025
_LONGEST_TAKEN_RETRY_S = 0.25
_STANDBY_WAIT_S = (0.4, 0.5)
_FENCE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatHooks:
    """Told what happens to a seat."""

    stirred: Callable[[], None]
    """Something happened: approach again soon."""
    activated: Callable[[], None]
    deactivated: Callable[[], None]
    rebalanced: Callable[[frozenset[int], frozenset[int]], None]


class Seat:
    """The consumer `consumer` of `stream`, for the messages of one member."""

    def __init__(
        self, connection: Connection, consumer: tuple[str, str], handling: Handling, place: Placing, hooks: SeatHooks
    ) -> None:
        self._connection = connection
        self._stream, self._consumer = consumer
        self._handling = handling
        self._place = place
        self._hooks = hooks
        self._filters: tuple[str, ...] = ()
        self._feed: Feed | None = None
        self._feed_end: asyncio.Task[None] | None = None
        self._gate = Gate()
        self._left: list[GroupMessage] = []
        self._must_rewind = False
        self._starts_at_the_start = False
        self._stream_made: datetime | None = None
        self._taken_retry_s = _TAKEN_RETRY_S
        self._told_active = False
        self._told_difference = ""

    def __repr__(self) -> str:
        return f"<Seat {self._stream}/{self._consumer} {sorted(self.partitions)} {self._gate!r} {self._feed!r}>"

    @property
    def is_active(self) -> bool:
        """Whether this instance is the one that gets messages."""
        return self._feed is not None and self._feed.is_pinned

    @property
    def partitions(self) -> frozenset[int]:
        """What the consumer covers now, as far as this instance knows."""
        return _partitions_in(self._filters)

    async def approach(self, wanted: ConsumerConfig | None) -> float | None:
        """One step towards this consumer (None: none); returns when to try again, if that is soon."""
        await self._look_at_the_feed()
        try:
            return await self._step(wanted)
        except ApiError as error:
            if error.err_code not in _CONSUMER_MISSING:
                raise
            _log.warning("%s/%s is gone (%s); making it again", self._stream, self._consumer, error)
            await self._drop_feed()
            return 0.0

    async def leave(self) -> None:
        """Finish what is at work, confirm the acks, hand the pin over. What has not started goes to the next."""
        if self._feed is None:
            return
        self._gate.shut()
        self._left = self._handling.forget()
        await self._handling.finish()
        feed, was_active = self._feed, self.is_active
        try:
            await feed.drain(0)
            await self._finish_the_rest()
            if was_active:
                await self._give_back(feed)
        finally:
            await self._drop_feed()

    # ---- the next step --------------------------------------------------------------------------------

    async def _look_at_the_feed(self) -> None:
        end = self._feed_end
        if end is None or not end.done():
            return
        error = end.exception()
        if error is not None and not isinstance(error, ConsumerGone):
            raise error
        _log.warning("%s/%s is gone; making it again", self._stream, self._consumer)
        await self._drop_feed()

    async def _step(self, wanted: ConsumerConfig | None) -> float | None:
        if wanted is None:
            await self._give_up()
            return None
        if self._feed is None:
            return await self._enter(wanted)
        if self._must_rewind:
            await self._rewind()
        if wanted.filter_subjects == self._filters and not self._gate.shunned & self.partitions:
            return None
        before = self.partitions
        try:
            return await self._move(wanted)
        finally:
            self._rebalanced(before)

    async def _enter(self, wanted: ConsumerConfig) -> float | None:
        """Make the member's consumer, or join the one that is there, and start pulling."""
        try:
            info = await consumers.create(self._connection, self._stream, wanted, action="create")
        except NotFound as error:
            raise GroupEnded(f"stream {self._stream!r} does not exist any more: create the group again") from error
        except ApiError as error:
            if error.err_code == _FILTERS_OVERLAP:
                return self._later()
            if error.err_code == _EXISTS_DIFFERENTLY:
                return await self._meet(wanted)
            raise
        self._taken_retry_s = _TAKEN_RETRY_S
        await self._open(wanted, info)
        return None

    async def _meet(self, wanted: ConsumerConfig) -> float | None:
        """Our consumer exists, made with other settings: of an older membership, or by an instance that differs."""
        info = await self._info()
        different = shape.difference(wanted, info.config)
        if different is None:
            await self._open(wanted, info)
            return random.uniform(*_STANDBY_WAIT_S)  # noqa: S311 - spreads instances, no secret
        if info.num_waiting or _pinned(info):
            level = logging.ERROR if different != self._told_difference else logging.DEBUG
            self._told_difference = different
            _log.log(
                level,
                "another instance runs on %s/%s with other settings (%s); waiting until it is gone. Give all instances "
                "of a member the same settings",
                self._stream, self._consumer, different,
            )  # fmt: skip
            return wanted.priority_timeout_s
        return await self._adopt(wanted, info, different)

    async def _adopt(self, wanted: ConsumerConfig, info: ConsumerInfo, different: str) -> float | None:
        """Nobody is on the consumer any more: it gets our settings."""
        try:
            await consumers.update(
                self._connection, self._stream, replace(wanted, filter_subjects=info.config.filter_subjects)
            )
        except ApiError as error:
            if error.err_code != _NOT_CHANGEABLE:
                raise
            if wanted.durable_name is None:
                return wanted.priority_timeout_s  # it goes away by itself
            raise GroupConflict(
                f"consumer {self._consumer!r} of stream {self._stream!r} was made with other settings ({different}), which "
                "the server cannot change: use those settings, or delete the consumer"
            ) from error
        _log.warning("%s/%s now has this instance's settings; before, %s", self._stream, self._consumer, different)
        return 0.0

    # ---- the feed -------------------------------------------------------------------------------------

    async def _open(self, wanted: ConsumerConfig, info: ConsumerInfo) -> None:
        before = self.partitions
        await self._know_the_stream()
        self._gate = Gate()
        self._must_rewind = False
        self._starts_at_the_start = wanted.durable_name is not None or info.delivered_sequence == info.ack_floor == 0
        timeout_s = wanted.priority_timeout_s or shape.DEFAULT_ACK_WAIT_S
        expires_s = min(max((wanted.ack_wait_s or timeout_s) / 2, 1.0), timeout_s / 2)
        assert wanted.priority_groups is not None
        limit = wanted.max_ack_pending or shape.DEFAULT_MAX_ACK_PENDING
        acked = wanted.ack_policy != "none"
        options = FeedOptions(
            max_messages=limit,
            expires_s=expires_s,
            heartbeat_s=expires_s / 2,
            pull_fields={"group": wanted.priority_groups[0]},
            pin=PinOptions(
                group=wanted.priority_groups[0],
                timeout_s=timeout_s,
                reset_on_takeover=self._can_reset and acked and limit > 1,
                on_pinned=self._pinned,
                on_unpinned=self._unpinned,
            ),
            on_messages=self._take if acked else None,
        )
        self._feed = await open_feed(self._connection, self._stream, self._consumer, options)
        self._feed_end = asyncio.create_task(self._watch(self._feed, None if acked else limit))
        self._feed_end.add_done_callback(lambda _: self._hooks.stirred())
        self._filters = info.config.filter_subjects or ()
        self._rebalanced(before)

    async def _watch(self, feed: Feed, limit: int | None) -> None:
        """Wait for the feed's end. Without acks nothing bounds what the server sends: then read here, with a bound."""
        if limit is not None:
            async for batch in feed.batches(limit):
                self._take(batch)
                await self._handling.room(limit)
        await feed.wait()

    async def _know_the_stream(self) -> None:
        """A stream that was deleted and made again counts from 1: what is known of the old one means nothing."""
        made = (await streams.state(self._connection, self._stream)).created
        if self._stream_made not in (None, made):
            await self._handling.start_anew()
        self._stream_made = made

    async def _drop_feed(self) -> None:
        feed, self._feed = self._feed, None
        end, self._feed_end = self._feed_end, None
        if end is not None:
            end.cancel()
        self._handling.forget()
        if feed is not None:
            await feed.close()
        self._tell_deactivated()

    async def _finish_the_rest(self) -> None:
        """Without acks, what was delivered is not delivered again: all of it is handled before the end."""
        if self._feed_end is not None and self._feed is not None and not self._feed_is_fed_directly:
            await asyncio.wait({self._feed_end})
            await self._handling.finish()

    async def _give_back(self, feed: Feed) -> None:
        """Make what was delivered and not handled deliverable at once, to whoever is pinned next."""
        await feed.settle()
        info = await self._info()
        if _pinned(info) != feed.pin_id or not info.num_ack_pending:
            return
        if self._can_reset:
            await consumers.reset(self._connection, self._stream, self._consumer)
            return
        for message in sorted(self._left, key=lambda one: one.sequence):
            if not message.delivery.settled:
                message.nak()

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
import secrets
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from nats.errors import Error as NatsError

from keylane.errors import ApiError, ConsumerGone, GroupConflict, GroupEnded, NotFound, RequestTimeout
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
_CLAIM_S = 2.0
_RESET_S = 1.5
_SETTLE_S = 2.0
_LOOK_AGAIN_S = 0.005


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
        self,
        connection: Connection,
        consumer: tuple[str, str],
        handling: Handling,
        *,
        place: Placing,
        max_held: int,
        hooks: SeatHooks,
    ) -> None:
        self._connection = connection
        self._stream, self._consumer = consumer
        self._handling = handling
        self._place = place
        self._max_held = max_held
        self._hooks = hooks
        self._filters: tuple[str, ...] = ()
        self._feed: Feed | None = None
        self._feed_end: asyncio.Task[None] | None = None
        self._acked = self._durable = True
        self._gate = Gate()
        self._left: list[GroupMessage] = []
        self._pin_id = ""
        self._must_rewind = False
        self._stream_made: datetime | None = None
        self._clustered = self._replicated = False
        self._looked_at: frozenset[int] = frozenset()
        self._acked_again = 0
        self._taken_retry_s = _TAKEN_RETRY_S
        self._told_active = False
        self._told_partitions: frozenset[int] = frozenset()
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

    # ---- what a member asks of it ---------------------------------------------------------------------

    async def attend(self) -> None:
        """Do what is due whatever the group says: look after a lost consumer, rewind after a takeover."""
        end = self._feed_end
        if end is not None and end.done():
            error = end.exception()
            if error is not None and not isinstance(error, ConsumerGone):
                raise error
            _log.warning("%s is gone; making it again", self._name)
            await self._drop_feed()
        if self._must_rewind:
            await self._while_it_is_there(self._rewind())

    async def approach(self, wanted: ConsumerConfig | None) -> float | None:
        """One step towards this consumer (None: none); returns when to try again, if that is soon."""
        return await self._while_it_is_there(self._step(wanted))

    async def leave(self) -> None:
        """Finish what is at work, confirm the acks, hand the pin over. What has not started goes to the next."""
        feed = self._feed
        if feed is None:
            return
        try:
            if self._acked:
                self._gate.shut()
                self._left = self._handling.forget()
                await self._handling.finish()
                was_active = self.is_active
                await feed.drain(0)
                if was_active and self._connection.is_connected:
                    await self._give_back(feed)
            else:
                await self._finish_without_acks(feed)
        finally:
            await self._drop_feed()

    # ---- the next step --------------------------------------------------------------------------------

    async def _while_it_is_there(self, doing: Coroutine[Any, Any, float | None]) -> float | None:
        try:
            return await doing
        except ApiError as error:
            if error.err_code not in _CONSUMER_MISSING:
                raise
            _log.warning("%s is gone (%s); making it again", self._name, error)
            await self._drop_feed()
            return 0.0

    async def _step(self, wanted: ConsumerConfig | None) -> float | None:
        if wanted is None:
            await self._give_up()
            return None
        if self._gate.is_shut:  # giving up was interrupted, and now it is wanted again
            await self._drop_feed()
        if self._feed is None:
            return await self._enter(wanted)
        if wanted.filter_subjects == self._filters and not self._gate.shunned & self.partitions:
            return None
        try:
            return await self._move(wanted)
        finally:
            self._tell_partitions()

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
        if not info.num_waiting and not _pinned(info):
            return await self._adopt(wanted, info, different)
        _log.log(
            logging.DEBUG if different == self._told_difference else logging.ERROR,
            "another instance runs on %s with other settings (%s); waiting until it is gone. Give all instances of a "
            "member the same settings",
            self._name,
            different,
        )
        self._told_difference = different
        return wanted.priority_timeout_s

    async def _adopt(self, wanted: ConsumerConfig, info: ConsumerInfo, different: str) -> float | None:
        """Nobody is on the consumer any more: it gets our settings."""
        try:
            await self._update(replace(wanted, filter_subjects=info.config.filter_subjects))
        except ApiError as error:
            if error.err_code != _NOT_CHANGEABLE:
                raise
            if wanted.durable_name is None:
                return wanted.priority_timeout_s  # it goes away by itself
            raise GroupConflict(
                f"consumer {self._consumer!r} of stream {self._stream!r} was made with other settings ({different}), "
                "which the server cannot change: use those settings, or delete the consumer"
            ) from error
        _log.warning("%s has this instance's settings now; before, %s", self._name, different)
        return 0.0

    # ---- the feed -------------------------------------------------------------------------------------

    async def _open(self, wanted: ConsumerConfig, info: ConsumerInfo) -> None:
        await self._know_the_stream()
        self._gate = Gate()
        self._pin_id, self._must_rewind = "", False
        self._acked = wanted.ack_policy != "none"
        self._durable = wanted.durable_name is not None
        options = self._feed_options(wanted)
        self._feed = await open_feed(self._connection, self._stream, self._consumer, options)
        self._feed_end = asyncio.create_task(self._watch(self._feed))
        self._feed_end.add_done_callback(lambda _: self._hooks.stirred())
        self._filters = info.config.filter_subjects or ()
        self._tell_partitions()

    def _feed_options(self, wanted: ConsumerConfig) -> FeedOptions:
        timeout_s = wanted.priority_timeout_s or shape.DEFAULT_ACK_WAIT_S
        expires_s = min(max((wanted.ack_wait_s or timeout_s) / 2, 1.0), timeout_s / 2)
        assert wanted.priority_groups is not None
        return FeedOptions(
            max_messages=self._max_held,
            expires_s=expires_s,
            heartbeat_s=expires_s / 2,
            pull_fields={"group": wanted.priority_groups[0]},
            pin=PinOptions(
                group=wanted.priority_groups[0],
                timeout_s=timeout_s,
                reset_on_takeover=self._can_reset and self._acked and self._max_held > 1,
                on_pinned=self._activated,
                on_unpinned=self._deactivated,
            ),
            on_messages=self._take if self._acked else None,
        )

    async def _watch(self, feed: Feed) -> None:
        """Wait for the feed's end. Without acks nothing bounds what the server sends: then read here, with a bound."""
        if not self._acked:
            async for batch in feed.batches(self._max_held):
                self._take(batch)
                await self._handling.room(self._max_held)
        await feed.wait()

    async def _know_the_stream(self) -> None:
        """A stream that was deleted and made again counts from 1: what is known of the old one means nothing."""
        wire = await self._connection.api.request(f"STREAM.INFO.{self._stream}")
        self._clustered = "name" in wire.get("cluster", {})
        self._replicated = wire["config"]["num_replicas"] > 1
        made = streams.StreamState.from_wire(wire).created
        if self._stream_made not in (None, made):
            _log.warning("stream %s was made anew", self._stream)
            await self._handling.start_anew()
        self._stream_made = made

    async def _drop_feed(self) -> None:
        feed, self._feed = self._feed, None
        end, self._feed_end = self._feed_end, None
        if end is not None:
            end.cancel()
        self._must_rewind = False
        self._handling.forget()
        if feed is not None:
            await feed.close()
        self._tell_deactivated()

    # ---- moving partitions ----------------------------------------------------------------------------

    async def _move(self, wanted: ConsumerConfig) -> float | None:
        if not self.is_active:
            info = await self._info()
            self._filters = info.config.filter_subjects or ()
            if self._filters == wanted.filter_subjects:
                return None
            if _pinned(info):  # a standby only watches, unless nobody is active
                return random.uniform(*_STANDBY_WAIT_S)  # noqa: S311
        if not self._can_reset:
            await self._give_up()
            return 0.0
        lost = self.partitions - _partitions_in(wanted.filter_subjects)
        if lost and not await self._let_go(wanted, lost):
            return 0.0
        if not await self._gain(wanted):
            return self._later()
        self._taken_retry_s = _TAKEN_RETRY_S
        return None

    async def _let_go(self, wanted: ConsumerConfig, lost: frozenset[int]) -> bool:
        """Give these partitions back; False: nothing is left, or it has become another instance's business."""
        assert self._feed is not None
        was_active = self.is_active
        self._gate.shun(lost)

        def is_lost(message: GroupMessage) -> bool:
            return message.partition in lost

        self._handling.forget(is_lost)
        await self._handling.finish(is_lost)
        await self._settle(self._feed, lost)
        if was_active and not self.is_active:
            return False
        kept = [one for one in wanted.filter_subjects or () if _partition_in(one) in self.partitions]
        if not kept:
            await self._give_up()
            return False
        await self._update(replace(wanted, filter_subjects=tuple(kept)))
        await self._reset(None)
        await self._fence()
        self._gate.shun_no_more(lost)
        return True

    async def _gain(self, wanted: ConsumerConfig) -> bool:
        """Widen the filters; False while another member still has one of the partitions."""
        target = _partitions_in(wanted.filter_subjects)
        gained = (target - self.partitions) | (self._gate.shunned & target)
        if not gained:
            await self._update(wanted)
            return True
        self._gate.hold(gained)
        try:
            await self._claim(tuple(one for one in wanted.filter_subjects or () if _partition_in(one) in gained))
            await self._update(wanted)
        except ApiError as error:
            self._gate.hold_no_more(gained)
            if error.err_code == _FILTERS_OVERLAP:
                return False
            raise
        self._gate.shun_no_more(gained)
        await self._rewind()
        return True

    async def _settle(self, feed: Feed, partitions: frozenset[int]) -> None:
        """Wait until the server has all acks, and a replicated queue has dropped what was acked.

        Replicas drop a message a while after its ack was confirmed, and under load now and then not at all; whoever
        reads the queue next would get it again. So read the queue from its start, and ack again what is still there.
        """
        await feed.settle()
        if not self._replicated or self._durable or not self._can_reset:
            return
        loop = asyncio.get_running_loop()
        end = loop.time() + _SETTLE_S
        while loop.time() < end:
            self._acked_again = 0
            self._looked_at = partitions
            await self._reset(1)
            await self._fence()
            if not self._acked_again:
                break
            await feed.settle()
            await asyncio.sleep(_LOOK_AGAIN_S)
        else:
            _log.warning("%s: acked messages are still there after %g s", self._stream, _SETTLE_S)
        self._looked_at = frozenset()

    async def _claim(self, filters: tuple[str, ...]) -> None:
        """Make sure that no other member has these: a cluster (2.15) checks it for new consumers, not changed ones."""
        if not self._clustered:
            return
        name = f"keylane-claim-{secrets.token_hex(6)}"
        claim = ConsumerConfig(name=name, filter_subjects=filters, inactive_threshold_s=_CLAIM_S, mem_storage=True)
        await consumers.create(self._connection, self._stream, claim, action="create")
        await consumers.delete(self._connection, self._stream, name)

    async def _rewind(self) -> None:
        """Deliver from the start of the queue.

        Twice: after the first time, and once all that was sent before it is here, a delivery with count 1 can only be
        from the start, whichever of the two it follows.
        """
        self._must_rewind = True
        await self._reset(1)
        await self._fence()
        self._gate.expect_beginning()
        await self._reset(1)
        self._must_rewind = False

    async def _fence(self) -> None:
        """Wait until all that the consumer sent is here: it answers a pull that it refuses in line with messages."""
        subject = self._connection.api.subject(f"CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}")
        try:
            await self._connection.nats.request(subject, b'{"batch":1}', timeout=_FENCE_S)
        except NatsError as error:
            raise RequestTimeout(f"no answer on {subject} within {_FENCE_S:g} s ({error})") from error

    async def _reset(self, sequence: int | None) -> None:
        """A consumer that has no leader at the moment does not answer; asking again is no harm."""
        try:
            async with asyncio.timeout(_RESET_S):
                if self._feed is not None:
                    # With its pulls closed: a reset that races with deliveries loses messages in a cluster (2.15.1).
                    await self._feed.reset(sequence)
                else:
                    await consumers.reset(self._connection, self._stream, self._consumer, sequence=sequence)
        except TimeoutError as error:
            raise RequestTimeout(f"no reset of {self._name} within {_RESET_S:g} s") from error

    async def _update(self, config: ConsumerConfig) -> None:
        await consumers.update(self._connection, self._stream, config)
        self._filters = config.filter_subjects or ()

    # ---- leaving --------------------------------------------------------------------------------------

    async def _give_up(self) -> None:
        """The member has no partitions any more: its consumer goes, if it is for this instance to say so."""
        if self._feed is not None:
            if self.is_active:
                self._gate.shut()
                self._handling.forget()
                await self._handling.finish()
                await self._settle(self._feed, self.partitions)
            if self.is_active or _pinned(await self._info()) is None:
                await consumers.delete(self._connection, self._stream, self._consumer)
            await self._drop_feed()
        self._filters = ()
        self._tell_partitions()

    async def _give_back(self, feed: Feed) -> None:
        """Make what was delivered and not handled deliverable at once, to whoever is pinned next."""
        await self._settle(feed, self.partitions)
        info = await self._info()
        if _pinned(info) != feed.pin_id or not info.num_ack_pending:
            return
        if self._can_reset:
            await self._reset(None)
            return
        for message in sorted(self._left, key=lambda one: one.sequence):
            if not message.delivery.settled:
                message.nak()

    async def _finish_without_acks(self, feed: Feed) -> None:
        """What was delivered never comes again: all of it is handled before the end."""
        pin_id = feed.pin_id if self.is_active else None
        await feed.drain()
        if self._feed_end is not None:
            await asyncio.wait({self._feed_end})
        await self._handling.finish()
        info = await self._info()
        if pin_id is not None and _pinned(info) == pin_id:
            await consumers.unpin(self._connection, self._stream, self._consumer, info.priority_groups[0].group)

    # ---- what arrives ---------------------------------------------------------------------------------

    def _take(self, batch: list[Message]) -> None:
        place = self._place
        messages = [GroupMessage(one, place(one.raw_subject)) for one in batch]
        if self._looked_at:
            known = self._handling.ack_known(messages)
            self._acked_again += sum(one.partition in self._looked_at for one in known)
        if not self._gate.is_open:
            if self._gate.is_shut and not self._can_reset:
                self._left += messages
            messages = self._gate.passing(messages)
        self._handling.offer(messages)

    def _activated(self, pin_id: str) -> None:
        if pin_id != self._pin_id and not self._durable and self._can_reset:
            # The instance before us may have ended between widening the filters and rewinding.
            self._gate.hold_all()
            self._must_rewind = True
        self._pin_id = pin_id
        if not self._told_active:
            self._told_active = True
            self._hooks.activated()
        self._hooks.stirred()

    def _deactivated(self, _pin_id: str) -> None:
        self._gate.shun_no_more()
        self._handling.forget()
        self._tell_deactivated()

    # ---- small things ---------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return f"{self._stream}/{self._consumer}"

    @property
    def _can_reset(self) -> bool:
        return self._connection.supports("consumer_reset")

    async def _info(self) -> ConsumerInfo:
        return await consumers.info(self._connection, self._stream, self._consumer)

    def _later(self) -> float:
        delay_s = self._taken_retry_s
        self._taken_retry_s = min(2 * delay_s, _LONGEST_TAKEN_RETRY_S)
        return delay_s

    def _tell_deactivated(self) -> None:
        if self._told_active:
            self._told_active = False
            self._hooks.deactivated()

    def _tell_partitions(self) -> None:
        before, self._told_partitions = self._told_partitions, self.partitions
        if before != self._told_partitions:
            self._hooks.rebalanced(before, self._told_partitions)


def _pinned(info: ConsumerInfo) -> str | None:
    """The pin of a group's consumer; it has one priority group."""
    return next((state.pinned_client_id for state in info.priority_groups if state.pinned_client_id), None)


def _partition_in(filter_subject: str) -> int:
    return int(filter_subject.split(".", 1)[0])


def _partitions_in(filters: Iterable[str] | None) -> frozenset[int]:
    return frozenset(_partition_in(one) for one in filters or ())

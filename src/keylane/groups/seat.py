"""A member's consumer as one instance holds it: taken, moved to other partitions, left.

Level-triggered: `approach` is told which consumer there should be and does the next step towards it. It knows nothing
of groups and their records.

How partitions move in an elastic group (docs/groups.md has the reasons):
- losing some: their messages are no longer started, those at work finish, their acks are confirmed, then the consumer's
  filters are narrowed and the consumer is reset, which lets go of what was delivered and not started;
- gaining some: the filters are widened as soon as the server allows it, that is, after the others let go; then the
  consumer is rewound to the start of the queue, which brings the moved partitions' oldest messages first.
Messages of partitions that stay are not interrupted: what a reset delivers again is recognised by the lanes.

In a cluster (2.15) that is not safe: it lets a consumer widen its filters to what another one has, and where the queue
is replicated, deliveries and the removal of acked messages come late. There, and on servers without resets, a member
that moves finishes all its work and makes its consumer anew. The other members are not interrupted.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from keylane.errors import ApiError, ConsumerGone, GroupConflict, GroupEnded
from keylane.groups import shape
from keylane.groups.gate import Gate
from keylane.groups.handling import Handling
from keylane.groups.message import GroupMessage, Placing
from keylane.groups.origin import Origin
from keylane.groups.remote import FILTERS_OVERLAP, RemoteConsumer, StreamFacts, partition_in, partitions_in, pinned
from keylane.jetstream.connection import Connection
from keylane.jetstream.consumers import ConsumerConfig, ConsumerInfo
from keylane.jetstream.feed import Feed, FeedOptions, open_feed
from keylane.jetstream.message import Message
from keylane.jetstream.pinning import PinOptions

_log = logging.getLogger("keylane.groups")

_EXISTS_DIFFERENTLY = 10148
_CONSUMER_MISSING = (10014, 10149)
_STREAM_MISSING = 10059
_NOT_CHANGEABLE = 10012
_TAKEN_RETRY_S = 0.025
_LONGEST_TAKEN_RETRY_S = 0.25
_STANDBY_WAIT_S = (0.4, 0.5)
_AWAY_S = (0.2, 1.2)
_LOOK_BELOW_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatHooks:
    """Told what happens to a seat."""

    stirred: Callable[[], None]
    """Something happened: approach again soon."""
    activated: Callable[[], None]
    deactivated: Callable[[], None]
    rebalanced: Callable[[frozenset[int], frozenset[int]], None]
    is_current: Callable[[], Awaitable[bool]]
    """Whether what was asked of the seat last is still what the group says."""


class Seat:
    """A place at one consumer, for the messages of one member."""

    def __init__(
        self,
        connection: Connection,
        consumer: tuple[str, str],
        handling: Handling,
        *,
        place: Placing,
        origin: Origin,
        max_held: int,
        hooks: SeatHooks,
    ) -> None:
        self._connection = connection
        self._remote = RemoteConsumer(connection, *consumer)
        self._handling = handling
        self._place = place
        self._origin = origin
        self._max_held = max_held
        self._hooks = hooks
        handling.may_start = self._may_start
        self._filters: tuple[str, ...] = ()
        self._feed: Feed | None = None
        self._feed_end: asyncio.Task[None] | None = None
        self._facts: StreamFacts | None = None
        self._acked = self._durable = True
        self._gate = Gate()
        self._left: list[GroupMessage] = []
        self._pin_id = ""
        self._must_rewind = False
        self._taken_retry_s = _TAKEN_RETRY_S
        self._told_active = False
        self._told_partitions: frozenset[int] = frozenset()
        self._told_difference = ""
        self._look_due = 0.0
        self._seen_dry: str | None = None

    def __repr__(self) -> str:
        return f"<Seat {self._remote} {sorted(self.partitions)} {self._gate!r} {self._feed!r}>"

    @property
    def is_active(self) -> bool:
        """Whether this instance is the one that gets messages."""
        return self._feed is not None and self._feed.is_pinned

    @property
    def partitions(self) -> frozenset[int]:
        """What the consumer covers now, as far as this instance knows."""
        return partitions_in(self._filters)

    # ---- what a member asks of it ---------------------------------------------------------------------

    async def attend(self) -> None:
        """Do what is due whatever the group says: look after a lost consumer, rewind after a takeover."""
        end = self._feed_end
        if end is not None and end.done():
            error = end.exception()
            if error is not None and not isinstance(error, ConsumerGone):
                raise error
            _log.warning("%s is gone; making it again", self._remote)
            await self._drop_feed(consumer_is_gone=True)
        if self._must_rewind:
            await self._while_it_is_there(self._rewind())

    async def approach(self, wanted: ConsumerConfig | None) -> float | None:
        """One step towards this consumer (None: none); returns when to try again, if that is soon."""
        try:
            return await self._while_it_is_there(self._step(wanted))
        finally:
            self._tell_partitions()

    async def leave(self) -> None:
        """Finish what is at work, confirm the acks, hand the pin over. What has not started goes to the next."""
        feed = self._feed
        if feed is None:
            return
        try:
            if self._acked:
                await self._finish_all()
                was_active = self.is_active and self._connection.is_connected
                await feed.drain(0)
                if was_active:
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
            if error.err_code == _STREAM_MISSING:
                return await self._dried_up(self._remote.is_gone)
            if error.err_code not in _CONSUMER_MISSING:
                raise
            _log.warning("%s is gone (%s); making it again", self._remote, error)
            await self._drop_feed(consumer_is_gone=True)
            return 0.0

    async def _dried_up(self, reason: str) -> float:
        """Nothing will come any more. If the group's record changed too, it says more: it is read again first."""
        if await self._hooks.is_current():
            raise GroupEnded(reason)
        return 0.0

    async def _look_below(self) -> str | None:
        """Now and then: why nothing will come any more. Nobody tells a member that waits.

        It must be so at two looks: a stream may be deleted and made again in between.
        """
        now = asyncio.get_running_loop().time()
        if now < self._look_due:
            return None
        self._look_due = now + _LOOK_BELOW_S
        before, self._seen_dry = self._seen_dry, await self._remote.why_dry()
        return self._seen_dry if self._seen_dry == before else None

    async def _step(self, wanted: ConsumerConfig | None) -> float | None:
        dry = await self._look_below()
        if dry is not None:
            return await self._dried_up(dry)
        if wanted is None:
            await self._give_up()
            return None
        if self._gate.is_shut:  # giving up was interrupted, and now it is wanted again
            await self._drop_feed()
        if self._feed is None:
            return await self._enter(wanted)
        if wanted.filter_subjects == self._filters and not self._gate.shunned & self.partitions:
            return None
        return await self._move(wanted)

    async def _enter(self, wanted: ConsumerConfig, at_least: tuple[str, ...] = ()) -> float | None:
        """Make the member's consumer, or join the one that is there, and start pulling.

        While others still have some of the partitions: with the filters `at_least`, if there are any.
        """
        self._durable = wanted.durable_name is not None
        try:
            info = await self._remote.create(wanted)
        except ApiError as error:
            if error.err_code == _EXISTS_DIFFERENTLY:
                return await self._meet(wanted)
            if error.err_code != FILTERS_OVERLAP:
                raise
            if at_least:
                await self._enter(replace(wanted, filter_subjects=at_least))
            return self._later()
        facts = await self._know_the_stream()
        if facts.clustered and not self._durable and not await self._hooks.is_current():
            # A cluster lets two members make overlapping consumers at the same moment. One of the two is of an older
            # membership: that one goes before it has pulled anything.
            await self._remote.delete_unless_in_use()
            return 0.0
        self._taken_retry_s = _TAKEN_RETRY_S
        await self._open(wanted, info)
        return None

    async def _meet(self, wanted: ConsumerConfig) -> float | None:
        """Our consumer exists, made with other settings: of an older membership, or by an instance that differs."""
        info = await self._remote.info()
        different = shape.difference(wanted, info.config)
        if different is None:
            await self._know_the_stream()
            await self._open(wanted, info)
            return random.uniform(*_STANDBY_WAIT_S)  # noqa: S311 - spreads instances, no secret
        if not info.num_waiting and not pinned(info):
            return await self._adopt(wanted, info, different)
        _log.log(
            logging.DEBUG if different == self._told_difference else logging.ERROR,
            "another instance runs on %s with other settings (%s); waiting until it is gone. Give all instances of a "
            "member the same settings",
            self._remote,
            different,
        )
        self._told_difference = different
        return wanted.priority_timeout_s

    async def _adopt(self, wanted: ConsumerConfig, info: ConsumerInfo, different: str) -> float | None:
        """Nobody is on the consumer any more: it gets our settings."""
        try:
            await self._remote.update(replace(wanted, filter_subjects=info.config.filter_subjects))
        except ApiError as error:
            if error.err_code != _NOT_CHANGEABLE:
                raise
            if wanted.durable_name is None:
                return wanted.priority_timeout_s  # it goes away by itself
            raise GroupConflict(
                f"consumer {self._remote.name!r} of stream {self._remote.stream!r} was made with other settings "
                f"({different}), which the server cannot change: use those settings, or delete the consumer"
            ) from error
        _log.warning("%s has this instance's settings now; before, %s", self._remote, different)
        return 0.0

    # ---- the feed -------------------------------------------------------------------------------------

    async def _open(self, wanted: ConsumerConfig, info: ConsumerInfo) -> None:
        self._gate = Gate()
        self._pin_id, self._must_rewind = "", False
        self._acked = wanted.ack_policy != "none"
        options = self._feed_options(wanted)
        self._feed = await open_feed(self._connection, self._remote.stream, self._remote.name, options)
        self._feed_end = asyncio.create_task(self._watch(self._feed))
        self._feed_end.add_done_callback(lambda _: self._hooks.stirred())
        self._filters = info.config.filter_subjects or ()

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
                reset_on_takeover=self._remote.can_reset and self._acked and self._max_held > 1,
                on_pinned=self._activated,
                on_unpinned=self._deactivated,
            ),
            on_messages=self._take if self._acked else None,
            around_reset=self._handling.around_reset if self._acked else None,
        )

    async def _watch(self, feed: Feed) -> None:
        """Wait for the feed's end. Without acks nothing bounds what the server sends: then read here, with a bound."""
        if not self._acked:
            async for batch in feed.batches(self._max_held):
                self._take(batch)
                await self._handling.room(self._max_held)
        await feed.wait()

    async def _know_the_stream(self) -> StreamFacts:
        """A stream that was deleted and made again counts from 1: what is known of the old one means nothing."""
        before, self._facts = self._facts, await self._remote.stream_facts()
        if before is not None and before.made != self._facts.made:
            _log.warning("stream %s was made anew", self._remote.stream)
            await self._handling.start_anew()
        return self._facts

    async def _drop_feed(self, *, consumer_is_gone: bool = False) -> None:
        feed, self._feed = self._feed, None
        end, self._feed_end = self._feed_end, None
        if end is not None:
            end.cancel()
        self._must_rewind = False
        self._handling.forget()
        self._handling.forget_acks()
        if feed is not None:
            # Without a consumer there is no pin to hand over, and a cluster may leave questions about it unanswered.
            await (feed.drain(0) if consumer_is_gone else feed.close())
        self._tell_deactivated()

    # ---- moving partitions ----------------------------------------------------------------------------

    async def _move(self, wanted: ConsumerConfig) -> float | None:
        if not self.is_active:
            info = await self._remote.info()
            self._filters = info.config.filter_subjects or ()
            if self._filters == wanted.filter_subjects:
                return None
            if pinned(info):  # a standby only watches, unless nobody is active
                return random.uniform(*_STANDBY_WAIT_S)  # noqa: S311
        target = partitions_in(wanted.filter_subjects)
        if target == self.partitions and not self._gate.shunned:
            await self._update(wanted)  # the same partitions in other words
            return None
        if self._can_change_filters:
            return await self._move_by_new_filters(wanted, self.partitions - target)
        return await self._move_by_a_new_consumer(wanted)

    async def _move_by_new_filters(self, wanted: ConsumerConfig, lost: frozenset[int]) -> float | None:
        if lost and not await self._let_go(wanted, lost):
            return 0.0
        if not await self._gain(wanted):
            return self._later()
        self._taken_retry_s = _TAKEN_RETRY_S
        return None

    async def _move_by_a_new_consumer(self, wanted: ConsumerConfig) -> float | None:
        parts = [(one, partition_in(one) in self.partitions) for one in wanted.filter_subjects or ()]
        kept, gained = (tuple(one for one, had in parts if had is which) for which in (True, False))
        only_gains = self.partitions == partitions_in(kept)
        if only_gains and not await self._remote.is_free(gained):
            return self._later()
        if not await self._give_up():
            # Two instances that wait on one consumer would make way for each other for ever: this one stays away.
            await asyncio.sleep(random.uniform(*_AWAY_S))  # noqa: S311
        return await self._enter(wanted, kept)

    async def _let_go(self, wanted: ConsumerConfig, lost: frozenset[int]) -> bool:
        """Give these partitions back; False: nothing is left, or it has become another instance's business."""
        assert self._feed is not None
        was_active = self.is_active
        self._gate.shun(lost)

        def is_lost(message: GroupMessage) -> bool:
            return message.partition in lost

        await self._handling.let_go(is_lost)
        await self._handling.acks_sent(is_lost)
        await self._feed.settle()
        if was_active and not self.is_active:
            return False
        kept = [one for one in wanted.filter_subjects or () if partition_in(one) in self.partitions]
        if not kept:
            await self._give_up()
            return False
        await self._update(replace(wanted, filter_subjects=tuple(kept)))
        await self._feed.reset()
        self._gate.shun_no_more(lost)
        return True

    async def _gain(self, wanted: ConsumerConfig) -> bool:
        """Widen the filters; False while another member still has one of the partitions."""
        target = partitions_in(wanted.filter_subjects)
        gained = (target - self.partitions) | (self._gate.shunned & target)
        if not gained:
            return True
        self._gate.hold(gained)
        try:
            await self._update(wanted)
        except ApiError as error:
            self._gate.hold_no_more(gained)
            if error.err_code == FILTERS_OVERLAP:
                return False
            raise
        self._gate.shun_no_more(gained)
        await self._rewind()
        return True

    async def _rewind(self) -> None:
        """Deliver from the start of the queue. Whatever comes after that is in order."""
        if self._feed is None:
            return
        self._must_rewind = True
        await self._feed.reset(1)
        self._must_rewind = False
        self._gate.release()

    async def _update(self, config: ConsumerConfig) -> None:
        await self._remote.update(config)
        self._filters = config.filter_subjects or ()

    # ---- leaving --------------------------------------------------------------------------------------

    async def _give_up(self) -> bool:
        """The consumer goes, if it is for this instance to say so; False: another instance has it."""
        feed, is_gone = self._feed, True
        if feed is not None:
            self._gate.shut()  # also as a standby: a pin may come at any moment
            if self.is_active:
                await self._finish_all()
            if self.is_active:
                await self._remote.delete()
            else:
                await feed.drain(0)
                is_gone = await self._remote.delete_unless_in_use(feed.pin_id)
            await self._drop_feed(consumer_is_gone=True)
        self._filters = ()
        return is_gone

    async def _finish_all(self) -> None:
        """Start nothing more, finish what is at work, and wait until the server has all acks."""
        assert self._feed is not None
        self._gate.shut()
        if self._durable:
            self._left = await self._handling.finish_without_gaps()
        else:
            self._left = await self._handling.let_go()
        if not self.is_active or not self._connection.is_connected:
            return
        await self._handling.acks_sent()
        await self._feed.settle()
        if self._facts is not None and self._facts.replicated and not self._durable:
            # Replicas drop a message a while after its ack was confirmed, and not at all if the consumer is deleted
            # before. Whoever reads the queue next would get it again.
            done, highest = self._handling.is_done, self._handling.highest_done
            await self._remote.see_messages_go(self.partitions, done, highest)

    async def _give_back(self, feed: Feed) -> None:
        """Make what was delivered and not handled deliverable at once, to whoever is pinned next."""
        info = await self._remote.info()
        if pinned(info) != feed.pin_id or not info.num_ack_pending:
            return
        if self._remote.can_reset:
            await self._remote.reset()
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
        info = await self._remote.info()
        if pin_id is not None and pinned(info) == pin_id:
            await self._remote.unpin(info)

    # ---- what arrives ---------------------------------------------------------------------------------

    def _take(self, batch: list[Message]) -> None:
        place, origin = self._place, self._origin
        messages = [GroupMessage(one, place(one.raw_subject), origin) for one in batch]
        if not self._gate.is_open:
            if self._gate.is_shut and not self._remote.can_reset:
                self._left += messages
            messages, others = self._gate.passing(messages)
            self._handling.pass_over(others)
        self._handling.offer(messages)

    def _activated(self, pin_id: str) -> None:
        if pin_id != self._pin_id and not self._durable and self._can_change_filters:
            # The instance before us may have ended between widening the filters and rewinding.
            self._gate.hold_all()
            self._must_rewind = True
        self._pin_id = self._origin.pin_id = pin_id
        if not self._told_active:
            self._told_active = True
            self._hooks.activated()
        self._hooks.stirred()

    def _deactivated(self, _pin_id: str) -> None:
        self._gate.shun_no_more()
        self._handling.forget()
        self._handling.revoke()
        self._tell_deactivated()

    # ---- small things ---------------------------------------------------------------------------------

    @property
    def _can_change_filters(self) -> bool:
        return self._remote.can_reset and self._facts is not None and not self._facts.clustered

    def _later(self) -> float:
        delay_s = self._taken_retry_s
        self._taken_retry_s = min(2 * delay_s, _LONGEST_TAKEN_RETRY_S)
        return delay_s

    def _may_start(self) -> bool:
        """False while it is not known whether this instance is still the pinned one, after it stood still."""
        return self._feed is None or self._feed.may_hand_out()

    def _tell_deactivated(self) -> None:
        self._origin.pin_id = None
        if self._told_active:
            self._told_active = False
            self._hooks.deactivated()

    def _tell_partitions(self) -> None:
        before, self._told_partitions = self._told_partitions, self.partitions
        if before != self._told_partitions:
            self._hooks.rebalanced(before, self._told_partitions)

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
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from keylane.core.plans import ranges
from keylane.errors import ApiError, ConsumerGone, GroupEnded, KeylaneError, NotFound
from keylane.groups import shape
from keylane.groups.entering import STANDBY_WAIT_S, TAKEN_RETRY_S, Entering, SeatHooks
from keylane.groups.message import GroupMessage
from keylane.groups.remote import FILTERS_OVERLAP, has_lost_its_files, partition_in, partitions_in, pinned
from keylane.jetstream.consumers import ConsumerConfig
from keylane.jetstream.feed import Feed

__all__ = ["Seat", "SeatHooks"]

_log = logging.getLogger("keylane.groups")

_CONSUMER_MISSING = (10014, 10149)
_STREAM_MISSING = 10059
_AWAY_S = (0.2, 1.2)
_LOOK_BELOW_S = 2.0
_IN_DOUBT_S = 0.05


class Seat(Entering):
    """A place at one consumer, for the messages of one member."""

    # ---- what a member asks of it ---------------------------------------------------------------------

    async def attend(self) -> None:
        """Do what is due whatever the group says: look after a lost consumer, rewind after a takeover."""
        end = self._feed_end
        if end is not None and end.done():
            error = end.exception()
            if error is not None and not isinstance(error, ConsumerGone):
                raise error
            await self._tell_gone("its pulls ended")
            await self._drop_feed(consumer_is_gone=True)
        if self._must_rewind and not self._in_doubt:
            await self._while_it_is_there(self._rewind())

    async def approach(self, wanted: ConsumerConfig | None) -> float | None:
        """One step towards this consumer (None: none); returns when to try again, if that is soon."""
        self._waits = False
        try:
            return await self._while_it_is_there(self._step(wanted))
        finally:
            if not self._waits:
                self._wait_for(None)
            self._tell_partitions()

    async def is_gone(self) -> bool:
        """Whether the consumer was deleted, with all that was not acked."""
        try:
            await self._remote.info()
        except NotFound:
            return True
        except KeylaneError:
            return False
        return False

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
            if has_lost_its_files(error):
                _log.warning("%s cannot be changed any more (%s); making it again", self._remote, error)
                return await self._while_it_is_there(self._make_anew())
            if error.err_code not in _CONSUMER_MISSING:
                raise
            await self._tell_gone(str(error))
            await self._drop_feed(consumer_is_gone=True)
            return 0.0

    async def _tell_gone(self, why: str) -> None:
        """Normal is: the group changed or was deleted, or a standby sees the active instance move to a new consumer."""
        has_lost_something = self._durable or self._told_active
        is_normal = not has_lost_something or not await self._hooks.is_current()
        _log.log(logging.INFO if is_normal else logging.WARNING, "%s is gone (%s); making it again", self._remote, why)

    async def _make_anew(self) -> float:
        gone = await self._give_up()
        return 0.0 if gone else random.uniform(*STANDBY_WAIT_S)  # noqa: S311 - spreads instances, no secret

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
            self._wait_for_stream()
            return None
        self._look_due = now + _LOOK_BELOW_S
        before, self._seen_dry = self._seen_dry, await self._remote.why_dry()
        self._wait_for_stream()
        if self._seen_dry is None and self._feed is not None and not self.is_active:
            await self._see_others()
        return self._seen_dry if self._seen_dry == before else None

    def _wait_for_stream(self) -> None:
        if self._seen_dry is not None:
            self._wait_for(f"the stream to come back: {self._seen_dry}")

    async def _step(self, wanted: ConsumerConfig | None) -> float | None:
        dry = await self._look_below()
        if dry is not None:
            return await self._dried_up(dry)
        if self._in_doubt:
            self._wait_for("the server to say who is active: this process stood still")
            return _IN_DOUBT_S  # the consumer, and how it changes, may be another instance's business
        if wanted is None:
            await self._give_up()
            return None
        if self._gate.is_shut:  # giving up was interrupted, and now it is wanted again
            await self._drop_feed()
        if self._feed is None:
            return await self._enter(wanted)
        unsettled = (self._gate.shunned | self._gate.held) & self.partitions
        fits = wanted.filter_subjects == self._filters or (
            self._durable and shape.covers(self._filters, wanted.filter_subjects or ())  # see `_open`
        )
        if fits and self._knows_filters and not unsettled:
            return None
        return await self._move(wanted)

    # ---- moving partitions ----------------------------------------------------------------------------

    async def _move(self, wanted: ConsumerConfig) -> float | None:
        is_ours = await self._is_ours_to_change()
        if self._filters == wanted.filter_subjects and not (self.is_active and self._gate.shunned | self._gate.held):
            return None
        if not is_ours:
            return random.uniform(*STANDBY_WAIT_S)  # noqa: S311
        target = partitions_in(wanted.filter_subjects)
        if target == self.partitions and not self._gate.shunned | self._gate.held:
            await self._update(wanted)  # the same partitions in other words
            return None
        if self._can_change_filters:
            return await self._move_by_new_filters(wanted, self.partitions - target)
        return await self._move_by_a_new_consumer(wanted)

    async def _move_by_new_filters(self, wanted: ConsumerConfig, lost: frozenset[int]) -> float | None:
        active = self.is_active
        if lost and not await self._let_go(wanted, lost):
            return 0.0
        if self.is_active is not active or self._in_doubt:
            return 0.0
        if not await self._gain(wanted):
            return self._later()
        self._taken_retry_s = TAKEN_RETRY_S
        return None

    async def _move_by_a_new_consumer(self, wanted: ConsumerConfig) -> float | None:
        parts = [(one, partition_in(one) in self.partitions) for one in wanted.filter_subjects or ()]
        kept, gained = (tuple(one for one, had in parts if had is which) for which in (True, False))
        only_gains = self.partitions == partitions_in(kept)
        if only_gains and not await self._remote.is_free(gained):
            self._wait_for_others(partitions_in(gained))
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

        self._wait_for(f"handlers at work on partitions {ranges(sorted(lost))}, which go to another member")
        await self._handling.let_go(is_lost)
        await self._handling.acks_sent(is_lost)
        await self._feed.settle()
        self._wait_for(None)
        if (was_active and not self.is_active) or not await self._is_ours_to_change():
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
        gained = (target - self.partitions) | ((self._gate.shunned | self._gate.held) & target)
        if not gained:
            return True
        self._gate.hold(gained)
        try:
            await self._update(wanted)
        except ApiError as error:
            if not self._gate.hold_no_more(gained):
                self._must_rewind, self._knows_filters = True, False
            if error.err_code == FILTERS_OVERLAP:
                self._wait_for_others(gained)
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

    async def _is_ours_to_change(self) -> bool:
        """Look at the consumer as it is now: whether no other instance is at work on it.

        A standby only watches, unless nobody is active. And who was active may have lost its pin, with the server or in
        a standstill, and not know it yet.
        """
        assert self._feed is not None
        self._knows_filters = True  # unless this instance takes over meanwhile
        try:
            info = await self._remote.info()
        except BaseException:
            self._knows_filters = False
            raise
        self._filters = info.config.filter_subjects or ()
        return pinned(info) in (None, self._feed.pin_id) and not self._in_doubt

    async def _update(self, config: ConsumerConfig) -> None:
        self._knows_filters = False  # until it is known what came of it
        try:
            await self._remote.update(config)
        except ApiError:
            self._knows_filters = True  # refused: it is as it was
            raise
        self._filters, self._knows_filters = config.filter_subjects or (), True

    # ---- leaving --------------------------------------------------------------------------------------

    async def _give_up(self) -> bool:
        """The consumer goes, if it is for this instance to say so; False: another instance has it."""
        feed, is_gone = self._feed, True
        if feed is not None:
            self._gate.shut()  # also as a standby: a pin may come at any moment
            if self.is_active:
                self._wait_for("handlers at work, before its partitions change")
                await self._finish_all()
                self._wait_for(None)
            if self.is_active and await self._is_ours_to_change():
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

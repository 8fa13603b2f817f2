"""A member's consumer as one instance reads it: performs what `core/handoff.py` decides.

Owns the feed, what the instance knows of the consumer, and which deliveries may start. `approach` takes the wanted
consumer and changes the present one towards it, as far as possible without waiting for others. Knows nothing of groups
and their records.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from keylane.core import handoff
from keylane.core.handoff import NONE, Action, AnyEvent, HandoffEvent, Partitions
from keylane.core.plans import ranges
from keylane.errors import ApiError, ConsumerGone, GroupEnded, KeylaneError, NotFound
from keylane.groups import consumer_spec
from keylane.groups.consumer_requests import (
    FILTERS_OVERLAP,
    ConsumerEntry,
    Later,
    RemoteConsumer,
    StreamFacts,
    has_lost_its_files,
    partition_in,
    partitions_in,
    pinned,
)
from keylane.groups.instance import Origin
from keylane.jetstream import (
    Connection,
    ConsumerConfig,
    ConsumerInfo,
    Feed,
    FeedOptions,
    Message,
    PinOptions,
    open_feed,
)
from keylane.processing.feed_callbacks import FeedCallbacks
from keylane.processing.message import GroupMessage, Placing
from keylane.processing.message_processor import MessageProcessor

_log = logging.getLogger("keylane.groups")

_CONSUMER_MISSING = (10014, 10149)
_STREAM_MISSING = 10059

_STANDBY_S = (0.4, 0.5)
_TAKEN_S = 0.025
_LONGEST_TAKEN_S = 0.25
_IN_DOUBT_S = 0.05
_AWAY_S = (0.2, 1.2)
_LOOK_BELOW_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberConsumerHooks:
    """Called when something happens to a member's consumer."""

    wake: Callable[[], None]
    """Something happened: call `approach` again soon."""
    activated: Callable[[], None]
    deactivated: Callable[[], None]
    rebalanced: Callable[[Partitions, Partitions], None]
    wait_changed: Callable[[], None]
    """`waiting_for`, or what is known of other instances, has changed."""
    is_current: Callable[[], Awaitable[bool]]
    """Whether what was asked for last is still what the group says."""
    delivered: Callable[[list[Message]], None] | None = None
    """The server has delivered a batch."""


class MemberConsumer:
    """The consumer of a member, as one instance reads it or is about to."""

    def __init__(
        self,
        connection: Connection,
        consumer: tuple[str, str],
        processor: MessageProcessor,
        *,
        place: Placing,
        origin: Origin,
        max_held: int,
        hooks: MemberConsumerHooks,
    ) -> None:
        self._connection = connection
        self._remote = RemoteConsumer(connection, *consumer)
        self._entry = ConsumerEntry(self._remote, hooks.is_current)
        self._processor = processor
        self._place = place
        self._origin = origin
        self._max_held = max_held
        self._hooks = hooks
        processor.may_start = self._may_start
        self._state = handoff.Handoff()
        self._wanted: ConsumerConfig | None = None
        self._filters: tuple[str, ...] = ()
        self._feed: Feed | None = None
        self._feed_end: asyncio.Task[None] | None = None
        self._callbacks = FeedCallbacks()
        self._facts: StreamFacts | None = None
        self._acked = self._durable = True
        self._acks_all = False
        self._is_asked_for: Callable[[bytes], bool] | None = None
        self._left: list[GroupMessage] = []
        self._pin_id = ""
        self._taken_s = _TAKEN_S
        self._reported_active = False
        self._reported_partitions = NONE
        self._look_due = 0.0
        self._no_source_because: str | None = None
        self.waiting_for: str | None = None
        """What must happen before the next step can be done."""
        self.no_message_because: str | None = None
        self.is_other_active = False

    def __repr__(self) -> str:
        return f"<MemberConsumer {self._remote} {self._state} {self._feed!r}>"

    @property
    def is_active(self) -> bool:
        """Whether this instance is the one that gets messages."""
        return self._feed is not None and self._feed.is_pinned

    @property
    def has_consumer(self) -> bool:
        return self._feed is not None

    @property
    def partitions(self) -> Partitions:
        """What the consumer covers now, as far as this instance knows."""
        return self._state.covers

    def handles(self, partition: int) -> bool:
        """Whether messages of this partition may start here now."""
        return self.is_active and partition in self._state.admitted and self._may_start()

    # ---- what a member asks of it ---------------------------------------------------------------------

    async def attend(self) -> None:
        """Check whether the feed has ended: raise its error, or forget a consumer that is gone."""
        end = self._feed_end
        if end is None or not end.done():
            return
        error = end.exception()
        if error is not None and not isinstance(error, ConsumerGone):
            raise error
        await self._lose_consumer("its pulls ended")

    async def approach(self, wanted: ConsumerConfig | None) -> float | None:
        """Change the consumer towards the wanted one (None: no consumer); return when to try again, if that is soon."""
        self._wanted = wanted
        try:
            ended = await self._check_source()
            if ended is not None:
                return await self._end_without_source(ended)
            if wanted is None:
                return await self._go_on(handoff.Want(NONE))
            return await self._go_on(handoff.Want(partitions_in(wanted.filter_subjects), exact=self._fits(wanted)))
        except ApiError as error:
            return await self._after_refusal(error)
        except BaseException:
            self._report(HandoffEvent.FAILED)
            raise
        finally:
            self._report_partitions()

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
                action = self._step(HandoffEvent.LEAVE)
                while action is not None and not isinstance(action, handoff.Wait):
                    event = await self._perform(action)
                    assert not isinstance(event, float)
                    action = self._step(event)
            else:
                await self._finish_without_acks(feed)
        finally:
            await self._drop_feed()

    # ---- rounds ---------------------------------------------------------------------------------------

    async def _go_on(self, event: AnyEvent) -> float | None:
        """Step and perform until nothing is left to do now; returns when to try again."""
        while True:
            action = self._step(event)
            if self._state.reading:
                self._report_partitions()
            if isinstance(event, handoff.Opened):
                await self._check_other_instances()
            self._wait_for(self._reason_to_wait(action))
            if action is None or isinstance(action, handoff.Wait):
                return self._delay_of(action)
            answer = await self._perform(action)
            if isinstance(answer, float):
                return answer
            event = answer

    def _step(self, event: AnyEvent) -> Action | None:
        self._check_doubt()
        self._state, action = handoff.step(self._state, event)
        return action

    def _report(self, event: AnyEvent) -> None:
        """Apply an event that may come while an action is under way."""
        self._state = handoff.changed(self._state, event)

    def _check_doubt(self) -> None:
        """After a standstill it is not known at once whether this instance is still the active one."""
        in_doubt = self._feed is not None and not self._feed.may_hand_out()
        if in_doubt and self._state.role is handoff.Role.ACTIVE:
            self._report(HandoffEvent.DOUBTED)
        elif not in_doubt and self._state.role is handoff.Role.DOUBTFUL:
            self._report(HandoffEvent.CONFIRMED if self.is_active else HandoffEvent.UNPINNED)

    async def _after_refusal(self, error: ApiError) -> float:
        """Apply what an API error says about the consumer; raise it if it says nothing."""
        if error.err_code in _CONSUMER_MISSING:
            await self._lose_consumer(str(error))
            return 0.0
        if has_lost_its_files(error) and self._state.reading:
            _log.warning("%s cannot be changed any more (%s); making it again", self._remote, error)
            self._report(HandoffEvent.UNUSABLE)
            return 0.0
        self._report(HandoffEvent.FAILED)
        if error.err_code == _STREAM_MISSING:
            return await self._end_without_source(self._remote.is_gone)
        raise error

    def _delay_of(self, wait: handoff.Wait | None) -> float | None:
        if wait is handoff.Wait.TAKEN:
            delay_s, self._taken_s = self._taken_s, min(2 * self._taken_s, _LONGEST_TAKEN_S)
            return delay_s
        self._taken_s = _TAKEN_S
        if wait is handoff.Wait.STANDBY:
            return random.uniform(*_STANDBY_S)  # noqa: S311 - spreads instances, no secret
        return _IN_DOUBT_S if wait is handoff.Wait.IN_DOUBT else None

    def _reason_to_wait(self, action: Action | None) -> str | None:
        match action:
            case handoff.Wait.IN_DOUBT:
                return "the server to say who is active: this process stood still"
            case handoff.Wait.TAKEN:
                others = self._state.wanted - self._state.covers
                return f"another member to let go of partitions {ranges(sorted(others))}"
            case handoff.Drain(partitions):
                return f"handlers at work on partitions {ranges(sorted(partitions))}, which go to another member"
            case handoff.Finish():
                return "handlers at work, before its partitions change"
        return f"the stream to come back: {self._no_source_because}" if self._no_source_because is not None else None

    # ---- actions --------------------------------------------------------------------------------------

    async def _perform(self, action: Action) -> AnyEvent | float:  # noqa: PLR0911 - one case for each action
        match action:
            case handoff.Create() | handoff.Probe() | handoff.Narrow() | handoff.Widen() | handoff.Rename():
                return await self._change(action)
            case handoff.Delete(surely):
                return await self._delete(surely=surely)
            case handoff.Close():
                await self._drop_feed()
                return HandoffEvent.CLOSED
        feed = self._feed
        assert feed is not None
        match action:
            case handoff.Look():
                return self._seen(await self._remote.info(), feed)
            case handoff.Drain(partitions):
                await self._drain(partitions, feed)
                return HandoffEvent.DRAINED
            case handoff.Finish():
                await self._finish(feed)
                return HandoffEvent.FINISHED
            case handoff.Reset():
                await feed.reset()
                return HandoffEvent.RESET
            case handoff.Rewind():
                await feed.reset(1)
                return HandoffEvent.REWOUND
            case handoff.GiveBack():
                await self._give_back(feed)
                return HandoffEvent.CLOSED
        raise AssertionError(action)

    async def _change(
        self, action: handoff.Create | handoff.Probe | handoff.Narrow | handoff.Widen | handoff.Rename
    ) -> AnyEvent | float:
        """Ask the server for other filters. It refuses those that another member's consumer still has."""
        wanted = self._wanted
        assert wanted is not None
        partitions = self._state.wanted if isinstance(action, handoff.Rename) else action.partitions
        filters = tuple(one for one in wanted.filter_subjects or () if partition_in(one) in partitions)
        config = replace(wanted, filter_subjects=filters)
        try:
            match action:
                case handoff.Create():
                    return await self._enter(config)
                case handoff.Probe():
                    return HandoffEvent.FREE if await self._remote.is_free(filters) else HandoffEvent.TAKEN
            await self._remote.update(config)
        except ApiError as error:
            if error.err_code != FILTERS_OVERLAP:
                raise
            return HandoffEvent.TAKEN
        self._filters = filters
        match action:
            case handoff.Narrow():
                return HandoffEvent.NARROWED
            case handoff.Widen():
                return HandoffEvent.WIDENED
        return HandoffEvent.RENAMED

    def _seen(self, info: ConsumerInfo, feed: Feed) -> handoff.Looked:
        """The consumer as the server has it. It is ours to change if no other instance is pinned."""
        self._filters = info.config.filter_subjects or ()
        return handoff.Looked(
            partitions_in(self._filters),
            ours=pinned(info) in (None, feed.pin_id),
            exact=self._wanted is None or self._fits(self._wanted),
        )

    def _fits(self, wanted: ConsumerConfig) -> bool:
        return self._filters == wanted.filter_subjects or (
            self._durable and consumer_spec.covers(self._filters, wanted.filter_subjects or ())  # see `_enter`
        )

    async def _drain(self, partitions: Partitions, feed: Feed) -> None:
        def is_lost(message: GroupMessage) -> bool:
            return message.partition in partitions

        await self._processor.let_go(is_lost)
        await self._processor.acks_sent(is_lost)
        await feed.settle()

    async def _finish(self, feed: Feed) -> None:
        """Start nothing more, finish what is at work, and wait until the server has all acks."""
        if self._durable:
            self._left += await self._processor.finish_without_gaps()
        else:
            self._left += await self._processor.let_go()
        if not self.is_active or not self._connection.is_connected:
            return
        await self._processor.acks_sent()
        await feed.settle()
        if self._facts is not None and self._facts.replicated and not self._durable:
            # Replicas drop a message a while after its ack was confirmed, and not at all if the consumer is deleted
            # before. Whoever reads the queue next would get it again.
            done, highest = self._processor.is_done, self._processor.highest_done
            await self._remote.wait_until_removed(self.partitions, done, highest)

    async def _delete(self, *, surely: bool) -> AnyEvent:
        gone = surely
        if surely:
            await self._remote.delete()
        elif self._feed is not None:
            await self._feed.drain(0)
            gone = await self._remote.delete_unless_in_use(self._feed.pin_id)
        await self._drop_feed(consumer_is_gone=True)
        if not gone and self._wanted is not None:
            # Two instances that wait on one consumer would make way for each other for ever: this one stays away.
            await asyncio.sleep(random.uniform(*_AWAY_S))  # noqa: S311
        return HandoffEvent.DELETED

    async def _give_back(self, feed: Feed) -> None:
        """Release what was delivered and not handled, so that the next pinned instance gets it at once."""
        was_active = self.is_active and self._connection.is_connected
        await feed.drain(0)
        if was_active:
            await self._release(feed)
        await self._drop_feed()

    async def _release(self, feed: Feed) -> None:
        info = await self._remote.info()
        if pinned(info) != feed.pin_id or not info.num_ack_pending:
            return
        if self._remote.can_reset:
            await self._remote.reset()
            return
        for message in sorted(self._left, key=lambda one: one.delivery_sequence):
            if not message.delivery.settled:
                message.nak()

    async def _finish_without_acks(self, feed: Feed) -> None:
        """Handle all that was delivered, because without acks it is never delivered again."""
        pin_id = feed.pin_id if self.is_active else None
        await feed.drain()
        if self._feed_end is not None:
            await asyncio.wait({self._feed_end})
        await self._processor.finish()
        info = await self._remote.info()
        if pin_id is not None and pinned(info) == pin_id:
            await self._remote.unpin(info)

    # ---- what may have happened below -----------------------------------------------------------------

    async def _lose_consumer(self, why: str) -> None:
        """Forget a consumer that is gone. It is a warning unless the group changed, or another instance replaced it."""
        has_lost_something = self._durable or self._reported_active
        await self._drop_feed(consumer_is_gone=True)
        self._report(HandoffEvent.GONE)
        is_normal = not has_lost_something or not await self._hooks.is_current()
        _log.log(logging.INFO if is_normal else logging.WARNING, "%s is gone (%s); making it again", self._remote, why)

    async def _end_without_source(self, reason: str) -> float:
        """Raise `GroupEnded`, because no message can come any more; unless the group's record has changed."""
        if await self._hooks.is_current():
            raise GroupEnded(reason)
        return 0.0

    async def _check_source(self) -> str | None:
        """Check from time to time whether messages can still come; return why not if two checks in a row say so.

        Nothing notifies a waiting member of it. One check is not enough: a stream may be deleted and created again.
        """
        now = asyncio.get_running_loop().time()
        if now < self._look_due:
            return None
        self._look_due = now + _LOOK_BELOW_S
        before, self._no_source_because = self._no_source_because, await self._remote.why_no_source()
        if self._no_source_because is None and self._feed is not None and not self.is_active:
            await self._check_other_instances()
        return self._no_source_because if self._no_source_because == before else None

    # ---- the feed -------------------------------------------------------------------------------------

    async def _enter(self, wanted: ConsumerConfig) -> handoff.Opened | float:
        """Create or join the consumer and start to pull; or return when to try again."""
        self._durable = wanted.durable_name is not None
        entered = await self._entry.enter(wanted)
        if isinstance(entered, Later):
            self._wait_for(entered.waiting_for)
            return entered.delay_s
        if entered.stream_is_new:
            await self._processor.start_anew()
        self._facts = entered.stream
        self._pin_id = ""
        self._left = []
        self._acked = wanted.ack_policy != "none"
        self._acks_all = wanted.ack_policy == "all"
        self._callbacks.renew()
        self._filters = entered.consumer.config.filter_subjects or ()
        self._is_asked_for = None
        if self._durable and set(self._filters) != set(wanted.filter_subjects or ()):
            # An instance in Go made it for a mapped group: it asks for whole partitions, whatever the group's filters
            # are. The consumer stays as it is, and what the group did not ask for ends here.
            self._is_asked_for = consumer_spec.asking_for(wanted.filter_subjects or ())
        in_place = self._remote.can_reset and not entered.stream.clustered
        options = self._feed_options(wanted)
        self._feed = await open_feed(self._connection, self._remote.stream, self._remote.name, options)
        self._feed_end = asyncio.create_task(self._watch(self._feed))
        self._feed_end.add_done_callback(self._callbacks.of_current(self._feed_ended))
        # Nothing is awaited from here until the event is taken: the first message must find it done.
        return handoff.Opened(
            partitions_in(self._filters),
            handoff.Style.IN_PLACE if in_place else handoff.Style.RECREATE,
            durable=self._durable,
            joined=entered.joined,
        )

    def _feed_options(self, wanted: ConsumerConfig) -> FeedOptions:
        timeout_s = wanted.priority_timeout_s or consumer_spec.DEFAULT_ACK_WAIT_S
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
                on_pinned=self._callbacks.of_current(self._activated),
                on_unpinned=self._callbacks.of_current(self._deactivated),
            ),
            on_messages=self._callbacks.of_current(self._take) if self._acked else None,
            around_reset=self._processor.around_reset if self._acked else None,
        )

    async def _watch(self, feed: Feed) -> None:
        """Wait for the feed's end. Without acks nothing bounds what the server sends: then read here, with a bound."""
        if not self._acked:
            async for batch in feed.batches(self._max_held):
                self._take(batch)
                await self._processor.room(self._max_held)
        await feed.wait()

    async def _check_other_instances(self) -> None:
        """Check who else reads the consumer and, as long as no message has come, whether one can come."""
        info = await self._remote.info()
        is_other_active = pinned(info) not in (None, self._feed.pin_id if self._feed is not None else None)
        because = None
        if not self._pin_id and not is_other_active:
            because = await self._remote.why_no_message(info)
        if (is_other_active, because) != (self.is_other_active, self.no_message_because):
            self.is_other_active, self.no_message_because = is_other_active, because
            self._hooks.wait_changed()

    async def _drop_feed(self, *, consumer_is_gone: bool = False) -> None:
        self._callbacks.renew()
        feed, self._feed = self._feed, None
        end, self._feed_end = self._feed_end, None
        if end is not None and not end.cancel() and not end.cancelled():
            end.exception()  # seen: it is being let go of
        self.is_other_active, self.no_message_because = False, None
        self._processor.forget()
        self._processor.forget_acks()
        try:
            if feed is not None:
                # Without a consumer there is no pin to hand over, and a cluster may leave questions unanswered.
                await (feed.drain(0) if consumer_is_gone else feed.stop())
        except BaseException:
            self._report(HandoffEvent.CLOSED)
            raise
        finally:
            self._report_deactivated()

    # ---- what arrives ---------------------------------------------------------------------------------

    def _take(self, batch: list[Message]) -> None:
        if self._hooks.delivered is not None:
            self._hooks.delivered(batch)
        if self._is_asked_for is not None:
            batch = self._drop_unasked(batch, self._is_asked_for)
        place, origin = self._place, self._origin
        now = time.time()
        messages = [GroupMessage(one, place(one.raw_subject), origin, now) for one in batch]
        admitted = self._state.admitted
        if not {one.place.partition for one in messages} <= admitted:
            messages = self._hold_back(messages, admitted)
        self._processor.offer(messages)

    def _hold_back(self, messages: list[GroupMessage], admitted: Partitions) -> list[GroupMessage]:
        """The messages that may start. The others are delivered again: here after a rewind, or to another member."""
        if self._state.closing and not self._remote.can_reset:
            self._left += messages
        others = [one for one in messages if one.partition not in admitted]
        self._processor.pass_over(others)
        unexpected = self._state.unexpected({one.partition for one in others})
        if unexpected:
            _log.debug("%s delivers partitions %s, which it was not known to cover", self._remote, sorted(unexpected))
            self._report(handoff.Surprised(unexpected))
            self._hooks.wake()
        return [one for one in messages if one.partition in admitted]

    def _drop_unasked(self, batch: list[Message], is_asked_for: Callable[[bytes], bool]) -> list[Message]:
        """The messages that the group asked for. The others are acked, so that nobody gets them."""
        asked = []
        for one in batch:
            if is_asked_for(one.raw_subject):
                asked.append(one)
            elif self._acked and (not self._acks_all or not (asked or self._processor.has_messages)):
                # Where an ack counts for all before it, it must not overtake a message that is still to be handled:
                # then this one comes again.
                one.ack()
        return asked

    def _activated(self, pin_id: str) -> None:
        self._report(handoff.PinReceived(anew=pin_id != self._pin_id))
        self._pin_id = self._origin.pin_id = pin_id
        self.is_other_active, self.no_message_because = False, None
        if not self._reported_active:
            self._reported_active = True
            self._hooks.activated()
        self._hooks.wake()

    def _feed_ended(self, _end: asyncio.Task[None]) -> None:
        """The consumer or the connection is gone: what has not started here may start elsewhere."""
        self._report(HandoffEvent.UNPINNED)
        self._processor.forget()
        self._hooks.wake()

    def _deactivated(self, _pin_id: str) -> None:
        self._report(HandoffEvent.UNPINNED)
        self.is_other_active = True  # most likely; the next look tells
        self._processor.forget()
        self._processor.revoke()
        self._report_deactivated()

    # ---- small things ---------------------------------------------------------------------------------

    def _wait_for(self, what: str | None) -> None:
        if what != self.waiting_for:
            self.waiting_for = what
            self._hooks.wait_changed()

    def _may_start(self) -> bool:
        """False if this process stood still and does not know yet whether it is still pinned."""
        return self._feed is None or self._feed.may_hand_out()

    def _report_deactivated(self) -> None:
        self._origin.pin_id = None
        if self._reported_active:
            self._reported_active = False
            self._hooks.deactivated()

    def _report_partitions(self) -> None:
        before, self._reported_partitions = self._reported_partitions, self.partitions
        if before != self._reported_partitions:
            self._hooks.rebalanced(before, self._reported_partitions)

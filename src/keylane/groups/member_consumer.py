"""A member's consumer as one instance reads it: performs what `core/handoff.py` decides.

Owns the feed, what the instance knows of the consumer, and which deliveries may start. `approach` is told which
consumer there should be and goes towards it, as far as it can without waiting for others. It knows nothing of groups
and their records.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from keylane.core import handoff
from keylane.core.handoff import (
    NONE,
    Action,
    AnyEvent,
    Close,
    Create,
    Delete,
    Drain,
    Finish,
    GiveBack,
    Handoff,
    HandoffEvent,
    Look,
    Looked,
    Narrow,
    Opened,
    Partitions,
    PinReceived,
    Probe,
    Rename,
    Reset,
    Rewind,
    Role,
    Style,
    Surprised,
    Wait,
    Want,
    Widen,
)
from keylane.core.plans import ranges
from keylane.errors import ApiError, ConsumerGone, GroupEnded, KeylaneError, NotFound
from keylane.groups import consumer_spec
from keylane.groups.consumer_entry import ConsumerEntry, Later
from keylane.groups.consumer_requests import (
    FILTERS_OVERLAP,
    RemoteConsumer,
    StreamFacts,
    has_lost_its_files,
    partition_in,
    partitions_in,
    pinned,
)
from keylane.groups.instance import Origin
from keylane.groups.message import GroupMessage, Placing
from keylane.groups.message_processor import MessageProcessor
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

T = TypeVar("T")

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
    """Told what happens to a member's consumer."""

    stirred: Callable[[], None]
    """Something happened: approach again soon."""
    activated: Callable[[], None]
    deactivated: Callable[[], None]
    rebalanced: Callable[[Partitions, Partitions], None]
    wait_changed: Callable[[], None]
    """`waiting_for`, or what is known of other instances, has changed."""
    is_current: Callable[[], Awaitable[bool]]
    """Whether what was asked for last is still what the group says."""


class MemberConsumer:
    """One instance on its member's consumer, or on the way there."""

    def __init__(
        self,
        connection: Connection,
        consumer: tuple[str, str],
        handling: MessageProcessor,
        *,
        place: Placing,
        origin: Origin,
        max_held: int,
        hooks: MemberConsumerHooks,
    ) -> None:
        self._connection = connection
        self._remote = RemoteConsumer(connection, *consumer)
        self._entry = ConsumerEntry(self._remote, hooks.is_current)
        self._handling = handling
        self._place = place
        self._origin = origin
        self._max_held = max_held
        self._hooks = hooks
        handling.may_start = self._may_start
        self._state = Handoff()
        self._wanted: ConsumerConfig | None = None
        self._filters: tuple[str, ...] = ()
        self._feed: Feed | None = None
        self._feed_end: asyncio.Task[None] | None = None
        self._reading = object()
        self._facts: StreamFacts | None = None
        self._acked = self._durable = True
        self._acks_all = False
        self._is_asked_for: Callable[[bytes], bool] | None = None
        self._left: list[GroupMessage] = []
        self._pin_id = ""
        self._taken_s = _TAKEN_S
        self._told_active = False
        self._told_partitions = NONE
        self._look_due = 0.0
        self._seen_dry: str | None = None
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

    # ---- what a member asks of it ---------------------------------------------------------------------

    async def attend(self) -> None:
        """See whether the feed has ended: without its consumer, it is opened again; with an error, raise it."""
        end = self._feed_end
        if end is None or not end.done():
            return
        error = end.exception()
        if error is not None and not isinstance(error, ConsumerGone):
            raise error
        await self._lose_consumer("its pulls ended")

    async def approach(self, wanted: ConsumerConfig | None) -> float | None:
        """Go towards this consumer (None: none); returns when to try again, if that is soon."""
        self._wanted = wanted
        try:
            dry = await self._look_below()
            if dry is not None:
                return await self._dried_up(dry)
            if wanted is None:
                return await self._go_on(Want(NONE))
            return await self._go_on(Want(partitions_in(wanted.filter_subjects), exact=self._fits(wanted)))
        except ApiError as error:
            return await self._after_refusal(error)
        except BaseException:
            self._tell(HandoffEvent.FAILED)
            raise
        finally:
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
                action = self._step(HandoffEvent.LEAVE)
                while action is not None and not isinstance(action, Wait):
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
                self._tell_partitions()
            if isinstance(event, Opened):
                await self._see_others()
            self._wait_for(self._reason_to_wait(action))
            if action is None or isinstance(action, Wait):
                return self._delay_of(action)
            answer = await self._perform(action)
            if isinstance(answer, float):
                return answer
            event = answer

    def _step(self, event: AnyEvent) -> Action | None:
        self._heed_doubt()
        self._state, action = handoff.step(self._state, event)
        return action

    def _tell(self, event: AnyEvent) -> None:
        """Something happened while an action may be under way."""
        self._state = handoff.changed(self._state, event)

    def _heed_doubt(self) -> None:
        """After a standstill it is not known at once whether this instance is still the active one."""
        in_doubt = self._feed is not None and not self._feed.may_hand_out()
        if in_doubt and self._state.role is Role.ACTIVE:
            self._tell(HandoffEvent.DOUBTED)
        elif not in_doubt and self._state.role is Role.DOUBTFUL:
            self._tell(HandoffEvent.CONFIRMED if self.is_active else HandoffEvent.UNPINNED)

    async def _after_refusal(self, error: ApiError) -> float:
        """What an error of the server means for the consumer; raises those that mean nothing for it."""
        if error.err_code in _CONSUMER_MISSING:
            await self._lose_consumer(str(error))
            return 0.0
        if has_lost_its_files(error) and self._state.reading:
            _log.warning("%s cannot be changed any more (%s); making it again", self._remote, error)
            self._tell(HandoffEvent.UNUSABLE)
            return 0.0
        self._tell(HandoffEvent.FAILED)
        if error.err_code == _STREAM_MISSING:
            return await self._dried_up(self._remote.is_gone)
        raise error

    def _delay_of(self, wait: Wait | None) -> float | None:
        if wait is Wait.TAKEN:
            delay_s, self._taken_s = self._taken_s, min(2 * self._taken_s, _LONGEST_TAKEN_S)
            return delay_s
        self._taken_s = _TAKEN_S
        if wait is Wait.STANDBY:
            return random.uniform(*_STANDBY_S)  # noqa: S311 - spreads instances, no secret
        return _IN_DOUBT_S if wait is Wait.IN_DOUBT else None

    def _reason_to_wait(self, action: Action | None) -> str | None:
        match action:
            case Wait.IN_DOUBT:
                return "the server to say who is active: this process stood still"
            case Wait.TAKEN:
                others = self._state.wanted - self._state.covers
                return f"another member to let go of partitions {ranges(sorted(others))}"
            case Drain(partitions):
                return f"handlers at work on partitions {ranges(sorted(partitions))}, which go to another member"
            case Finish():
                return "handlers at work, before its partitions change"
        return f"the stream to come back: {self._seen_dry}" if self._seen_dry is not None else None

    # ---- actions --------------------------------------------------------------------------------------

    async def _perform(self, action: Action) -> AnyEvent | float:  # noqa: PLR0911 - one case for each action
        match action:
            case Create() | Probe() | Narrow() | Widen() | Rename():
                return await self._change(action)
            case Delete(surely):
                return await self._delete(surely=surely)
            case Close():
                await self._drop_feed()
                return HandoffEvent.CLOSED
        feed = self._feed
        assert feed is not None
        match action:
            case Look():
                return self._seen(await self._remote.info(), feed)
            case Drain(partitions):
                await self._drain(partitions, feed)
                return HandoffEvent.DRAINED
            case Finish():
                await self._finish(feed)
                return HandoffEvent.FINISHED
            case Reset():
                await feed.reset()
                return HandoffEvent.RESET
            case Rewind():
                await feed.reset(1)
                return HandoffEvent.REWOUND
            case GiveBack():
                await self._give_back(feed)
                return HandoffEvent.CLOSED
        raise AssertionError(action)

    async def _change(self, action: Create | Probe | Narrow | Widen | Rename) -> AnyEvent | float:
        """Ask the server for other filters. It refuses those that another member's consumer still has."""
        wanted = self._wanted
        assert wanted is not None
        partitions = self._state.wanted if isinstance(action, Rename) else action.partitions
        filters = tuple(one for one in wanted.filter_subjects or () if partition_in(one) in partitions)
        config = replace(wanted, filter_subjects=filters)
        try:
            match action:
                case Create():
                    return await self._enter(config)
                case Probe():
                    return HandoffEvent.FREE if await self._remote.is_free(filters) else HandoffEvent.TAKEN
            await self._remote.update(config)
        except ApiError as error:
            if error.err_code != FILTERS_OVERLAP:
                raise
            return HandoffEvent.TAKEN
        self._filters = filters
        match action:
            case Narrow():
                return HandoffEvent.NARROWED
            case Widen():
                return HandoffEvent.WIDENED
        return HandoffEvent.RENAMED

    def _seen(self, info: ConsumerInfo, feed: Feed) -> Looked:
        """A standby only watches, unless nobody is active. Who was active may have lost its pin and not know it yet."""
        self._filters = info.config.filter_subjects or ()
        return Looked(
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

        await self._handling.let_go(is_lost)
        await self._handling.acks_sent(is_lost)
        await feed.settle()

    async def _finish(self, feed: Feed) -> None:
        """Start nothing more, finish what is at work, and wait until the server has all acks."""
        if self._durable:
            self._left += await self._handling.finish_without_gaps()
        else:
            self._left += await self._handling.let_go()
        if not self.is_active or not self._connection.is_connected:
            return
        await self._handling.acks_sent()
        await feed.settle()
        if self._facts is not None and self._facts.replicated and not self._durable:
            # Replicas drop a message a while after its ack was confirmed, and not at all if the consumer is deleted
            # before. Whoever reads the queue next would get it again.
            done, highest = self._handling.is_done, self._handling.highest_done
            await self._remote.see_messages_go(self.partitions, done, highest)

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
        """Make what was delivered and not handled deliverable at once, to whoever is pinned next."""
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

    # ---- what may have happened below -----------------------------------------------------------------

    async def _lose_consumer(self, why: str) -> None:
        """Normal is: the group changed or was deleted, or a standby sees the active instance move to a new consumer."""
        has_lost_something = self._durable or self._told_active
        await self._drop_feed(consumer_is_gone=True)
        self._tell(HandoffEvent.GONE)
        is_normal = not has_lost_something or not await self._hooks.is_current()
        _log.log(logging.INFO if is_normal else logging.WARNING, "%s is gone (%s); making it again", self._remote, why)

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
        if self._seen_dry is None and self._feed is not None and not self.is_active:
            await self._see_others()
        return self._seen_dry if self._seen_dry == before else None

    # ---- the feed -------------------------------------------------------------------------------------

    async def _enter(self, wanted: ConsumerConfig) -> Opened | float:
        """Make the consumer or join the one that is there, and start pulling; or when to try again."""
        self._durable = wanted.durable_name is not None
        entered = await self._entry.enter(wanted)
        if isinstance(entered, Later):
            self._wait_for(entered.waiting_for)
            return entered.delay_s
        if entered.stream_is_new:
            await self._handling.start_anew()
        self._facts = entered.stream
        self._pin_id = ""
        self._left = []
        self._acked = wanted.ack_policy != "none"
        self._acks_all = wanted.ack_policy == "all"
        self._reading = object()
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
        self._feed_end.add_done_callback(self._while_reading(self._feed_ended))
        # Nothing is awaited from here until the event is taken: the first message must find it done.
        return Opened(
            partitions_in(self._filters),
            Style.IN_PLACE if in_place else Style.RECREATE,
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
                on_pinned=self._while_reading(self._activated),
                on_unpinned=self._while_reading(self._deactivated),
            ),
            on_messages=self._while_reading(self._take) if self._acked else None,
            around_reset=self._handling.around_reset if self._acked else None,
        )

    def _while_reading(self, do: Callable[[T], None]) -> Callable[[T], None]:
        """Heard from this feed only: one that was let go of may still learn of its pin, or hand out what it held."""
        reading = self._reading

        def hear(told: T) -> None:
            if self._reading is reading:
                do(told)

        return hear

    async def _watch(self, feed: Feed) -> None:
        """Wait for the feed's end. Without acks nothing bounds what the server sends: then read here, with a bound."""
        if not self._acked:
            async for batch in feed.batches(self._max_held):
                self._take(batch)
                await self._handling.room(self._max_held)
        await feed.wait()

    async def _see_others(self) -> None:
        """Look who else is on the consumer, and whether a message can come at all, while none has."""
        info = await self._remote.info()
        is_other_active = pinned(info) not in (None, self._feed.pin_id if self._feed is not None else None)
        because = None
        if not self._pin_id and not is_other_active:
            because = await self._remote.why_no_message(info)
        if (is_other_active, because) != (self.is_other_active, self.no_message_because):
            self.is_other_active, self.no_message_because = is_other_active, because
            self._hooks.wait_changed()

    async def _drop_feed(self, *, consumer_is_gone: bool = False) -> None:
        self._reading = object()
        feed, self._feed = self._feed, None
        end, self._feed_end = self._feed_end, None
        if end is not None and not end.cancel() and not end.cancelled():
            end.exception()  # seen: it is being let go of
        self.is_other_active, self.no_message_because = False, None
        self._handling.forget()
        self._handling.forget_acks()
        try:
            if feed is not None:
                # Without a consumer there is no pin to hand over, and a cluster may leave questions unanswered.
                await (feed.drain(0) if consumer_is_gone else feed.close())
        except BaseException:
            self._tell(HandoffEvent.CLOSED)
            raise
        finally:
            self._tell_deactivated()

    # ---- what arrives ---------------------------------------------------------------------------------

    def _take(self, batch: list[Message]) -> None:
        if self._is_asked_for is not None:
            batch = self._drop_unasked(batch, self._is_asked_for)
        place, origin = self._place, self._origin
        messages = [GroupMessage(one, place(one.raw_subject), origin) for one in batch]
        admitted = self._state.admitted
        if not {one.place.partition for one in messages} <= admitted:
            messages = self._turn_away(messages, admitted)
        self._handling.offer(messages)

    def _turn_away(self, messages: list[GroupMessage], admitted: Partitions) -> list[GroupMessage]:
        """The messages that may start. The others come again: here after a rewinding, or to another member."""
        if self._state.closing and not self._remote.can_reset:
            self._left += messages
        others = [one for one in messages if one.partition not in admitted]
        self._handling.pass_over(others)
        unexpected = self._state.unexpected({one.partition for one in others})
        if unexpected:
            _log.debug("%s delivers partitions %s, which it was not known to cover", self._remote, sorted(unexpected))
            self._tell(Surprised(unexpected))
            self._hooks.stirred()
        return [one for one in messages if one.partition in admitted]

    def _drop_unasked(self, batch: list[Message], is_asked_for: Callable[[bytes], bool]) -> list[Message]:
        """The messages that the group asked for. The others are acked, so that nobody gets them."""
        asked = []
        for one in batch:
            if is_asked_for(one.raw_subject):
                asked.append(one)
            elif self._acked and (not self._acks_all or not (asked or self._handling.has_messages)):
                # Where an ack counts for all before it, it must not overtake a message that is still to be handled:
                # then this one comes again.
                one.ack()
        return asked

    def _activated(self, pin_id: str) -> None:
        self._tell(PinReceived(anew=pin_id != self._pin_id))
        self._pin_id = self._origin.pin_id = pin_id
        self.is_other_active, self.no_message_because = False, None
        if not self._told_active:
            self._told_active = True
            self._hooks.activated()
        self._hooks.stirred()

    def _feed_ended(self, _end: asyncio.Task[None]) -> None:
        """Its consumer is gone, or the connection is: what has not started here may start elsewhere."""
        self._tell(HandoffEvent.UNPINNED)
        self._handling.forget()
        self._hooks.stirred()

    def _deactivated(self, _pin_id: str) -> None:
        self._tell(HandoffEvent.UNPINNED)
        self.is_other_active = True  # most likely; the next look tells
        self._handling.forget()
        self._handling.revoke()
        self._tell_deactivated()

    # ---- small things ---------------------------------------------------------------------------------

    def _wait_for(self, what: str | None) -> None:
        if what != self.waiting_for:
            self.waiting_for = what
            self._hooks.wait_changed()

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

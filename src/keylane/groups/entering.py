"""How one instance is on its member's consumer: it makes or joins it, reads it, and lets go of it.

Owns the feed, the gate before the lanes, and what the instance knows of the consumer. Which consumer there should be,
and how its partitions move, is for `seat.py`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from keylane.core.plans import ranges
from keylane.errors import ApiError, GroupConflict
from keylane.groups import shape
from keylane.groups.gate import Gate
from keylane.groups.handling import Handling
from keylane.groups.message import GroupMessage, Placing
from keylane.groups.origin import Origin
from keylane.groups.remote import (
    FILTERS_OVERLAP,
    NOT_CHANGEABLE,
    RemoteConsumer,
    StreamFacts,
    has_lost_its_files,
    partitions_in,
    pinned,
)
from keylane.jetstream.connection import Connection
from keylane.jetstream.consumers import ConsumerConfig, ConsumerInfo
from keylane.jetstream.feed import Feed, FeedOptions, open_feed
from keylane.jetstream.message import Message
from keylane.jetstream.pinning import PinOptions

T = TypeVar("T")

_log = logging.getLogger("keylane.groups")

STANDBY_WAIT_S = (0.4, 0.5)
TAKEN_RETRY_S = 0.025

_EXISTS_DIFFERENTLY = 10148
_LONGEST_TAKEN_RETRY_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatHooks:
    """Told what happens to a seat."""

    stirred: Callable[[], None]
    """Something happened: approach again soon."""
    activated: Callable[[], None]
    deactivated: Callable[[], None]
    rebalanced: Callable[[frozenset[int], frozenset[int]], None]
    wait_changed: Callable[[], None]
    """`waiting_for`, or what is known of other instances, has changed."""
    is_current: Callable[[], Awaitable[bool]]
    """Whether what was asked of the seat last is still what the group says."""


class Entering:
    """An instance on its consumer, or on the way there. `Seat` says when."""

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
        self._knows_filters = True
        self._feed: Feed | None = None
        self._sitting = object()
        self._feed_end: asyncio.Task[None] | None = None
        self._facts: StreamFacts | None = None
        self._acked = self._durable = True
        self._acks_all = False
        self._is_asked_for: Callable[[bytes], bool] | None = None
        self._gate = Gate()
        self._left: list[GroupMessage] = []
        self._pin_id = ""
        self._must_rewind = False
        self._taken_retry_s = TAKEN_RETRY_S
        self._told_active = False
        self._told_partitions: frozenset[int] = frozenset()
        self._told_difference = ""
        self._look_due = 0.0
        self._seen_dry: str | None = None
        self._waits = False
        self.waiting_for: str | None = None
        """What must happen before the next step can be done."""
        self.no_message_because: str | None = None
        self.is_other_active = False

    def __repr__(self) -> str:
        return f"<Seat {self._remote} {sorted(self.partitions)} {self._gate!r} {self._feed!r}>"

    @property
    def is_active(self) -> bool:
        """Whether this instance is the one that gets messages."""
        return self._feed is not None and self._feed.is_pinned

    @property
    def has_consumer(self) -> bool:
        return self._feed is not None

    @property
    def _in_doubt(self) -> bool:
        """It stood still, and has not heard yet whether it is still the active one: another may be at work."""
        return self._feed is not None and not self._feed.may_hand_out()

    @property
    def partitions(self) -> frozenset[int]:
        """What the consumer covers now, as far as this instance knows."""
        return partitions_in(self._filters)

    # ---- entering -------------------------------------------------------------------------------------

    async def _enter(self, wanted: ConsumerConfig, at_least: tuple[str, ...] = ()) -> float | None:
        """Make the member's consumer, or join the one that is there, and start pulling.

        While others still have some of the partitions: with the filters `at_least`, if there are any.
        """
        self._durable = wanted.durable_name is not None
        try:
            info = await self._remote.create(wanted)
        except ApiError as error:
            if error.err_code == _EXISTS_DIFFERENTLY or has_lost_its_files(error):
                return await self._meet(wanted)
            if error.err_code != FILTERS_OVERLAP:
                raise
            self._wait_for_others(partitions_in(wanted.filter_subjects) - partitions_in(at_least))
            if at_least:
                await self._enter(replace(wanted, filter_subjects=at_least))
            return self._later()
        facts = await self._know_the_stream()
        if facts.clustered and not self._durable and not await self._hooks.is_current():
            # A cluster lets two members make overlapping consumers at the same moment. One of the two is of an older
            # membership: that one goes before it has pulled anything.
            await self._remote.delete_unless_in_use()
            return 0.0
        self._taken_retry_s = TAKEN_RETRY_S
        await self._open(wanted, info)
        return None

    async def _meet(self, wanted: ConsumerConfig) -> float | None:
        """Our consumer exists, made with other settings: of an older membership, or by an instance that differs."""
        info = await self._remote.info()
        different = shape.difference(wanted, info.config)
        if different is None:
            await self._know_the_stream()
            await self._open(wanted, info)
            return random.uniform(*STANDBY_WAIT_S)  # noqa: S311 - spreads instances, no secret
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
        self._wait_for(f"another instance to end, which has other settings ({different})")
        return wanted.priority_timeout_s

    async def _adopt(self, wanted: ConsumerConfig, info: ConsumerInfo, different: str) -> float | None:
        """Nobody is on the consumer any more: it gets our settings."""
        try:
            await self._remote.update(replace(wanted, filter_subjects=info.config.filter_subjects))
        except ApiError as error:
            if error.err_code != NOT_CHANGEABLE:
                raise
            if wanted.durable_name is None:
                self._wait_for(f"the server to delete the old consumer, which has other settings ({different})")
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
        self._acks_all = wanted.ack_policy == "all"
        self._sitting = object()
        options = self._feed_options(wanted)
        self._feed = await open_feed(self._connection, self._remote.stream, self._remote.name, options)
        self._feed_end = asyncio.create_task(self._watch(self._feed))
        self._feed_end.add_done_callback(lambda _: self._hooks.stirred())
        self._filters, self._knows_filters = info.config.filter_subjects or (), True
        self._is_asked_for = None
        if self._durable and set(self._filters) != set(wanted.filter_subjects or ()):
            # An instance in Go made it for a mapped group: it asks for whole partitions, whatever the group's filters
            # are. The consumer stays as it is, and what the group did not ask for ends here.
            self._is_asked_for = shape.asking_for(wanted.filter_subjects or ())
        await self._see_others(info)

    async def _see_others(self, info: ConsumerInfo | None = None) -> None:
        """Look who else is on the consumer, and whether a message can come at all, while none has."""
        info = info or await self._remote.info()
        is_other_active = pinned(info) not in (None, self._feed.pin_id if self._feed is not None else None)
        because = None
        if not self._pin_id and not is_other_active:
            because = await self._remote.why_no_message(info)
        if (is_other_active, because) != (self.is_other_active, self.no_message_because):
            self.is_other_active, self.no_message_because = is_other_active, because
            self._hooks.wait_changed()

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
                on_pinned=self._while_sitting(self._activated),
                on_unpinned=self._while_sitting(self._deactivated),
            ),
            on_messages=self._while_sitting(self._take) if self._acked else None,
            around_reset=self._handling.around_reset if self._acked else None,
        )

    def _while_sitting(self, do: Callable[[T], None]) -> Callable[[T], None]:
        """Heard from this feed only: one that was let go of may still learn of its pin, or hand out what it held."""
        sitting = self._sitting

        def hear(told: T) -> None:
            if self._sitting is sitting:
                do(told)

        return hear

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
        self._sitting = object()
        feed, self._feed = self._feed, None
        end, self._feed_end = self._feed_end, None
        if end is not None:
            end.cancel()
        self._must_rewind = False
        self.is_other_active, self.no_message_because = False, None
        self._handling.forget()
        self._handling.forget_acks()
        if feed is not None:
            # Without a consumer there is no pin to hand over, and a cluster may leave questions about it unanswered.
            await (feed.drain(0) if consumer_is_gone else feed.close())
        self._tell_deactivated()

    # ---- what arrives ---------------------------------------------------------------------------------

    def _take(self, batch: list[Message]) -> None:
        if self._is_asked_for is not None:
            batch = self._drop_unasked(batch, self._is_asked_for)
        place, origin = self._place, self._origin
        messages = [GroupMessage(one, place(one.raw_subject), origin) for one in batch]
        if not self._gate.is_open:
            if self._gate.is_shut and not self._remote.can_reset:
                self._left += messages
            messages, others = self._gate.passing(messages)
            self._handling.pass_over(others)
        self._handling.offer(messages)

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
        if pin_id != self._pin_id and not self._durable and self._can_change_filters:
            # The instance before us may have ended between widening the filters and rewinding, or with filters that
            # we never saw.
            self._gate.hold_all()
            self._must_rewind = True
            self._knows_filters = False
        self._pin_id = self._origin.pin_id = pin_id
        self.is_other_active, self.no_message_because = False, None
        if not self._told_active:
            self._told_active = True
            self._hooks.activated()
        self._hooks.stirred()

    def _deactivated(self, _pin_id: str) -> None:
        self._gate.shun_no_more()
        self.is_other_active = True  # most likely; the next look tells
        self._handling.forget()
        self._handling.revoke()
        self._tell_deactivated()

    # ---- small things ---------------------------------------------------------------------------------

    @property
    def _can_change_filters(self) -> bool:
        return self._remote.can_reset and self._facts is not None and not self._facts.clustered

    def _wait_for(self, what: str | None) -> None:
        self._waits = what is not None
        if what != self.waiting_for:
            self.waiting_for = what
            self._hooks.wait_changed()

    def _wait_for_others(self, partitions: frozenset[int]) -> None:
        self._wait_for(f"another member to let go of partitions {ranges(sorted(partitions))}")

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

"""A member of a group: one running instance, from `join` to its end.

Level-triggered: whatever happened (a change of the configuration, a lost consumer, a new pin, a tick), `_reconcile`
reads what should be and does the next step towards it. A step that cannot be done yet says when to try again.

How partitions move in an elastic group (docs/groups.md has the reasons):
- losing some: their messages are no longer started, those at work finish, their acks are confirmed, then the consumer's
  filters are narrowed and the consumer is reset, which lets go of what was delivered and not started;
- gaining some: the filters are widened as soon as the server allows it, that is, after the others let go; then a reset
  to the start of the queue brings the moved partitions' oldest messages first.
Messages of partitions that stay are not interrupted: what a reset delivers again is recognised by the lanes.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Literal

from keylane.core.names import check_group_name, check_member_name, check_stream_name
from keylane.core.partitions import Partitioning, parse_transform
from keylane.errors import (
    ApiError,
    ConsumerGone,
    GroupEnded,
    InvalidInput,
    KeylaneError,
    NotAMember,
    NotFound,
)
from keylane.groups import shape
from keylane.groups.config import ElasticConfig, StaticConfig
from keylane.groups.handling import Failure, Handler, Handling
from keylane.groups.message import GroupMessage
from keylane.groups.placing import placing
from keylane.groups.store import (
    StoredGroup,
    elastic_bucket,
    read_any,
    read_elastic,
    read_static,
    static_bucket,
)
from keylane.jetstream import consumers, streams
from keylane.jetstream.connection import Connection
from keylane.jetstream.consumers import ConsumerConfig
from keylane.jetstream.feed import Feed, FeedOptions, open_feed
from keylane.jetstream.message import Message
from keylane.jetstream.pinning import PinOptions

_log = logging.getLogger("keylane.groups")

Order = Literal["key", "partition", "strict", "none"]

_FILTERS_OVERLAP = 10100
_EXISTS_DIFFERENTLY = 10148
_TAKEN_RETRY_S = 0.025
_LONGEST_TAKEN_RETRY_S = 0.25
_STANDBY_WAIT_S = (0.4, 0.5)
_AFTER_A_HINT_S = (0.03, 0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberHooks:
    """Told what happens to a member. Plain functions; they must not wait."""

    on_joined: Callable[[], None] | None = None
    on_activated: Callable[[], None] | None = None
    on_deactivated: Callable[[], None] | None = None
    on_rebalanced: Callable[[tuple[int, ...], tuple[int, ...]], None] | None = None
    """The partitions before and after."""
    on_ended: Callable[[str], None] | None = None
    on_failure: Failure | None = None
    """A handler raised: message, error, and how often it failed by now."""


async def join(
    connection: Connection,
    stream: str,
    group: str,
    member: str,
    handler: Handler,
    *,
    order: Order = "key",
    concurrency: int = 64,
    max_ack_pending: int = 1000,
    manual_ack: bool = False,
    settings: ConsumerConfig | None = None,
    hooks: MemberHooks | None = None,
) -> Member:
    """Take part in a static or elastic group as `member`; run several instances of one member for hot standby.

    The handler gets each message once it is this instance's turn. When it returns, the message is acked; when it
    raises, the message is tried again while later messages of its key wait. A plain function runs in a thread.

    >>> async def handler(message): ...
    >>> handle = await join(connection, "ORDERS", "billing", "worker-1", handler)
    >>> await handle.wait()
    """
    check_stream_name(stream)
    check_group_name(group)
    check_member_name(member)
    stored = await read_any(connection, stream, group)
    wanted = replace(settings or ConsumerConfig(), max_ack_pending=1 if order == "strict" else max_ack_pending)
    if max_ack_pending < 1:
        raise InvalidInput(f"max_ack_pending is {max_ack_pending}: at least 1 message must be in flight")
    shape.check_settings(stored.config, wanted)
    if isinstance(stored.config, StaticConfig) and not stored.config.has_member(member):
        raise NotAMember(
            f"group {group!r} of stream {stream!r} does not list member {member!r}: a static group never changes; "
            f"its members are {', '.join(stored.config.plan.members)}"
        )
    one = Member(connection, stream, group, member, stored, wanted, hooks or MemberHooks())
    await one.start(handler, order=order, concurrency=concurrency, manual_ack=manual_ack)
    return one


class Member:
    """The handle of a joined member."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        group: str,
        member: str,
        stored: StoredGroup,
        wanted: ConsumerConfig,
        hooks: MemberHooks,
    ) -> None:
        self.stream = stream
        self.group = group
        self.member = member
        self._connection = connection
        self._stored = stored
        self._wanted = wanted
        self._hooks = hooks
        self._ack_wait_s = shape.ack_wait_s(stored.config, wanted.ack_wait_s)
        self._queue = shape.consumer_stream(stored.config, stream, group)
        self._consumer = shape.consumer_name(stored.config, group, member)
        self._partitions: frozenset[int] = frozenset()
        self._shunned: frozenset[int] = frozenset()
        """Being let go: their messages are not started any more."""
        self._fresh: frozenset[int] = frozenset()
        """Just gained: not started before the reset that brings their oldest message first."""
        self._feed: Feed | None = None
        self._feed_end: asyncio.Task[None] | None = None
        self._handling: Handling | None = None
        self._poke = asyncio.Event()
        self._rereads: list[float] = []
        self._taken_retry_s = _TAKEN_RETRY_S
        self._main: asyncio.Task[None] | None = None
        self._stopping = False
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        state = "ended" if self._ended.done() else "active" if self.is_active else "standby"
        return f"<Member {self.member} of {self.stream}/{self.group}, {state}, partitions {list(self.partitions)}>"

    @property
    def is_active(self) -> bool:
        """Whether this instance is the one that gets messages."""
        return self._feed is not None and self._feed.is_pinned

    @property
    def partitions(self) -> tuple[int, ...]:
        """What this member's consumer covers now, as far as this instance knows."""
        return tuple(sorted(self._partitions))

    # ---- life ---------------------------------------------------------------------------------------

    async def start(self, handler: Handler, *, order: Order, concurrency: int, manual_ack: bool) -> None:
        config = self._stored.config
        self._place = placing(
            await self._partitioning(config),
            whole_subject=isinstance(config, ElasticConfig) and not config.partitioning,
        )
        limit = self._wanted.max_ack_pending or 1
        self._handling = Handling(
            handler,
            lane_of=_lane(order),
            concurrency=1 if order == "strict" else concurrency,
            ack_wait_s=self._ack_wait_s,
            manual_ack=manual_ack,
            remember=2 * limit,
            on_failure=self._hooks.on_failure,
        )
        self._main = asyncio.create_task(self._run(), name=f"member {self.member}")

    async def stop(self) -> None:
        """Finish what is at work, ack it, hand over at once, and end. What has not started goes to the next."""
        self._stopping = True
        self._poke.set()
        await asyncio.wait({self._ended})

    async def wait(self) -> str:
        """Wait for the end and return its reason; raises the error if one ended it."""
        return await asyncio.shield(self._ended)

    async def _run(self) -> None:
        bucket = static_bucket if isinstance(self._stored.config, StaticConfig) else elastic_bucket
        reason, failure = "stopped", None
        try:
            async with bucket(self._connection).hints(shape.key_of_group(self.stream, self.group), self._hinted):
                self._told(self._hooks.on_joined)
                while not self._stopping:
                    self._poke.clear()
                    delay_s = await self._reconcile()
                    await self._wait_for_a_reason(delay_s)
        except _GroupDeleted as deleted:
            reason = str(deleted)
        except KeylaneError as error:
            failure = error
        except Exception as error:
            _log.exception("member %s of %s/%s failed", self.member, self.stream, self.group)
            failure = GroupEnded(f"member {self.member!r} failed: {error!r}")
            failure.__cause__ = error
        await self._leave(failure)
        if failure is not None:
            self._ended.set_exception(failure)
            self._ended.exception()  # seen: whoever waits gets it, and nobody has to
        else:
            self._ended.set_result(reason)
        if self._hooks.on_ended is not None:
            self._hooks.on_ended(str(failure) if failure is not None else reason)

    async def _leave(self, failure: KeylaneError | None) -> None:
        assert self._handling is not None
        try:
            if self._feed is not None:
                await self._close_feed()
        except KeylaneError as error:
            _log.warning("member %s: leaving was not clean: %s", self.member, error)
            if failure is not None:
                failure.add_note(f"and leaving was not clean: {error}")
        finally:
            await self._handling.close()

    async def _close_feed(self) -> None:
        """Stop pulling, finish what is at work, confirm the acks, hand the pin over."""
        assert self._feed is not None
        assert self._handling is not None
        feed, self._feed = self._feed, None
        if self._feed_end is not None:
            self._feed_end.cancel()
            self._feed_end = None
        await feed.drain()
        self._handling.forget()
        await self._handling.finish()
        await feed.close()

    def _hinted(self) -> None:
        # A hint may come before the record is readable: look again a little later too.
        now = asyncio.get_running_loop().time()
        self._rereads = [now + later_s for later_s in _AFTER_A_HINT_S]
        self._poke.set()

    async def _wait_for_a_reason(self, delay_s: float | None) -> None:
        now = asyncio.get_running_loop().time()
        tick_s = self._ack_wait_s + 0.5
        while self._rereads and self._rereads[0] <= now:
            self._rereads.pop(0)
        if self._rereads:
            tick_s = min(tick_s, self._rereads[0] - now)
        if delay_s is not None:
            tick_s = min(tick_s, delay_s)
        try:
            async with asyncio.timeout(tick_s):
                await self._poke.wait()
        except TimeoutError:
            return

    # ---- what should be, and the next step ------------------------------------------------------------

    async def _reconcile(self) -> float | None:
        """One step towards what the configuration says; returns when to try again, if that is soon."""
        if self._feed_end is not None and self._feed_end.done():
            await self._look_at_the_feeds_end(self._feed_end)
        config = await self._read_config()
        if not config.has_member(self.member):
            if self._feed is not None:
                await self._give_up_everything()
            return None
        target = frozenset(config.plan.partitions_of(self.member))
        if self._feed is None:
            return await self._enter(target) if target else None
        if target == self._partitions:
            return None
        if not target:
            await self._give_up_everything()
            return None
        return await self._move(target)

    async def _read_config(self) -> StaticConfig | ElasticConfig:
        before = self._stored.config
        read = read_static if isinstance(before, StaticConfig) else read_elastic
        stored = await read(self._connection, self.stream, self.group)
        if stored is None:
            raise _GroupDeleted(f"group {self.group!r} of stream {self.stream!r} was deleted")
        if stored.revision != self._stored.revision:
            config = stored.config
            follows = (
                isinstance(before, ElasticConfig)
                and isinstance(config, ElasticConfig)
                and before.same_but_owners(config)
            ) or before == config
            if not follows:
                raise GroupEnded(
                    f"the configuration of group {self.group!r} of stream {self.stream!r} was changed in a way that "
                    "running members cannot follow: restart them"
                )
            self._stored = stored
        return self._stored.config

    async def _look_at_the_feeds_end(self, end: asyncio.Task[None]) -> None:
        self._feed_end = None
        feed, self._feed = self._feed, None
        error = end.exception()
        if feed is not None:
            await feed.drain()
        assert self._handling is not None
        self._handling.forget()
        self._partitions = frozenset()
        if error is not None and not isinstance(error, ConsumerGone):
            raise error
        _log.warning("member %s: its consumer is gone; making it again", self.member)

    async def _enter(self, target: frozenset[int]) -> float | None:
        """Make the member's consumer, or join the one that is there, and start pulling."""
        config = self._config_for_consumer()
        try:
            await consumers.create(self._connection, self._queue, config, action="create")
        except NotFound as error:
            raise GroupEnded(f"stream {self._queue!r} does not exist any more: create the group again") from error
        except ApiError as error:
            if error.err_code == _FILTERS_OVERLAP:
                return self._later()
            if error.err_code == _EXISTS_DIFFERENTLY:
                return await self._meet_another_consumer(config)
            raise
        self._taken_retry_s = _TAKEN_RETRY_S
        await self._open(config, target)
        return None

    async def _meet_another_consumer(self, config: ConsumerConfig) -> float | None:
        """Our consumer exists, made with other settings: of an older membership, or by an instance that differs."""
        info = await consumers.info(self._connection, self._queue, self._consumer)
        ours = replace(config, filter_subjects=info.config.filter_subjects)
        different = shape.difference(ours, info.config)
        if different is not None:
            _log.error(
                "member %s: another instance made consumer %s with other settings (%s); waiting for it to go away",
                self.member, self._consumer, different,
            )  # fmt: skip
            return self._ack_wait_s
        await self._open(config, _partitions_in(info.config.filter_subjects or ()))
        return random.uniform(*_STANDBY_WAIT_S)  # noqa: S311 - spreads instances, no secret

    async def _open(self, config: ConsumerConfig, partitions: frozenset[int]) -> None:
        before, self._partitions = self._partitions, partitions
        self._shunned = self._fresh = frozenset()
        expires_s = max(self._ack_wait_s / 2, 1.0)
        timeout_s = config.priority_timeout_s or expires_s
        assert config.priority_groups is not None
        options = FeedOptions(
            max_messages=config.max_ack_pending or 1,
            expires_s=min(expires_s, timeout_s / 2),
            heartbeat_s=min(expires_s, timeout_s / 2) / 2,
            pull_fields={"group": config.priority_groups[0]},
            pin=PinOptions(
                group=config.priority_groups[0],
                timeout_s=timeout_s,
                reset_on_takeover=self._connection.supports("consumer_reset") and (config.max_ack_pending or 1) > 1,
                on_pinned=self._activated,
                on_unpinned=self._deactivated,
            ),
            on_messages=self._take,
        )
        self._feed = await open_feed(self._connection, self._queue, self._consumer, options)
        self._feed_end = asyncio.create_task(self._feed.wait())
        self._feed_end.add_done_callback(lambda _: self._poke.set())
        self._rebalanced(before)

    # ---- moving partitions ----------------------------------------------------------------------------

    async def _move(self, target: frozenset[int]) -> float | None:
        if not self.is_active:
            waits = await self._leave_it_to_the_active_one(target)
            if waits is not None or self._partitions == target:
                return waits
        before = self._partitions
        lost = before - target
        if lost:
            await self._let_go(lost, before & target)
            if self._feed is None:
                return 0.0
        if target != self._partitions and not await self._gain(target):
            return self._later()
        self._taken_retry_s = _TAKEN_RETRY_S
        self._rebalanced(before)
        return None

    async def _leave_it_to_the_active_one(self, target: frozenset[int]) -> float | None:
        """A standby only watches, unless nobody is active."""
        info = await consumers.info(self._connection, self._queue, self._consumer)
        actual = _partitions_in(info.config.filter_subjects or ())
        if actual != self._partitions:
            before, self._partitions = self._partitions, actual
            self._rebalanced(before)
        if actual == target:
            return None
        someone = any(state.pinned_client_id for state in info.priority_groups)
        return random.uniform(*_STANDBY_WAIT_S) if someone else None  # noqa: S311

    async def _let_go(self, lost: frozenset[int], kept: frozenset[int]) -> None:
        assert self._handling is not None
        assert self._feed is not None
        self._shunned = lost

        def is_lost(message: GroupMessage) -> bool:
            return message.partition in lost

        self._handling.forget(is_lost)
        await self._handling.finish(is_lost)
        await self._feed.settle()
        if not kept:
            await self._give_up_everything()
            return
        await self._set_filters(kept)
        await self._reset(None)
        self._partitions = kept
        self._shunned = frozenset()

    async def _gain(self, target: frozenset[int]) -> bool:
        """Widen the filters; False while another member still has one of the partitions."""
        self._fresh = target - self._partitions
        try:
            await self._set_filters(target)
        except ApiError as error:
            self._fresh = frozenset()
            if error.err_code == _FILTERS_OVERLAP:
                return False
            raise
        await self._reset(1)
        self._partitions = target
        return True

    async def _set_filters(self, partitions: frozenset[int]) -> None:
        config = self._config_for_consumer()
        mine = _partitions_in(config.filter_subjects or ())
        if partitions != mine:
            keep = tuple(one for one in config.filter_subjects or () if _partition_in(one) in partitions)
            config = replace(config, filter_subjects=keep)
        await consumers.update(self._connection, self._queue, config)

    async def _reset(self, sequence: int | None) -> None:
        await consumers.reset(self._connection, self._queue, self._consumer, sequence=sequence)

    async def _give_up_everything(self) -> None:
        """This member has no partitions any more: its consumer goes, if this instance is the active one."""
        was_active = self.is_active
        before = self._partitions
        await self._close_feed()
        if was_active or not await self._somebody_is_active():
            try:
                await consumers.delete(self._connection, self._queue, self._consumer)
            except NotFound:
                _log.info("member %s: its consumer was gone already", self.member)
        self._partitions = frozenset()
        self._rebalanced(before)

    async def _somebody_is_active(self) -> bool:
        try:
            info = await consumers.info(self._connection, self._queue, self._consumer)
        except NotFound:
            return False
        return any(state.pinned_client_id for state in info.priority_groups)

    # ---- what arrives ---------------------------------------------------------------------------------

    def _take(self, batch: list[Message]) -> None:
        assert self._handling is not None
        place = self._place
        if not self._shunned and not self._fresh:
            self._handling.offer([GroupMessage(one, place(one.raw_subject)) for one in batch])
            return
        good = []
        for one in batch:
            if self._fresh and one.is_first_of_consumer:
                self._fresh = frozenset()
            where = place(one.raw_subject)
            if where.partition not in self._shunned and where.partition not in self._fresh:
                good.append(GroupMessage(one, where))
        self._handling.offer(good)

    def _activated(self, _pin_id: str) -> None:
        self._told(self._hooks.on_activated)
        self._poke.set()

    def _deactivated(self, _pin_id: str) -> None:
        assert self._handling is not None
        self._handling.forget()
        self._told(self._hooks.on_deactivated)

    # ---- small things ---------------------------------------------------------------------------------

    def _config_for_consumer(self) -> ConsumerConfig:
        return shape.consumer_config(self._stored.config, self.group, self.member, self._wanted)

    async def _partitioning(self, config: StaticConfig | ElasticConfig) -> list[Partitioning]:
        if isinstance(config, ElasticConfig):
            return list(config.partitioning)
        transform = (await streams.info(self._connection, self.stream)).config.subject_transform
        if transform is None or not transform.dest:
            return []
        known = parse_transform(transform.src or ">", transform.dest)
        return [known] if known is not None else []

    def _later(self) -> float:
        delay_s, self._taken_retry_s = (
            self._taken_retry_s,
            min(2 * self._taken_retry_s, _LONGEST_TAKEN_RETRY_S),
        )
        return delay_s

    def _told(self, hook: Callable[[], None] | None) -> None:
        if hook is not None:
            hook()

    def _rebalanced(self, before: frozenset[int]) -> None:
        if self._hooks.on_rebalanced is not None and before != self._partitions:
            self._hooks.on_rebalanced(tuple(sorted(before)), self.partitions)


class _GroupDeleted(Exception):
    """The group's record was deleted or purged: a normal end."""


def _lane(order: Order) -> Callable[[GroupMessage], Hashable]:
    lanes: dict[Order, Callable[[GroupMessage], Hashable]] = {
        "key": lambda message: message.place,
        "partition": lambda message: message.place.partition,
        "strict": lambda message: 0,
        "none": lambda message: message.sequence,
    }
    if order not in lanes:
        raise InvalidInput(f"order is {order!r}: use one of {', '.join(lanes)}")
    if order == "key":
        return lambda message: (message.place.partition, message.place.key)
    return lanes[order]


def _partition_in(filter_subject: str) -> int:
    return int(filter_subject.split(".", 1)[0])


def _partitions_in(filters: tuple[str, ...]) -> frozenset[int]:
    return frozenset(_partition_in(one) for one in filters)

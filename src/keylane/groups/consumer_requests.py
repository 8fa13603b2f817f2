"""The calls that a member makes on its consumer, and how it creates or joins it. Reads no message."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from keylane.errors import ApiError, GroupConflict, KeylaneError, NotFound, RequestTimeout
from keylane.groups import consumer_spec
from keylane.jetstream import Connection, ConsumerConfig, ConsumerInfo, consumers, streams

FILTERS_OVERLAP = 10100
NOT_CHANGEABLE = 10012

_RESET_S = 1.5
_PROBE_S = 2.0
_LOOK_S = 1.0
_LOOK_AGAIN_S = 0.005
_SETTLE_S = 2.0
_COMING_S = 0.25

_log = logging.getLogger("keylane.groups")


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """The facts about a stream that a member needs."""

    made: datetime
    clustered: bool
    replicated: bool


class RemoteConsumer:
    """The consumer `name` of `stream`, which may not exist."""

    def __init__(self, connection: Connection, stream: str, name: str) -> None:
        self._connection = connection
        self.stream = stream
        self.name = name

    def __str__(self) -> str:
        return f"{self.stream}/{self.name}"

    @property
    def can_reset(self) -> bool:
        return self._connection.supports("consumer_reset")

    async def stream_facts(self) -> StreamFacts:
        wire = await streams.info_json(self._connection, self.stream)
        return StreamFacts(
            made=streams.StreamState.from_wire(wire).created,
            clustered="name" in wire.get("cluster", {}),
            replicated=wire["config"]["num_replicas"] > 1,
        )

    @property
    def is_gone(self) -> str:
        """What to say when the stream was deleted."""
        return f"stream {self.stream!r} does not exist any more: create the group again"

    async def why_no_source(self) -> str | None:
        """Why the stream cannot deliver anything any more; None if it can, or if nobody could say.

        A queue has no subjects of its own: an empty one whose sources are gone stays empty.
        """
        try:
            wire = await self._stream_info(self.stream)
            if wire is None:
                return self.is_gone
            sources = wire["config"].get("sources") or []
            if wire["state"]["messages"] or wire["config"].get("subjects") or not sources:
                return None
            for source in sources:
                if "external" in source or await self._stream_info(source["name"]) is not None:
                    return None
        except KeylaneError as error:
            _log.debug("cannot look at stream %s: %s", self.stream, error)
            return None
        names = ", ".join(repr(source["name"]) for source in sources)
        return (
            f"stream {names} does not exist any more, and all that {self.stream!r} had of it is handled: create the "
            "stream again and join again, or delete the group"
        )

    async def why_no_message(self, info: ConsumerInfo) -> str | None:
        """Why a consumer that never had a message may never get one; None if nothing looks wrong.

        The stream of a static group must have partition numbers in its subjects; the filters of an elastic group must
        match something in its stream.
        """
        if info.delivered_count or info.num_pending or info.config.deliver_policy != "all":
            return None
        try:
            wire = await self._stream_info(self.stream)
            if wire is None:
                return None
            if wire["config"].get("sources"):
                return await self._why_nothing_is_copied(wire)
            return await self._why_no_partitions(wire)
        except KeylaneError as error:
            _log.debug("cannot look at stream %s: %s", self.stream, error)
            return None

    async def _why_nothing_is_copied(self, wire: dict[str, Any]) -> str | None:
        sources = wire.get("sources") or []
        if wire["state"]["last_seq"] or any(one.get("lag") or one.get("active", -1) < 0 for one in sources):
            return None  # it has had messages, or is about to look at them
        for one in sources:
            below = await self._stream_info(one["name"])
            count = below["state"]["messages"] if below is not None else 0
            filters = [str(each["src"]) for each in one.get("subject_transforms") or ()]
            if not count or await self._matches(one["name"], filters):
                continue  # what has just been published is copied a moment later
            shown = ", ".join(map(repr, filters))
            return f"a message that matches {shown}: stream {one['name']!r} has {count:,}, and none of them does"
        return None

    async def _matches(self, stream: str, filters: list[str]) -> bool:
        """Whether the stream holds a message that one of the filters selects."""
        for one in filters:
            try:
                await streams.get_message(self._connection, stream, last_by_subject=one)
            except NotFound:
                continue
            return True
        return False

    async def _why_no_partitions(self, wire: dict[str, Any]) -> str | None:
        count, transform = wire["state"]["messages"], wire["config"].get("subject_transform") or {}
        if not count or "{{partition(" in str(transform.get("dest", "")).lower():
            return None
        first = await streams.get_message(
            self._connection, self.stream, sequence=wire["state"]["first_seq"], next_by_subject=">"
        )
        subject = str(first["subject"])
        if subject.split(".", 1)[0].isdecimal():
            return None
        return (
            f"subjects that begin with a partition number: stream {self.stream!r} has {count:,} messages, such as "
            f"{subject!r}, and none for this member. A static group needs a stream with a subject transform that has "
            "{{Partition(…)}} in front, or publishers that put the number there"
        )

    async def _stream_info(self, stream: str) -> dict[str, Any] | None:
        try:
            return await streams.info_json(self._connection, stream, timeout_s=_LOOK_S)
        except NotFound:
            return None

    async def info(self) -> ConsumerInfo:
        return await consumers.info(self._connection, self.stream, self.name)

    async def create(self, config: ConsumerConfig) -> ConsumerInfo:
        return await consumers.create(self._connection, self.stream, config, action="create")

    async def update(self, config: ConsumerConfig) -> None:
        await consumers.update(self._connection, self.stream, config)

    async def delete(self) -> None:
        await consumers.delete(self._connection, self.stream, self.name)

    async def delete_unless_in_use(self, our_pin: str | None = None) -> bool:
        """Delete the consumer if no instance reads it, now and a moment later; return False if one does.

        Another instance may have just joined or created it, and would lose its acks with the consumer. Close your own
        pulls first.
        """
        for is_last in (False, True):
            info = await self.info()
            if info.num_waiting or pinned(info) not in (None, our_pin):
                return False
            if not is_last:
                await asyncio.sleep(_COMING_S)
        await self.delete()
        return True

    async def unpin(self, info: ConsumerInfo) -> None:
        await consumers.unpin(self._connection, self.stream, self.name, info.priority_groups[0].group)

    async def reset(self) -> None:
        """Reset the consumer while no pull is open; else use `Feed.reset`. Without a leader it does not answer."""
        try:
            async with asyncio.timeout(_RESET_S):
                await consumers.reset(self._connection, self.stream, self.name)
        except TimeoutError as error:
            raise RequestTimeout(f"no reset of {self} within {_RESET_S:g} s") from error

    async def wait_until_removed(self, partitions: Iterable[int], done: Callable[[int], bool], highest: int) -> None:
        """Wait for a short time until the stream's leader has removed the messages that are done."""
        try:
            async with asyncio.timeout(_SETTLE_S):
                await asyncio.gather(*(self._wait_until_removed(f"{one}.>", done, highest) for one in partitions))
        except TimeoutError:
            _log.warning("%s: acked messages may still be there after %g s", self.stream, _SETTLE_S)

    async def _wait_until_removed(self, subject_filter: str, done: Callable[[int], bool], highest: int) -> None:
        start = 1
        while True:
            found = await self._next_message(subject_filter, start)
            if found is None or found > highest:
                return
            if done(found):
                await asyncio.sleep(_LOOK_AGAIN_S)
            else:
                start = found + 1

    async def _next_message(self, subject_filter: str, start: int) -> int | None:
        """The sequence of the stream's next message with such a subject, as its leader has it."""
        try:
            found = await streams.get_message(
                self._connection, self.stream, sequence=start, next_by_subject=subject_filter
            )
        except NotFound:
            return None
        return int(found["seq"])

    async def is_free(self, filters: tuple[str, ...]) -> bool:
        """Whether no consumer of the work queue has one of these filters, so that another one may have them."""
        name = f"keylane-probe-{secrets.token_hex(6)}"
        probe = ConsumerConfig(name=name, filter_subjects=filters, inactive_threshold_s=_PROBE_S, mem_storage=True)
        try:
            await consumers.create(self._connection, self.stream, probe, action="create")
        except ApiError as error:
            if error.err_code == FILTERS_OVERLAP:
                return False
            raise
        await consumers.delete(self._connection, self.stream, name)
        return True


def pinned(info: ConsumerInfo) -> str | None:
    """The pin of a group's consumer; it has one priority group."""
    return next((state.pinned_client_id for state in info.priority_groups if state.pinned_client_id), None)


def has_lost_its_files(error: ApiError) -> bool:
    """Whether the server cannot change the consumer any more, because its directory is gone.

    This can happen to a consumer that is created again while the previous one is still being deleted (nats-server
    2.15.1). It continues in the server's memory.
    """
    return error.err_code == NOT_CHANGEABLE and "no such file or directory" in error.description


def partition_in(filter_subject: str) -> int:
    return int(filter_subject.split(".", 1)[0])


def partitions_in(filters: Iterable[str] | None) -> frozenset[int]:
    return frozenset(partition_in(one) for one in filters or ())


_EXISTS_DIFFERENTLY = 10148


@dataclass(frozen=True, slots=True)
class Entered:
    """The consumer may be read."""

    consumer: ConsumerInfo
    stream: StreamFacts
    stream_is_new: bool
    """The stream was deleted and made again since the last time: it counts from 1."""
    joined: bool = False
    """The consumer was there before, with filters of its own."""


@dataclass(frozen=True, slots=True)
class Later:
    """The consumer cannot be read yet: try again after the delay."""

    delay_s: float
    waiting_for: str | None = None


class ConsumerEntry:
    """Creates a member's consumer, or joins the one that is there.

    Instances of a member may have been started with different settings, or for an older membership. Whoever comes later
    never rewrites a consumer that another instance reads.
    """

    def __init__(self, consumer: RemoteConsumer, is_current: Callable[[], Awaitable[bool]]) -> None:
        """`is_current`: whether the wanted consumer is still the one of the group's record."""
        self._consumer = consumer
        self._is_current = is_current
        self._stream: StreamFacts | None = None
        self._logged_difference = ""

    async def enter(self, wanted: ConsumerConfig) -> Entered | Later:
        try:
            info = await self._consumer.create(wanted)
        except ApiError as error:
            if error.err_code == _EXISTS_DIFFERENTLY or has_lost_its_files(error):
                return await self._meet(wanted)
            raise
        entered = await self._entered(info)
        if entered.stream.clustered and wanted.durable_name is None and not await self._is_current():
            # A cluster lets two members make overlapping consumers at the same moment. One of the two is of an older
            # membership: that one goes before it has pulled anything.
            await self._consumer.delete_unless_in_use()
            return Later(0.0)
        return entered

    async def _entered(self, info: ConsumerInfo, *, joined: bool = False) -> Entered:
        before, self._stream = self._stream, await self._consumer.stream_facts()
        is_new = before is not None and before.made != self._stream.made
        if is_new:
            _log.warning("stream %s was made anew", self._consumer.stream)
        return Entered(info, self._stream, is_new, joined)

    async def _meet(self, wanted: ConsumerConfig) -> Entered | Later:
        """The consumer exists with other settings: of an older membership, or of an instance with other options."""
        info = await self._consumer.info()
        different = consumer_spec.difference(wanted, info.config)
        if different is None:
            return await self._entered(info, joined=True)
        if not info.num_waiting and not pinned(info):
            return await self._adopt(wanted, info, different)
        _log.log(
            logging.DEBUG if different == self._logged_difference else logging.ERROR,
            "another instance runs on %s with other settings (%s); waiting until it is gone. Give all instances of a "
            "member the same settings",
            self._consumer,
            different,
        )
        self._logged_difference = different
        return Later(_patience_s(wanted), f"another instance to end, which has other settings ({different})")

    async def _adopt(self, wanted: ConsumerConfig, info: ConsumerInfo, different: str) -> Later:
        """Update the consumer, which no instance reads any more, to our settings."""
        try:
            await self._consumer.update(replace(wanted, filter_subjects=info.config.filter_subjects))
        except ApiError as error:
            if error.err_code != NOT_CHANGEABLE:
                raise
            if wanted.durable_name is None:  # it goes away by itself
                return Later(
                    _patience_s(wanted),
                    f"the server to delete the old consumer, which has other settings ({different})",
                )
            raise GroupConflict(
                f"consumer {self._consumer.name!r} of stream {self._consumer.stream!r} was made with other settings "
                f"({different}), which the server cannot change: use those settings, or delete the consumer"
            ) from error
        _log.warning("%s has this instance's settings now; before, %s", self._consumer, different)
        return Later(0.0)


def _patience_s(wanted: ConsumerConfig) -> float:
    return wanted.priority_timeout_s or consumer_spec.DEFAULT_ACK_WAIT_S

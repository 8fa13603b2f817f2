"""Ground for the tests of groups: streams, members on connections of their own, and the evidence of their handlers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from nats.js.api import StorageType, StreamConfig, SubjectTransform

import keylane
from keylane import Connection, groups
from keylane.errors import KeylaneError, RequestTimeout
from keylane.groups import GroupMessage, Member
from keylane.jetstream import ConsumerConfig, Outgoing, PublishAck, publish_many, streams
from keylane.testing import Effect, Verdict, judge
from tests.waiter import until

T = TypeVar("T")

QUICK = ConsumerConfig(ack_wait_s=1.0)
"""Short timers: the pin moves after 1 s, a member looks around every 1.5 s."""
LONG_S = 30.0
"""For what takes a moment, on a machine that is busy with other things."""


class Line(NamedTuple):
    """One handled message."""

    at: float
    by: str
    partition: int
    key: str
    sequence: int
    subject: str
    data: bytes


@dataclass(slots=True)
class Evidence:
    """What handlers did, in the order in which they did it."""

    lines: list[Line] = field(default_factory=list)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def add(self, by: str, message: GroupMessage) -> None:
        self.lines.append(
            Line(
                time.monotonic(),
                by,
                message.partition,
                message.key,
                message.sequence,
                message.subject,
                message.data,
            )
        )

    async def note(self, by: str, message: GroupMessage) -> None:
        self.add(by, message)

    def handler(self, by: str) -> Callable[[GroupMessage], Awaitable[None]]:
        async def handle(message: GroupMessage) -> None:
            await self.note(by, message)

        return handle

    def by(self, member: str) -> list[Line]:
        return [line for line in self.lines if line.by == member]

    async def until(self, good: Callable[[list[Line]], bool], deadline_s: float = LONG_S) -> None:
        await until(lambda: self.lines, good, deadline_s=deadline_s)

    async def all_of(self, sequences: Iterable[int], deadline_s: float = LONG_S) -> None:
        """Wait until each of these was handled at least once; says which are missing."""
        wanted = set(sequences)
        await until(
            lambda: sorted(wanted - {line.sequence for line in self.lines}), lambda missing: not missing, deadline_s
        )

    def verdict(self, sequences: Iterable[int]) -> Verdict:
        return judge(sequences, [Effect(line.key, line.sequence, line.by) for line in self.lines])


def flawless(verdict: Verdict) -> bool:
    """Nothing lost, repeated, out of order or from nowhere."""
    return verdict.clean and not verdict.duplicated


@dataclass(slots=True)
class Ground:
    """A stream, and everything that a test starts on it; all of it ends with the test."""

    connection: Connection
    stream: str
    stack: AsyncExitStack
    url: str | list[str]
    evidence: Evidence = field(default_factory=Evidence)

    async def client(self) -> Connection:
        """A connection of its own, as another process would have."""
        return await self.stack.enter_async_context(await keylane.connect(self.url))

    async def publish(self, subjects: Iterable[str], data: bytes = b"x") -> list[int]:
        """Publish one message on each subject (`k1` is `<stream>.k1`); returns the sequences."""
        outgoing = [Outgoing(f"{self.stream}.{subject}", data) for subject in subjects]
        acks = await publish_many(self.connection, outgoing)
        assert all(isinstance(ack, PublishAck) for ack in acks), acks
        return [ack.sequence for ack in acks if isinstance(ack, PublishAck)]

    async def elastic(self, group: str = "g", **options: Any) -> groups.ElasticConfig:
        given: dict[str, Any] = {"partitions": 4, "partition_by": f"{self.stream}.*", **options}
        config = await groups.create_elastic(self.connection, self.stream, group, **given)
        self._delete_at_end(f"{self.stream}-{group}")
        return config

    async def static(self, group: str = "g", **options: Any) -> groups.StaticConfig:
        given: dict[str, Any] = {"partitions": 4, **options}
        return await groups.create_static(self.connection, self.stream, group, **given)

    async def transform_subjects(self, **transform: str) -> None:
        """Give the stream this subject transform from now on, or none."""
        config = (await self.connection.api.request(f"STREAM.INFO.{self.stream}"))["config"]
        config["subject_transform"] = transform or None
        await self.connection.api.request(f"STREAM.UPDATE.{self.stream}", config)

    async def join(
        self,
        member: str,
        handler: Any = None,
        *,
        group: str = "g",
        connection: Connection | None = None,
        **options: Any,
    ) -> Member:
        """A member on a connection of its own, which writes evidence unless it has a handler."""
        options.setdefault("settings", QUICK)
        handle = await groups.join(
            connection or await self.client(),
            self.stream,
            group,
            member,
            handler or self.evidence.handler(member),
            **options,
        )

        async def stop() -> None:
            with suppress(KeylaneError):
                await handle.stop(timeout_s=2)

        self.stack.push_async_callback(stop)
        return handle

    async def asked(self, member: str, group: str = "g") -> None:
        """Wait until the server has a pull of this member's instance: one that joins later is served after it."""
        await until(
            lambda: groups.member_info(self.connection, self.stream, group, member),
            lambda info: info is not None and info.num_waiting > 0,
        )

    async def drained(self, count: int, group: str = "g") -> None:
        """Wait until the group's queue has had this many messages and is empty: everything was acked."""
        await until(
            lambda: streams.state(self.connection, f"{self.stream}-{group}"),
            lambda state: state.last_sequence >= count and state.messages == 0,
        )

    def _delete_at_end(self, stream: str) -> None:
        self.stack.push_async_callback(delete_quietly, self.connection, stream)


async def delete_quietly(connection: Connection, stream: str) -> None:
    with suppress(KeylaneError):  # the server or the stream may be gone: that is what some tests do
        await streams.delete(connection, stream)


async def make_ground(
    stack: AsyncExitStack, connection: Connection, stream: str, url: str | list[str], **options: Any
) -> Ground:
    """A stream with `<stream>.>`; `partitions=n` puts the partition of its first key token in front (static groups)."""
    partitions = options.pop("partitions", None)
    transform = options.pop("transform", None)
    if partitions is not None:
        transform = SubjectTransform(
            src=f"{stream}.*", dest=f"{{{{Partition({partitions},1)}}}}.{stream}.{{{{Wildcard(1)}}}}"
        )
    given: dict[str, Any] = {"subjects": [f"{stream}.>"], "storage": StorageType.MEMORY, **options}
    config = StreamConfig(name=stream, subject_transform=transform, **given)
    try:
        await streams.create(connection, config)
    except RequestTimeout:  # a busy cluster may take longer than one request waits, and the call may be repeated
        await streams.create(connection, config)
    stack.push_async_callback(delete_quietly, connection, stream)
    return Ground(connection, stream, stack, url)


def active(member: Member) -> bool:
    return member.is_active


def owned(member: Member) -> tuple[int, ...]:
    return member.partitions

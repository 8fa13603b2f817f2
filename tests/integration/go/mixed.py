"""Groups that Go and Python share: processes of both, and one record of what they handled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from nats.js.api import SubjectTransform

from chaos.evidence import Handled, merged, read, verdict
from chaos.members import Group, Members, members
from keylane import Connection, groups
from keylane.jetstream import Outgoing, PublishAck, publish_many, streams
from keylane.testing import Verdict
from tests.peers.pcgroups import PcgroupsPeer
from tests.waiter import until

KEYS = 24
PARTITIONS = 6
GROUP = "g"
LOOK_EVERY_S = 0.05


class Mixed:
    """One stream with a group `g` of 6 partitions, and whoever takes part in it."""

    def __init__(self, connection: Connection, go: PcgroupsPeer, members: Members) -> None:
        self.connection = connection
        self.stream = members.group.stream
        self.members = members
        self.sent: list[int] = []
        self._go = go

    @property
    def filter(self) -> str:
        return f"{self.stream}.*"

    async def ask_go(self, subcommand: str, **options: object) -> Any:
        """Let Go's library do something to the group."""
        kind = self.members.group.kind
        return await asyncio.to_thread(self._go.ask, subcommand, stream=self.stream, group=GROUP, kind=kind, **options)

    async def go_creates_elastic(self, **options: object) -> Any:
        return await self.ask_go("elastic-create", max_members=PARTITIONS, filter=self.filter, wildcards="1", **options)

    async def publish(self, count: int) -> list[int]:
        """Messages of all keys; returns their sequences."""
        first = len(self.sent)
        outgoing = [
            Outgoing(f"{self.stream}.k{number % KEYS}", b"%d" % number) for number in range(first, first + count)
        ]
        stored = await publish_many(self.connection, outgoing)
        sequences = [one.sequence for one in stored if isinstance(one, PublishAck)]
        assert len(sequences) == count, stored
        self.sent += sequences
        return sequences

    def handled(self) -> list[Handled]:
        """Everything that any process handled so far, in order. `by` is the member and the process's number."""
        return merged(
            read(one.evidence, f"{one.member}#{number}", PARTITIONS) for number, one in enumerate(self.members.started)
        )

    async def handled_all(self, sequences: Iterable[int], timeout_s: float) -> list[Handled]:
        """Wait until each of these was handled by somebody; returns the evidence so far."""
        wanted = set(sequences)

        def missing() -> set[int]:
            self.members.check()
            return wanted - {one.sequence for one in self.handled()}

        await until(missing, lambda left: not left, timeout_s)
        return self.handled()

    async def until(self, holds: Callable[[list[Handled]], bool], timeout_s: float) -> None:
        """Publish and look until it holds: ownership shows only in messages."""

        async def newest() -> list[Handled]:
            return (await self.handled_all(await self.publish(KEYS), timeout_s))[-KEYS:]

        await until(newest, holds, timeout_s)

    def verdict(self) -> Verdict:
        return verdict(self.sent, self.handled())


@asynccontextmanager
async def group_of_both(
    connection: Connection, go: PcgroupsPeer, group: Group, directory: Path
) -> AsyncIterator[Mixed]:
    """A stream, and room for a group of this kind on it; processes and everything else are gone afterwards.

    All members ask for one message in flight: in a shared group they must ask for the same consumer, and it keeps Go
    in order too.
    """
    name = group.stream
    transform = SubjectTransform(src=f"{name}.*", dest=f"{{{{partition({PARTITIONS},1)}}}}.{name}.{{{{wildcard(1)}}}}")
    config = streams.StreamConfig(
        name=name,
        subjects=[f"{name}.*"],
        storage=streams.StorageType.MEMORY,
        subject_transform=transform if group.kind == "static" else None,
    )
    await streams.create(connection, config)
    try:
        async with members(group, directory, max_ack_pending=1) as processes:
            yield Mixed(connection, go, processes)
            await processes.stop()
        for one in await groups.list_groups(connection, name):
            await groups.delete(connection, name, one.group)
    finally:
        await streams.delete(connection, name)

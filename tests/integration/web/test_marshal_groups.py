"""Marshal's world on the page: owners, lag and pauses of a group in a coordination log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from keylane import Connection
from keylane.overview import GroupOverview, overview
from keylane.server import NatsServer
from keylane.web.marshal_groups import MarshalGroups
from tests.integration.marshal.stream_rig import PARTITIONS, Ground, make, publish
from tests.integration.web.rig import served
from tests.waiter import until


@pytest.fixture
async def marshal(connection: Connection, nats_server: NatsServer, unique: Callable[..., str]) -> AsyncIterator[Ground]:
    ground = await make(connection, nats_server, unique("page"), unique("log"))
    yield ground
    for name in (ground.stream, ground.log_name):
        await connection.api.request(f"STREAM.DELETE.{name}")


def owned(group: GroupOverview) -> int:
    return sum(one.owner is not None for one in group.partitions)


async def test_a_group_of_a_log_is_shown_and_can_be_paused(connection: Connection, marshal: Ground) -> None:
    async def handle(_: object) -> None:
        return

    async def look() -> GroupOverview | None:
        found = await overview(connection)
        groups = await logs.read(frozenset(one.name for one in found.streams), found.read_at)
        return next((one for one in groups if one.stream == marshal.log_name), None)

    async with MarshalGroups(connection) as logs:
        assert await look() is None
        async with marshal.consumer("c1", handle), served(connection) as site:
            await publish(connection, marshal, 60)
            found = await until(look, lambda one: one is not None and owned(one) == PARTITIONS)
            assert found is not None
            assert (found.kind, found.name) == ("marshal", "billing")
            assert [one.owner for one in found.partitions] == ["c1"] * PARTITIONS
            await until(look, lambda one: one is not None and one.lag == 0, deadline_s=45)
            said, done = await site.act("pause-group", marshal.log_name, "billing", minutes=5)
            assert said[0] == "Pause billing for 5 minutes?"
            assert done == "done: billing is paused"
            await until(look, lambda one: one is not None and one.is_paused and not owned(one))
            await site.act("resume-group", marshal.log_name, "billing")
            await until(look, lambda one: one is not None and not one.is_paused and owned(one) == PARTITIONS)

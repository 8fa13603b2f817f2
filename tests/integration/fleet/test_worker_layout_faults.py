"""Layout `worker`: consumers that are deleted, servers that restart and links that break while filters change."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from keylane.fleet import Partition, WorkerHooks
from keylane.jetstream import consumers
from keylane.server import NatsServer
from tests.integration.fleet.owners import Owner
from tests.integration.fleet.rig import KEYS, FleetGround
from tests.integration.groups.rig import flawless
from tests.waiter import until


async def test_a_deleted_consumer_of_a_worker_heals(ground: FleetGround) -> None:
    updates: list[float] = []
    worker = await ground.join(
        "a", layout="worker", hooks=WorkerHooks(on_consumer_update=lambda seconds, _: updates.append(seconds))
    )
    await ground.shared(worker)
    sent = await ground.publish(KEYS * 3)
    await ground.evidence.all_of(sent)
    before = len(updates)
    await consumers.delete(ground.connection, ground.stream, "f-0")
    sent += await ground.publish(KEYS * 3)
    await ground.evidence.all_of(sent, deadline_s=10)
    assert flawless(ground.evidence.verdict(sent))
    assert len(updates) > before


async def test_moves_go_on_after_the_server_was_killed_between_their_steps(
    own_server: tuple[FleetGround, NatsServer],
) -> None:
    """The change that was under way is tried again; nothing that was confirmed is lost."""
    ground, server = own_server
    partitions = ground.partitions.resolve().partitions
    async with AsyncExitStack() as stack:
        owners = [await Owner.start(ground, number, stack) for number in range(2)]
        for partition in partitions:
            await owners[0].gain(partition)
        sent = await ground.publish(KEYS * 5)
        moving = asyncio.create_task(_move(owners, partitions[:4]))
        await asyncio.sleep(0.05)
        server.kill()
        await asyncio.sleep(0.2)
        server.restart()
        await moving
        sent += await _published(ground)
        await ground.evidence.all_of(sent)
    assert ground.evidence.verdict(sent).clean


async def test_moves_go_on_after_every_link_was_cut(own_server: tuple[FleetGround, NatsServer]) -> None:
    ground, _ = own_server
    partitions = ground.partitions.resolve().partitions
    async with AsyncExitStack() as stack:
        owners = [await Owner.start(ground, number, stack) for number in range(2)]
        for partition in partitions:
            await owners[0].gain(partition)
        async with ground.load() as sent:
            moving = asyncio.create_task(_move(owners, partitions[:4]))
            for _ in range(3):
                await asyncio.sleep(0.03)
                for owner in owners:
                    owner.cut_link()
            await moving
        await ground.evidence.all_of(sent)
    assert ground.evidence.verdict(sent).clean


async def _move(owners: list[Owner], partitions: tuple[Partition, ...]) -> None:
    for partition in partitions:
        await owners[0].lose(partition)
        await owners[1].gain(partition)


async def _published(ground: FleetGround) -> list[int]:
    """The link of the test comes back a moment after the server."""
    await until(lambda: ground.connection.is_connected)
    return await ground.publish(KEYS * 5)

"""Servers that restart and links that break in the middle of a rebalance; and a short soak: nothing piles up."""

from __future__ import annotations

import asyncio
import gc

import pytest

from keylane.fleet import WorkerHooks
from keylane.groups import GroupMessage
from keylane.jetstream import Message
from keylane.server import NatsServer
from tests.integration.fleet.rig import KEYS, PARTITIONS, FleetGround, cut_link
from tests.waiter import until


@pytest.mark.parametrize("layout", ["partition", "worker"])
@pytest.mark.parametrize("fault", ["server killed", "links cut"])
async def test_a_rebalance_that_is_cut_off_is_finished(
    own_server: tuple[FleetGround, NatsServer], layout: str, fault: str
) -> None:
    ground, server = own_server
    moving = asyncio.Event()
    a = await ground.join("a", layout=layout)
    await ground.shared(a)
    sent = await ground.publish(KEYS * 5)
    hooks = WorkerHooks(on_assignment=lambda _, mine: moving.set() if mine else None)
    b = await ground.join("b", layout=layout, hooks=hooks)
    sent += await ground.publish(KEYS * 5)
    await moving.wait()
    if fault == "server killed":
        server.kill()
        await until(lambda: not ground.connection.is_connected)
        server.restart()
    else:
        for client in ground.clients:
            cut_link(client)
    await until(lambda: ground.connection.is_connected and all(one.is_connected for one in ground.clients))
    sent += await ground.publish(KEYS * 5)
    await ground.shared(a, b)
    sent += await ground.publish(KEYS * 5)
    await ground.evidence.all_of(sent)
    assert ground.evidence.verdict(sent).clean


async def test_nothing_piles_up_in_a_worker(limits: FleetGround) -> None:
    """Of a soak, what shows soon: tasks, and messages that nobody lets go of."""
    handled = 0

    async def count(message: GroupMessage) -> None:
        nonlocal handled
        handled += 1

    await limits.shared(await limits.join("a", count, concurrency=1))

    async def kept_after(rounds: int) -> tuple[int, int]:
        wanted = handled
        for _ in range(rounds):
            wanted += len(await limits.publish(KEYS * 25))
        await until(lambda: handled, lambda count: count == wanted)
        gc.collect()
        messages = sum(isinstance(one, Message | GroupMessage) for one in gc.get_objects())
        return len(asyncio.all_tasks()), messages

    tasks, messages = await kept_after(2)
    more_tasks, more_messages = await kept_after(10)
    assert more_tasks <= tasks + PARTITIONS, asyncio.all_tasks()  # a handler's task waits for the next message
    assert more_messages <= messages + 1_000

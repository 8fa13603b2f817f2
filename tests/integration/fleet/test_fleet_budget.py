"""`max_ack_pending` is the budget of a worker over its partitions: kept, shared, and nobody starves."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from datetime import UTC, datetime
from typing import Literal

import pytest
from nats.aio.msg import Msg

from keylane.fleet import MessageContext, WorkerHooks
from keylane.groups import GroupMessage
from keylane.jetstream import consumers
from tests.integration.fleet.rig import KEYS, PARTITIONS, FleetGround
from tests.integration.groups.rig import flawless
from tests.waiter import until

BUDGET = 40


async def pending(ground: FleetGround) -> list[int]:
    names = [f"f-p{one}" for one in range(PARTITIONS)]
    return [(await consumers.info(ground.connection, ground.stream, name)).num_ack_pending for name in names]


async def most_pending(ground: FleetGround) -> int:
    """The most that is not acked, in looks until it does not change any more."""
    seen: list[int] = []

    async def look() -> list[int]:
        seen.append(sum(await pending(ground)))
        return seen

    await until(look, lambda _: len(seen) > 3 and len(set(seen[-4:])) == 1)
    return max(seen)


@pytest.mark.parametrize("acks", ["message", "prefix"])
async def test_all_partitions_share_one_budget(limits: FleetGround, acks: Literal["message", "prefix"]) -> None:
    goes_on = asyncio.Event()
    evidence = limits.evidence.handler("a")
    at_work: Counter[int] = Counter()

    async def handle(message: GroupMessage) -> None:
        at_work[message.partition] += 1
        await goes_on.wait()
        await evidence(message)

    sent = await limits.publish(KEYS * 20)
    await limits.join("a", handle, acks=acks, max_ack_pending=BUDGET)
    await until(lambda: sum(at_work.values()) >= PARTITIONS and len(at_work) == PARTITIONS)
    assert await most_pending(limits) <= BUDGET
    goes_on.set()
    await limits.evidence.all_of(sent)
    assert flawless(limits.evidence.verdict(sent))


async def test_a_partition_that_hangs_does_not_stop_the_others(limits: FleetGround) -> None:
    hangs = limits.partitions.partitioning.partition(f"{limits.stream}.{KEYS[0]}")
    goes_on = asyncio.Event()
    evidence = limits.evidence.handler("a")

    async def handle(message: GroupMessage) -> None:
        if message.partition == hangs:
            await goes_on.wait()
        await evidence(message)

    sent = await limits.publish(KEYS * 30)
    await limits.join("a", handle, max_ack_pending=BUDGET)
    others = len(sent) - sum(
        limits.partitions.partitioning.partition(f"{limits.stream}.{key}") == hangs for key in KEYS * 30
    )
    await limits.evidence.until(lambda lines: len(lines) == others)
    goes_on.set()
    await limits.evidence.all_of(sent)
    assert flawless(limits.evidence.verdict(sent))


@pytest.mark.alone("pulls are as large as handlers are fast")
async def test_pulls_grow_with_the_work(limits: FleetGround) -> None:
    """A pull that the server has filled ends with a status as well: its partition is not idle because of that."""
    batches: list[int] = []

    async def note(message: Msg) -> None:
        batches.append(json.loads(message.data)["batch"])

    sent = await limits.publish(KEYS * 100)
    observer = await limits.client()
    await observer.nats.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{limits.stream}.>", cb=note)
    await observer.flush()
    await limits.join("a")
    await limits.evidence.all_of(sent)
    await observer.flush()
    assert batches[0] == 100 // PARTITIONS, "a partition begins with its part of the reserve"
    assert sum(batches) / len(batches) > 25, batches
    assert flawless(limits.evidence.verdict(sent))


async def test_a_consumer_fits_every_budget(limits: FleetGround) -> None:
    await limits.shared(await limits.join("a", max_ack_pending=3))
    info = await consumers.info(limits.connection, limits.stream, "f-p0")
    assert info.config.max_ack_pending == 1000, "a consumer never changes, and other workers may have larger budgets"


async def test_a_message_knows_its_context(limits: FleetGround) -> None:
    seen: list[MessageContext] = []
    evidence = limits.evidence.handler("a")

    async def handle(message: GroupMessage) -> None:
        seen.append(message.context)
        await evidence(message)

    begun = datetime.now(UTC)
    worker = await limits.join("a", handle)
    [sequence] = await limits.publish(["k1"])
    await limits.evidence.all_of([sequence])
    partition = limits.partitions.partitioning.partition(f"{limits.stream}.k1")
    expected = (limits.stream, "f", worker.id, f"{limits.stream}.k1", partition, "k1", sequence)
    assert seen[0][:-1] == expected
    assert begun <= seen[0].received <= datetime.now(UTC)


async def test_a_key_that_fills_the_share_of_its_partition_is_reported(limits: FleetGround) -> None:
    goes_on = asyncio.Event()
    evidence = limits.evidence.handler("a")
    crowded: list[tuple[str, int]] = []

    async def handle(message: GroupMessage) -> None:
        await goes_on.wait()
        await evidence(message)

    sent = await limits.publish(["hot"] * 200)
    hooks = WorkerHooks(on_crowded=lambda message, length: crowded.append((message.key, length)))
    await limits.join("a", handle, hooks=hooks)
    await until(lambda: bool(crowded))
    assert crowded[0][0] == "hot"
    goes_on.set()
    await limits.evidence.all_of(sent)

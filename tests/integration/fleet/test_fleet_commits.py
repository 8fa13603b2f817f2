"""`acks="prefix"`: one ack for the handled prefix, and still order per key, no loss, no repeat in planned moves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from keylane.errors import ApiError, FleetError, InvalidInput
from keylane.fleet import membership
from keylane.groups import GroupMessage
from keylane.jetstream import ConsumerInfo, RetentionPolicy, consumers
from tests.integration.fleet.rig import KEYS, PARTITIONS, FleetGround
from tests.integration.groups.conftest import MakeGround
from tests.integration.groups.rig import flawless
from tests.waiter import until


async def infos(ground: FleetGround) -> list[ConsumerInfo]:
    return [await consumers.info(ground.connection, ground.stream, f"f-p{one}") for one in range(PARTITIONS)]


async def test_the_prefix_is_committed_with_few_acks(limits: FleetGround) -> None:
    sent = await limits.publish(KEYS * 20)
    await limits.join("a", acks="prefix")
    await limits.evidence.all_of(sent)
    seen = await until(lambda: infos(limits), lambda all_: not any(one.num_ack_pending for one in all_))
    assert {one.config.ack_policy for one in seen} == {"all"}
    assert max(one.ack_floor for one in seen) == max(sent)
    assert flawless(limits.evidence.verdict(sent))


async def test_workers_come_and_go_under_load(limits: FleetGround) -> None:
    await limits.come_and_go(acks="prefix")


async def test_a_killed_worker_loses_nothing(limits: FleetGround) -> None:
    await limits.lose_a_worker(acks="prefix")


async def test_what_is_handled_and_not_committed_is_kept_alive(
    limits: FleetGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "ACK_WAIT_S", 1.0)
    at_work, go_on = asyncio.Event(), asyncio.Event()

    async def slow(message: GroupMessage) -> None:
        if message.data == b"slow":
            at_work.set()
            await go_on.wait()
        await limits.evidence.note("a", message)

    await limits.join("a", slow, acks="prefix")
    [stuck] = await limits.publish([KEYS[0]], b"slow")
    await at_work.wait()
    sent = await limits.publish(KEYS * 5)
    await limits.evidence.until(lambda lines: len(lines) == len(KEYS) * 5 - 5)
    await asyncio.sleep(2.5)  # more than twice the ack wait
    assert not any(one.num_redelivered for one in await infos(limits))
    go_on.set()
    await limits.evidence.all_of([stuck, *sent])
    await until(lambda: infos(limits), lambda all_: not any(one.num_ack_pending for one in all_))
    assert flawless(limits.evidence.verdict([stuck, *sent]))


async def test_a_handler_cannot_commit_what_is_before_its_message(limits: FleetGround) -> None:
    at_work, go_on = asyncio.Event(), asyncio.Event()
    refused: list[Exception] = []

    async def eager(message: GroupMessage) -> None:
        if message.data == b"slow":
            at_work.set()
            await go_on.wait()
        message.ack()
        for refusing in (message.ack_confirmed, message.nak):
            try:
                answer: Any = refusing()
                await answer
            except InvalidInput as error:
                refused.append(error)
        await limits.evidence.note("a", message)

    await limits.join("a", eager, acks="prefix")
    [stuck] = await limits.publish([KEYS[0]], b"slow")
    await at_work.wait()
    sent = await limits.publish(KEYS[1:])
    await limits.evidence.until(lambda lines: len(lines) == len(sent))
    floors = {one.name: one.ack_floor for one in await infos(limits)}
    go_on.set()
    await limits.evidence.all_of([stuck, *sent])
    [line] = [line for line in limits.evidence.lines if line.sequence == stuck]
    assert floors[f"f-p{line.partition}"] < stuck
    assert len(refused) == 2 * (len(sent) + 1)


async def test_a_work_queue_is_refused(make: MakeGround) -> None:
    ground = FleetGround(await make(partitions=PARTITIONS, retention=RetentionPolicy.WORK_QUEUE))
    with pytest.raises(FleetError, match="is a work queue, which takes no consumer that acks all"):
        await ground.join("a", acks="prefix")


async def test_a_server_that_refuses_it_gets_explicit_acks(
    limits: FleetGround, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    create = consumers.create

    async def strict(connection: Any, stream: str, config: Any, **options: Any) -> ConsumerInfo:
        if config.ack_policy == "all":
            raise ApiError(400, 10161, "pinned_client needs explicit acks")
        return await create(connection, stream, config, **options)

    monkeypatch.setattr(consumers, "create", strict)
    worker = await limits.join("a", acks="prefix")
    sent = await limits.publish(KEYS)
    await limits.evidence.all_of(sent)
    assert worker.acks == "message"
    assert "every message is acked instead" in caplog.text


async def test_a_consumer_that_is_deleted_while_messages_wait(limits: FleetGround) -> None:
    """What waited in its lanes had not begun: it must come again, also when what ran before it has ended."""
    at_work, go_on = asyncio.Event(), asyncio.Event()

    async def slow(message: GroupMessage) -> None:
        if message.data == b"slow":
            at_work.set()
            await go_on.wait()
        await limits.evidence.note("a", message)

    await limits.join("a", slow)
    [stuck] = await limits.publish([KEYS[0]], b"slow")
    await at_work.wait()
    sent = await limits.publish([KEYS[0]] * 5)
    partition = limits.partitions.partitioning.partition(f"{limits.stream}.{KEYS[0]}")
    name = f"f-p{partition}"
    await until(lambda: consumers.info(limits.connection, limits.stream, name), lambda info: info.num_ack_pending == 6)
    await consumers.delete(limits.connection, limits.stream, name)
    go_on.set()
    await limits.evidence.all_of([stuck, *sent])
    assert limits.evidence.verdict([stuck, *sent]).clean

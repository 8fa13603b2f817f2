"""Fleets on a stream without partition numbers, through a copy: trimmed, bounded, restarted, deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from nats.js.api import RetentionPolicy

import keylane
from keylane import fleet
from keylane.errors import FleetError, InvalidInput, RequestTimeout
from keylane.fleet import HashedPartitions, StreamCopy, hashed
from keylane.groups import GroupMessage
from keylane.jetstream import Connection, consumers, streams
from keylane.server import NatsCluster, NatsServer
from tests.integration.fleet.rig import KEYS, PARTITIONS, FleetGround, owns_all
from tests.integration.groups.conftest import MakeGround, own_server_ground
from tests.integration.groups.rig import Ground, flawless, make_ground
from tests.waiter import until

__all__ = ["own_server_ground"]


def copied(ground: FleetGround | Ground, **limits: int) -> HashedPartitions:
    return hashed(PARTITIONS, f"{ground.stream}.*", copy=StreamCopy(**limits))


@pytest.fixture
async def plain(make: MakeGround) -> FleetGround:
    """A stream without partition numbers."""
    return FleetGround(await make(allow_direct=True))


async def copy_state(ground: FleetGround) -> streams.StreamState:
    return await streams.state(ground.connection, f"{ground.stream}-f")


async def test_nothing_is_lost_or_repeated_while_the_copy_is_trimmed_and_workers_move(plain: FleetGround) -> None:
    async with plain.load() as sent:
        a = await plain.join("a", partitions=copied(plain))
        await plain.shared(a)
        b = await plain.join("b", partitions=copied(plain))
        await plain.shared(a, b)
        await until(lambda: copy_state(plain), lambda state: state.first_sequence > 1)
        await a.stop()
        await plain.shared(b)
        await plain.evidence.all_of(list(sent))
    await plain.evidence.all_of(sent)
    assert flawless(plain.evidence.verdict(sent))
    idle = await until(lambda: copy_state(plain), lambda state: state.messages == 1)
    assert isinstance(idle, streams.StreamState)
    assert idle.last_sequence == len(sent), "all is trimmed but the newest"
    found = await fleet.status(plain.connection, plain.stream, "f")
    assert found.lag == 0


async def test_a_message_of_a_copy_has_the_sequence_that_its_publisher_knows(plain: FleetGround) -> None:
    got: list[GroupMessage] = []
    await plain.publish(["not.copied"])
    [sent] = await plain.publish(["k1"])
    await plain.join("a", got.append, partitions=copied(plain))
    await until(lambda: len(got) == 1)
    assert (got[0].sequence, got[0].delivery_sequence, got[0].context.sequence) == (sent, 1, 2)
    assert not hasattr(got[0], "source_sequence")


@pytest.mark.long("the server tries a full copy again only after some seconds")
async def test_a_full_copy_waits_and_goes_on(plain: FleetGround) -> None:
    go_on = asyncio.Event()

    async def slow(message: GroupMessage) -> None:
        await go_on.wait()
        await plain.evidence.note("a", message)

    worker = await plain.join("a", slow, partitions=copied(plain, max_messages=50))
    await plain.shared(worker)
    sent = await plain.publish(KEYS * 5)
    await until(lambda: copy_state(plain), lambda state: state.messages == 50)
    go_on.set()
    await plain.evidence.all_of(sent)
    assert flawless(plain.evidence.verdict(sent))


async def test_a_server_that_starts_again_does_not_copy_everything_again(
    own_server_ground: tuple[Ground, NatsServer],
) -> None:
    ground, server = own_server_ground
    plain = FleetGround(ground)
    worker = await plain.join("a", partitions=copied(plain))
    await plain.shared(worker)
    sent = await plain.publish(KEYS * 3)
    await plain.evidence.all_of(sent)
    await until(lambda: copy_state(plain), lambda state: state.messages == 1)
    await asyncio.to_thread(server.restart)
    await until(lambda: plain.connection.is_connected)
    sent += await plain.publish(KEYS)
    await plain.evidence.all_of(sent)
    assert (await copy_state(plain)).last_sequence == len(sent)
    assert flawless(plain.evidence.verdict(sent))


async def test_a_copy_that_is_deleted_is_made_again_where_it_was(plain: FleetGround) -> None:
    worker = await plain.join("a", partitions=copied(plain))
    await plain.shared(worker)
    sent = await plain.publish(KEYS * 3)
    await plain.evidence.all_of(sent)
    await until(lambda: copy_state(plain), lambda state: state.messages == 1)
    await streams.delete(plain.connection, f"{plain.stream}-f")
    sent += await plain.publish(KEYS)
    await plain.evidence.all_of(sent)
    verdict = plain.evidence.verdict(sent)
    assert verdict.clean
    assert len(verdict.duplicated) <= 1, "the newest message, if the leader had not seen yet that it was handled"


async def test_a_copy_that_is_gone_with_all_workers(plain: FleetGround) -> None:
    worker = await plain.join("a", partitions=copied(plain))
    await plain.shared(worker)
    await worker.stop()
    await streams.delete(plain.connection, f"{plain.stream}-f")
    with pytest.raises(FleetError, match="the copy that fleet 'f' reads, is gone, and with it how far it was handled"):
        await plain.join("a", partitions=copied(plain))


async def test_what_is_refused(make: MakeGround, plain: FleetGround) -> None:
    await streams.create_json(plain.connection, {"name": f"{plain.stream}-taken", "storage": "memory"})
    with pytest.raises(FleetError, match="which is taken: choose another name"):
        await plain.join("a", fleet="taken", partitions=copied(plain))
    queue = FleetGround(await make(retention=RetentionPolicy.WORK_QUEUE))
    with pytest.raises(FleetError, match="nobody would delete what is copied from it: give it a subject transform"):
        await queue.join("a", partitions=copied(queue))
    wrong: Any = -1
    with pytest.raises(InvalidInput, match="max_messages of the copy is -1"):
        hashed(8, "a.*", copy=StreamCopy(max_messages=wrong))


async def test_another_number_of_partitions_under_load(plain: FleetGround) -> None:
    await there_and_back(plain)


@pytest.mark.long("a cluster of three servers, a copy with three replicas, and two changes under load")
@pytest.mark.timeout(240)
async def test_another_number_of_partitions_on_a_cluster(
    stack: AsyncExitStack, nats_cluster: NatsCluster, unique: Callable[..., str]
) -> None:
    connection = await stack.enter_async_context(await keylane.connect(nats_cluster.urls))
    options = {"storage": "file", "num_replicas": 3, "allow_direct": True}
    ground = await make_ground(stack, connection, unique("copied"), nats_cluster.urls, **options)
    await there_and_back(FleetGround(ground), pause_s=0.1)


async def there_and_back(plain: FleetGround, pause_s: float = 0.01) -> None:
    async with plain.load(pause_s) as sent:
        workers = [await plain.join(name, partitions=copied(plain)) for name in "ab"]
        await plain.shared(*workers)
        for count in (2 * PARTITIONS, PARTITIONS + 3):
            await fleet.repartition(plain.connection, plain.stream, "f", count, wait_s=90)
            await owns_all(count, *workers)
            await plain.evidence.all_of(list(sent))
    await plain.evidence.all_of(sent)
    assert flawless(plain.evidence.verdict(sent))
    assert {line.partition for line in plain.evidence.lines} == set(range(2 * PARTITIONS))
    idle = await until(lambda: copy_state(plain), lambda state: state.messages == 1)
    assert isinstance(idle, streams.StreamState)
    assert idle.last_sequence == len(sent), "nothing was copied twice, and it is trimmed as before"
    names = await consumers.names(plain.connection, f"{plain.stream}-f")
    assert sorted(names) == sorted(f"f-p{number}g2" for number in range(PARTITIONS + 3))


async def test_a_change_that_was_cut_off_while_the_copy_had_no_source_is_taken_up_again(
    plain: FleetGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[Any] = []
    update = streams.update_json

    async def cut_off(connection: Connection, config: dict[str, Any]) -> None:
        if config["name"] == f"{plain.stream}-f" and config["sources"] and not stopped:
            stopped.append((await streams.info_json(connection, config["name"]))["config"].get("sources"))
            raise RequestTimeout("cut off")
        await update(connection, config)

    monkeypatch.setattr(streams, "update_json", cut_off)
    await plain.shared(worker := await plain.join("a", partitions=copied(plain)))
    sent = await plain.publish(KEYS * 3)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fleet.repartition(plain.connection, plain.stream, "f", PARTITIONS + 2, wait_s=60))
        await until(lambda: bool(stopped))
        sent += await plain.publish(KEYS)
    await owns_all(PARTITIONS + 2, worker)
    sent += await plain.publish(KEYS)
    await plain.evidence.all_of(sent)
    assert flawless(plain.evidence.verdict(sent))
    assert stopped == [None]
    assert (await copy_state(plain)).last_sequence == len(sent)


async def test_a_copy_that_was_left_without_its_source_goes_on(plain: FleetGround) -> None:
    """As a leader leaves it that is replaced at the wrong moment."""
    await plain.shared(await plain.join("a", partitions=copied(plain)))
    sent = await plain.publish(KEYS * 3)
    await plain.evidence.all_of(sent)
    config = (await streams.info_json(plain.connection, f"{plain.stream}-f"))["config"]
    await streams.update_json(plain.connection, {**config, "sources": None})
    sent += await plain.publish(KEYS)
    await plain.evidence.all_of(sent)
    assert flawless(plain.evidence.verdict(sent))
    assert (await copy_state(plain)).last_sequence == len(sent)

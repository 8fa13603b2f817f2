"""Consumers on a real server: the log in a stream, the messages in a partitioned stream."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

import keylane
from keylane import Connection
from keylane.core.claim_choice import TopicPartition
from keylane.errors import InvalidInput, NoSuchTopic, UnsafeLog
from keylane.jetstream import consumers, streams
from keylane.marshal import Admin, Appetite, Consumer, ConsumerHooks, StreamSource, open_jetstream_log
from keylane.server import NatsServer
from tests.integration.marshal.rig import Seen, in_order_per_key, world_of
from tests.integration.marshal.stream_rig import INTERVAL_S, PARTITIONS, Ground, make, publish, reopened
from tests.waiter import until

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("mode", ["at_least_once", "at_most_once"])
async def test_three_consumers_share_a_stream(ground: Ground, connection: Connection, mode: str) -> None:
    await publish(connection, ground, 600)
    seen = [Seen() for _ in range(3)]
    async with AsyncExitStack() as stack:
        members = [
            await stack.enter_async_context(ground.consumer(f"c{number}", one, mode=mode, max_claims=2, batch_size=50))
            for number, one in enumerate(seen)
        ]
        await until(lambda: sum(len(one.messages) for one in seen) >= 600)
        assert [len(one.partitions) for one in members] == [2, 2, 2]
    every = sum((one.times for one in seen), start=Counter[tuple[int, int]]())
    assert len(every) == 600
    assert set(every.values()) == {1}
    assert all(in_order_per_key(one.messages) for one in seen)
    message = seen[0].messages[0]
    assert message.subject is not None
    assert message.key == message.subject.split(".")[1].encode()
    assert not await consumers.names(connection, ground.stream), "readers leave nothing behind"


async def test_thirty_racers_on_the_server(ground: Ground) -> None:
    wins: list[str] = []
    async with AsyncExitStack() as stack:
        members = []
        for number in range(30):

            def won(where: TopicPartition, _: int, number: int = number) -> None:
                wins.append(f"{where.partition} {number}")

            hooks = ConsumerHooks(on_claimed=won)
            pick = Appetite(greedy=True)
            members.append(ground.consumer(f"c{number}", Seen(), hooks=hooks, pick=pick, rebalance=False))
        started = await asyncio.gather(*(stack.enter_async_context(one) for one in members))
        await until(lambda: sum(len(one.partitions) for one in started) == PARTITIONS)
        await asyncio.sleep(INTERVAL_S)
        owned = Counter(where for one in started for where in one.partitions)
        assert set(owned.values()) == {1}
        assert sorted(wins) == sorted(set(wins))
        assert len(wins) == PARTITIONS


async def test_the_next_consumer_goes_on_and_offsets_are_committed(ground: Ground, connection: Connection) -> None:
    seen = Seen()
    await publish(connection, ground, 100)
    async with ground.consumer("anna", seen, commits=ground.log_name) as anna:
        await seen.until(lambda one: len(one.messages) == 100)
        await until(lambda: len(anna.partitions) == PARTITIONS)
        source = StreamSource(connection, commits=ground.log_name)

        async def committed() -> bool:
            found = [await source.committed("billing", ground.stream, number) for number in range(PARTITIONS)]
            return max(one or 0 for one in found) == 101

        await until(committed)
    await publish(connection, ground, 50, first=100)
    async with ground.consumer("bert", seen, commits=ground.log_name):
        await seen.until(lambda one: len(one.messages) == 150)
    assert set(seen.times.values()) == {1}
    async with reopened(connection, ground) as log:
        claims = list((await world_of(log)).claims())
    assert max(one.offset or 0 for one in claims) == 151


async def test_the_backlog_is_counted_in_messages_of_the_partition(ground: Ground, connection: Connection) -> None:
    await publish(connection, ground, 90)
    source = StreamSource(connection)
    assert await source.partitions(ground.stream) == PARTITIONS
    counts = [await source.backlog(ground.stream, number, 1) for number in range(PARTITIONS)]
    assert sum(counts) == 90
    assert await source.extent(ground.stream, 0) == (1, 91)
    assert await source.backlog(ground.stream, 0, 91) == 0
    assert await source.committed("billing", ground.stream, 0) is None


async def test_a_reader_goes_on_when_its_consumer_is_deleted(ground: Ground, connection: Connection) -> None:
    seen = Seen()
    await publish(connection, ground, 60)
    async with ground.consumer("anna", seen):
        await seen.until(lambda one: len(one.messages) == 60)
        for name in await consumers.names(connection, ground.stream):
            await consumers.delete(connection, ground.stream, name)
        await publish(connection, ground, 60, first=60)
        await seen.until(lambda one: len(one.messages) == 120)
    assert set(seen.times.values()) == {1}


async def test_streams_that_are_no_source(ground: Ground, connection: Connection, unique: Callable[..., str]) -> None:
    source = StreamSource(connection)
    with pytest.raises(NoSuchTopic, match="there is no stream 'nowhere'"):
        await source.partitions("nowhere")
    plain = unique("plain")
    await streams.create(connection, streams.StreamConfig(name=plain, subjects=[f"{plain}.*"]))
    try:
        with pytest.raises(InvalidInput, match="is not partitioned: it needs a subject transform"):
            await source.partitions(plain)
    finally:
        await streams.delete(connection, plain)


async def test_a_server_that_restarts(unique: Callable[..., str]) -> None:
    """Claims and positions outlive it; nothing is lost, and the owner goes on."""
    seen = Seen()
    with NatsServer.start() as server:
        async with await keylane.connect(server.url) as connection:
            ground = await make(connection, server, unique("orders"), unique("claims"))
            await publish(connection, ground, 100)
            async with ground.consumer("anna", seen) as anna:
                await seen.until(lambda one: len(one.messages) == 100)
                await until(lambda: len(anna.partitions) == PARTITIONS)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.restart)
                await publish(connection, ground, 100, first=100)
                await seen.until(lambda one: {int(message.data) for message in one.messages} == set(range(200)))
                assert anna.partitions == tuple(TopicPartition(ground.stream, number) for number in range(PARTITIONS))


async def test_a_backlog_is_counted_without_direct_access(ground: Ground, connection: Connection) -> None:
    await publish(connection, ground, 90)
    config = (await connection.api.request(f"STREAM.INFO.{ground.stream}"))["config"]
    await connection.api.request(f"STREAM.UPDATE.{ground.stream}", config | {"allow_direct": False})
    source = StreamSource(connection)
    counts = [await source.backlog(ground.stream, number, 1) for number in range(PARTITIONS)]
    assert sum(counts) == 90
    assert await source.backlog(ground.stream, 0, 91) == 0
    assert not await consumers.names(connection, ground.stream), "nothing is left behind"


# ---- one interval -----------------------------------------------------------------------------------


async def test_the_interval_is_the_logs(ground: Ground, connection: Connection) -> None:
    async def handler(_: object) -> None: ...

    source = StreamSource(connection)
    async with open_jetstream_log(connection, ground.log_name, interval_s=0.7) as log:
        assert log.interval_s == 0.7
        consumer = Consumer(log, source, "billing", "anna", [ground.stream], handler)
        assert consumer._options.heartbeat_interval_s == 0.7
        Consumer(log, source, "billing", "anna", [ground.stream], handler, heartbeat_interval_s=0.7)
        with pytest.raises(InvalidInput, match=r"heartbeat_interval_s is 7, and the .* with interval_s 0.7: .* leave"):
            Consumer(log, source, "billing", "anna", [ground.stream], handler, heartbeat_interval_s=7)
        with pytest.raises(InvalidInput, match="heartbeat_interval_s is 10"):
            Admin(log, heartbeat_interval_s=10)
    async with open_jetstream_log(connection, ground.log_name) as log:
        assert log.interval_s == 0.7, "the stream keeps it"
    with pytest.raises(UnsafeLog, match=r"interval_s is 10, and the heartbeat interval of .* is 0.7 s: everybody"):
        async with open_jetstream_log(connection, ground.log_name, interval_s=10):
            pass


async def test_a_log_that_was_made_without_its_interval(ground: Ground, connection: Connection) -> None:
    async with open_jetstream_log(connection, ground.log_name, interval_s=3):
        pass
    config = (await connection.api.request(f"STREAM.INFO.{ground.log_name}"))["config"]
    await connection.api.request(f"STREAM.UPDATE.{ground.log_name}", config | {"metadata": {}})
    async with open_jetstream_log(connection, ground.log_name) as log:
        assert log.interval_s == 10
    async with open_jetstream_log(connection, ground.log_name, interval_s=4) as log:
        assert log.interval_s == 4
    odd = {"metadata": {"keylane_marshal_interval_s": "soon"}}
    await connection.api.request(f"STREAM.UPDATE.{ground.log_name}", config | odd)
    with pytest.raises(UnsafeLog, match="keylane_marshal_interval_s is 'soon': correct it"):
        async with open_jetstream_log(connection, ground.log_name):
            pass

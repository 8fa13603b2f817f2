"""What opens something long-lived is awaited or entered; leaving the block closes it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest
from nats.js.api import StreamConfig

import keylane
from keylane import Connection, groups, priority
from keylane.core.run_state import RunState
from keylane.errors import NotFound, ServerUnreachable
from keylane.jetstream import Feed, consumers, open_feed, streams
from keylane.server import NatsCluster, NatsServer
from tests.waiter import until


async def test_a_connection_is_closed_when_its_block_is_left(nats_server: NatsServer) -> None:
    async with keylane.connect(nats_server.url) as connection:
        assert connection.is_connected
    assert connection.is_closed
    with pytest.raises(ValueError, match="mine"):
        async with keylane.connect(nats_server.url) as connection:
            raise ValueError("mine")
    assert connection.is_closed
    async with await keylane.connect(nats_server.url) as connection:
        assert connection.is_connected
    assert connection.is_closed


async def test_it_is_a_coroutine_too(nats_server: NatsServer) -> None:
    opening: Coroutine[Any, Any, Connection] = keylane.connect(nats_server.url)
    first, second, third = await asyncio.gather(
        opening, asyncio.create_task(keylane.connect(nats_server.url)), asyncio.wait_for(_connect(nats_server.url), 10)
    )
    async with AsyncExitStack() as stack:
        for one in (first, second, third):
            await stack.enter_async_context(one)
        entered = await stack.enter_async_context(keylane.connect(nats_server.url))
    assert all(one.is_closed for one in (first, second, third, entered))


def _connect(url: str) -> Coroutine[Any, Any, Connection]:
    return keylane.connect(url)


def test_one_that_is_never_awaited_is_told() -> None:
    with pytest.warns(RuntimeWarning, match="coroutine 'connect' was never awaited"):
        keylane.connect("nats://127.0.0.1:1")


def test_the_signature_stays() -> None:
    assert "stop_timeout_s" in inspect.signature(groups.join).parameters
    assert inspect.signature(keylane.connect).parameters["url"].default is None
    assert (keylane.connect.__doc__ or "").startswith("Connect to NATS")


async def test_a_failure_to_open_is_raised_by_the_block() -> None:
    with pytest.raises(ServerUnreachable):
        async with keylane.connect("nats://127.0.0.1:1", connect_timeout_s=0.5):
            pytest.fail("there is no such server")


@pytest.fixture
async def ground(connection: Connection, unique: Callable[..., str]) -> AsyncIterator[tuple[Connection, str]]:
    stream = unique("blocks")
    await streams.create(connection, StreamConfig(name=stream, subjects=[f"{stream}.>"]))
    await consumers.create(connection, stream, consumers.ConsumerConfig(durable_name="plain"))
    pinned = consumers.ConsumerConfig(
        durable_name="pinned", priority_groups=("g",), priority_policy="pinned_client", priority_timeout_s=30.0
    )
    await consumers.create(connection, stream, pinned)
    yield connection, stream
    await streams.delete(connection, stream)


@pytest.mark.parametrize(
    ("open_reader", "consumer"), [(open_feed, "plain"), (priority.consume, "pinned"), (priority.open_fetcher, "pinned")]
)
async def test_a_reader_lets_go_of_its_pulls_and_its_pin(
    ground: tuple[Connection, str], open_reader: Callable[..., Any], consumer: str
) -> None:
    """At once, not after the timeout of the pin, also when the block is left by a cancellation."""
    connection, stream = ground
    await connection.jetstream.publish(f"{stream}.a", b"1")

    async def read_for_ever() -> None:
        async with open_reader(connection, stream, consumer) as reader:
            await _read_one(reader)
            await asyncio.sleep(60)

    async with asyncio.timeout(15):
        reading = asyncio.create_task(read_for_ever())
        await until(lambda: consumers.info(connection, stream, consumer), lambda info: info.num_ack_pending)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        state = (await consumers.info(connection, stream, consumer)).priority_groups
        assert not any(group.pinned_client_id for group in state)
        assert not (await consumers.info(connection, stream, consumer)).num_waiting


async def _read_one(reader: Feed) -> None:
    if reader._options.on_demand:
        await reader.fetch(1, timeout_s=10)
    else:
        await reader.next(timeout_s=10)


async def test_a_missing_consumer(ground: tuple[Connection, str]) -> None:
    connection, stream = ground
    with pytest.raises(NotFound):
        async with open_feed(connection, stream, "nosuch"):
            pytest.fail("there is no such consumer")


async def test_servers_stop_without_blocking_the_loop() -> None:
    async with NatsServer.start() as server:
        assert server.state == "running"
    assert str(server.state) == "ended"


@pytest.mark.timeout(60)
async def test_a_cluster_too() -> None:
    async with NatsCluster.start(3) as cluster:
        assert all(node.state is RunState.RUNNING for node in cluster.nodes)
    assert not any(node.state is RunState.RUNNING for node in cluster.nodes)

"""A feed on a cluster of three: leaders that move, and the node that the feed is connected to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

import keylane
from keylane import Connection
from keylane.core.pulls import Meaning
from keylane.errors import ApiError, RequestTimeout
from keylane.jetstream import FeedOptions, consumers, open_feed, streams
from keylane.server import NatsCluster
from tests.integration.jetstream.rig import Notices, all_acked, fill, make_consumer, make_stream
from tests.integration.jetstream.test_feed_recovery import Reading
from tests.waiter import until

Unique = Callable[..., str]
COUNT = 2000


@pytest.fixture
async def replicated(nats_cluster: NatsCluster, unique: Unique) -> AsyncIterator[tuple[Connection, str]]:
    """A stream of three replicas, with messages and a consumer."""
    async with await keylane.connect(nats_cluster.urls, request_timeout_s=15) as connection:
        stream = await make_stream(connection, unique("cluster"), num_replicas=3)
        try:
            await fill(connection, stream, COUNT)
            await make_consumer(connection, stream, ack_wait_s=2)
            connection.request_timeout_s = connection.api.timeout_s = 2  # while a leader is elected nobody answers
            yield connection, stream
        finally:
            connection.request_timeout_s = connection.api.timeout_s = 15
            await streams.delete(connection, stream)


async def moved(step_down: Callable[[], Awaitable[None]]) -> None:
    """Move a leader. While the last one is being elected nobody answers, so ask again."""
    async with asyncio.timeout(20):
        while True:
            try:
                await step_down()
            except (ApiError, RequestTimeout):
                continue
            return


@pytest.mark.parametrize("leader", ["stream", "consumer"])
async def test_a_leader_that_steps_down(replicated: tuple[Connection, str], leader: str) -> None:
    connection, stream = replicated
    notices = Notices()
    options = FeedOptions(max_messages=100, expires_s=10, heartbeat_s=1, on_notice=notices)
    reading = Reading(await open_feed(connection, stream, "reader", options))
    for count in (300, 1200):
        await reading.until(count)
        if leader == "stream":
            await moved(lambda: streams.step_down(connection, stream))
        else:
            await moved(lambda: consumers.step_down(connection, stream, "reader"))
    await reading.until(COUNT)
    await all_acked(connection, stream, "reader")
    reading.check(COUNT)
    assert {notice.meaning for notice in notices.all} <= {Meaning.INTERRUPTED, Meaning.UNAVAILABLE}
    await reading.stop()


async def test_an_idle_feed_follows_the_consumers_leader(replicated: tuple[Connection, str]) -> None:
    connection, stream = replicated
    await make_consumer(connection, stream, "late", deliver_policy="new")
    notices = Notices()
    async with await open_feed(connection, stream, "late", FeedOptions(on_notice=notices)) as feed:
        await until(lambda: consumers.info(connection, stream, "late"), lambda info: info.num_waiting == 1)
        await consumers.step_down(connection, stream, "late")
        notice = await notices.until(Meaning.INTERRUPTED)
        assert notice.text == "409 Leadership Change"
        await fill(connection, stream, 1)
        message = await feed.next(8)  # less than the two heartbeats after which silence would be noticed
        assert message is not None
        assert message.sequence == COUNT + 1


@pytest.mark.long("kills a node of a cluster, which elects a leader")
async def test_the_connected_node_is_killed(nats_cluster: NatsCluster, replicated: tuple[Connection, str]) -> None:
    """It leads the consumer too, so there is an election as well as a new link."""
    steady, stream = replicated
    leader = (await consumers.info(steady, stream, "reader")).leader
    assert leader is not None
    node = nats_cluster.node(leader)
    options = FeedOptions(max_messages=100, expires_s=5, heartbeat_s=0.5)
    try:
        async with await keylane.connect(node.url) as connection:
            reading = Reading(await open_feed(connection, stream, "reader", options))
            await reading.until(500)
            node.kill()
            await reading.until(COUNT)
            assert connection.server != node.url
            await all_acked(connection, stream, "reader")
            reading.check(COUNT)
            await reading.stop()
    finally:
        await asyncio.to_thread(node.restart)
        await asyncio.to_thread(nats_cluster.wait_ready)

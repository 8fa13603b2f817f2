"""Leaders move, nodes die and servers restart in the middle of the work: it goes on, and nothing is lost.

All three policies run at once, each on a stream of its own with two readers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import keylane
from keylane import Connection
from keylane.errors import ApiError, KeylaneError, PublishFailed
from keylane.jetstream import (
    ConsumerInfo,
    Outgoing,
    PriorityPolicy,
    PublishAck,
    StreamState,
    consumers,
    publish_many,
    streams,
)
from keylane.priority import unpin
from keylane.server import NatsCluster, NatsServer
from tests.integration.priority.conftest import (
    Ground,
    MakeGround,
    OpenClient,
    Reader,
    StartReader,
    make_ground,
)
from tests.integration.priority.evidence import judge
from tests.waiter import until

COMMON = {"ack_wait_s": 3, "max_ack_pending": 50}
POLICIES: dict[PriorityPolicy, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # terms of the consumer, of the first reader, of the second
    "overflow": ({}, {}, {"min_pending": 5}),
    "pinned_client": ({"priority_timeout_s": 4}, {}, {}),
    "prioritized": ({}, {"priority": 0}, {"priority": 1}),
}
DEADLINE_S = 30.0


@dataclass(slots=True)
class Work:
    """One stream at work: its only publisher, which never gives up, and two readers."""

    place: Ground
    policy: PriorityPolicy
    readers: list[Reader]
    published: list[int] = field(default_factory=list)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def publish(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            # The same id again: what was stored although its answer got lost is not stored twice. Unless it was handled
            # and so removed before a restart: a server finds the ids again in the messages that it still has.
            message = Outgoing(f"{self.place.stream}.x", b"", {"Nats-Msg-Id": str(number)})
            while True:
                (result,) = await publish_many(self.place.connection, [message], timeout_s=1)
                if isinstance(result, PublishAck):
                    break
                assert isinstance(result, PublishFailed)
                await asyncio.sleep(0.02)  # no leader, or no link
            last = self.published[-1] if self.published else 0
            self.published += range(last + 1, result.sequence + 1)
            await asyncio.sleep(0.002)

    def stop(self) -> None:
        self._stop.set()

    async def handled(self, more: int) -> None:
        """Wait until this many more messages were handled than now."""
        first, *others = self.readers
        count = sum(len(reader.log) for reader in self.readers) + more
        await first.together(*others, count=count, timeout_s=DEADLINE_S)

    async def finish(self) -> None:
        """Wait until every message was handled and its ack is in.

        The consumer's leader may hear of a message a little after the publisher: until then it says that none is left.
        """
        last = self.published[-1]
        async with asyncio.timeout(DEADLINE_S):
            while True:
                with suppress(KeylaneError):  # still without a leader
                    info = await consumers.info(self.place.connection, self.place.stream, self.place.consumer)
                    if (info.num_pending, info.num_ack_pending) == (0, 0) and info.delivered_sequence >= last:
                        return
                await asyncio.sleep(0.05)


@asynccontextmanager
async def at_work(
    connections: list[Connection],
    name: Callable[..., str],
    read: StartReader,
    *,
    replicas: int,
) -> AsyncIterator[list[Work]]:
    """All three policies at work; leaves when all that was published in the block is done, and judges it."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        works: list[Work] = []
        publishers: list[asyncio.Task[None]] = []
        for policy, (terms, *reader_terms) in POLICIES.items():
            options = {**COMMON, **terms}
            place = await make_ground(stack, connections[0], name("disrupted"), policy, replicas=replicas, **options)
            readers = [
                await read(connection, place, f"{policy}-{number}", **own)
                for number, (connection, own) in enumerate(zip(connections[1:], reader_terms, strict=True))
            ]
            work = Work(place, policy, readers)
            works.append(work)
            publishers.append(group.create_task(work.publish()))
        for work in works:
            await work.handled(50)
        yield works
        for work in works:
            await work.handled(50)
            if work.policy == "pinned_client":
                # While messages come: without one, nobody is pinned again after a stall of the machine.
                await until(lambda: any(reader.feed.is_pinned for reader in work.readers), deadline_s=DEADLINE_S)  # noqa: B023
            work.stop()
        await asyncio.wait(publishers, timeout=DEADLINE_S)
        for work in works:
            await work.finish()
            findings = judge(work.published, *(reader.log for reader in work.readers))
            assert not findings.lost, work.readers
            assert not findings.invented
            if work.policy == "pinned_client":
                assert findings.in_order_and_complete
        for work in works:
            for reader in work.readers:
                await reader.stop()


async def until_done(call: Callable[..., Awaitable[None]], connection: Connection, *names: str) -> None:
    """Ask again while the cluster is between leaders."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                await call(connection, *names)
            except (ApiError, TimeoutError):
                await asyncio.sleep(0.1)
            else:
                return


async def move_leader(
    look: Callable[..., Awaitable[ConsumerInfo | StreamState]],
    step_down: Callable[..., Awaitable[None]],
    connection: Connection,
    *names: str,
) -> None:
    """Returns when another node leads. One that was asked twice may lead again: then it is asked once more."""
    before = ""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with suppress(KeylaneError):  # between leaders nobody answers
                leader = (await look(connection, *names)).leader
                before = before or leader or ""
                if leader and leader != before:
                    return
                if leader:
                    await step_down(connection, *names)
            await asyncio.sleep(0.1)


async def test_leaders_step_down(
    open_cluster_client: OpenClient, read: StartReader, unique: Callable[..., str]
) -> None:
    connections = [await open_cluster_client() for _ in range(3)]
    async with at_work(connections, unique, read, replicas=3) as works:
        for work in works:
            place = work.place
            await move_leader(consumers.info, consumers.step_down, place.connection, place.stream, place.consumer)
            await work.handled(50)
        for work in works:
            place = work.place
            await move_leader(streams.state, streams.step_down, place.connection, place.stream)
            await work.handled(50)


async def test_takeovers_under_load_with_a_new_leader_each_time(
    cluster_ground: MakeGround, open_cluster_client: OpenClient, read: StartReader
) -> None:
    """A reset that races with deliveries makes the servers forget messages in flight; a new leader deletes them."""
    place = await cluster_ground("pinned_client", priority_timeout_s=2, max_ack_pending=200, ack_wait_s=5)
    pinned = asyncio.Event()
    readers = [
        await read(await open_cluster_client(), place, name, handle_s=0.0005, on_pinned=lambda _: pinned.set())
        for name in ("one", "two")
    ]
    work = Work(place, "pinned_client", readers)
    for _ in range(5):
        work.published += await place.publish(500)
        await asyncio.wait_for(pinned.wait(), DEADLINE_S)
        pinned.clear()
        await until_done(unpin, place.connection, place.stream, place.consumer)
        work.published += await place.publish(100)  # so that there is something to take over with
        await asyncio.wait_for(pinned.wait(), DEADLINE_S)
        pinned.clear()
        await until_done(consumers.step_down, place.connection, place.stream, place.consumer)
    await work.finish()
    assert judge(work.published, *(reader.log for reader in readers)).in_order_and_complete
    # replicas drop a message a while after its ack
    await until(lambda: streams.state(place.connection, place.stream), lambda seen: not seen.messages, deadline_s=20)
    for reader in readers:
        await reader.stop()


async def test_a_node_dies(stack: AsyncExitStack, read: StartReader, unique: Callable[..., str]) -> None:
    """It leads the pinned consumer, and the pinned reader hangs on it."""
    cluster = await asyncio.to_thread(NatsCluster.start, 3)
    stack.push_async_callback(asyncio.to_thread, cluster.stop)
    connections = [await stack.enter_async_context(await keylane.connect([node.url])) for node in cluster.nodes]
    async with at_work(connections, unique, read, replicas=3) as works:
        (pinned,) = [work for work in works if work.policy == "pinned_client"]
        # Who has lost the pin may hear of it after the next one has it.
        await until(lambda: sum(reader.feed.is_pinned for reader in pinned.readers) == 1)
        (number,) = [index for index, reader in enumerate(pinned.readers) if reader.feed.is_pinned]
        doomed = cluster.nodes[1 + number]
        await lead_by(pinned.place, doomed.name)
        await pinned.handled(20)
        doomed.kill()
        for work in works:
            await work.handled(50)


async def lead_by(place: Ground, node: str) -> None:
    """Move the consumer's leader to a node."""
    subject = f"CONSUMER.LEADER.STEPDOWN.{place.stream}.{place.consumer}"
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with suppress(KeylaneError):  # between leaders nobody answers
                if (await consumers.info(place.connection, place.stream, place.consumer)).leader == node:
                    return
                await place.connection.api.request(subject, {"placement": {"preferred": node}})
            await asyncio.sleep(0.1)


async def test_a_single_server_restarts(stack: AsyncExitStack, read: StartReader, unique: Callable[..., str]) -> None:
    """Once cleanly, once after a kill."""
    server = await asyncio.to_thread(NatsServer.start)
    stack.push_async_callback(asyncio.to_thread, server.stop)
    connections = [await stack.enter_async_context(await keylane.connect(server.url)) for _ in range(3)]
    async with at_work(connections, unique, read, replicas=1) as works:
        for hard in (False, True):
            if hard:
                server.kill()
            await asyncio.to_thread(server.restart)
            for work in works:
                await work.handled(50)

"""`overview` on real groups and fleets, of which the tests know how they stand."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from keylane import Connection
from keylane.groups import GroupMessage
from keylane.groups.consumer_spec import ELASTIC_BUCKET
from keylane.jetstream import Bucket, ConsumerConfig, streams
from keylane.overview import GroupOverview, overview
from tests.integration.fleet.rig import KEYS, FleetGround
from tests.integration.groups.rig import Ground
from tests.waiter import until


async def seen(connection: Connection, stream: str, name: str, **options: Any) -> GroupOverview:
    found = (await overview(connection, **options)).group(stream, name)
    assert found is not None
    return found


async def seen_as(
    connection: Connection, stream: str, name: str, good: Callable[[GroupOverview], bool], **options: Any
) -> GroupOverview:
    return await until(lambda: seen(connection, stream, name, **options), good, deadline_s=30)


def never() -> Callable[[GroupMessage], Any]:
    """A handler that does not come to an end by itself."""

    async def handle(message: GroupMessage) -> None:
        await asyncio.Event().wait()

    return handle


async def test_an_elastic_group_that_keeps_up(ground: Ground) -> None:
    await ground.elastic(members=["a", "b"])
    await ground.join("a")
    await ground.join("b")
    await ground.evidence.all_of(await ground.publish([f"k{one}" for one in range(40)]))
    found = await seen_as(
        ground.connection, ground.stream, "g", lambda one: one.lag == 0 and len(one.active) == 2 and not one.unowned
    )
    assert found.kind == "elastic"
    assert found.summary == "g keeps up: 2 members, lag 0"
    assert [one.partitions for one in found.members] == [("0", "1"), ("2", "3")]
    assert [one.owner for one in found.partitions] == ["a", "a", "b", "b"]
    assert {(one.lag, one.lag_s) for one in found.partitions} == {(0, 0.0)}
    assert (found.lag_s, found.in_flight, found.dead_letters, found.parked_keys) == (0.0, 0, 0, 0)
    assert found.queue is not None
    assert (found.queue.messages, found.queue.source_lag, found.queue.fill) == (0, 0, None)


async def test_what_waits_in_an_elastic_group(ground: Ground) -> None:
    await ground.elastic(members=["a", "b"], max_buffered_messages=1000)
    await ground.join("a", never(), settings=ConsumerConfig(ack_wait_s=30, max_ack_pending=5))
    await ground.publish([f"k{one}" for one in range(40)])
    await asyncio.sleep(1)
    found = await seen_as(
        ground.connection,
        ground.stream,
        "g",
        lambda one: one.lag == 40 and bool(one.in_flight) and one.lag_s is not None and one.lag_s >= 1,
    )
    assert found.queue is not None
    assert (found.queue.messages, found.queue.fill) == (40, 0.04)
    assert sum(one.lag or 0 for one in found.partitions) == 40
    assert all(one.lag_s is not None and one.lag_s >= 1 for one in found.partitions if one.lag)
    a, b = found.members
    assert (a.state, a.in_flight, a.max_in_flight) == ("active", 5, 5)
    assert (b.state, b.is_active, b.pin, b.in_flight) == ("absent", False, None, None)
    assert (a.lag or 0) + (b.lag or 0) == 40
    assert found.unowned == ("2", "3")
    assert found.summary.startswith("g keeps up: 1 of 2 members, 2 of 4 partitions without owner, lag 40, ")


async def test_who_runs_where_is_asked_only_on_request(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    await ground.join("a")
    await ground.asked("a")
    await ground.join("a")
    await ground.evidence.all_of(await ground.publish(["k1"]))  # the server pins an instance with the first message
    found = await seen_as(
        ground.connection,
        ground.stream,
        "g",
        lambda one: one.members[0].standbys == 1,
        ask_members=True,
    )
    [a] = found.members
    assert (a.host, a.pid) == (socket.gethostname(), os.getpid())
    assert a.pin is not None
    assert a.pinned_since is not None
    unasked = (await seen(ground.connection, ground.stream, "g")).members[0]
    assert (unasked.pin, unasked.host, unasked.pid, unasked.standbys) == (a.pin, None, None, None)


async def test_a_static_group(partitioned: Ground) -> None:
    await partitioned.static(members=["a", "b"])
    found = await seen(partitioned.connection, partitioned.stream, "g")
    assert (found.lag, found.lag_s) == (None, None)  # nobody has made a consumer yet
    assert found.summary == "g stands still, no member is at work: lag unknown"
    await partitioned.join("a", never())
    await partitioned.join("b")
    await partitioned.publish([f"k{one}" for one in range(40)])
    await asyncio.sleep(1)
    found = await seen_as(
        partitioned.connection,
        partitioned.stream,
        "g",
        lambda one: one.members[1].lag == 0 and bool(one.lag) and bool(one.in_flight),
    )
    a, b = found.members
    assert found.lag == a.lag
    assert a.lag_s is not None
    assert a.lag_s >= 1
    assert found.lag_s is not None
    assert found.lag_s >= a.lag_s
    assert b.lag_s == 0.0
    assert [one.owner for one in found.partitions] == ["a", "a", "b", "b"]
    # The acks of a member are counted for all its partitions together.
    assert [one.lag for one in found.partitions] == [None, None, 0, 0]


async def test_dead_letters_and_parked_keys(ground: Ground) -> None:
    async def fail(message: GroupMessage) -> None:
        raise ValueError("no")

    await ground.elastic("dead", members=["a"])
    await ground.elastic("parks", members=["a"])
    await ground.join("a", fail, group="dead", max_tries=1)
    await ground.join("a", fail, group="parks", max_tries=1, after_tries="park")
    await ground.publish(["k1", "k1", "k2"])
    ground.stack.push_async_callback(streams.delete, ground.connection, f"{ground.stream}@dlq")
    dead = await seen_as(ground.connection, ground.stream, "dead", lambda one: one.dead_letters == 3)
    assert (dead.parked_keys, dead.parked_messages) == (0, 0)
    parks = await seen_as(ground.connection, ground.stream, "parks", lambda one: one.parked_messages == 3)
    assert (parks.dead_letters, parks.parked_keys) == (0, 2)
    assert parks.summary.endswith(", 2 parked keys")


async def test_a_record_that_cannot_be_read_does_not_hide_the_others(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    bucket = Bucket(ground.connection, ELASTIC_BUCKET)
    for name, value in (("broken", b"{"), ("gone", b'{"max_members": 2}')):
        key = f"{ground.stream}.{name}"
        revision = await bucket.put(key, value, revision=0)
        ground.stack.push_async_callback(bucket.delete, key, revision=revision)
    account = await overview(ground.connection)
    found = {one.name: one for one in account.groups if one.stream == ground.stream}
    assert "is not JSON" in found["broken"].summary
    assert found["gone"].problem == f"there is no queue '{ground.stream}-gone'"
    assert found["gone"].lag is None
    assert found["g"].problem is None
    assert ground.stream in {one.name for one in account.streams}


@pytest.mark.parametrize("layout", ["partition", "worker"])
async def test_a_fleet(limits: FleetGround, layout: str) -> None:
    a = await limits.join("a", never(), layout=layout)
    await until(lambda: len(a.partitions) == 8, deadline_s=30)
    await limits.publish(KEYS)
    await asyncio.sleep(1)
    found = await seen_as(
        limits.connection, limits.stream, "f", lambda one: one.lag == 40 and one.in_flight != 0, ask_members=True
    )
    assert found.in_flight == (40 if layout == "partition" else None)  # without acks the server does not know it
    assert found.kind == "fleet"
    assert {one.owner for one in found.partitions} == {a.id}
    assert {one.assigned for one in found.partitions} == {a.id}
    assert all(one.token for one in found.partitions)
    assert sum(one.lag or 0 for one in found.partitions) == 40
    assert found.lag_s is not None
    assert 1 <= found.lag_s < 30
    [worker] = found.members
    assert (worker.name, worker.host, worker.is_leader) == (a.id, socket.gethostname(), True)
    assert set(worker.partitions) == set(a.partitions)
    assert worker.lag == 40
    assert found.summary.startswith("f keeps up: 1 worker, lag 40, ")

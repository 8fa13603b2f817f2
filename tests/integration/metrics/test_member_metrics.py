"""The metrics of members of groups and of Marshal consumers on a real server, against what their handlers did."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from keylane import groups, marshal
from keylane.groups import GroupMessage
from keylane.jetstream import streams
from keylane.metrics import METRICS, MarshalMetrics, MemberMetrics, Reading
from tests.integration.groups.conftest import ground, make, partitioned, stack
from tests.integration.groups.rig import Ground
from tests.waiter import until

__all__ = ["ground", "make", "partitioned", "stack"]

Told = Callable[..., Any]


def value(readings: list[Reading], name: str, **labels: str) -> Any:
    """The one reading of this name and these labels; None: there is none."""
    found = [one.value for one in readings if one.name == name and labels.items() <= one.labels.items()]
    assert len(found) <= 1
    return found[0] if found else None


def set_by(readings: list[Reading]) -> set[str]:
    return {one.name for one in readings}


def in_catalogue(start: str) -> set[str]:
    return {one.name for one in METRICS if one.name.startswith(start)}


async def measured(ground: Ground, member: str, handler: Any = None, **options: Any) -> tuple[groups.Member, Told]:
    metrics = MemberMetrics()
    joined = await ground.join(member, handler, hooks=metrics.hooks(), **options)
    metrics.watch(joined)

    def told(name: str | None = None, **labels: str) -> Any:
        """One reading, or all of them."""
        return metrics.readings() if name is None else value(metrics.readings(), name, **labels)

    return joined, told


async def test_messages_and_rebalances_of_members(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    a, told = await measured(ground, "a")
    await until(lambda: a.partitions == (0, 1, 2, 3))
    sent = await ground.publish([f"k{one % 40}" for one in range(400)])
    await ground.evidence.all_of(sent)
    await until(lambda: told("member_handler_tries_total", outcome="done"), lambda done: done == 400)
    assert told("member_messages_total") >= 400  # more where a reset had some of them delivered again
    assert told("member_redeliveries_total") == 0
    counts, seconds = told("member_handler_latency_seconds")
    assert sum(counts) == 400
    assert seconds > 0
    assert (told("member_in_flight"), told("member_max_in_flight")) == (0, 1000)
    assert (told("member_active"), told("member_state", state="active")) == (1, 1)
    assert told("member_rebalances_total", cause="start") == 1
    assert told("member_pin_changes_total") == 1
    await groups.add_members(ground.connection, ground.stream, "g", ["b"])
    b, told_b = await measured(ground, "b")
    await until(lambda: (a.partitions, b.partitions) == ((0, 1), (2, 3)))
    assert told("member_rebalances_total", cause="join") == 1
    assert (told("member_partitions_gained_total"), told("member_partitions_lost_total")) == (4, 2)
    assert sum(told("member_rebalance_duration_seconds")[0]) == 2
    assert told("member_resets_total") >= 1
    assert told("member_partitions") == told_b("member_partitions") == 2
    assert set_by(told()) == in_catalogue("member_")
    await groups.drop_members(ground.connection, ground.stream, "g", ["b"])
    await until(lambda: told("member_rebalances_total", cause="leave"), lambda count: count == 1)


async def test_failures_parked_keys_and_crowded_lanes(ground: Ground) -> None:
    go_on = asyncio.Event()

    async def fails_for_k1(message: GroupMessage) -> None:
        await go_on.wait()
        if message.key == "k1":
            raise ValueError("no")

    await ground.elastic(members=["a"])
    ground.stack.push_async_callback(streams.delete, ground.connection, f"{ground.stream}@dlq")
    _, told = await measured(ground, "a", fails_for_k1, max_tries=2, max_ack_pending=20)
    await ground.publish(["k2"] * 12)
    await until(lambda: told("member_crowded_lanes_total"), lambda count: count == 1)
    assert told("member_in_flight") == 12
    go_on.set()
    await ground.publish(["k1"])
    await until(lambda: told("member_dead_letters_total"), lambda count: count == 1)
    assert told("member_retries_total") == told("member_handler_tries_total", outcome="failed") == 1
    await ground.elastic("parks", members=["a"])
    _, told = await measured(ground, "a", fails_for_k1, group="parks", max_tries=1, after_tries="park")
    await until(lambda: told("member_parked_messages_total"), lambda count: count == 1)


async def test_a_standby_says_so(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    _, told = await measured(ground, "a")
    await ground.asked("a")
    other, told_other = await measured(ground, "a")
    await ground.evidence.all_of(await ground.publish(["k1"]))
    assert (told("member_active"), told_other("member_active")) == (1, 0)
    await until(lambda: told_other("member_state", state="standby"), lambda one: one == 1)
    del other


async def test_a_marshal_consumer(partitioned: Ground, stack: AsyncExitStack, unique: Callable[..., str]) -> None:
    handled, metrics, name = [], MarshalMetrics(), unique("marshal")

    async def handle(message: marshal.MarshalMessage) -> None:
        handled.append(message)
        if message.data == b"bad":
            raise ValueError("no")

    log = await stack.enter_async_context(
        marshal.open_jetstream_log(partitioned.connection, name, interval_s=1, replicas=1)
    )
    source = marshal.StreamSource(partitioned.connection)
    consumer = marshal.Consumer(
        log, source, "billing", "anna", [partitioned.stream], handle, hooks=metrics.hooks(), max_tries=1
    )
    metrics.watch(consumer)
    await consumer.start()
    stack.push_async_callback(streams.delete, partitioned.connection, name)
    stack.push_async_callback(consumer.stop)
    await until(lambda: len(consumer.partitions) == 4, deadline_s=30)
    await partitioned.publish([f"k{one}" for one in range(20)])
    await partitioned.publish(["k1"], b"bad")

    def told(name: str, **labels: str) -> Any:
        return value(metrics.readings(), name, **labels)

    await until(lambda: told("marshal_handler_tries_total", outcome="dead"), lambda dead: dead == 1, deadline_s=30)
    await until(lambda: told("marshal_handler_tries_total", outcome="done"), lambda done: done == 20, deadline_s=30)
    assert told("marshal_messages_total") == len(handled) == 21
    assert sum(told("marshal_handler_latency_seconds")[0]) == 20
    assert (told("marshal_partitions"), told("marshal_claims_total"), told("marshal_releases_total")) == (4, 4, 0)
    assert told("marshal_max_in_flight") == 4000
    assert told("marshal_in_flight") == 0
    assert told("marshal_troubles_total") == 0
    assert set_by(metrics.readings()) == in_catalogue("marshal_")


@pytest.mark.parametrize("kind", [MemberMetrics, MarshalMetrics])
def test_without_what_to_watch_nothing_is_known(kind: type[MemberMetrics]) -> None:
    assert kind().readings() == []

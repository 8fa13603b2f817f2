"""The caller's own consumer settings: what passes through, what is refused, and every ack mode of static groups."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from keylane import groups
from keylane.errors import InvalidInput
from keylane.groups import GroupMessage
from keylane.jetstream import ConsumerConfig, ConsumerInfo, consumers
from tests.integration.groups.rig import Ground, active, flawless
from tests.waiter import until


async def consumer(ground: Ground) -> ConsumerInfo:
    async def look() -> ConsumerInfo | None:
        return await groups.member_info(ground.connection, ground.stream, "g", "a")

    info: ConsumerInfo | None = await until(look, lambda found: found is not None)
    assert info is not None
    return info


async def test_settings_pass_through(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    settings = ConsumerConfig(
        ack_wait_s=4.0,
        max_ack_pending=77,
        inactive_threshold_s=33.0,
        max_waiting=9,
        description="mine",
        metadata={"team": "billing"},
        mem_storage=True,
    )
    await ground.join("a", settings=settings)
    config = (await consumer(ground)).config
    for name in ("ack_wait_s", "max_ack_pending", "inactive_threshold_s", "max_waiting", "description", "mem_storage"):
        assert getattr(config, name) == getattr(settings, name)
    assert (config.metadata or {})["team"] == "billing"
    assert config.priority_timeout_s == 4.0
    assert config.priority_groups == ("PCG",)
    assert config.priority_policy == "pinned_client"
    assert (config.name, config.durable_name) == ("a", None)
    await ground.evidence.all_of(await ground.publish(["k"]))


async def test_the_defaults(ground: Ground, partitioned: Ground) -> None:
    await ground.elastic(members=["a"])
    await ground.join("a", settings=None)
    elastic = (await consumer(ground)).config
    assert (elastic.ack_wait_s, elastic.priority_timeout_s, elastic.inactive_threshold_s) == (5.0, 5.0, 5.0)
    assert elastic.max_ack_pending == 1000
    await partitioned.static(members=["a"])
    await partitioned.join("a", settings=None)
    static = (await consumer(partitioned)).config
    assert (static.ack_wait_s, static.priority_timeout_s, static.inactive_threshold_s) == (5.0, 5.0, None)
    assert static.durable_name == "g-a"


async def test_backoff_passes_through_and_a_second_instance_agrees(ground: Ground) -> None:
    """The server takes the first step for the ack wait: that is no difference between instances."""
    await ground.elastic(members=["a"])
    settings = ConsumerConfig(ack_wait_s=30, backoff_s=(2.0, 3.0))
    await ground.join("a", settings=settings)
    await ground.join("a", settings=settings)
    config = (await consumer(ground)).config
    assert config.backoff_s == (2.0, 3.0)
    assert config.ack_wait_s == 2.0
    await until(lambda: consumer(ground), lambda info: info.num_waiting >= 2)

    async def slow(message: GroupMessage) -> None:
        await asyncio.sleep(2.6)
        await ground.evidence.note("slow", message)

    await ground.elastic("slow", members=["a"])
    await ground.join("a", slow, group="slow", settings=settings)
    sent = await ground.publish(["k", "k"])
    await ground.evidence.until(lambda lines: len([line for line in lines if line.by == "slow"]) == 2)
    info = await groups.member_info(ground.connection, ground.stream, "slow", "a")
    assert info is not None
    assert info.num_redelivered == 0, "kept alive by the first step, not by the ack wait that was given"
    assert len(sent) == 2


async def test_max_ack_pending_bounds_what_is_in_flight(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    go_on = asyncio.Event()
    started: list[int] = []

    async def handler(message: GroupMessage) -> None:
        started.append(message.delivery_sequence)
        await go_on.wait()

    await ground.join("a", handler, max_ack_pending=5)
    await ground.publish(f"k{number}" for number in range(20))
    await until(lambda: len(started) == 5)
    info = await until(lambda: consumer(ground), lambda info: info.num_ack_pending == 5)
    assert info.config.max_ack_pending == 5
    assert len(started) == 5
    go_on.set()
    await ground.drained(20)
    assert sorted(started) == list(range(1, 21))


async def test_max_ack_pending_is_given_once(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    with pytest.raises(InvalidInput, match="max_ack_pending is 5, and 6 in the settings: give it once"):
        await ground.join("a", max_ack_pending=5, settings=ConsumerConfig(max_ack_pending=6))
    for wrong in (0, -1):
        with pytest.raises(InvalidInput, match=f"max_ack_pending is {wrong}"):
            await ground.join("a", max_ack_pending=wrong)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"durable_name": "x"}, "durable_name belongs to the group and cannot be set by a member"),
        ({"filter_subjects": (">",)}, "filter_subjects belongs to the group"),
        ({"priority_timeout_s": 1.0}, "priority_timeout_s belongs to the group"),
        ({"deliver_subject": "x"}, "deliver_subject makes a push consumer"),
        ({"max_deliver": 2}, "max_deliver is 2"),
        ({"ack_policy": "all"}, "ack_policy is 'all': an elastic group needs explicit acks"),
        ({"deliver_policy": "new"}, "deliver_policy is 'new': a start position belongs to static groups"),
        ({"ack_wait_s": -2.0}, "ack_wait_s is -2.0: give seconds, 0 or more"),
    ],
)
async def test_settings_that_would_break_the_group_are_refused_by_name(
    ground: Ground, settings: dict[str, Any], words: str
) -> None:
    await ground.elastic(members=["a"])
    with pytest.raises(InvalidInput) as caught:
        await ground.join("a", settings=ConsumerConfig(**settings))
    assert words in str(caught.value)
    assert await consumers.names(ground.connection, f"{ground.stream}-g") == []


# ---- static groups: where to start, and how to ack ----------------------------------------------------------


async def test_a_static_group_may_start_at_a_sequence(partitioned: Ground) -> None:
    await partitioned.static(members=["a"])
    sent = await partitioned.publish(f"k{number % 3}" for number in range(20))
    settings = ConsumerConfig(ack_wait_s=1, deliver_policy="by_start_sequence", opt_start_seq=11)
    await partitioned.join("a", settings=settings)
    await partitioned.evidence.all_of(sent[10:])
    assert flawless(partitioned.evidence.verdict(sent[10:]))


async def test_a_static_group_may_start_at_a_time(partitioned: Ground) -> None:
    await partitioned.static(members=["a"])
    await partitioned.publish(["k"] * 5)
    await asyncio.sleep(0.05)
    now = datetime.now(UTC)
    await asyncio.sleep(0.05)
    later = await partitioned.publish(["k"] * 5)
    settings = ConsumerConfig(ack_wait_s=1, deliver_policy="by_start_time", opt_start_time=now)
    await partitioned.join("a", settings=settings)
    await partitioned.evidence.all_of(later)
    assert flawless(partitioned.evidence.verdict(later))


async def test_a_static_group_may_start_with_what_is_new(partitioned: Ground) -> None:
    await partitioned.static(members=["a"])
    await partitioned.publish(["k"] * 5)
    member = await partitioned.join("a", settings=ConsumerConfig(ack_wait_s=1, deliver_policy="new"))
    await until(lambda: member.partitions)
    new = await partitioned.publish(["k"] * 5)
    await partitioned.evidence.all_of(new)
    assert flawless(partitioned.evidence.verdict(new))


async def test_ack_all_runs_one_by_one_so_that_no_ack_covers_what_is_not_done(partitioned: Ground) -> None:
    await partitioned.static(members=["a"])
    running = most = 0

    async def handler(message: GroupMessage) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        await partitioned.evidence.note("a", message)

    settings = ConsumerConfig(ack_wait_s=1, ack_policy="all")
    first = await partitioned.join("a", handler, settings=settings)
    sent = await partitioned.publish(f"k{number % 5}" for number in range(50))
    await partitioned.evidence.until(lambda lines: len(lines) >= 20)
    await first.stop()
    handled = len(partitioned.evidence.lines)
    await partitioned.join("a", partitioned.evidence.handler("second"), settings=settings)
    await partitioned.evidence.all_of(sent)
    assert most == 1
    assert 20 <= handled < 50
    assert flawless(partitioned.evidence.verdict(sent))


async def test_without_acks_nothing_comes_again_and_a_stop_handles_all_that_came(partitioned: Ground) -> None:
    await partitioned.static(members=["a"])
    settings = ConsumerConfig(ack_wait_s=1, ack_policy="none")
    failed: list[int] = []

    async def handler(message: GroupMessage) -> None:
        if message.delivery_sequence == 3 and not failed:
            failed.append(message.delivery_sequence)
            raise ValueError("retried here: the server will not send it again")
        await asyncio.sleep(0.001)
        await partitioned.evidence.note("first", message)

    first = await partitioned.join("a", handler, settings=settings, max_ack_pending=20)
    second = await partitioned.join("a", partitioned.evidence.handler("second"), settings=settings, max_ack_pending=20)
    sent = await partitioned.publish(f"k{number % 5}" for number in range(200))
    await partitioned.evidence.until(lambda lines: len(lines) >= 40)
    info = await consumer(partitioned)
    assert info.config.ack_policy == "none"
    here, there = (first, second) if active(first) else (second, first)
    await here.stop()
    sent += await partitioned.publish(["k1"])
    await partitioned.evidence.all_of(sent)
    assert active(there)
    assert flawless(partitioned.evidence.verdict(sent))


async def test_without_acks_the_bound_is_ours(partitioned: Ground) -> None:
    """The server would send everything: no more than twice the bound is taken from it."""
    await partitioned.static(members=["a"])
    go_on = asyncio.Event()
    settings = ConsumerConfig(ack_wait_s=1, ack_policy="none")

    async def handler(message: GroupMessage) -> None:
        await go_on.wait()
        await partitioned.evidence.note("a", message)

    await partitioned.join("a", handler, settings=settings, max_ack_pending=10)
    sent = await partitioned.publish(f"k{number}" for number in range(100))
    info = await until(lambda: consumer(partitioned), lambda found: found.num_pending <= 90)
    await asyncio.sleep(0.3)
    info = await consumer(partitioned)
    assert info.num_pending >= 75, "most of it still waits on the server"
    go_on.set()
    await partitioned.evidence.all_of(sent)
    assert flawless(partitioned.evidence.verdict(sent))

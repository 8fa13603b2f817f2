"""What a handler sees, and what becomes of a message when it returns, raises, or settles by itself."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from nats.js.api import SubjectTransform

from keylane import PartitionBy, groups
from keylane.errors import InvalidInput
from keylane.groups import GroupMessage, MemberHooks, MessageContext
from keylane.jetstream import ConsumerConfig, Outgoing, consumers, publish_many, streams
from tests.integration.groups.conftest import MakeGround
from tests.integration.groups.rig import QUICK, Ground, flawless
from tests.waiter import until


async def test_what_a_message_says(ground: Ground) -> None:
    await ground.elastic(partitions=7, partition_by=PartitionBy(f"{ground.stream}.*.*", key=[2]), members=["a"])
    got: list[GroupMessage] = []

    async def handler(message: GroupMessage) -> None:
        got.append(message)

    await ground.publish(["skipped"])
    await publish_many(ground.connection, [Outgoing(f"{ground.stream}.eu.customer-42", b"data", {"Colour": "green"})])
    await ground.join("a", handler)
    await until(lambda: got)
    [message] = got
    assert message.subject == f"{ground.stream}.eu.customer-42"
    assert message.key == "customer-42"
    assert message.partition == groups_partition("customer-42", 7)
    assert message.data == b"data"
    assert message.headers["Colour"] == "green"
    assert message.sequence == 2
    assert message.delivery_sequence == 1
    assert message.delivered_count == 1
    assert message.timestamp.tzinfo is not None
    assert f"partition={message.partition} sequence=2" in repr(message)


def groups_partition(key: str, partitions: int) -> int:
    value = 2166136261
    for byte in key.encode():
        value = ((value ^ byte) * 16777619) % 2**32
    return value % partitions


async def test_a_static_message_has_one_sequence(partitioned: Ground) -> None:
    await partitioned.static(members=["a"])
    await partitioned.join("a")
    [sequence] = await partitioned.publish(["k1"])
    await partitioned.evidence.all_of([sequence])
    [line] = partitioned.evidence.lines
    assert (line.key, line.subject) == ("k1", f"{partitioned.stream}.k1")
    assert line.partition == groups_partition("k1", 4)


async def test_a_return_acks(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    await ground.join("a")
    await ground.evidence.all_of(await ground.publish(f"k{number % 7}" for number in range(100)))
    await ground.drained(100)
    info = await groups.member_info(ground.connection, ground.stream, "g", "a")
    assert info is not None
    assert info.num_ack_pending == 0


async def test_a_failed_message_is_retried_in_place_while_its_key_waits(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    failures: list[tuple[str, str, int]] = []
    left = {"bad": 3}
    tried_at: list[float] = []

    async def handler(message: GroupMessage) -> None:
        if left.get(message.key, 0):
            left[message.key] -= 1
            tried_at.append(time.monotonic())
            raise ValueError(f"no luck with {message.key}")
        await ground.evidence.note("a", message)

    hooks = MemberHooks(on_failure=lambda message, error, tries: failures.append((message.key, str(error), tries)))
    await ground.join("a", handler, hooks=hooks)
    sent = await ground.publish(["bad", "good", "bad", "good", "bad", "good"])
    await ground.evidence.all_of(sent)
    assert failures == [("bad", "no luck with bad", tries) for tries in (1, 2, 3)]
    assert flawless(ground.evidence.verdict(sent))
    first_bad = next(index for index, line in enumerate(ground.evidence.lines) if line.key == "bad")
    assert first_bad == 3, "the other key did not wait"
    # Not one of them came again from the server: the tries were here.
    assert ground.evidence.lines[first_bad].at - tried_at[0] >= 0.6


async def test_a_failure_is_logged_with_its_traceback_and_where_it_was(
    ground: Ground, caplog: pytest.LogCaptureFixture
) -> None:
    await ground.elastic(members=["a"])
    first = [True]

    async def handler(message: GroupMessage) -> None:
        if first:
            first.clear()
            raise ValueError("no luck")
        await ground.evidence.note("a", message)

    await ground.publish(["skipped.by.filter"])
    [sequence] = await ground.publish(["k1"])
    with caplog.at_level(logging.WARNING, "keylane.groups"):
        await ground.join("a", handler)
        await ground.evidence.all_of([sequence])
    [record] = [one for one in caplog.records if one.name == "keylane.groups"]
    [line] = ground.evidence.lines
    assert record.getMessage() == (
        f"handler failed: stream {ground.stream}, group g, member a, subject {ground.stream}.k1, partition "
        f"{line.partition}, key 'k1', sequence 2 (try 1): ValueError: no luck"
    )
    assert 'raise ValueError("no luck")' in caplog.text
    context: MessageContext = record.__dict__["context"]
    assert context[:-1] == (ground.stream, "g", "a", f"{ground.stream}.k1", line.partition, "k1", 2)
    assert abs(context.received.timestamp() - record.created) < 5


async def test_with_a_hook_a_failure_is_logged_for_debugging_only(
    ground: Ground, caplog: pytest.LogCaptureFixture
) -> None:
    await ground.elastic(members=["a"])
    failures: list[str] = []

    async def handler(message: GroupMessage) -> None:
        if not failures:
            raise ValueError("no luck")
        await ground.evidence.note("a", message)

    hooks = MemberHooks(on_failure=lambda message, error, tries: failures.append(message.key))
    with caplog.at_level(logging.DEBUG, "keylane.groups"):
        await ground.join("a", handler, hooks=hooks)
        await ground.evidence.all_of(await ground.publish(["k1"]))
    [record] = [one for one in caplog.records if "handler failed" in one.getMessage()]
    assert record.levelno == logging.DEBUG
    assert record.exc_info is not None


async def test_a_slow_message_is_not_delivered_again(ground: Ground) -> None:
    """Handled for longer than ack_wait, and others wait behind it: the server is told that they are in progress."""
    await ground.elastic(members=["a"])
    counts: list[int] = []

    async def handler(message: GroupMessage) -> None:
        counts.append(message.delivered_count)
        await asyncio.sleep(5 if message.key == "slow" and len(counts) == 1 else 0)
        await ground.evidence.note("a", message)

    await ground.join("a", handler, settings=ConsumerConfig(ack_wait_s=2))
    sent = await ground.publish(["slow", "slow", "quick", "slow"])
    await ground.evidence.all_of(sent)
    assert counts == [1, 1, 1, 1]
    assert flawless(ground.evidence.verdict(sent))
    info = await groups.member_info(ground.connection, ground.stream, "g", "a")
    assert info is not None
    assert info.num_redelivered == 0


async def test_a_failing_hook_stops_nothing(ground: Ground, caplog: pytest.LogCaptureFixture) -> None:
    await ground.elastic(members=["a"])
    once = [True]

    def hook(*_: object) -> None:
        raise RuntimeError("the hook")

    async def handler(message: GroupMessage) -> None:
        if once:
            once.clear()
            raise ValueError("the handler")
        await ground.evidence.note("a", message)

    hooks = MemberHooks(on_joined=hook, on_activated=hook, on_partitions=hook, on_failure=hook, on_ended=hook)
    member = await ground.join("a", handler, hooks=hooks)
    sent = await ground.publish(["k", "k"])
    await ground.evidence.all_of(sent)
    await member.stop()
    assert await member.wait() == "stopped"
    assert "the hook on_failure failed" in caplog.text
    assert flawless(ground.evidence.verdict(sent))


async def test_a_handler_whose_own_task_was_cancelled_is_tried_again(ground: Ground) -> None:
    """CancelledError that comes out of a handler is its failure, unless the member ends."""
    await ground.elastic(members=["a"])
    once = [True]

    async def handler(message: GroupMessage) -> None:
        if once:
            once.clear()
            inner = asyncio.create_task(asyncio.sleep(60))
            inner.cancel()
            await inner
        await ground.evidence.note("a", message)

    await ground.join("a", handler)
    sent = await ground.publish(["k", "k", "k"])
    await ground.evidence.all_of(sent)
    assert flawless(ground.evidence.verdict(sent))


# ---- plain functions -----------------------------------------------------------------------------------------


async def test_a_plain_function_runs_in_a_thread(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    threads: set[int] = set()
    most = running = 0
    lock = threading.Lock()

    def handler(message: GroupMessage) -> None:
        nonlocal most, running
        with lock:
            running += 1
            most = max(most, running)
        threads.add(threading.get_ident())
        time.sleep(0.02)
        ground.evidence.add("a", message)
        with lock:
            running -= 1

    await ground.join("a", handler)
    sent = await ground.publish(f"k{number % 6}" for number in range(60))
    await until(lambda: len(ground.evidence.lines) == 60)
    assert threading.get_ident() not in threads
    assert 1 < most <= 6, "keys side by side, one message per key"
    assert flawless(ground.evidence.verdict(sent))
    await ground.drained(60)


async def test_a_plain_function_around_a_coroutine_is_awaited(ground: Ground) -> None:
    await ground.elastic(members=["a"])

    async def work(message: GroupMessage, by: str) -> None:
        await ground.evidence.note(by, message)

    await ground.join("a", lambda message: work(message, "lambda"))
    sent = await ground.publish(["k"])
    await ground.evidence.all_of(sent)
    await ground.drained(1)


async def test_callable_objects_and_partials(ground: Ground) -> None:
    await ground.elastic(partitions=2, members=["a", "b"])

    class Work:
        async def __call__(self, message: GroupMessage) -> None:
            await ground.evidence.note("object", message)

    async def work(by: str, message: GroupMessage) -> None:
        await ground.evidence.note(by, message)

    await ground.join("a", Work())
    await ground.join("b", partial(work, "partial"))
    await ground.evidence.all_of(await ground.publish(f"k{number}" for number in range(20)))
    assert {line.by for line in ground.evidence.lines} == {"object", "partial"}


async def test_what_is_no_handler_is_refused(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    nothing: Any = 7
    with pytest.raises(InvalidInput, match="handler is 7: give a function of one message"):
        await ground.join("a", nothing)


# ---- manual acks ---------------------------------------------------------------------------------------------


async def test_manual_acks(ground: Ground) -> None:
    await ground.elastic(members=["a"])

    async def handler(message: GroupMessage) -> None:
        await ground.evidence.note("a", message)
        match message.key:
            case "acked":
                message.ack()
            case "confirmed":
                await message.ack_confirmed()
            case "terminated":
                message.term("not wanted")

    await ground.join("a", handler, manual_ack=True)
    sent = await ground.publish(["acked", "confirmed", "terminated"] * 5)
    await ground.evidence.all_of(sent)
    await ground.drained(15)
    assert flawless(ground.evidence.verdict(sent))


async def test_a_manual_nak_brings_the_message_again(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    counts: list[int] = []

    async def handler(message: GroupMessage) -> None:
        counts.append(message.delivered_count)
        if len(counts) < 3:
            message.nak(0.05)
        else:
            message.ack()

    await ground.join("a", handler, manual_ack=True)
    await ground.publish(["k"])
    await until(lambda: len(counts) == 3)
    assert counts == [1, 2, 3]
    await ground.drained(1)


async def test_a_message_left_unsettled_comes_again(ground: Ground) -> None:
    """It is not acked behind the handler's back when it does."""
    await ground.elastic(members=["a"])
    counts: list[int] = []

    async def handler(message: GroupMessage) -> None:
        counts.append(message.delivered_count)
        if len(counts) > 1:
            message.ack()

    await ground.join("a", handler, manual_ack=True, settings=ConsumerConfig(ack_wait_s=1.5))
    await ground.publish(["k"])
    await until(lambda: len(counts) == 2)
    assert counts == [1, 2]
    await ground.drained(1)


async def test_a_manual_handler_that_raises_is_tried_again(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    tries: list[int] = []

    async def handler(message: GroupMessage) -> None:
        tries.append(message.delivery_sequence)
        if len(tries) == 1:
            raise ValueError("not yet")
        message.ack()
        if message.key == "late":
            raise ValueError("after the ack")

    await ground.join("a", handler, manual_ack=True)
    await ground.publish(["k", "late", "k"])
    await ground.drained(3)
    assert sorted(tries) == [1, 1, 2, 3]


async def test_manual_acks_from_a_thread(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    seen: list[int] = []

    def handler(message: GroupMessage) -> None:
        seen.append(message.delivery_sequence)
        message.in_progress()
        message.ack()

    await ground.join("a", handler, manual_ack=True)
    await ground.publish(f"k{number % 5}" for number in range(50))
    await ground.drained(50)
    assert sorted(seen) == list(range(1, 51))


async def test_a_manual_ack_survives_a_reset(ground: Ground) -> None:
    """A reset voids the delivery that the handler holds; its newest delivery is settled as it says."""
    await ground.elastic(members=["a"])
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def handler(message: GroupMessage) -> None:
        begun.set()
        await go_on.wait()
        await ground.evidence.note("a", message)
        message.ack()

    await ground.join("a", handler, manual_ack=True)
    sent = await ground.publish(["k"])
    await begun.wait()
    await consumers.reset(ground.connection, f"{ground.stream}-g", "a")
    await ground.publish(["other"])
    go_on.set()
    await ground.drained(2)
    assert flawless(ground.evidence.verdict([*sent, 2]))


# ---- order -----------------------------------------------------------------------------------------------


async def overlaps(
    ground: Ground, lane: Callable[[GroupMessage], object], at_once: int, **options: Any
) -> dict[str, int]:
    """How many handlers ran at once: of all, and of one lane at most. The first ones wait for each other."""
    await ground.elastic(partitions=2, members=["a"])
    running: dict[object, int] = defaultdict(int)
    most: dict[str, int] = defaultdict(int)
    go_on = asyncio.Event()

    async def handler(message: GroupMessage) -> None:
        key = lane(message)
        running[key] += 1
        running["all"] += 1
        most["all"] = max(most["all"], running["all"])
        most["lane"] = max(most["lane"], running[key])
        await go_on.wait()
        await asyncio.sleep(0.005)
        running[key] -= 1
        running["all"] -= 1
        await ground.evidence.note("a", message)

    await ground.join("a", handler, **options)
    sent = await ground.publish(f"k{number % 8}" for number in range(80))
    await until(lambda: running["all"] >= at_once)
    go_on.set()
    await ground.evidence.all_of(sent)
    assert not ground.evidence.verdict(sent).duplicated
    return most


async def test_order_by_key(ground: Ground) -> None:
    most = await overlaps(ground, lambda message: ("lane", message.key), 8)
    assert most["lane"] == 1
    assert most["all"] == 8
    assert flawless(ground.evidence.verdict(range(1, 81)))


async def test_order_by_partition(ground: Ground) -> None:
    most = await overlaps(ground, lambda message: ("lane", message.partition), 2, order="partition")
    assert most == {"lane": 1, "all": 2}
    for number in (0, 1):
        sequences = [line.sequence for line in ground.evidence.lines if line.partition == number]
        assert sequences == sorted(sequences)


async def test_strict_order(ground: Ground) -> None:
    most = await overlaps(ground, lambda _: "lane", 1, order="strict")
    assert most["lane"] == most["all"] == 1
    assert [line.sequence for line in ground.evidence.lines] == list(range(1, 81))
    info = await groups.member_info(ground.connection, ground.stream, "g", "a")
    assert info is not None
    assert info.config.max_ack_pending == 1


async def test_no_order(ground: Ground) -> None:
    most = await overlaps(ground, lambda message: ("lane", message.key), 16, order="none", concurrency=16)
    assert most["lane"] > 1
    assert most["all"] == 16


async def test_without_order_a_failed_message_goes_back_to_the_server(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    counts: list[tuple[int, int]] = []

    async def handler(message: GroupMessage) -> None:
        counts.append((message.delivery_sequence, message.delivered_count))
        if message.delivery_sequence == 1 and message.delivered_count < 3:
            raise ValueError("again")

    await ground.join("a", handler, order="none")
    await ground.publish(["k", "k"])
    await ground.drained(2)
    assert [count for sequence, count in counts if sequence == 1] == [1, 2, 3]
    assert [count for sequence, count in counts if sequence == 2] == [1]


async def test_wrong_order_and_concurrency_are_refused(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    with pytest.raises(InvalidInput, match="order is 'subject': use one of key, partition, strict, none"):
        await ground.join("a", order="subject")
    with pytest.raises(InvalidInput, match="concurrency is 0"):
        await ground.join("a", concurrency=0)


async def test_concurrency_bounds_what_runs_at_once(ground: Ground) -> None:
    most = await overlaps(ground, lambda message: ("lane", message.key), 3, concurrency=3)
    assert most == {"lane": 1, "all": 3}


# ---- keys of static groups --------------------------------------------------------------------------------


async def test_the_key_comes_from_the_stream_s_transform(make: MakeGround) -> None:
    place = await make(
        transform=SubjectTransform(
            src="*.*.*", dest="{{Partition(3,3)}}.{{Wildcard(1)}}.{{Wildcard(2)}}.{{Wildcard(3)}}"
        )
    )
    await place.static(partitions=3, members=["a"])
    await place.join("a")
    await place.evidence.all_of(await place.publish(["x.k1", "y.k1", "x.k2"]))
    assert {line.subject.removeprefix(place.stream): line.key for line in place.evidence.lines} == {
        ".x.k1": "k1",
        ".y.k1": "k1",
        ".x.k2": "k2",
    }


async def test_without_a_transform_the_partition_is_the_key_or_the_caller_says(make: MakeGround) -> None:
    place = await make(subjects=["0.>", "1.>"])
    await place.static(partitions=2, members=["a"])
    await place.static("told", partitions=2, members=["a"])
    await place.join("a")
    await place.join("a", place.evidence.handler("told"), group="told", key=lambda subject: subject.split(".")[-1])
    acks = await publish_many(place.connection, [Outgoing("0.x.k1"), Outgoing("1.x.k1"), Outgoing("1.y.k2")])
    assert len(acks) == 3
    await place.evidence.until(lambda lines: len(lines) == 6)
    assert {line.key for line in place.evidence.by("a")} == {"0", "1"}
    assert sorted(line.key for line in place.evidence.by("told")) == ["k1", "k1", "k2"]


async def test_the_key_of_an_elastic_group_is_not_told(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    with pytest.raises(InvalidInput, match="key is for static groups"):
        await ground.join("a", key=lambda subject: subject)


# ---- a stream that counts anew ----------------------------------------------------------------------------


async def test_a_stream_made_anew_is_not_taken_for_the_old_one(partitioned: Ground) -> None:
    """Its sequences begin at 1 again; the member remembers finished ones of the old stream."""
    await partitioned.static(members=["a"])
    member = await partitioned.join("a", settings=QUICK)
    old = await partitioned.publish(f"k{number % 3}" for number in range(20))
    await partitioned.evidence.all_of(old)
    config = (await partitioned.connection.api.request(f"STREAM.INFO.{partitioned.stream}"))["config"]
    await streams.delete(partitioned.connection, partitioned.stream)
    await partitioned.connection.api.request(f"STREAM.CREATE.{partitioned.stream}", config)
    partitioned.evidence.lines.clear()
    new = await partitioned.publish(f"k{number % 3}" for number in range(20))
    assert new == old
    await partitioned.evidence.all_of(new)
    assert flawless(partitioned.evidence.verdict(new))
    assert member.is_active
    await until(
        lambda: consumers.info(partitioned.connection, partitioned.stream, "g-a"),
        lambda info: info.num_ack_pending == 0,
    )

"""An instance that stood still: what it learns late, and what it must leave alone until it has asked for its pin.

A process that was stopped has a pin of long ago, partitions of long ago, and questions to the server under way. Here it
is staged in one process: the reader asks for nothing any more, its clock has jumped, and the test decides when the
server's answer about the pin arrives.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import pytest

from keylane import Connection, groups
from keylane.core.partitions import partition_number
from keylane.errors import RequestTimeout
from keylane.groups import GroupMessage, Member
from keylane.groups.member_consumer import MemberConsumer
from keylane.jetstream import ConsumerConfig, ConsumerInfo, Feed, consumers
from keylane.jetstream.feed_pin import FeedPin
from tests.integration.groups.rig import Ground, active, flawless, owned
from tests.waiter import until

LONG_AGO_S = 3600.0
END_S = 30.0
CHANGES = tuple(f"CONSUMER.{kind}." for kind in ("CREATE", "DELETE", "RESET", "UNPIN"))
KEYS = [f"k{number}" for number in range(20)]


def consumer_of(member: Member) -> MemberConsumer:
    consumer = member._consumer
    assert consumer is not None
    return consumer


def feed_of(member: Member) -> Feed:
    feed = consumer_of(member)._feed
    assert feed is not None
    return feed


def pin_of(feed: Feed) -> FeedPin:
    pin = feed._pin
    assert pin is not None
    return pin


class Standstill:
    """A reader that stood still and has just gone on: it wants to know whether it is still the pinned one."""

    def __init__(self, feed: Feed) -> None:
        pin = pin_of(feed)
        self._answered = asyncio.Event()
        self._ask = pin.is_ours
        self.over = asyncio.Event()
        pin.is_ours = self._is_ours  # type: ignore[method-assign]
        feed._pulls.asked_at = pin._doubted_at = time.monotonic() - LONG_AGO_S
        assert not feed.may_hand_out()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._answered.set()

    async def _is_ours(self) -> bool:
        await self._answered.wait()
        try:
            return await self._ask()
        finally:
            asyncio.get_running_loop().call_soon(self.over.set)

    async def answer(self) -> None:
        """Let the server answer, and the reader do what follows from it."""
        self._answered.set()
        async with asyncio.timeout(END_S):
            await self.over.wait()
        await asyncio.sleep(0)


class Unaware:
    """A reader that lost its pin and has no reason to doubt it: it lost its link and will ask again in a moment."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        feed._pulls.asked_at = time.monotonic() + LONG_AGO_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._feed._pulls._pulling = True

    async def answer(self) -> None:
        """Let it ask, and so be refused."""
        self._feed._pulls._pulling = True
        self._feed._pulls.refill()


async def fallen_silent(member: Member) -> Feed:
    """Its feed, which asks for nothing any more: the server would tell it that another is pinned."""
    feed = feed_of(member)
    await feed._pulls._close_pulls()
    feed._pulls._pulling = False
    return feed


class Requests:
    """What a connection asks of the JetStream API."""

    def __init__(self, connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
        self.subjects: list[str] = []
        self.changes: list[str] = []
        """Those that change a consumer. To join one that is there is no change."""
        self._ask = connection.api.request
        monkeypatch.setattr(connection.api, "request", self._request)

    async def _request(
        self, subject: str, payload: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        self.subjects.append(subject)
        joins = payload is not None and payload.get("action") == "create"
        if subject.startswith(CHANGES) and not joins:
            self.changes.append(subject)
        return await self._ask(subject, payload, timeout_s)


@pytest.mark.parametrize("unread", [False, True])
async def test_a_late_answer_about_an_old_pin_does_not_touch_new_work(ground: Ground, unread: bool) -> None:
    """The consumer went away while the pin was in doubt. The answer is about a consumer that is not there any more."""
    fails = asyncio.Event()
    failed = asyncio.Event()

    async def handler(message: GroupMessage) -> None:
        if fails.is_set():
            failed.set()
            raise RuntimeError("on purpose")
        await ground.evidence.note("a", message)

    await ground.elastic(members=["a"])
    member = await ground.join("a", handler, hooks=groups.MemberHooks(on_failure=lambda *_: None))
    sent = await ground.publish(["k1"])
    await ground.evidence.all_of(sent)
    old = feed_of(member)
    with Standstill(old) as standstill:
        await consumers.delete(ground.connection, f"{ground.stream}-g", "a")
        await until(lambda: member._consumer and member._consumer._feed, lambda feed: feed not in (None, old))

        if unread:
            assert old._buffer.last is not None
            old._messages.append(old._buffer.last)  # as what comes after the end: then the old feed has not quite ended
        sent += await ground.publish(["k1"])
        await ground.evidence.all_of(sent)
        fails.set()
        sent += await ground.publish(["k1"])
        async with asyncio.timeout(END_S):
            await failed.wait()
        await standstill.answer()
        fails.clear()
        assert member.is_active
        sent += await ground.publish(["k1"])
        await ground.evidence.all_of(sent)
        assert flawless(ground.evidence.verdict(sent)), [line.sequence for line in ground.evidence.lines]


@pytest.mark.parametrize("doubts", [True, False])
async def test_an_instance_that_lost_its_place_leaves_the_consumer_alone(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, doubts: bool
) -> None:
    """Another instance is at work on it by now. What the group wants of the member is that one's business."""
    await ground.elastic()
    await groups.set_mapping(ground.connection, ground.stream, "g", {"a": [0, 1], "b": [2, 3]})
    connection = await ground.client()
    first = await ground.join("a", ground.evidence.handler("first"), connection=connection)
    await ground.join("b")
    sent = await ground.publish(KEYS)
    await ground.evidence.all_of(sent)
    second = await ground.join("a", ground.evidence.handler("second"))

    feed = await fallen_silent(first)
    with Standstill(feed) if doubts else Unaware(feed) as lost:
        await consumers.unpin(ground.connection, f"{ground.stream}-g", "a", "PCG")
        sent += await ground.publish(KEYS)
        await ground.evidence.all_of(sent)
        await until(lambda: active(second))

        asked = Requests(connection, monkeypatch)
        for mapping in ({"a": [1, 2], "b": [0, 3]}, {"a": [2, 3], "b": [0, 1]}):
            await groups.set_mapping(ground.connection, ground.stream, "g", mapping)
            before = len(asked.subjects)
            await until(lambda: len(asked.subjects) > before + 3)  # noqa: B023 - it has seen the change
            assert asked.changes == []
            await until(lambda: owned(second) == tuple(mapping["a"]))  # noqa: B023
        assert first.is_active, "as far as it knows"
        await lost.answer()
        await until(lambda: not active(first))
        sent += await ground.publish(KEYS)
        await ground.evidence.all_of(sent)
        assert flawless(ground.evidence.verdict(sent))


@pytest.mark.parametrize("mapping", [{"a": [1, 2], "b": [0, 3]}, {"b": [0, 1, 2, 3]}])
async def test_an_instance_that_stood_still_in_the_middle_of_a_move_does_not_end_it(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, mapping: dict[str, list[int]]
) -> None:
    at_work, go_on = asyncio.Event(), asyncio.Event()

    async def waits(message: GroupMessage) -> None:
        at_work.set()
        await go_on.wait()
        await ground.evidence.note("first", message)

    before = {"a": [0, 1], "b": [2, 3]}
    await ground.elastic()
    await groups.set_mapping(ground.connection, ground.stream, "g", before)
    connection = await ground.client()
    first = await ground.join("a", waits, connection=connection)
    sent = await ground.publish([next(key for key in KEYS if partition_number(key, 4) == 0)])
    async with asyncio.timeout(END_S):
        await at_work.wait()
    second = await ground.join("a", ground.evidence.handler("second"))
    await ground.join("b")
    await until(lambda: owned(second) == (0, 1))

    await groups.set_mapping(ground.connection, ground.stream, "g", mapping)
    consumer = consumer_of(first)
    await until(lambda: "handlers at work" in (consumer.waiting_for or ""))
    with Standstill(await fallen_silent(first)) as standstill:
        await consumers.unpin(ground.connection, f"{ground.stream}-g", "a", "PCG")
        await groups.set_mapping(ground.connection, ground.stream, "g", before)
        sent += await ground.publish(KEYS)
        await ground.evidence.all_of(sent)
        assert active(second)
        asked = Requests(connection, monkeypatch)
        go_on.set()
        await until(lambda: len(asked.subjects) > 3)
        assert asked.changes == []
        await standstill.answer()
    assert ground.evidence.verdict(sent).clean


async def test_an_answer_from_before_the_standstill_does_not_count(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server said that this instance is active, and then the process stood still."""
    await ground.elastic()
    await groups.set_mapping(ground.connection, ground.stream, "g", {"a": [0, 1], "b": [2, 3]})
    connection = await ground.client()
    first = await ground.join("a", ground.evidence.handler("first"), connection=connection)
    await ground.join("b")
    sent = await ground.publish(KEYS)
    await ground.evidence.all_of(sent)
    second = await ground.join("a", ground.evidence.handler("second"))
    remote = consumer_of(first)._remote
    info = remote.info
    answered, go_on = asyncio.Event(), asyncio.Event()

    async def stands_still() -> ConsumerInfo:
        answer = await info()
        if not consumer_of(first)._state.draining:
            return answer  # it has not yet let go of partition 0
        monkeypatch.setattr(remote, "info", info)
        answered.set()
        await go_on.wait()
        return answer

    monkeypatch.setattr(remote, "info", stands_still)
    await groups.set_mapping(ground.connection, ground.stream, "g", {"a": [1, 2], "b": [0, 3]})
    async with asyncio.timeout(END_S):
        await answered.wait()
    with Standstill(await fallen_silent(first)) as standstill:
        await consumers.unpin(ground.connection, f"{ground.stream}-g", "a", "PCG")
        sent += await ground.publish(KEYS)
        await until(lambda: owned(second) == (1, 2))
        await ground.evidence.all_of(sent)
        asked = Requests(connection, monkeypatch)
        go_on.set()
        await until(lambda: len(asked.subjects) > 3)
        assert asked.changes == []
        await standstill.answer()
    assert flawless(ground.evidence.verdict(sent))


async def test_who_takes_over_looks_at_the_partitions_that_the_consumer_really_has(ground: Ground) -> None:
    """The instance before it ended in the middle of a move: the consumer lacks partitions that the member has."""
    await ground.elastic(members=["a"])
    connection = await ground.client()
    await ground.join("a", ground.evidence.handler("first"), connection=connection)
    sent = await ground.publish(KEYS)
    await ground.evidence.all_of(sent)
    second = await ground.join("a", ground.evidence.handler("second"))
    await until(lambda: owned(second) == (0, 1, 2, 3))

    await connection.close()
    queue = f"{ground.stream}-g"
    config = (await consumers.info(ground.connection, queue, "a")).config
    assert config.filter_subjects is not None
    await consumers.update(ground.connection, queue, replace(config, filter_subjects=config.filter_subjects[:1]))
    sent += await ground.publish(KEYS)
    await ground.evidence.all_of(sent, END_S)
    info = await until(lambda: consumers.info(ground.connection, queue, "a"), lambda info: info.num_ack_pending == 0)
    assert info.config.filter_subjects == config.filter_subjects
    assert ground.evidence.verdict(sent).clean


async def test_a_gain_that_the_server_confirmed_too_late_and_then_refuses_keeps_the_order(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer has partition 1 and the member does not know it; what came of it meanwhile was dropped."""
    queue = f"{ground.stream}-g"
    in_0, in_1 = (next(key for key in KEYS if partition_number(key, 4) == partition) for partition in (0, 1))
    await ground.elastic()
    await groups.set_mapping(ground.connection, ground.stream, "g", {"a": [0], "b": [1, 2, 3]})
    member = await ground.join("a")
    sent = await ground.publish([in_0])
    await ground.evidence.all_of(sent)
    await ground.drained(1)
    remote = consumer_of(member)._remote
    update = remote.update

    async def confirmed_too_late(config: ConsumerConfig) -> None:
        monkeypatch.setattr(remote, "update", update)
        await update(config)
        await consumers.create(
            ground.connection,
            queue,
            ConsumerConfig(name="in-the-way", filter_subjects=("2.>",), inactive_threshold_s=60),
            action="create",
        )
        await groups.set_mapping(ground.connection, ground.stream, "g", {"a": [0, 1, 2], "b": [3]})
        sent.extend(await ground.publish([in_1]))
        await until(lambda: consumers.info(ground.connection, queue, "a"), lambda info: info.num_ack_pending > 0)
        raise RequestTimeout("on purpose")

    monkeypatch.setattr(remote, "update", confirmed_too_late)
    await groups.set_mapping(ground.connection, ground.stream, "g", {"a": [0, 1], "b": [2, 3]})
    await until(lambda: len(sent) > 1, deadline_s=END_S)
    await until(lambda: remote.update == update and owned(member) == (0, 1))
    sent.extend(await ground.publish([in_1]))
    await ground.evidence.all_of(sent)
    assert flawless(ground.evidence.verdict(sent)), [line.sequence for line in ground.evidence.lines]
    await consumers.delete(ground.connection, queue, "in-the-way")
    await until(lambda: owned(member) == (0, 1, 2), deadline_s=END_S)

"""Real groups with a journal: its records are what the handlers did."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from keylane import Connection, groups
from keylane.jetstream import consumers
from keylane.journal import Journal, JournalRecord
from keylane.processing.key_parking import parked_count, release, wishes
from keylane.testing import Effect, judge
from tests.integration.groups.rig import Ground, delete_quietly, make_ground
from tests.integration.journal.rig import read
from tests.waiter import until


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def ground_on(stack: AsyncExitStack, connection: Connection, stream: str, **options: object) -> Ground:
    url = connection.server if connection.server.startswith("nats://") else f"nats://{connection.server}"
    ground = await make_ground(stack, connection, stream, url, **options)
    stack.push_async_callback(delete_quietly, connection, f"{stream}+journal")
    return ground


Seen = list[tuple[int, int, str, int, int, str]]


def seen_by(message: groups.GroupMessage) -> tuple[int, int, str, int, int, str]:
    pin = message.headers["Nats-Pin-Id"]
    return message.delivery_sequence, message.sequence, message.key, message.partition, message.delivered_count, pin


def told_by(record: JournalRecord) -> tuple[int, int, str, int, int, str]:
    return record.sequence, record.source_sequence, record.key, record.partition, record.delivered, record.pin


@pytest.mark.parametrize("kind", ["elastic", "static"])
async def test_records_are_what_handlers_saw(
    stack: AsyncExitStack, connection: Connection, unique: object, kind: str
) -> None:
    assert callable(unique)
    stream = unique("jgroup")
    ground = await ground_on(stack, connection, stream, **({"partitions": 4} if kind == "static" else {}))
    # Sequences of the queue and of the stream must differ, or mixing them up would go unseen.
    await ground.publish(["k.not.for.the.group"] * 5 if kind == "elastic" else [])
    await (ground.elastic if kind == "elastic" else ground.static)(members=["alice", "bob"])
    saw: dict[str, Seen] = defaultdict(list)

    def handler(member: str) -> object:
        async def handle(message: groups.GroupMessage) -> None:
            saw[member].append(seen_by(message))
            await ground.evidence.note(member, message)

        return handle

    journals = {name: await Journal(connection, stream=stream, batch_records=64).start() for name in ("alice", "bob")}
    members = [await ground.join(name, handler(name), journal=journals[name]) for name in journals]
    sent = await ground.publish([f"k{number % 23}" for number in range(600)])
    await ground.evidence.all_of(sent)
    for member in members:
        await member.stop(timeout_s=5)
    for journal in journals.values():
        await journal.stop()
    records = await read(connection, stream, "g")
    assert Counter(record.outcome for record in records) == {"done": 600}
    for name in journals:
        own = [record for record in records if record.member == name]
        assert sorted(map(told_by, own)) == sorted(saw[name])
        assert len({record.instance for record in own}) == 1
    if kind == "elastic":
        assert all(record.source_sequence == record.sequence + 5 for record in records)
    assert all(0 <= record.ended_ns - record.started_ns < 60 * 10**9 for record in records)
    verdict = judge(sent, [Effect(record.key, record.source_sequence, record.member) for record in records])
    assert verdict.clean
    assert not verdict.duplicated


async def test_a_failed_try_and_its_repetition_are_two_records(
    stack: AsyncExitStack, connection: Connection, unique: object
) -> None:
    assert callable(unique)
    ground = await ground_on(stack, connection, unique("jgroup"))
    await ground.elastic(members=["alice"])
    tried: Counter[str] = Counter()

    async def handle(message: groups.GroupMessage) -> None:
        tried[message.key] += 1
        if message.key == "bad" and tried["bad"] == 1:
            raise RuntimeError("once")
        await ground.evidence.note("alice", message)

    async with Journal(connection, stream=ground.stream) as journal:
        member = await ground.join("alice", handle, journal=journal)
        sent = await ground.publish(["bad", "good", "bad"])
        await ground.evidence.all_of(sent)
        pinned = (await consumers.info(connection, f"{ground.stream}-g", "alice")).priority_groups[0].pinned_client_id
        await member.stop(timeout_s=5)
    records = await read(connection, ground.stream)
    bad = [(record.source_sequence, record.outcome) for record in records if record.key == "bad"]
    assert bad == [(sent[0], "failed"), (sent[0], "done"), (sent[2], "done")]
    assert [record.outcome for record in records if record.key == "good"] == ["done"]
    assert {record.pin for record in records} == {pinned}


async def test_a_release_is_journaled_and_the_judge_finds_the_order_of_a_parked_key(
    stack: AsyncExitStack, connection: Connection, unique: object
) -> None:
    assert callable(unique)
    ground = await ground_on(stack, connection, unique("jgroup"))
    stack.push_async_callback(delete_quietly, connection, f"{ground.stream}@dlq")
    await ground.publish(["k.not.for.the.group"] * 5)
    await ground.elastic(members=["alice"])
    broken = {"bad"}

    async def handle(message: groups.GroupMessage) -> None:
        if message.key in broken:
            raise RuntimeError("not yet")
        await ground.evidence.note("alice", message)

    async with Journal(connection, stream=ground.stream) as journal:
        member = await ground.join("alice", handle, journal=journal, max_tries=2, after_tries="park")
        sent = await ground.publish(["bad", "good", "bad"])
        await until(lambda: parked_count(connection, ground.stream, "g", "bad"), lambda count: count == 2)
        await release(connection, ground.stream, "g", "bad")  # it fails again
        await until(lambda: wishes(connection, ground.stream, "g"), lambda found: not found)
        broken.clear()
        await release(connection, ground.stream, "g", "bad")
        await ground.evidence.all_of(sent)
        await until(lambda: wishes(connection, ground.stream, "g"), lambda found: not found)  # the key goes on
        sent += await ground.publish(["bad"])
        await ground.evidence.all_of(sent)
        await member.stop(timeout_s=5)
    records = await read(connection, ground.stream)
    bad = [(record.source_sequence, record.outcome) for record in records if record.key == "bad"]
    first, second, third = sent[0], sent[2], sent[3]
    assert bad == [
        (first, "failed"),
        (first, "parked"),
        (second, "parked"),
        (first, "failed"),
        (first, "parked"),
        (first, "done"),
        (second, "done"),
        (third, "done"),
    ]
    assert {(record.member, record.revision) for record in records} == {("alice", records[0].revision)}
    assert len({record.instance for record in records}) == 1
    done = [record for record in records if record.outcome == "done"]
    verdict = judge(sent, [Effect(record.key, record.source_sequence, record.member) for record in done])
    assert (verdict.lost, verdict.duplicated, verdict.out_of_order) == ((), (), ())

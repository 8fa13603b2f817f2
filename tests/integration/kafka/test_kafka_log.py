"""The coordination log in a topic of a real broker."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from confluent_kafka import Producer

from keylane.core.claim_records import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Message,
    ReleaseGroup,
    ReleasingPartition,
    coordinating_partition,
    encode,
)
from keylane.core.world import World
from keylane.errors import InvalidInput, KeylaneError, LogReplaced, NoSuchTopic, ReadIncomplete, UnsafeLog
from keylane.kafka import KafkaLink, KafkaLog, open_kafka, open_kafka_log
from keylane.kafka import log as kafka_log
from keylane.kafka.topic import PartitionOffsets, describe, settings
from keylane.marshal import Bounds, CoordinationLog, MemoryLog, Newest, Verdict, catch_up
from keylane.retrying import Backoff
from tests.integration.kafka.log_rig import (
    INTERVAL_S,
    a_log,
    add_partitions,
    age_all,
    alter,
    beat,
    claim,
    create,
    delete,
    delete_records,
    new_world,
    release,
)
from tests.peers.kafka import Kafka
from tests.waiter import until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]


@pytest.fixture
async def log(link: KafkaLink, name: str) -> AsyncIterator[KafkaLog]:
    async with a_log(link, name) as opened:
        yield opened


# ---- what a log promises ----------------------------------------------------------------------------


async def test_claims_are_judged_from_the_topic(log: KafkaLog) -> None:
    port: CoordinationLog = log
    world = new_world(log)
    messages: list[Message] = [
        claim("anna"),
        claim("bert"),
        beat("anna", 50),
        ReleaseGroup("i", "admin", "paused", 1 << 40, 1),
        claim("carl", group="paused"),
        release("anna", 60),
        claim("bert"),
    ]
    positions = [await port.append(message, 0) for message in messages]
    assert [position.offset for position in positions] == list(range(7))
    await catch_up(port, world)
    assert [world.verdict_of(*position) for position in positions] == [
        Verdict.WON,
        Verdict.LOST,
        None,
        None,
        Verdict.PAUSED,
        None,
        Verdict.WON,
    ]
    owned = world.claim_of("billing", "orders", 0)
    assert owned is not None
    assert (owned.token, owned.offset) == (6, 60)
    assert repr(log) == f"<KafkaLog {log.name} of 1 partitions>"


async def test_time_is_the_brokers(log: KafkaLog) -> None:
    """Whatever the writer says in the record, and whatever its clock says in the batch."""
    before_ms = int(time.time() * 1000) - 1000
    await log.append(claim("anna"), 0)
    await log.append(claim("bert"), 0)
    records = [record async for record in log.read(0, 0)]
    assert [record.offset for record in records] == [0, 1]
    assert before_ms <= records[0].time_ms <= records[1].time_ms <= int(time.time() * 1000) + 1000
    assert records[0].value == encode(claim("anna"))


async def test_thirty_racers_have_one_winner_and_every_loser_knows(kafka: Kafka, name: str) -> None:
    """Three processes' worth of clients. Each reads back and judges on its own."""
    async with AsyncExitStack() as stack:
        logs = []
        for _ in range(3):
            link = await stack.enter_async_context(open_kafka(kafka.bootstrap))
            logs.append(await stack.enter_async_context(a_log(link, name)))

        async def race(number: int) -> Verdict | None:
            log = logs[number % 3]
            position = await log.append(claim(f"c{number}"), 0, expect=Newest(None))
            world = new_world(log)
            await catch_up(log, world)
            return world.verdict_of(*position)

        verdicts = await asyncio.gather(*(race(number) for number in range(30)))
        assert sorted(verdict.value for verdict in verdicts if verdict) == ["lost"] * 29 + ["won"]
        assert await logs[0].bounds(0) == Bounds(0, 30), "losers leave a record"


async def test_a_claim_that_lost_never_wakes_up(log: KafkaLog) -> None:
    """B claims, A claims and is told that it lost, B releases: nobody owns it. Nor does A's heartbeat steal it."""
    world = new_world(log)
    won = await log.append(claim("bert"), 0)
    lost = await log.append(claim("anna"), 0)
    await catch_up(log, world)
    assert [world.verdict_of(*won), world.verdict_of(*lost)] == [Verdict.WON, Verdict.LOST]
    await log.append(release("bert", 7), 0)
    await log.append(beat("anna", 0), 0)
    for reader in (world, new_world(log)):
        await catch_up(log, reader)
        assert not reader.holds("billing", "orders", 0)
        found = reader.claim_of("billing", "orders", 0)
        assert found is not None
        assert (found.owner, found.offset) == (None, 7)


async def test_reading_from_a_place_to_the_end(log: KafkaLog) -> None:
    for number in range(5):
        await log.append(claim("anna", number), 0)
    assert [record.offset async for record in log.read(0, 3)] == [3, 4]
    assert [record async for record in log.read(0, 5)] == []
    assert [record.offset async for record in log.read(0, 1)] == [1, 2, 3, 4]
    seen = []
    async for record in log.read(0, 0):
        seen.append(record.offset)
        await log.append(claim("bert"), 0)
    assert seen == [0, 1, 2, 3, 4], "what comes meanwhile is for the next reading"
    assert [record.offset async for record in log.read(0, 5)] == [5, 6, 7, 8, 9]


async def test_readers_of_one_log_do_not_disturb_each_other(log: KafkaLog) -> None:
    for number in range(20):
        await log.append(claim("anna", number), 0)

    async def offsets(first: int) -> list[int]:
        found = []
        async for record in log.read(0, first):
            found.append(record.offset)
            await asyncio.sleep(0)
        return found

    starts = [0, 15, 3, 20, 19, 0, 7]
    assert await asyncio.gather(*map(offsets, starts)) == [list(range(first, 20)) for first in starts]


async def test_a_reader_that_stops_in_the_middle_loses_nothing(log: KafkaLog) -> None:
    for number in range(10):
        await log.append(claim("anna", number), 0)
    async for record in log.read(0, 0):
        if record.offset == 3:
            break
    assert [record.offset async for record in log.read(0, 4)] == [4, 5, 6, 7, 8, 9]


async def test_what_was_confirmed_is_in_every_later_reading(kafka: Kafka, log: KafkaLog) -> None:
    """Also in a reading by somebody else that begins right afterwards."""
    async with open_kafka(kafka.bootstrap) as other, a_log(other, log.name) as reader:
        world = new_world(reader)
        for number in range(100):
            position = await log.append(claim("anna", number), 0)
            await catch_up(reader, world)
            assert world.verdict_of(*position) is Verdict.WON


async def test_a_long_log_is_read_in_batches(kafka: Kafka, log: KafkaLog) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "enable.idempotence": True})  # else retries repeat
    for _ in range(30_050):
        producer.produce(log.name, b"noise", partition=0)
    assert await asyncio.to_thread(producer.flush, 30) == 0
    world = new_world(log)
    await catch_up(log, world)
    assert (world.unreadable, world.next_offset(0)) == (30_050, 30_050)
    assert [record.offset async for record in log.read(0, 30_049)] == [30_049]


async def test_offsets_that_no_record_has(kafka: Kafka, log: KafkaLog) -> None:
    """A transaction's marks take offsets, also the last one; what it gave up counts for every reader alike."""
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": log.name})

    def write() -> None:
        producer.init_transactions(30)
        for end in (producer.commit_transaction, producer.abort_transaction):
            producer.begin_transaction()
            producer.produce(log.name, encode(claim("anna")), partition=0)
            assert producer.flush(30) == 0
            end(30)

    await asyncio.to_thread(write)
    # a transaction may end before its last mark is written
    await until(lambda: log.bounds(0), lambda seen: seen.end >= 4, deadline_s=30)
    world = new_world(log)
    await catch_up(log, world)
    assert [record.offset async for record in log.read(0, 0)] == [0, 2]
    assert await log.bounds(0) == Bounds(0, 4)
    position = await log.append(claim("bert"), 0)
    assert position.offset == 4
    await catch_up(log, world)
    assert world.verdict_of(*position) is Verdict.LOST


async def test_a_reading_that_hears_nothing_is_an_error(
    kafka: Kafka, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_kafka(kafka.bootstrap, timeout_s=6) as link, a_log(link, name) as log:
        await log.append(claim("anna"), 0)

        async def further(offsets: PartitionOffsets, which: str, partition: int) -> int:
            return 3

        monkeypatch.setattr(PartitionOffsets, "ask", further)
        with pytest.raises(ReadIncomplete, match=r"record 1 of 2 did not come within 6 s; read again"):
            [record async for record in log.read(0, 0)]
        monkeypatch.undo()
        assert [record.offset async for record in log.read(0, 0)] == [0]


async def test_a_leader_that_does_not_know_what_was_confirmed_is_not_believed(
    log: KafkaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    await log.append(claim("anna"), 0)

    async def behind(offsets: PartitionOffsets, which: str, partition: int) -> int:
        return 0

    monkeypatch.setattr(PartitionOffsets, "ask", behind)
    with pytest.raises(ReadIncomplete, match="ends at 0, before record 0, which was confirmed: its leader"):
        await log.bounds(0)
    monkeypatch.setattr(kafka_log, "_BELIEVED_TRUNCATED_S", 0.0)
    with pytest.raises(LogReplaced, match="it was truncated; stop all its consumers"):
        await log.bounds(0)


async def test_partitions_that_are_not(log: KafkaLog) -> None:
    for asked in (log.bounds(1), log.append(claim("anna"), -1), anext(log.read(1, 0))):
        with pytest.raises(InvalidInput, match="it has 0 to 0"):
            await asked
    with pytest.raises(InvalidInput, match="a slash separates"):
        await log.append(claim("anna", group="a/b"), 0)


# ---- the same world ---------------------------------------------------------------------------------


def history(chance: random.Random, count: int, partitions: int) -> list[tuple[int, bytes]]:
    """Messages of a few clients about a few keys, each in the right partition; some that nobody can read."""
    found: list[tuple[int, bytes]] = []
    for _ in range(count):
        topic, number = chance.choice(["orders", "bills"]), chance.randrange(4)
        client, group = chance.choice(["anna", "bert", "carl"]), chance.choice(["g1", "g2"])
        who = (chance.choice("ij"), client, group, topic, number)
        offset = chance.randrange(100)
        kinds: list[Message] = [
            ClaimingPartition(*who, 1),
            ClaimingPartition(*who, 1),
            Heartbeat(*who, offset, 1),
            Heartbeat(*who, offset, 1),
            ReleasingPartition(*who, offset, 1),
            ClaimingMessages(*who, offset, 1),
        ]
        value = encode(chance.choice(kinds))
        where = coordinating_partition(topic, number, partitions)
        if chance.random() < 0.03:
            where, value = chance.randrange(partitions), chance.choice([b"noise", b"", b"Heartbeat/1/x"])
        elif chance.random() < 0.02:
            value = encode(ReleaseGroup("i", "admin", group, int(time.time()) + chance.choice([-5, 1]), 1))
        found.append((where, value))
    return found


@pytest.mark.parametrize("partitions", [1, 4])
async def test_the_world_is_that_of_the_same_messages_in_memory(
    kafka: Kafka, link: KafkaLink, name: str, partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the batches: read as it grows, at once, in small pieces, or out of memory."""
    interval_s = 0.05  # claims run out while this is written
    seed = time.time_ns()
    chance = random.Random(seed)  # noqa: S311 - a history, not a secret

    def new() -> World:
        return World(interval_s, partitions, keep_history=True)

    growing, at_once, in_pieces, in_memory = new(), new(), new(), new()
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "linger.ms": 0, "enable.idempotence": True})
    async with a_log(link, name, interval_s=interval_s, partitions=partitions) as log:
        written = history(chance, 600, partitions)
        while written:
            some = chance.randrange(1, 40)
            for where, value in written[:some]:
                producer.produce(name, value, partition=where)
            assert await asyncio.to_thread(producer.flush, 30) == 0
            written = written[some:]
            for where in chance.sample(range(partitions), chance.randrange(partitions + 1)):
                await catch_up(log, growing, where)
            await asyncio.sleep(chance.random() * 0.05)  # the history's own time, not a wait for anything
        await catch_up(log, growing)
        await catch_up(log, at_once)
        monkeypatch.setattr(kafka_log, "_BATCH", 7)
        monkeypatch.setattr(kafka_log, "_KEPT", 3)
        async with a_log(link, name, interval_s=interval_s, partitions=partitions) as other:
            await catch_up(other, in_pieces)
        memory = MemoryLog(partitions)
        for number in range(partitions):
            async for record in log.read(number, 0):
                memory.now_ms = record.time_ms
                memory.write(record.value, number)
        await catch_up(memory, in_memory)
    assert sum(in_memory.snapshot().ends) == 600
    assert len(in_memory.tenures()) > 20, f"seed {seed}: a history in which something happens"
    for world in (growing, at_once, in_pieces):
        assert world.snapshot() == in_memory.snapshot(), f"seed {seed}"
        assert world.tenures() == in_memory.tenures(), f"seed {seed}"


async def test_records_gone_by_age(link: KafkaLink, log: KafkaLog) -> None:
    world = new_world(log)
    await log.append(claim("anna"), 0)
    await log.append(release("anna", 9), 0)
    await catch_up(log, world)
    await age_all(link, log)
    assert await log.bounds(0) == Bounds(2, 2)
    fresh = new_world(log)
    await catch_up(log, fresh)
    won = await log.append(claim("bert"), 0)
    for reader in (world, fresh):
        await catch_up(log, reader)
        assert reader.verdict_of(*won) is Verdict.WON, "a fleet that comes back to an empty log"
    async with a_log(link, log.name) as another:
        with pytest.raises(ReadIncomplete, match=r"not read to its end: offset 0 of .* cannot be read: it has expired"):
            [record async for record in another.read(0, 0)]
        late = new_world(another)
        await catch_up(another, late)
        assert late.verdict_of(*won) is Verdict.UNSURE, "a reader of what is left cannot know"


async def test_the_first_heartbeat_after_a_cut_tells_the_owner(link: KafkaLink, log: KafkaLog) -> None:
    world = new_world(log)
    await log.append(claim("anna"), 0)
    await log.append(beat("anna", 5), 0)
    await log.append(beat("anna", 6), 0)
    await catch_up(log, world)
    await delete_records(link, log.name, before=2)
    assert await log.bounds(0) == Bounds(2, 3)
    lost = await log.append(claim("bert"), 0)
    late = new_world(log)
    for reader in (world, late):
        await catch_up(log, reader)
        assert reader.verdict_of(*lost) is Verdict.LOST
        found = reader.claim_of("billing", "orders", 0)
        assert found is not None
        assert found.owner is not None
        assert (found.owner.client, found.offset) == ("anna", 6)


async def test_a_world_that_missed_records_is_told(link: KafkaLink, log: KafkaLog) -> None:
    world = new_world(log)
    await log.append(claim("anna"), 0)
    await catch_up(log, world)
    await log.append(beat("anna", 1), 0)
    await log.append(beat("anna", 2), 0)
    await delete_records(link, log.name, before=2)
    with pytest.raises(LogReplaced, match=r"begins at 2 and was read to 1 before"):
        await catch_up(log, world)


# ---- the topic --------------------------------------------------------------------------------------


async def test_the_topic_is_made_with_safe_settings(link: KafkaLink, name: str) -> None:
    async with open_kafka_log(link, name, interval_s=INTERVAL_S) as log:
        assert log.partitions == 8
        found = await settings(link, name)
        assert await log.kept_for_s() == 7 * 24 * 3600
    assert found["cleanup.policy"] == "delete"
    assert found["message.timestamp.type"] == "LogAppendTime"
    assert (found["retention.ms"], found["retention.bytes"]) == ("604800000", "-1")
    assert found["segment.ms"] == "86400000"
    assert found["unclean.leader.election.enable"] == "false"
    assert found["min.insync.replicas"] == "1", "there is one broker"
    assert (await describe(link, name)).copies == 1


async def test_opening_it_again_and_all_at_once(link: KafkaLink, name: str) -> None:
    async def use(number: int) -> int:
        async with open_kafka_log(link, name, interval_s=INTERVAL_S, partitions=1) as log:
            return (await log.append(claim(f"c{number}"), 0)).offset

    assert sorted(await asyncio.gather(*(use(number) for number in range(8)))) == list(range(8))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cleanup.policy": "compact"}, "cleanup.policy is compact, not delete: compaction drops the first claim"),
        ({"cleanup.policy": "compact,delete"}, "compaction drops the first claim"),
        ({"message.timestamp.type": "CreateTime"}, "message.timestamp.type is CreateTime, not LogAppendTime"),
        ({"retention.ms": "99000"}, "retention.ms is 99000, less than 10 intervals of 10 s"),
        ({"retention.bytes": "1000000"}, "retention.bytes is 1000000, which drops claims that hold"),
        ({"unclean.leader.election.enable": "true"}, "unclean.leader.election.enable is true"),
        ({"min.insync.replicas": "2"}, "min.insync.replicas is 2, more than its 1 copies: nothing can be written"),
    ],
)
async def test_a_topic_that_breaks_the_rules_is_refused(
    link: KafkaLink, name: str, changes: dict[str, str], said: str
) -> None:
    await create(link, name, changes)
    with pytest.raises(UnsafeLog) as refused:
        async with open_kafka_log(link, name, interval_s=INTERVAL_S):
            pass
    assert said in str(refused.value)
    assert "choose another topic" in str(refused.value)


async def test_records_with_their_writers_time_are_refused(kafka: Kafka, link: KafkaLink, name: str) -> None:
    """They stay in a topic whose setting was changed later."""
    await create(link, name, {"message.timestamp.type": "CreateTime"})
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    producer.produce(name, encode(claim("anna")), partition=0, timestamp=int(time.time() * 1000) + 3_000_000)
    assert await asyncio.to_thread(producer.flush, 30) == 0
    await alter(link, name, message_timestamp_type="LogAppendTime")
    async with a_log(link, name) as log:
        with pytest.raises(UnsafeLog, match=r"record 0 in partition 0 of .* has its writer's time"):
            await catch_up(log, new_world(log))


async def test_another_number_of_partitions_than_asked_for(link: KafkaLink, name: str) -> None:
    await create(link, name, partitions=4)
    with pytest.raises(UnsafeLog, match="has 4 partitions, and 8 are asked for"):
        async with open_kafka_log(link, name, interval_s=INTERVAL_S, partitions=8):
            pass
    async with open_kafka_log(link, name, interval_s=INTERVAL_S) as log:
        assert log.partitions == 4


async def test_partitions_that_come_while_it_is_used(link: KafkaLink, name: str) -> None:
    async with a_log(link, name, interval_s=0.2, partitions=4) as log:
        world = new_world(log)
        await catch_up(log, world)
        await add_partitions(link, name, 6)

        async def read_on() -> None:
            async with asyncio.timeout(30):
                while True:
                    await catch_up(log, world)
                    await asyncio.sleep(0.05)

        with pytest.raises(LogReplaced, match=r"had 4 partitions and has 6: .* stop all its consumers"):
            await read_on()
    async with open_kafka_log(link, name, interval_s=0.2) as larger:
        with pytest.raises(InvalidInput, match="a world of 4 partitions and a coordination log of 6"):
            await catch_up(larger, world)


async def use_for_ever(log: KafkaLog) -> None:
    """As a consumer does: what may pass is tried again."""
    patience = Backoff("the log", 60)
    async with asyncio.timeout(60):
        while True:
            try:
                await log.bounds(0)
                await log.append(beat("anna", 1), 0)
            except KeylaneError as error:
                await patience.after(error)
            else:
                patience.succeeded()


@pytest.mark.long("waits until the client believes that a topic is gone")
async def test_a_log_that_was_deleted(kafka: Kafka, name: str) -> None:
    async with open_kafka(kafka.bootstrap, timeout_s=6) as link, a_log(link, name, interval_s=0.2) as log:
        await log.append(claim("anna"), 0)
        await delete(link, name)
        with pytest.raises(LogReplaced, match="was deleted; stop all its consumers"):
            await use_for_ever(log)
        with pytest.raises(LogReplaced, match="was deleted"):
            await log.append(claim("anna"), 0)


async def test_a_log_that_was_made_anew(kafka: Kafka, name: str) -> None:
    async with open_kafka(kafka.bootstrap, timeout_s=6) as link, a_log(link, name, interval_s=0.2) as log:
        await log.append(claim("anna"), 0)
        await delete(link, name)
        await create(link, name)
        with pytest.raises(LogReplaced, match="was recreated"):
            await use_for_ever(log)


@pytest.mark.parametrize(
    "options",
    [
        {"interval_s": 0},
        {"interval_s": 10, "retention_s": 99},
        {"interval_s": 10, "partitions": 0},
        {"interval_s": 10, "copies": -1},
        {"interval_s": 10, "topic": "a/b"},
        {"interval_s": 10, "topic": ""},
        {"interval_s": 10, "copies": 2},
    ],
)
async def test_options_that_cannot_be(link: KafkaLink, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        async with open_kafka_log(link, options.pop("topic", name), **options):
            pass
    with pytest.raises(NoSuchTopic):
        await describe(link, name)

"""Marshal consumers whose log is a topic of a real broker: write, read back, judge. Messages are in memory."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from keylane import Connection
from keylane.core.claim_choice import TopicPartition
from keylane.core.claim_facts import Ended, Owner, overlaps
from keylane.core.claim_records import ClaimingPartition, Message
from keylane.errors import InvalidInput, LogReplaced, OutcomeUnknown
from keylane.extras import install_command
from keylane.jetstream import streams
from keylane.kafka import KafkaLink, KafkaLog, open_kafka, open_kafka_log
from keylane.kafka.topic import PartitionOffsets
from keylane.marshal import (
    Admin,
    Appetite,
    Consumer,
    ConsumerHooks,
    CoordinationLog,
    MemoryLog,
    MemorySource,
    World,
    catch_up,
    open_jetstream_log,
)
from keylane.marshal.log import Newest, Position
from tests.integration.kafka.log_rig import add_partitions
from tests.integration.marshal.rig import GROUP, TOPIC, Seen, fill, in_order_per_key, kill
from tests.peers.kafka import Kafka
from tests.waiter import until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]

INTERVAL_S = 3.0


class Ground:
    """A topic as a log, and messages in memory. Each consumer has a link of its own, as another process would."""

    def __init__(self, kafka: Kafka, name: str, source: MemorySource, partitions: int = 1) -> None:
        self.kafka = kafka
        self.name = name
        self.source = source
        self.partitions = partitions

    @asynccontextmanager
    async def log(self) -> AsyncIterator[KafkaLog]:
        async with (
            open_kafka(self.kafka.bootstrap) as link,
            open_kafka_log(link, self.name, interval_s=INTERVAL_S, partitions=self.partitions) as log,
        ):
            yield log

    @asynccontextmanager
    async def consumer(self, client: str, handler: Any, **options: Any) -> AsyncIterator[Consumer]:
        async with self.log() as log, member(log, self.source, client, handler, **options) as one:
            yield one

    async def world(self) -> World:
        async with self.log() as log:
            return await world_of(log)


def member(log: CoordinationLog, source: MemorySource, client: str, handler: Any, **options: Any) -> Consumer:
    return Consumer(log, source, GROUP, client, [TOPIC], handler, **options)


async def world_of(log: CoordinationLog) -> World:
    """Of the whole log; at no place of it two owners."""
    world = World(INTERVAL_S, log.partitions, first_offset=log.first_offset, keep_history=True)
    await catch_up(log, world)
    assert list(overlaps(world.tenures())) == []
    assert world.misplaced == world.unreadable == 0
    return world


@pytest.mark.parametrize("partitions", [1, 4, 64])
@pytest.mark.parametrize("mode", ["at_least_once", "at_most_once"])
async def test_consumers_share_on_logs_of_any_size(
    kafka: Kafka, name: str, link: KafkaLink, partitions: int, mode: str
) -> None:
    ground = Ground(kafka, name, MemorySource({TOPIC: 8}), partitions)
    fill(ground.source, 8, 30)
    seen = [Seen() for _ in range(4)]
    async with AsyncExitStack() as stack:
        members = [
            await stack.enter_async_context(ground.consumer(f"c{number}", one, mode=mode, max_claims=2, batch_size=20))
            for number, one in enumerate(seen)
        ]
        await until(lambda: sum(len(one.messages) for one in seen) >= 240)
        assert [len(one.partitions) for one in members] == [2, 2, 2, 2]
    every = sum((one.times for one in seen), start=Counter[tuple[int, int]]())
    assert len(every) == 240
    assert set(every.values()) == {1}
    assert all(in_order_per_key(one.messages) for one in seen)
    world = await ground.world()
    claims = [world.claim_of(GROUP, TOPIC, number) for number in range(8)]
    assert [(one.owner, one.offset) for one in claims if one] == [(None, 30)] * 8


async def test_the_partitions_of_the_dead_are_taken_over(kafka: Kafka, name: str) -> None:
    ground = Ground(kafka, name, MemorySource({TOPIC: 6}), 4)
    fill(ground.source, 6, 20)
    first, second = Seen(), Seen()
    async with ground.consumer("anna", first, pick=Appetite(greedy=True)) as anna:
        await first.until(lambda one: len(one.messages) == 120)
        await until(lambda: len(anna.partitions) == 6)
        await kill(anna)
        fill(ground.source, 6, 10, first=20)
        async with ground.consumer("bert", second, pick=Appetite(greedy=True)):
            await second.until(lambda one: {(number, 29) for number in range(6)} <= set(one.times))
    assert set(first.times + second.times) == {(number, offset) for number in range(6) for offset in range(30)}
    assert set(second.times.values()) == {1}
    await ground.world()


async def test_a_restart_with_the_same_client_id_goes_on_at_once(kafka: Kafka, name: str) -> None:
    ground, seen = Ground(kafka, name, MemorySource({TOPIC: 4})), Seen()
    fill(ground.source, 4, 10)
    async with ground.log() as log:
        anna = await member(log, ground.source, "anna", seen, pick=Appetite(greedy=True)).start()
        await seen.until(lambda one: len(one.messages) == 40)
        await until(lambda: len(anna.partitions) == 4)
        await anna.stop(release=False)
        async with member(log, ground.source, "anna", seen) as again:
            await until(lambda: len(again.partitions) == 4)
        world = await world_of(log)
    assert [one.ended for one in world.tenures()] == [Ended.RECLAIMED, Ended.RELEASED] * 4
    assert set(seen.times.values()) == {1}


async def test_thirty_racers_on_one_partition(kafka: Kafka, name: str) -> None:
    ground = Ground(kafka, name, MemorySource({TOPIC: 1}))
    wins: list[str] = []

    def hooks(client: str) -> ConsumerHooks:
        return ConsumerHooks(on_claimed=lambda _, token: wins.append(f"{client} {token}"))

    async with AsyncExitStack() as stack:
        logs = [await stack.enter_async_context(ground.log()) for _ in range(3)]
        names = [f"c{number}" for number in range(30)]
        members = [
            member(logs[number % 3], ground.source, client, Seen(), hooks=hooks(client))
            for number, client in enumerate(names)
        ]
        await asyncio.gather(*(stack.enter_async_context(one) for one in members))
        await until(lambda: sum(len(one.partitions) for one in members) == 1)
        await asyncio.sleep(2 * INTERVAL_S)  # nobody else may come to own it
        assert sum(len(one.partitions) for one in members) == 1
        assert len(wins) == 1
        world = await world_of(logs[0])
        [tenure] = world.tenures()
        assert wins == [f"{tenure.owner.client} {tenure.token}"]


class LateClaim:
    """A log on which the first claim gets lost on the way, and lands when `let_land` is called."""

    def __init__(self, log: KafkaLog) -> None:
        self._log = log
        self._late: tuple[Message, int] | None = None
        self.lost = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def append(self, message: Message, partition: int, *, expect: Newest | None = None) -> Position:
        if isinstance(message, ClaimingPartition) and not self.lost.is_set():
            self._late = message, partition
            self.lost.set()
            raise OutcomeUnknown("no answer in time")
        return await self._log.append(message, partition, expect=expect)

    async def let_land(self) -> Position:
        assert self._late is not None
        return await self._log.append(*self._late)


async def test_a_claim_that_wins_after_it_was_given_up_is_released(kafka: Kafka, name: str) -> None:
    """The ghost: B claims, B releases, and then A's claim arrives, of which A thinks that it is lost."""
    ground, claimed = Ground(kafka, name, MemorySource({TOPIC: 1})), list[int]()
    async with ground.log() as log, ground.log() as other:
        late = LateClaim(log)
        hooks = ConsumerHooks(on_claimed=lambda _, token: claimed.append(token))
        async with member(late, ground.source, "anna", Seen(), hooks=hooks) as anna:
            await late.lost.wait()
            # Its next claim is a real one. To see the ghost nobody must own the partition, so anna gives it up.
            await until(lambda: anna.partitions != ())
            anna._owned[TopicPartition(TOPIC, 0)].ask_to_end("a test", cool_down=True)
            await until(lambda: anna.partitions == ())
            async with member(other, ground.source, "bert", Seen()) as bert:
                await until(lambda: bert.partitions != ())
            ghost = await late.let_land()
            world = World(INTERVAL_S, keep_history=True)
            async with asyncio.timeout(30):
                while not any(one.token == ghost.offset and one.ended for one in world.tenures()):
                    await catch_up(other, world)
                    await asyncio.sleep(0.05)
            [tenure] = [one for one in world.tenures() if one.token == ghost.offset]
            assert tenure.ended is Ended.RELEASED
            assert tenure.owner == Owner("anna", anna.instance_id)
            assert ghost.offset not in claimed, "nobody served it"
        await world_of(other)


@asynccontextmanager
async def opened(kind: str, ground: Ground, connection: Connection) -> AsyncIterator[CoordinationLog]:
    if kind == "kafka":
        async with ground.log() as log:
            yield log
    else:
        async with open_jetstream_log(connection, ground.name, interval_s=INTERVAL_S) as stream:
            yield stream


@pytest.mark.parametrize("kind", ["kafka", "jetstream"])
@pytest.mark.long("six consumers, and claims that end")
async def test_a_clock_that_is_ten_minutes_off_changes_nothing(
    kafka: Kafka, connection: Connection, name: str, kind: str
) -> None:
    """Log time decides: owners off by ten minutes keep what they own, claimers off by ten minutes take nothing."""
    ground = Ground(kafka, name, MemorySource({TOPIC: 6}))
    fill(ground.source, 6, 10)
    skews = {"early": -600.0, "right": 0.0, "late": 600.0}
    seen = {client: Seen() for client in skews}

    def clock(skew_s: float) -> Callable[[], float]:
        return lambda: time.time() + skew_s

    try:
        async with AsyncExitStack() as stack:
            members: dict[str, Consumer] = {}
            for client, skew_s in skews.items():
                log = await stack.enter_async_context(opened(kind, ground, connection))
                one = member(
                    log, ground.source, client, seen[client], max_claims=2, rebalance=False, wall_clock=clock(skew_s)
                )
                members[client] = await stack.enter_async_context(one)
            await until(lambda: all(len(one.partitions) == 2 for one in members.values()))
            owned = {client: one.partitions for client, one in members.items()}
            hungry = [
                await stack.enter_async_context(
                    member(log, ground.source, f"hungry{skew_s:g}", Seen(), wall_clock=clock(skew_s))
                )
                for skew_s in skews.values()
            ]
            await asyncio.sleep(3 * INTERVAL_S)  # longer than a claim holds without heartbeats
            assert {client: one.partitions for client, one in members.items()} == owned
            assert [one.partitions for one in hungry] == [(), (), ()]
            # What the dead had is taken over, whatever the clocks of the dead and the living.
            await kill(members["late"])
            await until(lambda: sum(len(one.partitions) for one in [*hungry, *members.values()]) == 6)
            world = await world_of(log)
        assert {one.owner.client for one in world.tenures()} >= set(skews)
        taken = [one for one in world.tenures() if one.ended is Ended.TAKEN]
        assert [one.owner.client for one in taken] == ["late", "late"]
    finally:
        if kind == "jetstream":
            await streams.delete(connection, name)


async def test_more_partitions_of_the_log_end_the_consumer(kafka: Kafka, link: KafkaLink, name: str) -> None:
    ground = Ground(kafka, name, MemorySource({TOPIC: 2}), 4)
    async with ground.log() as log:
        consumer = await member(log, ground.source, "anna", Seen()).start()
        await until(lambda: len(consumer.partitions) > 0)
        await add_partitions(link, name, 5)
        with pytest.raises(LogReplaced, match="had 4 partitions and has 5"):
            async with asyncio.timeout(30):
                await consumer.wait()


async def test_many_questions_for_the_end_are_one_request(
    kafka: Kafka, link: KafkaLink, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    send = PartitionOffsets._send

    async def counted(ends: PartitionOffsets, which: Any) -> Any:
        sent.append(1)
        return await send(ends, which)

    async with open_kafka_log(link, name, interval_s=INTERVAL_S, partitions=64) as log:
        await asyncio.gather(*(log.bounds(number) for number in range(64)))  # until all have a leader
        monkeypatch.setattr(PartitionOffsets, "_send", counted)
        await asyncio.gather(*(log._offsets.ask("begins", number) for number in range(64)))
        await asyncio.gather(*(log._offsets.ask("ends", number) for number in range(64)))
    assert len(sent) == 2


# ---- pauses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["kafka", "jetstream", "memory"])
async def test_a_pause_longer_than_the_log_keeps_records_is_refused(
    kafka: Kafka, link: KafkaLink, connection: Connection, name: str, kind: str
) -> None:
    async with AsyncExitStack() as stack:
        log: CoordinationLog
        if kind == "kafka":
            log = await stack.enter_async_context(
                open_kafka_log(link, name, interval_s=INTERVAL_S, partitions=1, retention_s=3600)
            )
        elif kind == "jetstream":
            log = await stack.enter_async_context(
                open_jetstream_log(connection, name, interval_s=INTERVAL_S, max_age_s=3600)
            )
            stack.push_async_callback(streams.delete, connection, name)
        else:
            log = MemoryLog()
            log.retention_s = 3600
        admin = Admin(log, heartbeat_interval_s=INTERVAL_S)
        with pytest.raises(InvalidInput, match="the log keeps records for 1:00:00 only"):
            await admin.release_group(GROUP, datetime.now(UTC) + timedelta(minutes=61))
        assert (await log.bounds(0)).end == log.first_offset
        await admin.release_group(GROUP, datetime.now(UTC) + timedelta(minutes=59))
        assert [pause.group for pause in (await admin.world()).pauses()] == [GROUP]


# ---- without the extra ------------------------------------------------------------------------------


def test_the_room_is_light_and_says_what_is_missing() -> None:
    program = """
import sys
import keylane.kafka, keylane.marshal
assert "confluent_kafka" not in sys.modules
sys.modules["confluent_kafka"] = None
try:
    keylane.kafka.open_kafka
except ImportError as error:
    print(error)
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert told.stdout.splitlines() == [
        f"keylane.kafka.open_kafka needs confluent-kafka, which is not installed: {install_command('kafka')}"
    ]

"""Claims: logs in JetStream and in Kafka, replayed on Spark: the world of one reader, overlaps, gaps and pauses."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from keylane import Connection
from keylane.core.claim_facts import LogRecord
from keylane.core.claim_records import (
    ClaimingPartition,
    Heartbeat,
    Message,
    ReleaseGroup,
    ReleasingPartition,
    Unreadable,
    coordinating_partition,
    decode,
    encode,
)
from keylane.core.world import World
from keylane.errors import CoordinationLogError, InvalidInput, UnsafeLog
from keylane.jetstream import streams
from keylane.marshal.jetstream_log import open_jetstream_log, subject_of
from keylane.server import NatsServer
from keylane.spark.address import Address
from keylane.spark.pipelines import claims, claims_replay
from tests.core.claim_histories import history
from tests.integration.spark.claims_rig import chosen_log, told_by, told_of
from tests.peers.kafka import Kafka

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from keylane.kafka import KafkaLog

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]

INTERVAL_S = 0.1
EVERYTHING = 10_000
START = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
Unique = Callable[..., str]


# ---- JetStream --------------------------------------------------------------------------------------------


@pytest.fixture
async def log(connection: Connection, unique: Unique) -> AsyncIterator[str]:
    """The name of an empty log."""
    name = unique("claims")
    try:
        async with open_jetstream_log(connection, name, interval_s=INTERVAL_S):
            yield name
    finally:
        await streams.delete(connection, name)


async def write(connection: Connection, name: str, dice: random.Random, count: int) -> list[LogRecord]:
    """A random history, at the server's times, read back."""
    for _, _, _, value, _ in history(dice, count, 1, first=1, strays=False):
        message = decode(value)
        subject = f"keylane.marshal.{name}.odd" if isinstance(message, Unreadable) else subject_of(name, message)
        if dice.random() < 0.1:  # on that of another key
            subject = f"keylane.marshal.{name}.claims.g.t.0"
        await connection.nats.request(subject, value, timeout=10)
        if dice.random() < 0.05:  # claims run out by the server's clock
            await asyncio.sleep(dice.choice([0.5, 1.2, 2.5]) * INTERVAL_S)
    async with open_jetstream_log(connection, name, interval_s=INTERVAL_S) as opened:
        return [record async for record in opened.read(0, 1)]


def world_of(records: list[LogRecord]) -> World:
    world = World(INTERVAL_S, first_offset=1, keep_history=True)
    for record in records:
        world.apply(record)
    return world


async def test_the_world_of_one_reader_on_any_prefix(
    connection: Connection, nats_server: NatsServer, log: str, spark: SparkSession
) -> None:
    dice = random.Random(11)  # noqa: S311 - dice of a test
    records = await write(connection, log, dice, 250)
    address = Address(url=nats_server.url)
    when = dice.choice(records[50:200]).time_ms
    earlier = [record for record in records if record.time_ms <= when]
    offset = dice.randrange(20, 230)
    for at, prefix in (
        (str(offset), records[:offset]),
        ((datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=when)).isoformat(), earlier),
    ):
        settings = claims.Settings(log=log, address=address, interval_s=INTERVAL_S, at=at, evidence=EVERYTHING)
        report = await asyncio.to_thread(claims.run, spark, settings)
        world = world_of(prefix)
        assert told_by(report) == told_of(world)
        assert (report.verdict, report.exit_code, report.violations["overlaps"]) == (True, 0, 0)
        assert (report.facts["records"], report.facts["unreadable"]) == (len(prefix), world.unreadable)
        assert sum(report.spans.values()) == len(world.tenures())
        assert report.as_text().startswith(f"{log}: no overlap; ")
        json.dumps(report.as_json())


async def test_what_cannot_be_replayed(
    connection: Connection, nats_server: NatsServer, log: str, spark: SparkSession
) -> None:
    address = Address(url=nats_server.url)

    def look(**more: str | float) -> None:
        given = {"log": log, "address": address, "interval_s": INTERVAL_S} | more
        claims.look(claims.Settings(**given))  # type: ignore[arg-type]

    with pytest.raises(CoordinationLogError, match=r"there is no coordination log 'nowhere': name it with --log"):
        look(log="nowhere")
    with pytest.raises(InvalidInput, match=f"coordination log '{log}' is empty"):
        look()
    await write(connection, log, random.Random(1), 3)  # noqa: S311 - dice of a test
    with pytest.raises(InvalidInput, match=r"at is 4: partition 0 of coordination log .* holds 1 to 3"):
        look(at="4")
    with pytest.raises(UnsafeLog, match="everybody on a log has the same; leave it out"):
        look(interval_s=1e8)
    for more, said in (
        ({"at": "2020-01-01T00:00:00Z"}, "holds no record up to the time in at"),
        ({"start": "3", "at": "2"}, "holds no record from 3 to 2: give another range"),
        ({"group": "nobody"}, "says nothing of group 'nobody'"),
    ):
        settings = claims.Settings(log=log, address=address, interval_s=INTERVAL_S, **more)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match=said):
            claims.run(spark, settings)


# ---- a story ----------------------------------------------------------------------------------------------


def test_spans_gaps_pauses_and_rivals(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Anna releases because of a pause, Bert dies in it, Carl takes his partition, and Bert wakes up."""
    second = int(START.timestamp())
    story: list[tuple[int, Message | None]] = [
        (0, ClaimingPartition("1", "anna", "billing", "orders", 0, 0)),
        (5, Heartbeat("1", "anna", "billing", "orders", 0, 70, 0)),
        (6, ClaimingPartition("1", "bert", "billing", "orders", 0, 0)),
        (7, ClaimingPartition("1", "bert", "billing", "orders", 1, 0)),
        (8, None),
        (20, ReleaseGroup("1", "admin", "billing", second + 100, 0)),
        (21, ReleasingPartition("1", "anna", "billing", "orders", 0, 80, 0)),
        (22, ClaimingPartition("1", "carl", "billing", "orders", 0, 0)),
        (60, ReleaseGroup("1", "admin", "billing", 0, 0)),
        (61, ClaimingPartition("1", "carl", "billing", "orders", 1, 0)),
        (62, Heartbeat("1", "bert", "billing", "orders", 1, 9, 0)),
        (63, ClaimingPartition("2", "anna", "billing", "orders", 0, 0)),
    ]
    records = [
        LogRecord(0, offset, (second + at) * 1000, b"?" if message is None else encode(message))
        for offset, (at, message) in enumerate(story)
    ]
    monkeypatch.setattr(claims_replay, "open_log", chosen_log(records))
    report = claims.run(spark, claims.Settings(interval_s=10, out=str(tmp_path)))
    assert report.spans == {
        "held": 2, "expired": 0, "taken": 1, "released": 0, "paused": 1, "reclaimed": 0, "lapsed": 0,
    }  # fmt: skip
    text = report.as_text()
    for line in (
        "chosen: no overlap; 2 gaps longer than 10 s",
        "log          12 records (0 to 11), 1 of them unreadable and skipped",
        "partitions   2: 2 owned, 0 run out, 0 free",
        "claims       4 won, 1 lost, 1 paused, 0 unsure",
        "gaps         2, the longest 42 s; 0 still are",
        "  billing orders 0: 42 s, anna had it to 2026-05-01T12:00:21.000Z (paused), until anna had it at "
        "2026-05-01T12:01:03.000Z; the group was paused for 39 s of it",
        "  billing: 2026-05-01T12:00:20.000Z to 2026-05-01T12:01:00.000Z (resumed, asked for until "
        "2026-05-01T12:01:40.000Z), by admin, record 5 of partition 0",
        "  billing orders 1: 1 heartbeat of bert (1), record 10, while carl (1) had it",
        "  record 4 of partition 0: unknown type '?'",
        "  billing  anna    1         2      1           21 s",
        f"all tables: {tmp_path / 'claims'}",
    ):
        assert line in text.splitlines(), text
    kept = {place.name: spark.read.parquet(str(place)) for place in (tmp_path / "claims").iterdir()}
    assert {name: table.count() for name, table in kept.items()} == {
        "spans": 4, "gaps": 2, "overlaps": 0, "pauses": 1, "rivals": 1, "world": 2,
    }  # fmt: skip
    row = kept["gaps"].orderBy("partition").selectExpr("gap_seconds", "paused_seconds", "unix_seconds(to_time)").first()
    assert row is not None
    assert tuple(row) == (42.0, 39.0, second + 63)

    later = claims.run(spark, claims.Settings(interval_s=10, start="2026-05-01T12:00:25Z", gap_s=40, evidence=0))
    assert (sum(later.spans.values()), later.facts["gaps"], later.facts["pauses"]) == (3, 1, 1)
    assert later.evidence["gaps"] == []


# ---- Kafka ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broker() -> Iterator[Kafka]:
    with Kafka.start() as running:
        yield running


@pytest.mark.kafka
async def test_a_log_in_kafka_and_two_hashes(broker: Kafka, unique: Unique, spark: SparkSession) -> None:
    """Bert looks for partition 0 where another hash puts it, and finds it free: two owners at once."""
    from keylane.kafka import open_kafka, open_kafka_log  # noqa: PLC0415 - needs confluent-kafka

    name, partitions = unique("claims"), 3
    right = coordinating_partition("orders", 0, partitions)
    wrong = (right + 1) % partitions
    async with open_kafka(broker.bootstrap) as link:
        async with open_kafka_log(link, name, interval_s=10, partitions=partitions) as log:
            await log.append(ClaimingPartition("1", "anna", "billing", "orders", 0, 0), right)
            for number in (1, 2, 3):
                claim = ClaimingPartition("1", "carl", "billing", "orders", number, 0)
                await log.append(claim, coordinating_partition("orders", number, partitions))
            await log.append(Heartbeat("1", "anna", "billing", "orders", 0, 70, 0), right)
            settings = claims.Settings(log=name, kafka=broker.bootstrap, interval_s=10)
            clean = await asyncio.to_thread(claims.run, spark, settings)
            assert (clean.exit_code, clean.facts["keys"], clean.spans["held"]) == (0, 4, 4)
            assert told_by(clean) == told_of(await kafka_world(log))

            await log.append(ClaimingPartition("1", "bert", "billing", "orders", 0, 0), wrong)
            report = await asyncio.to_thread(claims.run, spark, settings)
            assert (report.exit_code, report.violations) == (3, {"overlaps": 1, "misplaced": 1})
            assert told_by(report) == told_of(await kafka_world(log)), "bert owns nothing"
        [found] = report.evidence["overlaps"]
        assert (found["before"]["client"], found["before"]["log_partition"]) == ("anna", right)
        assert (found["after"]["client"], found["after"]["log_partition"]) == ("bert", wrong)
        assert (found["before"]["misplaced"], found["after"]["misplaced"]) == (False, True)
        assert report.as_text().startswith(f"{name}: 1 overlap, 1 record where another hash puts it; ")
        with pytest.raises(InvalidInput, match=r"at is 5, and coordination log .* has 3 partitions, each with"):
            await asyncio.to_thread(claims.look, claims.Settings(log=name, kafka=broker.bootstrap, at="5"))
        with pytest.raises(CoordinationLogError, match="there is no coordination log 'nowhere'"):
            await asyncio.to_thread(claims.look, claims.Settings(log="nowhere", kafka=broker.bootstrap))


async def kafka_world(log: KafkaLog) -> World:
    from keylane.marshal import catch_up  # noqa: PLC0415 - only here

    world = World(10, log.partitions, first_offset=log.first_offset, keep_history=True)
    await catch_up(log, world)
    return world

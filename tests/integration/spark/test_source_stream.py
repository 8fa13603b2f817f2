"""Streaming reads: every message once, in order, across stops, limits and restarts of the server."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import keylane
from keylane.jetstream import consumers
from keylane.server import NatsServer
from keylane.spark.driver.lease import Lease
from tests.integration.spark.source_rig import Ground, ground, numbers
from tests.waiter import until, wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [pytest.mark.spark, pytest.mark.timeout(500)]

Unique = Callable[..., str]


@pytest.fixture
def here(nats_server: NatsServer, spark: SparkSession) -> Iterator[Ground]:
    with ground(nats_server.url, spark) as made:
        yield made


def wait_for(what: Callable[[], object], query: StreamingQuery | None = None) -> None:
    def look() -> object:
        assert query is None or query.exception() is None, f"the query ended: {query.exception()}"
        return what()

    wait_until(look, deadline_s=150)


def at(query: StreamingQuery) -> int:
    """The sequence up to which a query has read."""
    progress = query.lastProgress
    return place(progress["sources"][0]["endOffset"]) if progress else 0


def place(offset: Any) -> int:
    """The sequence of an offset as Spark reports it: as text, or not yet."""
    return int(json.loads(offset)["sequence"]) if offset else 0


def rows_of(query: StreamingQuery) -> list[int]:
    return [one["numInputRows"] for one in query.recentProgress if one["numInputRows"]]


def has_batches(query: StreamingQuery, count: int) -> bool:
    return len(rows_of(query)) >= count


def test_available_now_reads_everything_in_batches_of_the_limit(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("S"), numbered=True)
    here.publish(name, range(250))
    query = here.run(here.stream(name, maxOffsetsPerTrigger=100), tmp_path)
    assert rows_of(query) == [100, 100, 50]
    rows = here.written(tmp_path)
    assert numbers(rows) == list(range(250))
    assert rows == here.read(name).orderBy("sequence").collect()
    here.publish(name, range(250, 260))
    here.run(here.stream(name, maxOffsetsPerTrigger=100), tmp_path)
    assert numbers(here.written(tmp_path)) == list(range(260))
    here.run(here.stream(name), tmp_path)
    assert numbers(here.written(tmp_path)) == list(range(260))


@pytest.mark.long("starts five queries")
def test_stopped_and_restarted_with_other_limits_and_splits(here: Ground, unique: Unique, tmp_path: Path) -> None:
    """Offsets are one number: how a batch is cut may change with every start."""
    chance = random.Random(20)  # noqa: S311 - repeatable
    name = here.make(unique("S"), numbered=True)
    sent = 0
    for _ in range(4):
        more = chance.randrange(50, 150)
        here.publish(name, range(sent, sent + more))
        sent += more
        options: dict[str, str | int] = {"maxOffsetsPerTrigger": chance.randrange(5, 40)}
        if chance.random() < 0.5:
            options["splitBy"] = "sequence"
        if chance.random() < 0.5:
            options["minPartitions"] = chance.randrange(2, 12)
        query = here.start(here.stream(name, **options), tmp_path)
        try:
            wait_for(partial(has_batches, query, 2), query)
        finally:
            query.stop()
    here.run(here.stream(name), tmp_path)
    assert numbers(here.written(tmp_path)) == list(range(sent))


@pytest.mark.long("runs four queries")
def test_bytes_limit_a_batch_roughly(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("S"))
    here.publish(name, range(1000, 1200))
    size = here.api(f"STREAM.INFO.{name}")["state"]["bytes"] // 200
    query = here.run(here.stream(name, maxBytesPerTrigger=size * 50), tmp_path)
    assert rows_of(query) == [50, 50, 50, 50]
    query = here.run(here.stream(name, maxBytesPerTrigger=size * 50, maxOffsetsPerTrigger=80), tmp_path / "b")
    assert rows_of(query) == [50, 50, 50, 50]
    query = here.run(here.stream(name, maxBytesPerTrigger=size * 90, maxOffsetsPerTrigger=80), tmp_path / "c")
    assert rows_of(query) == [80, 80, 40]
    query = here.run(here.stream(name, maxBytesPerTrigger=1, startingOffsets=199), tmp_path / "d")
    assert rows_of(query) == [1, 1]


def test_trigger_once_takes_everything_at_once(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("S"))
    here.publish(name, range(100))
    frame = here.stream(name, maxOffsetsPerTrigger=10)
    writer = frame.writeStream.format("parquet").option("path", str(tmp_path / "rows"))
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(once=True).start()
    assert query.awaitTermination(150)
    assert numbers(here.written(tmp_path)) == list(range(100))


@pytest.mark.long("runs three queries")
def test_starts_by_number_and_time(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("S"))
    here.publish(name, range(1, 21))
    here.run(here.stream(name, startingOffsets=11), tmp_path / "number")
    assert numbers(here.written(tmp_path / "number")) == list(range(11, 21))
    since = datetime.now(UTC).isoformat()
    here.publish(name, range(21, 31))
    here.run(here.stream(name, startingTimestamp=since), tmp_path / "time")
    assert numbers(here.written(tmp_path / "time")) == list(range(21, 31))
    here.run(here.stream(name, startingOffsets=31), tmp_path / "time")
    assert len(here.written(tmp_path / "time")) == 10, "a checkpoint goes before startingOffsets"


@pytest.mark.long("runs three queries")
def test_latest_is_the_first_start_and_stays_it(here: Ground, unique: Unique, tmp_path: Path) -> None:
    """A query that starts at the end and fails before its first commit must not skip what came meanwhile."""
    name = here.make(unique("S"))
    here.publish(name, range(10))
    options = {"startingOffsets": "latest", "queryName": unique("q"), "leaseSeconds": "15"}

    def fail(frame: DataFrame, batch: int) -> None:
        raise ValueError(f"no luck with batch {batch} of {frame}")

    checkpoint = str(tmp_path / "checkpoint")
    writer = here.stream(name, **options).writeStream.foreachBatch(fail).option("checkpointLocation", checkpoint)
    failing = writer.start()
    wait_for(lambda: not failing.isActive)
    assert "no luck with batch 0" in str(failing.exception())
    shutil.rmtree(checkpoint)  # as if it had been killed before it wrote its first offset
    here.publish(name, range(10, 20))
    here.run(here.stream(name, **options), tmp_path)
    assert numbers(here.written(tmp_path)) == list(range(10, 20))
    shutil.rmtree(checkpoint)
    here.run(here.stream(name, **options), tmp_path / "anew")
    assert numbers(here.written(tmp_path / "anew")) == [], "a committed start is forgotten"


def test_a_member_reads_on_while_other_partitions_are_busy(here: Ground, unique: Unique, tmp_path: Path) -> None:
    """Batches without a row are not worth it: the query waits, and still ends up with all of its own."""
    name = here.make(unique("S"), numbered=True)
    here.publish(name, range(7))
    mine = next(row["partition"] for row in here.read(name).collect() if row["key"] == "k1")
    query = here.start(here.stream(name, partitions=mine), tmp_path)
    try:
        wait_for(lambda: at(query) == 7, query)
        batches = len(query.recentProgress)
        here.publish(name, range(100, 120), keys=1000)
        own = [row["partition"] for row in here.read(name, startingOffsets=8).collect()].count(mine)
        time.sleep(2)
        assert len(query.recentProgress) - batches <= own + 1
        here.publish(name, [1])
        wait_for(lambda: at(query) == 28, query)
    finally:
        query.stop()
    wanted = [row["sequence"] for row in here.read(name, partitions=mine).orderBy("sequence").collect()]
    assert [row["sequence"] for row in here.written(tmp_path)] == wanted


@pytest.mark.long("watches an idle query for a while")
def test_an_idle_query_hardly_asks_the_server(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name, named = here.make(unique("S"), numbered=True), unique("q")
    here.publish(name, range(20))
    query = here.start(here.stream(name, queryName=named), tmp_path)
    try:
        wait_for(lambda: at(query) == 20, query)

        async def calls(connection: keylane.Connection) -> tuple[int, float]:
            # what follows the last batch is over when its lag is told
            await until(
                lambda: consumers.info(connection, name, f"spark-{named}"),
                lambda seen: not seen.num_pending,
                deadline_s=60,
            )
            heard = []

            async def hear(message: object) -> None:
                heard.append(message)

            await connection.nats.subscribe("$JS.API.>", cb=hear)
            await connection.nats.subscribe("$KV.>", cb=hear)
            started = time.monotonic()
            await asyncio.sleep(6)
            return len(heard), time.monotonic() - started

        count, seconds = here.call(calls)
        assert 1 <= count <= 2 * seconds
        before = time.monotonic()
        here.publish(name, range(20, 25))
        wait_for(lambda: at(query) == 25, query)
        assert time.monotonic() - before < 20
    finally:
        query.stop()


@pytest.mark.long("runs three queries, one of which waits for a lease")
def test_a_standby_starts_from_the_checkpoint_as_it_is_when_it_takes_over(
    here: Ground, unique: Unique, tmp_path: Path
) -> None:
    """Spark reads its checkpoint only after the source has its lease."""
    name, named = here.make(unique("S")), unique("q")
    here.publish(name, range(10))
    here.run(here.stream(name), tmp_path)
    here.publish(name, range(10, 20))
    shutil.copytree(tmp_path, tmp_path / "ahead")
    here.run(here.stream(name), tmp_path / "ahead")
    here.publish(name, range(20, 25))

    async def hold(connection: keylane.Connection) -> StreamingQuery:
        lease = Lease(connection, named, "a test", 30)
        await lease.take()
        frame = here.stream(name, queryName=named)
        query = await asyncio.to_thread(here.start, frame, tmp_path, available_now=True)
        await asyncio.sleep(3)
        assert query.isActive
        assert query.lastProgress is None
        await asyncio.to_thread(shutil.copytree, tmp_path / "ahead", tmp_path, dirs_exist_ok=True)
        await lease.release()
        return query

    query = here.call(hold)
    try:
        assert query.awaitTermination(150)
        assert query.exception() is None
        assert place(query.recentProgress[0]["sources"][0]["startOffset"]) == 20
    finally:
        query.stop()
    here.call(lambda c: c.api.request("STREAM.PURGE.KV_keylane-spark", {"filter": f"$KV.keylane-spark.*.{named}"}))


@pytest.mark.long("a query through a restart of its server")
def test_the_server_restarts_under_a_query(spark: SparkSession, unique: Unique, tmp_path: Path) -> None:
    with NatsServer.start() as server, ground(server.url, spark) as here:
        name = here.make(unique("S"), numbered=True, storage="file")
        here.publish(name, range(100))
        query = here.start(here.stream(name, maxOffsetsPerTrigger=20), tmp_path)
        try:
            wait_for(lambda: at(query) >= 20, query)
            server.kill()
            server.restart()
            here.publish(name, range(100, 150))
            wait_for(lambda: at(query) == 150, query)
            server.restart()
            here.publish(name, range(150, 160))
            wait_for(lambda: at(query) == 160, query)
        finally:
            query.stop()
        assert numbers(here.written(tmp_path)) == list(range(160))

"""Real queries that acknowledge an elastic group's queue: what is refused, what is purged, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import keylane
import keylane.spark
from keylane import Connection, groups
from keylane.jetstream import Outgoing, StreamConfig, publish_many, streams
from keylane.server import NatsServer
from tests.waiter import until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

MESSAGES = 90
Unique = Callable[..., str]


@dataclass
class Run:
    """A query on the queue that keeps what each batch had, and what the queue still held while it was handled."""

    spark: SparkSession
    url: str
    source: str
    directory: Path
    batches: dict[int, list[int]] = field(default_factory=dict)
    purged_too_early: list[int] = field(default_factory=list)
    fail_in: int | None = None

    @property
    def queue(self) -> str:
        return groups.queue_stream(self.source, "g")

    def start(self, query: str, *, once: bool = True, **options: str) -> StreamingQuery:
        given = {
            "url": self.url,
            "stream": self.source,
            "group": "g",
            "queue": "true",
            "queryName": query,
            "acknowledge": "true",
            "maxOffsetsPerTrigger": "40",
            "leaseSeconds": "9",
        }
        read = self.spark.readStream.format("keylane").options(**(given | options)).load()
        write = read.writeStream.foreachBatch(self._handle).option(
            "checkpointLocation", str(self.directory / f"checkpoint-{query}")
        )
        return (write.trigger(availableNow=True) if once else write.trigger(processingTime="100 milliseconds")).start()

    def _handle(self, batch: DataFrame, number: int) -> None:
        sequences = sorted(row["sequence"] for row in batch.select("sequence").collect())
        left = asyncio.run(self._first_left())
        if sequences and left > sequences[0]:
            self.purged_too_early.append(sequences[0])
        if number == self.fail_in:
            raise RuntimeError("this batch fails")
        self.batches[number] = sequences

    async def _first_left(self) -> int:
        async with await keylane.connect(self.url) as connection:
            return (await streams.state(connection, self.queue)).first_sequence


@pytest.fixture
async def run(
    spark: SparkSession, connection: Connection, nats_server: NatsServer, unique: Unique, tmp_path: Path
) -> AsyncIterator[Run]:
    keylane.spark.register(spark)
    source = unique("ORDERS")
    await streams.create(connection, StreamConfig(name=source, subjects=[f"{source}.*"]))
    await groups.create_elastic(connection, source, "g", partitions=4, partition_by=f"{source}.*", members=["alice"])
    made = Run(spark, nats_server.url, source, tmp_path)
    await publish_many(connection, [Outgoing(f"{source}.{number}") for number in range(MESSAGES)])
    await copied(connection, made, MESSAGES)
    yield made
    for query in spark.streams.active:
        await asyncio.to_thread(query.stop)
    await groups.delete(connection, source, "g")
    await streams.delete(connection, source)


async def held(connection: Connection, run: Run) -> tuple[int, int]:
    """How many messages the queue has, and its last sequence."""
    state = await streams.state(connection, run.queue)
    return state.messages, state.last_sequence


async def copied(connection: Connection, run: Run, count: int) -> None:
    """Wait until the queue has had so many messages."""
    await until(lambda: held(connection, run), lambda seen: seen[1] >= count, deadline_s=30)


async def end_of(query: StreamingQuery) -> str:
    """Wait for the end of a query; returns its error."""

    def wait() -> str:
        from pyspark.errors import StreamingQueryException  # noqa: PLC0415 - optional

        try:
            assert query.awaitTermination(120), "the query goes on and on"
        except StreamingQueryException as error:
            return str(error)
        return ""

    return await asyncio.to_thread(wait)


async def drop_members(connection: Connection, run: Run) -> None:
    await groups.drop_members(connection, run.source, "g", ["alice"])


async def test_a_queue_is_empty_after_a_run_and_never_lost_what_was_not_committed(
    run: Run, connection: Connection, unique: Unique
) -> None:
    name = unique("query")
    refused = await end_of(run.start(name))
    assert "group 'g'" in refused
    assert "has the members alice. Nothing is purged" in refused
    assert (await held(connection, run))[0] == MESSAGES

    await drop_members(connection, run)
    run.fail_in = 1
    assert "this batch fails" in await end_of(run.start(name))
    assert run.batches == {0: list(range(1, 41))}
    assert (await held(connection, run))[0] >= MESSAGES - 40  # batch 0 was committed, nothing else

    run.fail_in = None
    assert await end_of(run.start(name)) == ""
    assert [one for batch in sorted(run.batches) for one in run.batches[batch]] == list(range(1, MESSAGES + 1))
    assert run.purged_too_early == []
    assert (await held(connection, run))[0] == 0


@pytest.mark.long("runs two queries")
async def test_a_second_query_is_refused_and_a_member_that_joins_ends_the_first(
    run: Run, connection: Connection, unique: Unique
) -> None:
    await drop_members(connection, run)
    first, second = unique("first"), unique("second")
    running = run.start(first, once=False)
    async with asyncio.timeout(90):
        while (await held(connection, run))[0]:
            assert running.isActive, running.exception()
            await asyncio.sleep(0.2)
    assert f"query '{first}'" in await end_of(run.start(second))

    await groups.add_members(connection, run.source, "g", ["bob"])
    await publish_many(connection, [Outgoing(f"{run.source}.{number}") for number in range(20)])
    ended = await end_of(running)
    await copied(connection, run, MESSAGES + 20)
    assert "has the members bob. Nothing is purged" in ended
    assert (await held(connection, run))[0] == 20
    assert run.purged_too_early == []


def test_acknowledging_from_the_middle_of_a_queue_is_refused(run: Run, unique: Unique) -> None:
    query = run.start(unique("query"), startingOffsets="50")
    assert "Give startingOffsets=earliest" in asyncio.run(end_of(query))

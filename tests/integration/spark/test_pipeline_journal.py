"""The journal as a DataFrame holds every record once, in a batch and as it is written; what cannot be read is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from keylane import Connection
from keylane.errors import BrokenJournal, InvalidInput, JournalTooNew, NotFound
from keylane.journal import read_journal
from keylane.server import NatsServer
from keylane.spark.address import Address
from keylane.spark.pipelines.journal_frame import RECORD, journal_frame
from keylane.spark.pipelines.spark_jobs import plainly
from tests.integration.spark import journal_rig as rig
from tests.integration.spark.journal_rig import GROUP, Past

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.fixture
async def stream(connection: Connection, unique: Callable[..., str]) -> AsyncIterator[str]:
    async with rig.named(connection, unique("orders")) as name:
        await rig.make_stream(connection, name)
        yield name


@pytest.fixture
def address(nats_server: NatsServer) -> Address:
    return Address(url=nats_server.url)


def small_past() -> Past:
    past = Past.clean(400, 10)
    past.batch_records = 50
    return past


def newer(data: bytes) -> bytes:
    """The batch, as if a later version of the format had been used."""
    return data[:3] + bytes([9]) + data[4:]


def rows_of(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in frame.select(*RECORD.names).collect())


async def in_journal(connection: Connection, stream: str) -> list[tuple[Any, ...]]:
    """The same, read without Spark."""
    return sorted(
        [tuple(getattr(one, name) for name in RECORD.names) async for one in read_journal(connection, stream)]
    )


async def test_every_record_comes_once_with_all_its_fields(
    spark: SparkSession, connection: Connection, address: Address, stream: str
) -> None:
    past = small_past()
    past.twice.add(("b1", 2))
    await rig.write(connection, stream, past.batches(stream))
    read = await asyncio.to_thread(lambda: rows_of(journal_frame(spark, address, stream)))
    assert read == await in_journal(connection, stream)
    assert len(read) == len(past.acts)
    bobs = await asyncio.to_thread(lambda: rows_of(journal_frame(spark, address, stream, GROUP, member="bob")))
    assert bobs == [row for row in read if row[RECORD.names.index("member")] == "bob"] != []
    none = await asyncio.to_thread(lambda: rows_of(journal_frame(spark, address, stream, "another")))
    assert none == []


async def test_what_is_no_batch_ends_the_read_or_is_counted(
    spark: SparkSession, connection: Connection, address: Address, stream: str
) -> None:
    past = small_past()
    batches = past.batches(stream)
    (subject, cut), *whole = batches
    await rig.write(connection, stream, [(subject, cut[:-7]), *whole, (subject, b"nonsense"), (f"{subject}x", cut)])

    def read_strictly() -> None:
        with plainly():
            journal_frame(spark, address, stream).collect()

    with pytest.raises(BrokenJournal, match=r"^sequence \d+ on 'keylane\.journal\.") as raised:
        await asyncio.to_thread(read_strictly)
    assert "\n" not in str(raised.value)

    broken = spark.sparkContext.accumulator(0)
    read = await asyncio.to_thread(lambda: rows_of(journal_frame(spark, address, stream, broken=broken)))
    assert broken.value == 3
    assert len(read) == len(past.acts) - past.batch_records


async def test_a_query_reads_on_from_its_checkpoint_and_passes_over_copies(
    spark: SparkSession, connection: Connection, address: Address, stream: str, tmp_path: Path
) -> None:
    batches = small_past().batches(stream)
    await rig.write(connection, stream, batches[:3])

    def read_on() -> None:
        with plainly():
            query = (
                journal_frame(spark, address, stream, GROUP, streaming=True)
                .writeStream.format("parquet")
                .option("path", str(tmp_path / "rows"))
                .option("checkpointLocation", str(tmp_path / "checkpoint"))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()

    def written() -> list[tuple[Any, ...]]:
        return rows_of(spark.read.parquet(str(tmp_path / "rows")))

    await asyncio.to_thread(read_on)
    first = await asyncio.to_thread(written)
    assert first == await in_journal(connection, stream)
    assert len(first) == 150
    await rig.write(connection, stream, [batches[1], *batches[3:], batches[4]])
    await asyncio.to_thread(read_on)
    everything = await asyncio.to_thread(written)
    assert everything == await in_journal(connection, stream)
    assert len(everything) == 400

    await rig.write(connection, stream, [(batches[0][0], newer(batches[0][1]))])
    with pytest.raises(JournalTooNew, match="a journal batch of version 9: this keylane reads version 1") as raised:
        await asyncio.to_thread(read_on)
    assert "\n" not in str(raised.value)
    assert await asyncio.to_thread(written) == everything, "what was read before stays, and nothing half-read is added"


async def test_a_newer_version_ends_the_read_even_where_broken_batches_are_counted(
    spark: SparkSession, connection: Connection, address: Address, stream: str
) -> None:
    [(subject, data), *_] = small_past().batches(stream)
    await rig.write(connection, stream, [(subject, newer(data))])
    broken = spark.sparkContext.accumulator(0)

    def read() -> None:
        with plainly():
            journal_frame(spark, address, stream, broken=broken).collect()

    with pytest.raises(JournalTooNew, match="version 9"):
        await asyncio.to_thread(read)
    assert broken.value == 0


async def test_no_journal_and_a_member_without_a_group(
    spark: SparkSession, connection: Connection, address: Address, stream: str
) -> None:
    with pytest.raises(NotFound, match=f"stream '{stream}' has no journal"):
        await asyncio.to_thread(journal_frame, spark, address, stream)
    with pytest.raises(InvalidInput, match="member is 'bob' without a group"):
        await asyncio.to_thread(lambda: journal_frame(spark, address, stream, member="bob"))

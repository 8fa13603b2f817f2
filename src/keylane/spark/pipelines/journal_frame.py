"""The journal of a stream as a DataFrame: one row per record, in a batch or as it is written.

Each message of the journal's stream is a batch of records. Executors open it and hand its columns on as Arrow. A batch
that was stored twice comes once. One that cannot be read ends the read, unless it is to be counted instead; one of a
newer version always does, because all that newer members did would be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from keylane.core.journal_record import JournalBatch, open_batch
from keylane.errors import BrokenJournal, InvalidInput, NotFound
from keylane.journal import open_stored
from keylane.journal.arrow import to_arrow
from keylane.journal.stream import journal_stream, journal_subject
from keylane.spark.address import Address
from keylane.spark.pipelines.stream_range import SUBJECT_IS_KEY, address_options
from keylane.spark.stream_state import StreamSnapshot, state_of
from keylane.spark.tasks import schema_of

if TYPE_CHECKING:
    from pyspark.accumulators import Accumulator
    from pyspark.sql import DataFrame, SparkSession

BATCHES_A_TASK = 500
"""A batch holds a thousand records mostly: a task reads half a million."""
_MOST_TASKS = 1000

_RECORD_DDL = (
    "stream STRING, `group` STRING, member STRING, instance STRING, pin STRING, revision BIGINT, sequence BIGINT, "
    "source_sequence BIGINT, key STRING, partition INT, delivered INT, started_ns BIGINT, ended_ns BIGINT, "
    "outcome STRING, writer STRING, batch BIGINT, row INT"
)
RECORD = schema_of(_RECORD_DDL)
"""A journal record in types that Spark has. Numbers of the format are unsigned; none of them comes near the limit."""
JOURNAL_DDL = f"{_RECORD_DDL}, journal_sequence BIGINT, sample DOUBLE"
_ROW = schema_of(JOURNAL_DDL)
_HEAD_DDL = (
    "data BINARY, journal_sequence BIGINT, writer STRING, `group` STRING, member STRING, instance STRING, batch BIGINT"
)
_HEAD = schema_of(_HEAD_DDL)


class StoredBatch(NamedTuple):
    """A message of the journal's stream."""

    sequence: int
    subject: str
    data: bytes


def journal_frame(
    spark: SparkSession,
    address: Address,
    stream: str,
    group: str | None = None,
    *,
    member: str | None = None,
    bounds: Mapping[str, str] | None = None,
    streaming: bool = False,
    broken: Accumulator[int] | None = None,
) -> DataFrame:
    """The records that the members of a stream's groups wrote.

    `bounds` are options of the reader for the journal's own stream (`startingTimestamp`, `endingOffsets`, …). The
    columns are those of `JournalRecord`, and `journal_sequence` and `sample` of the batch. With `broken`, messages that
    are no whole batch are counted there and left out; without, the first one raises `BrokenJournal` in its task.
    `NotFound`: the stream has no journal. `JournalTooNew` comes from a task too.

    Copies are found by their heads, which costs one exchange of the batches as they are; a streaming query keeps the
    number of every batch that it has seen.

        frame = journal_frame(spark, Address(url="nats://127.0.0.1:4222"), "ORDERS", "billing")
        frame.groupBy("member", "outcome").count().show()
    """
    raw = raw_batches(spark, address, stream, group, member=member, bounds=bounds, streaming=streaming)
    heads = raw.mapInArrow(_HeadReader(broken), _HEAD_DDL)
    once = heads.dropDuplicates(["writer", "group", "member", "instance", "batch"])
    return once.select("data", "journal_sequence").mapInArrow(_read_rows, JOURNAL_DDL)


def raw_batches(
    spark: SparkSession,
    address: Address,
    stream: str,
    group: str | None = None,
    *,
    member: str | None = None,
    bounds: Mapping[str, str] | None = None,
    streaming: bool = False,
) -> DataFrame:
    """The messages of the journal's stream: `subject`, `data` and `sequence`."""
    from keylane.spark import register  # noqa: PLC0415 - needs pyspark, which is optional and slow

    if member is not None and group is None:
        raise InvalidInput(f"member is {member!r} without a group: members have their names within a group")
    state = journal_state(address, stream)
    register(spark)
    tasks = max(spark.sparkContext.defaultParallelism, -(-(state.last - state.first + 1) // BATCHES_A_TASK))
    options = address_options(address) | {
        "stream": state.stream,
        "filter": journal_subject(stream, group, member),
        "splitBy": "sequence",
        "minPartitions": str(min(tasks, _MOST_TASKS)),
        **SUBJECT_IS_KEY,
    }
    reader = spark.readStream if streaming else spark.read
    return reader.format("keylane").options(**options | dict(bounds or {})).load().select("subject", "data", "sequence")


def journal_state(address: Address, stream: str) -> StreamSnapshot:
    """The journal's stream as it is now; `NotFound` says how a journal comes to be."""
    try:
        return state_of(address, journal_stream(stream))
    except NotFound as error:
        raise NotFound(
            404,
            error.err_code,
            f"stream {stream!r} has no journal ({journal_stream(stream)!r} does not exist): let its members write one, "
            "with join(…, journal=Journal(connection, stream=…))",
            doing="look for the journal",
        ) from error


# ---- in the executors -----------------------------------------------------------------------------------


def stored_in(table: pa.RecordBatch) -> Iterator[StoredBatch]:
    """The messages of a piece, one by one: a journal's are large."""
    for row in range(table.num_rows):
        yield StoredBatch(*(table.column(name)[row].as_py() for name in ("sequence", "subject", "data")))


def records_of(batch: JournalBatch) -> list[pa.Array]:
    """The columns of `RECORD`."""
    table = to_arrow(batch)
    return [table.column(field.name).cast(field.type) for field in RECORD]


class _HeadReader:
    """Adds the columns that distinguish a batch from its copy."""

    def __init__(self, broken: Accumulator[int] | None) -> None:
        self._broken = broken

    def __call__(self, tables: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for table in tables:
            for stored in stored_in(table):
                try:
                    head = open_stored(*stored).head
                except BrokenJournal:
                    if self._broken is None:
                        raise
                    self._broken.add(1)
                    continue
                row = (stored.data, stored.sequence, head.writer, head.group, head.member, head.instance, head.batch)
                arrays = [pa.array([value], field.type) for value, field in zip(row, _HEAD, strict=True)]
                yield pa.RecordBatch.from_arrays(arrays, schema=_HEAD)


def _read_rows(tables: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for table in tables:
        for row in range(table.num_rows):
            batch = open_batch(table.column("data")[row].as_py())
            sequence = pa.repeat(pa.scalar(table.column("journal_sequence")[row].as_py(), pa.int64()), batch.records)
            sample = pa.repeat(pa.scalar(batch.head.sample, pa.float64()), batch.records)
            yield pa.RecordBatch.from_arrays([*records_of(batch), sequence, sample], schema=_ROW)

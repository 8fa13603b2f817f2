"""What an audit reads, as tables on disk: the messages of the range, the journal, and what was still to be handled.

The server is read once; everything that is computed afterwards reads Parquet. Messages come without their payloads.
Batch and streaming runs fill the same tables, so one set of rules judges both.

The order of the cuts makes them agree: first the end of the stream is fixed, then what is pending is looked at, then,
after a while in which members flush, the end of the journal. A message that was handled before the look has its record
by then; one that was not is pending.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from keylane.core.journal_record import JournalBatch
from keylane.core.subjects import matches
from keylane.errors import BrokenJournal, NotFound
from keylane.groups import ElasticConfig, StaticConfig, queue_stream
from keylane.groups.consumer_spec import consumer_name
from keylane.jetstream import Connection, consumers, streams
from keylane.journal import open_stored
from keylane.spark.address import Address
from keylane.spark.driver.layout import GroupRecord
from keylane.spark.pipelines.journal_frame import RECORD, raw_batches, records_of, stored_in
from keylane.spark.pipelines.stream_range import StreamRange, address_options, load
from keylane.spark.retry import ask
from keylane.spark.tasks import schema_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


MESSAGES_DDL = "sequence BIGINT, key STRING, partition INT, key_crc BIGINT, stored TIMESTAMP"
_MESSAGES = schema_of(MESSAGES_DDL)
_HEAD_DDL = (
    "kind STRING, journal_sequence BIGINT, writer STRING, member STRING, instance STRING, batch BIGINT, "
    "dropped BIGINT, sample DOUBLE, records BIGINT"
)
_HEAD = schema_of(_HEAD_DDL)
JOURNAL_DDL = (
    f"{_HEAD_DDL}, row INT, pin STRING, revision BIGINT, sequence BIGINT, source_sequence BIGINT, key STRING, "
    "partition INT, delivered INT, started_ns BIGINT, ended_ns BIGINT, outcome STRING"
)
_JOURNAL = schema_of(JOURNAL_DDL)
_OF_RECORD = _JOURNAL.names[len(_HEAD) :]
"""`kind`: `head` (one for each stored batch), `record`, or `broken` (a message that is not a whole batch)."""

PENDING_DDL = "sequence BIGINT"


# ---- the group, as the server knows it ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PendingWork:
    """What had not been handled when it was looked at."""

    floors: dict[int, int] | None = None
    """Static groups: the sequence up to which everything of a partition was acked."""
    queued: int = 0
    """Elastic groups: how many messages were in the queue."""
    lag: int = 0
    """Elastic groups: how many messages the server had not copied into the queue yet."""


def look_at_pending(address: Address, stream: str, group: str, config: GroupRecord) -> PendingWork:
    """What the consumers of a group say, or the queue of an elastic one."""

    async def look(connection: Connection) -> PendingWork:
        if isinstance(config, ElasticConfig):
            wire = await streams.info_json(connection, queue_stream(stream, group))
            lag = sum(one.get("lag", 0) for one in wire.get("sources") or ())
            return PendingWork(queued=wire["state"]["messages"], lag=lag)
        floors = dict.fromkeys(range(config.partitions), 0)
        for member in config.plan.members:
            try:
                info = await consumers.info(connection, stream, consumer_name(config, group, member))
            except NotFound:
                continue
            floors |= dict.fromkeys(config.plan.partitions_of(member), info.ack_floor)
        return PendingWork(floors=floors)

    return ask(address, look, f"look at what group {group!r} has to do")


# ---- filling the tables ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AuditSource:
    """What is read and where it goes."""

    address: Address
    stream: str
    group: str
    config: GroupRecord
    directory: Path

    def path(self, table: str) -> str:
        return str(self.directory / table)


def write_messages(spark: SparkSession, where: AuditSource, part: StreamRange) -> None:
    """The messages of a range that the group is to handle."""
    frame = load(spark, _of_stream(where), part)
    placed(frame, where.config).write.mode("overwrite").parquet(where.path("messages"))


def append_messages(spark: SparkSession, where: AuditSource, start: dict[str, str], last: int | None) -> None:
    """All that came since the last time, up to now."""
    from keylane.spark import register  # noqa: PLC0415 - needs pyspark, which is optional and slow

    register(spark)
    frame = spark.readStream.format("keylane").options(**_of_stream(where) | start).load()
    if last is not None:
        frame = frame.where(f"sequence <= {last}")
    _append(placed(frame, where.config), where, "messages")


def pending_of(spark: SparkSession, where: AuditSource) -> PendingWork:
    """What the group had still to do. Messages in an elastic group's queue become a table, by sequence in the stream.

    An empty queue that nothing is on the way to stays empty as far as this range goes, and needs no reading.
    """
    found = look_at_pending(where.address, where.stream, where.group, where.config)
    table = Path(where.path("pending"))
    shutil.rmtree(table, ignore_errors=True)
    if found.queued or found.lag:
        _write_queue(spark, where)
    else:
        table.mkdir()
    return found


def _write_queue(spark: SparkSession, where: AuditSource) -> None:
    options = address_options(where.address) | {
        "stream": where.stream,
        "group": where.group,
        "queue": "true",
        "splitBy": "sequence",
        "includeData": "false",
        "failOnDataLoss": "false",
    }
    queue = load(spark, options).selectExpr("source_sequence AS sequence").where("sequence IS NOT NULL")
    queue.write.parquet(where.path("pending"))


def write_journal(spark: SparkSession, where: AuditSource, part: StreamRange, last: int) -> None:
    """The group's journal up to the sequence `last` of its stream, as far as it is about the range."""
    raw = raw_batches(spark, where.address, where.stream, where.group, bounds={"endingOffsets": str(last)})
    read = raw.mapInArrow(JournalReader(part.after + 1, part.upto), JOURNAL_DDL)
    read.write.mode("overwrite").parquet(where.path("journal"))


def append_journal(spark: SparkSession, where: AuditSource, first: int, last: int | None) -> None:
    """What was written into the journal since the last time, up to now."""
    raw = raw_batches(spark, where.address, where.stream, where.group, streaming=True)
    _append(raw.mapInArrow(JournalReader(first, last), JOURNAL_DDL), where, "journal")


def _of_stream(where: AuditSource) -> dict[str, str]:
    options = {"stream": where.stream, "splitBy": "sequence", "includeData": "false"}
    if isinstance(where.config, ElasticConfig):
        options["group"] = where.group
    return address_options(where.address) | options


def _append(frame: DataFrame, where: AuditSource, table: str) -> None:
    query = (
        frame.writeStream.format("parquet")
        .option("path", where.path(table))
        .option("checkpointLocation", where.path(f"checkpoint/{table}"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


# ---- in the executors -----------------------------------------------------------------------------------


def placed(frame: DataFrame, config: GroupRecord) -> DataFrame:
    """The messages that the group is to handle, with their keys."""
    return frame.select("subject", "partition", "key", "sequence", "timestamp").mapInArrow(
        GroupSelection(config), MESSAGES_DDL
    )


class GroupSelection:
    """Tells which messages a group is to handle, and their keys as its members see them.

    The rows of an elastic group are read with its name, so they have its keys and partitions already.
    """

    def __init__(self, config: GroupRecord) -> None:
        self.partitions = config.partitions
        self.is_elastic = isinstance(config, ElasticConfig)
        self.filters: tuple[str, ...] = ()
        if isinstance(config, StaticConfig) and config.dialect == "present":
            self.filters = config.filters  # members of the old dialect take whole partitions

    def __call__(self, tables: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        place = lru_cache(maxsize=65_536)(self.place)
        for table in tables:
            subjects, partitions, keys = (table.column(name).to_pylist() for name in ("subject", "partition", "key"))
            places = list(map(place, subjects, partitions, keys))
            wanted = table.filter(pa.array([one is not None for one in places], pa.bool_()))
            found = [one for one in places if one is not None]
            arrays = [
                wanted.column("sequence"),
                pa.array([one[0] for one in found], pa.string()),
                pa.array([one[1] for one in found], pa.int32()),
                pa.array([one[2] for one in found], pa.int64()),
                wanted.column("timestamp").cast(_MESSAGES.field("stored").type),
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=_MESSAGES)

    def place(self, subject: str, partition: int | None, key: str | None) -> tuple[str, int, int] | None:
        """Key, partition and the key's CRC; None if the group does not want it."""
        if self.is_elastic:
            if key is None or partition is None:
                return None
        elif partition is None or partition >= self.partitions or not self._selects(subject):
            return None
        elif key is None:
            key = str(partition)
        return key, partition, crc32(key.encode("utf-8", "surrogateescape"))

    def _selects(self, subject: str) -> bool:
        return not self.filters or any(matches(one, subject) for one in self.filters)


class JournalReader:
    """Opens the batches of a journal; keeps the records of messages `first` to `last`."""

    def __init__(self, first: int, last: int | None) -> None:
        self.first = first
        self.last = last

    def __call__(self, tables: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for table in tables:
            for stored in stored_in(table):
                try:
                    batch = open_stored(*stored)
                except BrokenJournal:
                    yield _told("broken", stored.sequence, None, 1)
                    continue
                yield _told("head", stored.sequence, batch, 1)
                yield self._records(stored.sequence, batch)

    def _records(self, sequence: int, batch: JournalBatch) -> pa.RecordBatch:
        sources = batch.column("source_sequence")
        least, most = min(sources, default=0), max(sources, default=0)
        told = _told("record", sequence, batch, batch.records)
        if least >= self.first and (self.last is None or most <= self.last):
            return told
        last = self.last if self.last is not None else most
        return told.filter(pa.array([self.first <= one <= last for one in sources], pa.bool_()))


def _told(kind: str, sequence: int, batch: JournalBatch | None, rows: int) -> pa.RecordBatch:
    head = batch.head if batch is not None else None
    values = (
        kind,
        sequence,
        *(getattr(head, name, None) for name in ("writer", "member", "instance", "batch", "dropped", "sample")),
        batch.records if batch is not None else None,
    )
    same = [pa.repeat(pa.scalar(value, field.type), rows) for value, field in zip(values, _HEAD, strict=True)]
    if kind == "record":
        assert batch is not None
        columns = dict(zip(RECORD.names, records_of(batch), strict=True))
        own = [columns[name] for name in _OF_RECORD]
    else:
        own = [pa.nulls(rows, RECORD.field(name).type) for name in _OF_RECORD]
    return pa.RecordBatch.from_arrays([*same, *own], schema=_JOURNAL)

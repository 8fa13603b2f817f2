"""The lake: a stream as a table, by partition and day, every sequence exactly once.

In Delta Lake (`delta_table`), where a streaming run and a backfill may write at the same time and any reader of Delta
tables reads; or in plain Parquet files by Spark's own file sink, with its limits (docs/pipelines/lake.md).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from keylane.core.names import check_stream_name
from keylane.errors import InvalidInput, KeylaneError
from keylane.spark.options import read_options
from keylane.spark.pipelines.delta_table import DeltaTable, Identity, Span, TakenOver, Totals, WriteClaim, check_session
from keylane.spark.pipelines.delta_table import delta_settings as _delta_settings
from keylane.spark.pipelines.interface import PipelineReport, PipelineSettings
from keylane.spark.pipelines.spark_jobs import Say, plainly, say_nothing
from keylane.spark.pipelines.stream_range import StreamRange, address_options, bounds, find_range, load

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryProgress
    from pyspark.sql.streaming.readwriter import DataStreamWriter

FORMATS = ("delta", "parquet")
_SELECTING = {
    "group": "group",
    "filter": "filter",
    "partitions": "partitions",
    "key_filter": "keyFilter",
    "key_wildcards": "keyWildcards",
    "key_partitions": "keyPartitions",
}
_DAY = "date_from_unix_date(cast(floor(unix_micros(timestamp) / 86400000000) AS INT))"
"""In UTC, whatever the session's time zone is."""
_POLL_S = 0.2
_BOUNDARY_S = 30.0
"""How long a first streaming run may take from its claim on the backfills' side to the boundary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(PipelineSettings):
    """What to write where. With `end` it is a batch over a range; else it goes on until it is stopped."""

    stream: str
    table: str
    """A directory, on any file system that Spark knows."""
    format: str = "delta"
    jars: str | None = None
    """Delta Lake's jars, with commas. None: the session has them, or Spark fetches them."""
    group: str | None = None
    """Whose keys the messages have."""
    queue: bool = False
    """Write the queue of the elastic group instead of the stream."""
    filter: str | None = None
    partitions: str | None = None
    key_filter: str | None = None
    key_wildcards: str | None = None
    key_partitions: int | None = None
    headers: bool = False
    start: str = "earliest"
    """Counts for a new table, and for a batch; a streaming run goes on where the last one was."""
    end: str | None = None
    available_now: bool = False
    """Streaming, until everything is written that was there at the beginning."""
    max_rows: int = 500_000
    """In one batch: what is written between two commits."""
    interval_s: float = 10.0
    """From one batch to the next, when streaming: longer makes fewer and larger files."""
    allow_loss: bool = False
    """Go on where the server deleted messages before they were written; else that ends the run."""
    compact: bool = False
    """Merge small files: at the end, and in a streaming run now and then."""
    compact_every: int = 20
    """Batches of a streaming run from one merging to the next."""
    only_compact: bool = False
    vacuum_hours: float | None = None
    """At the end, delete files that no version of the table of the last hours needs."""

    def __post_init__(self) -> None:
        check_stream_name(self.stream)
        if self.format == "iceberg":
            raise InvalidInput("format is 'iceberg': no Iceberg fits Spark 4.2 or newer yet; give delta or parquet")
        if self.format not in FORMATS:
            raise InvalidInput(f"format is {self.format!r}: give {' or '.join(FORMATS)}")
        if self.format == "parquet" and (self.end or self.compact or self.only_compact or self.vacuum_hours):
            raise InvalidInput(
                "format is 'parquet', which has no transactions: a backfill, compact and vacuum need format delta"
            )
        if self.end is not None and self.available_now:
            raise InvalidInput("end and available_now are both given: a batch has an end by itself; give one of them")
        if not self.max_rows >= 1:
            raise InvalidInput(f"max_rows is {self.max_rows}: give 1 or more")
        if not 0 <= self.interval_s <= 86_400:
            raise InvalidInput(f"interval_s is {self.interval_s:g}: give 0 to 86400 seconds")
        if not self.compact_every >= 1:
            raise InvalidInput(f"compact_every is {self.compact_every}: give 1 or more")
        if self.vacuum_hours is not None and not 0 <= self.vacuum_hours <= 87_600:
            raise InvalidInput(
                f"vacuum_hours is {self.vacuum_hours:g}: give 0 to 87600 hours; Delta keeps 168 by itself"
            )
        read_options(self.options)

    @property
    def path(self) -> str:
        """As Spark takes it: a path of this machine is made absolute, an address is left alone."""
        return self.table if "://" in self.table else str(Path(self.table).expanduser().absolute())

    @property
    def checkpoint(self) -> str:
        """Below the table: readers and VACUUM pass over what begins with `_`."""
        return f"{self.path}/_keylane/checkpoint"

    @property
    def selection(self) -> dict[str, str]:
        """The reader's options that say which messages and columns."""
        chosen = {name: getattr(self, field) for field, name in _SELECTING.items()}
        chosen["queue"] = "true" if self.queue else None
        told = {name: str(value) for name, value in chosen.items() if value is not None}
        return {"stream": self.stream} | told | ({"includeHeaders": "true"} if self.headers else {})

    @property
    def reading(self) -> dict[str, str]:
        """The reader's options without a range."""
        loss = {"failOnDataLoss": "false"} if self.allow_loss else {}
        return address_options(self.address) | self.selection | loss

    @property
    def options(self) -> dict[str, str]:
        return self.reading | bounds(self.start, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(PipelineReport):
    """What a run did, and what the table holds after it."""

    PIPELINE: ClassVar[str] = "lake"
    VERDICTS: ClassVar[tuple[str, str]] = ("written", "not written")
    FIELDS: ClassVar[tuple[str, ...]] = (
        *("table", "format", "stream", "rows", "batches", "stopped", "rows_in_table", "first", "last"),
        *("streamed_after", "left_to_streaming", "files", "bytes", "files_merged", "files_made"),
    )

    table: str
    format: str
    stream: str
    rows: int
    batches: int
    stopped: bool
    """It was told to stop; there may be more to write."""
    rows_in_table: int
    first: int
    last: int
    """The lowest and the highest sequence in the table; 0 where it is empty."""
    streamed_after: int | None
    """The streaming run writes what is above this sequence, backfills what is not. None: there was none yet."""
    left_to_streaming: int = 0
    """So many sequences of a backfill's range are above that."""
    files: int
    bytes: int
    files_merged: int = 0
    files_made: int = 0

    @property
    def verdict(self) -> bool:
        return True

    def as_text(self) -> str:
        rate = self.rows / self.seconds if self.seconds else 0.0
        held = f"{self.first:,} to {self.last:,}" if self.rows_in_table else "none"
        lines = [
            f"table           {self.table} ({self.format})",
            f"written         {self.rows:,} rows in {self.batches:,} batches, {self.seconds:.1f} s ({rate:,.0f}/s)",
            f"in the table    {self.rows_in_table:,} rows in {self.files:,} files, {self.bytes / 1e6:,.1f} MB",
            f"sequences       {held} of {self.stream}",
        ]
        if self.left_to_streaming:
            left = f"{self.left_to_streaming:,} sequences above {self.streamed_after:,}"
            lines.append(f"left out        {left}: the streaming run writes them")
        if self.files_merged:
            lines.append(f"compaction      {self.files_merged:,} files became {self.files_made:,}")
        return "\n".join(lines)


@dataclass(slots=True)
class _Run:
    """One run on its way."""

    spark: SparkSession
    settings: Settings
    say: Say
    stop: threading.Event
    began_s: float = field(default_factory=time.monotonic)
    rows: int = 0
    batches: int = 0
    left: int = 0
    files_merged: int = 0
    files_made: int = 0
    failure: BaseException | None = None
    busy: threading.Lock = field(default_factory=threading.Lock)

    def wrote(self, rows: int, upto: int) -> None:
        self.rows += rows
        self.batches += 1
        rate = self.rows / (time.monotonic() - self.began_s)
        self.say(f"{self.rows:,} rows so far, {rate:,.0f}/s; up to sequence {upto:,}")

    def compact(self, table: DeltaTable) -> None:
        merged, made = table.optimize()
        self.files_merged += merged
        self.files_made += made

    def report(self, stream: str, held: Totals, size: tuple[int, int], after: int | None, *, stopped: bool) -> Report:
        return Report(
            table=self.settings.path,
            format=self.settings.format,
            stream=stream,
            rows=self.rows,
            batches=self.batches,
            seconds=time.monotonic() - self.began_s,
            stopped=stopped,
            rows_in_table=held.rows,
            first=held.first,
            last=held.last,
            streamed_after=after,
            left_to_streaming=self.left,
            files=size[0],
            bytes=size[1],
            files_merged=self.files_merged,
            files_made=self.files_made,
        )


def session_settings(settings: Settings, spark: str) -> dict[str, str]:
    """The settings of a session that this run needs, for a version of Spark."""
    return _delta_settings(spark, settings.jars) if settings.format == "delta" else {}


def run(
    spark: SparkSession, settings: Settings, say: Say = say_nothing, *, stop: threading.Event | None = None
) -> Report:
    """Fill the table. Setting `stop` ends a run between two steps; the next run goes on there."""
    running = _Run(spark, settings, say, stop or threading.Event())
    spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    with plainly():
        return _run_parquet(running) if settings.format == "parquet" else _run_delta(running)


def _by_day(rows: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as everybody writes it

    return rows.withColumn("day", F.expr(_DAY)).sortWithinPartitions("partition", "day", "sequence")


# ---- Delta Lake ---------------------------------------------------------------------------------------


def _run_delta(running: _Run) -> Report:
    settings = running.settings
    check_session(running.spark)
    table = DeltaTable(running.spark, settings.path)
    stopped = False
    if not settings.only_compact:
        found = find_range(settings.options)
        # A queue is known by the name of its stream.
        selection = {name: value for name, value in settings.selection.items() if name not in ("stream", "queue")}
        rows = load(running.spark, settings.options)
        table.open(Identity(found.stream, found.created, selection), _by_day(rows).schema.toDDL())
        stopped = (_fill if settings.end is not None else _follow)(running, table, found)
    elif not table.exists:
        raise InvalidInput(f"there is no table {settings.path!r}: nothing can be merged")
    if (settings.compact or settings.only_compact) and not stopped:
        running.compact(table)
    if settings.vacuum_hours is not None and not stopped:
        table.vacuum(settings.vacuum_hours)
    stream = table.read_property("keylane.stream") or settings.stream
    return running.report(stream, table.totals(), table.size(), table.boundary, stopped=stopped)


def _fill(running: _Run, table: DeltaTable, part: StreamRange) -> bool:
    """A range of the stream, as far as no streaming run writes it. Returns whether it was stopped."""
    after = part.after
    while True:
        claim, boundary = table.claim("backfill"), table.boundary
        upto = part.upto if boundary is None else max(part.after, min(part.upto, boundary))
        running.left = part.upto - upto
        try:
            for step in _steps((after, upto), running.settings.max_rows):
                if running.stop.is_set():
                    return True
                _add(running, table, claim, StreamRange(part.stream, part.created, *step))
                after = step[1]
        except TakenOver:
            if boundary is not None or not _began_streaming(table):
                raise  # it was another backfill
            running.say("a streaming run began on this table: the backfill goes on below it")
        else:
            return False


def _add(running: _Run, table: DeltaTable, claim: WriteClaim, part: StreamRange) -> None:
    """What the table does not hold of a range: the claim makes sure that nobody else adds some of it meanwhile."""
    span = (part.after, part.upto)
    rows = load(running.spark, running.settings.options, part)
    held = table.count(span)
    if held:
        rows = rows.join(table.sequences(span), "sequence", "left_anti")
    claim.append(_by_day(rows))
    running.wrote(table.count(span) - held, part.upto)


def _began_streaming(table: DeltaTable) -> bool:
    deadline = time.monotonic() + _BOUNDARY_S
    while time.monotonic() < deadline:
        if table.boundary is not None:
            return True
        time.sleep(_POLL_S)
    return False


def _steps(span: Span, size: int) -> Iterator[Span]:
    for after in range(span[0], span[1], size):
        yield after, min(after + size, span[1])


def _follow(running: _Run, table: DeltaTable, part: StreamRange) -> bool:
    """What comes, until it is stopped. Returns whether it was."""
    claim = table.claim("stream")
    if table.boundary is None:
        table.claim("backfill")  # one that is under way looks for the boundary before it writes again
        table.set_boundary(max(part.after, table.totals().last))
    boundary = table.boundary
    assert boundary is not None
    first = upto = max(boundary, table.totals().last)

    def write(batch: DataFrame, number: int) -> None:
        nonlocal upto
        with running.busy:
            try:
                claim.append(_by_day(batch.where(batch.sequence > upto)))  # a repeated batch may be in the table
                added = table.spark.read.format("delta").load(table.path).where(f"sequence > {upto}")
                rows, last = added.selectExpr("count(*)", "max(sequence)").collect()[0]
                upto = max(upto, last or 0)
                running.wrote(rows, upto)
                if running.settings.compact and (number + 1) % running.settings.compact_every == 0:
                    running.compact(table)
            except KeylaneError as error:
                running.failure = error
                raise

    stopped = _stream(running, upto, lambda rows: rows.writeStream.foreachBatch(write))
    running.rows = table.count((first, table.totals().last))  # also of a batch that was stopped behind its commit
    return stopped


# ---- Spark's own file sink ----------------------------------------------------------------------------


def _run_parquet(running: _Run) -> Report:
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as everybody writes it

    path = running.settings.path
    found = find_range(running.settings.options)
    before, _ = _held(running)
    stopped = _stream(
        running,
        found.after,
        lambda rows: (
            rows.withColumn("day", F.expr(_DAY))
            .writeStream.partitionBy("partition", "day")
            .format("parquet")
            .option("path", path)
        ),
    )
    held, size = _held(running)
    running.rows = held.rows - before.rows
    return running.report(found.stream, held, size, None, stopped=stopped)


def _held(running: _Run) -> tuple[Totals, tuple[int, int]]:
    from pyspark.errors import AnalysisException  # noqa: PLC0415 - optional, and slow to import

    try:
        frame = running.spark.read.parquet(running.settings.path)
    except AnalysisException as error:
        if error.getCondition() not in ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA"):
            raise
        return Totals(0, 0, 0), (0, 0)  # nothing was written yet
    rows, first, last = frame.selectExpr("count(*)", "min(sequence)", "max(sequence)").collect()[0]
    sizes = frame.select("_metadata.file_path", "_metadata.file_size").distinct().collect()
    return Totals(rows, first or 0, last or 0), (len(sizes), sum(one["file_size"] for one in sizes))


# ---- a streaming query --------------------------------------------------------------------------------


def _stream(running: _Run, after: int, into: Callable[[DataFrame], DataStreamWriter]) -> bool:
    """A query from its checkpoint, else from behind `after`, into what `into` makes. Returns whether it was stopped."""
    from keylane.spark import register  # noqa: PLC0415 - needs pyspark

    settings = running.settings
    register(running.spark)
    rows = (
        running.spark.readStream.format("keylane")
        .options(**settings.reading, startingOffsets=str(after + 1), maxOffsetsPerTrigger=str(settings.max_rows))
        .load()
    )
    writer = into(rows).option("checkpointLocation", settings.checkpoint)
    interval = f"{round(settings.interval_s * 1000)} milliseconds"
    query = (
        writer.trigger(availableNow=True) if settings.available_now else writer.trigger(processingTime=interval)
    ).start()
    seen = -1
    try:
        while True:
            ended = query.awaitTermination(_POLL_S)  # type: ignore[arg-type]  # it takes fractions
            for progress in query.recentProgress if settings.format == "parquet" else ():
                if progress.batchId > seen and progress.numInputRows:
                    seen = progress.batchId
                    running.wrote(progress.numInputRows, _sequence(progress))
            if ended:
                return False
            if running.stop.is_set():
                query.stop()
                return True
    except Exception:
        if running.failure is not None:
            raise running.failure from None
        raise
    finally:
        with running.busy:  # a batch that is just being committed ends first
            pass


def _sequence(progress: StreamingQueryProgress) -> int:
    """How far a batch of the file sink read."""
    return int(json.loads(progress.sources[0].endOffset)["sequence"])

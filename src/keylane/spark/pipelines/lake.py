"""The lake: a stream as Parquet files, by partition and day, every sequence exactly once.

A streaming query (Structured Streaming, its checkpoint inside the table) or a batch fills a `Table`. Each batch is a
range of sequences; what the table covers already is left out before a row is written, so a run that is repeated, a
backfill that overlaps, or a lost checkpoint adds nothing twice.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keylane.core.names import check_stream_name
from keylane.core.sequence_ranges import Coverage, Span
from keylane.errors import InvalidInput, KeylaneError, LakeBroken
from keylane.spark.options import read_options
from keylane.spark.pipelines.interface import PipelineReport, PipelineSettings
from keylane.spark.pipelines.spark_jobs import Say, plainly, say_nothing
from keylane.spark.pipelines.stream_range import StreamRange, address_options, bounds, find_range, load
from keylane.spark.pipelines.table import Identity, Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

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
NO_PARTITION = -1
"""Of a message without a partition. Some readers cannot tell the type of a column whose every value is null."""
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(PipelineSettings):
    """What to write where. With `end` it is a batch over a range; else it goes on until it is stopped."""

    stream: str
    table: str
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
    target_mb: int = 128
    """The size that compaction aims at."""

    def __post_init__(self) -> None:
        check_stream_name(self.stream)
        if "://" in self.table and not self.table.startswith("file://"):
            raise InvalidInput(
                f"table is {self.table!r}: a table lies in a directory that driver and executors see under one path "
                "and that can rename in one step; give a path"
            )
        if self.end is not None and self.available_now:
            raise InvalidInput("end and available_now are both given: a batch has an end by itself; give one of them")
        if not self.max_rows >= 1:
            raise InvalidInput(f"max_rows is {self.max_rows}: give 1 or more")
        if not 0 <= self.interval_s <= 86_400:
            raise InvalidInput(f"interval_s is {self.interval_s:g}: give 0 to 86400 seconds")
        if not self.compact_every >= 1:
            raise InvalidInput(f"compact_every is {self.compact_every}: give 1 or more")
        if not self.target_mb >= 1:
            raise InvalidInput(f"target_mb is {self.target_mb}: give 1 or more")
        read_options(self.options)

    @property
    def path(self) -> Path:
        return Path(self.table.removeprefix("file://")).expanduser()

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

    table: str
    stream: str
    rows: int
    batches: int
    seconds: float
    stopped: bool
    """It was told to stop; there may be more to write."""
    rows_in_table: int
    covered: Coverage
    files: int
    bytes: int
    files_merged: int = 0
    files_made: int = 0

    @property
    def verdict(self) -> bool:
        return True

    def as_json(self) -> dict[str, Any]:
        return {
            "pipeline": "lake",
            "table": self.table,
            "stream": self.stream,
            "rows": self.rows,
            "batches": self.batches,
            "seconds": round(self.seconds, 3),
            "stopped": self.stopped,
            "rows_in_table": self.rows_in_table,
            "covered": [[after + 1, upto] for after, upto in self.covered.spans],
            "files": self.files,
            "bytes": self.bytes,
            "files_merged": self.files_merged,
            "files_made": self.files_made,
        }

    def as_text(self) -> str:
        rate = self.rows / self.seconds if self.seconds else 0.0
        spans = [f"{after + 1:,} to {upto:,}" for after, upto in self.covered.spans]
        covered = ", ".join(spans[:5]) + (f" and {len(spans) - 5} more ranges" if len(spans) > 5 else "")
        lines = [
            f"table           {self.table}",
            f"written         {self.rows:,} rows in {self.batches:,} batches, {self.seconds:.1f} s ({rate:,.0f}/s)",
            f"in the table    {self.rows_in_table:,} rows in {self.files:,} files, {self.bytes / 1e6:,.1f} MB",
            f"sequences       {covered or 'none'} of {self.stream}",
        ]
        if self.files_merged:
            lines.append(f"compaction      {self.files_merged:,} files became {self.files_made:,}")
        return "\n".join(lines)


@dataclass(slots=True)
class _Run:
    """One run on its way."""

    spark: SparkSession
    settings: Settings
    table: Table
    say: Say
    began_s: float = field(default_factory=time.monotonic)
    rows: int = 0
    batches: int = 0
    files_merged: int = 0
    files_made: int = 0
    failure: BaseException | None = None
    busy: threading.Lock = field(default_factory=threading.Lock)

    def commit(self, batch: DataFrame, span: Span) -> None:
        """Write what the table lacks of a range, and make it part of the table."""
        from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as everybody writes it

        while missing := (covered := self.table.state().coverage).missing(span):
            rows = batch
            if missing != (span,):
                pieces = [(F.col("sequence") > after) & (F.col("sequence") <= upto) for after, upto in missing]
                rows = batch.where(reduce(or_, pieces))
            with self.table.staging() as staging:
                _write(rows, staging)
                count = _count(staging)
                if self.table.add(staging, span, count, seen=covered) is None:
                    continue  # another run wrote some of it meanwhile: leave that out
            self.rows += count
            self.batches += 1
            rate = self.rows / (time.monotonic() - self.began_s)
            self.say(f"{self.rows:,} rows so far, {rate:,.0f}/s; up to sequence {span[1]:,}")
            return

    def compact(self) -> None:
        from keylane.spark.pipelines.compaction import compact  # noqa: PLC0415 - needs pyarrow

        done = compact(self.spark, self.table, target_bytes=self.settings.target_mb * 1_000_000, say=self.say)
        self.files_merged += done.merged
        self.files_made += done.made

    def report(self, *, stopped: bool) -> Report:
        with self.table.locked():
            files = self.table.files()
        state = self.table.state()
        return Report(
            table=str(self.table.path),
            stream=state.identity.stream,
            rows=self.rows,
            batches=self.batches,
            seconds=time.monotonic() - self.began_s,
            stopped=stopped,
            rows_in_table=state.rows,
            covered=state.coverage,
            files=len(files),
            bytes=sum(one.bytes for one in files),
            files_merged=self.files_merged,
            files_made=self.files_made,
        )


def run(
    spark: SparkSession, settings: Settings, say: Say = say_nothing, *, stop: threading.Event | None = None
) -> Report:
    """Fill the table. Setting `stop` ends a run between two steps; the next run goes on there."""
    table = Table(settings.path)
    stop = stop or threading.Event()
    if settings.only_compact:
        table.state()
        running = _Run(spark, settings, table, say)
        with plainly():
            running.compact()
        return running.report(stopped=False)
    found = find_range(settings.options)
    # A queue is known by the name of its stream.
    table.open(
        Identity(
            found.stream, found.created, {k: v for k, v in settings.selection.items() if k not in ("stream", "queue")}
        )
    )
    table.clear()
    running = _Run(spark, settings, table, say)
    work = _fill if settings.end is not None else _follow
    with plainly():
        stopped = work(running, found, stop)
        if settings.compact and not stopped:
            running.compact()
    return running.report(stopped=stopped)


def read_lake(spark: SparkSession, path: str) -> DataFrame:
    """The table's rows as of now, whole batches only.

    `spark.read.parquet(path)` gives the same rows, except that it may see a part of the batch that is just being
    moved into place.
    """
    table = Table(Path(path.removeprefix("file://")).expanduser())
    table.state()
    with table.locked():
        files = [str(table.path / one.path) for one in table.files()]
    if not files:
        raise InvalidInput(f"table {str(table.path)!r} has no rows yet: there is nothing to read")
    return spark.read.option("basePath", str(table.path)).parquet(*files)


# ---- a batch ------------------------------------------------------------------------------------------


def _fill(running: _Run, part: StreamRange, stop: threading.Event) -> bool:
    """A range of the stream, in steps. Returns whether it was stopped."""
    covered = running.table.state().coverage
    for span in covered.missing((part.after, part.upto)):
        for step in _steps(span, running.settings.max_rows):
            if stop.is_set():
                return True
            rows = load(running.spark, running.settings.options, StreamRange(part.stream, part.created, *step))
            running.commit(rows, step)
    return False


def _steps(span: Span, size: int) -> Iterator[Span]:
    for after in range(span[0], span[1], size):
        yield after, min(after + size, span[1])


# ---- streaming ----------------------------------------------------------------------------------------


def _follow(running: _Run, part: StreamRange, stop: threading.Event) -> bool:
    """What comes, until it is stopped. Returns whether it was."""
    table = running.table
    state = table.state()
    if state.start is None:
        missing = state.coverage.missing((part.after, max(part.upto, state.coverage.last) + 1))
        state = table.begin(missing[0][0])
    assert state.start is not None
    query = _start(running, state.start)
    try:
        while not query.awaitTermination(_POLL_S):  # type: ignore[arg-type]  # it takes fractions
            if stop.is_set():
                query.stop()
                return True
    except Exception:
        if running.failure is not None:
            raise running.failure from None
        raise
    finally:
        with running.busy:  # a batch that is just being committed ends first
            pass
    return False


def _start(running: _Run, start: int) -> StreamingQuery:
    from keylane.spark import register  # noqa: PLC0415 - needs pyspark

    settings, checkpoint = running.settings, running.table.checkpoint
    register(running.spark)
    rows = (
        running.spark.readStream.format("keylane")
        .options(**settings.reading, startingOffsets=str(start + 1), maxOffsetsPerTrigger=str(settings.max_rows))
        .load()
    )

    def write(batch: DataFrame, number: int) -> None:
        with running.busy:
            try:
                running.commit(batch, _span(checkpoint, number, start))
                if settings.compact and (number + 1) % settings.compact_every == 0:
                    running.compact()
            except KeylaneError as error:
                running.failure = error
                raise

    writer = rows.writeStream.foreachBatch(write).option("checkpointLocation", str(checkpoint))
    if settings.available_now:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{round(settings.interval_s * 1000)} milliseconds").start()


def _span(checkpoint: Path, number: int, start: int) -> Span:
    """The range of a batch: Spark writes its end down before the batch begins."""
    return _end_of(checkpoint, number - 1) if number else start, _end_of(checkpoint, number)


def _end_of(checkpoint: Path, number: int) -> int:
    path = checkpoint / "offsets" / str(number)
    try:
        return int(json.loads(path.read_text(encoding="utf-8").splitlines()[-1])["sequence"])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise LakeBroken(
            f"batch {number} of the checkpoint cannot be read from {str(path)!r} ({error!r}): remove the directory "
            f"{str(checkpoint)!r}; the table knows what it holds, and the query begins anew without doubling a row"
        ) from error


# ---- files --------------------------------------------------------------------------------------------


def _write(rows: DataFrame, staging: Path) -> None:
    """Parquet files by partition and day, each in order of the sequence."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as everybody writes it

    rows.sparkSession.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    (
        rows.withColumns({"day": F.expr(_DAY), "partition": F.coalesce("partition", F.lit(NO_PARTITION))})
        .sortWithinPartitions("partition", "day", "sequence")
        .write.partitionBy("partition", "day")
        .parquet(str(staging))
    )


def _count(staging: Path) -> int:
    import pyarrow.parquet as pq  # type: ignore[import-untyped]  # noqa: PLC0415 - it has no types; loaded when used

    return sum(pq.read_metadata(path).num_rows for path in staging.glob("partition=*/day=*/*.parquet"))

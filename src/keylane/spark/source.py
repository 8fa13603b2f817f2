"""The data source as Spark sees it: `format("keylane")`.

Spark makes these objects again and again, in short-lived planning processes and inside executors. So they hold options
only; what needs the server is imported and made when the first call needs it, in the one process that serves the query.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    Filter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from keylane.errors import InvalidInput
from keylane.spark.options import ReadOptions, read_options
from keylane.spark.tasks import arrow_schema, ddl

if TYPE_CHECKING:
    from keylane.spark.driver.filter_pushdown import PushedFilters
    from keylane.spark.driver.query import Query
    from keylane.spark.driver.source_stream import SourceStream

_PUSHDOWN_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"


class KeylaneSource(DataSource):
    """JetStream streams as tables: docs/spark.md has every option.

    >>> keylane.spark.register(spark)
    >>> spark.read.format("keylane").option("stream", "ORDERS").load()
    >>> spark.readStream.format("keylane").option("stream", "ORDERS").option("group", "billing").load()
    """

    @classmethod
    def name(cls) -> str:
        return "keylane"

    def schema(self) -> str:
        return ddl(with_headers=read_options(self.options).with_headers)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = read_options(self.options, "batch")
        check_schema(schema, options)
        return FilteredBatchReader(options) if _pushes_filters() else BatchReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        options = read_options(self.options, "streaming")
        check_schema(schema, options)
        return StreamReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from keylane.spark.sink.writers import batch_writer  # noqa: PLC0415 - a reader never needs it

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        from keylane.spark.sink.writers import stream_writer  # noqa: PLC0415 - a reader never needs it

        return stream_writer(self.options, schema, overwrite)


class BatchReader(DataSourceReader):
    """One read of a range of the stream."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options

    def partitions(self) -> list[InputPartition]:
        from keylane.spark.driver.batch_plan import plan_batch  # noqa: PLC0415 - see above

        return list(plan_batch(self.options))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self.options, partition)


class FilteredBatchReader(BatchReader):
    """A batch read that lets the server apply filters where it can.

    Spark refuses a reader with `pushFilters` unless `spark.sql.python.filterPushdown.enabled` is true.
    """

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options)
        self._source: SourceStream | None = None
        self._pushed: PushedFilters | None = None

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        from keylane.spark.driver.filter_pushdown import push_filters  # noqa: PLC0415 - see above
        from keylane.spark.driver.source_stream import SourceStream  # noqa: PLC0415 - see above

        self._source = SourceStream(self.options)
        self._pushed, given_back = push_filters(filters, self._source.layout)
        return given_back

    def partitions(self) -> list[InputPartition]:
        from keylane.spark.driver.batch_plan import plan_batch  # noqa: PLC0415 - see above

        return list(plan_batch(self.options, self._source, self._pushed))


def _pushes_filters() -> bool:
    """Whether this process is the one in which Spark asks for it: no other is told the setting."""
    started = getattr(sys.modules["__main__"], "__spec__", None)
    return _PUSHDOWN_WORKER in sys.modules or (started is not None and started.name == _PUSHDOWN_WORKER)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The source of one streaming query."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self._query: Query | None = None

    @property
    def query(self) -> Query:
        from keylane.spark.driver.query import Query  # noqa: PLC0415 - see above

        if self._query is None:
            self._query = Query(self.options)
        return self._query

    # Spark calls one of these two first, before it reads its checkpoint: a standby waits in it.

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        self.query.begin()
        if self.options.max_offsets is not None:
            return ReadMaxRows(self.options.max_offsets)
        if self.options.max_bytes is not None:
            return ReadMaxBytes(self.options.max_bytes)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self.query.begin()
        self.query.aim()

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return self.query.initial().to_wire()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return self.query.latest(start, limited=not isinstance(limit, ReadAllAvailable)).to_wire()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        newest = self.query.newest_seen
        return newest.to_wire() if newest is not None else None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return list(self.query.splits(start, end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self.options, partition)

    def commit(self, end: dict[str, Any]) -> None:
        self.query.commit(end)

    def stop(self) -> None:
        if self._query is not None:
            self._query.end()


def check_schema(schema: StructType, options: ReadOptions) -> None:
    """Refuse a schema of the user's own: the columns are fixed."""
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415 - slow, and only needed here

    ours = arrow_schema(with_headers=options.with_headers)
    theirs = to_arrow_schema(schema, timezone="UTC")
    if not theirs.equals(ours):
        raise InvalidInput(
            f"the schema given to the reader is {schema.simpleString()}, and the columns of format('keylane') are "
            f"{ddl(with_headers=options.with_headers)}: leave .schema() out and select or cast the columns you want"
        )


def _read(options: ReadOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    from keylane.spark.executor.split_reader import read_watched  # noqa: PLC0415 - see above
    from keylane.spark.tasks import Split  # noqa: PLC0415 - see above

    if not isinstance(partition, Split):  # Spark's stand-in where nothing was planned
        return iter(())
    return read_watched(partition, fatal=options.fail_on_data_loss)

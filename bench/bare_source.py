"""A streaming source that does nothing: one row for each batch, made in the reader, and offsets from memory.

What a batch of it costs is what Spark's Python sources cost at least.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from keylane.spark.tasks import arrow_schema, ddl


class BareSource(DataSource):
    """`option("batches", N)`: how many batches of one row there are."""

    @classmethod
    def name(cls) -> str:
        return "bare"

    def schema(self) -> str:
        return ddl(with_headers=False)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        return BareReader(int(self.options["batches"]))


class BareReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, batches: int) -> None:
        self._batches = batches

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return ReadMaxRows(1)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        pass

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return {"at": 0}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return {"at": min(self._batches, start["at"] + 1)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [InputPartition(end["at"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pylist(
            [{"subject": "x", "sequence": partition.value}], schema=arrow_schema(with_headers=False)
        )

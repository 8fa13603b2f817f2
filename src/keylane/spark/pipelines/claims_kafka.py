"""A coordination log in a Kafka topic, as rows: each task reads its part with the log's own adapter.

What is secret stays in the properties file: the path travels to the executors, and each reads it for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from keylane.core.claim_facts import LogRecord
from keylane.errors import NoSuchTopic
from keylane.kafka.client import KafkaAddress, open_kafka, read_properties
from keylane.kafka.log import KafkaLog, open_kafka_log
from keylane.kafka.topic import DEFAULT_TOPIC, check_topic_name, describe
from keylane.marshal.log import Bounds
from keylane.spark.pipelines.claims_log import no_such_log
from keylane.spark.pipelines.claims_replay import ROWS, ROWS_DDL

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_OFFSETS_A_PART = 50_000
"""A part is held in memory by the task that reads it."""
_PARTS_DDL = "place INT, log_partition INT, first BIGINT, stop BIGINT"


@dataclass(frozen=True, slots=True)
class _Where:
    """Which topic. Travels to the executors."""

    kafka: str | None
    config: str | None
    name: str
    interval_s: float

    @property
    def address(self) -> KafkaAddress:
        if self.config is not None:
            return read_properties(Path(self.config), self.kafka)
        return KafkaAddress(self.kafka or "")

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[KafkaLog]:
        """The log, which is never made here."""
        async with open_kafka(self.address) as link:
            try:
                await describe(link, self.name)
            except NoSuchTopic as error:
                raise no_such_log(self.name) from error
            async with open_kafka_log(link, self.name, interval_s=self.interval_s) as log:
                yield log


class KafkaRows:
    """A log in a topic."""

    first_offset = KafkaLog.first_offset
    has_holes = True

    def __init__(self, kafka: str | None, config: str | None, name: str | None, interval_s: float) -> None:
        self.name = check_topic_name(name or DEFAULT_TOPIC)
        self._where = _Where(kafka, config, self.name, interval_s)
        with ThreadPoolExecutor(1) as thread:  # where a notebook calls, a loop may be running already
            self.bounds: Mapping[int, Bounds] = thread.submit(asyncio.run, self._look()).result()
        self.partitions = len(self.bounds)

    async def _look(self) -> dict[int, Bounds]:
        async with self._where.opened() as log:
            found = await asyncio.gather(*(log.bounds(number) for number in range(log.partitions)))
        return dict(enumerate(found))

    def rows(self, spark: SparkSession, stops: Mapping[int, int]) -> DataFrame:
        parts = [
            (number, first, min(first + _OFFSETS_A_PART, stop))
            for number, stop in stops.items()
            for first in range(self.bounds[number].first, stop, _OFFSETS_A_PART)
        ]
        planned = spark.createDataFrame([(place, *part) for place, part in enumerate(parts)], _PARTS_DDL)
        return planned.repartitionById(len(parts), "place").mapInArrow(_PartReader(self._where), ROWS_DDL)


@dataclass(frozen=True, slots=True)
class _PartReader:
    where: _Where

    def __call__(self, tables: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for table in tables:
            for row in table.to_pylist():
                records = asyncio.run(self._read(row["log_partition"], row["first"], row["stop"]))
                columns = zip(*records, strict=True) if records else ((),) * len(ROWS)
                arrays = [pa.array(column, field.type) for column, field in zip(columns, ROWS, strict=True)]
                yield pa.RecordBatch.from_arrays(arrays, schema=ROWS)

    async def _read(self, number: int, first: int, stop: int) -> list[LogRecord]:
        found: list[LogRecord] = []
        async with self.where.opened() as log:
            async for record in log.read(number, first):
                if record.offset >= stop:
                    break
                found.append(record)
        return found

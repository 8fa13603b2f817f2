"""Two sinks to compare with: one that awaits every publish, as sinks written by hand do, and one that does nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceWriter, WriterCommitMessage
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from pyarrow import RecordBatch  # type: ignore[import-untyped]  # it has no types
    from pyspark.sql import Row


class AwaitingSink(DataSource):
    """nats-py, one publish after the other, with an id for each."""

    @classmethod
    def name(cls) -> str:
        return "awaiting"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return _AwaitingWriter(self.options["url"])


class _AwaitingWriter(DataSourceWriter):
    def __init__(self, url: str) -> None:
        self.url = url

    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        import nats  # noqa: PLC0415 - in the worker
        from pyspark import TaskContext  # noqa: PLC0415 - in the worker

        task = TaskContext.get()
        assert task is not None
        partition = task.partitionId()

        async def publish_all() -> None:
            client = await nats.connect(self.url)
            stream = client.jetstream()
            for number, row in enumerate(iterator):
                await stream.publish(
                    row.subject, bytes(row.data), headers={"Nats-Msg-Id": f"awaiting:{partition}:{number}"}
                )
            await client.close()

        asyncio.run(publish_all())
        return WriterCommitMessage()


class IdleSink(DataSource):
    """Takes Arrow batches and drops them: the most that any Python sink can reach."""

    @classmethod
    def name(cls) -> str:
        return "idle"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return _IdleWriter()


class _IdleWriter(DataSourceArrowWriter):
    def write(self, iterator: Iterator[RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()

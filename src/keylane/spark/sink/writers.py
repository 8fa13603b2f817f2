"""The writers of `format("keylane")`: what Spark calls on the driver and in its tasks.

Spark makes a writer on the driver for every write and every micro-batch, pickles it to the tasks, and makes another one
to commit. So everything is checked here, by the driver, before a task starts; and what a task does is in `writing`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from keylane.errors import InvalidInput, WriteFailed
from keylane.spark.query_records import is_written, mark_written
from keylane.spark.sink.row_ids import IdScope, short
from keylane.spark.sink.target import look_at_target
from keylane.spark.sink.task_writer import write_batches
from keylane.spark.tasks import MicroBatch, Target, TaskDone
from keylane.spark.write_options import WriteOptions, check_columns, write_options

_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
    """The writer of `df.write.format("keylane")`. Checks everything, on the driver; raises `InvalidInput`."""
    if overwrite:
        raise InvalidInput("mode 'overwrite': a stream is only appended to; use .mode('append'), and purge it yourself")
    checked = write_options(options, streaming=False)
    _check_schema(schema, checked)
    return BatchWriter(checked, look_at_target(checked), checked.id_prefix or secrets.token_urlsafe(9))


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
    """The writer of `df.writeStream.format("keylane")`. Checks everything, on the driver; raises `InvalidInput`."""
    if overwrite:
        raise InvalidInput("output mode 'complete': a stream is only appended to; use .outputMode('append')")
    checked = write_options(options, streaming=True)
    _check_schema(schema, checked)
    return StreamWriter(checked, look_at_target(checked))


def _check_schema(schema: StructType, options: WriteOptions) -> None:
    check_columns([(field.name, field.dataType.simpleString()) for field in schema.fields], options.subject)


class BatchWriter(DataSourceArrowWriter):
    """One write. Its tasks, and all their attempts, make the same ids."""

    def __init__(self, options: WriteOptions, target: Target, run: str) -> None:
        self.options = options
        self.target = target
        self.run = run

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        partition = _task().partitionId()
        written = write_batches(self.options, self.target, IdScope(self.run, self.run, partition), iterator)
        return TaskDone(written.rows, written.dead_letters)


class StreamWriter(DataSourceStreamArrowWriter):
    """One micro-batch of a streaming query."""

    def __init__(self, options: WriteOptions, target: Target) -> None:
        self.options = options
        self.target = target

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task = _task()
        query_id, number = task.getLocalProperty(_QUERY_ID), task.getLocalProperty(_BATCH_ID)
        if not query_id or not number:
            raise WriteFailed("Spark did not give the query's id and the batch's number: keylane needs Spark 4.3")
        batch = MicroBatch(query_id, int(number))
        name = self.options.query_name
        if name is not None and is_written(self.options.address, name, self.target.stream, batch):
            return TaskDone(0, 0, batch)
        scope = IdScope(
            scope=self.options.id_prefix or name or short(query_id),
            run=f"{short(query_id)}:{batch.number}",
            partition=task.partitionId(),
        )
        written = write_batches(self.options, self.target, scope, iterator, group=name or "spark")
        return TaskDone(written.rows, written.dead_letters, batch)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """All tasks are done. Spark writes its own commit after this, and repeats the batch if it cannot."""
        name = self.options.query_name
        batch = next((one.batch for one in messages if isinstance(one, TaskDone) and one.batch is not None), None)
        if name is None or batch is None:
            return
        assert batch.number == batchId
        mark_written(self.options.address, name, self.target.stream, batch, replicas=self.target.replicas)


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "Spark calls this in a task"
    return task

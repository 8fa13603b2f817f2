"""The writers of `format("keylane")`: what Spark calls on the driver and in its tasks.

Spark makes a writer on the driver for every write and every micro-batch, pickles it to the tasks, and makes another one
to commit. So everything is checked here, by the driver, before a task starts, the stream included; what a task does is
in `task_writer`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from keylane.errors import InvalidInput, KeylaneError, NotFound, WriteFailed
from keylane.jetstream import Connection, Version, naming_missing, streams, supports
from keylane.spark.options import WriteOptions, check_columns, write_options
from keylane.spark.query_records import is_written, mark_written
from keylane.spark.retry import ask
from keylane.spark.sink.row_ids import IdScope, short
from keylane.spark.sink.task_writer import write_batches
from keylane.spark.tasks import MicroBatch, PublishMethod, Target, TaskDone

_log = logging.getLogger("keylane.spark")

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
        return write_batches(self.options, self.target, IdScope(self.run, self.run, partition), iterator)


class StreamWriter(DataSourceStreamArrowWriter):
    """One micro-batch of a streaming query."""

    def __init__(self, options: WriteOptions, target: Target) -> None:
        self.options = options
        self.target = target

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task = _task()
        query_id, number = task.getLocalProperty(_QUERY_ID), task.getLocalProperty(_BATCH_ID)
        if not query_id or not number:
            raise WriteFailed("Spark did not give the query's id and the batch's number: keylane needs Spark 4.2")
        batch = MicroBatch(query_id, int(number))
        name = self.options.query_name
        if name is not None and is_written(self.options.address, name, self.target.stream, batch):
            return TaskDone(0, 0, batch)
        scope = IdScope(
            scope=self.options.id_prefix or name or short(query_id),
            run=f"{short(query_id)}:{batch.number}",
            partition=task.partitionId(),
        )
        return replace(write_batches(self.options, self.target, scope, iterator, group=name or "spark"), batch=batch)

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


# ---- the stream that takes the rows ------------------------------------------------------------------------------


SHORT_WINDOW_S = 120.0
_SERVER_DEFAULT_WINDOW_NS = 120_000_000_000

_warned: set[str] = set()
"""Every micro-batch looks at the stream."""


def look_at_target(options: WriteOptions) -> Target:
    """Ask the server for the stream, on the driver; raises `InvalidInput` where it cannot take the rows."""

    async def look(connection: Connection) -> tuple[dict[str, Any], Version]:
        async with naming_missing(connection):
            answer = await streams.info_json(connection, options.stream)
        return answer["config"], connection.server_version

    try:
        config, version = ask(options.address, look, f"look at stream {options.stream!r}")
    except KeylaneError as error:
        missing = error if isinstance(error, NotFound) else error.__cause__
        if not isinstance(missing, NotFound):
            raise
        raise InvalidInput(f"{missing}. Create it, or correct option 'stream'") from error
    target = target_of(config, version, options)
    if target.window_s < SHORT_WINDOW_S and target.stream not in _warned:
        _warned.add(target.stream)
        _log.warning(
            "stream %r remembers a message id for %g s only: what a task writes again after that is stored twice; "
            "raise its duplicate_window",
            target.stream,
            target.window_s,
        )
    return target


def target_of(config: dict[str, Any], version: Version, options: WriteOptions) -> Target:
    """The target in a stream's configuration; raises `InvalidInput` where it cannot take the rows."""
    name, subjects = config["name"], tuple(config.get("subjects") or ())
    if config.get("mirror") or not subjects:
        raise InvalidInput(
            f"stream {name!r} copies other streams and takes no subjects: write to the one that it copies"
        )
    if config.get("no_ack"):
        raise InvalidInput(f"stream {name!r} has no_ack: nothing written to it is confirmed; update it without no_ack")
    if config.get("sealed"):
        raise InvalidInput(f"stream {name!r} is sealed and takes nothing any more: write to another one")
    atomic = bool(config.get("allow_atomic")) and supports(version, "atomic_batch")
    if options.atomic == "true" and not atomic:
        raise InvalidInput(
            f"option 'atomic' is true, and stream {name!r} takes no atomic batches: update it with allow_atomic "
            "(nats-server 2.12 or newer), or give auto"
        )
    largest = int(config.get("max_msg_size", -1))
    target = Target(
        stream=name,
        subjects=subjects,
        max_message_bytes=largest if largest >= 0 else None,
        replicas=int(config.get("num_replicas") or 1),
        window_s=int(config.get("duplicate_window") or _SERVER_DEFAULT_WINDOW_NS) / 1e9,
        way=_way(config, version, options, atomic=atomic),
    )
    if options.subject is not None and not target.takes(options.subject):
        raise InvalidInput(
            f"option 'subject' is {options.subject!r}, which stream {name!r} does not take: its subjects are "
            f"{', '.join(subjects)}"
        )
    return target


def _way(config: dict[str, Any], version: Version, options: WriteOptions, *, atomic: bool) -> PublishMethod:
    if options.atomic == "true":
        return "atomic"
    if config.get("allow_batched") and supports(version, "fast_ingest"):
        return "ingest"
    return "atomic" if atomic and options.atomic == "auto" else "lanes"

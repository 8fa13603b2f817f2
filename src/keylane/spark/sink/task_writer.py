"""The work of a writing task: takes Arrow batches, publishes their rows, returns when each is stored or given up.

Owns the order of things within a task. `row_ids` gives rows their ids, `row_encoding` their form, `row_publisher` and
`batch_publisher` publish them. Rows that can never be published become dead letters of the stream
(docs/dead-letters.md), where that is wanted. Needs no Spark.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Iterable, Iterator

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from keylane.core.subjects import shown
from keylane.dead_letters import Unpublished, put_unpublished
from keylane.errors import RowRejected
from keylane.jetstream import Connection, parse_headers
from keylane.spark.options import WriteOptions
from keylane.spark.retry import ask
from keylane.spark.sink.batch_publisher import AtomicPublisher, BatchInterrupted, BatchPublisher, IngestPublisher
from keylane.spark.sink.row_encoding import BadRow, Encoded, RowEncoder, header_lines_of
from keylane.spark.sink.row_ids import IdScope, RowIds
from keylane.spark.sink.row_publisher import RefusedRow, RowPublisher
from keylane.spark.sync_connection import shared_connection
from keylane.spark.tasks import Target, TaskDone


def fault_of(row: BadRow) -> str:
    """Which row it is and what is wrong with it."""
    return f"subject {shown(row.subject)}, id {shown(row.message_id.decode())}: {row.reason}"


_log = logging.getLogger("keylane.spark")

CHUNK_ROWS = 1000
"""Rows are made ready by the chunk, while the chunk before is on its way."""
_STRIKES = 3
"""So many batches that end without a single stored row, and the task goes on without batches."""


def write_batches(
    options: WriteOptions, target: Target, scope: IdScope, batches: Iterable[pa.RecordBatch], *, group: str = "spark"
) -> TaskDone:
    """Publish the rows of all batches. Returns when each is stored, or is a dead letter where that is wanted.

    Raises `RowRejected` for a row that can never be stored, `WriteFailed` when the server did not take rows in time.
    `group` names the dead letters.
    """

    async def start(connection: Connection) -> RowWriter:
        writer = RowWriter(connection, options, target, group=group, partition=scope.partition)
        await writer.open()
        return writer

    writer = ask(options.address, start, f"begin to write to stream {target.stream!r}")
    link = shared_connection(options.address)
    encoder = RowEncoder(target, options.subject, RowIds(scope), link.connection.nats.max_payload)
    running: concurrent.futures.Future[None] | None = None
    try:
        for chunk in _chunks(batches):
            encoded = encoder.encode(chunk)
            if running is not None:
                running.result()  # ends by the deadline of its rows
            running = link.start(writer.write(encoded))
        if running is not None:
            running.result()
        link.start(writer.finish()).result()
    finally:
        if running is not None:
            running.cancel()  # the batches failed meanwhile; a future that is done stays as it is
        link.call(writer.close())
    return TaskDone(encoder.rows, writer.dead_letters)


def _chunks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for at in range(0, batch.num_rows, CHUNK_ROWS):
            yield batch.slice(at, CHUNK_ROWS)


class RowWriter:
    """Publishes one task's rows by the best way that the stream has. Lives on the connection's event loop."""

    def __init__(
        self, connection: Connection, options: WriteOptions, target: Target, *, group: str, partition: int
    ) -> None:
        self._stream = target.stream
        rows, size = options.max_in_flight, options.max_in_flight_bytes
        self._lanes = RowPublisher(
            connection, target, max_rows=rows, max_bytes=size, timeout_s=options.publish_timeout_s
        )
        self._batches: BatchPublisher | None = None
        if target.way == "ingest":
            self._batches = IngestPublisher(connection, max_rows=rows, max_bytes=size)
        elif target.way == "atomic":
            self._batches = AtomicPublisher(connection, max_rows=rows, max_bytes=size)
        self._connection = connection
        self._options = options
        self._group = group
        self._partition = partition
        self.dead_letters = 0
        self._strikes = 0
        self._stored_before = 0

    def __repr__(self) -> str:
        return f"<RowWriter to {self._stream!r} by {self._batches or self._lanes}>"

    async def open(self) -> None:
        await self._lanes.open()
        if self._batches is not None:
            await self._batches.open()

    async def close(self) -> None:
        if self._batches is not None:
            await self._batches.close()
        await self._lanes.close()

    async def write(self, encoded: Encoded) -> None:
        """Publish; waits while too much is on its way."""
        for bad in encoded.bad:
            await self._give_up(bad)
        if encoded.rows and self._batches is not None:
            try:
                await self._batches.send(encoded.rows)
            except BatchInterrupted as interrupted:
                await self._publish_singly(interrupted)
        elif encoded.rows:
            await self._lanes.send(encoded.rows)
        if encoded.foreign:
            await self._lanes.send(encoded.foreign)
        await self._give_up_refused()

    async def finish(self) -> None:
        """Wait until every row is stored or given up."""
        if self._batches is not None:
            try:
                await self._batches.finish()
            except BatchInterrupted as interrupted:
                await self._publish_singly(interrupted)
        await self._lanes.finish()
        await self._give_up_refused()

    async def _publish_singly(self, interrupted: BatchInterrupted) -> None:
        """All of them, to their end: what follows may be of the same subjects."""
        assert self._batches is not None
        _log.info("stream %r: %s; publishing them one by one", self._stream, interrupted)
        await self._lanes.send(interrupted.rows)
        await self._lanes.finish()
        works = interrupted.repeated or self._batches.stored > self._stored_before
        self._strikes = 0 if works else self._strikes + 1
        self._stored_before = self._batches.stored
        if self._strikes >= _STRIKES:
            _log.warning("stream %r takes no batches: %s; going on without", self._stream, interrupted.reason)
            await self._batches.close()
            self._batches = None

    async def _give_up_refused(self) -> None:
        refused, self._lanes.refused_rows = self._lanes.refused_rows, []
        for one in refused:
            await self._give_up(_bad(one))

    async def _give_up(self, row: BadRow) -> None:
        """Store the row as a dead letter, where that is wanted. The same row within an hour is stored once."""
        if not self._options.dead_letters:
            raise RowRejected(
                f"a row cannot be published to stream {self._stream!r}: {fault_of(row)}. Change it, leave it out, or "
                "set option 'deadLetters' to true"
            )
        letter = Unpublished(
            stream=self._stream,
            subject=row.subject,
            message_id=row.message_id.decode(),
            header_lines=row.lines,
            data=row.data,
            group=self._group,
            member="spark",
            partition=self._partition,
            error=RowRejected(fault_of(row)),
        )
        await put_unpublished(self._connection, letter, timeout_s=self._options.publish_timeout_s)
        self.dead_letters += 1


def _bad(refused: RefusedRow) -> BadRow:
    subject, head, data = refused.row
    message_id = parse_headers(head)["Nats-Msg-Id"].encode()
    lines = b"".join(
        line + b"\r\n" for line in header_lines_of(head).split(b"\r\n") if line and not line.startswith(b"Nats-")
    )
    return BadRow(subject.decode(), message_id, lines, data, refused.reason)

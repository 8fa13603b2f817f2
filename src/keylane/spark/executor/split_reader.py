"""Reads one split inside an executor: its messages as Arrow record batches, in order, each once, none missing.

`ConsumerReader` or `DirectReader` bring messages from the server on the connection's thread; here they become columns
on the thread of Spark's worker. After an early end, the read goes on behind the last message that was handed out.

Any replica may answer a direct get, and a consumer may live on any of them. A replica that lags ends early, and says so
in the same words as one that has everything; only the leader knows better (`what_is_missing`). A reader always sees
gaps: messages of other partitions, and deleted ones. Only the first sequence of the stream tells whether messages were
trimmed before they were read (`LossWatch`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from keylane.errors import ApiUnavailable, ConsumerGone, KeylaneError, NotFound, ReadIncomplete
from keylane.jetstream import Connection, streams
from keylane.spark.executor.consumer_reader import ConsumerReader, delivered_messages
from keylane.spark.executor.direct_reader import DirectReader, check_direct, stored_messages
from keylane.spark.executor.framing import MessageRun, together
from keylane.spark.executor.message_columns import Messages, SubjectColumns, as_numpy, header_maps, source_columns
from keylane.spark.executor.range_reader import EndOfRead, ReceiveBuffer
from keylane.spark.retry import may_pass
from keylane.spark.stream_state import Loss, Losses, state_of
from keylane.spark.sync_connection import SyncConnection, shared_connection
from keylane.spark.tasks import Split, arrow_schema

_log = logging.getLogger("keylane.spark")

PATIENCE_S = 60.0
"""How long a read may go without progress, whatever the trouble is."""

_ROWS = 10_000
_BYTES = 8 * 1024 * 1024
_QUIET_S = 1.0
_SILENCE_S = 10.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_GONE_AFTER_S = 2.0
"""A server that has just started may not know its streams yet."""
_CHECK_EVERY_S = 1.0
_NO_MESSAGE = 10037


def read_split(split: Split, *, patience_s: float = PATIENCE_S) -> Iterator[pa.RecordBatch]:
    """The rows of a split as record batches of `tasks.arrow_schema`.

    Raises `ReadIncomplete` when `patience_s` pass without progress, and other errors where waiting cannot help.
    """
    reader = _Reader(split, patience_s)
    columns = SubjectColumns(split.reading)
    schema = arrow_schema(with_headers=split.reading.with_headers)
    while not reader.done:
        for messages in reader.read_on():
            yield _batch(messages, columns, schema, with_data=split.reading.with_data)
            reader.moved()


class _Reader:
    """The position of a read, and its retries."""

    def __init__(self, split: Split, patience_s: float) -> None:
        self._split = split
        self._patience_s = patience_s
        self._position = split.after
        self._pauses = 0
        self._since = time.monotonic()
        self.done = min(split.last, split.upto) <= split.after

    def moved(self) -> None:
        """Spark has taken what was read: what it took its time for does not count as standing still."""
        self._since = time.monotonic()
        self._pauses = 0

    def read_on(self) -> Iterator[Messages]:
        """What comes before the next trouble or the end."""
        try:
            yield from self._attempt()
        except KeylaneError as error:
            if not may_pass(error) and not isinstance(error, ConsumerGone | NotFound):
                raise
            self._pause(str(error), error)

    def _attempt(self) -> Iterator[Messages]:
        link = shared_connection(self._split.reading.address)
        buffer = ReceiveBuffer(_ROWS, _BYTES)
        kind = DirectReader if self._split.reading.way == "direct" else ConsumerReader
        source = kind(link.connection, self._split, self._position, buffer)
        try:
            link.call(source.open())
            end: EndOfRead | KeylaneError | None = None
            while end is None:
                runs, end = buffer.take(_QUIET_S)
                if runs:
                    link.soon(source.refill)
                    messages = self._in_range(together(runs))
                    if len(messages.sequences):
                        yield messages
                elif end is None and self._is_complete_though_quiet(link, buffer):
                    end = EndOfRead.REACHED
        finally:
            _release(link, source)
        if isinstance(end, KeylaneError):
            if isinstance(end, ApiUnavailable) and kind is DirectReader:
                link.call(check_direct(link.connection, self._split.reading.stream))
            raise end
        missing = None
        if end is not EndOfRead.REACHED:
            missing = link.call(what_is_missing(link.connection, self._split, self._position))
        if missing is None:
            self.done = True
        else:
            self._pause(f"the server that answers lags behind: it lacks {missing}")

    def _in_range(self, run: MessageRun) -> Messages:
        """The messages of a run that belong to the split; moves on behind all of them."""
        if self._split.reading.way == "direct":
            messages = stored_messages(run, self._position)
        else:
            messages = delivered_messages(run)
        sequences = as_numpy(messages.sequences)
        if sequences[0] <= self._position or (sequences[1:] <= sequences[:-1]).any():
            raise ReadIncomplete(f"the server sent messages after sequence {self._position} out of order")
        self._position = int(sequences[-1])
        return messages.cut(0, int(np.searchsorted(sequences, self._split.upto, side="right")))

    def _is_complete_though_quiet(self, link: SyncConnection, buffer: ReceiveBuffer) -> bool:
        """Messages may be deleted while they are waited for, and then nothing says that no more come."""
        if time.monotonic() - buffer.heard > _SILENCE_S:
            raise ReadIncomplete(f"the server is silent for {_SILENCE_S:g} s")
        missing = link.call(what_is_missing(link.connection, self._split, self._position))
        self._give_up_in_time(f"the server sends nothing, though there is {missing}", None)
        return missing is None

    def _pause(self, trouble: str, cause: KeylaneError | None = None) -> None:
        self._give_up_in_time(trouble, cause)
        time.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self._pauses))
        self._pauses = min(self._pauses + 1, 10)

    def _give_up_in_time(self, trouble: str, cause: KeylaneError | None) -> None:
        patience_s = _GONE_AFTER_S if isinstance(cause, NotFound) else self._patience_s
        if time.monotonic() - self._since < min(patience_s, self._patience_s):
            return
        if isinstance(cause, NotFound):
            raise cause
        split = self._split
        raise ReadIncomplete(
            f"stream {split.reading.stream!r}, messages {split.after + 1} to {split.upto} of "
            f"{split.subject_filter or 'all subjects'}: read up to {self._position}, and nothing more came for "
            f"{patience_s:g} s ({trouble}). Nothing is lost: see that all replicas of the stream are current and "
            "reachable (`nats stream info`), then let Spark run the task again"
        ) from cause


def _release(link: SyncConnection, source: ConsumerReader | DirectReader) -> None:
    try:
        link.call(source.close())
    except KeylaneError as error:
        _log.info("the reader of a split was not closed, the server will drop what it held: %s", error)


def _batch(messages: Messages, place: SubjectColumns, schema: pa.Schema, *, with_data: bool) -> pa.RecordBatch:
    rows = len(messages.sequences)
    columns = [
        *place(messages.subjects),
        messages.data if with_data else pa.nulls(rows, pa.binary()),
        messages.sequences,
        messages.timestamps,
        *source_columns(messages.headers, rows),
    ]
    if len(schema) > len(columns):
        columns.append(header_maps(messages.headers, rows))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def read_watched(split: Split, *, fatal: bool) -> Iterator[pa.RecordBatch]:
    """The rows of a split. Raises `DataLost` if `fatal` and some of them were gone before they were read."""
    watch = LossWatch(split, Losses(fatal=fatal))
    for batch in read_split(split):
        watch.saw(batch)
        yield batch
    watch.check(split.upto)


# ---- completeness ----------------------------------------------------------------------------------------------


async def what_is_missing(connection: Connection, split: Split, position: int) -> str | None:
    """Why a reader that has everything up to `position` is not done; None if it is.

    What was deleted since the split was planned is not missing.
    """
    stream = split.reading.stream
    try:
        found = await streams.get_message(
            connection, stream, sequence=position + 1, next_by_subject=split.subject_filter or ">"
        )
    except NotFound as error:
        if error.err_code != _NO_MESSAGE:
            raise
    else:
        following = int(found["seq"])
        return f"sequence {following}, which the leader has" if following <= split.upto else None
    # A leader that was just chosen may not have stored yet what the one before it had confirmed.
    newest = (await streams.state(connection, stream)).last_sequence
    goal = min(split.last, split.upto)
    return f"sequence {goal}: the leader itself is only at {newest}" if newest < goal else None


class LossWatch:
    """Asks for the first sequence of the stream every second, and at the end of the read."""

    def __init__(self, split: Split, losses: Losses) -> None:
        self._split = split
        self._losses = losses
        self._checked = split.after
        self._due = time.monotonic() + _CHECK_EVERY_S

    def saw(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows and time.monotonic() >= self._due:
            self.check(batch.column("sequence")[-1].as_py())

    def check(self, position: int) -> None:
        """Everything up to `position` was read or is not there: make sure that it was not there to begin with."""
        split = self._split
        state = state_of(split.reading.address, split.reading.stream)
        if split.created is not None and state.created != split.created:
            why = f"stream {state.stream!r} was deleted and recreated while it was read"
            self._losses.report(Loss("recreated", why, self._checked + 1, split.upto))
        elif state.first > self._checked + 1 and not self._may_be_trimmed():
            why = f"stream {state.stream!r} was trimmed or purged while it was read and begins at {state.first} now"
            self._losses.report(Loss("trimmed", why, self._checked + 1, min(state.first - 1, position)))
        self._checked = position
        self._due = time.monotonic() + _CHECK_EVERY_S

    def _may_be_trimmed(self) -> bool:
        """Whether what is gone was nobody's to miss: the head of a read from the earliest, or of a queue."""
        split = self._split
        return split.reading.way == "direct" or (split.head_may_go and self._checked == split.after)

"""Whether a range was read completely: nothing is missing at its end, nothing was trimmed before it was read.

Any replica may answer a direct get, and a consumer may live on any of them. One that lags behind ends early, and says
so in the same words as one that has everything; only the leader knows better (`what_is_missing`).

A reader sees gaps all the time: other partitions' messages, deleted ones. Only the first sequence of the stream tells
whether what is missing was trimmed. So `LossWatch` asks for it now and then, and at the end: what lies behind the last
checked position and before that sequence may have gone unread.
"""

from __future__ import annotations

import time

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from keylane.errors import NotFound
from keylane.jetstream import Connection, streams
from keylane.spark.data_loss import Loss, Losses
from keylane.spark.stream_state import state_of
from keylane.spark.tasks import Split

_NO_MESSAGE = 10037


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


_CHECK_EVERY_S = 1.0


class LossWatch:
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

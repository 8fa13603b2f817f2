"""Reads a split on an executor and watches that nothing of it is trimmed away before it is read.

A reader sees gaps all the time: other partitions' messages, deleted ones. Only the stream's beginning tells whether
what is missing was trimmed. So it is asked for now and then, and at the end: what lies behind the last checked position
and before the beginning may have gone unread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from keylane.spark.driver.losses import Losses
from keylane.spark.driver.offsets import Loss
from keylane.spark.driver.standing import stand_of
from keylane.spark.executor.reading import read_split
from keylane.spark.executor.split import Split

_CHECK_EVERY_S = 1.0


def read_watched(split: Split, *, fatal: bool) -> Iterator[pa.RecordBatch]:
    """The rows of a split. Raises `DataLost` if `fatal` and some of them were gone before they were read."""
    watch = _Watch(split, Losses(fatal=fatal))
    for batch in read_split(split):
        watch.saw(batch)
        yield batch
    watch.check(split.upto)


class _Watch:
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
        stand = stand_of(split.reading.address, split.reading.stream)
        if split.created is not None and stand.created != split.created:
            why = f"stream {stand.stream!r} was deleted and made anew while it was read"
            self._losses.report(Loss("recreated", why, self._checked + 1, split.upto))
        elif stand.first > self._checked + 1 and not self._may_be_trimmed():
            why = f"stream {stand.stream!r} was trimmed or purged while it was read and begins at {stand.first} now"
            self._losses.report(Loss("trimmed", why, self._checked + 1, min(stand.first - 1, position)))
        self._checked = position
        self._due = time.monotonic() + _CHECK_EVERY_S

    def _may_be_trimmed(self) -> bool:
        """Whether what is gone was nobody's to miss: the head of a read from the earliest, or of a queue."""
        split = self._split
        return split.reading.way == "direct" or (split.head_may_go and self._checked == split.after)

"""How far a partition is done, and where to go on: the positions of at-least-once reading.

Owns: the rule that only what has nothing undone before it is committed, and the order in which a new owner looks for
its place. Never reads or writes an offset anywhere.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from keylane.errors import InvalidInput


class Prefix:
    """Which messages of a partition are done, where they may be done in any order.

    Offsets may have holes (a compacted topic has them): what counts is what was started.

    >>> prefix = Prefix(10)
    >>> for offset in (10, 11, 14):
    ...     prefix.start(offset)
    >>> prefix.finish(11)
    >>> prefix.offset
    10
    >>> prefix.finish(10)
    >>> prefix.offset
    14
    """

    __slots__ = ("_done", "_next", "_open", "_started")

    def __init__(self, offset: int) -> None:
        self._next = offset
        self._started: deque[int] = deque()
        self._open: set[int] = set()
        self._done: set[int] = set()

    def __repr__(self) -> str:
        return f"<Prefix {self.offset}, {len(self._open)} at work>"

    @property
    def offset(self) -> int:
        """The next message to read, were somebody else to go on: everything before it is done."""
        return self._started[0] if self._started else self._next

    @property
    def at_work(self) -> int:
        """How many were started and are not done."""
        return len(self._open)

    def start(self, offset: int) -> None:
        """A message was read. They come in the order of the log."""
        if offset < self._next:
            raise InvalidInput(f"offset {offset} was started after {self._next - 1}: start them in the log's order")
        self._started.append(offset)
        self._open.add(offset)
        self._next = offset + 1

    def finish(self, offset: int) -> None:
        """A message is done, whatever is before it. To finish it twice changes nothing."""
        if offset in self._open:
            self._open.remove(offset)
            self._done.add(offset)
        elif offset >= self._next:
            raise InvalidInput(f"offset {offset} is done but was never started: the last one was {self._next - 1}")
        while self._started and self._started[0] in self._done:
            self._done.remove(self._started.popleft())


class ResumePoint(Enum):
    """Where a new owner's position comes from."""

    HEARTBEAT = "heartbeat"
    COMMITTED = "committed"
    EARLIEST = "earliest"


@dataclass(frozen=True, slots=True)
class Resume:
    """Where to go on. `lost`: messages after that place which the partition no longer has."""

    offset: int
    place: ResumePoint
    lost: int = 0


def resume(*, heartbeat: int | None, committed: int | None, earliest: int, end: int) -> Resume:
    """Where a new owner goes on: at the last heartbeat's offset, else at the committed one, else at the beginning.

    Offsets are the next message to read. One that the partition no longer has moves to the earliest it has; one beyond
    its end is not of this partition (it was made anew), and the next in order is asked.

    >>> resume(heartbeat=None, committed=70, earliest=0, end=100)
    Resume(offset=70, place=<ResumePoint.COMMITTED: 'committed'>, lost=0)
    """
    for place, offset in ((ResumePoint.HEARTBEAT, heartbeat), (ResumePoint.COMMITTED, committed)):
        if offset is not None and 0 <= offset <= end:
            return Resume(max(offset, earliest), place, max(earliest - offset, 0))
    return Resume(earliest, ResumePoint.EARLIEST)

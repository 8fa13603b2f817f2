"""How far a partition is done, and where to continue: the positions of at-least-once reading.

Owns: the rule that an offset is committed only if everything before it is done, and the order in which a new owner
looks for its position. Never reads or writes an offset.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from keylane.errors import InvalidInput


class Prefix:
    """Which messages of a partition are done, if they may be done in any order.

    Offsets may have gaps (a compacted topic has them): only started messages count.

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
        """The next message to read if somebody else continues: everything before it is done."""
        return self._started[0] if self._started else self._next

    @property
    def at_work(self) -> int:
        """How many messages were started and are not done."""
        return len(self._open)

    def start(self, offset: int) -> None:
        """Mark a message as started. Call it in the order of the log."""
        if offset < self._next:
            raise InvalidInput(f"offset {offset} was started after {self._next - 1}: start them in the log's order")
        self._started.append(offset)
        self._open.add(offset)
        self._next = offset + 1

    def finish(self, offset: int) -> None:
        """Mark a message as done, whatever is before it. Finishing it twice changes nothing."""
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
    """Where to continue. `lost`: messages after the requested position that the partition no longer has."""

    offset: int
    place: ResumePoint
    lost: int = 0


def resume(*, heartbeat: int | None, committed: int | None, earliest: int, end: int) -> Resume:
    """Where a new owner continues: at the last heartbeat's offset, else at the committed one, else at the beginning.

    Offsets are the next message to read. One that the partition no longer has moves to the earliest it has; one beyond
    its end belongs to an earlier partition (it was recreated), and the next in order is used.

    >>> resume(heartbeat=None, committed=70, earliest=0, end=100)
    Resume(offset=70, place=<ResumePoint.COMMITTED: 'committed'>, lost=0)
    """
    for place, offset in ((ResumePoint.HEARTBEAT, heartbeat), (ResumePoint.COMMITTED, committed)):
        if offset is not None and 0 <= offset <= end:
            return Resume(max(offset, earliest), place, max(earliest - offset, 0))
    return Resume(earliest, ResumePoint.EARLIEST)

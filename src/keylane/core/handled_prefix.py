"""How far a partition is handled: everything up to `position` is, whatever was handled above it.

Theory of operation. A consumer delivers in *runs*: from its ack floor on in the order of the stream, until it is reset,
recreated, or read by somebody else; then a new run begins, at or above the floor. Within a run every message of the
partition arrives, so what has arrived and is neither here (waiting, running, to be retried) nor was dropped has been
handled. What is below a run's first message was handled before, except for what is still here.

A position is true for ever: nothing takes the handling of a message back. So the highest of several is true as well,
whoever recorded it and when.
"""

from __future__ import annotations


class HandledPrefix:
    """The position of one partition, as one worker knows it.

    >>> prefix = HandledPrefix()
    >>> prefix.run_began(4)
    >>> prefix.arrived(9)
    >>> prefix.advance(lowest_here=7, lowest_dropped=None)
    6
    """

    __slots__ = ("_highest", "position")

    def __init__(self) -> None:
        self.position = 0
        """Every message of the partition up to this sequence was handled, as far as is known here."""
        self._highest = 0

    def __repr__(self) -> str:
        return f"<HandledPrefix {self.position}, arrived up to {self._highest}>"

    def learned(self, position: int) -> None:
        """A record, or the consumer's ack floor, says that the partition was handled up to here."""
        self.position = max(self.position, position)

    def run_began(self, first: int) -> None:
        """The first message of a run. What was dropped before comes again, or is gone."""
        self._highest = first - 1

    def arrived(self, last: int) -> None:
        """Everything of this run up to here has arrived."""
        self._highest = max(self._highest, last)

    def advance(self, lowest_here: int | None, lowest_dropped: int | None) -> int:
        """The position now. `lowest_here`: the lowest that is not handled yet; `lowest_dropped`: in this run."""
        upto = self._highest
        for undone in (lowest_here, lowest_dropped):
            if undone is not None and undone <= upto:
                upto = undone - 1
        self.position = max(self.position, upto)
        return self.position

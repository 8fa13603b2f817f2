"""What was delivered of one partition, which of it is handled, and up to which sequence all of it is.

For a consumer that other partitions share: its ack floor says nothing about one of them, and a reset delivers again
what was acked above the floor. A partition's messages are offered in the order of the stream, none is left out. So what
was offered is either still open here, or handled.
"""

from __future__ import annotations

from typing import Protocol

from keylane.core.fleet_records import HandledBut

_LOOK_FROM = 64


class Settleable(Protocol):
    """A delivery; it is settled when its message is handled."""

    @property
    def settled(self) -> bool: ...


class PartitionDeliveries:
    """The deliveries of one partition since one owner has it.

    >>> deliveries = PartitionDeliveries(17)
    >>> deliveries.is_handled(17), deliveries.is_handled(18)
    (True, False)
    """

    __slots__ = ("_before", "_look_at", "_open", "_upto", "highest")

    def __init__(self, handled: int, before: HandledBut | None = None) -> None:
        """`handled`: everything up to this sequence. `before`: what owners before have handled above it."""
        self._before = before
        self._upto = before.upto if before is not None else 0
        self.highest = handled
        """Everything up to here was offered, now or to an owner before."""
        self._open: dict[int, Settleable] = {}
        self._look_at = _LOOK_FROM

    def __repr__(self) -> str:
        return f"<PartitionDeliveries up to {self.highest}, {len(self._open)} open>"

    def is_handled(self, sequence: int) -> bool:
        if sequence > self.highest:
            return sequence <= self._upto and self._before is not None and self._before.covers(sequence)
        known = self._open.get(sequence)
        return known is None or known.settled

    def offered(self, sequence: int, delivery: Settleable) -> None:
        """A delivery that is not handled: a new one, or a newer one of what is open."""
        self._open[sequence] = delivery
        if sequence > self.highest:
            self.highest = sequence
            if len(self._open) > self._look_at:
                self._close_settled()
                self._look_at = max(_LOOK_FROM, 2 * len(self._open))

    def passed(self, sequence: int) -> None:
        """It is handled, and was not offered here."""
        self.highest = max(self.highest, sequence)

    @property
    def gap(self) -> HandledBut | None:
        """What is handled above the position; None: nothing."""
        self._close_settled()
        return HandledBut(self.highest, frozenset(self._open)) if self._open else None

    @property
    def position(self) -> int:
        """Everything up to this sequence is handled."""
        self._close_settled()
        return min(self._open) - 1 if self._open else self.highest

    def _close_settled(self) -> None:
        self._open = {sequence: one for sequence, one in self._open.items() if not one.settled}

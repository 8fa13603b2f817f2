"""What may be deleted from the copy of a stream that a fleet reads, and where a copy that was lost begins again.

Owns: the lowest sequence that is still needed. Never asks a server.

- The ack floor of a partition without messages stands still. So a partition with nothing pending and nothing in flight
  counts as being at the stream's last sequence, as it was read *before* the consumers were asked: what came later would
  show as pending.
- A partition without a consumer needs everything.
- The newest message always stays: it carries the sequence of its original, and a server that starts goes on copying
  behind it. Without any message it would begin anew, by time or from the first one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class ConsumerPosition(NamedTuple):
    """How far a partition is handled."""

    ack_floor: int
    is_idle: bool
    """Nothing is pending, and nothing in flight."""


def handled_floor(last_sequence: int, positions: Iterable[ConsumerPosition | None]) -> int:
    """Everything up to this sequence is handled, in every partition. None: a partition without a consumer.

    >>> handled_floor(100, [ConsumerPosition(40, False), ConsumerPosition(7, True)])
    40
    """
    floor = last_sequence
    for one in positions:
        if one is None:
            return 0
        if not one.is_idle:
            floor = min(floor, one.ack_floor)
    return floor


def trim_before(last_sequence: int, floor: int) -> int:
    """Messages below this sequence may be deleted: those that are handled, but never the newest."""
    return min(floor + 1, last_sequence)

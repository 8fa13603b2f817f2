"""Which deliveries a member may start while its partitions move. Pure: it only remembers and answers.

Losing a partition: its messages are shunned until the server sends none of them any more. Gaining one (or taking over
from another instance): nothing of it may start before its oldest message is here, and that one comes first after the
consumer was rewound to the start of its queue. Deliveries of before the rewinding may still be on their way then; a
rewound consumer counts its deliveries from 1 again, so the next delivery with count 1 is the beginning.
"""

from __future__ import annotations

from keylane.groups.message import GroupMessage


class Gate:
    """Open unless it was told otherwise."""

    __slots__ = ("_expecting", "_held", "_holds_all", "_shunned", "_shut")

    def __init__(self) -> None:
        self._shut = False
        self._shunned: frozenset[int] = frozenset()
        self._held: frozenset[int] = frozenset()
        self._holds_all = False
        self._expecting = False

    def __repr__(self) -> str:
        held = "all" if self._holds_all else sorted(self._held)
        return f"<Gate shut={self._shut} shunned={sorted(self._shunned)} held={held} expecting={self._expecting}>"

    @property
    def is_open(self) -> bool:
        return not (self._shut or self._shunned or self._held or self._holds_all)

    @property
    def is_shut(self) -> bool:
        return self._shut

    @property
    def shunned(self) -> frozenset[int]:
        return self._shunned

    def shut(self) -> None:
        """Let nothing pass any more."""
        self._shut = True

    def shun(self, partitions: frozenset[int]) -> None:
        self._shunned |= partitions

    def shun_no_more(self, partitions: frozenset[int] | None = None) -> None:
        self._shunned = self._shunned - partitions if partitions is not None else frozenset()

    def hold(self, partitions: frozenset[int]) -> None:
        """Hold these back until the beginning, which is not expected yet."""
        self._held |= partitions
        self._expecting = False

    def hold_no_more(self, partitions: frozenset[int]) -> None:
        """They were not gained after all. What else is held was rewound before and still waits for its beginning."""
        self._held -= partitions
        self._expecting = True

    def hold_all(self) -> None:
        self._holds_all = True
        self._expecting = False

    def expect_beginning(self) -> None:
        """From now on a delivery with count 1 can only be one after the rewinding."""
        self._expecting = True

    def passing(self, batch: list[GroupMessage]) -> list[GroupMessage]:
        """Those of a batch that may start, in order."""
        good = []
        for one in batch:
            if self._expecting and one.delivery.is_first_of_consumer:
                self._held, self._holds_all = frozenset(), False
            partition = one.place.partition
            if not (self._shut or self._holds_all or partition in self._held or partition in self._shunned):
                good.append(one)
        return good

"""Which deliveries a member may start while its partitions move. Pure: it only remembers and answers.

Losing a partition: its messages are shunned until the server sends none of them any more. Gaining one, or taking over
from another instance: its messages are held back until the consumer was rewound to the start of its queue, so that its
oldest message starts first. What is held back is dropped: the rewinding brings it again.
"""

from __future__ import annotations

from keylane.groups.message import GroupMessage


class Gate:
    """Open unless it was told otherwise."""

    __slots__ = ("_held", "_holds_all", "_missed", "_shunned", "_shut")

    def __init__(self) -> None:
        self._shut = False
        self._shunned: frozenset[int] = frozenset()
        self._held: frozenset[int] = frozenset()
        self._holds_all = False
        self._missed: set[int] = set()

    def __repr__(self) -> str:
        held = "all" if self._holds_all else sorted(self._held)
        return f"<Gate shut={self._shut} shunned={sorted(self._shunned)} held={held}>"

    @property
    def is_open(self) -> bool:
        return not (self._shut or self._shunned or self._held or self._holds_all)

    @property
    def is_shut(self) -> bool:
        return self._shut

    @property
    def held(self) -> frozenset[int]:
        return self._held

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
        self._held |= partitions

    def hold_no_more(self, partitions: frozenset[int]) -> bool:
        """They were not gained after all. False: some of their messages came and were dropped.

        So the consumer had such a partition all the same: it stays held, as later messages must not start before it was
        rewound.
        """
        self._held -= partitions - self._missed
        return not partitions & self._missed

    def hold_all(self) -> None:
        self._holds_all = True

    def release(self) -> None:
        """The consumer was rewound: whatever comes now may start."""
        self._held = frozenset()
        self._holds_all = False
        self._missed.clear()

    def passing(self, batch: list[GroupMessage]) -> tuple[list[GroupMessage], list[GroupMessage]]:
        """Those of a batch that may start, and the others, in order."""
        if self._shut or self._holds_all:
            return [], batch
        closed = self._held | self._shunned
        others = [one for one in batch if one.place.partition in closed]
        self._missed.update(one.place.partition for one in others if one.place.partition in self._held)
        return [one for one in batch if one.place.partition not in closed], others

"""Partitions, and their moves from one member to another, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from keylane.core.group_summary import counted
from keylane.core.plans import ranges

_FEW_NAMES = 12
_MOST_MOVES = 8


def names_in_short(partitions: Iterable[str]) -> str:
    """Numbers as ranges, names as they are; of many names the first ones.

    >>> names_in_short(["0", "1", "2", "7"]), names_in_short(["eu", "us"]), names_in_short([])
    ('0-2,7', 'eu, us', '')
    """
    names = list(partitions)
    if all(one.isdecimal() and one.isascii() for one in names):
        return ranges(sorted(map(int, names)), none="")
    more = f" and {len(names) - _FEW_NAMES:,} more" if len(names) > _FEW_NAMES else ""
    return ", ".join(names[:_FEW_NAMES]) + more


def move_texts(moved: Mapping[tuple[str | None, str | None], Iterable[str]]) -> tuple[str, ...]:
    """Moves in words, by the member that had the partitions and the one that gets them.

    >>> move_texts({("a", "b"): ["0", "1"], (None, "b"): ["2"]})
    ('0,1 from a to b', '2 from nobody to b')
    """
    texts = [
        f"{names_in_short(partitions)} from {before or 'nobody'} to {after or 'nobody'}"
        for (before, after), partitions in moved.items()
    ]
    rest = len(texts) - _MOST_MOVES
    return tuple(texts) if rest <= 0 else (*texts[:_MOST_MOVES], f"and {' '.join(counted(rest, 'more move'))}")

"""From a stored subject to its partition, the subject it was published on, and its key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from keylane.core.partitions import Partitioning, strip_partition
from keylane.core.subjects import matches
from keylane.groups.message import Place, Placing

_REMEMBERED = 65_536

KeyOf = Callable[[str], str]
"""The key of a subject, in the words of whoever knows better."""


def placing_by(partitioning: Sequence[Partitioning], *, whole_subject: bool, key_of: KeyOf | None = None) -> Placing:
    """A function for one group. Subjects repeat, so their places are remembered.

    Where the key is not known (no partitioning given, and subjects are not hashed whole), the partition is the key.
    """

    @lru_cache(maxsize=_REMEMBERED)
    def place(raw_subject: bytes) -> Place:
        partition, subject = strip_partition(raw_subject.decode("utf-8", "surrogateescape"))
        if key_of is not None:
            return Place.of(partition, subject, key_of(subject))
        for one in partitioning:
            if matches(one.filter, subject):
                return Place.of(partition, subject, one.key(subject))
        return Place.of(partition, subject, subject if whole_subject else str(partition))

    return place

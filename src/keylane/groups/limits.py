"""How large a group may be: bounds that keep one wrong number from taking a server or a member down.

Owns the numbers and their words. The bound on partitions holds for the whole process, for groups that are made and for
records that are read, whoever wrote them.
"""

from __future__ import annotations

import os

from keylane.core.partitions import check_partition_count
from keylane.core.subjects import shown
from keylane.errors import InvalidInput

MAX_PARTITIONS = 16_384
"""Of a group, unless `partition_limit` says otherwise."""
MAX_GROUP_FILTERS = 8
"""That a new group may be given. Every member asks for each of its partitions once per filter."""
MAX_CONSUMER_FILTERS = 2_000
"""Of one member's consumer. nats-server 2.15 makes one with 2,000 in 0.2 to 2.7 s, depending on how many partitions
others have; one with 10,000 takes 12 s, which is longer than a request waits."""
ENVIRONMENT = "KEYLANE_MAX_PARTITIONS"

_chosen: int | None = None


def partition_limit(new: int | None = None) -> int:
    """The most partitions that a group may have in this process; with an argument, set it before.

    Without it: the environment variable KEYLANE_MAX_PARTITIONS, or 16,384.

    >>> partition_limit(20_000)
    20000
    """
    global _chosen  # noqa: PLW0603 - one bound for the process, as csv.field_size_limit has
    if new is not None:
        _chosen = check_partition_count(new)
    if _chosen is not None:
        return _chosen
    given = os.environ.get(ENVIRONMENT)
    if given is None:
        return MAX_PARTITIONS
    try:
        return check_partition_count(int(given))
    except ValueError:
        raise InvalidInput(f"{ENVIRONMENT} is {shown(given)}: give a whole number of partitions") from None


def check_partitions(partitions: int) -> None:
    """Raise `InvalidInput` if a group has more partitions than this process allows."""
    check_partition_count(partitions)
    if partitions > (limit := partition_limit()):
        raise InvalidInput(
            f"{partitions:,} partitions are more than the {limit:,} that are allowed here, as every member holds and "
            f"compares all of them; to go above, set {ENVIRONMENT}={partitions}, or call "
            f"groups.partition_limit({partitions})"
        )


def check_group_filters(filters: int) -> None:
    """Raise `InvalidInput` if a new group has more filters than it may be given."""
    if filters > MAX_GROUP_FILTERS:
        raise InvalidInput(
            f"{filters} filters: a group takes {MAX_GROUP_FILTERS}, as every member asks for each of its partitions "
            "once per filter; use a wider filter, or several groups"
        )


def most_partitions(filters: int) -> int:
    """How many partitions one consumer can carry where each is asked for under so many filters."""
    return max(1, MAX_CONSUMER_FILTERS // max(1, filters))


def members_needed(partitions: int, filters: int) -> int:
    """How few members can carry a group."""
    return -(-partitions // most_partitions(filters))

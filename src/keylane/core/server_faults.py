"""Faults of released nats-servers that concern keylane: which versions have them, and the number in its tracker.

Owns the table. A fault is listed only if its thread in nats-io/nats-server describes what keylane uses: pins, filters,
work queues, sources, purges, schedules. The first fixed release of each series was read from the tags of the repository
up to 2.14.5, and tried on 2.15.1; a series that is not named was not fixed there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Version = tuple[int, int, int]

Concern = Literal[
    "pins", "filters", "interest_in_cluster", "sourced_queue", "schedules", "purges", "single_server", "ids"
]
"""What must be in use for a fault to matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFault:
    """A fault of the server, as its tracker tells it."""

    issue: int
    """In github.com/nats-io/nats-server: an issue, or the pull request that fixed it."""
    concern: Concern
    what: str
    why: str
    since: Version = (0, 0, 0)
    fixed: Mapping[tuple[int, int], int] | None
    """Series -> its first release without the fault. Later series are without it too. None: no release is."""

    @property
    def url(self) -> str:
        return f"https://github.com/nats-io/nats-server/issues/{self.issue}"

    def concerns(self, version: Version) -> bool:
        """Whether a server of this version has the fault.

        >>> ALL_FAULTS[0].concerns((2, 12, 4)), ALL_FAULTS[0].concerns((2, 14, 0))
        (True, False)
        """
        if version < self.since:
            return False
        if self.fixed is None:
            return True
        series = version[:2]
        if series in self.fixed:
            return version[2] < self.fixed[series]
        return series < max(self.fixed)

    def remedy(self, version: Version) -> str | None:
        """The nearest release without the fault; None: there is none."""
        later = sorted(series for series in self.fixed or {} if series >= version[:2])
        return f"{later[0][0]}.{later[0][1]}.{(self.fixed or {})[later[0]]}" if later else None


ALL_FAULTS: tuple[ServerFault, ...] = (
    ServerFault(
        issue=7819,
        concern="pins",
        what="after an unpin no waiting client is pinned until the next message is published",
        why="a member that stops hands its partitions over late, and a former leader of the consumer keeps a stale pin",
        fixed={(2, 12): 5, (2, 14): 0},
    ),
    ServerFault(
        issue=7984,
        concern="pins",
        what="a message that is deleted while it is in flight can stay in max_ack_pending for ever",
        why="a consumer with many of them delivers nothing more: the partition stands still",
        fixed={(2, 12): 7, (2, 14): 0},
    ),
    ServerFault(
        issue=7014,
        concern="filters",
        what="consumers with filters read up to a hundred times slower than without",
        why="every consumer of a group or fleet has filters: throughput is a few hundred messages a second",
        fixed={(2, 11): 6, (2, 12): 0},
    ),
    ServerFault(
        issue=7852,
        concern="filters",
        what="one filter in filter_subjects takes the slow path of several",
        why="a member with a single partition pays for filters that it does not have",
        fixed={(2, 12): 5, (2, 14): 0},
    ),
    ServerFault(
        issue=7760,
        concern="interest_in_cluster",
        what="with interest retention in a cluster, changed filters stop matching when a consumer's leader moves",
        why="new messages are then stored on some replicas only, and lost",
        fixed={(2, 11): 12, (2, 12): 4, (2, 14): 0},
    ),
    ServerFault(
        issue=8423,
        concern="sourced_queue",
        what="a stream that sources part of a replicated work queue removes messages from it that it does not copy",
        why="an elastic group with filters on a work queue loses what its filters leave out",
        since=(2, 14, 0),
        fixed={(2, 15): 0},
    ),
    ServerFault(
        issue=8571,
        concern="purges",
        what="a purge by subject, or a rollup, makes consumers with several filters skip messages of the others",
        why="messages of other partitions of that member are never delivered",
        fixed={(2, 15): 1},
    ),
    ServerFault(
        issue=8491,
        concern="single_server",
        what="a refused creation of a consumer whose name exists can delete the state of that consumer",
        why="members create their consumers when they start: one whose position is lost begins again, with repeats",
        fixed={(2, 15): 0},
    ),
    ServerFault(
        issue=8085,
        concern="schedules",
        what="the keys of message schedules can be corrupt after a recovery of the server",
        why="scheduled messages are published late, twice or never",
        since=(2, 12, 0),
        fixed={(2, 12): 9, (2, 14): 0},
    ),
    ServerFault(
        issue=8240,
        concern="schedules",
        what="a schedule on a stream that discards new messages gets stuck when the stream is full",
        why="its messages are never published, and nobody is told",
        since=(2, 12, 0),
        fixed={(2, 12): 10, (2, 14): 2},
    ),
    ServerFault(
        issue=3272,
        concern="ids",
        what="after a restart the server has forgotten the ids of messages that are handled and gone from a work queue",
        why="a publisher that repeats a message then stores it twice, whatever the duplicate window is",
        fixed=None,
    ),
)
"""First the ones that cost most."""

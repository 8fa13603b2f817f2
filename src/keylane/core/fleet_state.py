"""Where the consumers of a fleet keep their state: with the stream's replicas, or in memory beside records of our own.

A replicated consumer is a Raft group: 2,000 idle ones cost the servers of a cluster 88 % of a core, in memory with one
replica 4 %. On a single server, or a stream with one replica, there is nothing to save.
"""

from __future__ import annotations

from typing import Literal

State = Literal["replicated", "checkpointed"]

MOST_REPLICATED = 100
"""Partitions up to which a fleet on a replicated stream has replicated consumers."""


def choose_state(replicas: int, partitions: int) -> State:
    """What `auto` takes.

    >>> choose_state(3, 32), choose_state(3, 2000), choose_state(1, 2000)
    ('replicated', 'checkpointed', 'replicated')
    """
    return "checkpointed" if replicas > 1 and partitions > MOST_REPLICATED else "replicated"

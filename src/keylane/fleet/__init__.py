"""Fleets: workers that share the partitions of a stream by themselves. Start one, start fifty, stop any.

`membership` has `join`. `worker` performs what `core/fleet_worker` decides, on the records of `store`;
`partition_reader` reads one partition. `planner` is the leader's.
"""

from __future__ import annotations

from keylane.core.fleet_events import WorkerState
from keylane.core.fleet_partitions import HashedPartitions, ListedPartitions, Partition, hashed, listed
from keylane.fleet.membership import join
from keylane.fleet.worker import FleetHooks, Worker

__all__ = [
    "FleetHooks",
    "HashedPartitions",
    "ListedPartitions",
    "Partition",
    "Worker",
    "WorkerState",
    "hashed",
    "join",
    "listed",
]

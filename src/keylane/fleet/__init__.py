"""Fleets: workers that share the partitions of a stream by themselves. Start one, start fifty, stop any.

`membership` has `join`. `worker` performs what `core/fleet_worker` decides, on the records of `store`;
`partition_reader` reads one partition. `planner` is the leader's. `admin` looks at fleets.
"""

from __future__ import annotations

from keylane.core.fleet_events import WorkerState
from keylane.core.fleet_partitions import HashedPartitions, ListedPartitions, Partition, hashed, listed
from keylane.core.fleet_records import FleetAssignment
from keylane.fleet.admin import FleetStatus, PartitionStatus, WorkerStatus, list_fleets, status, stored_spec
from keylane.fleet.lag import PartitionLag
from keylane.fleet.membership import join
from keylane.fleet.worker import FleetHooks, Worker

__all__ = [
    "FleetAssignment",
    "FleetHooks",
    "FleetStatus",
    "HashedPartitions",
    "ListedPartitions",
    "Partition",
    "PartitionLag",
    "PartitionStatus",
    "Worker",
    "WorkerState",
    "WorkerStatus",
    "hashed",
    "join",
    "list_fleets",
    "listed",
    "status",
    "stored_spec",
]

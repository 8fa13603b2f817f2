"""Fleets: workers that share the partitions of a stream by themselves. Start one, start fifty, stop any.

`membership` has `join`. `worker` performs what `core/fleet_worker` decides, on the records of `store`;
`partition_reader` reads one partition. `planner` is the leader's. `admin` looks at fleets.
"""

from __future__ import annotations

from keylane.core.fleet_events import WorkerState
from keylane.core.fleet_partitions import (
    DiscoveredPartitions,
    HashedPartitions,
    KvPartitions,
    ListedPartitions,
    Partition,
    StreamCopy,
    discovered,
    from_kv,
    hashed,
    listed,
)
from keylane.core.fleet_records import FleetAssignment
from keylane.fleet.admin import FleetStatus, PartitionStatus, WorkerStatus, list_fleets, status, stored_spec
from keylane.fleet.claimer import PartitionClaimer
from keylane.fleet.deduplication import Deduplicator
from keylane.fleet.drains import drain, resume
from keylane.fleet.history import MovedPartitions, PastAssignment, history
from keylane.fleet.lag import PartitionLag
from keylane.fleet.membership import join
from keylane.fleet.migration import Migration
from keylane.fleet.repartition import repartition
from keylane.fleet.worker import Worker, WorkerHooks
from keylane.lazy import public_names
from keylane.processing.message import MessageContext

__all__ = [
    "Deduplicator",
    "DiscoveredPartitions",
    "FleetAssignment",
    "FleetStatus",
    "HashedPartitions",
    "KvPartitions",
    "ListedPartitions",
    "MessageContext",
    "Migration",
    "MovedPartitions",
    "Partition",
    "PartitionClaimer",
    "PartitionLag",
    "PartitionStatus",
    "PastAssignment",
    "StreamCopy",
    "Worker",
    "WorkerHooks",
    "WorkerState",
    "WorkerStatus",
    "discovered",
    "drain",
    "from_kv",
    "hashed",
    "history",
    "join",
    "list_fleets",
    "listed",
    "repartition",
    "resume",
    "status",
    "stored_spec",
]

__dir__ = public_names(__all__)

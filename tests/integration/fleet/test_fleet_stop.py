"""Many workers that are stopped at once: all leave in order, none by the end of its lease."""

from __future__ import annotations

import asyncio
import time

import pytest

from keylane.core.fleet_records import LeaseState, WorkerLease, from_json
from keylane.fleet import hashed
from keylane.fleet.store import FLEET_BUCKET
from keylane.jetstream import Bucket
from tests.integration.fleet.rig import FleetGround
from tests.integration.groups.conftest import MakeGround
from tests.waiter import until

WORKERS = 26
PARTITIONS = 2 * WORKERS


@pytest.mark.alone("26 workers keep a machine busy when they stop")
async def test_26_workers_that_are_stopped_at_once_leave_in_order(make: MakeGround) -> None:
    ground = FleetGround(await make(partitions=PARTITIONS, allow_direct=True))
    partitions = hashed(PARTITIONS, f"{ground.stream}.*")
    workers = await asyncio.gather(
        *(ground.join(f"worker {number}", partitions=partitions) for number in range(WORKERS))
    )
    await until(lambda: [worker.id for worker in workers], all)
    await until(lambda: sum(len(worker.partitions) for worker in workers), lambda owned: owned == PARTITIONS)
    began = time.monotonic()
    await asyncio.gather(*(worker.stop() for worker in workers))
    took_s = time.monotonic() - began
    stored = await Bucket(ground.connection, FLEET_BUCKET).get_matching(f"{ground.stream}.f.worker.*")
    leases = [from_json(one.key.removeprefix(f"{ground.stream}.f."), one.value) for one in stored]
    assert len(leases) == WORKERS
    assert {lease.state for lease in leases if isinstance(lease, WorkerLease)} == {LeaseState.LEFT}
    assert took_s < 10, f"took {took_s:.1f} s"

"""Which workers of a fleet live: those whose lease somebody has renewed lately, by the server's clock.

A lease says `live` until a leader expires it; where every worker was killed at once, nobody does.
"""

from __future__ import annotations

from keylane.core.fleet_records import WORKERS, WorkerLease, from_json
from keylane.fleet.store import FLEET_BUCKET
from keylane.jetstream import Bucket, Connection, parse_time, streams

_LEASES = 3
"""A holder renews three times in a lease, and stops by itself when it could not."""


async def live_workers(connection: Connection, stream: str, fleet: str, lease_s: float) -> frozenset[int]:
    """The numbers of the workers that hold a lease and have renewed it."""
    found = await Bucket(connection, FLEET_BUCKET).get_matching(f"{stream}.{fleet}.{WORKERS}")
    now = parse_time((await streams.info_json(connection, f"KV_{FLEET_BUCKET}"))["ts"])
    leases = [
        (from_json(one.key.split(".", 2)[2], one.value), (now - parse_time(one.written)).total_seconds())
        for one in found
        if one.value is not None
    ]
    return frozenset(
        lease.worker
        for lease, age_s in leases
        if isinstance(lease, WorkerLease) and lease.state.is_held and age_s <= _LEASES * lease_s
    )

"""Taking the partitions away from a worker that goes on running, and giving it some again: for operators."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from keylane.core.fleet_records import DRAINS, DrainedWorkers, WorkerLease, from_json, to_json, worker_key
from keylane.errors import BrokenFleetRecord, InvalidInput, NotAMember
from keylane.fleet.admin import required_spec
from keylane.fleet.store import FLEET_BUCKET
from keylane.jetstream import Bucket, Connection, KvEntry, change


async def drain(connection: Connection, stream: str, fleet: str, worker_id: str) -> None:
    """Let a worker hand its partitions over and stay without any, until `resume` or until it is started again.

    Returns when this is recorded. The leader acts on it at once, and `status` shows how far it is. A fleet whose
    workers are all drained keeps its assignment: nobody could take the partitions.
    """
    worker = await _number(connection, stream, fleet, worker_id)
    bucket = Bucket(connection, FLEET_BUCKET)
    entry = await bucket.get(f"{stream}.{fleet}.{worker_key(worker)}")
    lease = from_json(worker_key(worker), entry.value) if entry is not None and entry.value is not None else None
    if not isinstance(lease, WorkerLease) or not lease.state.is_held:
        raise NotAMember(f"worker {worker_id!r} of fleet {fleet!r} does not run: `keylane fleet status` lists who does")
    instance = lease.instance
    await _change(bucket, f"{stream}.{fleet}.{DRAINS}", lambda before: {**before, worker: instance})


async def resume(connection: Connection, stream: str, fleet: str, worker_id: str) -> bool:
    """Let a worker that was drained have partitions again. False: it was not drained, and nothing has changed."""
    worker = await _number(connection, stream, fleet, worker_id)
    return await _change(
        Bucket(connection, FLEET_BUCKET),
        f"{stream}.{fleet}.{DRAINS}",
        lambda before: {one: instance for one, instance in before.items() if one != worker},
    )


async def _number(connection: Connection, stream: str, fleet: str, worker_id: str) -> int:
    spec = await required_spec(connection, stream, fleet)
    number = worker_id.removeprefix(f"{spec.prefix}-")
    if number == worker_id or not number.isdecimal():
        raise InvalidInput(
            f"worker id {worker_id!r} is none of fleet {fleet!r}: they are called {spec.prefix}-<number>"
        )
    return int(number)


async def _change(bucket: Bucket, key: str, decide: Callable[[dict[int, str]], dict[int, str]]) -> bool:
    """Whether it was changed."""
    is_changed = False

    async def write(entry: KvEntry | None) -> None:
        nonlocal is_changed
        before: dict[int, str] = {}
        if entry is not None and entry.value is not None:
            with suppress(BrokenFleetRecord):  # it drains nobody, and is written anew
                record = from_json(DRAINS, entry.value)
                assert isinstance(record, DrainedWorkers)
                before = dict(record.workers)
        after = decide(before)
        is_changed = after != before
        if is_changed:
            value = to_json(DrainedWorkers(workers=after))
            await bucket.put(key, value, revision=entry.revision if entry is not None else 0)

    await change(lambda: bucket.get(key), write)
    return is_changed

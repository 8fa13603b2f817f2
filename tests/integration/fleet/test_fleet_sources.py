"""Partitions that come and go while a fleet works: listed in a KV value, or discovered from the stream's subjects."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from nats.js.api import RetentionPolicy

from keylane import PartitionBy, fleet
from keylane.core.fleet_names import partition_consumer, subject_id
from keylane.errors import FleetError, InvalidInput
from keylane.fleet import Worker, WorkerHooks, discovered, from_kv
from keylane.groups import GroupMessage
from keylane.jetstream import Bucket, consumers
from tests.integration.fleet.rig import FleetGround
from tests.integration.groups.conftest import MakeGround
from tests.integration.groups.rig import flawless
from tests.waiter import until


@pytest.fixture(params=["limits", "workqueue"])
async def plain(make: MakeGround, request: pytest.FixtureRequest) -> FleetGround:
    """A stream without partition numbers."""
    return FleetGround(await make(retention=RetentionPolicy(request.param), allow_direct=True))


class List:
    """The KV value that a fleet's partitions are listed in."""

    def __init__(self, ground: FleetGround) -> None:
        self._ground = ground
        self._bucket = Bucket(ground.connection, "tools")
        self.source = from_kv("tools", ground.stream)

    async def write(self, *keys: str | dict[str, Any]) -> None:
        stream = self._ground.stream
        entries = [f"{stream}.{one}" if isinstance(one, str) else one for one in keys]
        await self.put(json.dumps(entries).encode())

    async def put(self, value: bytes) -> None:
        await self._bucket.ensure(replicas=1)
        entry = await self._bucket.get(self.source.key)
        await self._bucket.put(self.source.key, value, revision=entry.revision if entry is not None else 0)


async def own(ground: FleetGround, keys: str, *workers: Worker) -> None:
    """Wait until these workers own the partitions of these keys together, and no others."""
    wanted = sorted(subject_id(f"{ground.stream}.{key}") for key in keys)
    await until(lambda: [worker.partitions for worker in workers], lambda owned: sorted(sum(owned, ())) == wanted)


async def test_a_list_in_a_kv_value_is_followed_live(plain: FleetGround) -> None:
    listing = List(plain)
    await listing.write(*"abcd")
    one = await plain.join("one", partitions=listing.source)
    two = await plain.join("two", partitions=listing.source)
    await own(plain, "abcd", one, two)
    sent = await plain.publish("abcd" * 3)
    await plain.evidence.all_of(sent)
    await listing.write(*"bcdefg")
    await own(plain, "bcdefg", one, two)
    late = await plain.publish("aefg")
    await plain.evidence.all_of(late[1:])
    kept = await consumers.info(
        plain.connection, plain.stream, partition_consumer("f", subject_id(f"{plain.stream}.a"))
    )
    assert kept.num_pending == 1, "its consumer and position are kept"
    await listing.write(*"abcdefg")
    await plain.evidence.all_of(late)
    assert flawless(plain.evidence.verdict([*sent, *late]))
    found = await fleet.status(plain.connection, plain.stream, "f")
    assert len(found.partitions) == 7


async def test_a_partition_that_stays_is_not_disturbed(limits: FleetGround) -> None:
    at_work, go_on = asyncio.Event(), asyncio.Event()

    async def slow(message: GroupMessage) -> None:
        if message.data == b"slow":
            at_work.set()
            await go_on.wait()
        await limits.evidence.note("a", message)

    source = discovered(PartitionBy(f"*.{limits.stream}.*", key=[2]))
    [stuck] = await limits.publish("a", b"slow")
    worker = await limits.join("a", slow, partitions=source)
    await at_work.wait()
    new = await limits.publish("bcd")
    await limits.evidence.all_of(new)
    assert len(worker.partitions) == 4
    go_on.set()
    await limits.evidence.all_of([stuck])
    assert flawless(limits.evidence.verdict([stuck, *new]))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"{", "is not JSON"),
        (b"[]", "the list of subjects is empty"),
        (b'["a.*", "a.b"]', "overlap"),
    ],
)
async def test_a_value_that_cannot_be_used_changes_nothing(limits: FleetGround, value: bytes, said: str) -> None:
    told: list[str | None] = []
    listing = List(limits)
    # Subjects as they are stored: this stream puts a number in front.
    await listing.put(json.dumps([f"*.{limits.stream}.{key}" for key in "ab"]).encode())
    worker = await limits.join("a", partitions=listing.source, hooks=WorkerHooks(on_source=told.append))
    await until(lambda: len(worker.partitions) == 2)
    await listing.put(value)
    await until(lambda: told)
    [problem] = told
    assert problem is not None
    assert said in problem
    assert problem.endswith("The last good list of partitions stays in force")
    sent = await limits.publish("ab")
    await limits.evidence.all_of(sent)
    await listing.put(json.dumps([f"*.{limits.stream}.{key}" for key in "abc"]).encode())
    await until(lambda: len(worker.partitions) == 3)
    assert told[1:] == [None]


async def test_a_key_that_does_not_exist(limits: FleetGround) -> None:
    with pytest.raises(FleetError, match="bucket 'nothing' has no key 'here': write the list"):
        await limits.join("a", partitions=from_kv("nothing", "here"))
    listing = List(limits)
    await listing.put(b"17")
    with pytest.raises(InvalidInput, match="holds 17: write a list"):
        await limits.join("a", partitions=listing.source)


async def test_subjects_of_the_stream_are_discovered(plain: FleetGround) -> None:
    """On a work queue a subject is gone when its messages are acked, and stays a partition."""
    source = discovered(f"{plain.stream}.*", weights={f"{plain.stream}.a": 5})
    sent = await plain.publish("ab")
    worker = await plain.join("one", partitions=source)
    await own(plain, "ab", worker)
    await plain.evidence.all_of(sent)
    sent += await plain.publish("cd")
    await own(plain, "abcd", worker)
    other = await plain.join("two", partitions=source)
    await until(lambda: other.partitions)
    await own(plain, "abcd", worker, other)
    sent += await plain.publish("abcd" * 5)
    await plain.evidence.all_of(sent)
    assert flawless(plain.evidence.verdict(sent))

"""A group's record in a bucket that was made anew: what counts is what it says, not its revision."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from keylane.groups import Member
from keylane.groups.config import Kind
from keylane.groups.store import bucket_of
from keylane.jetstream import ConsumerConfig, streams
from keylane.server import NatsServer
from tests.integration.groups.rig import Ground, flawless
from tests.integration.groups.test_healing import keys, reason_of
from tests.waiter import until

PATIENT = ConsumerConfig(ack_wait_s=20.0)
"""So long that nobody looks by itself while a test changes things."""


class Rewritten:
    """A group on a server of its own, whose bucket is made anew with another record."""

    def __init__(self, ground: Ground, kind: Kind) -> None:
        self.ground = ground
        self.kind = kind
        self._bucket = bucket_of(ground.connection, kind)
        self._key = f"{ground.stream}.g"

    async def create(self, **options: Any) -> None:
        if self.kind == "elastic":
            await self.ground.elastic(**options)
            return
        stream = self.ground.stream
        partition = f"{{{{Partition({options.get('partitions', 4)},1)}}}}"
        await self.ground.transform_subjects(src=f"{stream}.*", dest=f"{partition}.{stream}.{{{{Wildcard(1)}}}}")
        await self.ground.static(**options)

    async def join(self, member: str) -> Member:
        return await self.ground.join(member, settings=PATIENT)

    async def record(self) -> dict[str, Any]:
        entry = await self._bucket.get(self._key)
        assert entry is not None
        assert entry.value is not None
        return json.loads(entry.value)  # type: ignore[no-any-return]

    async def make_anew(self, *, writes: int = 1, seen_gone: bool = False, **changes: Any) -> int:
        """The bucket anew, with this change in the record; returns the revision. `seen_gone`: members look between."""
        record = json.dumps(await self.record() | changes).encode()
        await streams.delete(self.ground.connection, f"KV_{self._bucket.name}")
        if seen_gone:
            await self.ground.connection.nats.publish(f"$KV.{self._bucket.name}.{self._key}", b"look")
            await asyncio.sleep(0.05)  # they have looked now, and are to look again before they believe it
        await self._bucket.ensure(replicas=1)
        revision = 0
        for _ in range(writes):
            revision = await self._bucket.put(self._key, record, revision=revision)
        return revision


@pytest.fixture(params=["static", "elastic"])
def rewritten(request: pytest.FixtureRequest, own_server_ground: tuple[Ground, NatsServer]) -> Rewritten:
    return Rewritten(own_server_ground[0], request.param)


@pytest.mark.parametrize("writes", [1, 2], ids=["equal revision", "other revision"])
async def test_another_number_of_partitions_ends_members(rewritten: Rewritten, writes: int) -> None:
    await rewritten.create(partitions=6, members=["a", "b"])
    members = [await rewritten.join(name) for name in ("a", "b", "a")]
    await until(lambda: all(member.partitions for member in members))
    assert await rewritten.make_anew(max_members=3, writes=writes) == writes
    for member in members:
        reason = await reason_of(member)
        assert "was changed in a way that running members cannot follow" in reason
        assert "partitions=6" in reason
        assert "partitions=3" in reason


async def test_other_members_end_a_static_group_and_are_followed_in_an_elastic_one(rewritten: Rewritten) -> None:
    await rewritten.create(members=["a", "b"])
    members = [await rewritten.join(name) for name in ("a", "b")]
    await until(lambda: all(member.partitions for member in members))
    assert await rewritten.make_anew(members=["a"]) == 1
    if rewritten.kind == "static":
        for member in members:
            assert "cannot follow" in await reason_of(member)
    else:
        await until(lambda: members[0].partitions == (0, 1, 2, 3) and members[1].partitions == ())
        assert members[1].state == "not listed"


async def test_a_bucket_that_is_away_for_a_moment_ends_nobody(own_server_ground: tuple[Ground, NatsServer]) -> None:
    ground, _ = own_server_ground
    group = Rewritten(ground, "elastic")
    await group.create(members=["a", "b"])
    members = [await group.join(name) for name in ("a", "b")]
    await until(lambda: all(member.partitions for member in members))
    await group.make_anew(seen_gone=True)
    sent = await ground.publish(keys(40))
    await ground.evidence.all_of(sent)
    assert [member.state for member in members] == ["active", "active"]


@pytest.mark.parametrize("writes", [1, 3], ids=["equal revision", "other revision"])
async def test_the_same_record_is_nothing_new(own_server_ground: tuple[Ground, NatsServer], writes: int) -> None:
    ground, _ = own_server_ground
    group = Rewritten(ground, "elastic")
    await group.create(members=["a", "b"])
    members = [await group.join(name) for name in ("a", "b")]
    sent = await ground.publish(keys(40))
    await ground.evidence.all_of(sent)
    assert await group.make_anew(writes=writes) == writes
    sent += await ground.publish(keys(40))
    await ground.evidence.all_of(sent)
    assert flawless(ground.evidence.verdict(sent))
    assert [member.state for member in members] == ["active", "active"]

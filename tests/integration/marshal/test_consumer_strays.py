"""Records in a coordination log that nobody can use: they are counted and skipped, and nobody stops for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from keylane import Connection
from keylane.core.claim_facts import Key
from keylane.core.claim_records import ClaimingPartition, Heartbeat, encode
from keylane.errors import RevisionConflict
from keylane.jetstream import streams
from keylane.marshal import Admin, Appetite, MemorySource, Newest, open_jetstream_log
from keylane.marshal.jetstream_log import subject_of
from tests.integration.marshal.rig import (
    GROUP,
    TOPIC,
    LiveLog,
    Seen,
    View,
    consumer,
    fill,
    in_order_per_key,
    kill,
)
from tests.integration.marshal.stream_rig import PARTITIONS, Ground, publish
from tests.waiter import until

pytestmark = pytest.mark.timeout(120)

STRAYS = {
    "noise": b"\x00\x01",
    "empty": b"",
    "newer": b"Heartbeat/2/1/i/anna/billing/orders/0/5/more",
    "unknown": b"Handover/2/1/i/anna/billing/orders/0/5",
    "another key's heartbeat": encode(Heartbeat("i", "odd", "billing", "elsewhere", 0, 5, 1)),
    "another key's claim": encode(ClaimingPartition("i", "odd", "billing", "elsewhere", 0, 1)),
}


def claims_of(ground: Ground, partition: int = 0) -> str:
    return subject_of(ground.log_name, ClaimingPartition("i", "c", "billing", ground.stream, partition, 1))


async def write(connection: Connection, ground: Ground, value: bytes) -> None:
    """On the subject of every partition."""
    for partition in range(PARTITIONS):
        await connection.nats.request(claims_of(ground, partition), value, timeout=5)


@pytest.mark.parametrize("value", STRAYS.values(), ids=STRAYS.keys())
async def test_the_owner_goes_on_and_newcomers_get_their_share(
    ground: Ground, connection: Connection, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    ground, seen = replace(ground, interval_s=0.5), Seen()
    async with ground.consumer("anna", seen, pick=Appetite(greedy=True)) as anna:
        await until(lambda: len(anna.partitions) == PARTITIONS)
        async with open_jetstream_log(connection, ground.log_name) as log:
            admin = Admin(log)
            tokens = {one.token for one in (await admin.world()).claims()}
            await write(connection, ground, value)
            first = (await log.bounds()).end
            # each partition has two more heartbeats
            await until(log.bounds, lambda seen: seen.end >= first + 2 * PARTITIONS, deadline_s=20)
            world = await admin.world()
        assert world.unreadable == PARTITIONS
        assert {one.token for one in world.claims()} == tokens, "it lost nothing"
        assert "records of the coordination log are skipped, such as record" in caplog.text
        await write(connection, ground, value)
        async with ground.consumer("bert", seen) as bert:
            await until(lambda: len(anna.partitions) == len(bert.partitions) == PARTITIONS // 2)
            await publish(connection, ground, 60)
            await seen.until(lambda one: len(one.messages) == 60)
    assert set(seen.times.values()) == {1}


async def test_partitions_whose_newest_record_is_a_stray_are_taken_over(ground: Ground, connection: Connection) -> None:
    ground, first, seen = replace(ground, interval_s=0.5), Seen(), Seen()
    async with ground.consumer("anna", first, pick=Appetite(greedy=True)) as anna:
        await until(lambda: len(anna.partitions) == PARTITIONS)
        await kill(anna)
        await write(connection, ground, b"\x00\x01")
        async with ground.consumer("bert", seen, mode="at_most_once") as bert:
            await until(lambda: len(bert.partitions) == PARTITIONS)
            await publish(connection, ground, 30)
            await seen.until(lambda one: len(one.messages) == 30)
            assert in_order_per_key(seen.messages)


async def test_what_is_newest_is_known_by_the_subject(connection: Connection, unique: Callable[..., str]) -> None:
    """A claim needs all records of its subject to be read, and nothing of what they say."""
    name, claim = unique("claims"), ClaimingPartition("i", "anna", GROUP, TOPIC, 0, 1)
    try:
        async with open_jetstream_log(connection, name, interval_s=10) as log:
            await connection.nats.request(subject_of(name, claim), b"\x00\x01", timeout=5)
            with pytest.raises(RevisionConflict):
                await log.append(claim, expect=Newest(None, read_to=1))
            assert (await log.append(claim, expect=Newest(None, read_to=2))).offset == 2
            await connection.nats.request(subject_of(name, claim), b"\x00\x01", timeout=5)
            with pytest.raises(RevisionConflict):
                await log.append(claim, expect=Newest(2, read_to=3))
            assert (await log.append(claim, expect=Newest(2, read_to=4))).offset == 4
            subjects = [record.subject async for record in log.read()]
            assert subjects == ["claims.billing.orders.0"] * 4
    finally:
        await streams.delete(connection, name)


@pytest.mark.parametrize("compares", [True, False])
@pytest.mark.parametrize("mode", ["at_least_once", "at_most_once"])
async def test_strays_on_any_log(compares: bool, mode: str) -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 2}), Seen()
    async with consumer(View(log, compares=compares), source, "anna", seen, mode=mode) as anna:
        await until(lambda: len(anna.partitions) == 2)
        for number in range(10):
            for partition in range(2):
                log.write(b"\x00\x01", 0, key=Key(GROUP, TOPIC, partition))
            fill(source, 2, 5, first=5 * number)
            await until(lambda: len(seen.messages) == 10 * (number + 1))  # noqa: B023 - waited for in this round
        assert len(anna.partitions) == 2
    async with consumer(View(log, compares=compares), source, "bert", seen, mode=mode) as bert:
        await until(lambda: len(bert.partitions) == 2)
    assert set(seen.times.values()) == {1}

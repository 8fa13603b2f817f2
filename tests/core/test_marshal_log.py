"""The log in memory, and reading a log into a world."""

from __future__ import annotations

import pytest

from keylane.core.claim_records import ClaimingPartition, Heartbeat, ReleaseGroup
from keylane.errors import InvalidInput, LogReplaced, ReadIncomplete, RevisionConflict
from keylane.marshal import Bounds, CoordinationLog, MemoryLog, Newest, Position, Verdict, World, catch_up

INTERVAL_S = 10


def claim(who: str, partition: int = 0) -> ClaimingPartition:
    return ClaimingPartition("i", who, "billing", "orders", partition, 1)


def beat(who: str, offset: int) -> Heartbeat:
    return Heartbeat("i", who, "billing", "orders", 0, offset, 1)


async def test_a_claim_in_a_log() -> None:
    log: CoordinationLog = MemoryLog()
    world = World(INTERVAL_S)
    first, second = await log.append(claim("anna"), 0), await log.append(claim("bert"), 0)
    assert (first, second) == (Position(0, 0), Position(0, 1))
    await catch_up(log, world)
    assert [world.verdict_of(*first), world.verdict_of(*second)] == [Verdict.WON, Verdict.LOST]


async def test_the_clock_is_yours() -> None:
    log = MemoryLog(now_ms=1000)
    world = World(INTERVAL_S)
    await log.append(claim("anna"), 0)
    log.now_ms += 20_000
    early = await log.append(claim("bert"), 0)
    log.now_ms += 1
    late = await log.append(claim("bert"), 0)
    await catch_up(log, world)
    assert [world.verdict_of(*early), world.verdict_of(*late)] == [Verdict.LOST, Verdict.WON]
    assert repr(log) == "<MemoryLog [3] at 21001 ms>"


async def test_only_if_nobody_was_quicker() -> None:
    log = MemoryLog()
    await log.append(claim("anna"), 0, expect=Newest(None))
    with pytest.raises(RevisionConflict, match="is 0 and not None: read the log"):
        await log.append(claim("bert"), 0, expect=Newest(None))
    await log.append(claim("bert", 1), 0, expect=Newest(None))
    await log.append(ReleaseGroup("i", "admin", "billing", 0, 1), 0)
    await log.append(beat("anna", 5), 0, expect=Newest(0))
    world = World(INTERVAL_S)
    await catch_up(log, world)
    assert world.newest_of("billing", "orders", 0) == 3
    assert await log.bounds(0) == Bounds(0, 4)


async def test_reading_stops_at_the_end_as_it_was() -> None:
    log = MemoryLog()
    await log.append(claim("anna"), 0)
    seen = []
    async for record in log.read(0, 0):
        seen.append(record.offset)
        await log.append(beat("anna", 1), 0)
    assert seen == [0]
    await log.append(beat("anna", 2), 0)
    assert [record.offset async for record in log.read(0, 1)] == [1, 2]
    log.trim(before=1)
    assert [record.offset async for record in log.read(0, 2)] == [2]
    assert [record.offset async for record in log.read(0, 3)] == []


async def test_every_partition_or_one() -> None:
    log, world = MemoryLog(64), World(INTERVAL_S, 64)
    for number in range(10):
        await log.append(claim("anna", number), world.where("orders", number))
    await catch_up(log, world, world.where("orders", 0))
    assert world.holds("billing", "orders", 0)
    assert len(world.owned_by("billing", "anna")) < 10
    await catch_up(log, world)
    assert len(world.owned_by("billing", "anna")) == 10
    assert world.misplaced == 0


async def test_reading_on() -> None:
    log, world = MemoryLog(), World(INTERVAL_S)
    await catch_up(log, world)
    for offset in range(3):
        await log.append(claim("anna"), 0)
        log.write(b"noise", 0)
        await catch_up(log, world)
        assert (world.next_offset(0), world.unreadable) == (2 * offset + 2, offset + 1)


async def test_a_trimmed_log() -> None:
    log, world = MemoryLog(), World(INTERVAL_S)
    await log.append(claim("anna"), 0)
    await log.append(beat("anna", 7), 0)
    log.trim(before=1)
    lost = await log.append(claim("bert"), 0)
    await catch_up(log, world)
    assert world.verdict_of(*lost) is Verdict.LOST
    with pytest.raises(ReadIncomplete, match="records 0 to 0 of the coordination log have expired"):
        [record async for record in log.read(0, 0)]


async def test_a_fleet_that_comes_back_to_a_log_whose_records_are_all_gone() -> None:
    log, world = MemoryLog(), World(INTERVAL_S)
    await log.append(claim("anna"), 0)
    log.trim(before=1)
    await catch_up(log, world)
    won = await log.append(claim("bert"), 0)
    await catch_up(log, world)
    assert world.verdict_of(*won) is Verdict.WON


async def test_a_world_that_missed_records_is_told() -> None:
    log, world = MemoryLog(), World(INTERVAL_S)
    await log.append(claim("anna"), 0)
    await catch_up(log, world)
    await log.append(claim("bert"), 0)
    await log.append(beat("anna", 1), 0)
    log.trim(before=2)
    with pytest.raises(LogReplaced, match=r"begins at 2 and was read to 1 before.*a new World"):
        await catch_up(log, world)


async def test_a_log_that_was_made_anew_is_told() -> None:
    log, world = MemoryLog(), World(INTERVAL_S)
    await log.append(claim("anna"), 0)
    await catch_up(log, world)
    with pytest.raises(LogReplaced, match="ends at 0 and was read to 1 before"):
        await catch_up(MemoryLog(), world)


async def test_the_number_of_partitions_must_not_change() -> None:
    with pytest.raises(InvalidInput, match="a world of 4 partitions and a coordination log of 8"):
        await catch_up(MemoryLog(8), World(INTERVAL_S, 4))
    with pytest.raises(InvalidInput, match="at least 1"):
        MemoryLog(0)

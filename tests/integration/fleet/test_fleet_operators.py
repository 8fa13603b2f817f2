"""What operators do and see: a worker is drained and resumed, and the history tells what moved."""

from __future__ import annotations

import pytest

from keylane import fleet
from keylane.errors import InvalidInput, NotAMember
from tests.integration.fleet.rig import KEYS, FleetGround
from tests.integration.groups.rig import flawless
from tests.waiter import until


async def test_a_drained_worker_has_nothing_until_it_is_resumed(limits: FleetGround) -> None:
    a, b = await limits.join("a"), await limits.join("b")
    await limits.shared(a, b)
    async with limits.load() as sent:
        await fleet.drain(limits.connection, limits.stream, "f", "f-1")
        await limits.shared(a)
        assert not b.partitions
        assert await until(lambda: b.waiting_for) == "an operator, who has drained this worker, to resume it"
        await fleet.resume(limits.connection, limits.stream, "f", "f-1")
        await limits.shared(a, b)
    await limits.evidence.all_of(sent)
    assert flawless(limits.evidence.verdict(sent))
    first, drained, *rest = await fleet.history(limits.connection, limits.stream, "f")
    assert (first.cause, first.version) == ("start", 1)
    assert {move.before for move in first.moves} == {None}
    assert (drained.cause, drained.reason, drained.version) == ("drain", "worker 1 drained", 2)
    assert {(move.before, move.after) for move in drained.moves} == {("f-1", "f-0")}
    assert rest


async def test_a_restart_ends_a_drain(limits: FleetGround) -> None:
    a, b = await limits.join("a"), await limits.join("b")
    await limits.shared(a, b)
    await fleet.drain(limits.connection, limits.stream, "f", "f-1")
    await limits.shared(a)
    await b.stop()
    b = await limits.join("b")
    await limits.shared(a, b)
    assert b.id == "f-1"


async def test_who_cannot_be_drained(limits: FleetGround) -> None:
    a = await limits.join("a")
    await limits.shared(a)
    with pytest.raises(NotAMember, match="worker 'f-7' of fleet 'f' does not run"):
        await fleet.drain(limits.connection, limits.stream, "f", "f-7")
    with pytest.raises(InvalidInput, match="they are called f-<number>"):
        await fleet.drain(limits.connection, limits.stream, "f", "7")
    await fleet.drain(limits.connection, limits.stream, "f", "f-0")  # nobody else could take its partitions
    sent = await limits.publish(KEYS)
    await limits.evidence.all_of(sent)

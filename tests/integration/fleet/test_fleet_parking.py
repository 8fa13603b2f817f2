"""Parked keys on real servers: a message that had all its tries stops its key, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from keylane.errors import GroupError, NotFound
from keylane.groups import GroupMessage, key_parking
from keylane.groups.dead_letters import DeadLetter, drop, list_dead_letters
from tests.integration.fleet.rig import KEYS, FleetGround, WorkerProcess
from tests.integration.groups.rig import Evidence, Ground, flawless
from tests.waiter import until

PARK: dict[str, Any] = {"max_tries": 2, "after_tries": "park"}


BAD_KEYS = KEYS[:4]


class Failing:
    """Fails on messages of some keys as long as it is told to."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self.keys: set[str] = set()

    def handler(self, name: str) -> Callable[[GroupMessage], Any]:
        async def handle(message: GroupMessage) -> None:
            if message.key in self.keys:
                raise ValueError(f"no account {message.key}")
            self._evidence.add(name, message)

        return handle


async def parked(ground: FleetGround | Ground, group: str = "f") -> list[DeadLetter]:
    return [one async for one in list_dead_letters(ground.connection, ground.stream, group=group)]


async def test_a_poison_message_stops_its_key_alone_and_a_release_goes_on_in_order(ground: FleetGround) -> None:
    failing = Failing(ground.evidence)
    failing.keys = {"k1"}
    worker = await ground.join("a", failing.handler("a"), **PARK)
    await ground.shared(worker)
    sent = await ground.publish(["k1", "k2", "k1", "k3", "k1", "k2"])
    others = [sent[1], sent[3], sent[5]]
    await ground.evidence.all_of(others)
    found = await until(lambda: parked(ground), lambda letters: len(letters) == 3)
    assert [one.source_sequence for one in found] == [sent[0], sent[2], sent[4]]
    assert all(one.is_parked and one.key == "k1" for one in found)
    assert found[0].error == "ValueError: no account k1"
    assert "is parked" in found[1].error

    failing.keys.clear()
    assert await key_parking.release(ground.connection, ground.stream, "f", "k1") == 3
    sent += await ground.publish(["k1", "k2"])
    await ground.evidence.all_of(sent)
    assert flawless(ground.evidence.verdict(sent))
    await until(lambda: parked(ground), lambda letters: not letters)
    sent += await ground.publish(["k1"])
    await ground.evidence.all_of(sent)
    assert flawless(ground.evidence.verdict(sent))


async def test_a_key_stays_parked_when_its_partition_moves(ground: FleetGround) -> None:
    failing = Failing(ground.evidence)
    failing.keys = {"k1"}
    first = await ground.join("a", failing.handler("a"), **PARK)
    await ground.shared(first)
    sent = await ground.publish(["k1"])
    await until(lambda: parked(ground), lambda letters: len(letters) == 1)
    second = await ground.join("b", failing.handler("b"), **PARK)
    await ground.shared(first, second)
    await first.stop()
    await ground.shared(second)
    failing.keys.clear()
    sent += await ground.publish(["k1", "k2", "k1"])
    await until(lambda: parked(ground), lambda letters: len(letters) == 3)
    assert [line.key for line in ground.evidence.lines] == ["k2"]
    await key_parking.release(ground.connection, ground.stream, "f", "k1")
    await ground.evidence.all_of(sent)
    assert flawless(ground.evidence.verdict(sent))


async def test_what_fails_again_stays_parked_and_a_dropped_one_lets_the_key_go_on(limits: FleetGround) -> None:
    failing = Failing(limits.evidence)
    failing.keys = {"k1"}
    worker = await limits.join("a", failing.handler("a"), **PARK)
    await limits.shared(worker)
    await limits.publish(["k1"])
    letter = (await until(lambda: parked(limits), lambda letters: len(letters) == 1))[0]
    await key_parking.release(limits.connection, limits.stream, "f", "k1")
    await until(lambda: key_parking.wishes(limits.connection, limits.stream, "f"), lambda found: not found)
    assert [one.sequence for one in await parked(limits)] == [letter.sequence]

    failing.keys.clear()
    await drop(limits.connection, limits.stream, letter.sequence)
    sent: list[int] = []

    async def one_more() -> set[int]:
        sent.extend(await limits.publish(["k1"]))
        await key_parking.release(limits.connection, limits.stream, "f", "k1") if await parked(limits) else None
        return {line.sequence for line in limits.evidence.lines}

    await until(one_more, lambda handled: set(sent[:-1]) <= handled and bool(sent[:-1]))
    await limits.evidence.all_of(sent)
    assert flawless(limits.evidence.verdict(sent))


async def test_a_worker_that_does_not_park_is_refused_while_keys_are_parked(limits: FleetGround) -> None:
    failing = Failing(limits.evidence)
    failing.keys = {"k1"}
    worker = await limits.join("a", failing.handler("a"), **PARK)
    await limits.shared(worker)
    await limits.publish(["k1"])
    await until(lambda: parked(limits), lambda letters: len(letters) == 1)
    with pytest.raises(GroupError, match=r"1 keys of .* are parked: join with after_tries='park'"):
        await limits.join("b")
    with pytest.raises(NotFound, match=r"key 'k9' of .* is not parked"):
        await key_parking.release(limits.connection, limits.stream, "f", "k9")


@pytest.mark.long("kills four workers")
async def test_random_kills_leave_parked_keys_whole_and_others_do_not_wait(ground: FleetGround, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    chance = random.Random(1)  # noqa: S311 - the same kills every time

    async with AsyncExitStack() as stack:
        processes: list[WorkerProcess] = []

        async def start(name: str) -> WorkerProcess:
            options = PARK | {"broken": str(broken)}
            processes.append(await stack.enter_async_context(ground.process(name, **options)))
            return processes[-1]

        alive = [await start("a"), await start("b")]
        await until(lambda: all(one.partitions for one in alive))
        sent: list[int] = []
        for number in range(3):
            sent += await ground.publish(KEYS)
            sent += await ground.publish(chance.sample(BAD_KEYS, 2), b"bad")
            sent += await ground.publish(KEYS * 2)
            victim = alive.pop(chance.randrange(2))
            await ground.evidence.all_of(sent[-1:])  # in the middle of it
            victim.process.kill()
            alive.append(await start(f"c{number}"))
            await until(lambda: all(one.partitions for one in alive))
        rest = await ground.publish(KEYS[len(BAD_KEYS) :])
        await ground.evidence.all_of(rest)  # keys that are not parked do not wait
        waiting = await until(lambda: parked(ground), bool)
        keys = {one.key for one in waiting}
        assert keys
        assert keys <= set(BAD_KEYS)
        broken.unlink()
        for key in keys:
            await key_parking.release(ground.connection, ground.stream, "f", key)
        victim = alive.pop(chance.randrange(2))
        victim.process.kill()  # in the middle of a release
        await ground.evidence.all_of([*sent, *rest])
        await until(lambda: parked(ground), lambda letters: not letters)
    verdict = ground.evidence.verdict([*sent, *rest])
    assert verdict.clean, verdict

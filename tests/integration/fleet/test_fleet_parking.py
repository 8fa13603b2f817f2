"""Parked keys on real servers: a message that had all its tries stops its key, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from keylane.core.parked_keys import KeyGate
from keylane.dead_letters import DeadLetter, drop, list_dead_letters
from keylane.errors import Fenced, GroupError, NotFound
from keylane.groups import GroupMessage, GroupSource
from keylane.jetstream import Message
from keylane.processing import key_parking
from keylane.processing.message import Place
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


async def test_many_keys_park_at_once_on_a_cluster(cluster_ground: FleetGround) -> None:
    failing = Failing(cluster_ground.evidence)
    failing.keys = set(KEYS[:20])
    worker = await cluster_ground.join("a", failing.handler("a"), **PARK)
    await cluster_ground.shared(worker)
    sent = await cluster_ground.publish(KEYS * 2)
    found = await until(lambda: parked(cluster_ground), lambda letters: len(letters) == 40, deadline_s=30)
    assert {one.key for one in found} == failing.keys
    failing.keys.clear()
    for key in KEYS[:20]:
        await key_parking.release(cluster_ground.connection, cluster_ground.stream, "f", key)
    await cluster_ground.evidence.all_of(sent)
    assert flawless(cluster_ground.evidence.verdict(sent))


class Token:
    """An owner of partition 0 with this fencing token."""

    def __init__(self, stream: str, token: int) -> None:
        self.stream, self.group, self.member, self.instance = stream, "f", f"w{token}", ""
        self.revision, self.pin_id, self.from_queue = token, None, False

    async def source(self) -> GroupSource:
        return GroupSource("fleet", self.revision, "", 0, 0)

    async def fence(self, *, anew: bool = False) -> tuple[int, int]:
        return self.revision, 0


async def test_an_owner_that_was_replaced_parks_nothing(limits: FleetGround) -> None:
    def message(owner: Token, sequence: int) -> GroupMessage:
        reply = f"$JS.ACK.{limits.stream}.f-p0.1.{sequence}.{sequence}.1.0".encode()
        delivery = Message(limits.connection.nats, b"0.x.k1", reply, b"", b"x")
        return GroupMessage(delivery, Place.of(0, "x.k1", "k1"), owner)  # type: ignore[arg-type]

    old, new = Token(limits.stream, 1), Token(limits.stream, 2)
    before, after = (key_parking.KeyParking(limits.connection, limits.stream, "f", max_tries=1) for _ in range(2))
    await before.start()
    assert await before.gate(message(old, 1)) is KeyGate.RUN
    assert await after.gate(message(new, 1)) is KeyGate.RUN
    for _ in range(2):  # it stays so, also after the old owner has asked again
        with pytest.raises(Fenced, match=r"w1 of .* does not own partition 0 any more"):
            await before.give_up(message(old, 1), ValueError("bad"), 1)
    assert await parked(limits) == []
    await after.give_up(message(new, 1), ValueError("bad"), 1)
    await after.give_up(message(new, 1), ValueError("bad"), 1)  # delivered again after a crash
    assert [one.member for one in await parked(limits)] == ["w2"]

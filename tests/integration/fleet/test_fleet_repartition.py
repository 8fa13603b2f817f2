"""Another number of partitions while a fleet works: order per key, nothing lost, nothing twice, whoever is killed."""

from __future__ import annotations

import asyncio
import re

import pytest

from keylane import fleet, groups
from keylane.core.fleet_generations import in_words
from keylane.errors import FleetError
from keylane.fleet import hashed
from keylane.fleet.repartition import GenerationKeeper, fleet_partitions
from keylane.fleet.store import FLEET_BUCKET
from keylane.groups import GroupMessage
from keylane.jetstream import Bucket, ConsumerConfig, consumers
from tests.integration.fleet.rig import KEYS, PARTITIONS, FleetGround, owns_all
from tests.integration.groups.rig import flawless
from tests.waiter import until


async def partitions_of(ground: FleetGround) -> int:
    table = (await fleet_partitions(ground.connection, ground.stream, "f")).table
    return table.generations[0].partitions if in_words(table) is None else 0


async def there_and_back(ground: FleetGround, pause_s: float = 0.01) -> None:
    async with ground.load(pause_s) as sent:
        workers = [await ground.join(name) for name in "abc"]
        await ground.shared(*workers)
        for count in (2 * PARTITIONS, PARTITIONS + 3):
            await fleet.repartition(ground.connection, ground.stream, "f", count, wait_s=90)
            await owns_all(count, *workers)
            so_far = list(sent)
            await ground.evidence.all_of(so_far)
    await ground.evidence.all_of(sent)
    assert flawless(ground.evidence.verdict(sent))
    numbers = {line.partition for line in ground.evidence.lines}
    assert numbers == set(range(2 * PARTITIONS)), "the new partitions were used"
    left = {info.name async for info in consumers.list_all(ground.connection, ground.stream)}
    assert left == {f"f-p{number}g2" for number in range(PARTITIONS + 3)}


async def test_more_partitions_and_fewer_under_load(ground: FleetGround) -> None:
    await there_and_back(ground)


@pytest.mark.long("a cluster of three servers, three workers, and two changes under load")
@pytest.mark.timeout(240)
async def test_more_partitions_and_fewer_under_load_on_a_cluster(cluster_ground: FleetGround) -> None:
    await there_and_back(cluster_ground, pause_s=0.1)


async def test_a_backlog_of_old_numbers_is_handled_before_new_ones_begin(limits: FleetGround) -> None:
    """A handler that stands still keeps its key's later messages from being handled under another number."""
    at_work, go_on = asyncio.Event(), asyncio.Event()

    async def slow(message: GroupMessage) -> None:
        if message.data == b"slow":
            at_work.set()
            await go_on.wait()
        await limits.evidence.note("a", message)

    worker = await limits.join("a", slow)
    await limits.shared(worker)
    sent = await limits.publish([KEYS[0]], b"slow")
    await at_work.wait()
    sent += await limits.publish(KEYS[1:])
    change = asyncio.create_task(fleet.repartition(limits.connection, limits.stream, "f", 16, wait_s=30))
    found = await until(
        lambda: fleet.status(limits.connection, limits.stream, "f"),
        lambda seen: seen.change is not None and "is handled up to sequence" in seen.change,
    )
    assert found.change is not None
    assert re.match(r"8 → 16 partitions: generation 0", found.change)
    new = await limits.publish(KEYS * 2)
    await limits.evidence.all_of(sent[1:])
    assert not {line.sequence for line in limits.evidence.lines} & set(new)
    go_on.set()
    await change
    await limits.evidence.all_of([*sent, *new])
    assert flawless(limits.evidence.verdict([*sent, *new]))


async def test_the_command_is_killed_and_any_leader_goes_on(
    ground: FleetGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader fails once in each step; the wish was written by somebody who did not wait for its end."""
    failed: list[str] = []

    def fails_once(name: str) -> None:
        real = getattr(GenerationKeeper, name)

        async def flaky(self: GenerationKeeper, *given: object) -> object:
            if name not in failed:
                failed.append(name)
                await real(self, *given)
                raise FleetError(f"{name} has lost its answer")
            return await real(self, *given)

        monkeypatch.setattr(GenerationKeeper, name, flaky)

    for name in ("_update", "_split", "_delete_consumers"):
        fails_once(name)
    async with ground.load() as sent:
        a, b = await ground.join("a"), await ground.join("b")
        await ground.shared(a, b)
        with pytest.raises(FleetError, match=r"not done after 0\.01 s: 8 → 13 partitions"):
            await fleet.repartition(ground.connection, ground.stream, "f", 13, wait_s=0.01)
        await until(lambda: failed)
        await (a if a.is_leader else b).stop()  # another leader goes on
        await until(lambda: partitions_of(ground), lambda count: count == 13)
    await ground.evidence.all_of(sent)
    assert sorted(failed) == ["_delete_consumers", "_split", "_update"]
    assert flawless(ground.evidence.verdict(sent))


@pytest.mark.long("a worker that is killed in the middle of a change, and its lease")
async def test_a_worker_is_killed_in_the_middle_of_a_change(limits: FleetGround) -> None:
    async with limits.load() as sent, limits.process("b") as b:
        a = await limits.join("a")
        await until(lambda: bool(b.partitions) and bool(a.partitions))
        change = asyncio.create_task(fleet.repartition(limits.connection, limits.stream, "f", 16, wait_s=40))
        await until(lambda: fleet.status(limits.connection, limits.stream, "f"), lambda seen: seen.change is not None)
        b.process.kill()
        await change
        await owns_all(16, a)
        await limits.evidence.all_of(list(sent))
    await limits.evidence.all_of(sent)
    assert limits.evidence.verdict(sent).clean, "what the killed one had handled and not acked comes again"


async def test_workers_may_bring_the_old_number_or_the_new_one(limits: FleetGround) -> None:
    a = await limits.join("a")
    await limits.shared(a)
    new = hashed(12, f"{limits.stream}.*")
    with pytest.raises(FleetError, match=r"has 8 partitions, and this worker asks for 12: .* `keylane fleet repart"):
        await limits.join("b", partitions=new)
    await fleet.repartition(limits.connection, limits.stream, "f", 12)
    b, c = await limits.join("b", partitions=new), await limits.join("c")
    await owns_all(12, a, b, c)
    sent = await limits.publish(KEYS)
    await limits.evidence.all_of(sent)
    assert flawless(limits.evidence.verdict(sent))
    await fleet.repartition(limits.connection, limits.stream, "f", 12)  # it has them


async def test_a_new_fleet_is_told_of_messages_with_numbers_that_it_does_not_have(
    limits: FleetGround, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await limits.join("a")
    await limits.shared(worker)
    await limits.evidence.all_of(await limits.publish(KEYS))
    await fleet.repartition(limits.connection, limits.stream, "f", 2)
    await until(lambda: len(worker.partitions) == 2)
    await worker.stop()
    caplog.clear()
    partitions = hashed(2, f"{limits.stream}.*")
    async with fleet.join(limits.connection, limits.stream, "g", limits.evidence.handler("g"), partitions=partitions):
        (line,) = [one.getMessage() for one in caplog.records if "earlier number of partitions" in one.getMessage()]
    assert "fleet 'g' has 2 partitions and will not handle them" in line


async def test_others_that_use_the_numbers_are_named(limits: FleetGround) -> None:
    await limits.shared(await limits.join("a"))
    await groups.create_static(limits.connection, limits.stream, "g", partitions=PARTITIONS, members=["m"])
    await consumers.create(limits.connection, limits.stream, ConsumerConfig(durable_name="query"))
    with pytest.raises(FleetError, match=r"are also used by the static group 'g', the consumer 'query': another"):
        await fleet.repartition(limits.connection, limits.stream, "f", 16)


async def test_a_table_that_the_store_has_lost_is_written_again(limits: FleetGround) -> None:
    a = await limits.join("a")
    await limits.shared(a)
    await fleet.repartition(limits.connection, limits.stream, "f", 12)
    found = await fleet_partitions(limits.connection, limits.stream, "f")
    bucket, key = Bucket(limits.connection, FLEET_BUCKET), f"{limits.stream}.f.partitions"
    entry = await bucket.get(key)
    assert entry is not None
    await bucket.delete(key, revision=entry.revision)
    await until(lambda: bucket.get(key), lambda one: one is not None and one.value is not None)
    again = await fleet_partitions(limits.connection, limits.stream, "f")
    assert again.table.generations == found.table.generations
    sent = await limits.publish(KEYS)
    await limits.evidence.all_of(sent)
    assert flawless(limits.evidence.verdict(sent))

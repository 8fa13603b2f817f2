"""From consumers of another program, one for each partition, to a fleet and back, under load."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from keylane.core.migration import MigrationState, ServiceLevel
from keylane.errors import FleetError, KeylaneError
from keylane.fleet import Deduplicator, Migration, listed
from keylane.groups import GroupMessage
from keylane.jetstream import ConsumerConfig, consumers, open_feed
from tests.integration.fleet.rig import KEYS, PARTITIONS, FleetGround
from tests.integration.groups.rig import Line, flawless
from tests.waiter import until


class OldProgram:
    """What a fleet replaces: a durable for each partition, one message after the other."""

    def __init__(self, ground: FleetGround) -> None:
        self._ground = ground
        self.once: Deduplicator | None = None
        self.stuck = asyncio.Event()
        self.stuck.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        for number in range(PARTITIONS):
            config = ConsumerConfig(
                durable_name=f"old-{number}",
                filter_subject=f"{number}.{self._ground.stream}.*",
                max_ack_pending=10,
                inactive_threshold_s=3600,
            )
            await consumers.create(self._ground.connection, self._ground.stream, config)
        tasks = [asyncio.create_task(self._work(number)) for number in range(PARTITIONS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, number: int) -> None:
        while True:
            try:
                async with open_feed(self._ground.connection, self._ground.stream, f"old-{number}") as feed:
                    async for message in feed:
                        await self.stuck.wait()
                        await self._handle(number, message.sequence, message.subject)
                        message.ack()
            except KeylaneError:  # on a work queue its consumer is deleted under it
                await asyncio.sleep(0.05)

    async def _handle(self, number: int, sequence: int, subject: str) -> None:
        if self.once is not None:
            async with self.once.handling(subject.partition(".")[2], sequence) as is_ours:
                if not is_ours:
                    return
                await asyncio.sleep(0)
        key = subject.rpartition(".")[2]
        at = asyncio.get_running_loop().time()
        self._ground.evidence.lines.append(Line(at, "old", number, key, sequence, subject, b""))


async def keylane(ground: FleetGround, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "keylane.cli.main", "fleet", "migrate", *arguments, "-s", ground.url]
    options = ["--partitions", str(PARTITIONS), "--filter", f"{ground.stream}.*", "--key", "1"]
    done = await asyncio.to_thread(subprocess.run, [*command, *options], capture_output=True, text=True, timeout=50)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(120)
async def test_the_commands(limits: FleetGround) -> None:
    names = (limits.stream, "f")
    code, told = await keylane(limits, "plan", *names)
    assert code == 3
    assert "obstacle     no consumer has the filter of partition 0, 1, 2, 3, 4 and 3 more alone" in told
    assert await keylane(limits, "finish", *names) == (
        1,
        "keylane: the migration of fleet 'f' is in state none: finish cannot follow; shadow, dual, switch can\n",
    )
    async with OldProgram(limits).running():
        await limits.publish(KEYS)
        assert await keylane(limits, "shadow", *names) == (0, "the migration of fleet f is in state shadow\n")
        code, told = await keylane(limits, "parity", *names)
        assert (code, told.startswith("8 partitions: the old consumers have")) == (0, True)
        code, told = await keylane(limits, "switch", *names, "--burn-in", "0.2", "--window", "0.1", "--json")
        assert (code, json.loads(told)["state"]) == (0, "switched"), told


async def opened(ground: FleetGround) -> Migration:
    return await Migration.open(ground.connection, ground.stream, "f", ground.partitions, drain_s=5)


def by(ground: FleetGround, name: str) -> int:
    return len(ground.evidence.by(name))


async def test_there_and_back_under_load(ground: FleetGround) -> None:
    old = OldProgram(ground)
    is_queue = False
    async with old.running(), ground.load(pause_s=0.02) as sent:
        await until(lambda: by(ground, "old"), lambda count: count > 200)
        migration = await opened(ground)
        is_queue = migration.is_queue
        assert migration.match.obstacles == ()
        if is_queue:
            with pytest.raises(FleetError, match="is a work queue, where two consumers may not have the same subjects"):
                await migration.shadow()
        else:
            await migration.shadow()
            worker = await ground.join("new")  # it is there, and gets nothing
            await ground.shared(worker)
            assert all(one.holds for one in await migration.parity())
            assert by(ground, "new") == 0
        await migration.switch()
        assert migration.record.state is MigrationState.SWITCHED
        handled = by(ground, "old")
        if is_queue:
            worker = await ground.join("new")
        await until(lambda: by(ground, "new"), lambda count: count > 200)
        assert by(ground, "old") == handled
        with pytest.raises(FleetError, match="run finish again in"):
            await (await opened(ground)).finish()

        if is_queue:
            with pytest.raises(FleetError, match="stop the workers before a rollback on a work queue"):
                await (await opened(ground)).rollback()
            await worker.stop()
        await (await opened(ground)).rollback()
        handled = by(ground, "new")
        await until(lambda: by(ground, "old"), lambda count: count > handled + 200)
        assert by(ground, "new") == handled
        await (await opened(ground)).switch()
        if is_queue:
            await ground.join("new")
        await until(lambda: by(ground, "new"), lambda count: count > handled + 200)
    await ground.evidence.all_of(sent)
    assert flawless(ground.evidence.verdict(sent))
    await (await opened(ground)).finish(after_s=0)
    names = await consumers.names(ground.connection, ground.stream)
    assert not [name for name in names if name.startswith("old-")]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"layout": "worker"}, 'layout is "worker" in the fleet and "partition" here'),
        ({"acks": "prefix"}, 'acks is "prefix" in the fleet and "message" here'),
        ({"state": "checkpointed"}, 'state is "checkpointed" in the fleet and "replicated" here'),
    ],
)
async def test_a_fleet_with_other_consumers_is_refused(limits: FleetGround, options: dict[str, str], why: str) -> None:
    await limits.shared(await limits.join("new", **options))
    with pytest.raises(FleetError, match=f"cannot be migrated to or from.*{why}"):
        await opened(limits)


async def test_a_fleet_with_other_partitions_is_refused(limits: FleetGround) -> None:
    await limits.shared(await limits.join("new"))
    other = listed([f"{number}.{limits.stream}.*" for number in range(PARTITIONS)])
    with pytest.raises(FleetError, match=r"has other partitions than the migration: 8, the first of them '0\."):
        await Migration.open(limits.connection, limits.stream, "f", other)


async def test_a_program_that_does_not_finish_keeps_its_partitions(limits: FleetGround) -> None:
    old = OldProgram(limits)
    async with old.running():
        old.stuck.clear()
        sent = await limits.publish(KEYS)
        await until(lambda: pending(limits), lambda count: count > 0)
        migration = await Migration.open(limits.connection, limits.stream, "f", limits.partitions, drain_s=0.2)
        with pytest.raises(FleetError, match=r"still has \d+ messages in flight after 0.2 s; it delivers again"):
            await migration.switch()
        assert not (await consumers.info(limits.connection, limits.stream, "old-0")).paused
        old.stuck.set()
        await (await opened(limits)).switch()
        await limits.join("new")
        sent += await limits.publish(KEYS)
        await limits.evidence.all_of(sent)
    assert flawless(limits.evidence.verdict(sent))


async def pending(ground: FleetGround) -> int:
    return sum([info.num_ack_pending async for info in consumers.list_all(ground.connection, ground.stream)])


async def test_both_at_once_handle_every_message_once(limits: FleetGround) -> None:
    old = OldProgram(limits)
    old.once = Deduplicator(limits.connection, f"once-{limits.stream}", side="old")
    await old.once.ensure()
    mine = Deduplicator(limits.connection, f"once-{limits.stream}", side="new")
    record = limits.evidence.handler("new")

    async def handle(message: GroupMessage) -> None:
        async with mine.handling(message.subject, message.delivery_sequence) as is_ours:
            if is_ours:
                await record(message)

    async with old.running():
        await (await opened(limits)).dual()
        await limits.join("new", handle)
        async with limits.load(pause_s=0.05) as sent:
            await until(lambda: min(by(limits, "old"), by(limits, "new")), lambda count: count > 3)
            await (await opened(limits)).switch()
        await limits.evidence.all_of(sent)
    verdict = limits.evidence.verdict(sent)
    assert (verdict.lost, verdict.duplicated) == ((), ())


async def test_a_fleet_that_breaks_its_service_level_is_rolled_back(limits: FleetGround) -> None:
    async def fail(message: GroupMessage) -> None:
        raise ValueError("no")

    old = OldProgram(limits)
    async with old.running():
        await (await opened(limits)).switch()
        await limits.join("new", fail)
        sent = await limits.publish(KEYS)
        migration = await Migration.open(limits.connection, limits.stream, "f", limits.partitions, drain_s=0.2)
        level = ServiceLevel(oldest_s=0.1, windows=2)
        why = await migration.watch(level, window_s=0.3, burn_in_s=20)
        assert "the oldest message waits" in (why or "")
        await limits.evidence.all_of(sent)
    assert by(limits, "old") == len(sent)

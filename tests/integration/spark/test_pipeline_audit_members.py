"""The audit of members that really ran, with real journals, some of them faulty; and of a run with faults.

What handlers did is kept beside, and judged by the judge of evidence, which knows nothing of journals.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.dataset as ds  # type: ignore[import-untyped]  # it has no types
import pytest
from nats.js.api import SubjectTransform

import keylane
from chaos.audit import compared, matched
from chaos.evidence import Handled as Seen
from keylane import Connection, groups
from keylane.core.partitions import Partitioning
from keylane.groups import GroupMessage
from keylane.jetstream import ConsumerConfig, Message, streams
from keylane.journal import Journal
from keylane.server import NatsServer
from keylane.spark.address import Address
from keylane.spark.pipelines import audit
from keylane.testing import Effect, judge
from tests.integration.journal.rig import Handled, Instance, Spot
from tests.integration.spark import journal_rig as rig
from tests.peers.java import LIGHT_JAVA
from tests.waiter import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

KINDS = ("lost", "unproven", "duplicated", "out_of_order", "order_unproven")
KEYS, MESSAGES = 20, 400
QUICK = ConsumerConfig(ack_wait_s=2.0)


class Ground:
    """A group of two members, and what their handlers did."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.done: list[Effect] = []
        keys = [f"k{number}" for number in range(KEYS)]
        self.alices = [key for key in keys if rig.partition_of(key) < rig.PARTITIONS // 2]
        self.bobs = [key for key in keys if key not in self.alices]

    def sequences(self, key: str) -> list[int]:
        return [number for number in range(1, MESSAGES + 1) if f"k{(number - 1) % KEYS}" == key]

    def handled(self, sequence: int, by: str) -> bool:
        return any(one.sequence == sequence and one.by == by for one in self.done)

    async def until(self, good: Callable[[], bool], deadline_s: float = 90.0) -> None:
        await until(good, deadline_s=deadline_s)


async def test_faults_of_real_members_are_found_as_the_judge_of_evidence_finds_them(
    spark: SparkSession, connection: Connection, nats_server: NatsServer, unique: Callable[..., str], tmp_path: Path
) -> None:
    here = Ground(unique("orders"))
    await rig.make_stream(connection, here.stream)
    await rig.make_group(connection, here.stream)
    await rig.publish(connection, here.stream, [f"k{number % KEYS}" for number in range(MESSAGES)])
    queue = groups.queue_stream(here.stream, rig.GROUP)
    await rig.empty_queue(connection, here.stream, MESSAGES, keep=lambda sequence: True)
    lost, stuck = here.sequences(here.bobs[0])[5], here.sequences(here.alices[0])[8]
    overtaken = here.sequences(here.bobs[1])[3]
    shared = here.bobs[2]
    # Somebody else takes a message out of the queue, and does nothing with it.
    await connection.api.request(f"STREAM.MSG.DELETE.{queue}", {"seq": lost, "no_erase": True})

    entered, may_go_on = threading.Event(), threading.Event()

    def frozen(message: GroupMessage) -> None:
        if message.sequence == stuck:
            entered.set()
            assert may_go_on.wait(120)
        here.done.append(Effect(message.key, message.sequence, "a1"))

    async def standby(message: GroupMessage) -> None:
        here.done.append(Effect(message.key, message.sequence, "a2"))

    async def unordered(message: GroupMessage) -> None:
        if message.sequence == overtaken:
            await here.until(lambda: here.handled(overtaken + KEYS, "bob"))  # the next one of its key
        elif message.key == shared:
            await asyncio.sleep(0.3)
        here.done.append(Effect(message.key, message.sequence, "bob"))

    async with AsyncExitStack() as stack:

        async def member(name: str, handler: object, **more: object) -> groups.Member:
            own = await stack.enter_async_context(await keylane.connect(nats_server.url))
            journal = await stack.enter_async_context(Journal(own, stream=here.stream))
            joined = await groups.join(
                own, here.stream, rig.GROUP, name, handler, journal=journal, settings=QUICK, **more,  # type: ignore[arg-type]
            )  # fmt: skip
            stack.push_async_callback(joined.stop)
            return joined

        await member("alice", frozen)
        await asyncio.to_thread(entered.wait, 60)
        await member("alice", standby)
        await member("bob", unordered, order="none", concurrency=4)
        await rogue(here, connection, shared)
        # The pin is taken away until the standby has it; the first instance is still in the midst of a message.
        while not here.handled(stuck, "a2"):
            await groups.step_down(connection, here.stream, rig.GROUP, "alice")
            await asyncio.sleep(0.5)
        last = here.sequences(here.alices[0])[-1]
        await here.until(lambda: here.handled(last, "a2"))
        may_go_on.set()
        await here.until(lambda: here.handled(stuck, "a1"))
        everything = set(range(1, MESSAGES + 1)) - {lost}
        await here.until(lambda: {one.sequence for one in here.done} >= everything)

    settings = audit.Settings(
        stream=here.stream, group=rig.GROUP, address=Address(url=nats_server.url), work=str(tmp_path / "work"),
        tolerance_s=0.0, settle_s=0.0, complete=True,
    )  # fmt: skip
    report = await asyncio.to_thread(audit.run, spark, settings)
    expected = judge(range(1, MESSAGES + 1), here.done)
    found: dict[str, set[int]] = {kind: set() for kind in (*report.violations, *report.unproven)}
    for row in ds.dataset(tmp_path / "work" / "findings", format="parquet").to_table().to_pylist():
        found[row["kind"]].add(row["sequence"])
    told = report.as_text()
    assert found["lost"] == set(expected.lost) == {lost}, told
    assert found["duplicated"] == set(expected.duplicated) >= {stuck}, told
    assert found["out_of_order"] == set(expected.out_of_order) >= {overtaken}, told
    assert stuck in found["late_effect"], told
    assert shared in {one["key"] for one in report.evidence["two_owners"]}, told
    assert not found["unproven"], told
    assert report.exit_code == 3


async def rogue(here: Ground, connection: Connection, key: str) -> None:
    """A consumer that asks nobody: it handles some messages of a key while the key's owner does, and notes that."""
    origin = Instance(here.stream, rig.GROUP, "bob", "rogue", revision=1)
    first = here.sequences(key)[2]
    await here.until(lambda: here.handled(first, "bob"))
    async with Journal(connection, stream=here.stream) as journal:
        for sequence in here.sequences(key)[5:8]:
            started_ns = journal.now_ns()
            await asyncio.sleep(0.1)
            reply = b"$JS.ACK.%b.rogue.1.%d.%d.1.0" % (here.stream.encode(), sequence, sequence)
            delivery = Message(connection.nats, b"0.x", reply, b"NATS/1.0\r\nNats-Pin-Id: none\r\n\r\n", b"")
            here.done.append(Effect(key, sequence, "rogue"))
            noted = Handled(delivery, Spot(rig.partition_of(key), key), origin)
            journal.note(noted, "done", started_ns, journal.now_ns())


async def test_a_static_group_has_its_pending_messages_above_the_ack_floor(
    spark: SparkSession, connection: Connection, nats_server: NatsServer, unique: Callable[..., str]
) -> None:
    stream = unique("orders")
    transform = Partitioning(f"{stream}.*", (1,), rig.PARTITIONS)
    await streams.create(
        connection,
        streams.StreamConfig(
            name=stream, subjects=[f"{stream}.*"], storage=streams.StorageType.MEMORY, allow_direct=True,
            subject_transform=SubjectTransform(src=f"{stream}.*", dest=transform.destination),
        ),
    )  # fmt: skip
    await groups.create_static(connection, stream, rig.GROUP, partitions=rig.PARTITIONS, members=["alice"])
    await rig.publish(connection, stream, [f"k{number % 5}" for number in range(100)])
    done: list[int] = []

    async def handler(message: GroupMessage) -> None:
        done.append(message.sequence)

    async with Journal(connection, stream=stream) as journal:
        member = await groups.join(connection, stream, rig.GROUP, "alice", handler, journal=journal)
        await until(lambda: asyncio.sleep(0, len(done)), lambda count: count == 100, 30.0)
        await member.stop()
    await rig.publish(connection, stream, [f"k{number % 5}" for number in range(10)])
    settings = audit.Settings(
        stream=stream, group=rig.GROUP, address=Address(url=nats_server.url), settle_s=0.0, complete=True
    )
    report = await asyncio.to_thread(audit.run, spark, settings)
    assert report.verdict, report.as_text()
    assert not any(report.unproven.values()), report.as_text()
    assert (report.facts["handled"], report.facts["pending"]) == (100, 10)
    await streams.delete(connection, stream)


# ---- a run with faults ----------------------------------------------------------------------------------


async def test_the_audit_of_a_run_with_faults_says_exactly_what_its_judge_says() -> None:
    """Whatever the run shows, both must show it. In a process of its own: it starts a Spark session of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "chaos", "groups", "--seconds", "15", "--rate", "300", "--seed", "11",
        "--audit", "--json",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=os.environ | LIGHT_JAVA,
    )  # fmt: skip
    out, err = await process.communicate()
    assert out, err[-2000:]
    result = json.loads(out)
    assert result["audited"]["disagreements"] == [], (result["audited"], err[-2000:])
    assert result["audited"]["facts"]["handled"] > 1000


def test_effects_without_a_record_must_be_the_last_of_their_process() -> None:
    offset_s = time.time() - time.monotonic()
    effects = [Seen(float(at), "k", 0, at, "a1") for at in (1, 2, 3)]

    def record(sequence: int) -> object:
        return type("Record", (), {"source_sequence": sequence, "ended_ns": int((sequence + offset_s) * 1e9)})()

    written, unwritten, problems = matched(effects, [record(1), record(2)])  # type: ignore[list-item]
    assert ([one.sequence for one in written], [one.sequence for one in unwritten], problems) == ([1, 2], [3], [])
    nothing: dict[str, set[int]] = {kind: set() for kind in KINDS}
    assert compared([1, 2, 3], effects, written, nothing | {"unproven": {3}}) == []
    assert len(compared([1, 2, 3], effects, written, nothing)) == 1
    _, _, problems = matched(effects, [record(1), record(3), record(7)])  # type: ignore[list-item]
    assert len(problems) == 2

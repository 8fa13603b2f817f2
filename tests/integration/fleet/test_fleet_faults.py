"""What goes wrong: killed and frozen workers, deleted consumers, a store that is gone or made anew."""

from __future__ import annotations

import os
import signal
import statistics
import time

import pytest

from keylane.dead_letters import list_dead_letters
from keylane.errors import FleetEnded, FleetError, HandlerCrashed
from keylane.fleet import WorkerHooks, WorkerState
from keylane.fleet.store import FLEET_BUCKET
from keylane.groups import GroupMessage
from keylane.jetstream import Bucket, ConsumerConfig, consumers, streams
from tests.integration.fleet.rig import KEYS, FleetGround
from tests.integration.groups.rig import flawless
from tests.waiter import until


async def test_a_killed_worker_is_replaced_in_order(ground: FleetGround) -> None:
    await ground.lose_a_worker()


async def test_a_frozen_worker_handles_nothing_after_it_wakes_up(limits: FleetGround) -> None:
    a = await limits.join("a")
    async with limits.process("b") as b, limits.load() as sent:
        await until(lambda: bool(b.partitions) and bool(a.partitions))
        await limits.evidence.until(lambda lines: any(line.by == "b" for line in lines))
        os.kill(b.process.pid, signal.SIGSTOP)
        await limits.shared(a)
        await limits.evidence.all_of(list(sent))
        os.kill(b.process.pid, signal.SIGCONT)
        await until(lambda: bool(a.partitions) and len(a.partitions) < 8)  # it has joined again
        await limits.evidence.all_of(list(sent))
    await limits.evidence.all_of(sent)
    assert limits.evidence.verdict(sent).clean


async def test_a_deleted_consumer_is_made_again_where_it_was(ground: FleetGround) -> None:
    worker = await ground.join("a")
    sent = await ground.publish(KEYS * 3)
    await ground.evidence.all_of(sent)
    await until(
        lambda: consumers.info(ground.connection, ground.stream, "f-p0"), lambda info: info.num_ack_pending == 0
    )
    await consumers.delete(ground.connection, ground.stream, "f-p0")
    sent += await ground.publish(KEYS * 3)
    await ground.evidence.all_of(sent)
    assert flawless(ground.evidence.verdict(sent))
    assert "0" in worker.partitions


async def test_consumers_deleted_by_hand_heal_within_seconds(limits: FleetGround) -> None:
    """From the deletion to the first message that is handled again, on several partitions one after the other."""
    await limits.join("a")
    sent = await limits.publish(KEYS)
    await limits.evidence.all_of(sent)
    healed_s = []
    for partition in range(6):
        await consumers.delete(limits.connection, limits.stream, f"f-p{partition}")
        began = time.monotonic()
        sent += await limits.publish(KEYS)
        await limits.evidence.all_of(sent)
        healed_s.append(time.monotonic() - began)
    assert flawless(limits.evidence.verdict(sent))
    assert statistics.median(healed_s) < 2, healed_s
    assert max(healed_s) < 5, healed_s


async def test_a_failing_handler_is_logged_with_its_message(
    limits: FleetGround, caplog: pytest.LogCaptureFixture
) -> None:
    failed: list[GroupMessage] = []

    async def flaky(message: GroupMessage) -> None:
        if not failed:
            failed.append(message)
            raise RuntimeError("on purpose")
        await limits.evidence.note("a", message)

    await limits.join("a", flaky)
    await limits.evidence.all_of(await limits.publish(KEYS[:1]))
    [line] = [one.getMessage() for one in caplog.records if "on purpose" in one.getMessage()]
    one = failed[0]
    assert f"member f-0, subject {one.subject}, partition {one.partition}, key" in line
    assert f"sequence {one.delivery_sequence} (try 1)" in line


async def test_a_bucket_that_is_deleted_changes_nobodys_work(limits: FleetGround) -> None:
    states: list[WorkerState] = []
    a = await limits.join("a", hooks=WorkerHooks(on_state=lambda state, _: states.append(state)))
    b = await limits.join("b")
    await limits.shared(a, b)
    before = a.partitions, b.partitions
    async with limits.load() as sent:
        created = await streams.info_json(limits.connection, f"KV_{FLEET_BUCKET}")
        await streams.delete(limits.connection, f"KV_{FLEET_BUCKET}")
        await streams.create_json(limits.connection, created["config"])
        await until(lambda: WorkerState.RECOVERING in states)
        await until(lambda: a.state in (WorkerState.ACTIVE, WorkerState.LEADING))
        await until(lambda: b.state in (WorkerState.ACTIVE, WorkerState.LEADING))
        await limits.evidence.all_of(list(sent))
    await limits.evidence.all_of(sent)
    assert (a.partitions, b.partitions) == before
    assert flawless(limits.evidence.verdict(sent))


async def test_a_handler_that_fails_is_tried_again_in_order(limits: FleetGround) -> None:
    failed: set[int] = set()

    async def flaky(message: GroupMessage) -> None:
        if message.delivery_sequence % 7 == 0 and message.delivery_sequence not in failed:
            failed.add(message.delivery_sequence)
            raise RuntimeError("on purpose")
        await limits.evidence.note("a", message)

    await limits.join("a", flaky)
    sent = await limits.publish(KEYS * 3)
    await limits.evidence.all_of(sent)
    assert failed
    assert flawless(limits.evidence.verdict(sent))


async def test_a_message_that_had_all_its_tries_becomes_a_dead_letter(limits: FleetGround) -> None:
    async def poisoned(message: GroupMessage) -> None:
        if message.data == b"poison":
            raise RuntimeError("on purpose")
        await limits.evidence.note("a", message)

    await limits.join("a", poisoned, max_tries=2)
    await limits.publish([KEYS[0]], b"poison")
    sent = await limits.publish(KEYS)
    await limits.evidence.all_of(sent)
    [letter] = [one async for one in list_dead_letters(limits.connection, limits.stream)]
    assert (letter.group, letter.member, letter.data) == ("f", "f-0", b"poison")


async def test_a_closed_connection_ends_the_worker(limits: FleetGround) -> None:
    worker = await limits.join("a")
    await limits.shared(worker)
    await limits.clients[-1].close()
    with pytest.raises(FleetEnded, match="the connection is closed"):
        await worker.wait()


async def test_a_worker_that_is_stopped_at_once(limits: FleetGround) -> None:
    worker = await limits.join("a")
    await worker.stop(timeout_s=10)
    assert await worker.wait() == "stopped"


class Broken(BaseException):
    """What no handler may raise."""


async def test_a_worker_whose_handler_crashes_leaves_in_order(limits: FleetGround) -> None:
    async def crash(message: GroupMessage) -> None:
        if message.data == b"crash":
            raise Broken
        await limits.evidence.note("a", message)

    a, b = await limits.join("a", crash, lease_s=30.0), await limits.join("b", lease_s=30.0)
    await limits.shared(a, b)
    sent = await limits.publish(KEYS)
    await limits.evidence.all_of(sent)
    key = next(line.key for line in limits.evidence.lines if line.by == "a")
    sent += await limits.publish([key], b"crash")
    with pytest.raises(HandlerCrashed, match="Broken"):
        await a.wait()
    await limits.shared(b)  # long before the lease of the other ends
    await limits.evidence.all_of(sent)


async def test_a_consumer_that_is_not_the_fleets_is_left_to_others_at_once(limits: FleetGround) -> None:
    a = await limits.join("a", lease_s=30.0)
    await limits.shared(a)
    b = await limits.join("b", lease_s=30.0)
    await limits.shared(a, b)
    name = f"f-p{b.partitions[0]}"
    await consumers.delete(limits.connection, limits.stream, name)
    await consumers.create(limits.connection, limits.stream, ConsumerConfig(durable_name=name))
    with pytest.raises(FleetError, match=f"consumer '{name}' of stream .* is not this fleet's"):
        await b.wait()
    entry = await Bucket(limits.connection, FLEET_BUCKET).get(f"{limits.stream}.f.worker.1")
    assert entry is not None
    assert b'"state":"left"' in (entry.value or b"")

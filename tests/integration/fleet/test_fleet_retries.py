"""Delayed retries on real servers: a failed message waits beside its lane, and nothing waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keylane.dead_letters import DeadLetter, list_dead_letters
from keylane.errors import InvalidInput, ServerTooOld
from keylane.groups import GroupMessage, retry_counts
from keylane.jetstream import features, streams
from keylane.processing.delayed_retries import retry_stream
from keylane.server import NatsServer
from tests.integration.fleet.rig import FleetGround
from tests.waiter import until


class Flaky:
    """Fails on the data `bad` for the first tries of each message. Keeps what it saw at every try."""

    def __init__(self, failures: int = 1) -> None:
        self._failures = failures
        self.tries: dict[int, list[float]] = {}
        self.seen: list[tuple[int, str, str, int, int, dict[str, str], bytes]] = []

    def handler(self) -> Callable[[GroupMessage], Any]:
        async def handle(message: GroupMessage) -> None:
            mine = self.tries.setdefault(message.sequence, [])
            mine.append(time.monotonic())
            view = (message.sequence, message.subject, message.key, message.partition, message.delivered_count)
            self.seen.append((*view, message.headers, message.data))
            if message.data == b"bad" and len(mine) <= self._failures:
                raise ValueError(f"try {len(mine)}")

        return handle

    def has(self, sequence: int, tries: int) -> bool:
        return len(self.tries.get(sequence, [])) >= tries


async def letters(ground: FleetGround) -> list[DeadLetter]:
    return [one async for one in list_dead_letters(ground.connection, ground.stream, group="f")]


async def in_stream(ground: FleetGround) -> tuple[int, int]:
    counts = await retry_counts(ground.connection, ground.stream)
    return tuple(counts.get("f", (0, 0)))  # type: ignore[return-value]


async def test_a_failed_message_is_tried_again_after_its_delay_and_its_key_goes_on(ground: FleetGround) -> None:
    flaky = Flaky(failures=2)
    worker = await ground.join("a", flaky.handler(), retry_delays=(1.0, 0.5))
    await ground.shared(worker)
    (bad,) = await ground.publish(["k1"], b"bad")
    others = await ground.publish(["k1", "k2", "k1"])
    await until(lambda: all(flaky.has(one, 1) for one in others))
    assert not flaky.has(bad, 2), "later messages of its key did not wait for it"
    await until(lambda: flaky.has(bad, 3))
    first, second, third = flaky.tries[bad]
    assert second - first >= 0.95
    assert third - second >= 0.45
    assert all(len(flaky.tries[one]) == 1 for one in others)
    subject = f"{ground.stream}.k1"
    views = [one for one in flaky.seen if one[0] == bad]
    assert [view[4] for view in views] == [1, 2, 3]
    assert {view[:4] + view[6:] for view in views} == {(bad, subject, "k1", views[0][3], b"bad")}
    await until(lambda: in_stream(ground), lambda counts: counts == (0, 0))
    assert await letters(ground) == []


async def test_after_the_last_delay_it_is_a_dead_letter_with_its_tries_and_reason(limits: FleetGround) -> None:
    flaky = Flaky(failures=99)
    worker = await limits.join("a", flaky.handler(), retry_delays=(0.2, 0.3))
    await limits.shared(worker)
    (bad,) = await limits.publish(["k1"], b"bad")
    (letter,) = await until(lambda: letters(limits), bool)
    assert (letter.source_sequence, letter.subject, letter.key) == (bad, f"{limits.stream}.k1", "k1")
    assert (letter.tries, letter.error, letter.data) == (3, "ValueError: try 3", b"bad")
    assert len(flaky.tries[bad]) == 3
    await until(lambda: in_stream(limits), lambda counts: counts == (0, 0))


async def test_headers_of_the_publisher_come_back_and_none_is_obeyed_again(limits: FleetGround) -> None:
    flaky = Flaky()
    worker = await limits.join("a", flaky.handler(), retry_delays=[0.2])
    await limits.shared(worker)
    headers = {"trace": "é 1", "Nats-Msg-Id": "mine", "Keylane-Subject": "spoofed"}
    ack = await limits.connection.jetstream.publish(f"{limits.stream}.k1", b"bad", headers=headers)
    await until(lambda: flaky.has(ack.seq, 2))
    first, second = (one[5] for one in flaky.seen)
    assert first["trace"] == second["trace"]
    added = {"Nats-Pin-Id"}
    assert {name: value for name, value in first.items() if name not in added} == second
    assert {one[1] for one in flaky.seen} == {f"{limits.stream}.k1"}


async def test_any_worker_takes_a_retry_also_when_the_first_one_is_killed_while_it_waits(
    queue: FleetGround, tmp_path: Path
) -> None:
    (broken := tmp_path / "broken").touch()
    async with queue.process("b", retry_delays=[3.0], broken=str(broken)) as b:
        await until(lambda: len(b.partitions) == 8, deadline_s=45)
        sent = await queue.publish(["k1", "k2"], b"bad")
        await until(lambda: in_stream(queue), lambda counts: sum(counts) == 2)
        await until(lambda: streams.state(queue.connection, queue.stream), lambda state: not state.messages)  # acked
        b.process.kill()
        await b.process.wait()
    broken.unlink()
    worker = await queue.join("a", retry_delays=[3.0])
    await queue.evidence.all_of(sent)
    await queue.shared(worker)
    await until(lambda: in_stream(queue), lambda counts: counts == (0, 0))
    assert sorted(line.sequence for line in queue.evidence.lines) == sent, "each once"


async def test_a_kill_between_the_storing_of_a_retry_and_the_ack_neither_loses_nor_doubles_it(
    ground: FleetGround, tmp_path: Path
) -> None:
    (broken := tmp_path / "broken").touch()
    async with ground.process("b", retry_delays=[4.0], broken=str(broken), dies_delaying=True) as b:
        await until(lambda: len(b.partitions) == 8, deadline_s=45)
        (bad,) = await ground.publish(["k1"], b"bad")
        await asyncio.wait_for(b.process.wait(), 30)
    assert sum(await in_stream(ground)) == 1
    runs: list[tuple[int, int]] = []

    async def fails_at_first(message: GroupMessage) -> None:
        runs.append((message.sequence, message.earlier_tries))
        if message.data == b"bad" and not message.earlier_tries:
            raise ValueError("again")

    worker = await ground.join("a", fails_at_first, retry_delays=[4.0])
    await ground.shared(worker)
    await until(lambda: {(bad, 0), (bad, 1)} <= set(runs), deadline_s=45)
    (more,) = await ground.publish(["k1"])
    await until(lambda: (more, 0) in runs)
    await until(lambda: in_stream(ground), lambda counts: counts == (0, 0))
    assert sorted(runs) == [(bad, 0), (bad, 1), (more, 0)], "it failed again, and the server knew its retry"
    assert await letters(ground) == []


@pytest.mark.long("waits for the ack wait of the retry consumer")
async def test_a_retry_at_work_in_a_killed_process_is_delivered_to_another(limits: FleetGround, tmp_path: Path) -> None:
    (broken := tmp_path / "broken").touch()
    async with limits.process("b", retry_delays=[0.5], max_tries=9, broken=str(broken), hangs_retrying=True) as b:
        await until(lambda: len(b.partitions) == 8, deadline_s=45)
        sent = await limits.publish(["k1"], b"bad")
        await until(lambda: b.retrying)
        b.process.kill()
    await limits.join("a", retry_delays=[0.5], max_tries=9)
    await limits.evidence.all_of(sent)


async def test_retries_wait_through_a_restart_of_the_server(own_server: tuple[FleetGround, NatsServer]) -> None:
    ground, server = own_server
    flaky = Flaky()
    worker = await ground.join("a", flaky.handler(), retry_delays=[3.0])
    await ground.shared(worker)
    sent = await ground.publish([f"k{number}" for number in range(20)], b"bad")
    await until(lambda: in_stream(ground), lambda counts: sum(counts) == 20)
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.restart)
    await until(lambda: all(flaky.has(one, 2) for one in sent), deadline_s=45)
    await until(lambda: in_stream(ground), lambda counts: counts == (0, 0), deadline_s=45)
    assert await letters(ground) == []


@pytest.mark.long("a cluster of three, and its leader is killed")
async def test_retries_on_a_replicated_stream_survive_a_new_leader(cluster_ground: FleetGround) -> None:
    flaky = Flaky(failures=2)
    for name in ("a", "b"):
        await cluster_ground.join(name, flaky.handler(), retry_delays=(2.0, 1.0))
    keys = [f"k{number}" for number in range(20)]
    sent = await cluster_ground.publish(keys, b"bad")
    name = retry_stream(cluster_ground.stream)
    await until(lambda: in_stream(cluster_ground), lambda counts: sum(counts) > 10)
    assert (await streams.info(cluster_ground.connection, name)).config.num_replicas == 3
    await streams.step_down(cluster_ground.connection, name)
    await until(lambda: all(flaky.has(one, 3) for one in sent), deadline_s=45)
    others = await cluster_ground.publish(keys)
    await until(lambda: all(flaky.has(one, 1) for one in others), deadline_s=45)
    await until(lambda: in_stream(cluster_ground), lambda counts: counts == (0, 0), deadline_s=45)
    assert await letters(cluster_ground) == []


async def test_a_stop_lets_a_retry_at_work_end(limits: FleetGround) -> None:
    began, may_end = asyncio.Event(), asyncio.Event()
    ended: list[int] = []

    async def handle(message: GroupMessage) -> None:
        if message.delivered_count == 1:
            raise ValueError("first")
        began.set()
        await may_end.wait()
        ended.append(message.sequence)

    worker = await limits.join("a", handle, retry_delays=[0.2])
    await limits.shared(worker)
    sent = await limits.publish(["k1"])
    await asyncio.wait_for(began.wait(), 20)
    stopping = asyncio.create_task(worker.stop())
    await asyncio.sleep(0.2)
    assert not stopping.done()
    may_end.set()
    await stopping
    assert ended == sent
    assert await in_stream(limits) == (0, 0)


async def test_a_stream_that_somebody_deletes_is_made_again(limits: FleetGround) -> None:
    flaky = Flaky()
    worker = await limits.join("a", flaky.handler(), retry_delays=[0.2])
    await limits.shared(worker)
    await streams.delete(limits.connection, retry_stream(limits.stream))
    (bad,) = await limits.publish(["k1"], b"bad")
    await until(lambda: flaky.has(bad, 2), deadline_s=30)


async def test_what_cannot_work_is_refused_at_join(limits: FleetGround, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="choose one of them"):
        await limits.join("a", retry_delays=[1], max_tries=2, after_tries="park")
    with pytest.raises(InvalidInput, match="give at least 3"):
        await limits.join("a", retry_delays=[1, 2], max_tries=2)
    monkeypatch.setitem(features.SINCE, "message_schedules", (99, 0, 0))
    with pytest.raises(ServerTooOld, match=r"message schedules needs nats-server 99\.0\.0 or newer"):
        await limits.join("a", retry_delays=[1])

"""Delayed retries of groups: members share them, journals name them, deleting a group deletes them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from keylane import groups
from keylane.errors import GroupConflict, InvalidInput
from keylane.groups import GroupMessage, retry_counts
from keylane.jetstream import Outgoing, publish_many, streams
from keylane.journal import Journal
from keylane.processing.delayed_retries import retry_stream
from tests.integration.groups import process_handlers
from tests.integration.groups.rig import Ground, delete_quietly
from tests.integration.journal.rig import read
from tests.waiter import until


async def settled(ground: Ground) -> None:
    await until(lambda: retry_counts(ground.connection, ground.stream), lambda counts: not counts)


@pytest.mark.parametrize("kind", ["elastic", "static"])
async def test_a_retry_looks_as_the_first_try_did_and_the_journal_tells_them_apart(
    ground: Ground, partitioned: Ground, kind: str
) -> None:
    ground = ground if kind == "elastic" else partitioned
    ground.stack.push_async_callback(delete_quietly, ground.connection, f"{ground.stream}+journal")
    ground.stack.push_async_callback(delete_quietly, ground.connection, retry_stream(ground.stream))
    await ground.publish(["not.for.the.group"] * 3 if kind == "elastic" else [])  # the sequences differ then
    await (ground.elastic if kind == "elastic" else ground.static)(members=["alice", "bob"])
    seen: list[tuple[Any, ...]] = []

    async def handle(message: GroupMessage) -> None:
        context = message.context
        view = (message.sequence, message.subject, message.key, message.partition, message.data, message.timestamp)
        seen.append((message.delivered_count, *view, context.stream, context.group, context.sequence))
        assert context.worker in ("alice", "bob")
        if message.key == "bad" and message.delivered_count <= 2:
            raise ValueError("later")

    async with Journal(ground.connection, stream=ground.stream) as journal:
        members = [
            await ground.join(name, handle, journal=journal, retry_delays=(0.3, 0.2)) for name in ("alice", "bob")
        ]
        bad, good = await ground.publish(["bad", "good"])
        await until(lambda: len(seen) >= 4)
        await settled(ground)
        for member in members:
            await member.stop()
    tries = sorted(one for one in seen if one[1] == bad)
    assert [one[0] for one in tries] == [1, 2, 3]
    assert len({one[1:] for one in tries}) == 1
    assert tries[0][1:4] == (bad, f"{ground.stream}.bad", "bad")
    records = await read(ground.connection, ground.stream, "g")
    told = sorted((one.ended_ns, one.source_sequence, one.key, one.outcome) for one in records)
    assert Counter(one[1:] for one in told) == {
        (bad, "bad", "delayed"): 2,
        (bad, "bad", "retried"): 1,
        (good, "good", "done"): 1,
    }
    assert [one[3] for one in told if one[1] == bad] == ["delayed", "delayed", "retried"]


async def test_the_last_retry_is_journaled_as_a_dead_letter(ground: Ground) -> None:
    ground.stack.push_async_callback(delete_quietly, ground.connection, f"{ground.stream}+journal")
    await ground.elastic(members=["alice"])

    async def handle(message: GroupMessage) -> None:
        raise ValueError("no")

    async with Journal(ground.connection, stream=ground.stream) as journal:
        member = await ground.join("alice", handle, journal=journal, retry_delays=[0.2])
        await ground.publish(["k"])
        await until(
            lambda: streams.names(ground.connection, subject=f"keylane.dlq.{ground.stream}.>"),
            lambda found: f"{ground.stream}@dlq" in found,
        )
        await settled(ground)
        await member.stop()
    assert [one.outcome for one in await read(ground.connection, ground.stream, "g")] == ["delayed", "retried_dead"]


async def test_a_retry_runs_in_another_process_too(ground: Ground, tmp_path: Path) -> None:
    await ground.elastic(members=["alice"])
    await ground.join("alice", process_handlers.work, executor="process", retry_delays=[0.2])
    file = tmp_path / "lines"
    outgoing = Outgoing(f"{ground.stream}.k", b"raise", {"File": str(file)})
    await publish_many(ground.connection, [outgoing])
    await until(lambda: file.exists() and file.read_text().split()[1:3], lambda words: words == ["k", "1"])


async def test_deleting_the_group_deletes_its_retries_and_no_other_ones(ground: Ground) -> None:
    async def fail(message: GroupMessage) -> None:
        raise ValueError("no")

    for group in ("g", "h"):
        await ground.elastic(group, members=["alice"])
        await ground.join("alice", fail, group=group, retry_delays=[600])
    await ground.publish(["k1", "k2"])
    counts = await until(
        lambda: retry_counts(ground.connection, ground.stream),
        lambda found: [found[one].waiting for one in sorted(found)] == [2, 2],
    )
    assert counts["g"] == (2, 0)
    await groups.delete(ground.connection, ground.stream, "g")
    assert await retry_counts(ground.connection, ground.stream) == {"h": (2, 0)}
    assert await retry_counts(ground.connection, ground.stream, "g") == {}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"order": "strict"}, "order='strict' none"),
        ({"manual_ack": True}, "leave out manual_ack"),
        ({"after_tries": "park", "max_tries": 3}, "after_tries='park' lets none pass"),
        ({"max_tries": 1}, "give at least 2"),
    ],
)
async def test_what_promises_more_order_is_refused(ground: Ground, options: dict[str, Any], why: str) -> None:
    await ground.elastic(members=["alice"])
    with pytest.raises(InvalidInput, match=why):
        await ground.join("alice", retry_delays=[1], **options)
    assert await streams.names(ground.connection, subject=f"keylane.retry.{ground.stream}.>") == []


async def test_a_stream_in_the_way_is_named(ground: Ground) -> None:
    await ground.elastic(members=["alice"])
    name = retry_stream(ground.stream)
    ground.stack.push_async_callback(delete_quietly, ground.connection, name)
    wanted = {"name": name, "subjects": [f"keylane.retry.{ground.stream}.*.>"], "num_replicas": 1}
    await streams.create_json(ground.connection, wanted)
    with pytest.raises(GroupConflict, match="is there without allow_msg_schedules"):
        await ground.join("alice", retry_delays=[1])

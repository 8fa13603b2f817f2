"""What is deleted or restarted under a member: it heals by itself or ends with a reason, and never waits for ever."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable

import pytest
from nats.js.api import StorageType, StreamConfig

from keylane import groups
from keylane.errors import GroupEnded
from keylane.groups import GroupMessage, Member
from keylane.jetstream import consumers, streams
from keylane.server import NatsServer
from tests.integration.groups.rig import Ground, active, flawless
from tests.waiter import until

KEYS = 20
END_S = 30.0
"""A member looks around every 1.5 s here, and some things must be seen twice; the machine may be slow."""


def keys(count: int) -> Iterable[str]:
    return (f"k{number % KEYS}" for number in range(count))


async def reason_of(member: Member) -> str:
    """Why it ended: the normal reason, or the error's text."""
    async with asyncio.timeout(END_S):
        try:
            return await member.wait()
        except GroupEnded as error:
            return str(error)


def slowly(ground: Ground, by: str) -> object:
    """A handler that takes a moment, so that something is at work when the ground moves."""

    async def handler(message: GroupMessage) -> None:
        await asyncio.sleep(0.005)
        await ground.evidence.note(by, message)

    return handler


async def more(ground: Ground, count: int) -> None:
    """Wait until so many more were handled."""
    goal = len(ground.evidence.lines) + count
    await ground.evidence.until(lambda lines: len(lines) >= goal, END_S)


# ---- consumers -----------------------------------------------------------------------------------------------


async def test_a_deleted_consumer_of_an_elastic_member_is_made_again(ground: Ground) -> None:
    """What was handled is recognised by the lanes: nothing is handled twice."""
    await ground.elastic(members=["a", "b"])
    for name in ("a", "b"):
        await ground.join(name, slowly(ground, name))
    sent = await ground.publish(keys(1000))
    for name in ("a", "b"):
        await more(ground, 100)
        await consumers.delete(ground.connection, f"{ground.stream}-g", name)
    sent += await ground.publish(keys(100))
    await ground.evidence.all_of(sent, deadline_s=END_S)
    assert flawless(ground.evidence.verdict(sent))


async def test_a_deleted_consumer_of_a_static_member_is_made_again(partitioned: Ground) -> None:
    """Its place in the stream went with it: it starts anew, in order. Lately handled messages are recognised."""
    await partitioned.static(members=["a"])
    await partitioned.join("a", slowly(partitioned, "a"))
    sent = await partitioned.publish(keys(500))
    await more(partitioned, 100)
    await consumers.delete(partitioned.connection, partitioned.stream, "g-a")
    sent += await partitioned.publish(keys(100))
    await partitioned.evidence.all_of(sent, deadline_s=END_S)
    assert flawless(partitioned.evidence.verdict(sent))


async def test_a_consumer_is_deleted_while_an_instance_stands_by(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    for name in ("first", "second"):
        await ground.join("a", slowly(ground, name))
    sent = await ground.publish(keys(500))
    await more(ground, 100)
    await consumers.delete(ground.connection, f"{ground.stream}-g", "a")
    await ground.evidence.all_of(sent, deadline_s=END_S)
    assert ground.evidence.verdict(sent).clean


async def test_an_idle_member_notices_that_its_consumer_is_gone(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    member = await ground.join("a")
    await until(lambda: member.partitions)
    await consumers.delete(ground.connection, f"{ground.stream}-g", "a")
    await ground.evidence.all_of(await ground.publish(keys(20)))
    await until(lambda: active(member))


async def test_a_consumer_that_the_server_cannot_change_any_more_is_made_again(
    own_server_ground: tuple[Ground, NatsServer],
) -> None:
    """The server deletes the directory of a consumer a moment after the consumer: it may hit the next of that name."""
    ground, server = own_server_ground
    await ground.elastic(members=["a"])
    member = await ground.join("a", slowly(ground, "first"))
    sent = await ground.publish(keys(200))
    await more(ground, 20)
    directory = server.store_dir / "jetstream" / "$G" / "streams" / f"{ground.stream}-g" / "obs" / "a"
    while directory.exists():  # the server writes into it at the same time
        shutil.rmtree(directory, ignore_errors=True)
    standby = await ground.join("a", slowly(ground, "standby"))
    await until(lambda: standby.partitions == (0, 1, 2, 3), deadline_s=END_S)
    assert member.is_active
    await groups.add_members(ground.connection, ground.stream, "g", ["b"])
    await ground.join("b", slowly(ground, "b"))
    sent += await ground.publish(keys(200))
    await ground.evidence.all_of(sent, deadline_s=END_S)
    assert flawless(ground.evidence.verdict(sent))
    assert ground.evidence.by("b")
    await until(lambda: member.partitions == standby.partitions == (0, 1), deadline_s=END_S)


# ---- streams -------------------------------------------------------------------------------------------------


async def test_a_deleted_queue_ends_every_member(ground: Ground) -> None:
    await ground.elastic(members=["a", "b"])
    members = [await ground.join(name) for name in ("a", "a", "b", "unlisted")]
    await ground.evidence.all_of(await ground.publish(keys(40)))
    await streams.delete(ground.connection, f"{ground.stream}-g")
    for member in members:
        assert await reason_of(member) == (
            f"stream '{ground.stream}-g' does not exist any more: create the group again"
        )


async def test_a_queue_that_is_gone_while_partitions_move_ends_the_member(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    member = await ground.join("a")
    await ground.evidence.all_of(await ground.publish(keys(40)))
    await asyncio.gather(
        streams.delete(ground.connection, f"{ground.stream}-g"),
        groups.add_members(ground.connection, ground.stream, "g", ["b"]),
    )
    assert await reason_of(member) == f"stream '{ground.stream}-g' does not exist any more: create the group again"


async def test_a_deleted_stream_ends_static_members(partitioned: Ground) -> None:
    await partitioned.static(members=["a", "b"])
    members = [await partitioned.join(name) for name in ("a", "a", "b")]
    await partitioned.evidence.all_of(await partitioned.publish(keys(40)))
    await streams.delete(partitioned.connection, partitioned.stream)
    for member in members:
        assert await reason_of(member) == (
            f"stream '{partitioned.stream}' does not exist any more: create the group again"
        )


async def test_a_deleted_source_ends_members_when_its_messages_are_handled(ground: Ground) -> None:
    await ground.elastic(members=["a", "b"])
    members = [await ground.join(name, slowly(ground, name)) for name in ("a", "b", "unlisted")]
    sent = await ground.publish(keys(1000))
    await until(
        lambda: streams.state(ground.connection, f"{ground.stream}-g"), lambda state: state.last_sequence == len(sent)
    )
    await streams.delete(ground.connection, ground.stream)
    for member in members:
        assert await reason_of(member) == (
            f"stream '{ground.stream}' does not exist any more, and all that '{ground.stream}-g' had of it is handled: "
            "create the stream again and join again, or delete the group"
        )
    assert flawless(ground.evidence.verdict(sent))


@pytest.mark.long("the server notices a new source after ten seconds or more")
async def test_after_the_source_was_made_again_members_go_on(ground: Ground) -> None:
    """The server notices the new stream after about 10 s and copies it from its start."""
    await ground.elastic(members=["a"])
    await ground.join("a")
    before = await ground.publish(keys(40))
    await ground.evidence.all_of(before)
    await streams.delete(ground.connection, ground.stream)
    await streams.create(
        ground.connection,
        StreamConfig(name=ground.stream, subjects=[f"{ground.stream}.>"], storage=StorageType.MEMORY),
    )
    await ground.publish(keys(60))
    await ground.evidence.until(lambda lines: len(lines) == len(before) + 60, deadline_s=50)


# ---- the record and the server ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["static", "elastic"])
async def test_a_deleted_bucket_ends_members(kind: str, own_server_ground: tuple[Ground, NatsServer]) -> None:
    ground, _ = own_server_ground
    if kind == "static":
        config = (await ground.connection.api.request(f"STREAM.INFO.{ground.stream}"))["config"]
        config["subject_transform"] = {"src": ">", "dest": "{{Partition(1)}}.>"}
        await ground.connection.api.request(f"STREAM.UPDATE.{ground.stream}", config)
        await ground.static(members=["a"], partitions=1)
    else:
        await ground.elastic(members=["a"])
    member = await ground.join("a")
    await until(lambda: member.partitions)
    await streams.delete(ground.connection, f"KV_{kind}-consumer-groups")
    assert await reason_of(member) == (
        f"group 'g' of stream '{ground.stream}' was deleted: "
        f"record '{ground.stream}.g' in bucket '{kind}-consumer-groups' is gone"
    )


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_a_server_that_restarts(how: str, own_server_ground: tuple[Ground, NatsServer]) -> None:
    ground, server = own_server_ground
    await ground.elastic(members=["a", "b"])
    members = [await ground.join(name, slowly(ground, name)) for name in ("a", "b")]
    sent = await ground.publish(keys(1000))
    await more(ground, 200)
    if how == "killed":
        await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.restart)
    await until(lambda: ground.connection.is_connected, deadline_s=END_S)
    sent += await ground.publish(keys(200))
    await ground.evidence.all_of(sent, deadline_s=30)
    assert ground.evidence.verdict(sent).clean
    await groups.add_members(ground.connection, ground.stream, "g", ["c"])
    await ground.join("c")
    after = await ground.publish(keys(200))
    await ground.evidence.all_of(after, deadline_s=30)
    assert ground.evidence.verdict([*sent, *after]).clean
    assert all(map(active, members))
    assert ground.evidence.by("c")

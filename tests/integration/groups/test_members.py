"""The life of a member: who may join, what its hooks tell, how it ends."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from keylane import groups
from keylane.errors import (
    BrokenGroupRecord,
    GroupConflict,
    GroupEnded,
    InvalidInput,
    NoSuchGroup,
    NotAMember,
)
from keylane.groups import GroupMessage, Member, MemberHooks
from keylane.groups.store import bucket_of
from keylane.jetstream import Bucket, ConsumerConfig, consumers, streams
from tests.integration.groups.rig import LONG_S, QUICK, Ground, active, flawless, owned
from tests.waiter import until

PATIENT = ConsumerConfig(ack_wait_s=30.0)
"""Neither a pin nor a message times out while a test lasts."""
AT_ONCE_S = 20.0
"""Below those 30 s; the machine may be slow."""


def recorder(log: list[Any]) -> MemberHooks:
    return MemberHooks(
        on_joined=lambda: log.append("joined"),
        on_activated=lambda: log.append("activated"),
        on_deactivated=lambda: log.append("deactivated"),
        on_partitions=lambda before, after: log.append((before, after)),
        on_ended=lambda reason: log.append(f"ended: {reason}"),
    )


async def ended(member: Member) -> str:
    async with asyncio.timeout(LONG_S):
        return await member.wait()


# ---- joining ------------------------------------------------------------------------------------------------


async def test_an_unlisted_member_of_an_elastic_group_waits_and_starts_when_it_is_added(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    log: list[Any] = []
    late = await ground.join("late", hooks=recorder(log))
    sent = await ground.publish(f"k{number}" for number in range(20))
    await until(lambda: log == ["joined"])
    assert owned(late) == ()
    assert not active(late)
    assert ground.evidence.lines == []
    await groups.add_members(ground.connection, ground.stream, "g", ["late"])
    await groups.drop_members(ground.connection, ground.stream, "g", ["a"])
    await ground.evidence.all_of(sent)
    assert owned(late) == (0, 1, 2, 3)
    assert flawless(ground.evidence.verdict(sent))


async def test_an_unlisted_member_of_a_static_group_is_an_error(partitioned: Ground) -> None:
    await partitioned.static(members=["a", "b"])
    with pytest.raises(NotAMember) as caught:
        await partitioned.join("x")
    assert "does not list member 'x': a static group never changes; its members are a, b" in str(caught.value)


async def test_no_group_no_member(ground: Ground) -> None:
    with pytest.raises(NoSuchGroup, match="has no group 'g'; there is: "):
        await ground.join("a")
    with pytest.raises(InvalidInput, match="member name"):
        await ground.join("a.b")


async def test_a_member_beyond_the_partitions_waits(ground: Ground) -> None:
    await ground.elastic(partitions=2, members=["a", "b", "c"])
    third = await ground.join("c")
    await ground.join("a")
    await ground.join("b")
    await ground.evidence.all_of(await ground.publish(f"k{number}" for number in range(10)))
    assert owned(third) == ()
    await groups.drop_members(ground.connection, ground.stream, "g", ["b"])
    await until(lambda: owned(third) == (1,))


# ---- hooks and the handle -------------------------------------------------------------------------------------


async def test_hooks_tell_the_life_of_a_member(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    log: list[Any] = []
    member = await ground.join("a", hooks=recorder(log), settings=PATIENT)
    await ground.evidence.all_of(await ground.publish(f"k{number}" for number in range(20)))
    assert active(member)
    assert repr(member) == f"<Member a of {ground.stream}/g, active, partitions [0, 1, 2, 3]>"
    await groups.add_members(ground.connection, ground.stream, "g", ["b"])
    await until(lambda: owned(member) == (0, 1))
    await member.stop()
    assert log == [
        "joined",
        ((), (0, 1, 2, 3)),
        "activated",
        ((0, 1, 2, 3), (0, 1)),
        "deactivated",
        "ended: stopped",
    ]
    assert await member.wait() == "stopped"
    assert not active(member)
    assert "ended" in repr(member)
    await member.stop()


async def test_a_dropped_member_is_told_and_waits_for_its_return(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    log: list[Any] = []
    member = await ground.join("a", hooks=recorder(log))
    await ground.evidence.all_of(await ground.publish(["k"]))
    await groups.drop_members(ground.connection, ground.stream, "g", ["a"])
    await until(lambda: log[-1] == ((0, 1, 2, 3), ()))
    assert log[-2:] == ["deactivated", ((0, 1, 2, 3), ())]
    assert await consumers.names(ground.connection, f"{ground.stream}-g") == []
    sent = await ground.publish(["k", "j"])
    await groups.add_members(ground.connection, ground.stream, "g", ["a"])
    await ground.evidence.all_of(sent)
    assert active(member)
    assert flawless(ground.evidence.verdict([1, *sent]))


async def test_stop_finishes_what_is_at_work_and_starts_nothing_more(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def handler(message: GroupMessage) -> None:
        begun.set()
        await go_on.wait()
        await ground.evidence.note("first", message)

    first = await ground.join("a", handler, settings=PATIENT)
    sent = await ground.publish(["k"] * 10)
    await begun.wait()
    stopping = asyncio.create_task(first.stop())
    await asyncio.sleep(0.1)
    assert not stopping.done()
    go_on.set()
    await stopping
    assert [line.sequence for line in ground.evidence.lines] == sent[:1]
    await ground.join("a", ground.evidence.handler("second"), settings=PATIENT)
    await ground.evidence.all_of(sent, AT_ONCE_S)
    assert flawless(ground.evidence.verdict(sent))


async def test_a_stop_that_takes_longer_than_the_pin_keeps_the_pin(ground: Ground) -> None:
    """A standby must not begin while the last handler of the other instance is at work."""
    await ground.elastic(members=["a"])
    begun = asyncio.Event()
    settings = ConsumerConfig(ack_wait_s=3)

    async def handler(message: GroupMessage) -> None:
        begun.set()
        await asyncio.sleep(6.5)
        await ground.evidence.note("first", message)

    first = await ground.join("a", handler, settings=settings)
    sent = await ground.publish(["k"] * 4)
    await begun.wait()
    await ground.join("a", ground.evidence.handler("second"), settings=settings)
    await first.stop()
    await ground.evidence.all_of(sent)
    assert [line.by for line in ground.evidence.lines] == ["first", "second", "second", "second"]
    assert flawless(ground.evidence.verdict(sent))


async def test_a_handler_that_never_ends_is_cancelled_at_the_deadline(
    ground: Ground, caplog: pytest.LogCaptureFixture
) -> None:
    await ground.elastic(members=["a"])
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def handler(message: GroupMessage) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    member = await ground.join("a", handler, settings=PATIENT)
    sent = await ground.publish(["k", "k"])
    await begun.wait()
    async with asyncio.timeout(AT_ONCE_S):
        await member.stop(timeout_s=0.2)
    assert cancelled.is_set()
    assert "handlers still at work after 0.2 s are cancelled" in caplog.text
    await ground.join("a", settings=PATIENT)
    await ground.evidence.all_of(sent, AT_ONCE_S)
    assert flawless(ground.evidence.verdict(sent))


async def test_a_cancelled_program_leaves_nothing_waiting(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    member = await ground.join("a")
    await until(lambda: owned(member))
    main = member._main
    assert main is not None
    main.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ended(member)
    await member.stop()


# ---- ends ------------------------------------------------------------------------------------------------------


async def write(bucket: Bucket, key: str, value: bytes) -> None:
    entry = await bucket.get(key)
    await bucket.put(key, value, revision=entry.revision if entry is not None else 0)


BROKEN = [
    (b"hello", "is not JSON"),
    (b"{}", "it has no whole number max_members"),
    (b'{"max_members": 4, "members": "ab"}', "members is 'ab', not a list of texts"),
    (b'{"max_members": 4, "member_mappings": [{"member": "a", "partitions": [0]}]}', "partitions 1-3 of 4 belong to"),
]


@pytest.mark.parametrize(("record", "words"), BROKEN, ids=["text", "foreign", "type", "rule"])
async def test_a_broken_record_stops_the_member_and_deletes_nothing(ground: Ground, record: bytes, words: str) -> None:
    await ground.elastic(members=["a"])
    log: list[Any] = []
    member = await ground.join("a", hooks=recorder(log))
    await ground.evidence.all_of(await ground.publish(["k"]))
    await write(bucket_of(ground.connection, "elastic"), f"{ground.stream}.g", record)
    with pytest.raises(BrokenGroupRecord) as caught:
        await ended(member)
    assert str(caught.value).startswith(f"record '{ground.stream}.g' in bucket 'elastic-consumer-groups'")
    assert words in str(caught.value)
    assert log[-1] == f"ended: {caught.value}"
    entry = await bucket_of(ground.connection, "elastic").get(f"{ground.stream}.g")
    assert entry is not None
    assert entry.value == record
    assert await consumers.names(ground.connection, f"{ground.stream}-g") == ["a"]


async def test_a_broken_record_stops_a_static_member_too(partitioned: Ground) -> None:
    await partitioned.static(members=["a"])
    member = await partitioned.join("a")
    await partitioned.evidence.all_of(await partitioned.publish(["k"]))
    await write(bucket_of(partitioned.connection, "static"), f"{partitioned.stream}.g", b"[]")
    with pytest.raises(BrokenGroupRecord, match="static-consumer-groups"):
        await ended(member)
    assert await consumers.names(partitioned.connection, partitioned.stream) == ["g-a"]


async def test_a_static_group_that_changes_ends_its_members_with_an_error(partitioned: Ground) -> None:
    config = await partitioned.static(members=["a"])
    member = await partitioned.join("a")
    bucket, key = bucket_of(partitioned.connection, "static"), f"{partitioned.stream}.g"
    await write(bucket, key, config.to_json())
    await partitioned.evidence.all_of(await partitioned.publish(["k"]))
    await write(bucket, key, json.dumps({"max_members": 4, "members": ["a", "b"]}).encode())
    with pytest.raises(GroupEnded, match="in a way that running members cannot follow"):
        await ended(member)


async def test_an_elastic_group_that_changes_beyond_its_members_ends_them(ground: Ground) -> None:
    config = await ground.elastic(members=["a"])
    member = await ground.join("a")
    await until(lambda: owned(member))
    changed = json.loads(config.to_json()) | {"max_buffered_msg": 5}
    await write(bucket_of(ground.connection, "elastic"), f"{ground.stream}.g", json.dumps(changed).encode())
    with pytest.raises(GroupEnded, match="max_buffered_messages=5"):
        await ended(member)


@pytest.mark.parametrize("how", ["delete", "purge"])
@pytest.mark.parametrize("kind", ["static", "elastic"])
async def test_a_record_that_is_deleted_or_purged_ends_consumption_normally(
    ground: Ground, partitioned: Ground, kind: str, how: str
) -> None:
    place = ground if kind == "elastic" else partitioned
    await (place.elastic(members=["a"]) if kind == "elastic" else place.static(members=["a"]))
    member = await place.join("a")
    waiting = await place.join("idle") if kind == "elastic" else None
    await place.evidence.all_of(await place.publish(["k"]))
    bucket = await place.connection.jetstream.key_value(f"{kind}-consumer-groups")
    await (bucket.delete if how == "delete" else bucket.purge)(f"{place.stream}.g")
    for one in [member, *([waiting] if waiting is not None else [])]:
        reason = await ended(one)
        assert reason == (
            f"group 'g' of stream '{place.stream}' was deleted: "
            f"record '{place.stream}.g' in bucket '{kind}-consumer-groups' is gone"
        )


@pytest.mark.parametrize("kind", ["static", "elastic"])
async def test_a_deleted_group_ends_its_members(ground: Ground, partitioned: Ground, kind: str) -> None:
    place = ground if kind == "elastic" else partitioned
    await (place.elastic(members=["a", "b"]) if kind == "elastic" else place.static(members=["a", "b"]))
    members = [await place.join(name) for name in ("a", "b", "b")]
    await place.evidence.all_of(await place.publish(f"k{number}" for number in range(20)))
    await groups.delete(place.connection, place.stream, "g")
    for member in members:
        assert "was deleted" in await ended(member)
    if kind == "static":
        assert await consumers.names(place.connection, place.stream) == []
    else:
        assert f"{place.stream}-g" not in await streams.names(place.connection)


async def test_a_closed_connection_ends_the_member_with_an_error(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    clients = [await ground.client() for _ in range(2)]
    member = await ground.join("a", connection=clients[0])
    waiting = await ground.join("idle", connection=clients[1])
    await ground.evidence.all_of(await ground.publish(["k"]))
    for client in clients:
        await client.close()
    for one in (member, waiting):
        with pytest.raises(GroupEnded, match=r"the connection is closed \(closed by the program\); connect again"):
            await ended(one)


# ---- settings of instances --------------------------------------------------------------------------------


async def test_two_instances_with_different_settings_do_not_fight(
    ground: Ground, caplog: pytest.LogCaptureFixture
) -> None:
    await ground.elastic(members=["a"])
    await ground.join("a", ground.evidence.handler("first"), settings=ConsumerConfig(ack_wait_s=10))
    await ground.evidence.all_of(await ground.publish(["k"]))
    made = (await consumers.info(ground.connection, f"{ground.stream}-g", "a")).created
    with caplog.at_level(logging.ERROR, "keylane.groups"):
        second = await ground.join("a", ground.evidence.handler("second"), settings=ConsumerConfig(ack_wait_s=20))
        await until(lambda: "other settings" in caplog.text)
    assert "ack_wait is 10000000000 there and 20000000000 here" in caplog.text
    sent = await ground.publish(["k"] * 5)
    await ground.evidence.all_of(sent)
    info = await consumers.info(ground.connection, f"{ground.stream}-g", "a")
    assert info.created == made, "nobody made it anew"
    assert info.config.ack_wait_s == 10.0
    assert not active(second)
    assert {line.by for line in ground.evidence.lines} == {"first"}


@pytest.mark.parametrize("kind", ["static", "elastic"])
async def test_when_the_other_instance_is_gone_the_new_settings_are_taken(
    ground: Ground, partitioned: Ground, kind: str
) -> None:
    """As in a rolling deployment that changes a setting."""
    place = ground if kind == "elastic" else partitioned
    await (place.elastic(members=["a"]) if kind == "elastic" else place.static(members=["a"]))
    first = await place.join("a", place.evidence.handler("first"))
    await place.evidence.all_of(await place.publish(["k"]))
    await place.join("a", place.evidence.handler("second"), settings=ConsumerConfig(ack_wait_s=1.5))
    await first.stop()
    sent = await place.publish(["k"])
    await place.evidence.all_of(sent)
    assert place.evidence.lines[-1].by == "second"
    info = await groups.member_info(place.connection, place.stream, "g", "a")
    assert info is not None
    assert info.config.ack_wait_s == 1.5


async def test_a_difference_that_the_server_cannot_change_is_an_error_that_names_it(partitioned: Ground) -> None:
    await partitioned.static(members=["a"])
    first = await partitioned.join("a")
    await partitioned.evidence.all_of(await partitioned.publish(["k"]))
    await first.stop()
    second = await partitioned.join("a", settings=ConsumerConfig(ack_wait_s=1, deliver_policy="new"))
    with pytest.raises(GroupConflict) as caught:
        await ended(second)
    assert "deliver_policy is 'all' there and 'new' here" in str(caught.value)
    assert "use those settings, or delete the consumer" in str(caught.value)


async def test_an_instance_of_an_older_membership_is_joined_and_moved(ground: Ground) -> None:
    """The consumer has the filters of before: same settings otherwise, so it is taken over, not replaced."""
    await ground.elastic(members=["a", "b"])
    first = await ground.join("a", ground.evidence.handler("first"))
    await until(lambda: owned(first) == (0, 1))
    await first.stop()
    await groups.drop_members(ground.connection, ground.stream, "g", ["b"])
    second = await ground.join("a", ground.evidence.handler("second"), settings=QUICK)
    await until(lambda: owned(second) == (0, 1, 2, 3))
    sent = await ground.publish(f"k{number}" for number in range(20))
    await ground.evidence.all_of(sent)
    assert flawless(ground.evidence.verdict(sent))


async def test_a_mapping_for_the_same_partitions_changes_the_filters_too(ground: Ground) -> None:
    """Another instance would ask for the mapped filters: the consumer must have the same."""
    await ground.elastic(members=["a"])
    member = await ground.join("a")
    await ground.evidence.all_of(await ground.publish(["k"]))
    await groups.set_mapping(ground.connection, ground.stream, "g", {"a": range(4)})
    info = await until(
        lambda: consumers.info(ground.connection, f"{ground.stream}-g", "a"),
        lambda info: (info.config.filter_subjects or ("",))[0] == "0.>",
    )
    assert info.config.filter_subjects == ("0.>", "1.>", "2.>", "3.>")
    assert owned(member) == (0, 1, 2, 3)
    sent = await ground.publish(f"k{number}" for number in range(20))
    await ground.evidence.all_of(sent)
    assert flawless(ground.evidence.verdict([1, *sent]))

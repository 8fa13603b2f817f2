"""A member that gets nothing says why: in its handle, its log and its hook, once, and at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import pytest

from keylane import groups
from keylane.errors import KeylaneError
from keylane.groups import GroupMessage, Member, MemberHooks, MemberState
from keylane.jetstream import ConsumerConfig, streams
from keylane.server import NatsServer
from tests.integration.groups.conftest import MakeGround
from tests.integration.groups.rig import Ground, active
from tests.waiter import until


class States:
    """What `on_state` was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str | None]] = []
        self.hooks = MemberHooks(on_state=lambda state, waiting_for: self.told.append((state.value, waiting_for)))

    def names(self) -> list[str]:
        return [state for state, _ in self.told]


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """The warnings so far that have this text in them."""
    caplog.set_level(logging.INFO, "keylane")
    return lambda part: [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and part in record.getMessage()
    ]


async def in_state(member: Member, state: MemberState, part: str = "") -> None:
    await until(lambda: member.state is state and part in (member.waiting_for or ""))


async def test_a_member_that_is_not_listed(ground: Ground, warned: Callable[[str], list[str]]) -> None:
    await ground.elastic(members=["a"])
    states = States()
    member = await ground.join("b", hooks=states.hooks)
    await in_state(member, MemberState.NOT_LISTED)
    assert member.waiting_for == f"the group to list it: keylane elastic add {ground.stream} g b"
    assert repr(member) == (
        f"<Member b of {ground.stream}/g, not listed, waiting for {member.waiting_for}, partitions []>"
    )
    assert warned("not listed") == [f"member b of {ground.stream}/g: not listed, waiting for {member.waiting_for}"]
    await groups.add_members(ground.connection, ground.stream, "g", ["b"])
    await ground.join("a")
    await ground.evidence.all_of(await ground.publish(f"k{number}" for number in range(30)))
    await in_state(member, MemberState.ACTIVE)
    await groups.drop_members(ground.connection, ground.stream, "g", ["b"])
    await in_state(member, MemberState.NOT_LISTED)
    assert len(warned("not listed")) == 1, "dropping it is no reason for a warning"
    await member.stop()
    assert repr(member) == f"<Member b of {ground.stream}/g, ended, partitions []>"
    told = states.names()
    assert told[0] == "not listed"
    assert told[-3:] == ["not listed", "stopping", "ended"]


async def test_more_members_than_partitions(ground: Ground, warned: Callable[[str], list[str]]) -> None:
    await ground.elastic(partitions=2, members=["a", "b", "c"])
    member = await ground.join("c")
    await in_state(member, MemberState.NO_PARTITIONS, "the group has 2 for 3 members")
    assert len(warned("no partitions")) == 1
    await groups.drop_members(ground.connection, ground.stream, "g", ["b"])
    await in_state(member, MemberState.READY)


async def test_a_standby_and_the_active_instance(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    first = await ground.join("a")
    await in_state(first, MemberState.READY)
    await ground.evidence.all_of(await ground.publish(["k1"]))
    await in_state(first, MemberState.ACTIVE)
    assert first.waiting_for is None
    second = await ground.join("a")
    await in_state(second, MemberState.STANDBY, "the active instance of a to end")
    await first.stop()
    await ground.evidence.all_of(await ground.publish(["k2"]))
    await in_state(second, MemberState.ACTIVE)


async def test_a_static_member_on_a_stream_without_partition_numbers(
    partitioned: Ground, warned: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keylane.groups.member_consumer._LOOK_BELOW_S", 0.0)
    ground = partitioned
    await ground.static(members=["a"])
    await ground.transform_subjects()
    await ground.publish(["k1", "k2"])
    states = States()
    member = await ground.join("a", hooks=states.hooks, settings=ConsumerConfig(ack_wait_s=0.1))
    await in_state(member, MemberState.WAITING, f"has 2 messages, such as '{ground.stream}.k1'")
    assert "subjects that begin with a partition number" in str(member.waiting_for)
    await asyncio.sleep(1.5)  # it looks every 0.6 s here: what repeats itself would be heard again
    assert len(warned("partition number")) == 1
    assert states.names().count("waiting") == 1


async def test_a_static_member_whose_partitions_are_empty_is_not_suspected(partitioned: Ground) -> None:
    await partitioned.publish(["k1"])
    await partitioned.static(members=["a", "b", "c", "d"])
    members = [await partitioned.join(name) for name in "abcd"]
    await until(lambda: any(map(active, members)))
    await until(lambda: all(member.state in ("active", "ready") for member in members))


async def test_a_filter_that_matches_nothing(make: MakeGround, warned: Callable[[str], list[str]]) -> None:
    ground = await make()
    await ground.publish(["k1", "k2"])
    await ground.elastic(members=["a"], partition_by="nothing.*")
    member = await ground.join("a")
    await in_state(member, MemberState.WAITING, f"'nothing.*': stream '{ground.stream}' has 2, and none of them does")
    assert len(warned("none of them does")) == 1


async def test_waiting_for_another_member_to_let_go(ground: Ground) -> None:
    """Both sides say it: who is to get the partitions, and who has yet to finish its work."""
    go_on = asyncio.Event()

    async def slowly(message: GroupMessage) -> None:
        await go_on.wait()
        await ground.evidence.note("a", message)

    calm = ConsumerConfig(ack_wait_s=20.0)  # nobody looks around meanwhile: what is over must be told by itself
    await ground.elastic(members=["a"])
    first = await ground.join("a", slowly, settings=calm)
    sent = await ground.publish(f"k{number}" for number in range(30))
    await until(lambda: active(first))
    await groups.add_members(ground.connection, ground.stream, "g", ["b"])
    second = await ground.join("b", settings=calm)
    await in_state(second, MemberState.WAITING, "another member to let go of partitions 2,3")
    await in_state(first, MemberState.ACTIVE, "handlers at work on partitions 2,3, which go to another member")
    go_on.set()
    await ground.evidence.all_of(sent)
    await until(lambda: first.waiting_for is None and second.state in ("active", "ready"), deadline_s=10)


async def test_an_instance_with_other_settings(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    first = await ground.join("a")
    await ground.evidence.all_of(await ground.publish(["k1"]))
    second = await ground.join("a", settings=ConsumerConfig(ack_wait_s=2.0))
    await in_state(second, MemberState.WAITING, "another instance to end, which has other settings (ack_wait is")
    await first.stop()
    await until(lambda: second.state in ("active", "ready"))


async def test_the_server_is_away(
    own_server_ground: tuple[Ground, NatsServer], warned: Callable[[str], list[str]]
) -> None:
    ground, server = own_server_ground
    await ground.elastic(members=["a"])
    states = States()
    member = await ground.join("a", hooks=states.hooks)
    await ground.evidence.all_of(await ground.publish(["k1"]))
    await in_state(member, MemberState.ACTIVE)
    await asyncio.to_thread(server.kill)
    await in_state(member, MemberState.UNREACHABLE, "the server: ")
    await asyncio.sleep(2)  # it tries again all the time
    assert len(warned("unreachable")) == 1, warned("unreachable")
    await asyncio.to_thread(server.restart)
    await until(lambda: ground.connection.is_connected)
    await ground.evidence.all_of(await ground.publish(["k2"]))
    await in_state(member, MemberState.ACTIVE)


@pytest.mark.long("waits until the server notices, as a test of healing does")
async def test_the_source_is_deleted(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    states = States()
    member = await ground.join("a", hooks=states.hooks)
    await in_state(member, MemberState.READY)
    await streams.delete(ground.connection, ground.stream)
    await in_state(member, MemberState.WAITING, f"the stream to come back: stream '{ground.stream}' does not exist")
    with suppress(KeylaneError):
        await member.wait()
    assert states.names()[-3:] == ["ready", "waiting", "ended"]


async def test_a_hook_that_fails_ends_nothing(ground: Ground) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a fault in a hook")

    await ground.elastic(members=["a"])
    member = await ground.join("a", hooks=MemberHooks(on_state=fail))
    await ground.evidence.all_of(await ground.publish(["k1"]))
    assert member.state == "active"

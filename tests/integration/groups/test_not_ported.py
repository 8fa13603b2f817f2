"""Faults that libraries in other languages are known to have: one test for each that shows that we do not have it.

Those that other tests show already are not repeated: mappings with filters (test_filters), concurrent admins
(test_admin), purged records and instances with different settings (test_members), how many partitions move
(tests/core/test_plans).
"""

from __future__ import annotations

import asyncio

import pytest

from keylane import groups
from keylane.errors import GroupEnded
from keylane.groups import GroupMessage
from keylane.jetstream import ConsumerConfig, ConsumerInfo, consumers, streams
from tests.integration.groups.rig import Ground, active, flawless, owned
from tests.waiter import until

PATIENT = ConsumerConfig(ack_wait_s=30.0)
"""Whoever waits for a pin or a redelivery to time out waits for 30 s: longer than any of these tests lasts."""


def place_of(kind: str, ground: Ground, partitioned: Ground) -> Ground:
    return ground if kind == "elastic" else partitioned


async def make_group(place: Ground, kind: str, members: list[str], group: str = "g") -> None:
    await (place.elastic(group, members=members) if kind == "elastic" else place.static(group, members=members))


async def consumer_of(place: Ground, member: str, group: str = "g") -> ConsumerInfo:
    info = await groups.member_info(place.connection, place.stream, group, member)
    assert info is not None
    return info


@pytest.mark.parametrize("kind", ["static", "elastic"])
async def test_a_deleted_consumer_leaves_no_member_idle(ground: Ground, partitioned: Ground, kind: str) -> None:
    """The active instance and its standby both go on: one with the messages, the other ready to take over."""
    place = place_of(kind, ground, partitioned)
    await make_group(place, kind, ["a"])
    first = await place.join("a", place.evidence.handler("first"))
    sent = await place.publish(["k1", "k2"])
    await place.evidence.all_of(sent)
    second = await place.join("a", place.evidence.handler("second"))
    await until(lambda: owned(second) == (0, 1, 2, 3))
    made = await consumer_of(place, "a")
    await consumers.delete(place.connection, made.stream, made.name)
    sent += await place.publish(["k1", "k2", "k3"])
    await place.evidence.all_of(sent)
    assert (await consumer_of(place, "a")).created > made.created
    verdict = place.evidence.verdict(sent)
    assert not verdict.lost
    # A limits stream does not know what the deleted consumer had acked: only then may messages come again.
    assert kind == "static" or flawless(verdict)
    one, other = (first, second) if active(first) else (second, first)
    await one.stop()
    late = await place.publish(["k1"])
    await place.evidence.all_of(late)
    assert active(other)


@pytest.mark.parametrize("kind", ["static", "elastic"])
async def test_deleting_a_group_spares_the_group_whose_name_begins_with_its_name(
    ground: Ground, partitioned: Ground, kind: str
) -> None:
    place = place_of(kind, ground, partitioned)
    for group in ("g", "g-x"):
        await make_group(place, kind, ["a"], group)
    await place.join("a", place.evidence.handler("g"), group="g")
    await place.join("a", place.evidence.handler("g-x"), group="g-x")
    sent = await place.publish(["k1"])
    await place.evidence.until(lambda lines: {line.by for line in lines} == {"g", "g-x"})
    spared = await consumer_of(place, "a", "g-x")
    gone = await consumer_of(place, "a", "g")
    await groups.delete(place.connection, place.stream, "g")
    assert (await consumer_of(place, "a", "g-x")).created == spared.created
    if kind == "static":
        assert gone.name not in await consumers.names(place.connection, place.stream)
    else:
        assert gone.stream not in await streams.names(place.connection)
    sent += await place.publish(["k1", "k2"])
    await place.evidence.until(lambda lines: [line.sequence for line in lines if line.by == "g-x"] == sent)


@pytest.mark.parametrize("kind", ["static", "elastic"])
async def test_who_is_active_goes_by_the_name_of_the_member(ground: Ground, partitioned: Ground, kind: str) -> None:
    """One member's instance does not make another member active, nor does a consumer that outlived its instance."""
    place = place_of(kind, ground, partitioned)
    for group in ("g", "g-x"):
        await make_group(place, kind, ["a", "b"], group)
    here = await place.join("a")
    await place.join("b", group="g-x")

    async def active_ones() -> list[list[str]]:
        return [await groups.active_members(place.connection, place.stream, group) for group in ("g", "g-x")]

    await until(active_ones, lambda found: found == [["a"], ["b"]])
    await here.stop()
    await until(active_ones, lambda found: found == [[], ["b"]])


async def test_a_member_that_cannot_start_says_so_to_whoever_waits_for_it(ground: Ground) -> None:
    """The group is there and its queue is not: that is known only when the member asks for its consumer."""
    await ground.elastic(members=["a"])
    await streams.delete(ground.connection, f"{ground.stream}-g")
    reasons: list[str] = []
    member = await ground.join("a", hooks=groups.MemberHooks(on_ended=reasons.append))
    with pytest.raises(GroupEnded, match=f"stream '{ground.stream}-g' does not exist any more: create the group again"):
        async with asyncio.timeout(30):
            await member.wait()
    assert len(reasons) == 1
    assert "does not exist any more" in reasons[0]


@pytest.mark.parametrize("kind", ["static", "elastic"])
async def test_stop_hands_over_what_is_buffered_and_the_pin(ground: Ground, partitioned: Ground, kind: str) -> None:
    """Well before the pin or the unacknowledged messages would time out (30 s)."""
    place = place_of(kind, ground, partitioned)
    await make_group(place, kind, ["a"])
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def handler(message: GroupMessage) -> None:
        begun.set()
        await go_on.wait()
        await place.evidence.note("first", message)

    first = await place.join("a", handler, settings=PATIENT, concurrency=1)
    await place.asked("a")
    second = await place.join("a", place.evidence.handler("second"), settings=PATIENT)
    sent = await place.publish(f"k{number % 5}" for number in range(50))
    await begun.wait()
    await until(lambda: consumer_of(place, "a"), lambda info: info.num_ack_pending == 50)
    assert active(first)
    stopping = asyncio.create_task(first.stop())
    await asyncio.sleep(0.2)  # nobody tells that a stop has begun; before that, more may be started
    go_on.set()
    await stopping
    await place.evidence.all_of(sent, deadline_s=20)
    assert active(second)
    assert [line.by for line in place.evidence.lines].count("first") == 1
    assert flawless(place.evidence.verdict(sent))


async def test_a_change_of_membership_recreates_no_consumer_and_repeats_no_message(ground: Ground) -> None:
    """Member a keeps everything, b gives one of its two partitions to c; all of them are in the middle of messages."""
    await ground.elastic()
    await groups.set_mapping(ground.connection, ground.stream, "g", {"a": [0, 1], "b": [2, 3]})
    go_on = asyncio.Event()
    at_work: list[int] = []
    deliveries: list[int] = []

    async def handler(message: GroupMessage) -> None:
        at_work.append(message.partition)
        deliveries.append(message.delivered_count)
        await go_on.wait()
        await ground.evidence.note("b" if message.partition > 1 else "a", message)

    members = {name: await ground.join(name, handler, settings=PATIENT) for name in ("a", "b")}
    joining = await ground.join("c", settings=PATIENT)
    keys = [f"k{number}" for number in range(16)]  # four partitions have a share of these
    sent = await ground.publish(keys)
    await until(lambda: len(at_work) == 16)
    assert set(at_work) == {0, 1, 2, 3}
    made = {name: (await consumer_of(ground, name)).created for name in members}
    await groups.set_mapping(ground.connection, ground.stream, "g", {"a": [0, 1], "b": [2], "c": [3]})
    sent += await ground.publish(keys)
    await asyncio.sleep(0.5)  # the change is on its way, and nothing may come of it yet
    assert owned(joining) == ()
    go_on.set()
    await until(lambda: owned(joining) == (3,) and owned(members["b"]) == (2,))
    await ground.evidence.all_of(sent)
    assert flawless(ground.evidence.verdict(sent))
    assert {line.partition for line in ground.evidence.by("c")} == {3}
    for name in members:
        assert (await consumer_of(ground, name)).created == made[name], name
    info = await consumer_of(ground, "a")
    assert info.num_redelivered == 0
    assert deliveries[:16] == [1] * 16


@pytest.mark.parametrize("kind", ["static", "elastic"])
async def test_a_takeover_with_many_in_flight_is_in_order(ground: Ground, partitioned: Ground, kind: str) -> None:
    """The first instance acked some of what it had and died. The rest comes before anything newer of the same keys."""
    place = place_of(kind, ground, partitioned)
    await make_group(place, kind, ["a"])
    for_ever = asyncio.Event()
    done = ("k0", "k1", "k3")

    async def dying(message: GroupMessage) -> None:
        if message.key not in done or len(place.evidence.by("first")) == len(done):
            await for_ever.wait()
        await place.evidence.note("first", message)

    client = await place.client()
    first = await place.join("a", dying, connection=client, max_ack_pending=8)
    keys = [f"k{number}" for number in range(8)]
    sent = await place.publish(keys)
    await place.evidence.until(lambda lines: sorted(line.key for line in lines) == sorted(done))
    assert active(first)
    await place.join("a", place.evidence.handler("second"), max_ack_pending=8)
    sent += await place.publish(keys)
    await until(lambda: consumer_of(place, "a"), lambda info: info.num_ack_pending == 8)
    await client.close()
    await place.evidence.all_of(sent)
    verdict = place.evidence.verdict(sent)
    assert verdict.clean, verdict
    if kind == "elastic":
        assert not verdict.duplicated
    assert [line.by for line in place.evidence.lines[:3]] == ["first"] * 3
    after = [(line.key, line.sequence) for line in place.evidence.by("second")]
    assert after == sorted(after, key=lambda one: one[1]), "in the order of the stream"

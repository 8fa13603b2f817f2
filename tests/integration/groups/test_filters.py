"""What a group takes from its stream, and how it is keyed: several filters, none, mappings with filters."""

from __future__ import annotations

from typing import Any

import pytest

from keylane import PartitionBy, groups
from keylane.core.partitions import partition_of
from keylane.jetstream import consumers, streams
from tests.integration.groups.conftest import MakeGround
from tests.integration.groups.rig import Ground, flawless
from tests.waiter import until


async def filters(ground: Ground, member: str, group: str = "g") -> tuple[str, ...]:
    info = await groups.member_info(ground.connection, ground.stream, group, member)
    assert info is not None
    return info.config.filter_subjects or ()


async def test_several_filters_with_wildcards_of_their_own(ground: Ground) -> None:
    """One customer has one key under all of them, and so stays in order across them."""
    name = ground.stream
    partitioning = [(f"{name}.orders.*.*", [2]), (f"{name}.refunds.*", [1]), (f"{name}.*.moved.*.*", [3, 1])]
    await ground.elastic(partitions=5, partition_by=[PartitionBy(*one) for one in partitioning], members=["a", "b"])
    for member in ("a", "b"):
        await ground.join(member)
    sent = await ground.publish(
        subject
        for number in range(30)
        for subject in (f"orders.eu.c{number % 6}", f"refunds.c{number % 6}", f"x{number % 2}.moved.y.c{number % 3}")
    )
    await ground.publish(["orders.eu", "other.thing", "refunds.a.b"])
    await ground.evidence.all_of(sent)
    assert flawless(ground.evidence.verdict(sent))
    keys = {line.key for line in ground.evidence.lines}
    assert keys == {f"c{number}" for number in range(6)} | {f"c{number % 3}.x{number % 2}" for number in range(6)}
    for line in ground.evidence.lines:
        one, wildcards = next(
            (one, wildcards)
            for one, wildcards in partitioning
            if line.subject.split(".")[1:3][0] in one or "moved" in one
        )
        if "moved" in line.subject:
            one, wildcards = partitioning[2]
        assert line.partition == partition_of(line.subject, one, wildcards, 5)
    assert await filters(ground, "b") == tuple(f"{partition}.{one}" for one, _ in partitioning for partition in (2, 3))


async def test_no_filters_hashes_whole_subjects(make: MakeGround) -> None:
    place = await make()
    await place.elastic(partitions=5, partition_by=[], members=["a"])
    await place.join("a")
    sent = await place.publish(["x", "x.y", "x.y.z", "x", "x.y.z"])
    await place.evidence.all_of(sent)
    for line in place.evidence.lines:
        assert line.key == line.subject
        assert line.partition == partition_of(line.subject, ">", [], 5)
    assert await filters(place, "a") == tuple(f"{partition}.>" for partition in range(5))
    assert flawless(place.evidence.verdict(sent))


@pytest.mark.parametrize("listed", [True, False], ids=["mapped", "balanced"])
async def test_a_static_group_with_filters_delivers_only_what_it_asked_for(make: MakeGround, listed: bool) -> None:
    place = await make(subjects=["0.>", "1.>", "2.>"])
    owners: dict[str, Any] = (
        {"mappings": {"a": [0, 2], "b": [1]}, "stop_go_members": True} if listed else {"members": ["a", "b"]}
    )
    await place.static(partitions=3, filters=["o.*", "r.>"], **owners)
    for member in ("a", "b"):
        await place.join(member)
    wanted = [f"{partition}.{rest}" for partition in range(3) for rest in ("o.1", "r.1.2")]
    sequences = []
    for subject in [*wanted, "0.x.1", "1.o.1.2", "2.r"]:
        ack = await place.connection.jetstream.publish(subject, b"")
        sequences.append(ack.seq)
    await place.evidence.all_of(sequences[:6])
    assert {f"{line.partition}.{line.subject}" for line in place.evidence.lines} == set(wanted)
    assert await filters(place, "a") == ("0.o.*", "2.o.*", "0.r.>", "2.r.>")
    assert flawless(place.evidence.verdict(sequences[:6]))


async def test_a_mapped_elastic_group_with_filters_asks_for_whole_partitions(ground: Ground) -> None:
    name = ground.stream
    await ground.elastic(partitions=3, partition_by=[f"{name}.o.*", f"{name}.r.*"])
    await groups.set_mapping(ground.connection, name, "g", {"a": [2], "b": [1, 0]}, stop_go_members=True)
    for member in ("a", "b"):
        await ground.join(member)
    sent = await ground.publish(f"{kind}.c{number}" for number in range(10) for kind in ("o", "r"))
    await ground.publish(["x.c1"])
    await ground.evidence.all_of(sent)
    assert flawless(ground.evidence.verdict(sent))
    assert await filters(ground, "a") == ("2.>",)
    assert await filters(ground, "b") == ("0.>", "1.>")


async def test_filters_that_match_in_part_are_no_trouble_to_each_other(ground: Ground) -> None:
    """Two groups on one stream, each with its own part of it."""
    name = ground.stream
    await ground.elastic("orders", partition_by=f"{name}.orders.*", members=["a"])
    await ground.elastic("refunds", partition_by=f"{name}.refunds.*", members=["a"])
    for group in ("orders", "refunds"):
        await ground.join("a", ground.evidence.handler(group), group=group)
    sent = await ground.publish(f"{kind}.c{number}" for number in range(10) for kind in ("orders", "refunds"))
    await ground.evidence.all_of(sent)
    for group in ("orders", "refunds"):
        assert {line.subject.split(".")[1] for line in ground.evidence.by(group)} == {group}


async def test_the_queue_is_filled_from_the_start_of_the_stream(ground: Ground) -> None:
    early = await ground.publish(f"k{number}" for number in range(10))
    await ground.elastic(members=["a"])
    await ground.join("a")
    late = await ground.publish(f"k{number}" for number in range(10))
    await ground.evidence.all_of([*early, *late])
    assert flawless(ground.evidence.verdict([*early, *late]))
    await ground.drained(20)


async def test_the_old_dialect_end_to_end(ground: Ground) -> None:
    await ground.elastic(members=["a"], dialect="go-0.1")
    member = await ground.join("a")
    await ground.evidence.all_of(await ground.publish(f"k{number}" for number in range(10)))
    info = await consumers.info(ground.connection, f"{ground.stream}-g", "a")
    assert info.config.priority_groups == ("a",)
    assert info.config.filter_subjects == ("0.>", "1.>", "2.>", "3.>")
    assert (info.config.ack_wait_s, info.config.inactive_threshold_s) == (6.0, 6.0)
    await until(lambda: member.is_active)
    await groups.step_down(ground.connection, ground.stream, "g", "a")
    assert (await streams.state(ground.connection, f"{ground.stream}-g")).last_sequence == 10

"""Looking at groups and changing them while others do the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from keylane import groups
from keylane.core.plans import Plan, balanced, sticky
from keylane.errors import GroupError, InvalidInput, NoSuchGroup, NotAMember
from keylane.jetstream import streams
from tests.integration.groups.rig import Ground
from tests.waiter import until


async def plan(ground: Ground) -> Plan:
    return (await groups.get_config(ground.connection, ground.stream, "g")).plan


# ---- changes ------------------------------------------------------------------------------------------------


async def test_members_are_added_and_dropped(ground: Ground) -> None:
    await ground.elastic()
    assert (await plan(ground)).members == ()
    added = await groups.add_members(ground.connection, ground.stream, "g", ["b", "a", "b"])
    assert added.members == ("b", "a")
    again = await groups.add_members(ground.connection, ground.stream, "g", ["a", "c"])
    assert again.members == ("b", "a", "c")
    assert await plan(ground) == balanced(["a", "b", "c"], 4)
    left = await groups.drop_members(ground.connection, ground.stream, "g", ["b", "nobody"])
    assert left.members == ("a", "c")
    assert (await groups.drop_members(ground.connection, ground.stream, "g", ["a", "c"])).members == ()


async def test_a_change_that_changes_nothing_writes_nothing(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    before = (await streams.state(ground.connection, "KV_elastic-consumer-groups")).last_sequence
    await groups.add_members(ground.connection, ground.stream, "g", ["a"])
    await groups.drop_members(ground.connection, ground.stream, "g", ["z"])
    await groups.delete_mapping(ground.connection, ground.stream, "g")
    assert (await streams.state(ground.connection, "KV_elastic-consumer-groups")).last_sequence == before


async def test_a_sticky_plan_is_stored_as_a_mapping(ground: Ground) -> None:
    await ground.elastic(partitions=12, members=["a", "b"])
    before = await plan(ground)
    added = await groups.add_members(ground.connection, ground.stream, "g", ["c"], plan="sticky")
    assert added.members == ()
    assert added.mappings == sticky(before, ["a", "b", "c"], 12)
    assert len(added.plan.moves_from(before)) == 4
    dropped = await groups.drop_members(ground.connection, ground.stream, "g", ["a"], plan="sticky")
    assert dropped.plan.members == ("b", "c")
    nobody = await groups.drop_members(ground.connection, ground.stream, "g", ["b", "c"], plan="sticky")
    assert nobody.plan.members == ()


async def test_a_sticky_plan_has_no_idle_members(ground: Ground) -> None:
    await ground.elastic(partitions=2, members=["a", "b"])
    with pytest.raises(InvalidInput, match="3 members for 2 partitions: c would own nothing"):
        await groups.add_members(ground.connection, ground.stream, "g", ["c"], plan="sticky")
    balanced_one = await groups.add_members(ground.connection, ground.stream, "g", ["c"])
    assert balanced_one.plan.idle == ("c",)


async def test_mappings_are_set_and_deleted(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    mapped = await groups.set_mapping(ground.connection, ground.stream, "g", {"x": [0, 3], "y": [1, 2]})
    assert mapped.mappings == Plan({"x": [0, 3], "y": [1, 2]})
    assert mapped.members == ()
    with pytest.raises(GroupError, match="has a mapping, which names its members"):
        await groups.add_members(ground.connection, ground.stream, "g", ["z"])
    with pytest.raises(InvalidInput, match="partitions 2,3 of 4 belong to no member"):
        await groups.set_mapping(ground.connection, ground.stream, "g", {"x": [0, 1]})
    assert (await groups.delete_mapping(ground.connection, ground.stream, "g")).plan == Plan({})


async def test_deleting_a_mapping_that_is_not_there_keeps_the_members(ground: Ground) -> None:
    await ground.elastic(members=["a", "b"])
    assert (await groups.delete_mapping(ground.connection, ground.stream, "g")).members == ("a", "b")


async def test_bad_changes_say_what_is_wrong(ground: Ground) -> None:
    await ground.elastic()
    wrong: Any = "weighted"
    for call, words in (
        (groups.add_members(ground.connection, ground.stream, "g", []), "no member named: give at least one"),
        (groups.add_members(ground.connection, ground.stream, "g", "ab"), "members is 'ab', one text"),
        (groups.add_members(ground.connection, ground.stream, "g", ["a b"]), "member name 'a b' holds"),
        (groups.drop_members(ground.connection, ground.stream, "g", ["a"], plan=wrong), "plan is 'weighted'"),
    ):
        with pytest.raises(InvalidInput) as caught:
            await call
        assert words in str(caught.value)


async def test_static_groups_do_not_change(partitioned: Ground) -> None:
    await partitioned.static(members=["a"])
    with pytest.raises(NoSuchGroup, match="is static, not elastic"):
        await groups.add_members(partitioned.connection, partitioned.stream, "g", ["b"])


async def test_twenty_admins_at_once_lose_nothing(ground: Ground) -> None:
    """Compare-and-set with a retry: each change is made to what the others left."""
    await ground.elastic(partitions=40, members=[f"old{number}" for number in range(20)])
    clients = [await ground.client() for _ in range(4)]
    changes = []
    for number in range(10):
        client = clients[number % 4]
        changes.append(groups.add_members(client, ground.stream, "g", [f"new{number}"]))
        changes.append(groups.drop_members(client, ground.stream, "g", [f"old{number}"]))
    await asyncio.gather(*changes)
    config = await groups.get_config(ground.connection, ground.stream, "g")
    expected = {f"new{number}" for number in range(10)} | {f"old{number}" for number in range(10, 20)}
    assert set(config.members) == expected
    assert len(config.members) == 20


async def test_twenty_sticky_admins_at_once_lose_nothing(ground: Ground) -> None:
    await ground.elastic(partitions=40, members=["first"])
    await asyncio.gather(
        *[
            groups.add_members(ground.connection, ground.stream, "g", [f"m{number}"], plan="sticky")
            for number in range(20)
        ]
    )
    found = await plan(ground)
    assert set(found.members) == {"first", *(f"m{number}" for number in range(20))}
    assert sorted(found.partitions) == list(range(40))
    assert {len(owned) for _, owned in found.shares} == {1, 2}


async def test_twenty_mappings_at_once_leave_a_whole_one(ground: Ground) -> None:
    """A mapping and changes of members: whatever comes last, the record is one of the states in between."""
    await ground.elastic(partitions=8, members=["a"])

    async def change(number: int) -> None:
        if number % 2:
            await groups.set_mapping(ground.connection, ground.stream, "g", {f"m{number}": range(8)})
        else:
            await groups.delete_mapping(ground.connection, ground.stream, "g")

    await asyncio.gather(*[change(number) for number in range(20)])
    config = await groups.get_config(ground.connection, ground.stream, "g")
    whole = [[(f"m{number}", list(range(8)))] for number in range(1, 20, 2)]
    assert config.mappings is None or config.mappings.mappings() in whole


# ---- look ---------------------------------------------------------------------------------------------------


async def test_active_members_are_those_with_an_instance(ground: Ground) -> None:
    await ground.elastic(members=["a", "b", "c"])
    assert await groups.active_members(ground.connection, ground.stream, "g") == []
    await ground.join("a")
    second = await ground.join("c")

    async def active() -> list[str]:
        return await groups.active_members(ground.connection, ground.stream, "g")

    await until(active, lambda found: found == ["a", "c"])
    await second.stop()
    await until(active, lambda found: found == ["a"])


@pytest.mark.parametrize("kind", ["static", "elastic"])
async def test_member_info_shows_the_consumer(ground: Ground, partitioned: Ground, kind: str) -> None:
    place = ground if kind == "elastic" else partitioned
    await (place.elastic(members=["a", "b"]) if kind == "elastic" else place.static(members=["a", "b"]))
    assert await groups.member_info(place.connection, place.stream, "g", "a") is None
    with pytest.raises(NotAMember, match="does not list member 'x'; there is: a, b"):
        await groups.member_info(place.connection, place.stream, "g", "x")
    member = await place.join("a")
    await place.join("b")
    await place.evidence.all_of(await place.publish(f"k{number}" for number in range(40)))
    info = await groups.member_info(place.connection, place.stream, "g", "a")
    assert info is not None
    assert info.name == ("a" if kind == "elastic" else "g-a")
    assert info.priority_groups[0].pinned_client_id
    assert {int(one.split(".")[0]) for one in info.config.filter_subjects or ()} == set(member.partitions)


@pytest.mark.parametrize("kind", ["static", "elastic"])
async def test_step_down_moves_the_pin_to_the_other_instance(ground: Ground, partitioned: Ground, kind: str) -> None:
    place = ground if kind == "elastic" else partitioned
    await (place.elastic(members=["a"]) if kind == "elastic" else place.static(members=["a"]))
    with pytest.raises(GroupError, match="has no consumer: no instance of it ran yet"):
        await groups.step_down(place.connection, place.stream, "g", "a")
    first = await place.join("a", place.evidence.handler("first"))
    await place.evidence.all_of(await place.publish(["k0"]))
    assert first.is_active
    second = await place.join("a", place.evidence.handler("second"))
    await groups.step_down(place.connection, place.stream, "g", "a")
    sent = []
    async with asyncio.timeout(30):
        while not second.is_active:
            sent += await place.publish(["k0"])
            await asyncio.sleep(0.02)
            if first.is_active and not second.is_active and len(sent) % 25 == 0:
                await groups.step_down(place.connection, place.stream, "g", "a")
    await place.evidence.all_of(sent)
    await until(lambda: not first.is_active)
    verdict = place.evidence.verdict(range(1, max(sent) + 1))
    assert verdict.clean

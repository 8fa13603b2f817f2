"""The actions of the page on real groups and fleets: what they say, and that they do that and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from keylane import fleet, groups
from keylane.groups import ElasticConfig, GroupMessage
from keylane.processing.dead_letters import list_dead_letters
from tests.integration.fleet.rig import PARTITIONS, FleetGround, owns_all
from tests.integration.groups.rig import Ground, active
from tests.integration.web.rig import served
from tests.waiter import until


async def config(ground: Ground) -> ElasticConfig:
    found = await groups.get_config(ground.connection, ground.stream, "g")
    assert isinstance(found, ElasticConfig)
    return found


async def test_add_drop_and_apply_plan(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    async with served(ground.connection) as site:
        said, done = await site.act("add", ground.stream, "g", members=["b", "a"])
        assert said == ["Add b to g?", "2 of 4 partitions change hands:", "2,3 from a to b"]
        assert done == "done: g has 2 members"
        said, _ = await site.act("apply-plan", ground.stream, "g", plan=json.dumps({"a": [0], "b": [1, 2, 3]}))
        assert said == ["Apply this plan to g?", "1 of 4 partitions changes hands:", "1 from a to b"]
        assert (await config(ground)).plan.partitions_of("b") == (1, 2, 3)
        said, _ = await site.act("add", ground.stream, "g", members=["c"])  # a mapping stays one
        assert said[1] == "1 of 4 partitions changes hands:"
        assert (await config(ground)).mappings is not None
        await site.act("drop", ground.stream, "g", members=["a", "b"])
        assert (await config(ground)).plan.mappings() == [("c", [0, 1, 2, 3])]


async def test_what_was_confirmed_is_not_done_if_the_group_has_changed(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    async with served(ground.connection) as site:
        request = {"action": "add", "stream": ground.stream, "group": "g", "arguments": {"members": ["b"]}}
        _, preview = await site.post("/actions/preview", request)
        await groups.add_members(ground.connection, ground.stream, "g", ["c"])
        status, answer = await site.post("/actions/perform", request | {"confirmed": preview})
        assert status == 409
        assert "has changed since you were asked" in answer["error"]
        assert (await config(ground)).members == ("a", "c")


@pytest.mark.parametrize(
    ("action", "arguments", "expected"),
    [
        ("explode", {}, "there is no action 'explode'"),
        ("add", {"members": "b"}, "give the names of members"),
        ("add", {"members": ["a"]}, "already in group 'g'"),
        ("add", {"members": ["b c"]}, "b c"),
        ("drop", {"members": ["z"]}, "has no member 'z'"),
        ("apply-plan", {"plan": "{"}, "is not JSON"),
        ("apply-plan", {"plan": '{"a": [0, 9]}'}, "9"),
        ("step-down", {"member": "a", "kind": "elastic"}, "no instance of 'a' is active"),
        ("step-down", {"member": "a", "kind": "fleet"}, "kind is 'fleet'"),
        ("release", {"key": "k"}, "is not parked"),
        ("replay", {"sequence": 1}, "no dead letter 1"),
        ("replay", {"sequence": True}, "give a whole number"),
        ("repartition", {"partitions": 8}, "no fleet 'g'"),
    ],
)
async def test_what_cannot_be_done_is_said(
    ground: Ground, action: str, arguments: dict[str, Any], expected: str
) -> None:
    await ground.elastic(members=["a"])
    async with served(ground.connection) as site:
        request = {"action": action, "stream": ground.stream, "group": "g", "arguments": arguments}
        status, answer = await site.post("/actions/preview", request)
        assert status == 422
        assert expected in answer["error"]
    assert (await config(ground)).members == ("a",)


async def test_step_down_names_the_instance_and_its_standbys(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    first = await ground.join("a")
    await ground.publish(["k"])
    await until(lambda: active(first))
    second = await ground.join("a")
    await ground.asked("a")
    async with served(ground.connection) as site:
        said, _ = await site.act("step-down", ground.stream, "g", member="a", kind="elastic")
        assert said[0] == "Let a of g step down?"
        assert "The active instance of a (host " in said[1]
        assert said[2] == "One of 1 standby instance takes over partitions 0-3."
        await ground.publish(["k"])
        await until(lambda: active(second))


async def test_replay_publishes_the_message_again(ground: Ground) -> None:
    async def refuse(message: GroupMessage) -> None:
        raise ValueError("no")

    await ground.elastic(members=["a"])
    await ground.join("a", refuse, max_tries=1)
    await ground.publish(["k"])

    async def letters() -> list[int]:
        return [one.sequence async for one in list_dead_letters(ground.connection, ground.stream, group="g")]

    [sequence] = await until(letters, bool)
    async with served(ground.connection) as site:
        said, done = await site.act("replay", ground.stream, "g", sequence=sequence)
        assert f"{ground.stream}.k (it was sequence 1) is published again" in said[1]
        assert done == f"done: it is sequence 2 of {ground.stream}"


async def test_pause_resume_and_repartition_of_a_fleet(limits: FleetGround) -> None:
    a, b = await limits.join("a"), await limits.join("b")
    await limits.shared(a, b)
    found = await fleet.status(limits.connection, limits.stream, "f")
    count = len(next(one.partitions for one in found.workers if one.id == "f-0"))
    async with served(limits.connection) as site:
        said, _ = await site.act("pause", limits.stream, "f", member="f-0")
        assert said[0] == "Pause f-0 of f?"
        assert said[1].startswith(f"f-0 hands {count} partitions over (")
        assert said[1].endswith("to 1 other worker, and stays without any until resumed.")
        first, second = (a, b) if a.id == "f-0" else (b, a)
        await until(lambda: (first.partitions, len(second.partitions)), lambda now: now == ((), PARTITIONS))
        said, _ = await site.act("resume", limits.stream, "f", member="f-0")
        assert said[1] == "f-0 gets partitions again, about 4 of 8, from the other workers."
        await limits.shared(a, b)
        said, done = await site.act("repartition", limits.stream, "f", partitions=12)
        assert said[1].startswith("8 partitions become 12.")
        assert done.startswith(("done: f has 12 partitions", "begun: the workers of f go on"))
        await owns_all(12, a, b)

"""Go and Python members at work in one group. Every process here is a real one; what it handled is on its evidence.

Across a change of membership a mixed group gives what Go gives, at least once: then only loss is a fault. Waits are
long because members of Go's library 0.1 notice a dead instance, and retry a refused consumer, after 6 to 7 seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from chaos.evidence import Handled
from chaos.members import Group, Peer
from keylane import Connection, groups
from keylane.core.plans import Plan
from keylane.server import NatsServer
from tests.integration.go.mixed import GROUP, KEYS, PARTITIONS, Mixed, group_of_both
from tests.peers.pcgroups import PcgroupsPeer

pytestmark = [pytest.mark.go, pytest.mark.timeout(120)]

PIN_TIMEOUT_S = 6.0
FOLLOWED_S = 30.0
PEERS: list[Peer] = ["go", "keylane"]


async def python_creates_elastic(mixed: Mixed, *members: str) -> None:
    await groups.create_elastic(
        mixed.connection,
        mixed.stream,
        GROUP,
        partitions=PARTITIONS,
        partition_by=mixed.filter,
        members=members,
        dialect="go-0.1",
    )


async def started(mixed: Mixed, *members: tuple[str, Peer]) -> None:
    for member, peer in members:
        await mixed.members.start(member, peer)
    await asyncio.gather(*(one.ready() for one in mixed.members.started))


def follows(handled: list[Handled], plan: Plan) -> bool:
    """Every message was handled by the member that the plan names."""
    return all(one.by.partition("#")[0] == plan.owner_of(one.partition) for one in handled)


@pytest.mark.parametrize("creator", PEERS)
async def test_go_and_python_members_split_one_elastic_group(elastic_group: Mixed, creator: Peer) -> None:
    if creator == "go":
        await elastic_group.go_creates_elastic()
        await elastic_group.ask_go("add-members", members="gopher,snake")
    else:
        await python_creates_elastic(elastic_group, "gopher", "snake")
    await started(elastic_group, ("gopher", "go"), ("snake", "keylane"))
    handled = await elastic_group.handled_all(await elastic_group.publish(600), 30)
    assert follows(handled, Plan({"gopher": [0, 1, 2], "snake": [3, 4, 5]}))
    assert len({one.by for one in handled}) == 2
    found = elastic_group.verdict()
    assert (found.clean, found.duplicated) == (True, ())


@pytest.mark.parametrize("creator", PEERS)
async def test_go_and_python_members_split_one_static_group(static_group: Mixed, creator: Peer) -> None:
    if creator == "go":
        await static_group.ask_go(
            "static-create", max_members=PARTITIONS, filter=static_group.filter, members="gopher,snake"
        )
    else:
        await groups.create_static(
            static_group.connection,
            static_group.stream,
            GROUP,
            partitions=PARTITIONS,
            filters=[static_group.filter],
            members=["gopher", "snake"],
            dialect="go-0.1",
        )
    await started(static_group, ("gopher", "go"), ("snake", "keylane"))
    handled = await static_group.handled_all(await static_group.publish(600), 30)
    assert follows(handled, Plan({"gopher": [0, 1, 2], "snake": [3, 4, 5]}))
    found = static_group.verdict()
    assert (found.clean, found.duplicated) == (True, ())


async def killed_and_replaced(mixed: Mixed, active: Peer, standby: Peer) -> None:
    """One member, an instance of each language; the active one is killed at work."""
    await started(mixed, ("a", active))
    first = mixed.members.started[0]
    await mixed.handled_all(await mixed.publish(100), 30)
    await started(mixed, ("a", standby))
    await mixed.handled_all(await mixed.publish(100), 30)
    before = mixed.handled()
    assert {one.by for one in before} == {"a#0"}, "the instance that came later only waits"
    rest = await mixed.publish(400)
    await first.kill()
    # A quick one has handled all 400 by then: only what comes after its death surely waits for the standby.
    rest += await mixed.publish(100)
    after = (await mixed.handled_all(rest, PIN_TIMEOUT_S + 24))[-100:]
    assert {one.by for one in after} == {"a#1"}
    found = mixed.verdict()
    assert found.clean, found
    assert len(found.duplicated) <= 1, "one message was in flight"


@pytest.mark.long("waits for Go's fixed idle time, twice")
async def test_go_and_python_instances_of_one_member_back_each_other_up(
    connection: Connection,
    pcgroups: PcgroupsPeer,
    nats_server: NatsServer,
    unique: Callable[..., str],
    tmp_path: Path,
) -> None:
    """Both ways at once, in two kinds of group: the server needs 6 s to notice that an instance is dead."""

    async def one_way(active: Peer, standby: Peer, kind: Literal["elastic", "static"]) -> None:
        group = Group(nats_server.url, unique("both"), GROUP, kind)
        async with group_of_both(connection, pcgroups, group, tmp_path) as mixed:
            if kind == "static":
                await mixed.ask_go("static-create", max_members=PARTITIONS, filter=mixed.filter, members="a")
            else:
                await mixed.go_creates_elastic()
                await mixed.ask_go("add-members", members="a")
            await killed_and_replaced(mixed, active, standby)

    async with asyncio.TaskGroup() as ways:
        for kind in ("elastic", "static"):
            ways.create_task(one_way("go", "keylane", kind))
            ways.create_task(one_way("keylane", "go", kind))


async def test_membership_changed_by_either_is_followed_by_both(elastic_group: Mixed) -> None:
    await python_creates_elastic(elastic_group, "gopher", "snake")
    await started(elastic_group, ("gopher", "go"), ("snake", "keylane"), ("viper", "keylane"), ("weasel", "go"))

    async def followed(plan: Plan) -> None:
        await elastic_group.publish(KEYS * 5)
        await elastic_group.until(lambda last: follows(last, plan), FOLLOWED_S)

    await followed(Plan({"gopher": [0, 1, 2], "snake": [3, 4, 5]}))
    await elastic_group.ask_go("add-members", members="viper")
    await followed(Plan({"gopher": [0, 1], "snake": [2, 3], "viper": [4, 5]}))
    await groups.drop_members(elastic_group.connection, elastic_group.stream, GROUP, ["gopher"])
    await followed(Plan({"snake": [0, 1, 2], "viper": [3, 4, 5]}))
    await groups.add_members(elastic_group.connection, elastic_group.stream, GROUP, ["weasel"], plan="sticky")
    await followed((await groups.get_config(elastic_group.connection, elastic_group.stream, GROUP)).plan)
    await elastic_group.ask_go("set-mapping", mapping="weasel:1,0;snake:4,2,3,5")
    await followed(Plan({"weasel": [0, 1], "snake": [2, 3, 4, 5]}))
    assert elastic_group.verdict().lost == ()

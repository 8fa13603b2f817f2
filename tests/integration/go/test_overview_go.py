"""The overview of a group of members written in Go: keylane asks the server, so it sees them as well."""

from __future__ import annotations

import pytest

from keylane.overview import GroupOverview, overview
from tests.integration.go.mixed import GROUP, Mixed
from tests.waiter import until

pytestmark = [pytest.mark.go, pytest.mark.timeout(120)]


async def test_a_member_in_go_is_seen(elastic_group: Mixed) -> None:
    await elastic_group.go_creates_elastic()
    await elastic_group.ask_go("add-members", members="gopher")
    await elastic_group.members.start("gopher", "go")
    await elastic_group.members.started[0].ready()

    async def seen() -> GroupOverview:
        found = (await overview(elastic_group.connection, ask_members=True)).group(elastic_group.stream, GROUP)
        assert found is not None
        return found

    found = await until(seen, lambda one: len(one.active) == 1 and not one.unowned, deadline_s=30)
    assert {one.owner for one in found.partitions} == {"gopher"}
    await elastic_group.handled_all(await elastic_group.publish(60), 30)
    found = await until(seen, lambda one: one.lag == 0, deadline_s=30)
    [gopher] = found.members
    assert gopher.pin is not None
    assert (gopher.host, gopher.standbys) == (None, None)  # it does not say where it runs
    assert found.summary == "g keeps up: 1 member, lag 0"

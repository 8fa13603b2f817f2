"""What is normal is not warned of: joining, working, changing members, stopping, deleting the group."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from keylane import groups
from tests.integration.groups.rig import Ground, active
from tests.waiter import until


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The test fails if it warned of anything."""
    caplog.set_level(logging.INFO, "keylane")
    yield
    told = [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.WARNING]
    assert told == []


async def busy(ground: Ground, count: int = 60) -> None:
    await ground.evidence.all_of(await ground.publish(f"k{number % 20}" for number in range(count)))


@pytest.mark.usefixtures("warnings")
async def test_members_of_an_elastic_group_come_and_go(ground: Ground) -> None:
    await ground.elastic(members=["a", "b"])
    members = [await ground.join(name) for name in ("a", "a", "b", "b")]
    await busy(ground)
    await groups.add_members(ground.connection, ground.stream, "g", ["c"])
    third = await ground.join("c")
    await busy(ground)
    await until(lambda: third.partitions)
    await groups.drop_members(ground.connection, ground.stream, "g", ["c"])
    await until(lambda: not third.partitions)
    await busy(ground)
    await third.stop()
    for member in members:
        await member.stop()


@pytest.mark.usefixtures("warnings")
async def test_a_mapping_is_set_and_taken_away(ground: Ground) -> None:
    await ground.elastic(members=["a", "b"])
    members = [await ground.join(name) for name in ("a", "b")]
    await busy(ground)
    await groups.set_mapping(ground.connection, ground.stream, "g", {"a": [0], "b": [1, 2, 3]})
    await until(lambda: members[0].partitions == (0,) and members[1].partitions == (1, 2, 3))
    await busy(ground)
    await groups.delete_mapping(ground.connection, ground.stream, "g")
    await until(lambda: not members[0].partitions and not members[1].partitions)


@pytest.mark.usefixtures("warnings")
async def test_members_of_a_static_group_stop(partitioned: Ground) -> None:
    await partitioned.static(members=["a", "b"])
    members = [await partitioned.join(name) for name in ("a", "a", "b")]
    await busy(partitioned)
    for member in members:
        await member.stop()


@pytest.mark.usefixtures("warnings")
@pytest.mark.parametrize("at_work", [True, False], ids=["busy", "idle"])
@pytest.mark.parametrize("kind", ["static", "elastic"])
async def test_a_group_is_deleted_while_members_run(
    kind: str, at_work: bool, partitioned: Ground, ground: Ground
) -> None:
    here = partitioned if kind == "static" else ground
    await (here.static if kind == "static" else here.elastic)(members=["a", "b"])

    async def slowly(message: groups.GroupMessage) -> None:
        await asyncio.sleep(0.01)
        await here.evidence.note("x", message)

    members = [await here.join(name, slowly) for name in ("a", "a", "b", "b")]
    await busy(here)
    if at_work:
        await here.publish(f"k{number % 20}" for number in range(300))
        await here.evidence.until(lambda lines: len(lines) > 80)
    await groups.delete(here.connection, here.stream, "g")
    for member in members:
        async with asyncio.timeout(30):
            assert "was deleted" in await member.wait()


@pytest.mark.usefixtures("warnings")
async def test_an_active_instance_stops_while_another_stands_by(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    first = await ground.join("a")
    await busy(ground)
    assert active(first)
    for _ in range(3):
        second = await ground.join("a")
        await ground.asked("a")
        await first.stop()
        await busy(ground)
        await until(lambda: active(second))  # noqa: B023
        first = second


@pytest.mark.usefixtures("warnings")
async def test_a_program_closes_its_connection_after_its_members_have_stopped(ground: Ground) -> None:
    await ground.elastic(members=["a", "b"])
    connection = await ground.client()
    members = [await ground.join(name, connection=connection) for name in ("a", "b")]
    await busy(ground)
    await asyncio.gather(*(member.stop() for member in members))
    await connection.close()


@pytest.mark.usefixtures("warnings")
@pytest.mark.timeout(120)
async def test_in_a_cluster(cluster_ground: Ground) -> None:
    await cluster_ground.elastic(members=["a", "b"])
    for name in ("a", "a", "b"):
        await cluster_ground.join(name)
    await busy(cluster_ground)
    await groups.add_members(cluster_ground.connection, cluster_ground.stream, "g", ["c"])
    third = await cluster_ground.join("c")
    await until(lambda: third.partitions)
    await busy(cluster_ground)
    await groups.drop_members(cluster_ground.connection, cluster_ground.stream, "g", ["c"])
    await until(lambda: not third.partitions)
    await busy(cluster_ground)
    await third.stop()
    await groups.delete(cluster_ground.connection, cluster_ground.stream, "g")

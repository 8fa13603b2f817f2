"""A group's record and queue mean the same to Go and Python, whoever wrote them."""

from __future__ import annotations

import pytest

from keylane import groups
from keylane.core.partitions import Partitioning
from keylane.core.plans import Plan
from keylane.errors import GroupConflict
from keylane.groups import ElasticConfig, GroupName, StaticConfig
from keylane.groups.consumer_spec import queue_stream
from keylane.jetstream import streams
from tests.integration.go.mixed import GROUP, PARTITIONS, Mixed

pytestmark = pytest.mark.go


async def test_python_reads_an_elastic_group_that_go_made(elastic_group: Mixed) -> None:
    await elastic_group.go_creates_elastic(max_buffered_msgs=1000, max_buffered_bytes=100_000)
    await elastic_group.ask_go("add-members", members="c,a,b")
    config = await groups.get_config(elastic_group.connection, elastic_group.stream, GROUP)
    assert isinstance(config, ElasticConfig)
    assert config.dialect == "go-0.1"
    assert config.partitioning == (Partitioning(elastic_group.filter, (1,), PARTITIONS),)
    assert (config.max_buffered_messages, config.max_buffered_bytes) == (1000, 100_000)
    assert config.plan == Plan({"a": [0, 1], "b": [2, 3], "c": [4, 5]})
    assert await groups.list_groups(elastic_group.connection, elastic_group.stream) == [
        GroupName(elastic_group.stream, GROUP, "elastic")
    ]

    await elastic_group.ask_go("set-mapping", mapping="a:5,0,1;b:4,3,2")
    config = await groups.get_config(elastic_group.connection, elastic_group.stream, GROUP)
    assert config.plan == Plan({"a": [0, 1, 5], "b": [2, 3, 4]})


async def test_go_reads_an_elastic_group_that_python_made(elastic_group: Mixed) -> None:
    await groups.create_elastic(
        elastic_group.connection,
        elastic_group.stream,
        GROUP,
        partitions=PARTITIONS,
        partition_by=elastic_group.filter,
        max_buffered_messages=1000,
        max_buffered_bytes=100_000,
        members=["a", "b"],
        dialect="go-0.1",
    )
    common = {
        "max_members": PARTITIONS,
        "filter": elastic_group.filter,
        "partitioning_wildcards": [1],
        "max_buffered_msg": 1000,
        "max_buffered_bytes": 100_000,
    }
    assert await elastic_group.ask_go("config") == common | {"members": ["a", "b"]}

    await groups.add_members(elastic_group.connection, elastic_group.stream, GROUP, ["c"], plan="sticky")
    read = await elastic_group.ask_go("config")
    mappings = read.pop("member_mappings")
    assert read == common
    plan = (await groups.get_config(elastic_group.connection, elastic_group.stream, GROUP)).plan
    assert Plan.from_mappings((one["member"], one["partitions"]) for one in mappings) == plan

    await groups.delete_mapping(elastic_group.connection, elastic_group.stream, GROUP)
    assert await elastic_group.ask_go("config") == common


async def test_each_accepts_the_others_elastic_group_as_its_own(elastic_group: Mixed) -> None:
    """Create is idempotent across languages only if the record and the queue stream are the same to both."""

    async def python_creates(buffered: int) -> ElasticConfig:
        return await groups.create_elastic(
            elastic_group.connection,
            elastic_group.stream,
            GROUP,
            partitions=PARTITIONS,
            partition_by=elastic_group.filter,
            max_buffered_messages=buffered,
            dialect="go-0.1",
        )

    await elastic_group.go_creates_elastic(max_buffered_msgs=500)
    before = (await streams.info(elastic_group.connection, queue_stream(elastic_group.stream, GROUP))).config
    assert (await python_creates(500)).max_buffered_messages == 500
    await groups.delete(elastic_group.connection, elastic_group.stream, GROUP)

    await python_creates(500)
    after = (await streams.info(elastic_group.connection, queue_stream(elastic_group.stream, GROUP))).config
    assert after == before
    assert (await elastic_group.go_creates_elastic(max_buffered_msgs=500))["max_buffered_msg"] == 500
    with pytest.raises(GroupConflict):
        await python_creates(501)


@pytest.mark.parametrize("mapped", [False, True])
async def test_static_records_are_the_same_to_both(static_group: Mixed, mapped: bool) -> None:
    plan = {"a": [0, 1, 2], "b": [3, 4, 5]}
    owners = {"mapping": "a:0,1,2;b:3,4,5"} if mapped else {"members": "a,b"}

    async def python_creates() -> StaticConfig:
        return await groups.create_static(
            static_group.connection,
            static_group.stream,
            GROUP,
            partitions=PARTITIONS,
            filters=[static_group.filter],
            members=() if mapped else ["a", "b"],
            mappings=plan if mapped else None,
            dialect="go-0.1",
        )

    async def go_creates() -> object:
        return await static_group.ask_go("static-create", max_members=PARTITIONS, filter=static_group.filter, **owners)

    made = await go_creates()
    theirs = await groups.get_config(static_group.connection, static_group.stream, GROUP)
    assert theirs == await python_creates()
    assert theirs.plan == Plan(plan)
    await groups.delete(static_group.connection, static_group.stream, GROUP)

    assert theirs == await python_creates()
    assert await static_group.ask_go("config") == made
    assert await go_creates() == made
    await static_group.ask_go("delete")
    assert await groups.list_groups(static_group.connection, static_group.stream) == []

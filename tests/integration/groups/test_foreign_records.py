"""Groups that the newest Go library made: its records byte for byte, and the durables that it leaves behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from nats.js.api import SubjectTransform

from keylane import PartitionBy, groups
from keylane.core.partitions import partition_of
from keylane.errors import BrokenGroupRecord, GroupError, InvalidInput, NoSuchGroup
from keylane.groups.config import Kind
from keylane.groups.store import bucket_of
from keylane.jetstream import ConsumerConfig, ConsumerInfo, consumers, streams
from tests.integration.groups.conftest import MakeGround
from tests.integration.groups.rig import Ground, active, flawless
from tests.waiter import until


async def store(ground: Ground, record: bytes, kind: Kind = "elastic", group: str = "g") -> None:
    bucket = bucket_of(ground.connection, kind)
    await bucket.ensure(replicas=1)
    entry = await bucket.get(f"{ground.stream}.{group}")
    await bucket.put(f"{ground.stream}.{group}", record, revision=entry.revision if entry is not None else 0)


async def stored(ground: Ground, group: str = "g") -> bytes:
    entry = await bucket_of(ground.connection, "elastic").get(f"{ground.stream}.{group}")
    assert entry is not None
    assert entry.value is not None
    return entry.value


ONE_STAR = rb'{"filter":"%s.*","partitioning_wildcards":[1]}'
RECORDS: list[tuple[bytes, list[tuple[str, list[int]]]]] = [
    (
        rb'{"max_members":4,"partitioning_filters":[' + ONE_STAR + rb'],"max_buffered_msg":-1,"max_buffered_bytes":-1}',
        [("{}.*", [1])],
    ),
    (
        rb'{"max_members":4,"partitioning_filters":[{"filter":"%s.\u003e","partitioning_wildcards":[]}]}',
        [("{}.>", [])],
    ),
    (
        rb'{"max_members":4,"partitioning_filters":[{"filter":"%s.*","partitioning_wildcards":null}]}',
        [("{}.*", [])],
    ),
    (rb'{"max_members":4,"partitioning_filters":[]}', []),
    (rb'{"max_members":4,"partitioning_filters":null}', []),
]


@pytest.mark.parametrize(
    ("record", "partitioning"), RECORDS, ids=["-1", "[] wildcards", "null wildcards", "[]", "null"]
)
async def test_a_group_that_go_made_is_read_and_changed_in_its_own_form(
    ground: Ground, record: bytes, partitioning: list[tuple[str, list[int]]]
) -> None:
    name = ground.stream
    record = record.replace(b"%s", name.encode())
    partitioning = [(one.format(name), wildcards) for one, wildcards in partitioning]
    await store(ground, record)
    await ground.elastic(partition_by=[PartitionBy(*one) for one in partitioning])
    assert await stored(ground) == record, "the same group is not written again"
    for change in (
        groups.add_members(ground.connection, name, "g", ["a"]),
        groups.add_members(ground.connection, name, "g", ["b"], plan="sticky"),
        groups.set_mapping(ground.connection, name, "g", {"a": [3, 2], "b": [1, 0]}),
    ):
        await change
        now = json.loads(await stored(ground))
        assert now.pop("members", None) or now.pop("member_mappings", None)
        assert now == json.loads(record)
    await groups.delete_mapping(ground.connection, name, "g")
    assert json.loads(await stored(ground)) == json.loads(record)

    await groups.add_members(ground.connection, name, "g", ["a"])
    await ground.join("a")
    sent = await ground.publish([f"k{number}" for number in range(12)])
    await ground.evidence.all_of(sent)
    assert flawless(ground.evidence.verdict(sent))
    one, wildcards = partitioning[0] if partitioning else (">", [])
    for line in ground.evidence.lines:
        assert line.partition == partition_of(line.subject, one, wildcards, 4)
        assert line.key == (line.subject.removeprefix(f"{name}.") if wildcards else line.subject)


# ---- a durable that Go made for a mapped group with filters ------------------------------------------------------


@pytest.fixture
async def mapped(make: MakeGround) -> Ground:
    """A static group of orders alone, mapped, with the durable of `a` as Go makes it: whole partitions."""
    place = await make(
        transform=SubjectTransform(src=">", dest="{{Partition(4)}}.>"),
    )
    await place.static(filters=[f"{place.stream}.orders.*"], mappings={"a": [0, 3, 1], "b": [2]})
    go = ConsumerConfig(
        durable_name="g-a",
        filter_subjects=("3.>", "0.>", "1.>"),
        ack_wait_s=1.0,
        max_ack_pending=1000,
        priority_groups=("PCG",),
        priority_policy="pinned_client",
        priority_timeout_s=1.0,
    )
    await consumers.create(place.connection, place.stream, go, action="create")
    return place


async def test_a_durable_that_go_made_is_adopted_as_it_is(mapped: Ground) -> None:
    before = (await consumers.info(mapped.connection, mapped.stream, "g-a")).config
    member = await mapped.join("a")
    kinds = [f"{kind}.k{number}" for number in range(20) for kind in ("orders", "refunds")]
    sent = await mapped.publish(kinds)
    asked = [
        one
        for one, kind in zip(sent, kinds, strict=True)
        if kind.startswith("orders") and partition_of(f"{mapped.stream}.{kind}", ">", [], 4) != 2
    ]
    assert asked
    await mapped.evidence.all_of(asked)
    info = await until(
        lambda: consumers.info(mapped.connection, mapped.stream, "g-a"),
        lambda info: not info.num_pending and not info.num_ack_pending,
    )
    assert info.config == before
    assert {line.subject.split(".")[1] for line in mapped.evidence.lines} == {"orders"}
    assert flawless(mapped.evidence.verdict(asked))
    assert member.partitions == (0, 1, 3)


async def test_what_was_not_asked_for_is_not_acked_before_what_was(mapped: Ground) -> None:
    """With acks that count for all messages before, as a static group may have."""
    config = (await consumers.info(mapped.connection, mapped.stream, "g-a")).config.to_wire()
    await consumers.delete(mapped.connection, mapped.stream, "g-a")
    await consumers.create(
        mapped.connection,
        mapped.stream,
        ConsumerConfig.from_wire(
            {**config, "ack_policy": "all", "ack_wait": 30_000_000_000, "priority_timeout": 30_000_000_000}
        ),
        action="create",
    )
    go_on = asyncio.Event()

    async def handler(message: groups.GroupMessage) -> None:
        await go_on.wait()
        await mapped.evidence.note("a", message)

    client = await mapped.client()
    wanted = ConsumerConfig(ack_wait_s=30.0, ack_policy="all")
    await mapped.join("a", handler, settings=wanted, connection=client)
    subjects = [f"{kind}.k{number}" for number in range(8) for kind in ("orders", "refunds")]
    sent = await mapped.publish(subjects)
    asked = [
        one
        for one, kind in zip(sent, subjects, strict=True)
        if kind.startswith("orders") and partition_of(f"{mapped.stream}.{kind}", ">", [], 4) != 2
    ]

    async def look() -> ConsumerInfo:
        return await consumers.info(client, mapped.stream, "g-a")

    await until(look, lambda info: not info.num_pending)
    held = [(await look()).num_ack_pending for _ in range(20)]
    assert min(held) > len(asked) - 1, "nothing is acked while the first message is at work"
    go_on.set()
    await mapped.evidence.all_of(asked)
    assert flawless(mapped.evidence.verdict(asked))


async def test_a_durable_that_lacks_a_filter_of_the_group_gets_it(mapped: Ground) -> None:
    """It is of an older group of the same name: a member that kept it would miss messages in silence."""
    config = (await consumers.info(mapped.connection, mapped.stream, "g-a")).config.to_wire()
    await consumers.delete(mapped.connection, mapped.stream, "g-a")
    older = {**config, "filter_subjects": [f"{one}.{mapped.stream}.refunds.*" for one in (0, 1, 3)]}
    await consumers.create(mapped.connection, mapped.stream, ConsumerConfig.from_wire(older), action="create")
    await mapped.join("a")
    wanted = tuple(f"{one}.{mapped.stream}.orders.*" for one in (0, 1, 3))
    await until(
        lambda: consumers.info(mapped.connection, mapped.stream, "g-a"),
        lambda info: info.config.filter_subjects == wanted,
    )


# ---- mappings that members in Go cannot follow -------------------------------------------------------------------


async def test_a_mapping_that_stops_go_members_needs_a_yes(ground: Ground, partitioned: Ground) -> None:
    name, connection = ground.stream, ground.connection
    await ground.elastic(partition_by=[f"{name}.o.*", f"{name}.r.*"], members=["a"])
    record = await stored(ground)
    words = r"its members in Go stop, .*10138.* stop_go_members=True"
    for change in (
        groups.set_mapping(connection, name, "g", {"a": range(4)}),
        groups.add_members(connection, name, "g", ["b"], plan="sticky"),
        groups.drop_members(connection, name, "g", ["x"], plan="sticky"),
    ):
        with pytest.raises(InvalidInput, match=words):
            await change
        assert await stored(ground) == record
    await groups.add_members(connection, name, "g", ["b"])
    await groups.add_members(connection, name, "g", ["c"], plan="sticky", stop_go_members=True)
    changed = await groups.drop_members(connection, name, "g", ["c"], plan="sticky")
    assert changed.mappings is not None, "they have stopped by now: it is not asked again"

    parts: dict[str, Any] = {"filters": [f"{partitioned.stream}.a", f"{partitioned.stream}.b"]}
    with pytest.raises(InvalidInput, match=words):
        await partitioned.static(mappings={"a": range(4)}, **parts)
    await partitioned.static(mappings={"a": range(4)}, stop_go_members=True, **parts)


# ---- records that nobody can work with ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["static", "elastic"])
async def test_a_broken_record_is_deleted_by_force_alone(make: MakeGround, kind: Any) -> None:
    place = await make(partitions=4)
    if kind == "static":
        await place.static(members=["a"])
        await consumers.create(place.connection, place.stream, ConsumerConfig(durable_name="g-a"), action="create")
    else:
        await place.elastic()
    await store(place, b'{"max_members": -1}', kind)
    with pytest.raises(BrokenGroupRecord):
        await groups.delete(place.connection, place.stream, "g", kind=kind)
    if kind == "static":
        with pytest.raises(InvalidInput, match="say with kind="):
            await groups.delete(place.connection, place.stream, "g", force=True)
    await groups.delete(place.connection, place.stream, "g", kind=kind, force=True)
    with pytest.raises(NoSuchGroup):
        await groups.get_config(place.connection, place.stream, "g", kind=kind)
    assert f"{place.stream}-g" not in await streams.names(place.connection)


@pytest.mark.parametrize("kind", ["static", "elastic"])
async def test_a_record_with_a_million_partitions_is_refused_at_once(ground: Ground, kind: Any) -> None:
    await store(ground, b'{"max_members": 1000000, "members": ["a"]}', kind)
    calls = [
        groups.join(ground.connection, ground.stream, "g", "a", ground.evidence.handler("a")),
        groups.get_config(ground.connection, ground.stream, "g"),
        groups.active_members(ground.connection, ground.stream, "g"),
        groups.delete(ground.connection, ground.stream, "g"),
    ]
    for call in calls:
        with pytest.raises(BrokenGroupRecord, match="1,000,000 partitions are more than the 16,384"):
            await call


# ---- more than one consumer can carry ----------------------------------------------------------------------------


def many(stream: str, members: list[str]) -> bytes:
    return json.dumps(
        {
            "max_members": 2_002,
            "partitioning_filters": [{"filter": f"{stream}.*", "partitioning_wildcards": [1]}],
            "members": members,
        }
    ).encode()


async def test_a_member_with_too_many_partitions_says_so_and_goes_on_when_others_come(
    ground: Ground, caplog: pytest.LogCaptureFixture
) -> None:
    name = ground.stream
    await ground.elastic(partitions=2_002)
    assert "its 2,002 partitions need at least 2 members" in caplog.text
    with pytest.raises(InvalidInput, match=r"'a' would read 2,002 partitions.* at least 2 members"):
        await groups.add_members(ground.connection, name, "g", ["a"])
    await groups.add_members(ground.connection, name, "g", ["a", "b"])
    with pytest.raises(InvalidInput, match="at least 2 members"):
        await groups.drop_members(ground.connection, name, "g", ["b"])
    member = await ground.join("a")
    await until(lambda: len(member.partitions) == 1_001)

    await store(ground, many(name, ["a"]))  # as somebody with another tool would
    await until(lambda: not member.partitions)
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 1
    assert "member 'a' would read 2,002 partitions" in told[0]
    assert "it reads nothing until then" in told[0]
    with pytest.raises(GroupError, match="'a' would read 2,002 partitions"):
        await groups.join(ground.connection, name, "g", "a", ground.evidence.handler("a"))

    await groups.add_members(ground.connection, name, "g", ["b"])
    await ground.publish([f"k{number}" for number in range(20)])
    await until(lambda: active(member))
    await until(lambda: len(member.partitions) == 1_001)

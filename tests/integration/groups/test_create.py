"""Making and deleting groups: what is written, what is refused, and what collides."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from nats.js.api import StreamSource, SubjectTransform

from keylane import PartitionBy, groups
from keylane.errors import (
    BrokenGroupRecord,
    GroupConflict,
    GroupError,
    InvalidInput,
    KeylaneError,
    NoSuchGroup,
    NotFound,
)
from keylane.groups.store import bucket_of
from keylane.jetstream import ConsumerConfig, consumers, streams
from tests.integration.groups.conftest import MakeGround
from tests.integration.groups.rig import Ground
from tests.waiter import until


async def test_an_elastic_group_is_a_record_and_a_queue(ground: Ground) -> None:
    config = await ground.elastic(members=["a", "b"], max_buffered_messages=500, max_buffered_bytes=10_000)
    entry = await bucket_of(ground.connection, "elastic").get(f"{ground.stream}.g")
    assert entry is not None
    assert entry.value is not None
    assert json.loads(entry.value) == {
        "max_members": 4,
        "partitioning_filters": [{"filter": f"{ground.stream}.*", "partitioning_wildcards": [1]}],
        "max_buffered_msg": 500,
        "max_buffered_bytes": 10_000,
        "members": ["a", "b"],
    }
    assert config == await groups.get_config(ground.connection, ground.stream, "g")
    queue = (await ground.connection.api.request(f"STREAM.INFO.{ground.stream}-g"))["config"]
    expected = {
        "retention": "workqueue", "discard": "new", "allow_direct": True, "storage": "memory", "num_replicas": 1,
        "max_msgs": 500, "max_bytes": 10_000,
    }  # fmt: skip
    assert {name: queue[name] for name in expected} == expected
    [source] = queue["sources"]
    assert source["name"] == ground.stream
    assert source["subject_transforms"] == [
        {"src": f"{ground.stream}.*", "dest": f"{{{{Partition(4,1)}}}}.{ground.stream}.{{{{Wildcard(1)}}}}"}
    ]


async def test_the_buckets_are_what_other_languages_expect(ground: Ground) -> None:
    await ground.elastic()
    config = (await ground.connection.api.request("STREAM.INFO.KV_elastic-consumer-groups"))["config"]
    expected = {
        "subjects": ["$KV.elastic-consumer-groups.>"], "storage": "file", "num_replicas": 1, "allow_direct": True,
        "max_msgs_per_subject": 1, "allow_rollup_hdrs": True, "deny_delete": True, "discard": "new",
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected
    bucket = await ground.connection.jetstream.key_value("elastic-consumer-groups")
    assert (await bucket.get(f"{ground.stream}.g")).value is not None


async def test_the_identical_group_is_fine_and_another_one_is_refused(ground: Ground) -> None:
    first = await ground.elastic()
    assert await ground.elastic() == first
    for change, words in (
        ({"partitions": 5}, "partitions is 4 there and 5 here"),
        ({"partition_by": PartitionBy(f"{ground.stream}.*.*", key=[1])}, "partitioning is "),
        ({"max_buffered_messages": 1}, "max_buffered_messages is 0 there and 1 here"),
        ({"max_buffered_bytes": 1}, "max_buffered_bytes is 0 there and 1 here"),
        ({"dialect": "go-0.1"}, "dialect is 'present' there and 'go-0.1' here"),
    ):
        with pytest.raises(GroupConflict) as caught:
            await ground.elastic(**change)
        assert words in str(caught.value)
        assert "delete it first, or choose another name" in str(caught.value)
    assert await groups.get_config(ground.connection, ground.stream, "g") == first


async def test_making_an_elastic_group_again_keeps_its_members(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    await groups.add_members(ground.connection, ground.stream, "g", ["b"])
    assert (await ground.elastic(members=["a"])).members == ("a", "b")


async def test_the_identical_static_group_is_fine_and_another_one_is_refused(partitioned: Ground) -> None:
    first = await partitioned.static(members=["a", "b"])
    assert await partitioned.static(members=["b", "a"]) == first
    for change, words in (
        ({"members": ["a"]}, "members is ('a', 'b') there and ('a',) here"),
        ({"members": ["a", "b"], "filters": ["x.*"]}, "filters is () there and ('x.*',) here"),
        ({"mappings": {"a": [0, 1], "b": [2, 3]}}, "members is ('a', 'b') there and () here"),
    ):
        with pytest.raises(GroupConflict) as caught:
            await partitioned.static(**change)
        assert words in str(caught.value)


async def test_twenty_at_once_make_one_group(ground: Ground) -> None:
    made = await asyncio.gather(*[ground.elastic(members=["a"]) for _ in range(20)])
    assert all(one == made[0] for one in made)
    assert len(await groups.list_groups(ground.connection, ground.stream)) == 1
    queues = [one for one in await streams.names(ground.connection) if one.startswith(f"{ground.stream}-")]
    assert queues == [f"{ground.stream}-g"]


async def test_of_two_different_groups_at_once_one_is_made(ground: Ground) -> None:
    results = await asyncio.gather(*[ground.elastic(partitions=number) for number in (2, 3)], return_exceptions=True)
    failed = [one for one in results if isinstance(one, BaseException)]
    assert len(failed) == 1
    assert isinstance(failed[0], GroupConflict)
    [kept] = [one for one in results if isinstance(one, groups.ElasticConfig)]
    assert await groups.get_config(ground.connection, ground.stream, "g") == kept


# ---- collisions -------------------------------------------------------------------------------------------


async def test_two_groups_that_would_share_a_queue_stream(make: MakeGround, ground: Ground) -> None:
    """`a` + `b-c` and `a-b` + `c`."""
    other = await make(stream=f"{ground.stream}-b")
    await ground.elastic("b-c", members=["m"])
    with pytest.raises(GroupConflict) as caught:
        await other.elastic("c")
    assert f"needs the stream name '{ground.stream}-b-c', which is taken by a group on stream '{ground.stream}'" in str(
        caught.value
    )
    with pytest.raises(NoSuchGroup):
        await groups.get_config(other.connection, other.stream, "c")


async def test_a_stream_that_is_no_queue_is_not_taken(make: MakeGround, ground: Ground) -> None:
    other = await make(stream=f"{ground.stream}-g")
    with pytest.raises(GroupConflict, match="which is taken: choose another group name"):
        await ground.elastic()
    assert (await streams.info(other.connection, other.stream)).config.subjects == [f"{other.stream}.>"]


async def test_a_queue_of_the_same_stream_with_other_settings_is_not_taken(ground: Ground) -> None:
    await ground.elastic(partitions=3)
    await bucket_of(ground.connection, "elastic").delete(f"{ground.stream}.g", revision=await revision(ground))
    with pytest.raises(GroupConflict, match="which is there with other settings: delete that stream first"):
        await ground.elastic(partitions=4)
    with pytest.raises(NoSuchGroup):
        await groups.get_config(ground.connection, ground.stream, "g")


async def test_two_static_groups_that_would_share_a_durable(partitioned: Ground) -> None:
    """`a` + `b-c` and `a-b` + `c`."""
    await partitioned.static("a", members=["b-c", "x"])
    with pytest.raises(GroupConflict) as caught:
        await partitioned.static("a-b", members=["c"])
    assert "member 'c' of group 'a-b' and member 'b-c' of group 'a' would share the consumer 'a-b-c'" in str(
        caught.value
    )
    await partitioned.static("a-b", members=["d"])
    await partitioned.static("x", mappings={"y-z": range(4)})
    with pytest.raises(GroupConflict):
        await partitioned.static("x-y", mappings={"z": range(4)})


async def test_one_name_is_static_or_elastic(partitioned: Ground) -> None:
    await partitioned.static("s", members=["a"])
    with pytest.raises(GroupConflict, match="has a static group 's'"):
        await partitioned.elastic("s")
    await partitioned.elastic("e")
    with pytest.raises(GroupConflict, match="has an elastic group 'e'"):
        await partitioned.static("e", members=["a"])


async def test_a_name_that_another_library_gave_twice(partitioned: Ground) -> None:
    """Then `kind` says which one is meant."""
    static = await partitioned.static(members=["a"])
    record = groups.ElasticConfig(partitions=2, members=("x",)).to_json()
    await bucket_of(partitioned.connection, "elastic").ensure(replicas=1)
    await bucket_of(partitioned.connection, "elastic").put(f"{partitioned.stream}.g", record, revision=0)
    with pytest.raises(GroupError, match="a static and an elastic group named 'g': say which with kind="):
        await groups.get_config(partitioned.connection, partitioned.stream, "g")
    for kind, config in (("static", static), ("elastic", groups.ElasticConfig(partitions=2, members=("x",)))):
        found = await groups.get_config(partitioned.connection, partitioned.stream, "g", kind=kind)  # type: ignore[arg-type]
        assert found == config
    await groups.delete(partitioned.connection, partitioned.stream, "g", kind="elastic")
    assert await groups.get_config(partitioned.connection, partitioned.stream, "g") == static


# ---- partitions against the stream ------------------------------------------------------------------------


async def test_partitions_must_be_the_partitions_of_the_transform(partitioned: Ground) -> None:
    for wrong in (3, 5):
        with pytest.raises(InvalidInput) as caught:
            await partitioned.static(partitions=wrong, members=["a"])
        assert f"partitions is {wrong}, but the transform of stream" in str(caught.value)
        assert "makes 4 partitions" in str(caught.value)
    await partitioned.static(partitions=4, members=["a"])


async def test_a_stream_that_cannot_hold_partition_numbers_gets_no_static_group(ground: Ground) -> None:
    await ground.publish(["k1"])
    with pytest.raises(InvalidInput) as caught:
        await ground.static(partitions=7, members=["a"])
    assert f"stream '{ground.stream}' has no partition numbers: it stores {ground.stream}.>" in str(caught.value)
    assert "{{Partition(7,…)}} first, or create an elastic group" in str(caught.value)
    assert await groups.list_groups(ground.connection, ground.stream) == []


async def test_a_transform_that_touches_no_subject_of_the_stream_inserts_no_number(make: MakeGround) -> None:
    place = await make(transform=SubjectTransform(src="ordres.*", dest="{{Partition(4,1)}}.ordres.{{Wildcard(1)}}"))
    with pytest.raises(InvalidInput, match=f"has no partition numbers: it stores {place.stream}.>"):
        await place.static(members=["a"])


async def test_a_group_that_is_there_is_the_same_also_when_the_stream_has_lost_its_numbers(
    partitioned: Ground,
) -> None:
    first = await partitioned.static(members=["a"])
    await partitioned.transform_subjects()
    assert await partitioned.static(members=["a"]) == first


async def test_numbers_that_publishers_write_themselves_are_looked_for(
    make: MakeGround, caplog: pytest.LogCaptureFixture
) -> None:
    place = await make(subjects=["0.>", "1.>", "2.>"])
    await place.static("early", partitions=3, members=["a"])
    [early] = warnings(caplog)
    assert "no message there begins with one yet; members get only what is published on subjects" in early
    assert "begin with 0 to 2" in early
    await place.connection.jetstream.publish("2.o.1", b"")
    await place.static("late", partitions=3, members=["a"])
    assert warnings(caplog) == [early]


async def test_a_copy_of_numbered_streams_is_taken_at_its_word(
    make: MakeGround, partitioned: Ground, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of its own configuration says what it stores."""
    copy = await make(subjects=None, sources=[StreamSource(name=partitioned.stream)])
    await copy.static(members=["a"])
    assert len(warnings(caplog)) == 1
    await partitioned.publish([f"k{number}" for number in range(20)])
    await until(lambda: streams.state(copy.connection, copy.stream), lambda state: state.messages == 20)
    await copy.static("late", members=["a"])
    assert len(warnings(caplog)) == 1


async def test_a_static_filter_that_matches_nothing_is_told(
    partitioned: Ground, caplog: pytest.LogCaptureFixture
) -> None:
    await partitioned.static(members=["a"], filters=[f"{partitioned.stream}.*"])
    assert warnings(caplog) == []
    await partitioned.static("h", members=["a"], filters=[f"*.{partitioned.stream}.*"])
    [told] = warnings(caplog)
    assert f"filter '*.{partitioned.stream}.*' matches nothing that stream" in told
    assert "without the partition number" in told


async def test_an_elastic_filter_that_matches_nothing_is_told(ground: Ground, caplog: pytest.LogCaptureFixture) -> None:
    name = ground.stream
    await ground.elastic(partition_by=[f"{name}.orders.*", "ordres.*"], members=["a"])
    [told] = warnings(caplog)
    assert f"filter 'ordres.*' matches nothing that stream '{name}' stores ({name}.>)" in told
    assert "Delete the group and create it with another filter" in told


async def test_a_filter_without_the_number_that_the_stream_inserts_matches_nothing(
    partitioned: Ground, caplog: pytest.LogCaptureFixture
) -> None:
    await partitioned.elastic(partition_by=PartitionBy(f"*.{partitioned.stream}.*", key=[2]))
    assert warnings(caplog) == []
    await partitioned.elastic("h", partition_by=f"{partitioned.stream}.*")
    [told] = warnings(caplog)
    assert f"(*.{partitioned.stream}.*, {partitioned.stream}.>)" in told


async def test_more_members_than_partitions_are_told(ground: Ground, caplog: pytest.LogCaptureFixture) -> None:
    await ground.elastic(partitions=2, members=["a", "b"])
    assert warnings(caplog) == []
    await groups.add_members(ground.connection, ground.stream, "g", ["c", "d"])
    [told] = warnings(caplog)
    assert "has 4 members for 2 partitions: c, d own no partition and only wait" in told
    await groups.drop_members(ground.connection, ground.stream, "g", ["d"])
    assert "3 members for 2 partitions: c owns no partition and only waits" in warnings(caplog)[1]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "keylane.groups"]


async def test_a_transform_that_hashes_whole_subjects(make: MakeGround) -> None:
    place = await make(transform=SubjectTransform(src=">", dest="{{Partition(6)}}.>"))
    with pytest.raises(InvalidInput, match="makes 6 partitions"):
        await place.static(partitions=4, members=["a"])
    await place.static(partitions=6, members=["a"])


# ---- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"members": []}, "needs its members, or mappings, from the start"),
        ({"members": "abc"}, "members is 'abc', one text: give a list"),
        ({"members": ["a"], "filters": "x.*"}, "filters is 'x.*', one text: give a list"),
        ({"members": ["a"], "mappings": {"a": range(4)}}, "give members or mappings, not both"),
        ({"mappings": {"a": [0, 1, 2]}}, "partitions 3 of 4 belong to no member"),
        ({"members": ["a"], "partitions": 16_385}, "16,385 partitions are more than the 16,384"),
        ({"members": ["a"], "partitions": 0}, "number of partitions 0 is out of range"),
        ({"members": ["a"], "group": "a.b"}, "group name 'a.b' holds"),
        ({"members": ["a"], "filters": ["a.*", "b.*"], "dialect": "go-0.1"}, "the dialect go-0.1 has one at most"),
    ],
)
async def test_bad_static_groups(partitioned: Ground, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        await partitioned.static(**options)
    assert words in str(caught.value)
    assert await groups.list_groups(partitioned.connection, partitioned.stream) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition_by": "x.y"}, "filter 'x.y' has no wildcard"),
        ({"partition_by": [f"{one}.*" for one in "abcdefghi"]}, "9 filters: a group takes 8"),
        ({"partitions": 2**31 - 1}, "2,147,483,647 partitions are more than the 16,384"),
        ({"partitions": 10_000, "members": list("abcd")}, "at least 5 members"),
        ({"partition_by": [("x.*", [1])]}, "partition_by is ('x.*', [1]): give a filter, or PartitionBy("),
        ({"partition_by": ["x.*", "x.>"]}, "overlap"),
        ({"max_buffered_messages": -1}, "a buffer of -1 messages"),
        ({"max_buffered_bytes": -1}, "a buffer of -1 bytes"),
        ({"members": ["a b"]}, "member name 'a b' holds ' '"),
        ({"members": "ab"}, "members is 'ab', one text: give a list"),
        ({"dialect": "go-0.1", "partition_by": []}, "the dialect go-0.1 has exactly one"),
    ],
)
async def test_bad_elastic_groups(ground: Ground, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        await ground.elastic(**options)
    assert words in str(caught.value)
    assert await groups.list_groups(ground.connection, ground.stream) == []
    assert f"{ground.stream}-g" not in await streams.names(ground.connection)


async def test_no_stream_no_group(ground: Ground) -> None:
    for create in (groups.create_static, groups.create_elastic):
        with pytest.raises(NotFound):
            await create(ground.connection, "nothing-here", "g", partitions=1, members=["a"])
    assert await groups.list_groups(ground.connection, "nothing-here") == []


async def test_a_member_name_of_the_old_dialect_must_fit_a_priority_group(ground: Ground) -> None:
    """The server says so too: 16 characters are taken, 17 are not."""
    with pytest.raises(InvalidInput, match="also the name of a priority group"):
        await ground.elastic(dialect="go-0.1", members=["m" * 17])
    for length in (16, 17):
        config = ConsumerConfig(name="x", priority_groups=("m" * length,), priority_policy="pinned_client")
        if length == 16:
            await consumers.create(ground.connection, ground.stream, config)
        else:
            with pytest.raises(KeylaneError):
                await consumers.create(ground.connection, ground.stream, config)


# ---- list and delete ---------------------------------------------------------------------------------------


async def revision(ground: Ground) -> int:
    entry = await bucket_of(ground.connection, "elastic").get(f"{ground.stream}.g")
    assert entry is not None
    return int(entry.revision)


async def test_groups_are_listed_by_stream_static_ones_first(partitioned: Ground, ground: Ground) -> None:
    await partitioned.elastic("e2")
    await partitioned.elastic("e1")
    await partitioned.static("s1", members=["a"])
    await ground.elastic("other")
    found = await groups.list_groups(partitioned.connection, partitioned.stream)
    assert [(one.group, one.kind) for one in found] == [("s1", "static"), ("e1", "elastic"), ("e2", "elastic")]
    await groups.delete(partitioned.connection, partitioned.stream, "e2")
    await groups.delete(partitioned.connection, partitioned.stream, "s1")
    found = await groups.list_groups(partitioned.connection, partitioned.stream)
    assert [one.group for one in found] == ["e1"]


async def test_a_purged_group_is_not_listed(ground: Ground) -> None:
    await ground.elastic()
    bucket = await ground.connection.jetstream.key_value("elastic-consumer-groups")
    await bucket.purge(f"{ground.stream}.g")
    assert await groups.list_groups(ground.connection, ground.stream) == []
    with pytest.raises(NoSuchGroup):
        await groups.get_config(ground.connection, ground.stream, "g")
    await ground.elastic(members=["back"])
    assert (await groups.get_config(ground.connection, ground.stream, "g")).members == ("back",)


async def test_deleting_removes_the_record_and_the_queue(ground: Ground) -> None:
    await ground.elastic()
    await groups.delete(ground.connection, ground.stream, "g")
    assert f"{ground.stream}-g" not in await streams.names(ground.connection)
    with pytest.raises(NoSuchGroup, match="has no group 'g'; there is: "):
        await groups.delete(ground.connection, ground.stream, "g")
    await ground.elastic(partitions=7)


async def test_deleting_leaves_a_stream_that_is_not_the_queue(make: MakeGround, ground: Ground) -> None:
    """Another library made both records; one of them has no queue of its own."""
    other = await make(stream=f"{ground.stream}-b")
    await ground.elastic("b-c", members=["m"])
    record = groups.ElasticConfig(partitions=2, members=("x",)).to_json()
    await bucket_of(ground.connection, "elastic").put(f"{other.stream}.c", record, revision=0)
    await groups.delete(other.connection, other.stream, "c")
    assert f"{ground.stream}-b-c" in await streams.names(ground.connection)


async def test_deleting_while_somebody_changes_the_group(ground: Ground) -> None:
    """Compare-and-set with a retry: the deletion wins in the end, and nobody sees a conflict."""
    await ground.elastic()

    async def change(number: int) -> None:
        try:
            await groups.add_members(ground.connection, ground.stream, "g", [f"m{number}"])
        except NoSuchGroup:
            return

    await asyncio.gather(
        *[change(number) for number in range(10)], groups.delete(ground.connection, ground.stream, "g")
    )
    assert await groups.list_groups(ground.connection, ground.stream) == []


async def test_a_broken_record_is_named_and_stays(ground: Ground) -> None:
    await ground.elastic()
    bucket = bucket_of(ground.connection, "elastic")
    await bucket.put(f"{ground.stream}.g", b'{"max_members": "four"}', revision=await revision(ground))
    name = f"record '{ground.stream}.g' in bucket 'elastic-consumer-groups'"
    calls = (
        lambda: groups.get_config(ground.connection, ground.stream, "g"),
        lambda: groups.delete(ground.connection, ground.stream, "g"),
        lambda: groups.add_members(ground.connection, ground.stream, "g", ["a"]),
        ground.elastic,
        lambda: ground.join("a"),
    )
    for call in calls:
        with pytest.raises(BrokenGroupRecord) as caught:
            await call()
        assert str(caught.value).startswith(name)
    entry = await bucket.get(f"{ground.stream}.g")
    assert entry is not None
    assert entry.value == b'{"max_members": "four"}'
    assert f"{ground.stream}-g" in await streams.names(ground.connection)


async def test_nothing_but_groups_is_in_the_buckets(ground: Ground) -> None:
    """Members in other languages take every key for a group."""
    await ground.elastic(members=["a", "b"])
    await ground.join("a")
    await groups.drop_members(ground.connection, ground.stream, "g", ["b"])
    sequences = await ground.publish(f"k{number}" for number in range(20))
    await ground.evidence.all_of(sequences)
    assert await bucket_of(ground.connection, "elastic").keys(ground.stream) == [f"{ground.stream}.g"]
    assert await bucket_of(ground.connection, "static").keys(ground.stream) == []

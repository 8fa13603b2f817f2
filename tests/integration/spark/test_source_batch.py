"""Batch reads: every stream, group and option gives exactly the rows it should."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from keylane import groups
from keylane.core.partitions import Partitioning
from keylane.server import NatsServer
from tests.integration.spark.source_rig import Ground, ground, numbers
from tests.waiter import wait_until

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(500)]

Unique = Callable[..., str]


@pytest.fixture
def here(nats_server: NatsServer, spark: SparkSession) -> Iterator[Ground]:
    with ground(nats_server.url, spark) as made:
        yield made


def by_partition(rows: list[Row]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        found[row["partition"]].append(row["sequence"])
    return dict(found)


def test_a_plain_stream(here: Ground, unique: Unique) -> None:
    name = here.make(unique("S"))
    here.publish(name, range(50))
    frame = here.read(name)
    assert frame.columns == [
        "subject",
        "partition",
        "key",
        "data",
        "sequence",
        "timestamp",
        "source_stream",
        "source_sequence",
    ]
    rows = frame.collect()
    assert numbers(rows) == list(range(50))
    assert [row["sequence"] for row in rows] == list(range(1, 51))
    first = rows[0]
    assert (first["subject"], first["partition"], first["key"]) == (f"{name}.k0", None, None)
    assert abs(first["timestamp"].astimezone().timestamp() - time.time()) < 60


def test_a_plain_stream_with_keys_computed_here(here: Ground, unique: Unique) -> None:
    name = here.make(unique("S"))
    here.publish(name, range(20))
    rows = here.read(name, keyFilter=f"{name}.*", keyPartitions=5).collect()
    keys = Partitioning(f"{name}.*", (1,), 5)
    assert [(row["key"], row["partition"]) for row in rows] == [
        (f"k{n % 7}", keys.partition(f"{name}.k{n % 7}")) for n in range(20)
    ]


def test_a_partitioned_stream_has_one_split_for_each_partition_in_order(here: Ground, unique: Unique) -> None:
    name = here.make(unique("S"), numbered=True)
    here.publish(name, range(200))
    frame = here.read(name)
    splits = [split for split in frame.rdd.glom().collect() if split]
    keys = Partitioning(f"{name}.*", (1,), 4)
    expected: dict[int, list[int]] = defaultdict(list)
    for number in range(200):
        expected[keys.partition(f"{name}.k{number % 7}")].append(number)
    assert len(splits) == len(expected)
    for split in splits:
        [partition] = {row["partition"] for row in split}
        assert numbers(split) == expected[partition]
        assert {row["subject"].split(".")[0] for row in split} == {name}
    assert sorted(n for split in splits for n in numbers(split)) == list(range(200))


def test_splits_by_sequence_and_more_of_them(here: Ground, unique: Unique) -> None:
    name = here.make(unique("S"), numbered=True)
    here.publish(name, range(100))
    by_sequence = here.read(name, splitBy="sequence", minPartitions=5).rdd.glom().collect()
    assert [len(split) for split in by_sequence] == [20] * 5
    assert [n for split in by_sequence for n in numbers(split)] == list(range(100))
    cut = here.read(name, minPartitions=9).rdd.glom().collect()
    assert len(cut) >= 9
    assert sorted(n for split in cut for n in numbers(split)) == list(range(100))
    assert all([row["sequence"] for row in split] == sorted(row["sequence"] for row in split) for split in cut)


def test_filters_and_partitions(here: Ground, unique: Unique) -> None:
    name = here.make(unique("S"), numbered=True)
    here.publish(name, range(70))
    rows = here.read(name, filter=f"{name}.k1,{name}.k3").collect()
    assert sorted(numbers(rows)) == [n for n in range(70) if n % 7 in (1, 3)]
    everything = by_partition(here.read(name).collect())
    chosen = sorted(everything)[:2]
    assert by_partition(here.read(name, partitions=",".join(map(str, chosen))).collect()) == {
        one: everything[one] for one in chosen
    }


def test_messages_without_a_number_are_read_too(here: Ground, unique: Unique) -> None:
    """Stored before the stream had its transform: no partition filter matches them."""
    name = here.make(unique("S"))
    here.publish(name, range(10))
    keys = Partitioning(f"{name}.*", (1,), 4)
    config = here.api(f"STREAM.INFO.{name}")["config"]
    config["subject_transform"] = {"src": keys.filter, "dest": keys.destination}
    here.api(f"STREAM.UPDATE.{name}", config)
    here.publish(name, range(10, 30))
    for options in ({}, {"splitBy": "sequence"}):
        rows = sorted(here.read(name, **options).collect(), key=lambda row: row["sequence"])
        assert numbers(rows) == list(range(30))
        assert [row["partition"] is None for row in rows] == [n < 10 for n in range(30)]
        assert {row["subject"] for row in rows} == {f"{name}.k{n}" for n in range(7)}


def test_a_static_group_and_its_members(here: Ground, unique: Unique) -> None:
    name = here.make(unique("S"), numbered=True)
    here.publish(name, range(100))
    here.call(lambda c: groups.create_static(c, name, "g", partitions=4, members=["a", "b"]))
    try:
        everything = by_partition(here.read(name).collect())
        assert by_partition(here.read(name, group="g").collect()) == everything
        of_a, of_b = (by_partition(here.read(name, group="g", member=one).collect()) for one in "ab")
        assert not of_a.keys() & of_b.keys()
        assert of_a | of_b == everything
    finally:
        here.call(lambda c: groups.delete(c, name, "g"))


def test_the_queue_of_an_elastic_group_and_its_stream_have_the_same_keys(here: Ground, unique: Unique) -> None:
    name = here.make(unique("S"))
    here.publish(name, range(100))
    keys = Partitioning(f"{name}.*", (1,), 3)
    here.call(lambda c: groups.create_elastic(c, name, "g", partitions=3, partition_by=keys.by, members=["a", "b"]))
    queue = f"{name}-g"
    try:
        wait_until(lambda: here.api(f"STREAM.INFO.{queue}")["state"]["messages"], lambda filled: filled == 100)
        rows = here.read(name, group="g", queue="true").collect()
        assert sorted(numbers(rows)) == list(range(100))
        for row in rows:
            number = int(bytes(row["data"]))
            assert (row["subject"], row["key"]) == (f"{name}.k{number % 7}", f"k{number % 7}")
            assert row["partition"] == keys.partition(row["subject"])
            assert (row["source_stream"], row["source_sequence"]) == (name, number + 1)
        assert all(found == sorted(found) for found in by_partition(rows).values())
        of_a = by_partition(here.read(name, group="g", queue="true", member="a").collect())
        assert of_a
        assert of_a == {one: found for one, found in by_partition(rows).items() if one in of_a}
        assert 0 < len(of_a) < 3
        assert here.api(f"STREAM.INFO.{queue}")["state"]["messages"] == 100
        assert here.api(f"STREAM.INFO.{queue}")["state"]["consumer_count"] == 0
        of_stream = here.read(name, group="g").collect()
        assert numbers(of_stream) == list(range(100))
        assert {row["subject"]: (row["key"], row["partition"]) for row in of_stream} == {
            row["subject"]: (row["key"], row["partition"]) for row in rows
        }
        assert {row["source_stream"] for row in of_stream} == {None}
    finally:
        here.call(lambda c: groups.delete(c, name, "g"))


def test_offsets_are_inclusive(here: Ground, unique: Unique) -> None:
    name = here.make(unique("S"))
    here.publish(name, range(1, 31))
    assert numbers(here.read(name, startingOffsets=11, endingOffsets=20).collect()) == list(range(11, 21))
    assert numbers(here.read(name, startingOffsets=30).collect()) == [30]
    assert numbers(here.read(name, startingOffsets=31).collect()) == []
    assert numbers(here.read(name, endingOffsets=1).collect()) == [1]


def test_times_are_from_inclusive_to_exclusive(here: Ground, unique: Unique) -> None:
    name = here.make(unique("S"))
    here.publish(name, range(30))
    times = [row["timestamp"].astimezone(UTC) for row in here.read(name).collect()]
    middle = times[14]
    expected = [n for n in range(30) if times[n] >= middle]
    # Rows know microseconds, the server nanoseconds: the time of a row is never after the message.
    assert numbers(here.read(name, startingTimestamp=middle.isoformat()).collect()) == expected
    before = numbers(here.read(name, endingTimestamp=middle.isoformat()).collect())
    assert before == [n for n in range(30) if n not in expected]
    assert numbers(here.read(name, startingTimestamp="0").collect()) == list(range(30))
    assert numbers(here.read(name, endingTimestamp="0").collect()) == []
    assert numbers(here.read(name, endingTimestamp="2100-01-01T00:00:00Z").collect()) == list(range(30))
    later = datetime.now(UTC).isoformat()
    assert numbers(here.read(name, startingTimestamp=later).collect()) == []


def test_headers_and_an_empty_stream(here: Ground, unique: Unique) -> None:
    name = here.make(unique("S"))
    assert here.read(name).collect() == []
    here.call(lambda c: c.jetstream.publish(f"{name}.a", b"x", headers={"Trace": "17", "Two": "b"}))
    here.publish(name, [5])
    rows = here.read(name, includeHeaders="true").collect()
    assert rows[0]["headers"] == {"Trace": "17", "Two": "b"}
    assert not rows[1]["headers"]


def test_messages_deleted_in_between_are_no_loss(here: Ground, unique: Unique) -> None:
    name = here.make(unique("S"), numbered=True)
    here.publish(name, range(1, 41))
    for sequence in (7, 8, 39, 40):
        here.api(f"STREAM.MSG.DELETE.{name}", {"seq": sequence})
    assert sorted(numbers(here.read(name).collect())) == [n for n in range(1, 41) if n not in (7, 8, 39, 40)]
    assert sorted(numbers(here.read(name, splitBy="sequence").collect())) == [
        n for n in range(1, 41) if n not in (7, 8, 39, 40)
    ]


def test_a_work_queue_without_direct_get_is_refused(here: Ground, unique: Unique) -> None:
    from pyspark.errors import PySparkException  # noqa: PLC0415 - optional

    name = here.make(unique("S"), retention="workqueue", allow_direct=False)
    with pytest.raises(PySparkException, match="retention 'workqueue' and no allow_direct"):
        here.read(name).collect()


def test_a_source_that_spark_knows_is_not_registered_again(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark would log a warning, and pipelines register it in every step."""
    from keylane.spark import register  # noqa: PLC0415 - optional

    register(spark)
    registered: list[object] = []
    monkeypatch.setattr(type(spark.dataSource), "register", lambda _, source: registered.append(source))
    register(spark)
    assert registered == []

"""Splits read without Spark: every message of the range, once, in order, whatever it looks like."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from keylane.core.partitions import Partitioning
from keylane.jetstream import Outgoing
from keylane.server import NatsServer
from keylane.spark.executor.split_reader import read_split
from keylane.spark.tasks import ReadMethod, arrow_schema
from tests.integration.spark.splits import WAYS, Ground, ground_at, rows_of, sequences_of

pytestmark = pytest.mark.spark
both_ways = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def ground(nats_server: NatsServer, unique: Callable[..., str]) -> Iterator[Ground]:
    with ground_at(nats_server.url, unique("S")) as made:
        yield made


def fill(ground: Ground, count: int) -> list[bytes]:
    ground.create(f"{ground.stream}.>")
    payloads = [b"payload %d" % number for number in range(count)]
    ground.publish([Outgoing(f"{ground.stream}.{number % 7}", data) for number, data in enumerate(payloads)])
    return payloads


@both_ways
def test_a_whole_stream_is_read_as_it_is_stored(ground: Ground, way: ReadMethod) -> None:
    payloads = fill(ground, 3000)
    batches = list(read_split(ground.split(way)))
    assert all(batch.schema.equals(arrow_schema(with_headers=False)) for batch in batches)
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert [row["sequence"] for row in rows] == list(range(1, 3001))
    assert [row["data"] for row in rows] == payloads
    for sequence in (1, 2, 1500, 2999, 3000):
        subject, data, time = ground.stored(sequence)
        row = rows[sequence - 1]
        assert (row["subject"], row["data"], row["timestamp"]) == (subject, data, time)
        assert (row["partition"], row["key"], row["source_stream"], row["source_sequence"]) == (None,) * 4


@both_ways
def test_partitions_of_a_numbered_stream_are_read_apart(ground: Ground, way: ReadMethod) -> None:
    orders = f"{ground.stream}.orders"
    partitioning = Partitioning(f"{orders}.*.*", (2,), 4)
    ground.create(f"{ground.stream}.>", subject_transform={"src": f"{orders}.*.*", "dest": partitioning.destination})
    ground.publish([Outgoing(f"{orders}.eu.{number % 50}", b"%d" % number) for number in range(2000)])
    seen: list[int] = []
    for partition in range(4):
        split = ground.split(
            way, subject_filter=f"{partition}.>", numbered=True, partitioning=(partitioning,), upto=2000
        )
        rows = rows_of(split)
        assert [row["sequence"] for row in rows] == sorted({row["sequence"] for row in rows})
        for row in rows:
            number = row["sequence"] - 1
            assert row["subject"] == f"{orders}.eu.{number % 50}"
            assert row["key"] == str(number % 50)
            assert row["partition"] == partition == partitioning.partition(row["subject"])
            assert row["data"] == b"%d" % number
        seen += [row["sequence"] for row in rows]
    assert sorted(seen) == list(range(1, 2001))


@both_ways
def test_ranges_that_touch_give_every_message_once(ground: Ground, way: ReadMethod) -> None:
    fill(ground, 1000)
    subject_filter = f"{ground.stream}.3"
    expected = [sequence for sequence in range(1, 1001) if (sequence - 1) % 7 == 3]
    assert sequences_of(ground.split(way, subject_filter=subject_filter)) == expected
    ends = [0, 1, 3, 4, 10, 11, 500, 990, 998, 999, 1000]
    for chosen, whole in ((subject_filter, expected), (None, list(range(1, 1001)))):
        parts = [sequences_of(ground.split(way, after, upto, chosen)) for after, upto in pairwise(ends)]
        assert [sequence for part in parts for sequence in part] == whole


@both_ways
def test_ranges_without_messages(ground: Ground, way: ReadMethod) -> None:
    fill(ground, 100)
    assert sequences_of(ground.split(way, 100, 100)) == []
    assert sequences_of(ground.split(way, 50, 40)) == []
    assert sequences_of(ground.split(way, subject_filter=f"{ground.stream}.nobody")) == []
    # between two messages of this subject
    assert sequences_of(ground.split(way, 15, 21, f"{ground.stream}.0")) == []
    ground.delete(*range(40, 61))
    assert sequences_of(ground.split(way, 39, 60)) == []


@both_ways
def test_deleted_messages_are_not_missing(ground: Ground, way: ReadMethod) -> None:
    fill(ground, 200)
    whole, ending, filtered = ground.split(way), ground.split(way, 100, 150), ground.split(way, 0, 200, ">")
    deleted = {1, 2, 50, 101, 149, 150, 151, 199, 200}
    ground.delete(*deleted)
    left = [sequence for sequence in range(1, 201) if sequence not in deleted]
    assert sequences_of(whole) == left
    assert sequences_of(filtered) == left
    assert sequences_of(ending) == [sequence for sequence in left if 100 < sequence <= 150]


@both_ways
def test_what_was_purged_after_the_plan_is_not_missing(ground: Ground, way: ReadMethod) -> None:
    fill(ground, 100)
    split = ground.split(way, 10, 90)
    ground.api(f"STREAM.PURGE.{ground.stream}", {"seq": 60})
    assert sequences_of(split) == list(range(60, 91))
    ground.api(f"STREAM.PURGE.{ground.stream}")
    assert sequences_of(split) == []


@both_ways
def test_payloads_of_every_shape(ground: Ground, way: ReadMethod) -> None:
    """Line ends and whole protocol lines inside payloads, empty ones, and sizes that change with every message."""
    ground.create(f"{ground.stream}.>")
    dice = random.Random(7)  # noqa: S311 - only variety is wanted
    special = [
        b"", b"\r\n", b"\r\n\r\n", b"\r", b"\n", b"MSG a 1 3\r\nabc\r\n", b"PING\r\n", b"x\r\n",
        b"\r\nMSG b 1 $JS.ACK.", b" 1 $JS.ACK. 2 $JS.ACK. 3 $JS.ACK.", b"NATS/1.0\r\n\r\n", b"\r\nNATS/1.0\r\n",
        bytes(range(256)),
    ]  # fmt: skip
    payloads = [
        dice.choice(special) if dice.random() < 0.05 else dice.randbytes(dice.randrange(300)) for _ in range(5000)
    ] + [special[number % len(special)] for number in range(200)]
    ground.publish([Outgoing(f"{ground.stream}.{number % 3}", data) for number, data in enumerate(payloads)])
    rows = rows_of(ground.split(way))
    assert [row["sequence"] for row in rows] == list(range(1, len(payloads) + 1))
    assert [row["data"] for row in rows] == payloads


@both_ways
def test_batches_are_bounded_by_rows_and_by_bytes(ground: Ground, way: ReadMethod) -> None:
    ground.create(f"{ground.stream}.>")
    small, large = 30_000, 60
    ground.publish([Outgoing(f"{ground.stream}.a", b"x")] * small)
    ground.publish([Outgoing(f"{ground.stream}.b", bytes(900_000))] * large)
    batches = list(read_split(ground.split(way)))
    assert sum(batch.num_rows for batch in batches) == small + large
    assert max(batch.num_rows for batch in batches) <= 20_000
    assert max(batch.nbytes for batch in batches) <= 12_000_000
    assert len(batches) <= 40


@both_ways
def test_messages_larger_than_a_pull_allows(unique: Callable[..., str], way: ReadMethod) -> None:
    with (
        NatsServer.start(extra_config="max_payload: 33554432\nmax_pending: 134217728") as server,
        ground_at(server.url, unique("S")) as ground,
    ):
        ground.create(f"{ground.stream}.>")
        sizes = [10, 20_000_000, 10, 30_000_000, 9_000_000, 10]
        for number, size in enumerate(sizes):
            ground.publish([Outgoing(f"{ground.stream}.{number}", bytes([number]) * size)])
        rows = rows_of(ground.split(way))
        assert [len(row["data"]) for row in rows] == sizes
        assert [row["data"][:1] for row in rows] == [bytes([number]) for number in range(6)]

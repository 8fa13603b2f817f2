"""The columns of a split: keys, partitions, headers and sources, also where bytes are no proper text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pytest

from keylane.core.partitions import Partitioning
from keylane.jetstream import Outgoing
from keylane.server import NatsServer
from keylane.spark.executor.message_columns import source_columns
from keylane.spark.executor.split_reader import read_split
from keylane.spark.tasks import ReadMethod, arrow_schema
from tests.integration.spark.splits import WAYS, Ground, ground_at, rows_of

pytestmark = pytest.mark.spark
both_ways = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def ground(nats_server: NatsServer, unique: Callable[..., str]) -> Iterator[Ground]:
    with ground_at(nats_server.url, unique("S")) as made:
        yield made


@both_ways
def test_subjects_that_no_partitioning_knows_have_no_key(ground: Ground, way: ReadMethod) -> None:
    root = ground.stream
    ground.create(*(f"{token}.{root}.>" for token in ("3", "03", "odd", "7", "0", "5")))
    stored = ["3.{}.eu.42", "03.{}.eu.42", "odd.{}.eu.42", "7.{}.short", "0.{}.eu.a.b", "5.{}.é.ü"]
    ground.publish([Outgoing(subject.format(root)) for subject in stored])
    rows = rows_of(ground.split(way, numbered=True, partitioning=(Partitioning(f"{root}.*.*", (2, 1), 10),)))
    assert [(row["subject"], row["partition"], row["key"]) for row in rows] == [
        (f"{root}.eu.42", 3, "42.eu"),
        (f"03.{root}.eu.42", None, None),
        (f"odd.{root}.eu.42", None, None),
        (f"{root}.short", 7, None),
        (f"{root}.eu.a.b", 0, None),
        (f"{root}.é.ü", 5, "ü.é"),
    ]
    assert [row["data"] for row in rows] == [b""] * 6


@both_ways
def test_plain_streams_get_their_partition_from_the_hash(ground: Ground, way: ReadMethod) -> None:
    root = ground.stream
    ground.create(f"{root}.>")
    ground.publish([Outgoing(f"{root}.{subject}") for subject in ("a.customer-42", "b.x.alice", "b.y.alice", "c")])
    kinds = (Partitioning(f"{root}.a.*", (1,), 10), Partitioning(f"{root}.b.*.*", (2,), 10))
    rows = rows_of(ground.split(way, partitioning=kinds))
    assert [(row["subject"], row["partition"], row["key"]) for row in rows] == [
        (f"{root}.a.customer-42", 6, "customer-42"),
        (f"{root}.b.x.alice", 9, "alice"),
        (f"{root}.b.y.alice", 9, "alice"),
        (f"{root}.c", None, None),
    ]


@both_ways
def test_more_subjects_than_are_kept(ground: Ground, way: ReadMethod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keylane.spark.executor.message_columns._MOST_KEPT", 10)
    ground.create(f"{ground.stream}.>")
    ground.publish([Outgoing(f"{ground.stream}.{number % 40}", bytes(500)) for number in range(25_000)])
    partitioning = Partitioning(f"{ground.stream}.*", (1,), 5)
    rows = rows_of(ground.split(way, partitioning=(partitioning,)))
    assert [row["key"] for row in rows] == [str(number % 40) for number in range(25_000)]


@both_ways
def test_headers_as_they_were_published(ground: Ground, way: ReadMethod) -> None:
    ground.create(f"{ground.stream}.>")
    ground.publish(
        [
            Outgoing(f"{ground.stream}.1", b"one", {"Trace": "a: b", "Nats-Msg-Id": "1"}),
            Outgoing(f"{ground.stream}.2", b"two"),
            # the names of what the server itself adds to a direct get
            Outgoing(
                f"{ground.stream}.3", b"\r\n", {"Nats-Sequence": "99", "Nats-Subject": "fake", "Nats-Stream": "no"}
            ),
            Outgoing(f"{ground.stream}.4", b"four", {"Empty": "", "Name": "Grüße"}),
        ]
    )
    batches = list(read_split(ground.split(way, with_headers=True)))
    assert all(batch.schema.equals(arrow_schema(with_headers=True)) for batch in batches)
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert [dict(row["headers"]) for row in rows] == [
        {"Trace": "a: b", "Nats-Msg-Id": "1"},
        {},
        {"Nats-Sequence": "99", "Nats-Subject": "fake", "Nats-Stream": "no"},
        {"Empty": "", "Name": "Grüße"},
    ]
    assert [row["data"] for row in rows] == [b"one", b"two", b"\r\n", b"four"]
    assert [row["sequence"] for row in rows] == [1, 2, 3, 4]
    assert [row["subject"] for row in rows] == [f"{ground.stream}.{number}" for number in (1, 2, 3, 4)]


@both_ways
def test_many_messages_with_headers_of_different_lengths(ground: Ground, way: ReadMethod) -> None:
    ground.create(f"{ground.stream}.>")
    headers = [{f"H{one}": "v" * one for one in range(number % 4)} for number in range(3000)]
    ground.publish([Outgoing(f"{ground.stream}.x", b"%d" % number, one) for number, one in enumerate(headers)])
    rows = rows_of(ground.split(way, with_headers=True))
    assert [dict(row["headers"]) for row in rows] == headers
    assert [row["data"] for row in rows] == [b"%d" % number for number in range(3000)]


@both_ways
def test_without_payloads_everything_else_is_the_same(ground: Ground, way: ReadMethod) -> None:
    ground.create(f"{ground.stream}.>")
    ground.publish(
        [
            Outgoing(f"{ground.stream}.{number % 3}", b"x" * (number % 2000), {"Trace": "a"} if number % 5 == 0 else {})
            for number in range(3000)
        ]
    )
    whole, without = (rows_of(ground.split(way, with_headers=True, with_data=one)) for one in (True, False))
    assert [row["data"] for row in without] == [None] * 3000
    assert [row["data"] for row in whole] == [b"x" * (number % 2000) for number in range(3000)]
    for row, other in zip(without, whole, strict=True):
        headers = dict(row["headers"])
        assert headers.pop("Nats-Msg-Size", None) == (str(len(other["data"])) if way == "consumer" else None)
        assert headers == dict(other["headers"])
        assert row | {"data": other["data"], "headers": other["headers"]} == other


@both_ways
def test_bytes_that_are_no_text(ground: Ground, way: ReadMethod) -> None:
    ground.create(f"{ground.stream}.>")
    subject = ground.stream.encode() + b".caf\xe9"
    block = b"NATS/1.0\r\nBad: \xff\xfe\r\nTwice: first\r\nTwice: second\r\nno colon\r\n\r\n"
    ground.publish_raw(
        b"PUB %b 2\r\nhi\r\n" % subject,
        b"HPUB %b %d %d\r\n%bhi\r\n" % (subject, len(block), len(block) + 2, block),
    )
    kinds = (Partitioning(f"{ground.stream}.*", (1,), 5),)
    rows = rows_of(ground.split(way, with_headers=True, partitioning=kinds))
    assert [row["subject"] for row in rows] == [f"{ground.stream}.caf\\xe9"] * 2
    assert [row["key"] for row in rows] == ["caf\\xe9"] * 2
    assert [row["partition"] for row in rows] == [kinds[0].partition(subject.decode("utf-8", "surrogateescape"))] * 2
    assert dict(rows[1]["headers"]) == {"Bad": "\\xff\\xfe", "Twice": "first"}


def test_an_elastic_queue_names_where_its_messages_come_from(ground: Ground) -> None:
    root = ground.stream
    ground.create(f"{root}.>", stream=f"{root}-from")
    partitioning = Partitioning(f"{root}.*", (1,), 3)
    transform = {"src": f"{root}.*", "dest": partitioning.destination}
    ground.create(
        retention="workqueue",
        sources=[{"name": f"{root}-from", "subject_transforms": [transform]}],
    )
    try:
        ground.publish([Outgoing(f"{root}.other.x")] * 5)
        ground.publish([Outgoing(f"{root}.{number % 9}", b"%d" % number) for number in range(300)])
        ground.wait_for(300)
        rows = rows_of(ground.split("direct", numbered=True, partitioning=(partitioning,)))
        assert [row["sequence"] for row in rows] == list(range(1, 301))
        assert {row["source_stream"] for row in rows} == {f"{root}-from"}
        assert [row["source_sequence"] for row in rows] == list(range(6, 306))
        assert [row["subject"] for row in rows] == [f"{root}.{number % 9}" for number in range(300)]
        assert [row["key"] for row in rows] == [str(number % 9) for number in range(300)]
        assert all(row["partition"] == partitioning.partition(row["subject"]) for row in rows)
    finally:
        ground.api(f"STREAM.DELETE.{root}-from")


@both_ways
def test_sourced_messages_among_others(ground: Ground, way: ReadMethod) -> None:
    root = ground.stream
    ground.create(f"{root}.far.>", stream=f"{root}-from")
    ground.create(f"{root}.near.>", sources=[{"name": f"{root}-from"}])
    try:
        for number in range(50):
            ground.publish(
                [Outgoing(f"{root}.near.{number}"), Outgoing(f"{root}.far.{number}", b"", {"Some": "thing"})]
            )
        ground.wait_for(100)
        rows = rows_of(ground.split(way))
        assert len(rows) == 100
        for row in rows:
            kind, number = row["subject"].split(".")[1:]
            source = (row["source_stream"], row["source_sequence"])
            assert source == ((f"{root}-from", int(number) + 1) if kind == "far" else (None, None))
    finally:
        ground.api(f"STREAM.DELETE.{root}-from")


def test_source_headers_that_the_server_would_not_write() -> None:
    """Older servers let clients write this header."""
    values = ["ORDERS 8 > > x hash", "nonsense", "", "A B", "Größe 12 >", "ORDERS 99999999999999999999 >", "X 5"]
    blocks = [f"NATS/1.0\r\nNats-Stream-Source: {one}\r\nOther: a b c\r\n\r\n".encode() for one in values]
    streams, sequences = source_columns(pa.array([b"", *blocks], pa.binary()), len(blocks) + 1)
    assert list(zip(streams.to_pylist(), sequences.to_pylist(), strict=True)) == [
        (None, None),
        ("ORDERS", 8),
        (None, None),
        (None, None),
        (None, None),
        ("Größe", 12),
        (None, None),
        ("X", 5),
    ]

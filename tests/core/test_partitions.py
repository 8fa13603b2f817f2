"""Partition numbers, keys and transform text, from tables of known answers."""

from __future__ import annotations

import pytest

from keylane.core.partitions import (
    MAX_PARTITIONS,
    Partitioning,
    insert_partition,
    key_hash,
    parse_transform,
    partition_filters,
    partition_number,
    partition_of,
    strip_partition,
)
from keylane.errors import InvalidInput


@pytest.mark.parametrize(
    ("hashed", "expected"),
    [(b"", 0x811C9DC5), (b"a", 0xE40C292C), (b"foobar", 0xBF9CF968)],
)
def test_hash_is_fnv_1a(hashed: bytes, expected: int) -> None:
    assert key_hash(hashed) == expected


@pytest.mark.parametrize(
    ("hashed", "partitions", "expected"),
    [
        ("0", 10, 3),
        ("alice", 10, 9),
        ("customer-42", 10, 6),
        ("é", 10, 7),
        ("foobar", 7, 0),
        ("barfoo", 7, 6),
        ("c.x.y.z", 5, 0),
        ("foo", MAX_PARTITIONS, 703823576),
        ("anything", 1, 0),
    ],
)
def test_numbers_seen_on_a_server(hashed: str, partitions: int, expected: int) -> None:
    assert partition_number(hashed, partitions) == expected


def test_bytes_that_are_not_utf8_are_hashed_as_they_are() -> None:
    raw = b"p.\xff\xc3"
    assert partition_number(raw.decode("utf-8", "surrogateescape"), 1_000_003) == key_hash(raw) % 1_000_003


def test_the_order_of_wildcards_matters() -> None:
    assert partition_of("x.foo.bar", "x.*.*", [1, 2], 7) == 0
    assert partition_of("x.foo.bar", "x.*.*", [2, 1], 7) == 6


def test_without_wildcards_the_whole_subject_is_hashed() -> None:
    for subject_filter in (">", "c.>", "c.*.*.*", "c.x.y.z"):
        assert partition_of("c.x.y.z", subject_filter, [], 5) == 0


def test_tokens_behind_the_open_end_do_not_count() -> None:
    spread = Partitioning("orders.*.>", (1,), 10)
    assert spread.partition("orders.alice.new") == spread.partition("orders.alice.paid.twice") == 9


def test_keys_differ_where_the_hash_does_not() -> None:
    spread = Partitioning("x.*.*", (1, 2), 1000)
    assert spread.partition("x.a.bc") == spread.partition("x.ab.c")
    assert spread.key("x.a.bc") == "a.bc"
    assert spread.key("x.ab.c") == "ab.c"


def test_the_key_is_the_chosen_tokens_in_the_chosen_order() -> None:
    assert Partitioning("o.*.eu.*.>", (2, 1), 5).key("o.1.eu.2.3.4") == "2.1"
    assert Partitioning("o.>", (), 5).key("o.1.2") == "o.1.2"


@pytest.mark.parametrize("subject", ["orders", "orders.a.b", "refunds.a", "refunds.a.b.c"])
def test_a_subject_outside_the_filter_has_no_partition(subject: str) -> None:
    spread = Partitioning("orders.*.*.*", (1,), 10)
    for ask in (spread.key, spread.partition):
        with pytest.raises(InvalidInput, match=r"does not match filter 'orders\.\*\.\*\.\*'"):
            ask(subject)


def test_a_filter_with_an_open_end_needs_one_token_there() -> None:
    with pytest.raises(InvalidInput, match="does not match"):
        Partitioning("orders.>", (), 10).partition("orders")


def test_partitionings_are_values() -> None:
    listed = Partitioning("a.*", [1], 3)  # type: ignore[arg-type]
    assert listed == Partitioning("a.*", (1,), 3)
    assert len({listed, Partitioning("a.*", (1,), 3), Partitioning("a.*", (1,), 4)}) == 2
    assert repr(listed) == "Partitioning(filter='a.*', wildcards=(1,), partitions=3)"


@pytest.mark.parametrize(
    ("subject_filter", "wildcards", "partitions", "said"),
    [
        ("a.*", (1,), 0, "number of partitions 0 is out of range: give 1 to 2147483647"),
        ("a.*", (1,), -3, "number of partitions -3 is out of range"),
        ("a.*", (1,), MAX_PARTITIONS + 1, "number of partitions 2147483648 is out of range"),
        ("a.*", (1,), True, "number of partitions True is not a whole number"),
        ("a.*", (1,), 2.0, "number of partitions 2.0 is not a whole number"),
        ("a.*", (0,), 3, "partitioning wildcard 0 is out of range: filter 'a.*' has wildcards 1 to 1"),
        ("a.*", (2,), 3, "partitioning wildcard 2 is out of range: filter 'a.*' has wildcards 1 to 1"),
        ("a.*.*", (1, 1), 3, "partitioning wildcard 1 is listed twice in [1, 1]"),
        ("a.*", ("1",), 3, "partitioning wildcard '1' is not a whole number"),
        ("a.>", (1,), 3, "filter 'a.>' has no '*'; leave the list empty"),
        ("a..*", (1,), 3, "filter 'a..*' has an empty token"),
        ("", (), 3, "filter '' is empty"),
        ("a.$1.*", (1,), 3, "has the token '$1': in a transform the server would take it for an instruction"),
        ("a.{{x}}.*", (1,), 3, "has the token '{{x}}'"),
    ],
)
def test_bad_partitionings_are_refused(
    subject_filter: str, wildcards: tuple[int, ...], partitions: int, said: str
) -> None:
    with pytest.raises(InvalidInput) as raised:
        Partitioning(subject_filter, wildcards, partitions)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("subject_filter", "wildcards", "partitions", "destination"),
    [
        ("orders.*.*", (2,), 10, "{{Partition(10,2)}}.orders.{{Wildcard(1)}}.{{Wildcard(2)}}"),
        ("foo.*.*.>", (1, 2), 4, "{{Partition(4,1,2)}}.foo.{{Wildcard(1)}}.{{Wildcard(2)}}.>"),
        ("foo.*.*", (2, 1), 4, "{{Partition(4,2,1)}}.foo.{{Wildcard(1)}}.{{Wildcard(2)}}"),
        (">", (), 7, "{{Partition(7)}}.>"),
        ("a.>", (), 7, "{{Partition(7)}}.a.>"),
        ("a.*", (), 7, "{{Partition(7)}}.a.{{Wildcard(1)}}"),
        ("*", (1,), 7, "{{Partition(7,1)}}.{{Wildcard(1)}}"),
        ("a.b", (), 7, "{{Partition(7)}}.a.b"),
    ],
)
def test_destination_text(subject_filter: str, wildcards: tuple[int, ...], partitions: int, destination: str) -> None:
    spread = Partitioning(subject_filter, wildcards, partitions)
    assert spread.destination == destination
    assert parse_transform(subject_filter, destination) == spread


@pytest.mark.parametrize(
    ("source", "destination", "expected"),
    [
        ("a.*.*", "{{ Partition ( 10 , 2 ) }}.a.$1.$2", Partitioning("a.*.*", (2,), 10)),
        ("a.*.*", "{{\tpartition\t(10,\t2,  1)\t}}.a.$1.$2", Partitioning("a.*.*", (2, 1), 10)),
        ("a.*", "{{Partition(+010,+01)}}.a.{{ wildcard ( 1 ) }}", Partitioning("a.*", (1,), 10)),
        ("", "{{Partition(10)}}.>", Partitioning(">", (), 10)),
        ("a.*.*", "{{Partition(9,2)}}.b.$2.c.$1", Partitioning("b.*.c.*", (1,), 9)),
        ("a.*.*", "{{Partition(9,1)}}.$1", Partitioning("*", (1,), 9)),
        ("a.*.*", "{{Partition(9,2)}}.$1.$2.$2", Partitioning("*.*.*", (2,), 9)),
        ("a.*.>", "{{Partition(9,1)}}.z.$1.>", Partitioning("z.*.>", (1,), 9)),
        ("a.b", "{{Partition(9,1)}}.a.b", Partitioning("a.b", (), 9)),
        ("a.*", "{{Partition(9,1)}}.$x.$1", Partitioning("$x.*", (1,), 9)),
    ],
)
def test_parsing_speaks_of_stored_subjects(source: str, destination: str, expected: Partitioning) -> None:
    assert parse_transform(source, destination) == expected


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        ("a.*", "b.{{Wildcard(1)}}"),
        (">", "x.>"),
        ("a.*", "x{{Partition(3,1)}}.a.$1"),
        ("a.*", "{{Partition(3,1)}}x.a.$1"),
        ("a.*", "{{Random(3)}}.a.$1"),
    ],
)
def test_a_transform_without_a_partition_number(source: str, destination: str) -> None:
    assert parse_transform(source, destination) is None


@pytest.mark.parametrize(
    ("source", "destination", "said"),
    [
        ("a.*", "a.{{Wildcard(1)}}.{{Partition(3,1)}}", "the partition number is not the first token"),
        ("a.*", "{{Partition(3,1)}}", "nothing of the subject is left; append .a.{{Wildcard(1)}}"),
        ("a.*", "{{Partition(3)}}.b.{{Wildcard(1)}}", "the whole subject is hashed and then changed"),
        ("a.*.*", "{{Partition(3)}}.a.$2.$1", "the whole subject is hashed and then changed"),
        ("a.*.*", "{{Partition(3,2)}}.a.$1", "key wildcard 2 is dropped; append {{Wildcard(2)}}"),
        ("a.*", "{{Partition(3,1)}}.a.{{SplitFromLeft(1,1)}}", "keylane cannot tell what becomes"),
        ("a.*.*", "{{Partition(3,1)}}.{{Partition(4,2)}}.$1", "keylane cannot tell what becomes"),
        ("a.*", "{{Partition(3,1)}}.*", "keylane cannot tell what becomes"),
        ("a.*", "{{Partition(3,x)}}.a.$1", "'x' is not a whole number"),
        ("a.*", "{{Partition()}}.a.$1", "'' is not a whole number"),
        ("a.*.*", "{{Partition(3,1)}}.a.{{Wildcard(1,2)}}", "a wildcard has 2 numbers"),
        ("a.*", "{{Partition(0,1)}}.a.$1", "number of partitions 0 is out of range"),
        ("a.*", "{{Partition(3,0)}}.a.$1", "partitioning wildcard 0 is out of range"),
        ("a.*", "{{Partition(3,1,1)}}.a.$1", "is listed twice"),
        ("a.>", "{{Partition(3,1)}}.a.>", "has no '*'"),
        ("a..b", "{{Partition(3)}}.a..b", "empty token"),
    ],
)
def test_partition_numbers_of_no_use_are_refused(source: str, destination: str, said: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        parse_transform(source, destination)
    assert said in str(raised.value)


def test_strip_and_insert() -> None:
    assert strip_partition("3.orders.eu.42") == (3, "orders.eu.42")
    assert strip_partition("0.x") == (0, "x")
    assert insert_partition(12, "orders.eu") == "12.orders.eu"


@pytest.mark.parametrize(
    "subject",
    ["orders.eu", "3", "3.", "", ".x", "03.x", "00.x", "-1.x", "+1.x", " 1.x", "1_0.x", "٣.x", "3a.x", "².x"],
)
def test_only_a_number_the_server_writes_is_stripped(subject: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        strip_partition(subject)
    assert str(raised.value).startswith(f"subject {subject!r} does not start with a partition number")


def test_partition_filters_go_filter_by_filter_and_ascend_by_number() -> None:
    assert partition_filters([10, 2, 0], ["b.*", "a.>"]) == [
        "0.b.*",
        "2.b.*",
        "10.b.*",
        "0.a.>",
        "2.a.>",
        "10.a.>",
    ]
    assert partition_filters({1}) == partition_filters([1], [">"]) == ["1.>"]
    assert partition_filters([1], ["a.*.x", "a.b.*"]) == ["1.a.*.x", "1.a.b.*"]


@pytest.mark.parametrize(
    ("partitions", "filters", "said"),
    [
        ([], [], "the list of partitions is empty"),
        ([2, 1, 2], [], "partitions [1, 2, 2] name a partition twice"),
        ([-1], [], "partition -1 is not a partition number"),
        ([MAX_PARTITIONS], [], "partition 2147483647 is not a partition number"),
        (["1"], [], "partition '1' is not a partition number"),
        ([False], [], "partition False is not a partition number"),
        ([1], ["a..b"], "filter 'a..b' has an empty token"),
        ([1], ["a.*", "a.b"], "filter 'a.b' is contained in filter 'a.*'"),
        ([1], ["a", "a"], "filter 'a' is contained in filter 'a'"),
    ],
)
def test_bad_partition_filters_are_refused(partitions: list[int], filters: list[str], said: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        partition_filters(partitions, filters)
    assert said in str(raised.value)

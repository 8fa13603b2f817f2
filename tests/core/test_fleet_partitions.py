"""The partitions of a fleet: the four sources, their checks, and the names that follow from them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from keylane.core.fleet_discovery import KEEP_S, SubjectMemory
from keylane.core.fleet_names import (
    MAX_FLEET_NAME,
    check_collisions,
    check_fleet_name,
    check_label,
    partition_consumer,
    subject_id,
)
from keylane.core.fleet_partitions import (
    Partition,
    PartitionSource,
    discovered,
    entries_of,
    from_kv,
    hashed,
    listed,
    overlapping_filters,
    partitions_from_entries,
    source_from_wire,
)
from keylane.core.names import check_consumer_name
from keylane.core.partitions import PartitionBy, Partitioning
from keylane.errors import InvalidInput


def wrong(value: object) -> Any:
    """A value of a type that the signature does not allow."""
    return value


# ---- sources ----------------------------------------------------------------------------------------


def test_hashed_partitions_are_those_of_groups() -> None:
    source = hashed(12, PartitionBy("orders.*.*", key=[2]), weights={3: 2.5}, labels={11: "gpu"})
    found = source.resolve().partitions
    assert [one.id for one in found] == [str(number) for number in range(12)]
    assert found[3] == Partition("3", "3.orders.*.*", 2.5)
    assert found[11] == Partition("11", "11.orders.*.*", 1.0, "gpu")
    assert source.partitioning == Partitioning("orders.*.*", (2,), 12)


def test_listed_partitions_are_in_any_order_the_same_and_duplicates_are_counted() -> None:
    source = listed(["dc.b.done", "dc.a.*", "dc.b.done"], weights={"dc.a.*": 3}, labels={"dc.b.done": "gpu"})
    assert source == listed(["dc.a.*", "dc.b.done"], weights={"dc.a.*": 3}, labels={"dc.b.done": "gpu"})
    found = source.resolve()
    assert found.duplicates == 1
    assert [(one.filter, one.weight, one.label) for one in found.partitions] == [
        ("dc.a.*", 3, None),
        ("dc.b.done", 1.0, "gpu"),
    ]


def test_discovered_subjects() -> None:
    subjects = ["dc.a.1.done", "dc.a.2.done", "dc.b.1.done", "dc.b.1.begun", "other", "dc.*.1.done"]
    each = discovered("dc.*.*.done").resolve(subjects)
    assert sorted(one.filter for one in each.partitions) == ["dc.a.1.done", "dc.a.2.done", "dc.b.1.done"]
    assert each.left_out == ("dc.*.1.done",)
    tools = discovered(PartitionBy("dc.*.*.done", key=[1]))
    assert sorted(one.filter for one in tools.resolve(subjects).partitions) == ["dc.a.*.done", "dc.b.*.done"]
    kept = tools.resolve(["dc.b.3.done"], known=["dc.a.*.done"])
    assert sorted(one.filter for one in kept.partitions) == ["dc.a.*.done", "dc.b.*.done"]
    assert discovered("dc.>").resolve(["dc.a.b", "dc"]).partitions[0].filter == "dc.a.b"
    assert discovered(PartitionBy("a.*.>", key=[1])) == discovered("a.*.>") != discovered("a.>")
    assert discovered(PartitionBy("a.*.*.*", key=[2, 1])) == discovered(PartitionBy("a.*.*.*", key=(1, 2)))
    assert discovered(PartitionBy("a.*.*", key=[])) == discovered("a.*.*"), "all tokens are the subject"


def test_a_list_in_a_kv_value() -> None:
    source = from_kv("plants", "tools")
    value = [
        "dc.a.*",
        {"subject": "dc.b.*", "weight": 2, "label": "gpu"},
        "dc.a.*",
        {"subject": "dc.c", "weight": None},
    ]
    found = source.resolve(json.dumps(value).encode())
    assert found.duplicates == 1
    assert [(one.filter, one.weight, one.label) for one in found.partitions] == [
        ("dc.a.*", 1.0, None),
        ("dc.b.*", 2, "gpu"),
        ("dc.c", 1.0, None),
    ]


@pytest.mark.parametrize(
    "source",
    [
        hashed(32, "orders.*"),
        hashed(32, "orders.>", weights={3: 2.0}, labels={4: "gpu"}),
        listed(["a", "b.*"], weights={"a": 2}, labels={"b.*": "x"}),
        discovered(PartitionBy("dc.*.*", key=[2])),
        from_kv("plants", "tools"),
    ],
)
def test_sources_survive_their_record(source: PartitionSource) -> None:
    assert source_from_wire(json.loads(json.dumps(source.to_wire()))) == source


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hashed(0, "a.*"), "number of partitions 0 is out of range"),
        (lambda: hashed(4, PartitionBy("a.*", key=[2])), "partitioning wildcard 2 is out of range"),
        (lambda: hashed(4, "a..b"), "empty token"),
        (lambda: hashed(4, PartitionBy("a.*", key=wrong("1"))), "key of 'a.\\*' is '1': give a list of numbers"),
        (
            lambda: hashed(4, wrong(("a.*", [1]))),
            "partition_by is .* give a filter, or PartitionBy",
        ),
        (lambda: hashed(4, "a.*", weights={4: 1}), "weights name partition 4: give 0 to 3"),
        (lambda: hashed(4, "a.*", labels={0: "a b"}), "label 'a b': use 1 to 64"),
        (lambda: hashed(4, "a.*", weights={0: float("inf")}), "weight inf of partition 0 is not a weight"),
        (lambda: listed([]), "the list of subjects is empty"),
        (lambda: listed("orders"), "subjects 'orders' is one text"),
        (lambda: listed(["a b"]), "holds ' ' at position 2"),
        (lambda: listed(["a.*", "a.b"]), "filters 'a.\\*' and 'a.b' overlap"),
        (lambda: listed([">", "x"]), "overlap"),
        (lambda: listed(["a"], weights={"b": 1}), "weights name 'b', which is not in the list of subjects"),
        (lambda: listed(["a"], weights={"a": -1}), "weight -1 of 'a' is not a weight"),
        (lambda: discovered(PartitionBy("a.b", key=[1])), "has no '\\*'; leave the list empty"),
        (lambda: from_kv("", "key"), "bucket '' is not a name"),
        (lambda: from_kv("b", "k").resolve(b"{"), "key 'k' of bucket 'b' is not JSON"),
        (lambda: from_kv("b", "k").resolve(b'"a"'), "key 'k' of bucket 'b' holds 'a': write a list of subjects"),
        (lambda: from_kv("b", "k").resolve(b"[]"), "key 'k' of bucket 'b': the list of subjects is empty"),
        (lambda: from_kv("b", "k").resolve(b"[1]"), "entry 1 has no subject"),
        (lambda: from_kv("b", "k").resolve(b'[{"subject":"a","size":1}]'), "has 'size': use subject, weight and label"),
        (lambda: from_kv("b", "k").resolve(b'[{"subject":"a","weight":"1"}]'), "weight '1' of 'a' is not a weight"),
        (
            lambda: from_kv("b", "k").resolve(b'[{"subject":"a","weight":1},{"subject":"a","weight":2}]'),
            "subject 'a' is listed twice, with two weights: list it once",
        ),
        (lambda: source_from_wire({"kind": "magic"}), "is of no kind that this version knows"),
        (lambda: source_from_wire({"kind": "hashed", "partitions": 3}), "is not complete: KeyError\\('filter'\\)"),
    ],
)
def test_what_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


def test_ten_thousand_subjects_are_checked_quickly() -> None:
    subjects = [f"dc.tool{number % 100}.chamber{number}.*" for number in range(10_000)]
    started = time.process_time()
    assert len(listed(subjects).resolve().partitions) == 10_000
    assert time.process_time() - started < 2
    assert overlapping_filters([*subjects, "dc.*.chamber7.end"]) == ("dc.tool7.chamber7.*", "dc.*.chamber7.end")


def test_filters_of_very_many_tokens() -> None:
    long = ".".join("a" * 1600)
    assert overlapping_filters([long, "a.>"]) == (long, "a.>")


# ---- names ------------------------------------------------------------------------------------------


def test_names_of_consumers_are_readable_and_valid() -> None:
    assert partition_consumer("billing", "3") == "billing-p3"
    assert subject_id("dc.etch1.*.completion") == "dc-etch1-completion-8361a88417"
    assert subject_id("*.*").startswith("subject-")
    assert subject_id("ä.ö") != subject_id("ö.ä")
    longest = partition_consumer("f" * MAX_FLEET_NAME, subject_id("x" * 3000))
    assert check_consumer_name(longest) == longest
    assert check_fleet_name("a-b_c=1") == "a-b_c=1"
    assert check_label("gpu") == "gpu"
    for name in ("", "a.b", "a b", "ä", "x" * (MAX_FLEET_NAME + 1), wrong(3)):
        with pytest.raises(InvalidInput, match="fleet name"):
            check_fleet_name(name)


def test_a_fleet_shares_no_name_with_a_group() -> None:
    names = [partition_consumer("billing", str(number)) for number in range(4)]
    check_collisions(
        "ORDERS", "billing", names, static={"audit": ["p3"], "bill": ["ing-p9"]}, elastic=[("OTHER", "billing")]
    )
    for static, elastic, message in (
        ({"billing": ["a"]}, [], "fleet 'billing' has the name of a static group on stream 'ORDERS'"),
        ({}, [("ORDERS", "billing")], "fleet 'billing' has the name of an elastic group"),
        ({}, [("ORD", "ERS"), ("X", "y")], ""),
        ({"bill": ["x"]}, [], ""),
    ):
        if not message:
            check_collisions("ORDERS", "billing", names, static=static, elastic=elastic)
            continue
        with pytest.raises(InvalidInput, match=message):
            check_collisions("ORDERS", "billing", names, static=static, elastic=elastic)
    with pytest.raises(InvalidInput, match="is the queue of the elastic group 'billing' on 'ORDERS'"):
        check_collisions("ORDERS-billing", "x", [], static={}, elastic=[("ORDERS", "billing")])
    with pytest.raises(InvalidInput, match="consumer 'a-b-p3' belongs to member 'b-p3' of the static group 'a'"):
        check_collisions("ORDERS", "a-b", [partition_consumer("a-b", "3")], static={"a": ["b-p3"]}, elastic=[])


def test_a_subject_stays_a_partition_until_many_looks_have_lacked_it() -> None:
    memory = SubjectMemory()
    memory.know(["a"])
    assert memory.look(["b"], 0.0) == {"a", "b"}
    assert memory.look(["b"], KEEP_S - 1) == {"a", "b"}
    assert memory.look(["a"], KEEP_S) == {"a", "b"}, "it was there again"
    memory.look([], KEEP_S + 1)
    memory.look([], KEEP_S + 2)
    assert memory.look([], 2 * KEEP_S) == {"a"}, "b is away for longer than a"
    assert memory.look([], 2 * KEEP_S + 1) == frozenset()


def test_a_long_silence_between_two_looks_is_not_many_looks() -> None:
    memory = SubjectMemory()
    memory.know(["a"])
    memory.look([], 0.0)
    assert memory.look([], 10 * KEEP_S) == {"a"}
    assert memory.look([], 10 * KEEP_S + 1) == frozenset()


def test_entries_are_the_partitions() -> None:
    found = listed(["a.*", "b"], weights={"b": 2}, labels={"a.*": "gpu"}).resolve().partitions
    assert partitions_from_entries(json.loads(json.dumps(entries_of(found)))) == found


def test_discovered_partitions_have_weights_and_labels() -> None:
    source = discovered(PartitionBy("dc.*.*", key=[1]), weights={"dc.a.*": 3}, labels={"dc.a.*": "gpu"})
    assert source_from_wire(source.to_wire()) == source
    one, other = source.resolve(["dc.a.1", "dc.b.1"]).partitions
    assert (one.weight, one.label, other.weight, other.label) == (3, "gpu", 1.0, None)

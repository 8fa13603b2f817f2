"""What exactly is read of a stream, from its configuration, its group and the options."""

from __future__ import annotations

from typing import Any

import pytest

from keylane.core.partitions import Partitioning
from keylane.core.plans import Plan
from keylane.core.subjects import matches
from keylane.errors import InvalidInput, NotAMember
from keylane.groups import ElasticConfig, StaticConfig
from keylane.spark.driver.layout import GroupRecord, Layout, lay_out, numbering
from keylane.spark.options import read_options

ORDERS = Partitioning("orders.*", (1,), 3)


def config(**more: Any) -> dict[str, Any]:
    return {"name": "S", "subjects": ["orders.*"], "retention": "limits", **more}


def numbered(**more: Any) -> dict[str, Any]:
    return config(subject_transform={"src": ORDERS.filter, "dest": ORDERS.destination}, **more)


def laid(
    stream: dict[str, Any], record: GroupRecord | None = None, stored: tuple[str, ...] = (), **options: str
) -> Layout:
    return lay_out(read_options({"stream": "S", **options}), stream, record, numbering(stream), stored)


def test_a_plain_stream_is_read_as_it_is() -> None:
    layout = laid(config())
    assert (layout.numbered, layout.subject_filters, layout.split_by, layout.whole) == (
        False,
        (None,),
        "sequence",
        True,
    )
    assert (layout.way, layout.partitioning) == ("consumer", ())


def test_a_plain_stream_with_filters_and_keys() -> None:
    layout = laid(config(), filter="orders.a,orders.b", keyFilter="orders.*", keyPartitions="5")
    assert (layout.subject_filters, layout.whole) == (("orders.a", "orders.b"), False)
    assert layout.partitioning == (Partitioning("orders.*", (1,), 5),)


def test_a_partitioned_stream_has_a_filter_for_each_partition() -> None:
    layout = laid(numbered())
    assert (layout.numbered, layout.split_by, layout.whole) == (True, "partition", True)
    assert layout.subject_filters == ("0.>", "1.>", "2.>")
    assert layout.partitioning == (ORDERS,)


def test_filters_and_chosen_partitions() -> None:
    assert laid(numbered(), filter="orders.a,x.*", partitions="0,2").subject_filters == (
        "0.orders.a",
        "2.orders.a",
        "0.x.*",
        "2.x.*",
    )
    assert laid(numbered(), splitBy="sequence").subject_filters == (None,)
    assert laid(numbered(), splitBy="sequence", filter="orders.a").subject_filters == ("*.orders.a",)
    assert not laid(numbered(), partitions="0-2").whole


def test_what_an_earlier_configuration_left_behind_is_read_too() -> None:
    layout = laid(numbered(), stored=("0.orders.a", "orders.old", "7.orders.a", "lone"))
    assert layout.subject_filters == ("0.>", "1.>", "2.>", "7.>", "lone", "lone.>", "orders", "orders.>")
    assert laid(numbered(), stored=("orders.old",), partitions="1").subject_filters == ("1.>",)


def test_subjects_outside_of_the_transform_are_read_too() -> None:
    layout = laid(numbered() | {"subjects": ["orders.*", "other.>"]}, filter="*.a")
    assert layout.subject_filters == ("0.*.a", "1.*.a", "2.*.a", "other.a")


def test_every_subject_is_matched_by_exactly_one_filter() -> None:
    stored = ("0.orders.a", "2.orders.b", "5.orders.c", "orders.d", "alone", "07.x", "other.a.b", "3", "99.a")
    layout = laid(numbered(), stored=stored)
    for subject in stored:
        assert sum(matches(one or ">", subject) for one in layout.subject_filters) == 1, subject


def test_subjects_that_no_filter_tells_apart_are_read_by_sequence() -> None:
    mixed = numbered() | {"subjects": ["*.*"]}
    layout = laid(mixed)
    assert (layout.subject_filters, layout.split_by) == ((None,), "sequence")
    with pytest.raises(InvalidInput, match="some subjects of stream 'S' get no partition number"):
        laid(mixed, splitBy="partition")
    assert laid(mixed, partitions="1").subject_filters == ("1.>",)


def test_mirrors_and_sources_that_number_or_copy() -> None:
    transform = {"src": "orders.*", "dest": ORDERS.destination}
    source = {"name": "A", "subject_transforms": [transform]}
    assert numbering({"name": "S", "sources": [source]}).partitioning == (ORDERS,)
    assert numbering({"name": "S", "mirror": source}).partitioning == (ORDERS,)
    assert not numbering({"name": "S", "sources": [source]}).mixed
    assert numbering({"name": "S", "sources": [source, {"name": "B"}]}).mixed
    copied = numbering({"name": "S", "mirror": {"name": "A"}}, numbered())
    assert (copied.partitioning, copied.unnumbered, copied.mixed) == ((ORDERS,), (), False)


@pytest.mark.parametrize(
    "transform",
    [{"src": "orders.*", "dest": "o.{{Wildcard(1)}}"}, {"src": "orders.*", "dest": "o.{{Partition(3,1)}}"}, {}],
)
def test_transforms_without_a_number_in_front(transform: dict[str, str]) -> None:
    assert numbering(config(subject_transform=transform)).partitioning == ()


STATIC = StaticConfig(partitions=3, members=("a", "b"), filters=("orders.*",))
ELASTIC = ElasticConfig(partitions=3, mappings=Plan.from_mappings([("a", (0, 2)), ("b", (1,))]), partitioning=(ORDERS,))
QUEUE = {"name": "S-g", "retention": "workqueue", "allow_direct": True}


def test_groups() -> None:
    assert laid(numbered(), STATIC, group="g").subject_filters == ("0.orders.*", "1.orders.*", "2.orders.*")
    assert laid(numbered(), STATIC, group="g", filter="orders.x", partitions="1").subject_filters == ("1.orders.x",)
    layout = laid(QUEUE, ELASTIC, group="g", queue="true")
    assert (layout.stream, layout.way, layout.subject_filters, layout.whole) == (
        "S-g",
        "direct",
        ("0.>", "1.>", "2.>"),
        True,
    )
    assert layout.partitioning == (ORDERS,)
    assert laid(QUEUE, ELASTIC, group="g", queue="true", member="a").subject_filters == ("0.>", "2.>")
    whole = ElasticConfig(partitions=3)
    assert laid(QUEUE, whole, group="g", queue="true").partitioning == (Partitioning(">", (), 3),)


@pytest.mark.parametrize("stream", [config(), numbered()], ids=["plain", "numbered"])
def test_an_elastic_group_names_the_keys_of_its_stream(stream: dict[str, Any]) -> None:
    layout = laid(stream, ELASTIC, group="g")
    assert (layout.stream, layout.way, layout.numbered, layout.subject_filters) == ("S", "consumer", False, (None,))
    assert (layout.partitioning, layout.split_by, layout.whole) == ((ORDERS,), "sequence", True)
    assert laid(stream, ELASTIC, group="g", filter="orders.a").subject_filters == ("orders.a",)
    assert laid(stream, ElasticConfig(partitions=3), group="g").partitioning == (Partitioning(">", (), 3),)


def test_members_of_a_balanced_group_share_its_partitions() -> None:
    of_a, of_b = (laid(numbered(), STATIC, group="g", member=one).subject_filters for one in "ab")
    assert sorted((*of_a, *of_b), key=str) == ["0.orders.*", "1.orders.*", "2.orders.*"]


@pytest.mark.parametrize(
    ("stream", "group", "options", "told"),
    [
        (config(), None, {"partitions": "1"}, "carry no partition numbers"),
        (config(), None, {"splitBy": "partition"}, "carry no partition numbers"),
        (numbered(), None, {"partitions": "3"}, "'partitions' names 3: there are partitions 0 to 2"),
        (
            numbered(),
            None,
            {"keyFilter": "orders.*", "keyPartitions": "3"},
            "carry partition numbers, which also define",
        ),
        (numbered(), STATIC, {"group": "g", "filter": "x.>"}, "not within the filters of group 'g'"),
        (config(), ELASTIC, {"group": "g", "member": "a"}, "select rows by the column 'partition', or give queue=true"),
        (config(), ELASTIC, {"group": "g", "partitions": "1"}, "option 'partitions' is given.* or give queue=true"),
        (config(), ELASTIC, {"group": "g", "splitBy": "partition"}, "use splitBy=sequence"),
        (
            config(),
            ELASTIC,
            {"group": "g", "acknowledge": "true", "queryName": "q"},
            "give queue=true to read and acknowledge the queue",
        ),
        (config(retention="workqueue"), None, {}, "retention 'workqueue' and no allow_direct"),
        (config(retention="interest"), None, {}, "retention 'interest' and no allow_direct"),
    ],
)
def test_what_a_stream_cannot_give(
    stream: dict[str, Any], group: GroupRecord | None, options: dict[str, str], told: str
) -> None:
    with pytest.raises(InvalidInput, match=told):
        laid(stream, group, (), **options)


def test_not_a_member() -> None:
    with pytest.raises(NotAMember, match="option 'member' is 'z': group 'g' has a, b"):
        laid(QUEUE, ELASTIC, group="g", queue="true", member="z")

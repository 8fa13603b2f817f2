"""The stored configuration of a group: both dialects, older names, and every rule with its own words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from keylane.core.partitions import Partitioning
from keylane.core.plans import Plan
from keylane.errors import BrokenGroupRecord, InvalidInput
from keylane.groups.config import Dialect, ElasticConfig, StaticConfig, partition_limit
from keylane.groups.consumer_spec import asking_for, check_settings, consumer_config, covers, difference
from keylane.jetstream import ConsumerConfig, DeliverPolicy

WHERE = "record 'ORDERS.billing' in bucket 'x'"


def static(**fields: Any) -> StaticConfig:
    return StaticConfig.from_json(json.dumps(fields).encode(), WHERE)


def elastic(**fields: Any) -> ElasticConfig:
    return ElasticConfig.from_json(json.dumps(fields).encode(), WHERE)


# ---- JSON, both ways, in both dialects --------------------------------------------------------------------


def test_static_json_of_the_present() -> None:
    config = StaticConfig(partitions=3, filters=("orders.*", "refunds.>"), members=("b", "a"))
    wire = {"max_members": 3, "filters": ["orders.*", "refunds.>"], "members": ["b", "a"]}
    assert json.loads(config.to_json()) == wire
    assert static(**wire) == config
    assert config.priority_group("a") == "PCG"


def test_static_json_leaves_out_what_is_not_there() -> None:
    config = StaticConfig(partitions=1, members=("a",))
    assert json.loads(config.to_json()) == {"max_members": 1, "members": ["a"]}


def test_static_json_of_go_0_1() -> None:
    wire = {"max_members": 2, "filter": "orders.*", "members": ["a"]}
    config = static(**wire)
    assert config == StaticConfig(partitions=2, filters=("orders.*",), members=("a",), dialect="go-0.1")
    assert json.loads(config.to_json()) == wire
    assert config.priority_group("a") == "a"


def test_static_json_of_go_0_1_without_a_filter() -> None:
    wire = {"max_members": 1, "filter": "", "member_mappings": [{"member": "a", "partitions": [0]}]}
    config = static(**wire)
    assert config.filters == ()
    assert config.dialect == "go-0.1"
    assert json.loads(config.to_json()) == wire


def test_elastic_json_of_the_present() -> None:
    config = ElasticConfig(
        partitions=4,
        partitioning=(Partitioning("orders.*.*", (2, 1), 4), Partitioning("refunds.*", (1,), 4)),
        max_buffered_messages=100,
        max_buffered_bytes=2000,
        members=("a",),
    )
    wire = {
        "max_members": 4,
        "partitioning_filters": [
            {"filter": "orders.*.*", "partitioning_wildcards": [2, 1]},
            {"filter": "refunds.*", "partitioning_wildcards": [1]},
        ],
        "max_buffered_msg": 100,
        "max_buffered_bytes": 2000,
        "members": ["a"],
    }
    assert json.loads(config.to_json()) == wire
    assert elastic(**wire) == config


def test_elastic_json_without_filters_is_null() -> None:
    config = ElasticConfig(partitions=4)
    assert json.loads(config.to_json()) == {"max_members": 4, "partitioning_filters": None}
    assert elastic(max_members=4, partitioning_filters=None) == config
    assert elastic(max_members=4, partitioning_filters=[]) == config
    assert elastic(max_members=4) == config


def test_elastic_json_of_go_0_1() -> None:
    wire = {"max_members": 4, "filter": "orders.*", "partitioning_wildcards": [1], "max_buffered_msg": 7}
    config = elastic(**wire)
    assert config.dialect == "go-0.1"
    assert config.partitioning == (Partitioning("orders.*", (1,), 4),)
    assert json.loads(config.to_json()) == wire


def test_a_change_keeps_the_dialect() -> None:
    changed = elastic(max_members=2, filter="o.*", partitioning_wildcards=[1]).with_owners(members=["a"])
    assert json.loads(changed.to_json())["filter"] == "o.*"
    assert changed.dialect == "go-0.1"


def test_the_older_names_are_read_and_the_new_ones_written() -> None:
    config = elastic(
        **{
            "max_members": 2,
            "filter": "o.*.*",
            "partitioning-wildcards": [2],
            "msg-buffer-size": 9,
            "member-mappings": [{"member": "a", "partitions": [1, 0]}],
        }
    )
    assert json.loads(config.to_json()) == {
        "max_members": 2,
        "filter": "o.*.*",
        "partitioning_wildcards": [2],
        "max_buffered_msg": 9,
        "member_mappings": [{"member": "a", "partitions": [1, 0]}],
    }
    old = static(**{"max_members": 1, "filter": "o.>", "member-mappings": [{"member": "a", "partitions": [0]}]})
    assert old.mappings == Plan({"a": [0]})


def test_go_writes_greater_than_as_an_escape() -> None:
    config = StaticConfig.from_json(b'{"max_members":1,"filters":["orders.\\u003e"],"members":["a"]}', WHERE)
    assert config.filters == ("orders.>",)
    assert StaticConfig.from_json(config.to_json(), WHERE) == config


def test_null_and_empty_lists_mean_nothing() -> None:
    config = static(max_members=2, filters=None, members=None, member_mappings=[])
    assert config == StaticConfig(partitions=2)
    assert not config.plan.members


def test_unknown_fields_of_a_newer_library_are_no_fault() -> None:
    assert static(max_members=1, members=["a"], colour="green") == StaticConfig(partitions=1, members=("a",))


# ---- filters ----------------------------------------------------------------------------------------------


def test_filters_for_each_filter_ascending() -> None:
    config = StaticConfig(partitions=3, filters=("o.*", "r.*"), members=("a",))
    assert config.filters_of("a") == ("0.o.*", "1.o.*", "2.o.*", "0.r.*", "1.r.*", "2.r.*")


def test_mapped_static_members_ask_for_their_filters_only() -> None:
    config = StaticConfig(partitions=2, filters=("o.*", "r.*"), mappings=Plan({"a": [1], "b": [0]}))
    assert config.filters_of("a") == ("1.o.*", "1.r.*")


def test_mapped_elastic_members_ask_for_whole_partitions() -> None:
    config = ElasticConfig(
        partitions=3,
        partitioning=(Partitioning("o.*", (1,), 3), Partitioning("r.*", (1,), 3)),
        mappings=Plan({"a": [2, 0], "b": [1]}),
    )
    assert config.filters_of("a") == ("0.>", "2.>")


def test_go_0_1_asks_for_whole_partitions() -> None:
    config = elastic(max_members=3, filter="o.*", partitioning_wildcards=[1], members=["a"])
    assert config.filters_of("a") == ("0.>", "1.>", "2.>")
    mapped = static(max_members=1, filter="o.*", member_mappings=[{"member": "a", "partitions": [0]}])
    assert mapped.filters_of("a") == ("0.>",)
    balanced = static(max_members=1, filter="o.*", members=["a"])
    assert balanced.filters_of("a") == ("0.>",)


def test_filters_keep_the_order_in_which_a_record_lists_partitions() -> None:
    """Go asks in that order, and the server takes a reordered list for another consumer."""
    mappings = [{"member": "a", "partitions": [2, 0]}, {"member": "b", "partitions": [1]}]
    config = static(max_members=3, filters=["o.*", "r.*"], member_mappings=mappings)
    assert config.filters_of("a") == ("2.o.*", "0.o.*", "2.r.*", "0.r.*")
    assert config.plan == Plan({"a": [0, 2], "b": [1]})


# ---- rules ------------------------------------------------------------------------------------------------

ONE = {"member": "a", "partitions": [0]}

RULES: list[tuple[str, dict[str, Any], str]] = [
    ("no members at all", {"max_members": 0}, "number of partitions 0 is out of range"),
    ("too many", {"max_members": 2**31}, "number of partitions 2147483648 is out of range"),
    ("both", {"max_members": 1, "members": ["a"], "member_mappings": [ONE]}, "give members or mappings, not both"),
    ("member name", {"max_members": 1, "members": ["a.b"]}, "member name 'a.b' holds '.' at position 2"),
    ("empty member", {"max_members": 1, "members": [""]}, "member name '' is empty"),
    ("members no list", {"max_members": 1, "members": "abc"}, "members is 'abc', not a list of texts"),
    ("member no text", {"max_members": 1, "members": [1]}, "members is [1], not a list of texts"),
    ("mapping no list", {"max_members": 1, "member_mappings": {"a": [0]}}, "not a list of objects"),
    ("mapping nameless", {"max_members": 1, "member_mappings": [{"partitions": [0]}]}, "member name '' is empty"),
    (
        "mapping no numbers",
        {"max_members": 1, "member_mappings": [{"member": "a", "partitions": "0"}]},
        "partitions is '0', not a list of whole numbers",
    ),
    (
        "mapping of truth",
        {"max_members": 1, "member_mappings": [{"member": "a", "partitions": [False]}]},
        "partitions is [False], not a list of whole numbers",
    ),
    (
        "too many mapped",
        {"max_members": 1, "member_mappings": [ONE, {"member": "b", "partitions": [1]}]},
        "2 members are mapped, but the group has 1 partitions",
    ),
    ("out of range", {"max_members": 1, "member_mappings": [{"member": "a", "partitions": [1]}]}, "is out of range"),
    ("negative", {"max_members": 1, "member_mappings": [{"member": "a", "partitions": [-1]}]}, "is out of range"),
    ("unowned", {"max_members": 2, "member_mappings": [ONE]}, "partitions 1 of 2 belong to no member"),
    (
        "owned twice",
        {"max_members": 2, "member_mappings": [ONE, {"member": "b", "partitions": [0, 1]}]},
        "partition 0 belongs to member 'a' and to member 'b'",
    ),
    (
        "listed twice",
        {"max_members": 1, "member_mappings": [{"member": "a", "partitions": [0, 0]}]},
        "partition 0 is listed twice for member 'a'",
    ),
    ("mapped twice", {"max_members": 1, "member_mappings": [ONE, ONE]}, "member 'a' has two mappings"),
]


@pytest.mark.parametrize(("record", "words"), [pytest.param(*rest, id=name) for name, *rest in RULES])
def test_each_rule_of_both_kinds_has_its_own_words(record: dict[str, Any], words: str) -> None:
    for read in (static, elastic):
        with pytest.raises(BrokenGroupRecord) as caught:
            read(**record)
        assert words in str(caught.value)
        assert str(caught.value).startswith(f"{WHERE} is not a valid group configuration: ")
        assert "Nothing was changed; repair or delete this key" in str(caught.value)


STATIC_RULES: list[tuple[str, dict[str, Any], str]] = [
    ("filter", {"max_members": 1, "filters": ["a..b"]}, "filter 'a..b' has an empty token"),
    ("overlap", {"max_members": 1, "filters": ["a.*", "a.b"]}, "filters 'a.*' and 'a.b' overlap"),
    ("filters no list", {"max_members": 1, "filters": "a.*"}, "filters is 'a.*', not a list of texts"),
    ("filter no text", {"max_members": 1, "filter": 7}, "filter is 7, not a text"),
    (
        "go name too long",
        {"max_members": 1, "filter": "", "members": ["a-very-long-member-name"]},
        "in the dialect go-0.1 it is also the name of a priority group",
    ),
]


@pytest.mark.parametrize(("record", "words"), [pytest.param(*rest, id=name) for name, *rest in STATIC_RULES])
def test_each_rule_of_static_groups_has_its_own_words(record: dict[str, Any], words: str) -> None:
    with pytest.raises(BrokenGroupRecord) as caught:
        static(**record)
    assert words in str(caught.value)


def partitioned(*filters: tuple[Any, Any], **more: Any) -> dict[str, Any]:
    listed = [{"filter": one, "partitioning_wildcards": wildcards} for one, wildcards in filters]
    return {"max_members": 2, "partitioning_filters": listed, **more}


ELASTIC_RULES: list[tuple[str, dict[str, Any], str]] = [
    ("no wildcard", partitioned(("a.b", [])), "filter 'a.b' has no wildcard: members in Go refuse it"),
    ("no such wildcard", partitioned(("a.*", [2])), "partitioning wildcard 2 is out of range"),
    ("wildcard zero", partitioned(("a.*", [0])), "partitioning wildcard 0 is out of range"),
    ("no star", partitioned(("a.b", [1])), "has no '*'"),
    ("wildcard twice", partitioned(("a.*", [1, 1])), "partitioning wildcard 1 is listed twice"),
    ("wildcards no list", partitioned(("a.*", 1)), "partitioning_wildcards is 1, not a list of whole numbers"),
    ("filter", partitioned((">.a", [1])), "'>' may only be the last token"),
    ("no filter", partitioned((None, [1])), "filter '' is empty"),
    ("filters no objects", {"max_members": 1, "partitioning_filters": ["a.*"]}, "not a list of objects"),
    ("overlap", partitioned(("a.*", [1]), ("*.b", [1])), "filters 'a.*' and '*.b' overlap"),
    ("buffer no number", partitioned(max_buffered_msg="7"), "max_buffered_msg is '7', not a whole number"),
    ("old filter", {"max_members": 1, "filter": "a.*", "partitioning-wildcards": []}, "names no wildcards to hash"),
]


@pytest.mark.parametrize(("record", "words"), [pytest.param(*rest, id=name) for name, *rest in ELASTIC_RULES])
def test_each_rule_of_elastic_groups_has_its_own_words(record: dict[str, Any], words: str) -> None:
    with pytest.raises(BrokenGroupRecord) as caught:
        elastic(**record)
    assert words in str(caught.value)


def test_no_two_rules_share_their_words() -> None:
    said: dict[str, str] = {}
    for name, record, _ in [*RULES, *STATIC_RULES]:
        if name == "mapping nameless":  # an empty name, wherever it stands
            continue
        with pytest.raises(BrokenGroupRecord) as caught:
            static(**record)
        assert str(caught.value) not in said, (name, said[str(caught.value)])
        said[str(caught.value)] = name


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is not JSON"),
        (b"hello", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b'{"max_members": 1', "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b"[]", "it has no whole number max_members"),
        (b"null", "it has no whole number max_members"),
        (b'"text"', "it has no whole number max_members"),
        (b"{}", "it has no whole number max_members"),
        (b'{"max_members": "1"}', "it has no whole number max_members"),
        (b'{"max_members": 1.0}', "it has no whole number max_members"),
        (b'{"max_members": true}', "it has no whole number max_members"),
    ],
)
def test_what_is_no_configuration_at_all(data: bytes, words: str) -> None:
    for kind in (StaticConfig, ElasticConfig):
        with pytest.raises(BrokenGroupRecord, match=words) as caught:
            kind.from_json(data, WHERE)
        assert str(caught.value).startswith(WHERE)
        assert "repair or delete this key" in str(caught.value)


def test_what_the_old_dialect_cannot_say() -> None:
    with pytest.raises(InvalidInput, match=r"2 filters: the dialect go-0\.1 has one at most"):
        StaticConfig(partitions=1, filters=("a", "b"), members=("m",), dialect="go-0.1").check()
    with pytest.raises(InvalidInput, match=r"0 filters: the dialect go-0\.1 has exactly one"):
        ElasticConfig(partitions=1, dialect="go-0.1").check()
    wrong: Any = "go-9"
    with pytest.raises(InvalidInput, match="dialect is 'go-9'"):
        StaticConfig(partitions=1, dialect=wrong).check()


def test_the_order_of_members_means_nothing_to_a_static_group() -> None:
    one, other = (StaticConfig(partitions=2, members=members) for members in (("a", "b"), ("b", "a", "b")))
    assert one.same_group(other)
    assert not one.same_group(StaticConfig(partitions=2, members=("a", "c")))
    assert not one.same_group(StaticConfig(partitions=2, members=("a", "b"), filters=("x",)))


# ---- records as the newest Go library writes them ---------------------------------------------------------

GO_ELASTIC: list[tuple[bytes, dict[str, Any]]] = [
    (
        rb'{"max_members":6,"partitioning_filters":[{"filter":"e.*","partitioning_wildcards":[1]}],'
        rb'"max_buffered_msg":-1,"max_buffered_bytes":-1}',
        {"partitioning": (Partitioning("e.*", (1,), 6),)},
    ),
    (
        rb'{"max_members":6,"partitioning_filters":[{"filter":"e.*","partitioning_wildcards":[1]}],"max_buffered_msg":-5}',
        {"partitioning": (Partitioning("e.*", (1,), 6),)},
    ),
    (
        rb'{"max_members":6,"partitioning_filters":[{"filter":"e.\u003e","partitioning_wildcards":[]}]}',
        {"partitioning": (Partitioning("e.>", (), 6),)},
    ),
    (
        rb'{"max_members":6,"partitioning_filters":[{"filter":"e.\u003e","partitioning_wildcards":null}],'
        rb'"max_buffered_msg":100,"max_buffered_bytes":2000}',
        {"partitioning": (Partitioning("e.>", (), 6),), "max_buffered_messages": 100, "max_buffered_bytes": 2000},
    ),
    (
        rb'{"max_members":6,"partitioning_filters":[{"filter":"e.*","partitioning_wildcards":null}]}',
        {"partitioning": (Partitioning("e.*", (), 6),)},
    ),
    (rb'{"max_members":6,"partitioning_filters":null}', {}),
    (rb'{"max_members":6,"partitioning_filters":[]}', {}),
]


@pytest.mark.parametrize(("record", "said"), GO_ELASTIC)
def test_what_go_writes_is_read_and_rewritten_in_the_same_form(record: bytes, said: dict[str, Any]) -> None:
    config = ElasticConfig.from_json(record, WHERE)
    assert config == ElasticConfig(partitions=6, **said)
    for changed in (config.with_owners(members=["a"]), config.with_owners(mappings=Plan({"a": range(6)}))):
        again = json.loads(changed.to_json())
        assert again.pop("members", ["a"]) == ["a"]
        assert again.pop("member_mappings", [])[:1] in ([], [{"member": "a", "partitions": list(range(6))}])
        assert again == json.loads(record)
        back = ElasticConfig.from_json(changed.to_json(), WHERE).with_owners()
        assert json.loads(back.to_json()) == json.loads(record)


def test_an_unchanged_mapping_keeps_its_order_and_unknown_fields_stay() -> None:
    record = {
        "max_members": 6,
        "colour": {"of": ["x", 1.5, None], "member-mappings": []},
        "partitioning_filters": [],
        "member_mappings": [{"member": "b", "partitions": [5, 4]}, {"member": "a", "partitions": [0, 3, 1, 2]}],
    }
    config = elastic(**record)
    assert json.loads(config.to_json()) == record
    assert json.loads(config.with_owners(members=["c"]).to_json()) == {
        "max_members": 6,
        "colour": record["colour"],
        "partitioning_filters": [],
        "members": ["c"],
    }


@pytest.mark.parametrize(
    ("record", "config"),
    [
        (
            rb'{"max_members":4,"filters":["s.a.\u003e"],"members":["m2","m1"]}',
            StaticConfig(partitions=4, filters=("s.a.>",), members=("m2", "m1")),
        ),
        (rb'{"max_members":4,"members":["m2","m1"]}', StaticConfig(partitions=4, members=("m2", "m1"))),
        (
            rb'{"max_members":4,"filters":["s.a.*"],"member_mappings":[{"member":"m1","partitions":[3,0]},'
            rb'{"member":"m2","partitions":[1,2]}]}',
            StaticConfig(partitions=4, filters=("s.a.*",), mappings=Plan({"m1": [0, 3], "m2": [1, 2]})),
        ),
    ],
)
def test_static_groups_that_go_wrote(record: bytes, config: StaticConfig) -> None:
    read = StaticConfig.from_json(record, WHERE)
    assert read == config
    assert json.loads(read.to_json()) == json.loads(record)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_number_that_could_not_be_written_back_is_no_json(number: str) -> None:
    with pytest.raises(BrokenGroupRecord, match="is not JSON"):
        ElasticConfig.from_json(b'{"max_members": 2, "x": %s}' % number.encode(), WHERE)


# ---- how large a group may be -----------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [16_385, 1_000_000, 2**31 - 1])
def test_too_many_partitions_are_refused_in_new_groups_and_in_records(partitions: int) -> None:
    for kind in (StaticConfig, ElasticConfig):
        with pytest.raises(InvalidInput, match=r"partitions are more than the 16,384 that are allowed here"):
            kind(partitions=partitions, members=("a",)).check()
        with pytest.raises(BrokenGroupRecord, match=f"KEYLANE_MAX_PARTITIONS={partitions}"):
            kind.from_json(b'{"max_members": %d, "members": ["a"]}' % partitions, WHERE)


def test_the_limit_on_partitions_can_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keylane.groups.config._chosen", None)
    config = StaticConfig(partitions=20_000, members=("a",))
    monkeypatch.setenv("KEYLANE_MAX_PARTITIONS", "20000")
    config.check()
    monkeypatch.setenv("KEYLANE_MAX_PARTITIONS", "many")
    with pytest.raises(InvalidInput, match="KEYLANE_MAX_PARTITIONS is 'many'"):
        config.check()
    monkeypatch.delenv("KEYLANE_MAX_PARTITIONS")
    assert partition_limit() == 16_384
    with pytest.raises(InvalidInput):
        config.check()
    assert partition_limit(20_000) == 20_000
    config.check()


def test_a_consumer_with_too_many_filters_is_refused_with_what_is_needed() -> None:
    config = ElasticConfig(partitions=10_000, partitioning=(Partitioning("o.*", (1,), 10_000),))
    assert config.members_needed == 5
    five = config.with_owners(members="abcde")
    assert all(five.too_many_filters(member) is None for member in "abcde")
    with pytest.raises(InvalidInput, match=r"'a' would read 2,500 partitions.* at least 5 members"):
        config.with_owners(members="abcd")
    with pytest.raises(InvalidInput, match="'b' would read 2,001 partitions"):
        config.with_owners(
            mappings=Plan(
                {"a": range(1_000), "b": range(1_000, 3_001)}
                | {
                    name: range(3_001 + at * 1_000, 3_001 + min(6_999, (at + 1) * 1_000))
                    for at, name in enumerate("cdefghi")
                }
            )
        )
    assert config.with_owners().plan.members == ()


def test_every_filter_of_a_group_counts_once_per_partition() -> None:
    filters = tuple(Partitioning(f"{name}.*", (1,), 1_000) for name in "abc")
    config = ElasticConfig(partitions=1_000, partitioning=filters)
    with pytest.raises(InvalidInput, match=r"1,000 partitions, each under 3 filters.* at least 2 members"):
        config.with_owners(members=["a"])
    assert config.with_owners(mappings=Plan({"a": range(1_000)})).too_many_filters("a") is None, "whole partitions"
    static_group = StaticConfig(partitions=1_000, filters=("a.*", "b.*", "c.*"), mappings=Plan({"a": range(1_000)}))
    assert static_group.too_many_filters("a") is not None


def test_which_mappings_stop_members_in_go() -> None:
    two = tuple(Partitioning(f"{name}.*", (1,), 2) for name in "ab")
    mapping = Plan({"a": [0, 1]})
    assert ElasticConfig(partitions=2, partitioning=two, mappings=mapping).stops_go_members
    assert StaticConfig(partitions=2, filters=("a.*", "b.*"), mappings=mapping).stops_go_members
    assert not ElasticConfig(partitions=2, partitioning=two[:1], mappings=mapping).stops_go_members
    assert not ElasticConfig(partitions=2, mappings=mapping).stops_go_members
    assert not ElasticConfig(partitions=2, partitioning=two, members=("a",)).stops_go_members


# ---- the consumer of a member -----------------------------------------------------------------------------

GROUP = ElasticConfig(partitions=2, partitioning=(Partitioning("o.*", (1,), 2),), members=("a",))
STATIC = StaticConfig(partitions=2, members=("a",))


def test_the_timers_of_a_consumer() -> None:
    plain = consumer_config(GROUP, "g", "a", ConsumerConfig())
    assert (plain.ack_wait_s, plain.priority_timeout_s, plain.inactive_threshold_s) == (5.0, 5.0, 5.0)
    assert (plain.name, plain.durable_name, plain.priority_groups) == ("a", None, ("PCG",))
    quick = consumer_config(STATIC, "g", "a", ConsumerConfig(ack_wait_s=0.2))
    assert (quick.ack_wait_s, quick.priority_timeout_s, quick.inactive_threshold_s) == (0.2, 1.0, None)
    assert quick.durable_name == "g-a"
    zero = consumer_config(GROUP, "g", "a", ConsumerConfig(ack_wait_s=0))
    assert zero.ack_wait_s == 5.0
    go = elastic(max_members=1, filter="o.*", partitioning_wildcards=[1], members=["a"])
    old = consumer_config(go, "g", "a", ConsumerConfig(ack_wait_s=2))
    assert (old.ack_wait_s, old.priority_timeout_s, old.inactive_threshold_s) == (6.0, 6.0, 6.0)
    assert old.priority_groups == ("a",)


def test_with_backoff_the_server_waits_for_its_first_step() -> None:
    config = consumer_config(GROUP, "g", "a", ConsumerConfig(ack_wait_s=9, backoff_s=(2.0, 4.0)))
    assert (config.ack_wait_s, config.priority_timeout_s) == (2.0, 2.0)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("name", {"name": "x"}),
    ("durable_name", {"durable_name": "x"}),
    ("filter_subject", {"filter_subject": "x"}),
    ("filter_subjects", {"filter_subjects": ("x",)}),
    ("priority_groups", {"priority_groups": ("x",)}),
    ("priority_policy", {"priority_policy": "overflow"}),
    ("priority_timeout_s", {"priority_timeout_s": 3.0}),
    ("deliver_subject", {"deliver_subject": "x"}),
    ("max_deliver", {"max_deliver": 3}),
    ("max_ack_pending", {"max_ack_pending": -1}),
    ("ack_wait_s", {"ack_wait_s": -1.0}),
]


@pytest.mark.parametrize(("name", "fields"), REFUSED, ids=[name for name, _ in REFUSED])
def test_settings_that_would_break_a_group_are_refused_by_name(name: str, fields: dict[str, Any]) -> None:
    for group in (STATIC, GROUP):
        with pytest.raises(InvalidInput, match=name):
            check_settings(group, ConsumerConfig(**fields))


@pytest.mark.parametrize("policy", ["none", "all"])
def test_ack_policies_belong_to_static_groups(policy: Any) -> None:
    check_settings(STATIC, ConsumerConfig(ack_policy=policy))
    with pytest.raises(InvalidInput, match=f"ack_policy is '{policy}'"):
        check_settings(GROUP, ConsumerConfig(ack_policy=policy))


@pytest.mark.parametrize(("policy", "start"), [("by_start_sequence", {"opt_start_seq": 3}), ("new", {})])
def test_start_positions_belong_to_static_groups(policy: DeliverPolicy, start: dict[str, Any]) -> None:
    wanted = ConsumerConfig(deliver_policy=policy, **start)
    check_settings(STATIC, wanted)
    with pytest.raises(InvalidInput, match=f"deliver_policy is '{policy}'"):
        check_settings(GROUP, wanted)


def test_a_difference_is_named_whoever_has_the_setting() -> None:
    ours = consumer_config(STATIC, "g", "a", ConsumerConfig(max_ack_pending=1000))
    stored = ConsumerConfig.from_wire({**ours.to_wire(), "max_waiting": 512, "max_deliver": -1, "num_replicas": 0})
    assert difference(ours, stored) is None
    other = consumer_config(STATIC, "g", "a", ConsumerConfig(max_ack_pending=1000, ack_wait_s=3))
    assert difference(ours, other) == "ack_wait is 3000000000 there and 5000000000 here"
    described = ConsumerConfig.from_wire({**stored.to_wire(), "description": "theirs"})
    assert difference(ours, described) == "description is 'theirs' there and None here"
    assert difference(described, ours) == "description is None there and 'theirs' here"


def test_filters_and_metadata_are_no_difference() -> None:
    ours = consumer_config(GROUP, "g", "a", ConsumerConfig())
    wire = {**ours.to_wire(), "filter_subjects": ["9.>"], "metadata": {"_nats.ver": "2.15.1"}}
    assert difference(ours, ConsumerConfig.from_wire(wire)) is None


@pytest.mark.parametrize("dialect", ["present", "go-0.1"])
def test_owners_may_change_and_nothing_else(dialect: Dialect) -> None:
    config = ElasticConfig(partitions=2, partitioning=(Partitioning("o.*", (1,), 2),), dialect=dialect)
    assert config.same_but_owners(config.with_owners(members=["a"]))
    assert config.same_but_owners(config.with_owners(mappings=Plan({"a": [0, 1]})))
    for other in (
        ElasticConfig(partitions=3, partitioning=(Partitioning("o.*", (1,), 3),), dialect=dialect),
        ElasticConfig(partitions=2, partitioning=(Partitioning("x.*", (1,), 2),), dialect=dialect),
        ElasticConfig(partitions=2, partitioning=config.partitioning, max_buffered_bytes=1, dialect=dialect),
    ):
        assert not config.same_but_owners(other)


def test_which_consumers_of_another_instance_deliver_all_that_is_wanted() -> None:
    wanted = ("0.o.*", "3.o.*", "0.r.>", "3.r.>")
    assert covers(("3.>", "0.>"), wanted)
    assert covers(tuple(reversed(wanted)), wanted)
    assert not covers(("0.>",), wanted), "a partition is missing"
    assert not covers(("0.>", "3.>", "4.>"), wanted), "a partition too many"
    assert not covers(("0.o.*", "3.o.*"), wanted), "a filter is missing"


def test_what_a_wider_consumer_delivers_too_is_told_apart() -> None:
    is_asked_for = asking_for(("0.o.*", "3.o.*", "3.r.>"))
    assert is_asked_for(b"0.o.x")
    assert is_asked_for(b"3.r.a.b")
    assert not is_asked_for(b"0.r.a")
    assert not is_asked_for(b"4.o.x")
    assert not is_asked_for("3.p.é".encode())

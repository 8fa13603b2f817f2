"""The configuration file, and what differs from it: what is read, refused, planned, and in which order."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from keylane.core.configuration_difference import ConfigurationPlan, FieldChange, PresentResource, difference
from keylane.core.configuration_file import ResourceKey, WantedResource, read_configuration, wire_of_source
from keylane.core.fleet_partitions import StreamCopy, discovered, from_kv, hashed, listed, source_from_wire
from keylane.core.partitions import PartitionBy
from keylane.core.quantities import duration_text, parse_duration_s
from keylane.errors import InvalidInput

STREAM = ResourceKey("stream", "ORDERS")
BILLING = ResourceKey("elastic", "ORDERS", "billing")
AUDIT = ResourceKey("static", "ORDERS", "audit")
FLEET = ResourceKey("fleet", "ORDERS", "ship")
LETTERS = ResourceKey("dead letters", "ORDERS")


def read(text: str) -> dict[ResourceKey, WantedResource]:
    return read_configuration(tomllib.loads(text))


def fields(text: str, key: ResourceKey) -> Any:
    return read(text)[key].fields


# ---- the file ------------------------------------------------------------------------------------------------

WHOLE = """
[streams.ORDERS]
partition_by = "orders.*"
partitions = 8
max_age = "30d"
max_bytes = "10GiB"
dead_letters = { max_age = "90d" }

[streams.ORDERS.static.audit]
members = ["b", "a"]

[streams.ORDERS.elastic.billing]
partitions = 4
partition_by = [{ filter = "*.orders.*", key = [2] }]
mapping = { a = [0, 1], b = [3, 2] }

[streams.ORDERS.fleets.ship]
lease_s = 5
"""


def test_a_file_is_read_into_its_normal_form() -> None:
    found = read(WHOLE)
    assert list(found) == [STREAM, LETTERS, AUDIT, BILLING, FLEET]
    assert found[STREAM].fields == {
        "partition_by": "orders.*",
        "partitions": 8,
        "max_age": 2_592_000.0,
        "max_bytes": 10 * 1024**3,
        "key": (1,),
        "subjects": ("orders.*",),
    }
    assert found[AUDIT].fields == {"partitions": 8, "members": ("a", "b"), "mapping": None}
    assert found[BILLING].fields == {
        "partitions": 4,
        "partition_by": (("*.orders.*", (2,)),),
        "mapping": (("a", (0, 1)), ("b", (2, 3))),
        "members": (),
    }
    assert found[FLEET].fields == {
        "source": "hashed",
        "partitions": 8,
        "filter": "orders.*",
        "key": (1,),
        "lease_s": 5.0,
    }
    assert source_from_wire(wire_of_source(found[FLEET].fields or {})) == hashed(8, "orders.*")


def test_absent_is_said_and_nothing_else_beside_it() -> None:
    assert fields("[streams.ORDERS]\nabsent = true", STREAM) is None
    with pytest.raises(InvalidInput, match="is to be absent and has partitions"):
        read("[streams.ORDERS]\nabsent = true\npartitions = 3")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[stream.ORDERS]", "the file has the field 'stream', which is not known; did you mean 'streams'"),
        ("[streams.ORDERS]\npartition = 3", "did you mean 'partitions'"),
        ("[streams.ORDERS.elastic.g]\nmembres = []", "streams.ORDERS.elastic.g has the field 'membres'"),
        ("[streams.ORDERS]\nsubjects = 'a'", "streams.ORDERS.subjects is 'a': it must be a list"),
        ("[streams.ORDERS]\nreplicas = 9", "it must be a whole number from 1 to 5"),
        ("[streams.ORDERS]\nmax_age = 30", "a duration in quotes"),
        ("[streams.ORDERS]\nmax_age = '30 days'", "streams.ORDERS.max_age: duration '30 days' is invalid"),
        ("[streams.ORDERS]\nmax_bytes = 'much'", "write a size such as"),
        ("[streams.ORDERS]\nretention = 'queue'", "it must be one of limits, interest, work"),
        ("[streams.ORDERS]\npartitions = 3", "partitions and key need partition_by"),
        ("[streams.ORDERS]\npartition_by = 'a.*'", "partition_by needs partitions"),
        ("[streams.ORDERS]\npartition_by = 'a.*'\npartitions = 2\nsubjects = ['b']", "would get no partition number"),
        ("[streams.ORDERS]\nabsent = 1", "it must be true or false"),
        ("streams = 3", "streams is 3: it must be a table"),
        ("[streams.ORDERS.static.g]\nmembers = ['a']", "give its stream partitions, or the group"),
        ("[streams.ORDERS.static.g]\npartitions = 2", "needs its members, or a mapping"),
        ("[streams.ORDERS.elastic.g]\nmembers = ['a']\nmapping = { a = [0] }", "members or a mapping, not both"),
        ("[streams.ORDERS.elastic.g]\npartitions = 3\nmapping = { a = [0] }", "belong to no member"),
        ("[streams.ORDERS.elastic.g]\nmapping = [1]", "a table of members and their partitions"),
        ("[streams.ORDERS.fleets.f]\nsubjects = ['a']\ndiscover = 'b.*'", "give one of subjects, discover"),
        ("[streams.ORDERS.fleets.f]\nlease_s = 3", "give its stream partition_by and partitions"),
        ("[streams.ORDERS.fleets.f]\nkv = { bucket = 'b' }", "kv needs a bucket and a key"),
        ("[streams.'A.B']", "A.B"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read(text)
    assert words in str(refused.value)


@pytest.mark.parametrize("text", ["30d", "12h", "90s", "0.5s", "5m"])
def test_durations_are_shown_as_they_are_written(text: str) -> None:
    assert duration_text(parse_duration_s(text)) == text


# ---- the difference -------------------------------------------------------------------------------------------


def there(key: ResourceKey, fields: dict[str, Any], **more: Any) -> dict[ResourceKey, PresentResource]:
    return {key: PresentResource(key=key, fields=fields, version="v1", **more)}


def wants(key: ResourceKey, fields: dict[str, Any] | None) -> dict[ResourceKey, WantedResource]:
    return {key: WantedResource(key, fields)}


def refusal(plan: ConfigurationPlan) -> tuple[str, str]:
    assert plan.steps == ()
    [one] = plan.refused
    return one.reason, one.command


def test_what_the_file_leaves_out_is_no_difference() -> None:
    assert difference(there(STREAM, {"replicas": 3, "max_age": 9.0}), wants(STREAM, {"replicas": 3})).is_empty


def test_readers_come_after_their_stream_and_go_before_it() -> None:
    made = difference({}, read(WHOLE))
    assert [str(step.key) for step in made.steps] == [
        "stream ORDERS",
        "dead letters of ORDERS",
        "static group ORDERS/audit",
        "elastic group ORDERS/billing",
        "fleet ORDERS/ship",
    ]
    present = {
        key: PresentResource(key=key, fields={}, version="v1", messages=7 if key == STREAM else 0)
        for key in read(WHOLE)
    }
    gone = difference(present, {key: WantedResource(key, None) for key in present})
    assert [step.action for step in gone.steps] == ["delete"] * 5
    assert gone.steps[-1].key == STREAM
    assert gone.steps[-1].notes == ("7 messages are deleted with it",)
    assert gone.deletes == gone.steps


def test_a_stream_stays_while_something_reads_it() -> None:
    present = there(STREAM, {}) | there(AUDIT, {})
    reason, command = refusal(difference(present, wants(STREAM, None)))
    assert reason == "static group ORDERS/audit would remain without it"
    assert "absent" in command


def test_new_members_show_what_moves() -> None:
    present = there(BILLING, {"partitions": 4, "members": ("a", "b"), "mapping": None})
    [step] = difference(present, wants(BILLING, {"members": ("a", "b", "c"), "mapping": None})).steps
    assert step.changes == (FieldChange("members", ("a", "b"), ("a", "b", "c")),)
    assert step.notes == ("moves 3 of 4 partitions: 1 from a to b; 3 from b to a; 2 from b to c",)
    assert step.version == "v1"
    [step] = difference(present, wants(BILLING, {"members": (), "mapping": (("a", (0, 1)), ("b", (2, 3)))})).steps
    assert step.notes == ("no partition moves",)


@pytest.mark.parametrize(
    ("present", "wanted", "reason", "command"),
    [
        (
            there(STREAM, {"partitions": 8}, messages=5, numbered_readers=("fleet ship",), fleets=("ship",)),
            wants(STREAM, {"partitions": 16}),
            "mix the order of keys; there are fleet ship",
            "keylane fleet repartition ORDERS ship 16",
        ),
        (
            there(STREAM, {"partitions": 8}, numbered_readers=("static group audit",)),
            wants(STREAM, {"partitions": 16}),
            "there are static group audit",
            "keylane stream create ORDERS2 --partition-by",
        ),
        (there(STREAM, {"partitions": 8}, messages=5), wants(STREAM, {"partitions": 16}), "5 messages with", "create"),
        (there(STREAM, {"storage": "file"}), wants(STREAM, {"storage": "memory"}), "keeps the storage", "create"),
        (there(STREAM, {}, messages=10), wants(STREAM, {"max_messages": 9}), "it holds 10 messages", "--keep N"),
        (there(STREAM, {}, bytes=10), wants(STREAM, {"max_bytes": 9}), "it holds 10 bytes", "purge ORDERS"),
        (there(STREAM, {}, messages=1, oldest_s=100.0), wants(STREAM, {"max_age": 60.0}), "is 100 s old", "purge"),
        (there(STREAM, {}, messages=5), wants(STREAM, {"max_messages_per_subject": 1}), "up to 5 messages", "purge"),
        (there(LETTERS, {}, messages=10), wants(LETTERS, {"max_messages": 9}), "would delete", "keylane dlq ls ORDERS"),
        (
            there(AUDIT, {"members": ("a",)}),
            wants(AUDIT, {"members": ("b",)}),
            "never changes",
            "static delete ORDERS audit",
        ),
        (
            there(BILLING, {"partitions": 4}),
            wants(BILLING, {"partitions": 5}),
            "partitions of an elastic",
            "of another name",
        ),
        (
            there(FLEET, {"partitions": 4, "layout": "partition"}),
            wants(FLEET, {"partitions": 5}),
            "with a barrier that keeps the order",
            "keylane fleet repartition ORDERS ship 5",
        ),
        (there(FLEET, {"lease_s": 3.0}), wants(FLEET, {"lease_s": 5.0}), "lease_s of a fleet is fixed", "another name"),
        (there(FLEET, {}, workers=2), wants(FLEET, None), "2 of its workers run", "keylane fleet status ORDERS ship"),
        ({}, wants(STREAM, {"replicas": 1}), "does not give its subjects", "add subjects"),
        ({}, wants(BILLING, {"members": ("a",)}), "does not give its partitions", "add partitions"),
    ],
)
def test_what_would_lose_messages_or_order_is_refused_with_the_way(
    present: dict[ResourceKey, PresentResource], wanted: dict[ResourceKey, WantedResource], reason: str, command: str
) -> None:
    found = refusal(difference(present, wanted))
    assert reason in found[0]
    assert command in found[1]


TWO_FILTERS = """
[streams.ORDERS.elastic.billing]
partitions = 2
partition_by = ["orders.*", "refunds.*"]
mapping = { a = [0], b = [1] }
"""


def test_a_mapping_that_stops_members_in_go_needs_a_word() -> None:
    reason, command = refusal(difference(there(STREAM, {}), read(TWO_FILTERS)))
    assert "its members in Go stop" in reason
    assert "stop_go_members = true" in command
    allowed = read(f"{TWO_FILTERS}stop_go_members = true\n")
    assert len(difference(there(STREAM, {}), allowed).steps) == 1
    mapped = there(STREAM, {}) | there(BILLING, dict(allowed[BILLING].fields or {}))
    assert difference(mapped, read(TWO_FILTERS)).is_empty
    [step] = difference(mapped, read(TWO_FILTERS.replace("a = [0]", "c = [0]"))).steps
    assert step.notes == ("moves 1 of 2 partitions: 0 from a to c",)


def test_a_fleet_may_find_its_partitions() -> None:
    found = fields('[streams.ORDERS.fleets.ship]\ndiscover = "dc.*.*.done"\nkey = [1]', FLEET)
    assert source_from_wire(wire_of_source(found)) == discovered(PartitionBy("dc.*.*.done", key=[1]))
    found = fields('[streams.ORDERS.fleets.ship]\ndiscover = "dc.*"', FLEET)
    assert source_from_wire(wire_of_source(found)) == discovered("dc.*")
    found = fields('[streams.ORDERS.fleets.ship]\nkv = { bucket = "plants", key = "tools" }', FLEET)
    assert source_from_wire(wire_of_source(found)) == from_kv("plants", "tools")
    found = fields('[streams.ORDERS.fleets.ship]\nsubjects = ["b", "a"]\nlayout = "worker"', FLEET)
    assert source_from_wire(wire_of_source(found)) == listed(["a", "b"])
    copied = "partition_by = 'orders.*'\npartitions = 4\ncopy = { max_messages = 10 }"
    found = fields(f"[streams.ORDERS.fleets.ship]\n{copied}", FLEET)
    assert source_from_wire(wire_of_source(found)) == hashed(4, "orders.*", copy=StreamCopy(max_messages=10))


def test_an_empty_stream_that_nobody_reads_may_get_other_numbers() -> None:
    assert len(difference(there(STREAM, {"partitions": 8}), wants(STREAM, {"partitions": 16})).steps) == 1


def test_limits_that_delete_nothing_may_be_set_and_taken_away() -> None:
    present = there(STREAM, {"max_messages": 0}, messages=10)
    assert len(difference(present, wants(STREAM, {"max_messages": 10})).steps) == 1
    assert (
        len(difference(there(STREAM, {"max_messages": 10}, messages=10), wants(STREAM, {"max_messages": 0})).steps) == 1
    )


def test_subjects_that_are_not_stored_any_more_are_named() -> None:
    [step] = difference(there(STREAM, {"subjects": ("a", "b")}), wants(STREAM, {"subjects": ("a",)})).steps
    assert step.notes == ("b is not stored any more: who publishes there gets an error",)


def test_the_id_of_a_plan_is_another_after_a_change_by_somebody_else() -> None:
    wanted = wants(STREAM, {"replicas": 3})
    one = difference(there(STREAM, {"replicas": 1}), wanted)
    other = difference({STREAM: PresentResource(key=STREAM, fields={"replicas": 1}, version="v2")}, wanted)
    assert one.digest == difference(there(STREAM, {"replicas": 1}), wanted).digest
    assert one.digest != other.digest

"""The rules of `keylane doctor`: each finds what it is for, and says nothing about the same thing in order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keylane.core.diagnosis_facts import (
    DiagnosedConsumer,
    DiagnosedFleet,
    DiagnosedGroup,
    DiagnosedServer,
    DiagnosedStream,
    DoctorFacts,
    Finding,
    Unread,
)
from keylane.core.diagnosis_rules import RULES, diagnose
from keylane.core.partitions import Partitioning
from keylane.core.plans import Plan, balanced
from keylane.core.server_faults import ALL_FAULTS

BY = Partitioning("orders.*", (1,), 4)
STREAM = DiagnosedStream(
    name="ORDERS",
    subjects=("orders.*",),
    transform=(BY.filter, BY.destination),
    numbering=BY,
    carries_numbers=True,
)
STATIC = DiagnosedGroup(stream="ORDERS", group="g", kind="static", partitions=4, plan=balanced(["a", "b"], 4))
ELASTIC = DiagnosedGroup(
    stream="ORDERS",
    group="e",
    kind="elastic",
    partitions=4,
    plan=balanced(["a", "b"], 4),
    transforms=((BY.filter, BY.destination),),
)
QUEUE = DiagnosedStream(
    name="ORDERS-e", retention="workqueue", sources=("ORDERS",), source_numberings=((BY.filter, BY.destination),)
)
FLEET = DiagnosedFleet(
    stream="ORDERS",
    fleet="f",
    reads="ORDERS",
    numbers=4,
    partitions=("0", "1", "2", "3"),
    consumers=frozenset(f"f-p{number}" for number in range(4)),
    owned=frozenset("0123"),
    workers=frozenset({0}),
)
SERVER = DiagnosedServer(version=(2, 15, 1), clock_ahead_s=0.0, sync_s={"n1": 1.0})


def running(stream: str, name: str, *filters: str, **more: Any) -> DiagnosedConsumer:
    known: dict[str, Any] = {"pin_group": "PCG", "is_pinned": True, "pin_timeout_s": 5.0, **more}
    return DiagnosedConsumer(stream=stream, name=name, filters=filters, **known)


FINE = DoctorFacts(
    server=SERVER,
    streams={"ORDERS": STREAM, "ORDERS-e": QUEUE},
    consumers={
        "ORDERS": (
            running("ORDERS", "g-a", "0.>", "1.>"),
            running("ORDERS", "g-b", "2.>", "3.>"),
            *(running("ORDERS", f"f-p{number}", f"{number}.>", pin_group="fleet") for number in range(4)),
        ),
        "ORDERS-e": (running("ORDERS-e", "a", "0.>"), running("ORDERS-e", "b", "2.>")),
    },
    groups=(STATIC, ELASTIC),
    fleets=(FLEET,),
)
CLUSTER = replace(FINE, server=replace(SERVER, is_clustered=True))


def stream(**changes: Any) -> DoctorFacts:
    """All in order, but for the stream."""
    return replace(FINE, streams={**FINE.streams, "ORDERS": replace(STREAM, **changes)})


def group(**changes: Any) -> DoctorFacts:
    return replace(FINE, groups=(replace(STATIC, **changes), ELASTIC))


def elastic(**changes: Any) -> DoctorFacts:
    return replace(FINE, groups=(STATIC, replace(ELASTIC, **changes)))


def a_fleet(**changes: Any) -> DoctorFacts:
    return replace(FINE, fleets=(replace(FLEET, **changes),))


def server(**changes: Any) -> DoctorFacts:
    return replace(FINE, server=replace(SERVER, **changes))


def consumers(name: str, *others: DiagnosedConsumer, without: str = "") -> DoctorFacts:
    kept = tuple(one for one in FINE.consumers[name] if one.name != without)
    return replace(FINE, consumers={**FINE.consumers, name: (*kept, *others)})


def found(facts: DoctorFacts, rule: str) -> list[Finding]:
    return [one for one in diagnose(facts) if one.rule == rule]


def test_all_in_order() -> None:
    assert diagnose(FINE) == ()
    assert len(RULES) == len(set(RULES))


WRONG: list[tuple[str, str, DoctorFacts, str]] = [
    ("old-server", "warning", server(missing_features=("consumer reset",)), "2.15.1 has no consumer reset"),
    ("old-server", "note", server(missing_features=("fast ingest",)), "no fast ingest"),
    ("server-fault", "warning", server(version=(2, 12, 4)), "(#7819)"),
    ("server-fault", "note", stream(retention="workqueue"), "(#3272)"),
    ("clock", "warning", server(clock_ahead_s=-2.0, clock_error_s=0.5), "2.0 s behind"),
    ("sync-interval", "warning", server(sync_s={"n1": 1.0, "n2": 120.0}), "n2 writes to disk for good every 120 s"),
    ("permission", "warning", replace(FINE, unread=(Unread("$JS.API.INFO", "alice may not"),)), "alice may not"),
    ("interest-retention", "error", stream(retention="interest"), "read by g, e, f"),
    ("shared-work-queue", "error", stream(retention="workqueue"), "read by g, e, f"),
    ("per-subject-limit", "warning", stream(max_per_subject=1), "keeps 1 messages of each subject"),
    ("discard-old", "note", stream(max_messages=100, messages=10), "10% full"),
    ("discard-old", "warning", stream(max_bytes=100, bytes=95), "95% full"),
    ("discard-old", "warning", stream(max_messages=100, retention="workqueue"), "0% full"),
    ("duplicate-window", "warning", stream(duplicate_window_s=10), "remembered for 10 s"),
    ("async-persistence", "warning", stream(is_async=True), "before they are written"),
    ("replicas", "warning", CLUSTER, "on one of its nodes"),
    (
        "bucket-replicas",
        "warning",
        replace(
            CLUSTER,
            streams={
                **FINE.streams,
                "ORDERS": replace(STREAM, replicas=3),
                "KV_keylane-fleets": DiagnosedStream(name="KV_keylane-fleets"),
            },
        ),
        "on 1 node, their streams on up to 3",
    ),
    ("transform-unusable", "error", stream(numbering=None, transform_problem="odd"), "odd"),
    ("transform-missing", "error", stream(numbering=None, carries_numbers=False), "puts no partition number"),
    (
        "transform-differs",
        "error",
        stream(numbering=replace(BY, partitions=8)),
        "numbers 8 partitions, and ORDERS/g has 4",
    ),
    (
        "transform-differs",
        "error",
        elastic(transforms=(("orders.*", "{{Partition(8,1)}}.orders.*"),)),
        "ORDERS-e numbers",
    ),
    ("transform-differs", "error", a_fleet(numbers=8), "ORDERS/f has 8"),
    ("unnumbered-subjects", "error", stream(subjects=("orders.*", "refunds.*")), "stores refunds.*"),
    ("max-consumers", "error", stream(max_consumers=5), "takes 5 consumers, and its groups and fleets need 6"),
    ("slow-filters", "warning", stream(distinct_subjects=640), "up to 2 filters, on 640 distinct"),
    (
        "many-filters",
        "warning",
        consumers("ORDERS", running("ORDERS", "g-a", *(f"{number}.>" for number in range(501))), without="g-a"),
        "g-a has 501 filters",
    ),
    (
        "raft-groups",
        "warning",
        replace(stream(replicas=3), fleets=(replace(FLEET, partitions=tuple(map(str, range(101)))),)),
        "its 101 partitions have a replicated consumer each",
    ),
    ("broken-record", "error", group(problem="the record is no JSON"), "no JSON"),
    ("broken-record", "error", a_fleet(problem="the record is no JSON"), "no JSON"),
    ("stream-missing", "error", replace(FINE, streams={"ORDERS-e": QUEUE}), "no stream ORDERS, but a record"),
    ("stream-missing", "error", a_fleet(reads="ORDERS-f"), "stream ORDERS-f, which it reads, is gone"),
    ("queue-missing", "error", replace(FINE, streams={"ORDERS": STREAM}), "stream ORDERS-e, is gone"),
    ("idle-members", "warning", group(plan=balanced(list("abcde"), 4)), "5 members share 4 partitions: e owns none"),
    ("uneven-shares", "note", group(plan=Plan({"a": [0, 1, 2], "b": [3]})), "owns 3 partitions, another 1"),
    ("unowned-partitions", "error", elastic(plan=Plan({"a": [0]})), "partitions 1-3 belong to no member"),
    ("unowned-partitions", "warning", a_fleet(owned=frozenset("012")), "1 of 4 partitions have no owner; 1 worker"),
    ("unowned-partitions", "error", a_fleet(owned=frozenset(), workers=frozenset()), "4 of 4"),
    ("absent-members", "warning", consumers("ORDERS", without="g-a"), "no instance of a runs"),
    (
        "absent-members",
        "error",
        consumers("ORDERS", running("ORDERS", "g-a", is_pinned=False, pending=7), without="g-a"),
        "no instance of a runs, and 7 messages wait",
    ),
    (
        "orphaned-consumer",
        "warning",
        consumers("ORDERS", running("ORDERS", "x-a", is_pinned=False)),
        "x-a belongs",
    ),
    (
        "orphaned-stream",
        "warning",
        replace(FINE, groups=(STATIC,), consumers={"ORDERS": FINE.consumers["ORDERS"]}),
        "copies ORDERS for a group",
    ),
    (
        "orphaned-stream",
        "warning",
        replace(FINE, streams={**FINE.streams, "C": DiagnosedStream(name="C", fleet_copy_of="ORDERS/old")}),
        "copies a stream",
    ),
    (
        "name-collision",
        "error",
        replace(
            FINE, groups=(*FINE.groups, replace(STATIC, group="g-x"), replace(STATIC, plan=Plan({"x-a": range(4)})))
        ),
        "share the consumer g-x-a",
    ),
    ("name-collision", "error", a_fleet(fleet="g"), "a static group and fleet have this name"),
    (
        "flapping-pin",
        "warning",
        replace(FINE, pin_timeouts={("ORDERS", "g-a"): 2}, watched_s=15),
        "g-a timed out 2 times in 15 s (timeout 5 s)",
    ),
    ("flapping-lease", "warning", a_fleet(emergencies=3), "3 times in ten minutes"),
    (
        "redeliveries",
        "note",
        consumers("ORDERS", running("ORDERS", "g-a", redelivered=5, ack_wait_s=2), without="g-a"),
        "5 messages in flight were delivered before, most in g-a (ack_wait 2 s)",
    ),
]


@pytest.mark.parametrize(("rule", "severity", "facts", "words"), WRONG, ids=[f"{one[0]}-{one[1]}" for one in WRONG])
def test_a_rule(rule: str, severity: str, facts: DoctorFacts, words: str) -> None:
    said = found(facts, rule)
    assert [one for one in said if words in one.what and one.severity == severity], diagnose(facts)
    assert all(one.why and one.fix and one.where for one in said)


FINE_TOO: list[tuple[str, DoctorFacts]] = [
    ("server-fault", server(version=(2, 14, 5), is_clustered=True)),
    ("clock", server(clock_ahead_s=1.4, clock_error_s=0.5)),
    ("clock", server(clock_ahead_s=None)),
    ("sync-interval", server(sync_s=None)),
    ("max-consumers", replace(stream(max_consumers=-1), server=replace(SERVER, version=(2, 14, 0)))),
    ("slow-filters", stream(distinct_subjects=640, storage="memory")),
    ("slow-filters", stream(distinct_subjects=100_000)),
    ("raft-groups", replace(stream(replicas=3), fleets=(replace(FLEET, is_replicated=False),))),
    ("transform-missing", stream(numbering=None, carries_numbers=None)),
    ("absent-members", replace(FINE, consumers={})),
    ("absent-members", consumers("ORDERS", running("ORDERS", "g-a", is_pinned=False, waiting=1), without="g-a")),
    ("orphaned-consumer", consumers("ORDERS", running("ORDERS", "x-a"))),
    ("orphaned-consumer", consumers("ORDERS", running("ORDERS", "x", pin_group=None, is_pinned=False))),
    ("flapping-pin", replace(FINE, pin_timeouts={("ORDERS", "g-a"): 1})),
    ("unowned-partitions", a_fleet(owned=frozenset(), is_changing=True)),
]


@pytest.mark.parametrize(("rule", "facts"), FINE_TOO)
def test_a_rule_says_nothing(rule: str, facts: DoctorFacts) -> None:
    assert found(facts, rule) == []


def test_the_worst_comes_first() -> None:
    facts = replace(stream(retention="interest"), server=replace(SERVER, missing_features=("fast ingest",)))
    severities = [one.severity for one in diagnose(facts)]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    assert len(set(severities)) > 1


# ---- faults of the server -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("issue", "affected", "fixed"),
    [
        (7819, [(2, 11, 17), (2, 12, 4)], [(2, 12, 5), (2, 14, 0), (2, 15, 1)]),
        (7014, [(2, 11, 5)], [(2, 11, 6), (2, 12, 0), (2, 15, 0)]),
        (8423, [(2, 14, 0), (2, 14, 5)], [(2, 12, 15), (2, 15, 0)]),
        (8240, [(2, 12, 9), (2, 14, 1)], [(2, 11, 17), (2, 12, 10), (2, 14, 2)]),
        (3272, [(2, 11, 0), (2, 15, 1), (3, 0, 0)], []),
    ],
)
def test_which_versions_have_a_fault(
    issue: int, affected: list[tuple[int, int, int]], fixed: list[tuple[int, int, int]]
) -> None:
    [fault] = [one for one in ALL_FAULTS if one.issue == issue]
    assert [fault.concerns(one) for one in affected] == [True] * len(affected)
    assert [fault.concerns(one) for one in fixed] == [False] * len(fixed)


def test_a_fault_names_the_nearest_release_without_it() -> None:
    [unpin] = [one for one in ALL_FAULTS if one.issue == 7819]
    assert [unpin.remedy(one) for one in [(2, 11, 3), (2, 12, 3)]] == ["2.12.5", "2.12.5"]
    assert [one.remedy((2, 15, 1)) for one in ALL_FAULTS if one.fixed is None] == [None]
    assert len({one.issue for one in ALL_FAULTS}) == len(ALL_FAULTS)

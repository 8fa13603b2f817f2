"""Which consumer is a partition's old one, what stands in the way, and when to go back."""

from __future__ import annotations

import pytest

from keylane.core.fleet_partitions import listed
from keylane.core.migration import STEPS, MigrationState, OldConsumer, ServiceLevel, ServiceWindow, must_roll_back
from keylane.core.migration import match_consumers as match

PARTITIONS = listed(["dc.t1", "dc.t2"]).resolve().partitions
FIRST, SECOND = (one.id for one in PARTITIONS)


def old(name: str, *filters: str, acks: str = "explicit", is_push: bool = False) -> OldConsumer:
    return OldConsumer(name=name, filters=filters, acks=acks, is_push=is_push)


def test_the_only_consumer_with_the_filter_alone_is_the_old_one() -> None:
    found = match(PARTITIONS, [old("a", "dc.t1"), old("b", "dc.t2"), old("all", "dc.>"), old("f-p1", "dc.t1")], "f-p")
    assert found.old == {FIRST: "a", SECOND: "b"}
    assert found.obstacles == ()


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ([], f"no consumer has the filter of partition {SECOND} alone"),
        ([old("b", "dc.t2", "dc.t3")], f"no consumer has the filter of partition {SECOND} alone"),
        ([old("b", "dc.t2"), old("c", "dc.t2")], "has several consumers (b, c)"),
        ([old("b", "dc.t2", acks="none")], "consumer 'b' has ack policy none"),
        ([old("b", "dc.t2", is_push=True)], "consumer 'b' is a push consumer"),
    ],
)
def test_what_stands_in_the_way(second: list[OldConsumer], said: str) -> None:
    found = match(PARTITIONS, [old("a", "dc.t1"), *second], "f-p")
    assert found.old == {FIRST: "a"}
    assert len(found.obstacles) == 1
    assert said in found.obstacles[0]


def window(deliveries: int = 100, redelivered: int = 0, oldest_s: float | None = None) -> ServiceWindow:
    return ServiceWindow(deliveries=deliveries, redelivered=redelivered, oldest_s=oldest_s)


def test_only_so_many_bad_windows_in_a_row_are_too_many() -> None:
    level = ServiceLevel(redelivered=0.03, oldest_s=10, windows=3)
    good, bad, late = window(redelivered=3), window(redelivered=4), window(oldest_s=11)
    assert must_roll_back([bad, bad, good, bad, bad], level) is None
    assert must_roll_back([good, bad, bad, bad], level) == (
        "4.0% of the deliveries were redeliveries, 3.0% are allowed, for 3 windows in a row"
    )
    assert must_roll_back([bad, bad, late], level) == (
        "the oldest message waits for 11.0 s, 10 s are allowed, for 3 windows in a row"
    )
    assert must_roll_back([window(0), window(0), window(0)], level) is None


def test_every_state_but_the_last_has_a_step() -> None:
    for state in MigrationState:
        assert any(state in states for states in STEPS.values()) == (state is not MigrationState.FINISHED)

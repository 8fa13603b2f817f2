"""What is handled of a partition that shares its consumer."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from keylane.core.fleet_records import HandledBut
from keylane.core.partition_deliveries import PartitionDeliveries


@dataclass(eq=False)
class Delivery:
    settled: bool = False


def test_the_position_is_below_the_lowest_that_is_open() -> None:
    deliveries = PartitionDeliveries(10)
    given_out = {sequence: Delivery() for sequence in (12, 15, 19)}
    for sequence, one in given_out.items():
        deliveries.offered(sequence, one)
    assert deliveries.position == 11
    given_out[15].settled = True
    assert deliveries.position == 11
    assert deliveries.is_handled(15)
    assert not deliveries.is_handled(12)
    given_out[12].settled = True
    assert deliveries.position == 18
    given_out[19].settled = True
    assert deliveries.position == 19


def test_a_newer_delivery_of_what_is_open_takes_its_place() -> None:
    deliveries = PartitionDeliveries(0)
    first, second = Delivery(), Delivery()
    deliveries.offered(1, first)
    deliveries.offered(1, second)
    first.settled = True
    assert not deliveries.is_handled(1), "only the newest delivery counts"
    second.settled = True
    assert deliveries.is_handled(1)


def test_one_message_that_stays_open_does_not_keep_the_others() -> None:
    deliveries = PartitionDeliveries(0)
    deliveries.offered(1, Delivery())
    for sequence in range(2, 10_000):
        deliveries.offered(sequence, Delivery(settled=True))
    assert len(deliveries._open) < 200
    assert deliveries.is_handled(5000)
    assert deliveries.position == 0


def test_what_an_owner_before_has_handled_above_a_failing_message() -> None:
    before = PartitionDeliveries(0)
    for sequence in (1, 2, 3, 4):
        before.offered(sequence, Delivery(settled=sequence not in (2, 4)))
    assert (before.position, before.gap) == (1, HandledBut(4, frozenset({2, 4})))
    after = PartitionDeliveries(before.position, before.gap)
    assert [after.is_handled(sequence) for sequence in range(1, 7)] == [True, False, True, False, False, False]
    second = Delivery()
    after.offered(2, second)
    after.passed(3)
    assert (after.position, after.gap) == (1, HandledBut(3, frozenset({2})))
    second.settled = True
    assert (after.position, after.gap) == (3, None)


@given(st.lists(st.integers(min_value=0, max_value=200), max_size=300))
def test_against_a_set_of_what_is_done(order: list[int]) -> None:
    deliveries, known = PartitionDeliveries(0), {sequence: Delivery() for sequence in range(1, 101)}
    for sequence, one in known.items():
        deliveries.offered(sequence, one)
    for sequence in order:
        if sequence in known:
            known[sequence].settled = True
        else:
            assert deliveries.position == min((one for one, it in known.items() if not it.settled), default=101) - 1
    assert [deliveries.is_handled(one) for one in known] == [it.settled for it in known.values()]

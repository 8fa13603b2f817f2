"""When a heartbeat is due, and when an owner is too slow."""

from __future__ import annotations

import pytest

from keylane.core.heartbeat_pace import Pace, heartbeat_delay_s
from keylane.errors import InvalidInput


def after(*samples: tuple[int, int]) -> Pace:
    pace = Pace()
    for position, end in samples:
        pace = pace.sampled(position, end)
    return pace


@pytest.mark.parametrize("interval_s", [1.0, 10.0, 60.0])
def test_heartbeats_are_spread_and_in_time(interval_s: float) -> None:
    delays = [heartbeat_delay_s(interval_s, fraction / 10) for fraction in range(11)]
    assert delays == sorted(delays)
    assert delays[0] == pytest.approx(0.6 * interval_s)
    assert delays[-1] == pytest.approx(0.9 * interval_s)


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_fraction_that_cannot_be(fraction: float) -> None:
    with pytest.raises(InvalidInput, match="from 0 to 1"):
        heartbeat_delay_s(10, fraction)


def test_velocities() -> None:
    pace = after((0, 100), (10, 150), (40, 200))
    assert (pace.velocity, pace.inflow) == (20.0, 50.0)
    assert (after((5, 9)).velocity, Pace().inflow) == (0.0, 0.0)


def test_only_the_last_ten_samples_count() -> None:
    pace = after(*((0, 0) for _ in range(20)), *((100 * step, 0) for step in range(10)))
    assert len(pace.samples) == 10
    assert pace.velocity == 100.0


def test_three_bad_cycles_in_a_row() -> None:
    slow = [(10 * step, 1000 + 100 * step) for step in range(5)]
    assert [after(*slow[:count]).bad_cycles for count in range(1, 6)] == [0, 1, 2, 3, 4]
    assert [after(*slow[:count]).is_behind for count in range(1, 6)] == [False, False, False, True, True]


def test_a_good_cycle_starts_the_count_anew() -> None:
    pace = after((0, 1000), (10, 1100), (20, 1200))
    assert pace.bad_cycles == 2
    assert pace.sampled(1300, 1300).bad_cycles == 0


def test_far_behind_and_catching_up_is_healthy() -> None:
    assert after(*((100 * step, 1_000_000 + 99 * step) for step in range(8))).bad_cycles == 0


def test_as_fast_as_what_comes_in_is_not_enough_when_behind() -> None:
    assert after(*((100 * step, 1_000_000 + 100 * step) for step in range(4))).is_behind


def test_nearly_there_is_healthy() -> None:
    """It will have caught up two cycles from now, though more comes in than it does."""
    assert after((0, 80), (30, 90), (60, 120)).bad_cycles == 0
    assert after((0, 80), (30, 90), (60, 160)).bad_cycles == 1
    assert after((0, 50), (100, 300)).bad_cycles == 0, "at 300 in two cycles"
    assert after((0, 50), (100, 301)).bad_cycles == 1


def test_stuck_at_the_end_is_healthy_and_stuck_before_it_is_not() -> None:
    assert after(*((500, 500) for _ in range(6))).bad_cycles == 0
    assert after(*((499, 500) for _ in range(4))).is_behind

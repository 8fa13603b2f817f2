"""When processes are started again."""

from __future__ import annotations

from keylane.core.process_restarts import LONGEST_PAUSE_S, STABLE_S, Restarts


def test_the_pause_doubles_and_the_third_end_is_a_crash_loop() -> None:
    restarts = Restarts()
    ends = [restarts.ended(0.0) for _ in range(12)]
    assert [one.pause_s for one in ends[:4]] == [0.2, 0.4, 0.8, 1.6]
    assert [one.is_crash_loop for one in ends[:4]] == [False, False, True, True]
    assert ends[-1].pause_s == LONGEST_PAUSE_S


def test_a_process_that_was_at_work_for_long_starts_again_at_once() -> None:
    restarts = Restarts()
    for _ in range(5):
        restarts.ended(STABLE_S - 1)
    assert restarts.failures == 5
    assert restarts.ended(STABLE_S) == (0.0, False)
    assert restarts.ended(0.0) == (0.2, False)

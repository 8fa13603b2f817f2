"""Delayed retries: the delays, how often a message is tried, and what they cannot be combined with."""

from __future__ import annotations

from typing import Any

import pytest

from keylane.core.retry_delays import (
    check_retry_delays,
    checked_delays,
    delay_after,
    due_subject,
    retry_subjects,
    total_tries,
    waiting_subject,
)
from keylane.core.subjects import matches
from keylane.errors import InvalidInput


def test_each_delay_is_one_more_try_and_the_last_one_counts_for_all_others() -> None:
    delays = checked_delays([5, 60])
    assert delays == (5.0, 60.0)
    assert checked_delays(None) is None
    assert total_tries(delays, None) == 3
    assert total_tries(delays, 5) == 5
    assert [delay_after(delays, tries) for tries in range(1, 5)] == [5.0, 60.0, 60.0, 60.0]


@pytest.mark.parametrize("delays", [(), "5", 5, (0,), (-1,), (True,), ("5",), (float("nan"),), (float("inf"),), (1e9,)])
def test_delays_that_are_none_are_refused(delays: Any) -> None:
    with pytest.raises(InvalidInput, match="retry_delays"):
        checked_delays(delays)


def test_fewer_tries_than_delays_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"max_tries is 2.*give at least 3"):
        total_tries((1.0, 2.0), 2)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"after_tries": "park"}, "after_tries='park' lets none pass"),
        ({"needs_order": True}, "needs each key's messages in order"),
        ({"order": "strict"}, "order='strict'"),
        ({"manual_ack": True}, "manual_ack"),
        ({"acks": False}, "acked when their handler returns"),
    ],
)
def test_what_promises_more_order_is_refused(changed: dict[str, Any], why: str) -> None:
    terms: dict[str, Any] = {
        "after_tries": "dead_letter",
        "order": "key",
        "manual_ack": False,
        "acks": True,
        "needs_order": False,
    }
    check_retry_delays(**terms)
    with pytest.raises(InvalidInput, match=why):
        check_retry_delays(**terms | changed)


def test_what_waits_and_what_is_due_are_told_apart() -> None:
    waiting, due = waiting_subject("S", "g", 7, 99, 1), due_subject("S", "g", 3)
    assert waiting != waiting_subject("S", "g", 7, 99, 2) != waiting_subject("S", "g", 7, 98, 2)
    assert matches(retry_subjects("S", "g"), waiting)
    assert matches(retry_subjects("S", "*"), due)
    assert matches(due_subject("S", "g", ">"), due)
    assert not matches(due_subject("S", "g", ">"), waiting)
    assert not matches(retry_subjects("S", "h"), due)

"""The credit of a pull reader, and the meaning of every status text."""

from __future__ import annotations

import pytest

from keylane.core.pulls import Meaning, Pull, PullWindow, Status, meaning_of

LARGE = 1 << 30


@pytest.mark.parametrize(
    ("code", "text", "meaning"),
    [
        (100, "Idle Heartbeat", Meaning.ALIVE),
        (400, "Bad Request - Priority Group missing", Meaning.INVALID),
        (404, "No Messages", Meaning.ENDED),
        (408, "Request Timeout", Meaning.ENDED),
        (409, "Consumer Deleted", Meaning.DELETED),
        (409, "Consumer is push based", Meaning.INVALID),
        (409, "Leadership Change", Meaning.INTERRUPTED),
        (409, "Server Shutdown", Meaning.INTERRUPTED),
        (409, "Exceeded MaxWaiting", Meaning.REFUSED),
        (409, "Exceeded MaxRequestBatch of 10", Meaning.LIMIT),
        (409, "Exceeded MaxRequestExpires of 1s", Meaning.LIMIT),
        (409, "Exceeded MaxRequestMaxBytes of 10", Meaning.LIMIT),
        (409, "Message Size Exceeds MaxBytes", Meaning.OUT_OF_BYTES),
        (409, "Batch Completed", Meaning.ENDED),
        (409, "something nobody has seen", Meaning.INVALID),
        (423, "Nats-Wrong-Pin-Id", Meaning.PIN_LOST),
        (503, "", Meaning.UNAVAILABLE),
        (599, "from the future", Meaning.INVALID),
    ],
)
def test_every_status_has_one_meaning(code: int, text: str, meaning: Meaning) -> None:
    assert meaning_of(Status(code, text)) is meaning


def test_asks_for_the_whole_window_and_again_at_half() -> None:
    window = PullWindow(1000, LARGE)
    assert window.ask(0, 0) == Pull(0, 1000)
    window.delivered(499, 100)
    assert window.ask(0, 0) is None
    window.delivered(1, 100)
    assert window.ask(0, 0) == Pull(0, 500)
    assert window.asked == 1000


def test_a_full_buffer_stops_the_asking() -> None:
    window = PullWindow(10, LARGE)
    window.ask(0, 0)
    window.delivered(10, 1)
    assert window.ask(10, 10) is None
    assert window.ask(6, 6) is None
    assert window.ask(5, 5) == Pull(0, 5)


@pytest.mark.parametrize("size", [1, 2, 3, 10, 301])
def test_the_low_water_mark_is_where_the_next_pull_is_due(size: int) -> None:
    for buffered in range(size + 1):
        for asked in range(size + 1 - buffered):
            window = PullWindow(size, LARGE)
            window.asked = asked
            is_due = buffered <= window.low_water
            assert (window.ask(buffered, 0) is not None) == (is_due or buffered == asked == 0)


def test_large_messages_shrink_the_window() -> None:
    window = PullWindow(1000, 1000)
    window.ask(0, 0)
    window.delivered(1000, 100)
    assert window.ask(0, 0) == Pull(0, 10)
    window.delivered(10, 100)
    assert window.ask(10, 1000) is None


def test_a_message_that_fills_the_window_still_gets_a_pull() -> None:
    window = PullWindow(10, 100)
    window.ask(0, 0)
    window.delivered(10, 5000)
    assert window.ask(0, 0) == Pull(0, 1)


def test_an_expired_pull_gives_back_what_it_did_not_deliver() -> None:
    window = PullWindow(100, LARGE)
    pull = window.ask(0, 0)
    assert pull is not None
    window.delivered(30, 1)
    assert window.answered(pull, Status(408, "Request Timeout", 70)) is Meaning.ENDED
    assert window.asked == 0


def test_answers_to_voided_pulls_mean_nothing() -> None:
    window = PullWindow(100, LARGE)
    old = window.ask(0, 0)
    assert old is not None
    window.void()
    new = window.ask(0, 0)
    assert new == Pull(1, 100)
    assert window.answered(old, Status(408, "Request Timeout", 100)) is None
    assert window.asked == 100


@pytest.mark.parametrize(
    "status", [Status(409, "Leadership Change"), Status(423, "Nats-Wrong-Pin-Id"), Status(503, "")]
)
def test_some_answers_void_everything(status: Status) -> None:
    window = PullWindow(100, LARGE)
    pull = window.ask(0, 0)
    assert pull is not None
    window.answered(pull, status)
    assert (window.asked, window.generation) == (0, 1)


def test_bytes_used_up_is_ordinary_and_a_message_beyond_a_whole_pull_is_not() -> None:
    window = PullWindow(100, 1000)
    pull = window.ask(0, 0)
    assert pull is not None
    text = "Message Size Exceeds MaxBytes"
    assert window.answered(pull, Status(409, text, 40)) is Meaning.OUT_OF_BYTES
    window.void()
    pull = window.ask(0, 0)
    assert pull is not None
    assert window.answered(pull, Status(409, text, pull.batch)) is Meaning.TOO_LARGE


def test_token_and_back() -> None:
    assert Pull.from_token(Pull(7, 500).token) == Pull(7, 500)

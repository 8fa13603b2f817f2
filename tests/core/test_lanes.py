"""Every rule of the lanes, one small history at a time."""

from __future__ import annotations

import pytest

from keylane.core.lanes import Arrival, Entry, Lanes, State


def make_lanes(
    *, max_tries: int | None = None, backoff_s: float = 10.0, remember: int = 100, arrived: str = ""
) -> Lanes[str]:
    """`arrived="1a 2b"`: messages 1 of key a and 2 of key b are here; the item of 1 is "1a"."""
    lanes: Lanes[str] = Lanes(max_tries=max_tries, backoff=lambda tries: backoff_s * tries, remember=remember)
    arrive(lanes, arrived)
    return lanes


def arrive(lanes: Lanes[str], messages: str) -> list[Arrival]:
    return [lanes.arrive(int(message[:-1]), message[-1], message) for message in messages.split()]


def take(lanes: Lanes[str]) -> Entry[str]:
    entry = lanes.take()
    assert entry is not None
    return entry


def take_all(lanes: Lanes[str]) -> list[Entry[str]]:
    """All that may start now, in the order in which they start."""
    return [take(lanes) for _ in range(lanes.ready)]


def started(lanes: Lanes[str]) -> list[int]:
    return [entry.sequence for entry in take_all(lanes)]


def run_to_the_end(lanes: Lanes[str]) -> list[int]:
    """One worker: take one, finish it, take the next."""
    order = []
    while (entry := lanes.take()) is not None:
        order.append(entry.sequence)
        lanes.finished(entry)
    return order


# ---- what may start ---------------------------------------------------------------------------------


def test_nothing_starts_where_nothing_arrived() -> None:
    lanes = make_lanes()
    assert lanes.take() is None
    assert (lanes.ready, len(lanes), list(lanes)) == (0, 0, [])


@pytest.mark.parametrize(
    ("arrived", "first", "order"),
    [
        ("1a", [1], [1]),
        ("1a 2a 3a", [1], [1, 2, 3]),
        ("1a 2b 3c", [1, 2, 3], [1, 2, 3]),
        ("1a 2a 3b 4b", [1, 3], [1, 3, 2, 4]),
        ("3a 1a 2a", [1], [1, 2, 3]),
        ("2a 3b 1a 9a 4a", [1, 3], [1, 3, 2, 4, 9]),
    ],
)
def test_one_of_each_key_may_start_and_the_lowest_sequence_goes_first(
    arrived: str, first: list[int], order: list[int]
) -> None:
    assert started(make_lanes(arrived=arrived)) == first
    assert run_to_the_end(make_lanes(arrived=arrived)) == order


def test_a_lane_waits_for_its_message_at_work_and_the_others_do_not() -> None:
    lanes = make_lanes(arrived="1a 2a 3b 4b")
    one, three = take_all(lanes)
    assert lanes.take() is None
    lanes.finished(three)
    assert started(lanes) == [4]
    lanes.finished(one)
    assert started(lanes) == [2]


def test_lanes_take_turns() -> None:
    """A lane with much to do goes to the back of the queue after each message."""
    assert run_to_the_end(make_lanes(arrived="1a 2a 3a 4b 5b 6c")) == [1, 4, 6, 2, 5, 3]


def test_a_lane_that_becomes_free_first_starts_first() -> None:
    lanes = make_lanes(arrived="1a 2b 3c 4a 5b 6c")
    one, two, three = take_all(lanes)
    for entry in (two, three, one):
        lanes.finished(entry)
    assert started(lanes) == [5, 6, 4]


def test_keys_may_be_any_hashable() -> None:
    lanes = make_lanes()
    lanes.arrive(1, ("eu", "42"), "x")
    lanes.arrive(2, ("eu", "42"), "y")
    lanes.arrive(3, 7, "z")
    assert started(lanes) == [1, 3]
    assert lanes.lengths()[("eu", "42")] == 2


# ---- arrivals out of order --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "late", "order"),
    [
        ("5a 9a", "7a", [5, 7, 9]),
        ("5a 9a", "3a", [5, 3, 9]),
        ("5a 9a", "3a 7a 4a", [5, 3, 4, 7, 9]),
        ("5a", "3a", [5, 3]),
        ("5a", "3a 8a 2a", [5, 2, 3, 8]),
    ],
)
def test_a_late_one_goes_before_those_that_wait_but_not_before_one_at_work(
    before: str, late: str, order: list[int]
) -> None:
    lanes = make_lanes(arrived=before)
    first = take(lanes)
    assert arrive(lanes, late) == [Arrival.QUEUED] * len(late.split())
    assert lanes.take() is None
    lanes.finished(first)
    assert [first.sequence, *run_to_the_end(lanes)] == order


def test_a_late_one_does_not_pass_a_failed_one() -> None:
    lanes = make_lanes(arrived="5a")
    lanes.failed(take(lanes), now=0.0)
    arrive(lanes, "3a")
    assert lanes.take() is None
    lanes.due(10.0)
    assert run_to_the_end(lanes) == [5, 3]


def test_a_late_one_does_not_pass_a_failed_one_whose_time_has_come() -> None:
    lanes = make_lanes(arrived="5a")
    lanes.failed(take(lanes), now=0.0)
    lanes.due(10.0)
    arrive(lanes, "3a")
    assert run_to_the_end(lanes) == [5, 3]


def test_a_late_one_takes_over_the_turn_of_its_lane() -> None:
    lanes = make_lanes(arrived="5a 6b 3a")
    assert lanes.ready == 2
    assert run_to_the_end(lanes) == [3, 6, 5]


def test_only_one_may_start_however_often_the_first_was_passed() -> None:
    lanes = make_lanes(arrived="9a 8a 7a 6a 5a")
    assert lanes.ready == 1
    assert [(entry.sequence, entry.state) for entry in lanes] == [
        (9, State.WAITING),
        (8, State.WAITING),
        (7, State.WAITING),
        (6, State.WAITING),
        (5, State.READY),
    ]
    assert started(lanes) == [5]


# ---- failures ---------------------------------------------------------------------------------------


def test_a_failed_one_holds_its_lane_and_runs_again_in_place() -> None:
    lanes = make_lanes(arrived="1a 2a 3b")
    one, three = take_all(lanes)
    assert lanes.failed(one, now=100.0) == 110.0
    lanes.finished(three)
    assert (one.state, one.tries, one.retry_at) == (State.RETRYING, 1, 110.0)
    assert lanes.take() is None
    assert lanes.due(109.9) == 110.0
    assert lanes.take() is None
    assert lanes.due(110.0) is None
    assert take(lanes) is one
    lanes.finished(one)
    assert started(lanes) == [2]


def test_backoff_is_asked_with_the_number_of_failures() -> None:
    lanes = make_lanes(arrived="1a")
    at = []
    for _ in range(3):
        retry_at = lanes.failed(take(lanes), now=0.0)
        assert retry_at is not None
        at.append(retry_at)
        lanes.due(retry_at)
    assert at == [10.0, 20.0, 30.0]


def test_no_backoff_means_ready_at_the_same_time() -> None:
    lanes = make_lanes(arrived="1a", backoff_s=0.0)
    assert lanes.failed(take(lanes), now=5.0) == 5.0
    assert lanes.ready == 0
    assert lanes.due(5.0) is None
    assert started(lanes) == [1]


@pytest.mark.parametrize("max_tries", [1, 2, 5])
def test_after_max_tries_it_is_to_be_given_up_and_giving_up_frees_the_lane(max_tries: int) -> None:
    lanes = make_lanes(arrived="1a 2a", max_tries=max_tries, backoff_s=0.0)
    for tries in range(1, max_tries):
        entry = take(lanes)
        assert lanes.failed(entry, now=0.0) == 0.0
        assert (entry.sequence, entry.tries) == (1, tries)
        lanes.due(0.0)
    last = take(lanes)
    assert lanes.failed(last, now=0.0) is None
    assert (last.state, last.tries) == (State.RUNNING, max_tries)
    assert (lanes.due(1e9), lanes.take()) == (None, None), "it holds its lane until it is put away"
    lanes.finished(last)
    assert arrive(lanes, "1a") == [Arrival.DONE]
    assert started(lanes) == [2]


def test_without_max_tries_it_is_never_given_up() -> None:
    lanes = make_lanes(arrived="1a", backoff_s=0.0)
    for _ in range(1000):
        assert lanes.failed(take(lanes), now=0.0) == 0.0
        lanes.due(0.0)


def test_a_backoff_that_raises_leaves_the_message_at_work() -> None:
    def broken(tries: int) -> float:
        raise OverflowError(tries)

    lanes: Lanes[str] = Lanes(max_tries=None, backoff=broken, remember=0)
    arrive(lanes, "1a 2a")
    entry = take(lanes)
    with pytest.raises(OverflowError):
        lanes.failed(entry, now=0.0)
    lanes.finished(entry)
    assert started(lanes) == [2]


def test_due_wakes_each_whose_time_has_come_and_names_the_next_time() -> None:
    lanes = make_lanes(arrived="1a 2b 3c 4d")
    assert lanes.due(0.0) is None
    for entry, now in zip(take_all(lanes), (30.0, 10.0, 20.0, 10.0), strict=True):
        lanes.failed(entry, now)
    assert lanes.due(0.0) == 20.0
    assert lanes.due(20.0) == 30.0
    assert started(lanes) == [2, 4]
    assert lanes.due(25.0) == 30.0
    assert lanes.due(1000.0) is None
    assert started(lanes) == [3, 1]


# ---- deliveries of what is known --------------------------------------------------------------------


@pytest.mark.parametrize("state", list(State))
def test_an_early_redelivery_is_held_and_the_newest_delivery_is_kept(state: State) -> None:
    lanes = make_lanes(arrived="1a")
    if state is State.WAITING:
        lanes = make_lanes(arrived="0a 1a")
    elif state is not State.READY:
        entry = take(lanes)
        if state is State.RETRYING:
            lanes.failed(entry, now=0.0)
    count, ready = len(lanes), lanes.ready
    (held,) = [entry for entry in lanes if entry.sequence == 1]
    assert held.state is state

    assert lanes.arrive(1, "a", "second") is Arrival.HELD
    assert lanes.arrive(1, "a", "third") is Arrival.HELD

    assert (held.item, held.state, held.tries) == ("third", state, int(state is State.RETRYING))
    assert (len(lanes), lanes.ready, lanes.lengths()["a"]) == (count, ready, count)


def test_a_held_one_runs_once() -> None:
    lanes = make_lanes(arrived="1a 2a 1a 2a 1a")
    first = take(lanes)
    arrive(lanes, "1a 2a")
    lanes.finished(first)
    assert run_to_the_end(lanes) == [2]


def test_a_finished_one_is_done_as_long_as_it_is_remembered() -> None:
    lanes = make_lanes(arrived="1a 2b 3c 4d", remember=3)
    assert run_to_the_end(lanes) == [1, 2, 3, 4]
    assert arrive(lanes, "4d 3c 2b") == [Arrival.DONE] * 3
    assert (len(lanes), lanes.ready, lanes.lengths()["d"]) == (0, 0, 0)
    assert arrive(lanes, "1a") == [Arrival.QUEUED]
    assert run_to_the_end(lanes) == [1]
    assert arrive(lanes, "1a 4d 3c") == [Arrival.DONE] * 3
    assert arrive(lanes, "2b") == [Arrival.QUEUED]


def test_those_that_finished_first_are_no_longer_remembered_first() -> None:
    lanes = make_lanes(arrived="1a 2b 3c", remember=2)
    one, two, three = take_all(lanes)
    for entry in (three, one, two):
        lanes.finished(entry)
    assert arrive(lanes, "1a 2b 3c") == [Arrival.DONE, Arrival.DONE, Arrival.QUEUED]


def test_nothing_is_remembered_where_nothing_is_to_be_remembered() -> None:
    lanes = make_lanes(arrived="1a", remember=0)
    assert run_to_the_end(lanes) == [1]
    assert arrive(lanes, "1a") == [Arrival.QUEUED]


# ---- release and forget -----------------------------------------------------------------------------


def test_a_released_one_runs_when_it_is_delivered_again() -> None:
    lanes = make_lanes(arrived="1a")
    lanes.release(take(lanes))
    assert (len(lanes), lanes.lengths()["a"], lanes.take()) == (0, 0, None)
    assert arrive(lanes, "1a") == [Arrival.QUEUED]
    assert run_to_the_end(lanes) == [1]


def test_a_released_one_frees_its_lane() -> None:
    lanes = make_lanes(arrived="1a 2a")
    lanes.release(take(lanes))
    assert started(lanes) == [2]


def test_forget_then_release_then_deliver_again_keeps_the_order() -> None:
    lanes = make_lanes(arrived="1a 2a 3a")
    first = take(lanes)
    assert lanes.forget() == ["2a", "3a"]
    lanes.release(first)
    assert lanes.take() is None
    assert arrive(lanes, "1a 2a 3a") == [Arrival.QUEUED] * 3
    assert run_to_the_end(lanes) == [1, 2, 3]


def test_forget_drops_all_but_what_is_at_work() -> None:
    lanes = make_lanes(arrived="1a 2b 3c 4a 5b 6d")
    one, two, _three, _six = take_all(lanes)
    lanes.failed(two, now=0.0)
    arrive(lanes, "7e")
    assert lanes.forget() == ["2b", "4a", "5b", "7e"]
    assert [entry.sequence for entry in lanes] == [1, 3, 6]
    assert (lanes.ready, lanes.due(1e9), lanes.take()) == (0, None, None)
    lanes.finished(one)
    assert lanes.take() is None
    assert arrive(lanes, "1a 2b 3c 4a 5b 6d 7e") == [
        Arrival.DONE,
        Arrival.QUEUED,
        Arrival.HELD,
        Arrival.QUEUED,
        Arrival.QUEUED,
        Arrival.HELD,
        Arrival.QUEUED,
    ]
    assert run_to_the_end(lanes) == [2, 4, 7, 5]


def test_forget_with_a_predicate_asks_with_the_newest_delivery() -> None:
    lanes = make_lanes(arrived="1a 2b 3a")
    lanes.arrive(3, "a", "new")
    assert lanes.forget(lambda item: item == "new") == ["new"]
    assert lanes.forget(lambda item: item == "3a") == []
    assert run_to_the_end(lanes) == [1, 2]


def test_forget_with_a_predicate_leaves_the_other_lanes_and_their_turns_alone() -> None:
    lanes = make_lanes(arrived="1a 2b 3c 4a 5b 6c")
    assert lanes.forget(lambda item: item.endswith("b")) == ["2b", "5b"]
    assert (lanes.ready, lanes.lengths()["b"], lanes.lengths()["a"]) == (2, 0, 2)
    assert run_to_the_end(lanes) == [1, 3, 4, 6]


@pytest.mark.parametrize(
    ("dropped", "order"),
    [
        ("1a", [2, 4, 3]),
        ("2a", [1, 4, 3]),
        ("3a", [1, 4, 2]),
        ("1a 2a", [3, 4]),
        ("1a 3a", [2, 4]),
        ("1a 2a 3a", [4]),
    ],
)
def test_a_lane_goes_on_with_what_is_left_of_it_at_its_turn(dropped: str, order: list[int]) -> None:
    lanes = make_lanes(arrived="1a 2a 3a 4b")
    assert lanes.forget(lambda item: item in dropped.split()) == dropped.split()
    assert (lanes.ready, len(lanes)) == (min(2, len(order)), len(order))
    assert run_to_the_end(lanes) == order


def test_forgetting_a_failed_one_frees_its_lane_and_its_retry() -> None:
    lanes = make_lanes(arrived="1a 2a 3b")
    lanes.failed(take(lanes), now=0.0)
    assert lanes.forget(lambda item: item == "1a") == ["1a"]
    assert lanes.due(0.0) is None
    assert run_to_the_end(lanes) == [3, 2]


def test_a_failed_one_that_was_forgotten_comes_back_as_new() -> None:
    """Its old retry time must not wake it."""
    lanes = make_lanes(arrived="1a", max_tries=2)
    first = take(lanes)
    lanes.failed(first, now=0.0)
    lanes.forget()
    arrive(lanes, "1a")
    again = take(lanes)
    assert again is not first
    assert lanes.failed(again, now=100.0) == 110.0
    assert lanes.due(50.0) == 110.0
    assert lanes.take() is None


def test_the_other_retries_stay_in_time_order_when_some_are_forgotten() -> None:
    lanes = make_lanes(arrived="1a 2b 3c 4d 5e")
    for entry, now in zip(take_all(lanes), (0.0, 40.0, 10.0, 50.0, 20.0), strict=True):
        lanes.failed(entry, now)
    lanes.forget(lambda item: item == "1a")
    assert lanes.due(0.0) == 20.0
    assert lanes.due(100.0) is None
    assert started(lanes) == [3, 5, 2, 4]


# ---- what can be seen -------------------------------------------------------------------------------


def test_counts() -> None:
    lanes = make_lanes(arrived="1a 2a 3b 4c")
    one, three = take(lanes), take(lanes)
    lanes.failed(three, now=0.0)
    assert (len(lanes), lanes.ready, lanes.running()) == (4, 1, 1)
    assert [lanes.lengths()[key] for key in "abcx"] == [2, 1, 1, 0]
    assert lanes.running(lambda item: item.endswith("a")) == 1
    assert lanes.running(lambda item: item.endswith("b")) == 0
    assert repr(lanes) == "<Lanes 4 messages in 3 lanes, 1 ready>"
    assert repr(one) == "<Entry 1 of 'a' running tries=0>"
    assert repr(three) == "<Entry 3 of 'b' retrying tries=1>"


def test_what_is_here_may_change_while_it_is_looked_through() -> None:
    lanes = make_lanes(arrived="1a 2b 3c")
    seen = []
    for entry in lanes:
        lanes.forget()
        seen.append(entry.sequence)
    assert (seen, len(lanes)) == ([1, 2, 3], 0)


@pytest.mark.parametrize("call", ["finished", "failed", "release"])
def test_only_a_message_at_work_can_end(call: str) -> None:
    lanes = make_lanes(arrived="1a 2a")
    entry = take(lanes)
    lanes.failed(entry, now=0.0)
    with pytest.raises(AssertionError, match="<Entry 1 of 'a' retrying tries=1>"):
        getattr(lanes, call)(*((entry, 0.0) if call == "failed" else (entry,)))
    assert (len(lanes), lanes.ready) == (2, 0)


@pytest.mark.parametrize("arrived", ["1a", "1a 2a"])
def test_a_message_ends_once(arrived: str) -> None:
    lanes = make_lanes(arrived=arrived, remember=2)
    entry = take(lanes)
    lanes.finished(entry)
    for _ in range(5):
        with pytest.raises((AssertionError, KeyError)):
            lanes.finished(entry)
    assert arrive(lanes, "1a") == [Arrival.DONE]


def test_the_low_water_mark_is_reported_once_when_messages_leave() -> None:
    lanes = make_lanes()
    reported: list[int] = []
    arrive(lanes, "1a 2b 3c 4d")
    lanes.low_water, lanes.on_low_water = 2, lambda: reported.append(len(lanes))
    for entry in take_all(lanes):
        (lanes.release if entry.sequence == 2 else lanes.finished)(entry)
    assert reported == [2]

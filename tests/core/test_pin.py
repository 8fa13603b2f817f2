"""The pin's table: complete, consistent with itself, and right in the stories it is made for."""

from __future__ import annotations

from itertools import product

import pytest

from keylane.core.pin import (
    LATE_ANSWERS,
    TRANSITIONS,
    Action,
    Delivered,
    Event,
    Phase,
    Pin,
    event_of,
    step,
)

A, E, P = Action, Event, Phase

DELIVERIES = {E.FIRST, E.LATER, E.SAME, E.RESTARTED, E.SKIPPED}
UNDER_OUR_PIN = {E.SAME, E.RESTARTED, E.SKIPPED}
TOLD = {P.AWAITING, P.PINNED, P.DOUBTING}
FATES = {A.DELIVER, A.HOLD, A.DROP}


def pin_in(phase: Phase) -> Pin:
    return Pin(phase, None if phase is P.STANDBY else "ours")


@pytest.mark.parametrize(("phase", "event"), list(product(Phase, Event)))
def test_every_event_has_its_place_in_every_phase(phase: Phase, event: Event) -> None:
    """In the table, or an answer that comes too late, or one of the three that cannot happen: never in two of them."""
    in_table = (phase, event) in TRANSITIONS
    # Without a pin of our own nothing can be delivered under it.
    impossible = phase is P.STANDBY and event in UNDER_OUR_PIN
    too_late = event in LATE_ANSWERS and not in_table
    assert [in_table, impossible, too_late].count(True) == 1


def test_a_reader_that_knows_where_it_is_resets_a_consumer_that_begins_elsewhere() -> None:
    first = Delivered("other", 1, False)
    assert event_of(Pin(), first, reset_on_takeover=True, resumes=True) is E.LATER
    assert event_of(Pin(P.PINNED, "ours"), first, reset_on_takeover=True, resumes=True) is E.LATER
    again = Delivered("ours", 1, False)
    assert event_of(Pin(P.AWAITING, "ours"), again, reset_on_takeover=True, resumes=True) is E.RESTARTED


@pytest.mark.parametrize(("key", "outcome"), TRANSITIONS.items())
def test_a_step_follows_the_table(key: tuple[Phase, Event], outcome: tuple[Phase, tuple[Action, ...]]) -> None:
    (phase, event), (after, actions) = key, outcome
    pin_id = pin_in(phase).pin_id
    if A.ADOPT in actions:
        pin_id = "theirs"
    elif A.DISCARD_ID in actions:
        pin_id = None
    delivered = Delivered("theirs" if event in (E.FIRST, E.LATER) else "ours", 1, True) if event in DELIVERIES else None
    assert step(pin_in(phase), event, delivered) == (Pin(after, pin_id), actions)


@pytest.mark.parametrize(
    ("phase", "event"), [one for one in product(Phase, Event) if one[1] in LATE_ANSWERS and one not in TRANSITIONS]
)
def test_an_answer_that_comes_too_late_changes_nothing(phase: Phase, event: Event) -> None:
    pin = pin_in(phase)
    assert step(pin, event) == (pin, ())


@pytest.mark.parametrize("event", [event for event in Event if event in UNDER_OUR_PIN])
def test_nothing_is_delivered_under_a_pin_that_nobody_has(event: Event) -> None:
    with pytest.raises(AssertionError, match="cannot happen"):
        step(Pin(), event)


@pytest.mark.parametrize("consumer_sequence", [1, 2, 9])
@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("reset_on_takeover", [True, False])
@pytest.mark.parametrize("pin", [Pin(), *(Pin(phase, "ours") for phase in Phase if phase is not P.STANDBY)])
def test_every_delivery_is_an_event_that_the_phase_knows(
    consumer_sequence: int, follows: bool, reset_on_takeover: bool, pin: Pin
) -> None:
    for pin_id in ("ours", "other"):
        delivered = Delivered(pin_id, consumer_sequence, follows)
        event = event_of(pin, delivered, reset_on_takeover=reset_on_takeover)
        after, _ = step(pin, event, delivered)
        assert (event in UNDER_OUR_PIN) == (pin.pin_id == pin_id)
        assert after.pin_id == pin_id
        if not reset_on_takeover:
            assert event in (E.SAME, E.FIRST)


@pytest.mark.parametrize(
    ("delivered", "event"),
    [
        (Delivered("other", 1, False), E.FIRST),
        (Delivered("other", 2, True), E.LATER),
        (Delivered("ours", 1, False), E.RESTARTED),
        (Delivered("ours", 5, True), E.SAME),
        (Delivered("ours", 5, False), E.SKIPPED),
    ],
)
def test_what_a_delivery_means(delivered: Delivered, event: Event) -> None:
    assert event_of(Pin(P.PINNED, "ours"), delivered, reset_on_takeover=True) is event


@pytest.mark.parametrize(("key", "outcome"), TRANSITIONS.items())
def test_the_table_agrees_with_itself(key: tuple[Phase, Event], outcome: tuple[Phase, tuple[Action, ...]]) -> None:
    (before, event), (after, actions) = key, outcome
    order = list(Action)
    assert list(actions) == sorted(actions, key=order.index), "actions are done in the order of their definition"
    assert len(set(actions)) == len(actions)
    # A delivery has one fate, and nothing else has one.
    assert len(FATES & set(actions)) == (1 if event in DELIVERIES else 0)
    # Handlers are given messages only where the phase says that they are good.
    assert not {A.DELIVER, A.RELEASE} & set(actions) or after is P.PINNED
    assert A.HOLD not in actions or after is P.DOUBTING
    # An id is kept exactly outside standby.
    leaves = after is P.STANDBY and before is not P.STANDBY
    assert (A.DISCARD_ID in actions) == (leaves or (before, event) == (P.STANDBY, E.REFUSED))
    assert (A.ADOPT in actions) == (event in (E.FIRST, E.LATER))
    # Told pinned and told unpinned take turns.
    told = before in TOLD
    if A.TELL_UNPINNED in actions:
        assert told
        told = False
    if A.TELL_PINNED in actions:
        assert not told
        told = True
    assert told == (after in TOLD)
    # What was buffered under one pin is never handed out after it.
    if before in (P.PINNED, P.DOUBTING) and A.TELL_UNPINNED in actions:
        assert A.FORGET in actions
    # Into a reset, and out of it only with its answer or without the pin.
    asks = after is P.RESETTING and (before is not P.RESETTING or event in (E.FIRST, E.LATER, E.RESET_FAILED))
    assert (A.RESET in actions) == asks
    assert (A.VERIFY in actions) == (event is E.STALLED and after is P.DOUBTING)
    if before is P.RESETTING and after is not P.RESETTING:
        assert event in (E.RESET_DONE, E.REFUSED, E.STALLED)


def play(*events: Event | Delivered, reset_on_takeover: bool = True) -> list[tuple[Phase, tuple[Action, ...]]]:
    """Step through events from standby; a delivery becomes the event that it means."""
    pin, story = Pin(), []
    for one in events:
        if isinstance(one, Delivered):
            event, delivered = event_of(pin, one, reset_on_takeover=reset_on_takeover), one
            pin, actions = step(pin, event, delivered)
        else:
            pin, actions = step(pin, one)
        story.append((pin.phase, actions))
    return story


def test_the_first_reader_of_a_consumer_needs_no_reset() -> None:
    assert play(Delivered("a", 1, False), Delivered("a", 2, True)) == [
        (P.PINNED, (A.ADOPT, A.TELL_PINNED, A.DELIVER)),
        (P.PINNED, (A.DELIVER,)),
    ]


def test_a_takeover_drops_what_it_is_given_and_resets() -> None:
    story = play(
        Delivered("b", 9, False),
        Delivered("b", 10, True),
        E.RESET_DONE,
        Delivered("b", 1, False),
        Delivered("b", 2, True),
    )
    assert story == [
        (P.RESETTING, (A.ADOPT, A.DROP, A.RESET)),
        (P.RESETTING, (A.DROP,)),
        (P.AWAITING, (A.TELL_PINNED,)),
        (P.PINNED, (A.DELIVER,)),
        (P.PINNED, (A.DELIVER,)),
    ]


def test_a_takeover_without_the_reset_hands_out_at_once() -> None:
    story = play(Delivered("b", 9, False), Delivered("b", 12, False), reset_on_takeover=False)
    assert [actions[-1] for _, actions in story] == [A.DELIVER, A.DELIVER]


def test_a_failed_reset_is_asked_for_again() -> None:
    assert play(Delivered("b", 9, False), E.RESET_FAILED, E.RESET_DONE)[1:] == [
        (P.RESETTING, (A.RESET,)),
        (P.AWAITING, (A.TELL_PINNED,)),
    ]


def test_a_missed_first_delivery_after_the_reset_is_not_waited_for() -> None:
    story = play(Delivered("b", 9, False), E.RESET_DONE, Delivered("b", 2, False))
    assert story[-1] == (P.RESETTING, (A.TELL_UNPINNED, A.DROP, A.RESET))


def test_lost_deliveries_are_fetched_by_a_reset() -> None:
    story = play(Delivered("a", 1, False), Delivered("a", 4, False), E.RESET_DONE, Delivered("a", 1, False))
    assert story[1] == (P.RESETTING, (A.TELL_UNPINNED, A.FORGET, A.DROP, A.RESET))
    assert story[3] == (P.PINNED, (A.DELIVER,))


def test_after_a_standstill_nothing_is_handed_out_before_the_server_agrees() -> None:
    story = play(Delivered("a", 1, False), E.STALLED, Delivered("a", 2, True), E.CONFIRMED)
    assert story[1:] == [
        (P.DOUBTING, (A.VERIFY,)),
        (P.DOUBTING, (A.HOLD,)),
        (P.PINNED, (A.RELEASE,)),
    ]
    assert play(Delivered("a", 1, False), E.STALLED, E.DENIED)[-1] == (
        P.STANDBY,
        (A.TELL_UNPINNED, A.FORGET, A.DISCARD_ID),
    )


def test_a_refused_pin_is_lost() -> None:
    assert play(Delivered("a", 1, False), E.REFUSED)[-1] == (P.STANDBY, (A.TELL_UNPINNED, A.FORGET, A.DISCARD_ID))
    # Who had not been told of a pin is not told of its loss.
    assert play(Delivered("b", 7, False), E.REFUSED)[-1] == (P.STANDBY, (A.FORGET, A.DISCARD_ID))


def test_a_standby_revives_a_consumer_without_a_reader() -> None:
    assert play(E.ORPHANED) == [(P.STANDBY, (A.REVIVE,))]


def test_reprs() -> None:
    assert repr(Pin()) == "<Pin standby>"
    assert repr(Pin(P.PINNED, "abc")) == "<Pin pinned abc>"
    assert [Pin(phase, "x").holds for phase in Phase] == [False, False, True, True, True]

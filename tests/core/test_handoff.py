"""How partitions move, one instance at a time: each row is a story of events and the action that follows each."""

from __future__ import annotations

import pytest

from keylane.core.handoff import (
    Action,
    AnyEvent,
    Close,
    Create,
    Delete,
    Drain,
    Finish,
    GiveBack,
    Handoff,
    HandoffEvent,
    Look,
    Looked,
    Narrow,
    Opened,
    PinReceived,
    Probe,
    Rename,
    Reset,
    Rewind,
    Style,
    Surprised,
    Wait,
    Want,
    Widen,
    changed,
    step,
)


def some(*partitions: int) -> frozenset[int]:
    return frozenset(partitions)


Story = list[tuple[AnyEvent, Action | None]]

IN_PLACE, RECREATE = Style.IN_PLACE, Style.RECREATE


def entered(*partitions: int, style: Style = IN_PLACE) -> Story:
    """Alone on a new consumer, pinned by its first message."""
    mine = some(*partitions)
    pinned: Story = [
        (PinReceived(anew=True), Look()),
        (Looked(mine, ours=True), Rewind()),
        (HandoffEvent.REWOUND, None),
    ]
    return [
        (Want(mine), Create(mine)),
        (Opened(mine, style), None),
        *(pinned if style is IN_PLACE else [(PinReceived(anew=True), None)]),
    ]


STORIES: dict[str, Story] = {
    "it enters when its partitions are free": [
        (Want(some(1, 2)), Create(some(1, 2))),
        (HandoffEvent.TAKEN, Wait.TAKEN),
        (Want(some(1, 2)), Create(some(1, 2))),
        (Opened(some(1, 2), IN_PLACE), None),
        (Want(some(1, 2)), None),
    ],
    "nothing is wanted": [(Want(some()), None)],
    "a takeover looks and rewinds": entered(1, 2),
    "a static group's takeover does not rewind": [
        (Want(some(1)), Create(some(1))),
        (Opened(some(1), IN_PLACE, durable=True), None),
        (PinReceived(anew=True), None),
    ],
    "the same pin again changes nothing": [
        *entered(1),
        (HandoffEvent.UNPINNED, Look()),
        (Looked(some(1), ours=True), None),
    ],
    "losing: drain, look, narrow, reset": [
        *entered(1, 2),
        (Want(some(1)), Look()),
        (Looked(some(1, 2), ours=True), Drain(some(2))),
        (HandoffEvent.DRAINED, Look()),
        (Looked(some(1, 2), ours=True), Narrow(some(1))),
        (HandoffEvent.NARROWED, Reset()),
        (HandoffEvent.RESET, None),
    ],
    "gaining: widen, rewind": [
        *entered(1),
        (Want(some(1, 2)), Look()),
        (Looked(some(1), ours=True), Widen(some(1, 2))),
        (HandoffEvent.WIDENED, Rewind()),
        (HandoffEvent.REWOUND, None),
    ],
    "gaining waits until the other has let go": [
        *entered(1),
        (Want(some(1, 2)), Look()),
        (Looked(some(1), ours=True), Widen(some(1, 2))),
        (HandoffEvent.TAKEN, Wait.TAKEN),
        (Want(some(1, 2)), Look()),
        (Looked(some(1), ours=True), Widen(some(1, 2))),
        (HandoffEvent.WIDENED, Rewind()),
    ],
    "removals come before additions": [
        *entered(1, 2),
        (Want(some(2, 3)), Look()),
        (Looked(some(1, 2), ours=True), Drain(some(1))),
        (HandoffEvent.DRAINED, Look()),
        (Looked(some(1, 2), ours=True), Narrow(some(2))),
        (HandoffEvent.NARROWED, Reset()),
        (HandoffEvent.RESET, Widen(some(2, 3))),
        (HandoffEvent.WIDENED, Rewind()),
        (HandoffEvent.REWOUND, None),
    ],
    "losing everything and getting others: give up, enter anew": [
        *entered(1),
        (Want(some(2)), Look()),
        (Looked(some(1), ours=True), Drain(some(1))),
        (HandoffEvent.DRAINED, Look()),
        (Looked(some(1), ours=True), Finish()),
        (HandoffEvent.FINISHED, Look()),
        (Looked(some(1), ours=True), Delete(surely=True)),
        (HandoffEvent.DELETED, Create(some(2))),
    ],
    "nothing is wanted any more": [
        *entered(1),
        (Want(some()), Finish()),
        (HandoffEvent.FINISHED, Look()),
        (Looked(some(1), ours=True), Delete(surely=True)),
        (HandoffEvent.DELETED, None),
    ],
    "giving up, and another instance turned active": [
        *entered(1),
        (Want(some()), Finish()),
        (HandoffEvent.FINISHED, Look()),
        (Looked(some(1), ours=False), Delete(surely=False)),
        (HandoffEvent.DELETED, None),
    ],
    "a standby gives up without finishing": [
        (Want(some(1)), Create(some(1))),
        (Opened(some(1), IN_PLACE), None),
        (Want(some()), Delete(surely=False)),
    ],
    "a standby leaves the move to the active instance": [
        (Want(some(1)), Create(some(1))),
        (Opened(some(1), IN_PLACE), None),
        (Want(some(1, 2)), Look()),
        (Looked(some(1), ours=False), Wait.STANDBY),
        (Want(some(1, 2)), Look()),
        (Looked(some(1, 2), ours=False), None),
    ],
    "if nobody is active, a standby moves the consumer and rewinds it": [
        (Want(some(1)), Create(some(1))),
        (Opened(some(1), IN_PLACE), None),
        (Want(some(1, 2)), Look()),
        (Looked(some(1), ours=True), Widen(some(1, 2))),
        (HandoffEvent.WIDENED, Rewind()),
        (HandoffEvent.REWOUND, None),
    ],
    "in doubt it changes nothing": [
        *entered(1),
        (HandoffEvent.DOUBTED, Wait.IN_DOUBT),
        (Want(some(1, 2)), Wait.IN_DOUBT),
        (HandoffEvent.CONFIRMED, Look()),
    ],
    "a reset that failed is asked for again": [
        *entered(1, 2),
        (Want(some(1)), Look()),
        (Looked(some(1, 2), ours=True), Drain(some(2))),
        (HandoffEvent.DRAINED, Look()),
        (Looked(some(1, 2), ours=True), Narrow(some(1))),
        (HandoffEvent.NARROWED, Reset()),
        (HandoffEvent.FAILED, Look()),
        (Looked(some(1), ours=True), Reset()),
        (HandoffEvent.RESET, None),
    ],
    "a widening whose outcome nobody knows": [
        *entered(1),
        (Want(some(1, 2)), Look()),
        (Looked(some(1), ours=True), Widen(some(1, 2))),
        (HandoffEvent.FAILED, Look()),
        (Looked(some(1, 2), ours=True), Rewind()),
        (HandoffEvent.REWOUND, None),
    ],
    "a gain that succeeded after all does not wait for another that is taken": [
        *entered(1),
        (Want(some(1, 2)), Look()),
        (Looked(some(1), ours=True), Widen(some(1, 2))),
        (HandoffEvent.FAILED, Look()),
        (Want(some(1, 2, 3)), Look()),
        (Looked(some(1, 2), ours=True), Rewind()),
        (HandoffEvent.REWOUND, Widen(some(1, 2, 3))),
        (HandoffEvent.TAKEN, Wait.TAKEN),
    ],
    "a partition that drains is wanted again": [
        *entered(1, 2),
        (Want(some(1)), Look()),
        (Looked(some(1, 2), ours=True), Drain(some(2))),
        (HandoffEvent.DRAINED, Look()),
        (Want(some(1, 2)), Look()),
        (Looked(some(1, 2), ours=True), Rewind()),
        (HandoffEvent.REWOUND, None),
    ],
    "messages of a partition that it does not know": [
        *entered(1),
        (Want(some(1, 2)), Look()),
        (Looked(some(1, 2), ours=True), Rewind()),
        (HandoffEvent.REWOUND, None),
        (Surprised(some(3)), Look()),
        (Looked(some(1, 2, 3), ours=True), Drain(some(3))),
    ],
    "filters in other words": [
        *entered(1),
        (Want(some(1), exact=False), Look()),
        (Looked(some(1), ours=True, exact=False), Rename()),
        (HandoffEvent.RENAMED, None),
    ],
    "filters in other words, and other partitions": [
        *entered(1),
        (Want(some(1, 2), exact=False), Look()),
        (Looked(some(1), ours=True, exact=False), Widen(some(1, 2))),
        (HandoffEvent.WIDENED, Rewind()),
        (HandoffEvent.REWOUND, None),
    ],
    "it joins a consumer of an older membership: the instance on it goes first": [
        (Want(some(1, 2)), Create(some(1, 2))),
        (Opened(some(1), IN_PLACE, joined=True), Wait.STANDBY),
        (Want(some(1, 2)), Look()),
        (Looked(some(1), ours=True), Widen(some(1, 2))),
    ],
    "it joins a consumer that is as it should be": [
        (Want(some(1)), Create(some(1))),
        (Opened(some(1), IN_PLACE, joined=True), None),
    ],
    "the consumer cannot be changed any more": [
        *entered(1),
        (Want(some(1, 2)), Look()),
        (Looked(some(1), ours=True), Widen(some(1, 2))),
        (HandoffEvent.UNUSABLE, Finish()),
        (HandoffEvent.FINISHED, Look()),
        (Looked(some(1), ours=True), Delete(surely=True)),
        (HandoffEvent.DELETED, Create(some(1, 2))),
    ],
    "the server says that another is active, and then it is this one all the same": [
        *entered(1),
        (Want(some(1, 2)), Look()),
        (Looked(some(1), ours=True), Widen(some(1, 2))),
        (HandoffEvent.WIDENED, Rewind()),
        (HandoffEvent.UNPINNED, Look()),
        (Looked(some(1, 2), ours=False), None),
        (PinReceived(anew=False), Look()),
        (Looked(some(1, 2), ours=True), Rewind()),
        (HandoffEvent.REWOUND, None),
    ],
    "nobody knows whether the filters were narrowed": [
        *entered(1, 2),
        (Want(some(1)), Look()),
        (Looked(some(1, 2), ours=True), Drain(some(2))),
        (HandoffEvent.DRAINED, Look()),
        (Looked(some(1, 2), ours=True), Narrow(some(1))),
        (HandoffEvent.FAILED, Look()),
        (Looked(some(1), ours=True), Reset()),
        (HandoffEvent.RESET, None),
    ],
    "a gain that was withdrawn does not hide a later surprise": [
        *entered(1),
        (Want(some(1, 2)), Look()),
        (Looked(some(1), ours=True), Widen(some(1, 2))),
        (HandoffEvent.TAKEN, Wait.TAKEN),
        (Want(some(1)), Look()),
        (Looked(some(1), ours=True), None),
        (Surprised(some(2)), Look()),
        (Looked(some(1, 2), ours=True), Drain(some(2))),
    ],
    "in a cluster another instance made the consumer anew": [
        *entered(1, style=RECREATE),
        (Want(some(1, 2)), Look()),
        (Surprised(some(2)), Look()),
        (Looked(some(1, 2), ours=True), Finish()),
    ],
    "the consumer is gone": [*entered(1), (HandoffEvent.GONE, Create(some(1)))],
    "it stops": [
        *entered(1),
        (HandoffEvent.LEAVE, Finish()),
        (HandoffEvent.FINISHED, GiveBack()),
        (HandoffEvent.CLOSED, None),
    ],
    "it stops while a partition leaves": [
        *entered(1, 2),
        (Want(some(1)), Look()),
        (Looked(some(1, 2), ours=True), Drain(some(2))),
        (HandoffEvent.LEAVE, Finish()),
        (HandoffEvent.FINISHED, GiveBack()),
    ],
    "in a cluster: gaining only, once the others are gone": [
        *entered(1, style=RECREATE),
        (Want(some(1, 2)), Look()),
        (Looked(some(1), ours=True), Probe(some(2))),
        (HandoffEvent.TAKEN, Wait.TAKEN),
        (Want(some(1, 2)), Look()),
        (Looked(some(1), ours=True), Probe(some(2))),
        (HandoffEvent.FREE, Finish()),
        (HandoffEvent.FINISHED, Look()),
        (Looked(some(1), ours=True), Delete(surely=True)),
        (HandoffEvent.DELETED, Create(some(1, 2))),
    ],
    "in a cluster: while others have the gained ones, it goes on with those it keeps": [
        *entered(1, 2, style=RECREATE),
        (Want(some(2, 3)), Look()),
        (Looked(some(1, 2), ours=True), Finish()),
        (HandoffEvent.FINISHED, Look()),
        (Looked(some(1, 2), ours=True), Delete(surely=True)),
        (HandoffEvent.DELETED, Create(some(2, 3))),
        (HandoffEvent.TAKEN, Create(some(2))),
        (Opened(some(2), RECREATE), Look()),
        (Looked(some(2), ours=True), Wait.TAKEN),
    ],
    "what it kept was taken as well": [
        *entered(1, 2, style=RECREATE),
        (Want(some(2, 3)), Look()),
        (Looked(some(1, 2), ours=True), Finish()),
        (HandoffEvent.FINISHED, Look()),
        (Looked(some(1, 2), ours=True), Delete(surely=True)),
        (HandoffEvent.DELETED, Create(some(2, 3))),
        (HandoffEvent.TAKEN, Create(some(2))),
        (HandoffEvent.TAKEN, Wait.TAKEN),
    ],
    "giving up failed, and it is wanted again": [
        *entered(1, style=RECREATE),
        (Want(some()), Finish()),
        (HandoffEvent.FAILED, Finish()),
        (Want(some(1)), Close()),
        (HandoffEvent.CLOSED, Create(some(1))),
    ],
}


@pytest.mark.parametrize("name", STORIES)
def test_story(name: str) -> None:
    state = Handoff()
    for number, (event, expected) in enumerate(STORIES[name]):
        state, action = step(state, event)
        assert action == expected, f"step {number}, {event}: {state}"


def after(name: str, steps: int | None = None) -> Handoff:
    state = Handoff()
    for event, _ in STORIES[name][:steps]:
        state, _ = step(state, event)
    return state


def test_a_lost_partition_does_not_start_from_the_draining_on() -> None:
    name = "losing: drain, look, narrow, reset"
    start = len(entered(1, 2))
    assert after(name, start).admitted == some(1, 2)
    for steps in range(start + 2, len(STORIES[name]) + 1):
        assert after(name, steps).admitted == some(1)


def test_a_gained_partition_starts_after_the_rewinding() -> None:
    name = "gaining: widen, rewind"
    for steps in range(len(entered(1)), len(STORIES[name])):
        assert after(name, steps).admitted == some(1)
    assert after(name).admitted == some(1, 2)


def test_a_takeover_starts_nothing_before_the_rewinding() -> None:
    name = "a takeover looks and rewinds"
    assert after(name, 3).admitted == after(name, 4).admitted == some()
    assert after(name).admitted == some(1, 2)


def test_what_is_given_up_does_not_start() -> None:
    assert after("nothing is wanted any more", len(entered(1)) + 1).admitted == some()


def test_a_withdrawn_gain_is_unexpected_again() -> None:
    assert after("a gain that was withdrawn does not hide a later surprise", len(entered(1)) + 5).unexpected(
        {2}
    ) == some(2)


def test_an_unknown_partition_does_not_start() -> None:
    state = after("a takeover looks and rewinds")
    assert state.unexpected({1, 3}) == some(3)
    assert 3 not in state.admitted


@pytest.mark.parametrize("pin_change", [PinReceived(anew=True), HandoffEvent.UNPINNED, HandoffEvent.DOUBTED])
@pytest.mark.parametrize(
    ("name", "steps"),
    [("gaining: widen, rewind", 2), ("gaining: widen, rewind", 3), ("losing: drain, look, narrow, reset", 4)],
)
def test_an_answer_from_before_the_pin_changed_means_nothing(name: str, steps: int, pin_change: AnyEvent) -> None:
    story = STORIES[name][len(entered(1)) :]
    state = after(name, len(entered(1)) + steps)
    answer = story[steps][0]
    assert step(state, answer)[1] in (Rewind(), Reset(), None)
    state = changed(state, pin_change)
    state, action = step(state, answer)
    assert action in (Look(), Wait.IN_DOUBT)
    assert not state.certain

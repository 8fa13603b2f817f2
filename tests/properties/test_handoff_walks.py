"""Random walks of one instance, judged by a dumb model that only remembers what happened.

The model knows what the consumer really covers, which partitions have been added to it since it was last rewound, and
which have been drained since the pin last changed. Nothing else.
"""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from keylane.core import handoff
from keylane.core.handoff import (
    NONE,
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
    Role,
    Style,
    Surprised,
    Wait,
    Want,
    Widen,
)

PARTITIONS = range(4)
SETTLES_WITHIN = 25

EVENTS_OF_THE_PIN: dict[Role, tuple[AnyEvent, ...]] = {
    Role.STANDBY: (PinReceived(anew=True),),
    Role.ACTIVE: (PinReceived(anew=True), HandoffEvent.UNPINNED, HandoffEvent.DOUBTED),
    Role.DOUBTFUL: (PinReceived(anew=True), HandoffEvent.UNPINNED, HandoffEvent.CONFIRMED),
}


class Walk:
    """An instance, its consumer, and chance."""

    def __init__(self, random: Random, style: Style) -> None:
        self.random, self.style = random, style
        self.state = Handoff()
        self.action: handoff.Action | None = None
        self.covers: frozenset[int] | None = None
        self.not_rewound: set[int] = set()
        self.drained: set[int] = set()
        self.looked = False
        self.was_pinned = False
        self.calm = False

    def some(self) -> frozenset[int]:
        return frozenset(one for one in PARTITIONS if self.random.random() < 0.5)

    def step(self, event: AnyEvent) -> None:
        self.state, self.action = handoff.step(self.state, event)
        self.check_admitted()
        self.check_action()

    def check_admitted(self) -> None:
        if self.style is Style.IN_PLACE and self.state.role is Role.ACTIVE:
            assert not self.state.admitted & self.not_rewound, "started before the consumer was rewound"

    def check_action(self) -> None:
        match self.action:
            case Narrow(kept):
                assert kept
                assert self.covers is not None
                assert self.covers - kept <= self.drained, "narrowed before all was drained"
                assert self.looked, "narrowed without a look"
            case Widen(wanted):
                assert self.covers is not None
                assert self.covers <= wanted, "added before the removals"
                assert self.looked, "widened without a look"
            case Delete(surely=True):
                assert self.state.finished
                assert self.looked, "deleted without a look"
            case Create(partitions) | Probe(partitions) | Drain(partitions):
                assert partitions

    # ---- what chance does ------------------------------------------------------------------------------

    def pin_changes(self) -> None:
        if not self.state.reading or self.covers is None:
            return
        events = EVENTS_OF_THE_PIN[self.state.role]
        if self.state.role is Role.STANDBY and self.was_pinned:
            events = (
                *events,
                PinReceived(anew=False),
            )  # the same pin again: deliveries were lost, or the server stood still
        event = self.random.choice(events)
        self.was_pinned = True
        if event == PinReceived(anew=True) and self.style is Style.IN_PLACE:
            # Whoever was active before may have widened the filters and not rewound the consumer.
            self.add(frozenset(self.random.sample(PARTITIONS, 1)))
        if event not in (HandoffEvent.CONFIRMED, PinReceived(anew=False)):
            # Under the same pin, what was seen and drained stays so: nobody else was active, and nothing of it started.
            self.drained.clear()
            self.looked = False
        self.state = handoff.changed(self.state, event)
        self.check_admitted()

    def another_widens(self) -> None:
        """A standby saw nobody active, and then this instance turned active: its messages come as a surprise."""
        if self.covers is None or self.state.role is not Role.ACTIVE or self.style is Style.RECREATE:
            return
        self.add(self.some())
        unexpected = self.state.unexpected(self.covers)
        if unexpected:
            self.state = handoff.changed(self.state, Surprised(unexpected))
        self.check_admitted()

    def add(self, partitions: frozenset[int]) -> None:
        assert self.covers is not None
        self.not_rewound |= partitions - self.covers
        self.covers |= partitions

    def answer(self) -> AnyEvent:  # noqa: C901, PLR0911, PLR0912 - one case for each action
        """What comes of the action, if it succeeds."""
        action = self.action
        assert action is not None
        match action:
            case Create(partitions):
                if self.covers is None:
                    self.covers = partitions
                    self.not_rewound.clear()
                self.was_pinned = False
                return Opened(self.covers, self.style)
            case Look():
                if self.covers is None:
                    return HandoffEvent.GONE
                self.looked = self.calm or self.random.random() < 0.9
                return Looked(self.covers, ours=self.looked)
            case Probe():
                return HandoffEvent.FREE
            case Drain(partitions):
                self.drained |= partitions
                self.looked = False
                return HandoffEvent.DRAINED
            case Finish():
                self.looked = False
                return HandoffEvent.FINISHED
            case Narrow(kept):
                self.covers = kept
                return HandoffEvent.NARROWED
            case Widen(wanted):
                self.add(wanted)
                return HandoffEvent.WIDENED
            case Reset():
                return HandoffEvent.RESET
            case Rewind():
                self.not_rewound.clear()
                return HandoffEvent.REWOUND
            case Rename():
                return HandoffEvent.RENAMED
            case Delete():
                self.covers = None
                return HandoffEvent.DELETED
            case Close() | GiveBack():
                return HandoffEvent.CLOSED
            case Wait():
                return Want(self.state.wanted)

    def go_on(self) -> None:
        if self.action is None or isinstance(self.action, Wait):
            self.step(Want(self.some() if self.random.random() < 0.5 else self.state.wanted))
            return
        chance = self.random.random()
        if chance < 0.1:
            self.step(HandoffEvent.FAILED)
        elif chance < 0.15 and isinstance(self.action, Widen | Create | Probe):
            self.step(HandoffEvent.TAKEN)
        elif chance < 0.2 and self.covers is not None and not isinstance(self.action, Create):
            self.covers = None
            self.step(HandoffEvent.GONE)
        else:
            answer = self.answer()
            if self.random.random() < 0.1:
                self.pin_changes()
                if self.covers is None:
                    answer = HandoffEvent.GONE
            self.step(answer)

    def calm_down(self) -> None:
        """Every action succeeds from now on: it must settle, on what is wanted."""
        self.calm = True
        if self.state.role is Role.DOUBTFUL:
            self.step(HandoffEvent.CONFIRMED)
        self.step(Want(self.some()))
        for _ in range(SETTLES_WITHIN):
            if self.action is None:
                break
            self.step(self.answer())
        assert self.action is None, self.state
        assert (self.covers or NONE) == self.state.wanted or not self.state.reading
        if self.state.reading:
            assert self.covers == self.state.wanted == self.state.covers
            assert self.state.role is not Role.ACTIVE or self.state.admitted == self.state.wanted


@given(st.integers(0, 2**32), st.sampled_from(Style), st.integers(1, 60))
def test_a_walk_keeps_the_rules_and_settles(seed: int, style: Style, length: int) -> None:
    random = Random(seed)  # noqa: S311
    walk = Walk(random, style)
    walk.step(Want(walk.some()))
    for _ in range(length):
        chance = random.random()
        if chance < 0.08:
            walk.pin_changes()
        elif chance < 0.12:
            walk.another_widens()
        walk.go_on()
    walk.calm_down()

"""How the partitions of a member move: a state machine of one instance on its member's consumer.

Theory of operation. A member has one consumer, whose filters say which partitions it delivers. Several instances of
the member may read that consumer; the server pins one of them, the others stand by. A partition moves when the group's
record changes: one member must let go of it, then another takes it. The server refuses two consumers of a work queue
with the same filter, so removals come first and additions wait.

In place (one server that can reset a consumer):
- losing partitions: *drain* them (start nothing more of them, finish what runs, have its acks confirmed), *narrow* the
  filters, and *reset* the consumer, which releases what was delivered and not started;
- gaining partitions: *widen* the filters as soon as the server allows it, then *rewind* the consumer to the start of
  the queue. Adding a filter does not go back in the stream: between the two, the newest messages of a gained partition
  may arrive before its oldest. They are held back (dropped), and the rewinding delivers them again;
- taking over from another instance: it may have ended between widening and rewinding. Everything is held back until
  this instance has rewound the consumer.

Recreate (a cluster, or a server without resets): a cluster lets a consumer widen its filters to what another one still
has, and a reset that races with deliveries can lose messages. There the member *finishes* all its work, *deletes* the
consumer and *creates* it with the new filters.

Only the instance that works on a consumer changes it, or any instance if none does. Whether this is so can change at
any moment without this instance knowing, so it *looks* at the consumer before every change. What was asked before the
pin changed means nothing any more: the answer counts as a failure, and the instance looks again. And a standby may
change a consumer that nobody works on in the very moment in which another instance becomes active: so a message of a
partition that the instance does not know to be its own is a *surprise*, which is held back like a gain.

`step` takes what happened and returns the new state and the next action. Someone else performs the action and reports
what came of it. There is one action at a time; a `Wait` ends the round, and the next `Want` begins another. `RULES` are
read from the top: the first that applies says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TypeAlias

Partitions: TypeAlias = frozenset[int]

NONE: Partitions = frozenset()


class Style(Enum):
    """How a consumer gets other partitions."""

    IN_PLACE = auto()
    RECREATE = auto()


class Role(Enum):
    """What this instance is on its consumer."""

    STANDBY = auto()
    ACTIVE = auto()
    DOUBTFUL = auto()
    """It was active and stood still: another instance may be active by now."""


# ---- events: what happened, or what came of an action --------------------------------------------------


@dataclass(frozen=True, slots=True)
class Want:
    """A new round: these partitions belong to the member. None of them: the consumer is to go.

    `exact`: the filters of the consumer, as they are known, are written as the member would write them.
    """

    partitions: Partitions
    exact: bool = True


@dataclass(frozen=True, slots=True)
class PinReceived:
    """This instance is active. `anew`: under another pin than before, so another instance may have been in between."""

    anew: bool


@dataclass(frozen=True, slots=True)
class Looked:
    """The consumer as the server has it. `ours`: no other instance is active. `exact`: its filters are as wanted."""

    covers: Partitions
    ours: bool
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Opened:
    """This instance reads the consumer, which covers these partitions."""

    covers: Partitions
    style: Style
    durable: bool = False
    """It belongs to a static group, whose partitions never move: a takeover needs no rewinding."""
    joined: bool = False
    """It was there before: another instance may be about to change it, and goes first."""


@dataclass(frozen=True, slots=True)
class Surprised:
    """Messages of partitions came that the consumer does not cover, as far as this instance knows."""

    partitions: Partitions


class HandoffEvent(Enum):
    """Events that say all by their name."""

    UNPINNED = auto()
    """Another instance is active, or this one lost deliveries."""
    DOUBTED = auto()
    CONFIRMED = auto()
    """The doubt is over: this instance is still active."""
    DRAINED = auto()
    """Nothing of the draining partitions runs, and the server has all acks."""
    FINISHED = auto()
    """The same for all partitions."""
    NARROWED = auto()
    RESET = auto()
    WIDENED = auto()
    REWOUND = auto()
    RENAMED = auto()
    FREE = auto()
    """No other consumer has one of the partitions."""
    TAKEN = auto()
    """Another member's consumer still has one of the partitions."""
    DELETED = auto()
    """This instance does not read the consumer any more, and it is gone or another instance's."""
    CLOSED = auto()
    """This instance does not read the consumer any more."""
    GONE = auto()
    """The consumer does not exist any more."""
    UNUSABLE = auto()
    """The server cannot change the consumer any more: it must be made anew."""
    FAILED = auto()
    """The action did not succeed, or nobody knows whether it did."""
    LEAVE = auto()
    """The member stops: finish, and hand the consumer over."""


AnyEvent: TypeAlias = Want | PinReceived | Looked | Opened | Surprised | HandoffEvent


# ---- actions: what to do next ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Create:
    """Make the consumer for these partitions, or join the one that is there. -> Opened, TAKEN"""

    partitions: Partitions


@dataclass(frozen=True, slots=True)
class Look:
    """Ask the server for the consumer's filters and pin. -> Looked"""


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask whether another consumer has one of these partitions. -> FREE, TAKEN"""

    partitions: Partitions


@dataclass(frozen=True, slots=True)
class Drain:
    """Start nothing of these partitions, finish what runs, have the acks confirmed. -> DRAINED"""

    partitions: Partitions


@dataclass(frozen=True, slots=True)
class Finish:
    """The same for all partitions. -> FINISHED"""


@dataclass(frozen=True, slots=True)
class Narrow:
    """Leave these partitions in the filters. -> NARROWED"""

    partitions: Partitions


@dataclass(frozen=True, slots=True)
class Reset:
    """Release what was delivered and is not acked. -> RESET"""


@dataclass(frozen=True, slots=True)
class Widen:
    """Put these partitions into the filters. -> WIDENED, TAKEN"""

    partitions: Partitions


@dataclass(frozen=True, slots=True)
class Rewind:
    """Deliver from the start of the queue. -> REWOUND"""


@dataclass(frozen=True, slots=True)
class Rename:
    """The partitions are right, but the filters are written in another way. -> RENAMED"""


@dataclass(frozen=True, slots=True)
class Delete:
    """Stop reading and delete the consumer; if not `surely`, only if no other instance reads it. -> DELETED"""

    surely: bool


@dataclass(frozen=True, slots=True)
class Close:
    """Stop reading. -> CLOSED"""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Release what was not started, give the pin back and stop reading. -> CLOSED"""


class Wait(Enum):
    """Nothing to do now: begin another round a little later."""

    IN_DOUBT = auto()
    """It is not known whether this instance is still the active one."""
    TAKEN = auto()
    """Another member has not yet let go of a partition."""
    STANDBY = auto()
    """Another instance is active, and the change is its business."""


Action: TypeAlias = (
    Create | Look | Probe | Drain | Finish | Narrow | Reset | Widen | Rewind | Rename | Delete | Close | GiveBack | Wait
)


# ---- the state -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """What one instance knows of its consumer, and how far it is."""

    wanted: Partitions = NONE
    reading: bool = False
    role: Role = Role.STANDBY
    style: Style = Style.IN_PLACE
    durable: bool = False
    covers: Partitions = NONE
    """What the consumer's filters say, as far as this instance knows."""
    certain: bool = True
    """`covers` is so unless another instance changed it. False: a change was asked for whose outcome is not known."""
    ours: bool | None = None
    """What the last look said. None: look again before anything is changed."""
    exact: bool = True
    draining: Partitions = NONE
    """Being lost: nothing of them starts."""
    drained: bool = False
    """Nothing of `draining` runs any more."""
    held: Partitions = NONE
    """Gained: nothing of them starts before the consumer was rewound."""
    holds_all: bool = False
    reset_due: bool = False
    rewind_due: bool = False
    taken: bool | None = None
    """Whether another consumer has one of the wanted partitions. None: not known."""
    kept: Partitions = NONE
    """While the consumer is made anew: what this member had before, so nobody else has it."""
    closing: bool = False
    """The consumer is given up: nothing starts."""
    interrupted: bool = False
    """Giving up failed half way."""
    finished: bool = False
    leaving: bool = False
    stale: bool = False
    """The pin changed while an action is under way: what comes of it means nothing."""

    @property
    def admitted(self) -> Partitions:
        """The partitions whose messages may start now."""
        if self.closing or self.holds_all:
            return NONE
        if self.draining or self.held:
            return self.covers - self.draining - self.held
        return self.covers  # the usual case, asked for every batch of messages

    def unexpected(self, partitions: Collection[int]) -> Partitions:
        """Those that the consumer does not cover and is not about to."""
        return frozenset(partitions) - self.covers - self.held

    @property
    def lost(self) -> Partitions:
        return self.covers - self.wanted

    @property
    def gained(self) -> Partitions:
        return self.wanted - self.covers

    @property
    def interrupted_moves(self) -> Partitions:
        """The consumer covers them, and nothing of them starts, as a move was not finished: a rewinding frees them."""
        return (self.draining | self.held) & self.covers & self.wanted

    @property
    def must_rewind(self) -> bool:
        return self.rewind_due or (self.role is Role.ACTIVE and (self.holds_all or bool(self.interrupted_moves)))

    @property
    def settled(self) -> bool:
        return self.covers == self.wanted and self.exact and not (self.must_rewind or self.reset_due)


# ---- what to do next -------------------------------------------------------------------------------------

_Rule: TypeAlias = tuple[Callable[[Handoff], bool], Callable[[Handoff], tuple[Handoff, Action | None]]]


def _do(action: Action | None) -> Callable[[Handoff], tuple[Handoff, Action | None]]:
    return lambda state: (state, action)


def _give_up(state: Handoff) -> tuple[Handoff, Action | None]:
    """Finish, look, delete. A standby has nothing to finish."""
    if not state.closing:
        state = replace(state, closing=True, finished=False, kept=state.covers & state.wanted)
    if state.role is not Role.ACTIVE:
        return state, Delete(surely=False)
    if not state.finished:
        return state, Finish()
    if state.ours is None:
        return state, Look()
    return state, Delete(surely=state.ours)


def _leave(state: Handoff) -> tuple[Handoff, Action | None]:
    state = replace(state, closing=True)
    return state, GiveBack() if state.finished else Finish()


def _create(state: Handoff) -> tuple[Handoff, Action | None]:
    if not state.taken:
        return state, Create(state.wanted)
    if state.kept & state.wanted:
        return state, Create(state.kept & state.wanted)
    return state, Wait.TAKEN


def _recreate(state: Handoff) -> tuple[Handoff, Action | None]:
    if not state.lost and state.taken is None:
        # With the partitions that it keeps it goes on meanwhile.
        return state, Probe(state.wanted - state.covers)
    return _give_up(state)


def _lose(state: Handoff) -> tuple[Handoff, Action | None]:
    if not state.drained or not state.lost <= state.draining:
        draining = state.draining | state.lost
        return replace(state, draining=draining, drained=False), Drain(draining)
    if not state.covers & state.wanted:
        return _give_up(state)
    return state, Narrow(state.covers & state.wanted)


def _gain(state: Handoff) -> tuple[Handoff, Action | None]:
    return replace(state, held=state.held | state.gained), Widen(state.wanted)


def _has_new_partitions(state: Handoff) -> bool:
    """Another instance made the consumer anew, with partitions that this one did not know: make it anew as well."""
    return state.style is Style.RECREATE and not state.durable and bool(state.interrupted_moves)


RULES: tuple[_Rule, ...] = (
    # when                                                       what to do
    (lambda s: not s.reading and (s.leaving or not s.wanted),    _do(None)),
    (lambda s: not s.reading,                                    _create),
    (lambda s: s.leaving,                                        _leave),
    (lambda s: s.role is Role.DOUBTFUL,                          _do(Wait.IN_DOUBT)),
    (lambda s: s.closing and s.interrupted and bool(s.wanted),   _do(Close())),
    (lambda s: s.closing or not s.wanted,                        _give_up),
    (lambda s: s.settled and s.certain,                          _do(None)),
    (lambda s: s.ours is None,                                   _do(Look())),
    (lambda s: s.settled,                                        _do(None)),
    (lambda s: not s.ours,                                       _do(Wait.STANDBY)),
    (lambda s: s.must_rewind and _has_new_partitions(s),         _give_up),
    (lambda s: s.must_rewind,                                    _do(Rewind())),
    (lambda s: s.reset_due,                                      _do(Reset())),
    (lambda s: s.taken is True,                                  _do(Wait.TAKEN)),
    (lambda s: not s.lost and not s.gained,                      _do(Rename())),
    (lambda s: s.style is Style.RECREATE,                        _recreate),
    (lambda s: bool(s.lost),                                     _lose),
    (lambda s: True,                                             _gain),
)  # fmt: skip


# ---- what an event changes -------------------------------------------------------------------------------


def _want(state: Handoff, event: Want) -> Handoff:
    return replace(state, wanted=event.partitions, exact=event.exact, ours=None, taken=None)


def _pinned(state: Handoff, event: PinReceived) -> Handoff:
    state = replace(state, role=Role.ACTIVE, ours=None)
    if not event.anew:
        return state
    state = replace(state, stale=True)
    if state.style is Style.RECREATE or state.durable:
        return state
    return replace(state, holds_all=True, rewind_due=True, certain=False)


def _looked(state: Handoff, event: Looked) -> Handoff:
    if event.ours:
        # A partition that is not covered any more was narrowed, and nobody knows whether the consumer was reset since.
        reset_due = state.reset_due or bool(state.draining - event.covers)
        # One that is covered and was not known to be was added by another instance, which may not have rewound.
        learned = event.covers - state.covers if state.style is Style.IN_PLACE and not state.durable else NONE
        state = replace(state, held=state.held & (event.covers | state.wanted) | learned, reset_due=reset_due)
    else:
        # The active instance does what is due: it held everything when it became active, and looked after that. Should
        # it be this one after all, it begins with nothing.
        holds_all = state.style is Style.IN_PLACE and not state.durable
        state = replace(state, held=NONE, holds_all=holds_all, reset_due=False, rewind_due=False)
    return replace(state, covers=event.covers, ours=event.ours, exact=event.exact, certain=True)


def _opened(state: Handoff, event: Opened) -> Handoff:
    return Handoff(
        wanted=state.wanted,
        leaving=state.leaving,
        taken=state.taken,
        reading=True,
        covers=event.covers,
        style=event.style,
        durable=event.durable,
        ours=False if event.joined else None,
    )


def _surprised(state: Handoff, event: Surprised) -> Handoff:
    if state.durable:  # somebody changed its filters by hand; a rewinding would replay the whole stream
        return replace(state, covers=state.covers | event.partitions, certain=False, ours=None)
    return replace(state, held=state.held | event.partitions, certain=False, ours=None)


def _unpinned(state: Handoff) -> Handoff:
    # What was draining is the next instance's business; it comes to it again, if the record still says so.
    return replace(
        state, role=Role.STANDBY, draining=NONE, drained=False, reset_due=False, ours=None, certain=False, stale=True
    )


def _doubted(state: Handoff) -> Handoff:
    return replace(state, role=Role.DOUBTFUL, ours=None, stale=True)


def _failed(state: Handoff) -> Handoff:
    return replace(
        state, certain=False, ours=None, drained=False, finished=False, interrupted=state.closing, taken=None
    )


def _unusable(state: Handoff) -> Handoff:
    return replace(_failed(state), closing=True, interrupted=False, kept=state.covers & state.wanted)


def _closed(state: Handoff) -> Handoff:
    return Handoff(wanted=state.wanted, leaving=state.leaving, kept=state.kept, style=state.style)


_CHANGES: dict[HandoffEvent, Callable[[Handoff], Handoff]] = {
    HandoffEvent.UNPINNED: _unpinned,
    HandoffEvent.DOUBTED: _doubted,
    HandoffEvent.CONFIRMED: lambda s: replace(s, role=Role.ACTIVE),
    HandoffEvent.DRAINED: lambda s: replace(s, drained=True, ours=None),
    HandoffEvent.FINISHED: lambda s: replace(s, finished=True, ours=None),
    HandoffEvent.NARROWED: lambda s: replace(s, covers=s.covers & s.wanted, exact=True, reset_due=True),
    HandoffEvent.RESET: lambda s: replace(s, reset_due=False, draining=NONE, drained=False),
    HandoffEvent.WIDENED: lambda s: replace(
        s, covers=s.wanted, exact=True, draining=s.draining - s.wanted, rewind_due=True
    ),
    HandoffEvent.REWOUND: lambda s: replace(
        s, rewind_due=False, held=NONE, holds_all=False, draining=s.draining - s.wanted, drained=False
    ),
    HandoffEvent.RENAMED: lambda s: replace(s, exact=True),
    HandoffEvent.FREE: lambda s: replace(s, taken=False),
    # Refused: the filters are as they were. Whoever asked looks again before it believes that.
    HandoffEvent.TAKEN: lambda s: replace(s, taken=True, certain=False, kept=NONE if s.taken else s.kept),
    HandoffEvent.DELETED: _closed,
    HandoffEvent.CLOSED: lambda s: replace(_closed(s), kept=NONE),
    HandoffEvent.GONE: lambda s: replace(_closed(s), kept=NONE),
    HandoffEvent.UNUSABLE: _unusable,
    HandoffEvent.FAILED: _failed,
    HandoffEvent.LEAVE: lambda s: replace(s, leaving=True, finished=False),
}

_ANSWERS = frozenset(
    {
        HandoffEvent.DRAINED,
        HandoffEvent.FINISHED,
        HandoffEvent.NARROWED,
        HandoffEvent.RESET,
        HandoffEvent.WIDENED,
        HandoffEvent.REWOUND,
        HandoffEvent.RENAMED,
        HandoffEvent.FREE,
        HandoffEvent.TAKEN,
    }
)
"""They mean nothing if the pin changed since the action began. That a consumer is gone stays true."""


def changed(state: Handoff, event: AnyEvent) -> Handoff:
    """What an event makes of a state. For events that come while an action is under way."""
    match event:
        case Want():
            return _want(state, event)
        case PinReceived():
            return _pinned(state, event)
        case Opened():
            return _opened(state, event)
        case Surprised():
            return _surprised(state, event)
        case Looked():
            return _failed(state) if state.stale else _looked(state, event)
        case HandoffEvent():
            return _CHANGES[HandoffEvent.FAILED if state.stale and event in _ANSWERS else event](state)


def step(state: Handoff, event: AnyEvent) -> tuple[Handoff, Action | None]:
    """What an event makes of a state, and what to do next; None: everything is as it should be."""
    state = replace(changed(state, event), stale=False)
    for applies, then in RULES:
        if applies(state):
            return then(state)
    raise AssertionError(state)

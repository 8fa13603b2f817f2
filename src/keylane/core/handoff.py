"""How the partitions of a member move: a state machine of one instance on its member's consumer.

Theory of operation. A member has one consumer, whose filters determine which partitions it delivers. Several instances
of the member may read that consumer; the server pins one of them, the others stand by. A partition moves when the
group's record changes: one member must release it, then another takes it. The server refuses two consumers of a work
queue with the same filter, so removals come first and additions wait.

In place (one server that can reset a consumer):
- losing partitions: *drain* them (start no more of their messages, finish those that run, wait until their acks are
  confirmed), *narrow* the filters, and *reset* the consumer, which releases messages that were delivered but not
  started;
- gaining partitions: *widen* the filters as soon as the server allows it, then *rewind* the consumer to the start of
  the queue. Adding a filter does not go back in the stream: between the two, the newest messages of a gained partition
  may arrive before its oldest. They are held back (dropped), and the rewind redelivers them;
- taking over from another instance: it may have ended between widening and rewinding. Everything is held back until
  this instance has rewound the consumer.

Recreate (a cluster, or a server without resets): a cluster lets a consumer widen its filters to partitions that another
one still has, and a reset that races with deliveries can lose messages. There the member *finishes* all its work,
*deletes* the consumer and *creates* it with the new filters.

Only the active instance changes a consumer, or any instance if none is active. The active instance can change at any
moment without this one knowing, so it *looks* at the consumer before every change. A request from before a change of
the pin is void: its answer counts as a failure, and the instance looks again. A standby may also change a consumer just
as another instance becomes active. So a message of a partition that the instance does not know to be its own is a
*surprise*, which is held back like a gain.

`step` takes an event and returns the new state and the next action. The caller performs the action and reports the
result as the next event. There is one action at a time; a `Wait` ends the round, and the next `Want` begins another.
`RULES` are read from the top: the first that applies determines the action.
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
    """The role of this instance on its consumer."""

    STANDBY = auto()
    ACTIVE = auto()
    DOUBTFUL = auto()
    """It was active and then suspended: another instance may be active by now."""


# ---- events: what happened, or the result of an action --------------------------------------------------


@dataclass(frozen=True, slots=True)
class Want:
    """A new round: these partitions belong to the member. If there are none, delete the consumer.

    `exact`: the known filters of the consumer are spelled as the member would spell them.
    """

    partitions: Partitions
    exact: bool = True


@dataclass(frozen=True, slots=True)
class PinReceived:
    """This instance is active. `anew`: under a new pin, so another instance may have been active in between."""

    anew: bool


@dataclass(frozen=True, slots=True)
class Looked:
    """The server's state of the consumer. `ours`: no other instance is active. `exact`: its filters are as wanted."""

    covers: Partitions
    ours: bool
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Opened:
    """This instance reads the consumer, which covers these partitions."""

    covers: Partitions
    style: Style
    durable: bool = False
    """It belongs to a static group, whose partitions never move: a takeover needs no rewind."""
    joined: bool = False
    """It existed already: another instance may be about to change it, and goes first."""


@dataclass(frozen=True, slots=True)
class Surprised:
    """Messages arrived of partitions that the consumer does not cover, as far as this instance knows."""

    partitions: Partitions


class HandoffEvent(Enum):
    """Events without further data."""

    UNPINNED = auto()
    """Another instance is active, or this one lost deliveries."""
    DOUBTED = auto()
    CONFIRMED = auto()
    """This instance is still active."""
    DRAINED = auto()
    """No message of the draining partitions runs, and the server has all acks."""
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
    """This instance no longer reads the consumer, which is deleted or belongs to another instance."""
    CLOSED = auto()
    """This instance no longer reads the consumer."""
    GONE = auto()
    """The consumer no longer exists."""
    UNUSABLE = auto()
    """The server can no longer change the consumer: it must be recreated."""
    FAILED = auto()
    """The action failed, or its outcome is unknown."""
    LEAVE = auto()
    """The member stops: finish, and hand the consumer over."""


AnyEvent: TypeAlias = Want | PinReceived | Looked | Opened | Surprised | HandoffEvent


# ---- actions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Create:
    """Create the consumer for these partitions, or join the existing one. -> Opened, TAKEN"""

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
    """Start no messages of these partitions, finish those that run, wait for confirmed acks. -> DRAINED"""

    partitions: Partitions


@dataclass(frozen=True, slots=True)
class Finish:
    """The same for all partitions. -> FINISHED"""


@dataclass(frozen=True, slots=True)
class Narrow:
    """Keep only these partitions in the filters. -> NARROWED"""

    partitions: Partitions


@dataclass(frozen=True, slots=True)
class Reset:
    """Release delivered messages that are not acked. -> RESET"""


@dataclass(frozen=True, slots=True)
class Widen:
    """Set the filters to these partitions, with new ones. -> WIDENED, TAKEN"""

    partitions: Partitions


@dataclass(frozen=True, slots=True)
class Rewind:
    """Deliver from the start of the queue. -> REWOUND"""


@dataclass(frozen=True, slots=True)
class Rename:
    """Respell the filters; the partitions are already right. -> RENAMED"""


@dataclass(frozen=True, slots=True)
class Delete:
    """Stop reading and delete the consumer; if not `surely`, only if no other instance reads it. -> DELETED"""

    surely: bool


@dataclass(frozen=True, slots=True)
class Close:
    """Stop reading. -> CLOSED"""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Release messages that were not started, give the pin back and stop reading. -> CLOSED"""


class Wait(Enum):
    """Nothing to do now: begin another round later."""

    IN_DOUBT = auto()
    """It is unknown whether this instance is still active."""
    TAKEN = auto()
    """Another member has not released a partition yet."""
    STANDBY = auto()
    """Another instance is active, and makes the change."""


Action: TypeAlias = (
    Create | Look | Probe | Drain | Finish | Narrow | Reset | Widen | Rewind | Rename | Delete | Close | GiveBack | Wait
)


# ---- the state -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """What one instance knows about its consumer, and the progress of a move."""

    wanted: Partitions = NONE
    reading: bool = False
    role: Role = Role.STANDBY
    style: Style = Style.IN_PLACE
    durable: bool = False
    covers: Partitions = NONE
    """The partitions in the consumer's filters, as far as this instance knows."""
    certain: bool = True
    """`covers` is right unless another instance changed it. False: the outcome of a requested change is unknown."""
    ours: bool | None = None
    """The result of the last look. None: look again before any change."""
    exact: bool = True
    draining: Partitions = NONE
    """Being lost: their messages do not start."""
    drained: bool = False
    """No message of `draining` runs any more."""
    held: Partitions = NONE
    """Gained: their messages do not start before the consumer is rewound."""
    holds_all: bool = False
    reset_due: bool = False
    rewind_due: bool = False
    taken: bool | None = None
    """Whether another consumer has one of the wanted partitions. None: not known."""
    kept: Partitions = NONE
    """While the consumer is recreated: the partitions that this member had before, so nobody else has them."""
    closing: bool = False
    """The consumer is given up: no message starts."""
    interrupted: bool = False
    """Giving up failed half way."""
    finished: bool = False
    leaving: bool = False
    stale: bool = False
    """The pin changed during an action: its result is void."""

    @property
    def admitted(self) -> Partitions:
        """The partitions whose messages may start now."""
        if self.closing or self.holds_all:
            return NONE
        if self.draining or self.held:
            return self.covers - self.draining - self.held
        return self.covers  # the usual case, asked for every batch of messages

    def unexpected(self, partitions: Collection[int]) -> Partitions:
        """Those that the consumer neither covers nor is about to cover."""
        return frozenset(partitions) - self.covers - self.held

    @property
    def lost(self) -> Partitions:
        return self.covers - self.wanted

    @property
    def gained(self) -> Partitions:
        return self.wanted - self.covers

    @property
    def interrupted_moves(self) -> Partitions:
        """Covered partitions that do not start because a move was not finished: a rewind frees them."""
        return (self.draining | self.held) & self.covers & self.wanted

    @property
    def must_rewind(self) -> bool:
        return self.rewind_due or (self.role is Role.ACTIVE and (self.holds_all or bool(self.interrupted_moves)))

    @property
    def settled(self) -> bool:
        return self.covers == self.wanted and self.exact and not (self.must_rewind or self.reset_due)


# ---- the rules -------------------------------------------------------------------------------------------

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
    """Another instance recreated the consumer with partitions that this one did not know: recreate it as well."""
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
        # A partition that is no longer covered was narrowed; whether the consumer was reset since is unknown.
        reset_due = state.reset_due or bool(state.draining - event.covers)
        # Another instance added a newly covered partition, and may not have rewound the consumer.
        learned = event.covers - state.covers if state.style is Style.IN_PLACE and not state.durable else NONE
        state = replace(state, held=state.held & (event.covers | state.wanted) | learned, reset_due=reset_due)
    else:
        # The active instance does what is due: it held everything when it became active, and looked after that. If it
        # is this one after all, it begins by holding everything.
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
    if state.durable:  # somebody changed its filters by hand; a rewind would replay the whole stream
        return replace(state, covers=state.covers | event.partitions, certain=False, ours=None)
    return replace(state, held=state.held | event.partitions, certain=False, ours=None)


def _unpinned(state: Handoff) -> Handoff:
    # The next instance drains these partitions, if the record still requires it.
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
"""Void if the pin changed since the action began. Other results, such as a deleted consumer, stay true."""


def changed(state: Handoff, event: AnyEvent) -> Handoff:
    """The state after an event. Use it for events that arrive during an action."""
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
    """The state after an event, and the next action; None if nothing is to be done."""
    state = replace(changed(state, event), stale=False)
    for applies, then in RULES:
        if applies(state):
            return then(state)
    raise AssertionError(state)

"""Whether this reader is the pinned one, as a table of transitions.

Theory of operation. With the policy `pinned_client` the server chooses one client and sends it all messages, each
with a pin id; the others wait as standby. The choice is not a lock: the server may move on (timeout, admin) while
the old client still works, and it does not wait for messages in flight. So a reader that becomes pinned may first get
message 8 while 2 to 7 are still unacknowledged elsewhere. To take over in order it drops the deliveries so far,
closes its pulls and resets the consumer. A reset keeps the pin and restarts the consumer's own count: the next
delivery has consumer sequence 1. No pull may be open meanwhile: the servers of a cluster agree on a reset a moment
after the request, and a delivery in that moment corrupts their state of messages in flight (messages can be lost when
the leader moves; observed on nats-server 2.15.1).

That count has no gaps, so a gap means that deliveries got lost with a link or a leader. The server would redeliver them
only after ack_wait, behind everything newer: the reader resets the consumer in this case too. A reader that knows what
it has handled has the consumer reset to that, not to its ack floor: a new leader may have a floor that has passed a
message which was never acked (as above), and that message would be lost.

A pin comes only with a delivery: if its last holder died and there is nothing new to deliver, or no more messages may
be in flight, nobody is pinned before ack_wait ends. A waiting reader then resets the consumer for whoever will be
pinned.

`step` says what to do with each event; `jetstream/feed_pin.py` does it. Nothing here knows a clock or a socket.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Phase(Enum):
    """The phase of a reader."""

    STANDBY = auto()
    """Not pinned: pulls carry no pin id."""
    RESETTING = auto()
    """Pinned, reset requested: deliveries are from before it."""
    AWAITING = auto()
    """Pinned, reset confirmed; its first delivery has not arrived yet."""
    PINNED = auto()
    """Pinned, deliveries are good."""
    DOUBTING = auto()
    """Pinned as far as we know, but this process was suspended for long: ask the server before continuing."""


class Event(Enum):
    """What can happen to a reader."""

    FIRST = auto()
    """A delivery under another pin id, and neither the consumer delivered nor this reader handled anything before it
    (or no reset is wanted)."""
    LATER = auto()
    """A delivery under another pin id, after deliveries to somebody else."""
    SAME = auto()
    """A delivery under our pin id."""
    RESTARTED = auto()
    """A delivery under our pin id with consumer sequence 1: the consumer was reset."""
    SKIPPED = auto()
    """A delivery under our pin id, but earlier ones did not arrive."""
    RESET_DONE = auto()
    RESET_FAILED = auto()
    REFUSED = auto()
    """The server refused our pin id (423)."""
    STALLED = auto()
    """We sent no pull for longer than the pin may last: this process was suspended, or its link was down."""
    CONFIRMED = auto()
    """The server says that we are pinned."""
    DENIED = auto()
    """The server says that we are not."""
    ORPHANED = auto()
    """The server says that nobody is pinned and that messages are in flight: their reader is gone."""


class Action(Enum):
    """What the caller does, in this order."""

    TELL_UNPINNED = auto()
    FORGET = auto()
    """Drop everything that no handler has seen yet: the server redelivers it to the pinned reader."""
    ADOPT = auto()
    """Keep the delivery's pin id and send it with every pull."""
    DISCARD_ID = auto()
    """Pull without an id from now on."""
    TELL_PINNED = auto()
    RELEASE = auto()
    """Hand out the held deliveries."""
    DELIVER = auto()
    HOLD = auto()
    DROP = auto()
    RESET = auto()
    """Close all pulls, reset the consumer, pull again."""
    REVIVE = auto()
    """Reset the consumer, for whoever will be pinned."""
    VERIFY = auto()


_A, _E, _P = Action, Event, Phase
_TO_STANDBY = (_A.TELL_UNPINNED, _A.FORGET, _A.DISCARD_ID)
_RENEW = (_A.TELL_UNPINNED, _A.FORGET, _A.ADOPT, _A.TELL_PINNED, _A.DELIVER)
_QUIETLY_TO_STANDBY = (_A.FORGET, _A.DISCARD_ID)

# fmt: off
TRANSITIONS: dict[tuple[Phase, Event], tuple[Phase, tuple[Action, ...]]] = {
    (_P.STANDBY,   _E.FIRST):        (_P.PINNED,    (_A.ADOPT, _A.TELL_PINNED, _A.DELIVER)),
    (_P.STANDBY,   _E.LATER):        (_P.RESETTING, (_A.ADOPT, _A.DROP, _A.RESET)),
    (_P.STANDBY,   _E.REFUSED):      (_P.STANDBY,   (_A.DISCARD_ID,)),
    (_P.STANDBY,   _E.STALLED):      (_P.STANDBY,   ()),
    (_P.STANDBY,   _E.ORPHANED):     (_P.STANDBY,   (_A.REVIVE,)),

    (_P.RESETTING, _E.FIRST):        (_P.RESETTING, (_A.ADOPT, _A.DROP, _A.RESET)),
    (_P.RESETTING, _E.LATER):        (_P.RESETTING, (_A.ADOPT, _A.DROP, _A.RESET)),
    (_P.RESETTING, _E.SAME):         (_P.RESETTING, (_A.DROP,)),
    (_P.RESETTING, _E.RESTARTED):    (_P.RESETTING, (_A.DROP,)),
    (_P.RESETTING, _E.SKIPPED):      (_P.RESETTING, (_A.DROP,)),
    (_P.RESETTING, _E.RESET_DONE):   (_P.AWAITING,  (_A.TELL_PINNED,)),
    (_P.RESETTING, _E.RESET_FAILED): (_P.RESETTING, (_A.RESET,)),
    (_P.RESETTING, _E.REFUSED):      (_P.STANDBY,   _QUIETLY_TO_STANDBY),
    (_P.RESETTING, _E.STALLED):      (_P.STANDBY,   _QUIETLY_TO_STANDBY),

    (_P.AWAITING,  _E.FIRST):        (_P.RESETTING, (_A.TELL_UNPINNED, _A.ADOPT, _A.DROP, _A.RESET)),
    (_P.AWAITING,  _E.LATER):        (_P.RESETTING, (_A.TELL_UNPINNED, _A.ADOPT, _A.DROP, _A.RESET)),
    (_P.AWAITING,  _E.SAME):         (_P.RESETTING, (_A.TELL_UNPINNED, _A.DROP, _A.RESET)),
    (_P.AWAITING,  _E.RESTARTED):    (_P.PINNED,    (_A.DELIVER,)),
    (_P.AWAITING,  _E.SKIPPED):      (_P.RESETTING, (_A.TELL_UNPINNED, _A.DROP, _A.RESET)),
    (_P.AWAITING,  _E.REFUSED):      (_P.STANDBY,   _TO_STANDBY),
    (_P.AWAITING,  _E.STALLED):      (_P.STANDBY,   _TO_STANDBY),

    (_P.PINNED,    _E.FIRST):        (_P.PINNED,    _RENEW),
    (_P.PINNED,    _E.LATER):        (_P.RESETTING, (_A.TELL_UNPINNED, _A.FORGET, _A.ADOPT, _A.DROP, _A.RESET)),
    (_P.PINNED,    _E.SAME):         (_P.PINNED,    (_A.DELIVER,)),
    (_P.PINNED,    _E.RESTARTED):    (_P.PINNED,    (_A.FORGET, _A.DELIVER)),
    (_P.PINNED,    _E.SKIPPED):      (_P.RESETTING, (_A.TELL_UNPINNED, _A.FORGET, _A.DROP, _A.RESET)),
    (_P.PINNED,    _E.REFUSED):      (_P.STANDBY,   _TO_STANDBY),
    (_P.PINNED,    _E.STALLED):      (_P.DOUBTING,  (_A.VERIFY,)),

    (_P.DOUBTING,  _E.FIRST):        (_P.PINNED,    _RENEW),
    (_P.DOUBTING,  _E.LATER):        (_P.RESETTING, (_A.TELL_UNPINNED, _A.FORGET, _A.ADOPT, _A.DROP, _A.RESET)),
    (_P.DOUBTING,  _E.SAME):         (_P.DOUBTING,  (_A.HOLD,)),
    (_P.DOUBTING,  _E.RESTARTED):    (_P.DOUBTING,  (_A.FORGET, _A.HOLD)),
    (_P.DOUBTING,  _E.SKIPPED):      (_P.RESETTING, (_A.TELL_UNPINNED, _A.FORGET, _A.DROP, _A.RESET)),
    (_P.DOUBTING,  _E.REFUSED):      (_P.STANDBY,   _TO_STANDBY),
    (_P.DOUBTING,  _E.STALLED):      (_P.DOUBTING,  (_A.VERIFY,)),
    (_P.DOUBTING,  _E.CONFIRMED):    (_P.PINNED,    (_A.RELEASE,)),
    (_P.DOUBTING,  _E.DENIED):       (_P.STANDBY,   _TO_STANDBY),
}
# fmt: on

LATE_ANSWERS = frozenset((_E.RESET_DONE, _E.RESET_FAILED, _E.CONFIRMED, _E.DENIED, _E.ORPHANED))
"""Answers may arrive when the reader no longer needs them; it then ignores them."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """The parts of a delivery that matter here."""

    pin_id: str
    consumer_sequence: int
    follows: bool
    """It directly follows the previous delivery."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A reader's view of its pin."""

    phase: Phase = Phase.STANDBY
    pin_id: str | None = None

    def __repr__(self) -> str:
        return f"<Pin {self.phase.name.lower()} {self.pin_id or ''}>".replace(" >", ">")

    @property
    def holds(self) -> bool:
        """The server chose us, as far as we know, and our deliveries are in order."""
        return self.phase in (Phase.PINNED, Phase.AWAITING, Phase.DOUBTING)


def event_of(pin: Pin, delivered: Delivered, *, reset_on_takeover: bool, resumes: bool = False) -> Event:
    """The event of a delivery for a reader in this state.

    `resumes`: the reader has handled messages of the consumer, and knows where it is.
    """
    ours = pin.pin_id == delivered.pin_id
    if not reset_on_takeover:
        return Event.SAME if ours else Event.FIRST
    if delivered.consumer_sequence == 1 and (ours or not resumes):
        return Event.RESTARTED if ours else Event.FIRST
    if not ours:
        return Event.LATER
    return Event.SAME if delivered.follows else Event.SKIPPED


def step(pin: Pin, event: Event, delivered: Delivered | None = None) -> tuple[Pin, tuple[Action, ...]]:
    """The next state, and the actions."""
    if (pin.phase, event) not in TRANSITIONS:
        assert event in LATE_ANSWERS, f"{event} cannot happen in {pin.phase}"
        return pin, ()
    phase, actions = TRANSITIONS[pin.phase, event]
    pin_id = pin.pin_id
    if Action.ADOPT in actions:
        assert delivered is not None
        pin_id = delivered.pin_id
    elif Action.DISCARD_ID in actions:
        pin_id = None
    return Pin(phase, pin_id), actions

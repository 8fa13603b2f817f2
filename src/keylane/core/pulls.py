"""How a continuous pull reader asks for messages: credit, and what each status answer means.

A reader may hold `max_messages` and `max_bytes` in all: its buffer plus what it has requested and the server has not
sent yet. `PullWindow` keeps that sum and decides when to pull again. It knows no clock, no socket and no consumer;
`jetstream/feed.py` performs its decisions.

Messages do not tell which pull they answer, so the requested messages are one sum. Status answers do tell: each pull
has its own reply subject that carries its generation and batch. A new generation voids all earlier pulls; late answers
to them change nothing.

Bytes are bounded by asking for no more messages than fit if each is as large as the largest one seen, and by the byte
limit that every pull carries. When messages suddenly grow, two pulls may be open with the old estimate: memory then
stays under twice `max_bytes`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

_TOKEN = re.compile(r"([0-9]{1,18})\.([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class Pull:
    """One request for up to `batch` messages."""

    generation: int
    batch: int

    @property
    def token(self) -> str:
        """The end of the reply subject, which identifies the pull in status answers."""
        return f"{self.generation}.{self.batch}"

    @classmethod
    def from_token(cls, token: str) -> Pull | None:
        """The pull of a token; None if it is not a token."""
        found = _TOKEN.fullmatch(token)
        return cls(int(found[1]), int(found[2])) if found is not None else None


class Meaning(Enum):
    """What a status answer means for the reader."""

    ALIVE = auto()
    """A heartbeat: the pull is still open."""
    ENDED = auto()
    """The pull ended normally; pull again."""
    REFUSED = auto()
    """The server accepts no further pull; pull again after a pause."""
    INTERRUPTED = auto()
    """The server dropped all pulls (leader change, shutdown); pull again after a pause."""
    UNAVAILABLE = auto()
    """Nobody answers for the consumer; check whether it still exists."""
    PIN_LOST = auto()
    """Another client is pinned now; continue without the pin id."""
    OUT_OF_BYTES = auto()
    """The next message does not fit into the rest of the pull's bytes; pull again."""
    TOO_LARGE = auto()
    """The next message does not fit into a whole pull's bytes; retrying cannot help."""
    LIMIT = auto()
    """The pull is beyond a limit of the consumer's configuration."""
    DELETED = auto()
    """The consumer is gone."""
    INVALID = auto()
    """The request itself is wrong; retrying cannot help."""


@dataclass(frozen=True, slots=True)
class Status:
    """A status answer as the server sent it."""

    code: int
    text: str
    pending_messages: int | None = None


_CODES: dict[int, Meaning] = {
    100: Meaning.ALIVE,
    400: Meaning.INVALID,
    404: Meaning.ENDED,
    408: Meaning.ENDED,
    423: Meaning.PIN_LOST,
    503: Meaning.UNAVAILABLE,
}

# The server sends 409 for many reasons, and only the text tells them apart. Prefixes, in lower case.
_CONFLICTS: tuple[tuple[str, Meaning], ...] = (
    ("consumer deleted", Meaning.DELETED),
    ("consumer is push based", Meaning.INVALID),
    ("leadership change", Meaning.INTERRUPTED),
    ("server shutdown", Meaning.INTERRUPTED),
    ("exceeded maxwaiting", Meaning.REFUSED),
    ("exceeded maxrequestbatch", Meaning.LIMIT),
    ("exceeded maxrequestexpires", Meaning.LIMIT),
    ("exceeded maxrequestmaxbytes", Meaning.LIMIT),
    ("message size exceeds maxbytes", Meaning.OUT_OF_BYTES),
    ("batch completed", Meaning.ENDED),
)


def meaning_of(status: Status) -> Meaning:
    """The meaning of every code and text in docs/jetstream.md; an unknown one is INVALID, without guessing."""
    if status.code == 409:
        text = status.text.lower()
        for beginning, meaning in _CONFLICTS:
            if text.startswith(beginning):
                return meaning
    return _CODES.get(status.code, Meaning.INVALID)


class PullWindow:
    """The credit of one reader. Mutable, because it is stepped for every buffer from the socket."""

    __slots__ = (
        "_seen",
        "_seen_largest",
        "asked",
        "generation",
        "largest",
        "max_bytes",
        "max_messages",
        "overlapping",
    )

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        assert max_messages > 0
        assert max_bytes > 0
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.largest = 1
        self._seen = 0
        self._seen_largest = 1
        self.generation = 0
        self.asked = 0
        self.overlapping = True
        """Whether the next pull may be sent before the last one has ended."""

    def __repr__(self) -> str:
        return f"<PullWindow asked={self.asked}/{self.max_messages} generation={self.generation}>"

    @property
    def size(self) -> int:
        """How many messages fit in all, if each is as large as the largest one known."""
        return max(1, min(self.max_messages, self.max_bytes // self.largest))

    @property
    def low_water(self) -> int:
        """With so many messages buffered the next `ask` gives a pull, if nothing else changes. May be negative."""
        size = self.size
        return size - max(1, size // 2) - self.asked

    def ask(self, buffered: int, buffered_bytes: int) -> Pull | None:
        """The pull to send now, or None while enough is on its way or the buffer is full."""
        if buffered == 0 and self._seen >= self.max_messages:
            # One huge message must not shrink the window forever. Nothing is buffered, so from here on
            # `largest` again covers all later messages.
            self.largest, self._seen_largest, self._seen = self._seen_largest, 1, 0
        if self.asked and not self.overlapping:
            return None
        window = self.size
        fitting = max(0, self.max_bytes - buffered_bytes) // self.largest
        room = min(window - buffered, fitting) - self.asked
        if buffered == 0 and self.asked == 0:
            room = max(1, room)
        if room < max(1, window // 2):
            return None
        self.asked += room
        return Pull(self.generation, room)

    def ask_for(self, batch: int) -> Pull:
        """A pull of exactly this size, for a reader that pulls on demand."""
        self.asked += batch
        return Pull(self.generation, batch)

    def sign_of_life(self) -> Pull:
        """A pull that must not deliver anything; only its refusal counts."""
        return Pull(self.generation, 0)

    def delivered(self, messages: int, largest: int) -> None:
        """The server sent this many of the requested messages; the largest had this many bytes."""
        self.asked = max(0, self.asked - messages)
        self.largest = max(self.largest, largest)
        self._seen += messages
        self._seen_largest = max(self._seen_largest, largest)

    def void(self) -> None:
        """No requested message will arrive: the link, the leader or the pin changed."""
        self.generation += 1
        self.asked = 0

    def answered(self, pull: Pull, status: Status) -> Meaning | None:
        """Book a status answer. Returns None if it belongs to a voided pull."""
        if pull.generation != self.generation:
            return None
        meaning = meaning_of(status)
        if meaning is Meaning.ALIVE:
            return meaning
        if meaning in (Meaning.INTERRUPTED, Meaning.UNAVAILABLE, Meaning.PIN_LOST):
            self.void()
            return meaning
        left = pull.batch if status.pending_messages is None else min(pull.batch, status.pending_messages)
        self.asked = max(0, self.asked - left)
        if meaning is Meaning.OUT_OF_BYTES and left == pull.batch > 0:
            return Meaning.TOO_LARGE
        return meaning

"""What a feed may hold, how long its pulls live, and its callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from keylane.core.pull_budget import PullShare
from keylane.core.pulls import Meaning
from keylane.errors import InvalidInput
from keylane.jetstream.message import Message
from keylane.jetstream.settings import check_seconds


@dataclass(frozen=True, slots=True)
class Notice:
    """Something an operator may want to know; the feed goes on."""

    meaning: Meaning | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PinOptions:
    """How a feed takes part in a `pinned_client` group."""

    group: str
    timeout_s: float
    """The consumer's priority_timeout."""
    reset_on_takeover: bool
    resume_at: Callable[[], int | None] | None = None
    """Where a takeover resets the consumer to: the first sequence that this reader has not handled. None: it has
    handled nothing yet, and the consumer's ack floor counts."""
    looks: int | None = None
    """How often a standby looks whether the last reader died at work, since it became one; None: for as long as it
    waits. Each look is a request."""
    on_pinned: Callable[[str], None] | None = None
    """Called with the pin id before the first message under it is handed out."""
    on_unpinned: Callable[[str], None] | None = None
    """Called with the pin id when the pin is known to be lost, or when deliveries under it are: then `on_pinned`
    follows with the same id, and all messages that are not acked come again. A handler may be running then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBudget:
    """A feed with `on_messages` that shares what may be in flight with other feeds."""

    share: PullShare
    in_flight: Callable[[], int]
    """How many of the messages that `on_messages` got are not settled."""
    on_window: Callable[[int, int], None]
    """Called after every look at the budget: how many may be in flight, and how few are when `Feed.refill` is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedOptions:
    """Bounds and timers of a feed.

    `max_messages` and `max_bytes` bound what a feed holds: what is buffered plus what the server was asked for.
    `expires_s` is the lifetime of one pull. A server that sends neither messages nor heartbeats for two `heartbeat_s`
    is asked again.
    """

    max_messages: int = 1000
    max_bytes: int = 32 * 1024 * 1024
    expires_s: float = 30.0
    heartbeat_s: float = 5.0
    on_notice: Callable[[Notice], None] | None = None
    pull_fields: Mapping[str, Any] = field(default_factory=dict)
    """Sent with every pull: the terms of a priority group."""
    pin: PinOptions | None = None
    on_demand: bool = False
    """Pull only when `fetch` is called."""
    on_messages: Callable[[list[Message]], None] | None = None
    """Called with every batch inside the socket's read callback, instead of iteration: the shortest way from the
    server to code that never waits. The consumer's `max_ack_pending` bounds it, or `budget`."""
    budget: SharedBudget | None = None

    around_reset: Callable[[], AbstractContextManager[None]] | None = None
    """Entered while the consumer is reset: acks that are sent meanwhile may not count."""

    def __post_init__(self) -> None:
        for name in ("max_messages", "max_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidInput(f"{name} is {value!r}: a feed must hold something; give a whole number, at least 1")
        if check_seconds(self.expires_s, "expires_s") < 0.1:
            raise InvalidInput(f"expires_s is {self.expires_s}: a pull must live at least 0.1 s")
        if not 0 < self.heartbeat_s <= self.expires_s / 2:
            raise InvalidInput(
                f"heartbeat_s is {self.heartbeat_s}: it must be positive and at most half of expires_s "
                f"({self.expires_s}), as the server demands"
            )

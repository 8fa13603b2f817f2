"""The options of `join` that say how the messages of a member are handled, and their rules."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, Protocol

from keylane.core.parked_keys import KeyGate
from keylane.dispatch import Executor
from keylane.dispatch.handler_call import check_executor
from keylane.errors import InvalidInput
from keylane.processing.message import GroupMessage
from keylane.retrying import backoff_s

Handler = Callable[[GroupMessage], Awaitable[None]] | Callable[[GroupMessage], None]
Order = Literal["key", "partition", "strict", "none"]
Commits = Literal["message", "prefix"]
Failure = Callable[[GroupMessage, BaseException, int], None]
Gate = Callable[[GroupMessage], Awaitable[KeyGate]]
GiveUp = Callable[[GroupMessage, BaseException, int], Awaitable[None]]
Crowded = Callable[[GroupMessage, int], None]

LANES: dict[Order, Callable[[GroupMessage], Hashable]] = {
    "key": attrgetter("place.lane"),
    "partition": attrgetter("place.partition"),
    "strict": lambda _: 0,
    "none": attrgetter("delivery_sequence"),
}
"""Messages with the same answer are handled one at a time, in order."""


class MessageJournal(Protocol):
    """Records the outcome of every try of every message."""

    @property
    def stream(self) -> str: ...

    def now_ns(self) -> int: ...

    def note(self, message: GroupMessage, outcome: str, started_ns: int, ended_ns: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerOptions:
    """How the messages of a member are handled."""

    order: Order
    concurrency: int
    ack_wait_s: float
    remember: int
    manual_ack: bool = False
    commits: Commits = "message"
    """How what is handled is acked: each message, or the contiguous prefix of the partition with one ack."""
    tracks_position: bool = False
    """Whether to know up to which sequence everything is handled. Commits of a prefix do so anyway."""
    acks: bool = True
    """False for a consumer without acks: what was delivered never comes again."""
    max_tries: int | None = None
    """How often a message is tried before it is given up; None: for ever."""
    time_limit_s: float | None = None
    """How long a handler may take; then it is cancelled, which counts as a failure."""
    executor: Executor = "thread"
    """Where a plain function runs."""
    grace_s: float = 1.0
    """How long handlers may go on after the pin is lost; then they are cancelled."""
    on_failure: Failure | None = None
    on_crowded: Crowded | None = None
    """A lane has come to hold half of all that may be in flight: soon nothing else is delivered."""
    backoff: Callable[[int], float] = backoff_s
    """Seconds before the next try, after so many failures."""
    give_up: GiveUp | None = None
    """Called with a message that had all its tries, or whose payload is invalid; it is terminated when this returns."""
    delay: GiveUp | None = None
    """Called with a message that failed and has tries left: it is tried again later, off its lane, and is acked when
    this returns. None: it is tried again in its lane."""
    gate: Gate | None = None
    """Called before each handler, where keys are parked: then `give_up` parks."""
    journal: MessageJournal | None = None
    on_returned: Callable[[float], object] | None = None
    """Called for every handler that returned, with its seconds."""
    on_outcome: Callable[[str], None] | None = None
    """Called for every other try: failed, dead, cancelled."""
    on_reset: Callable[[], None] | None = None
    """Called when the consumer is reset."""

    def check(self) -> None:
        if self.order not in LANES:
            raise InvalidInput(f"order is {self.order!r}: use one of {', '.join(LANES)}")
        if self.concurrency < 1:
            raise InvalidInput(f"concurrency is {self.concurrency}: at least 1 handler must be allowed to run")
        if self.max_tries is not None and self.max_tries < 1:
            raise InvalidInput(f"max_tries is {self.max_tries}: a message must be tried at least once")
        if self.max_tries is not None and not self.acks:
            raise InvalidInput("max_tries needs acks: without them a message is never given up")
        if self.time_limit_s is not None and self.time_limit_s <= 0:
            raise InvalidInput(f"time_limit_s is {self.time_limit_s}: a handler needs some time")
        check_executor(self.executor)
        if self.executor == "process" and self.manual_ack:
            raise InvalidInput("manual_ack needs the handler in this process: leave out executor='process'")
        if self.grace_s < 0:
            raise InvalidInput(f"grace_s is {self.grace_s}: give 0 or more seconds")

    @property
    def server_retries(self) -> bool:
        """Whether a failed message goes back to the server, so that nothing waits for it."""
        return self.order == "none" and self.acks and self.delay is None

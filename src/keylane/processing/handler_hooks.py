"""The hooks of what runs a handler on a stream: a worker of a fleet, a member of a group, a handler of an app."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from keylane.hooks import Hooks
from keylane.jetstream import Message
from keylane.processing.handler_options import Crowded, Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerHooks(Hooks):
    """Called when something happens to a handler. Plain functions; they must return at once."""

    on_state: Callable[..., None] | None = None
    """The state changed, or what it waits for: `state` and `waiting_for` of the worker or member."""
    on_partitions: Callable[..., None] | None = None
    """The partitions that are handled here, before and after."""
    on_failure: Failure | None = None
    """The handler raised: message, error, and how often it failed by now. Such failures are logged at DEBUG then."""
    on_crowded: Crowded | None = None
    """One key has come to hold half of `max_ack_pending`: a message of it, and how many there are. Soon nothing else is
    delivered."""
    on_reset: Callable[[], None] | None = None
    """A consumer is reset: what was delivered and not acked is delivered again."""
    on_delivered: Callable[[list[Message]], None] | None = None
    """Called for every batch that the server delivers. It must be quick, and must not raise."""
    on_returned: Callable[[float], object] | None = None
    """Called for every handler that returned, with its seconds. As `on_delivered`."""
    on_outcome: Callable[[str], None] | None = None
    """Called for every other try of a message: failed, dead, cancelled. As `on_delivered`."""
    on_ended: Callable[[str], None] | None = None
    """It has ended, and why."""

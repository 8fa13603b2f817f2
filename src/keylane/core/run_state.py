"""The state of what runs until it is stopped, where nothing else is worth a word of its own."""

from __future__ import annotations

from enum import StrEnum


class RunState(StrEnum):
    """What an app, a Marshal consumer, a feed or an embedded server is doing.

    Members of groups and workers of fleets have more states: `MemberState`, `WorkerState`.
    """

    NEW = "new"
    """It was not started yet."""
    RUNNING = "running"
    STOPPING = "stopping"
    """It finishes what is at work."""
    ENDED = "ended"

"""Dead letters and parked keys of groups and fleets: to look at, replay, drop and release (docs/dead-letters.md)."""

from __future__ import annotations

from keylane.lazy import public_names
from keylane.processing.dead_letters import (
    DeadLetter,
    DeadLetters,
    Unpublished,
    dead_letter_stream,
    drop,
    list_dead_letters,
    put_unpublished,
    read_dead_letter,
    replay,
)
from keylane.processing.key_parking import ReleaseResult, parked_count, release, wait_for_release

__all__ = [
    "DeadLetter",
    "DeadLetters",
    "ReleaseResult",
    "Unpublished",
    "dead_letter_stream",
    "drop",
    "list_dead_letters",
    "parked_count",
    "put_unpublished",
    "read_dead_letter",
    "release",
    "replay",
    "wait_for_release",
]

__dir__ = public_names(__all__)

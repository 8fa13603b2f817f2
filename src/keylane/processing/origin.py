"""Who has a message, and what a ledger asks about that: the part that groups and fleets have in common."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class GroupSource(NamedTuple):
    """Which bucket and which stream a group is of, as the server has them now."""

    bucket: str
    """When the group's bucket was made: another bucket counts its revisions from 1 again."""
    revision: int
    """Of the group's record in it."""
    stream_created: str
    """When the stream was made; empty if it does not exist."""
    stream_created_ns: int
    last_sequence: int


class MessageOrigin(Protocol):
    """Who has a message, and what a ledger asks about that."""

    stream: str
    group: str
    instance: str
    pin_id: str | None

    @property
    def member(self) -> str: ...
    @property
    def from_queue(self) -> bool: ...
    @property
    def revision(self) -> int: ...
    @property
    def version(self) -> tuple[int, str]: ...

    async def source(self) -> GroupSource: ...

    async def fence(self, *, anew: bool = False) -> tuple[int, int]: ...

    def wait(self, waiting_for: str | None) -> None: ...

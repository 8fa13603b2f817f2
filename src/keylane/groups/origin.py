"""Where a member's messages come from, and the token that fences off whoever had them before.

All messages of one instance share one origin; it changes with the instance: a new pin, a new configuration.
"""

from __future__ import annotations

from keylane.errors import Fenced
from keylane.jetstream import consumers
from keylane.jetstream.connection import Connection


class Origin:
    """One running instance of a member."""

    __slots__ = (
        "_connection",
        "_consumer",
        "_fence",
        "from_queue",
        "group",
        "instance",
        "member",
        "pin_id",
        "revision",
        "stream",
    )

    def __init__(
        self,
        connection: Connection,
        names: tuple[str, str, str],
        consumer: tuple[str, str],
        *,
        instance: str,
        revision: int,
    ) -> None:
        self.stream, self.group, self.member = names
        self.from_queue = consumer[0] != self.stream
        """The messages are copies in the group's own queue (elastic), not the stream's own (static)."""
        self.instance = instance
        self.revision = revision
        """Of the group's record, as this instance follows it."""
        self.pin_id: str | None = None
        """None while this instance is not the pinned one, as far as it knows."""
        self._connection = connection
        self._consumer = consumer
        self._fence: tuple[str, int] = ("", 0)

    def __repr__(self) -> str:
        return f"<Origin {self.stream}/{self.group}/{self.member} {self.instance} pin={self.pin_id}>"

    async def fence(self) -> tuple[int, int]:
        """A token that grows with every change of a partition's owner: the record's revision, then the pin's time.

        A partition moves to another member with a new revision, and to another instance with a new pin. Whatever
        takes writes from a group keeps the highest token per partition and refuses writes with a lower one.
        """
        pin_id = self.pin_id
        if pin_id is not None and self._fence[0] != pin_id:
            info = await consumers.info(self._connection, *self._consumer)
            for state in info.priority_groups:
                if state.pinned_client_id == pin_id and state.pinned_since is not None:
                    self._fence = (pin_id, _nanoseconds(state.pinned_since.timestamp()))
        if pin_id is None or pin_id != self.pin_id or self._fence[0] != pin_id:
            raise Fenced(
                f"this instance of member {self.member!r} of group {self.group!r} is not the pinned one any more: "
                "another instance has its messages"
            )
        return self.revision, self._fence[1]


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e6) * 1000

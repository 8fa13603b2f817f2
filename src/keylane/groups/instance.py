"""One running instance of a member: its pin, the record that it follows, and its fencing token.

All messages of an instance share one `Origin`, which changes with its pin and with the group's record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from keylane.errors import Fenced, NotFound
from keylane.groups.consumer_spec import key_of_group
from keylane.groups.store import bucket_of
from keylane.jetstream import Connection, consumers, streams
from keylane.processing.origin import GroupSource

_LOOKS = 5
_CATCH_UP_S = 0.1


class Origin:
    """One running instance of a member."""

    __slots__ = (
        "_behind",
        "_connection",
        "_consumer",
        "_fence",
        "_followed",
        "from_queue",
        "group",
        "instance",
        "member",
        "pin_id",
        "stream",
        "version",
        "wait_changed",
        "waiting_for",
    )

    def __init__(
        self,
        connection: Connection,
        names: tuple[str, str, str],
        consumer: tuple[str, str],
        *,
        instance: str,
        version: tuple[int, str],
        behind: Callable[[], None] = lambda: None,
    ) -> None:
        self.stream, self.group, self.member = names
        self.from_queue = consumer[0] != self.stream
        """The messages are copies in the group's own queue (elastic), not the stream's own (static)."""
        self.instance = instance
        self.version = version
        """Of the group's record, as this instance follows it: its revision, and when it was written."""
        self.pin_id: str | None = None
        """None while this instance is not the pinned one, as far as it knows."""
        self._connection = connection
        self._consumer = consumer
        self._fence: tuple[str, int] = ("", 0)
        self._behind = behind
        self._followed = asyncio.Event()
        self.waiting_for: str | None = None
        """Why this instance's handler does nothing until somebody decides something; see `wait`."""
        self.wait_changed: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"<Origin {self.stream}/{self.group}/{self.member} {self.instance} pin={self.pin_id}>"

    @property
    def revision(self) -> int:
        """Of the group's record, as this instance follows it."""
        return self.version[0]

    def follow(self, version: tuple[int, str]) -> None:
        """The instance follows this version of the record from now on."""
        self.version = version
        self._followed.set()

    def wait(self, waiting_for: str | None) -> None:
        """Say what the handler waits for before it can handle any message; None: nothing. The member reports it."""
        if waiting_for != self.waiting_for:
            self.waiting_for = waiting_for
            self.wait_changed()

    async def source(self) -> GroupSource:
        """Ask the server which bucket and stream the group is of now.

        The answer is for the record that this instance follows. If the server has a newer one, waits until the instance
        has read it; raises `Fenced` if that takes long.
        """
        bucket = bucket_of(self._connection, "elastic" if self.from_queue else "static")
        for _ in range(_LOOKS):
            before = await bucket.created()
            entry = await bucket.get(key_of_group(self.stream, self.group))
            if before is None or entry is None or entry.value is None:
                raise Fenced(f"group {self.group!r} of stream {self.stream!r} was deleted: its record is gone")
            self._followed.clear()
            is_followed = self.version == (entry.revision, entry.written)
            if is_followed and before == await bucket.created():
                break
            if not is_followed:
                await self._catch_up()
        else:
            raise Fenced(
                f"this instance of member {self.member!r} does not follow the newest record of group {self.group!r} yet"
            )
        try:
            state = await streams.state(self._connection, self.stream)
        except NotFound:  # an elastic group still handles what its queue has of it
            return GroupSource(before.isoformat(), entry.revision, "", 0, 0)
        made = state.created
        return GroupSource(
            before.isoformat(), entry.revision, made.isoformat(), _nanoseconds(made.timestamp()), state.last_sequence
        )

    async def _catch_up(self) -> None:
        self._behind()
        try:
            async with asyncio.timeout(_CATCH_UP_S):
                await self._followed.wait()
        except TimeoutError:
            return

    async def fence(self, *, anew: bool = False) -> tuple[int, int]:
        """A token that grows with every change of a partition's owner: the record's revision, then the pin's time.

        A partition moves to another member with a new revision, and to another instance with a new pin. Whatever
        takes writes from a group keeps the highest token per partition and refuses writes with a lower one. A bucket
        that is made anew counts its revisions from 1 again: `source` tells. The server is asked for the pin once,
        and `anew` whenever it may have moved.
        """
        pin_id = self.pin_id
        if anew:
            self._fence = ("", 0)
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

"""Where the messages of one partition come from: the fleet, the worker, and the fencing token of its claim.

What exactly once asks of a message's origin: who claims it, with which token, on which stream.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from keylane.errors import Fenced, NotFound
from keylane.jetstream import Connection, streams
from keylane.processing.origin import GroupSource

_BUCKET = "fleet"
"""A fleet's tokens grow through every bucket: to a ledger they are of one."""


class PartitionOrigin:
    """One partition while one worker has it."""

    __slots__ = (
        "_connection",
        "_is_owner",
        "_wait",
        "from_queue",
        "group",
        "instance",
        "member",
        "partition",
        "pin_id",
        "stream",
        "token",
    )

    def __init__(
        self,
        connection: Connection,
        names: tuple[str, str, str],
        *,
        instance: str,
        partition: str,
        wait: Callable[[str | None], None],
        is_owner: Callable[[str], Awaitable[bool]],
        from_copy: bool = False,
    ) -> None:
        """`names`: stream, fleet, worker. `wait`: told why a handler can do nothing until somebody decides.

        `is_owner`: asks the store whether this worker owns the partition.

        `from_copy`: messages come from a copy of the stream, and carry the sequence of their original.
        """
        self.from_queue = from_copy
        self.stream, self.group, self.member = names
        self.instance = instance
        self.partition = partition
        self.pin_id: str | None = None
        self.token = 0
        """0: the partition is not claimed."""
        self._connection = connection
        self._wait = wait
        self._is_owner = is_owner

    def __repr__(self) -> str:
        return f"<PartitionOrigin {self.stream}/{self.group} partition {self.partition} of {self.member}: {self.token}>"

    @property
    def revision(self) -> int:
        return self.token

    @property
    def version(self) -> tuple[int, str]:
        return self.token, self.instance

    def wait(self, waiting_for: str | None) -> None:
        self._wait(waiting_for)

    async def source(self) -> GroupSource:
        self._check()
        try:
            state = await streams.state(self._connection, self.stream)
        except NotFound:
            raise Fenced(f"stream {self.stream!r} does not exist any more") from None
        made = state.created
        return GroupSource(
            _BUCKET, self.token, made.isoformat(), round(made.timestamp() * 1e6) * 1000, state.last_sequence
        )

    async def fence(self, *, anew: bool = False) -> tuple[int, int]:
        """The token alone: it grows with every change of owner, whatever the pin does. `anew`: the store is asked."""
        if anew and not await self._is_owner(self.partition):
            raise self._fenced()
        self._check()
        return self.token, 0

    def _check(self) -> None:
        if not self.token:
            raise self._fenced()

    def _fenced(self) -> Fenced:
        return Fenced(
            f"worker {self.member!r} of fleet {self.group!r} does not own partition {self.partition} any more"
        )

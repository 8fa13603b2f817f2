"""At least once: handle messages first, and let the heartbeats say up to which offset everything is done.

Owns: the offsets of one owned partition. Messages may be done in any order; a heartbeat names the first that is not.
The next owner begins there, so messages done since the last heartbeat are handled again.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from keylane.core.partition_offsets import Prefix

if TYPE_CHECKING:
    from keylane.marshal.owned_partition import OwnedPartition


class AtLeastOnce:
    """The progress through one partition."""

    retries = True
    hold = 1.0
    """Intervals after a heartbeat in which handlers may start. So an owner that dies has started at most one interval
    of messages that no heartbeat reported."""

    def __init__(self, offset: int) -> None:
        self._prefix = Prefix(offset)
        self.read_to = offset

    def __repr__(self) -> str:
        return repr(self._prefix)

    @property
    def offset(self) -> int:
        """The next message to read, for whoever owns the partition next."""
        return self._prefix.offset

    @property
    def in_flight(self) -> int:
        """How many messages were read and are not done."""
        return self._prefix.at_work

    def finish(self, offset: int) -> None:
        self._prefix.finish(offset)

    async def run(self, owned: OwnedPartition) -> None:
        """Read and dispatch until the partition is over."""
        options = owned.options

        async def limit() -> int:
            await owned.fewer_than(options.max_in_flight)
            return min(options.batch_size, max(options.max_in_flight - self.in_flight, 1))

        async with aclosing(owned.batches(self.read_to, limit)) as batches:
            async for records in batches:
                if owned.is_over:
                    return
                for record in records:
                    self._prefix.start(record.offset)
                self.read_to = records[-1].offset + 1
                owned.dispatch(records)

    async def stop(self, running: asyncio.Task[None], owned: OwnedPartition) -> None:
        """Read nothing more. Messages that have not started are left to the next owner."""
        running.cancel()

    def close(self) -> None:
        """Nothing is shared with other partitions."""

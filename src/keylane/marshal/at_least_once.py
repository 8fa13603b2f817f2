"""At least once: work first, and let the heartbeats say how far everything is done.

Owns: the positions of one tenure. Messages may be done in any order; a heartbeat names the first that is not. Whoever
comes next begins there, so what was done since the last heartbeat is done again.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from keylane.core.partition_offsets import Prefix
from keylane.marshal.crew import Crew
from keylane.marshal.reading import batches
from keylane.marshal.source import Source
from keylane.marshal.tenure import Tenure
from keylane.marshal.trouble import Patience


class AtLeastOnce:
    """How far one partition is, and the reading of it."""

    retries = True
    hold = 1.0
    """Whoever dies has begun one interval of messages at most that no heartbeat told of."""

    def __init__(self, offset: int) -> None:
        self._prefix = Prefix(offset)
        self.read_to = offset

    def __repr__(self) -> str:
        return repr(self._prefix)

    @property
    def offset(self) -> int:
        return self._prefix.offset

    @property
    def at_work(self) -> int:
        return self._prefix.at_work

    def finish(self, offset: int) -> None:
        self._prefix.finish(offset)

    async def run(
        self, tenure: Tenure, source: Source, crew: Crew, patience: Patience, *, batch_size: int, max_in_flight: int
    ) -> None:
        """Read and hand out until the tenure is over."""

        async def room() -> int:
            await tenure.fewer_than(max_in_flight)
            return min(batch_size, max(max_in_flight - self.at_work, 1))

        async with aclosing(batches(source, tenure.where, self.read_to, room, patience)) as found:
            async for records in found:
                if tenure.is_over:
                    return
                for record in records:
                    self._prefix.start(record.offset)
                self.read_to = records[-1].offset + 1
                crew.offer(tenure, records)

    async def stop(self, running: asyncio.Task[None], tenure: Tenure, grace_s: float) -> None:
        """Read nothing more. What has not started is for whoever comes next."""
        running.cancel()

    def close(self) -> None:
        """Nothing is shared with other tenures."""

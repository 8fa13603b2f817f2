"""Reading a partition of a source on and on, through what may pass."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

from keylane.core.claim_choice import TopicPartition
from keylane.errors import KeylaneError
from keylane.marshal.source import Source, SourceRecord
from keylane.marshal.trouble import Patience

_WAIT_S = 1.0


async def batches(
    source: Source, where: TopicPartition, offset: int, room: Callable[[], Awaitable[int]], patience: Patience
) -> AsyncGenerator[list[SourceRecord], None]:
    """The messages from an offset on, in order. `room` says how many may come next, when some may; 0 ends it.

    After trouble the partition is read anew from the place that was reached.
    """
    while True:
        try:
            async with source.reader(*where, offset) as reader:
                while most := await room():
                    records = await reader.next(most, _WAIT_S)
                    patience.worked()
                    if records:
                        offset = records[-1].offset + 1
                        yield records
                return
        except KeylaneError as error:
            await patience.after(error)

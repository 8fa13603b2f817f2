"""A heartbeat whose outcome was unknown, on a log that stamps a record before others can read it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from keylane.core.claim_choice import TopicPartition
from keylane.core.claim_facts import LogRecord
from keylane.core.claim_records import Message
from keylane.errors import OutcomeUnknown
from keylane.marshal.log import Bounds, Newest, Position
from keylane.marshal.log_view import ClientIdentity, LogView, own_clock
from keylane.marshal.partition_claim import PartitionClaim
from keylane.retrying import Backoff
from tests.integration.marshal.rig import GROUP, TOPIC, LiveLog, View

INTERVAL_S = 2.0
WHERE = TopicPartition(TOPIC, 0)


class SlowToShow(View):
    """The first append is written and not confirmed, and is not shown before the second, which is never written."""

    def __init__(self, log: LiveLog) -> None:
        super().__init__(log, compares=False)
        self.tries = 0

    async def append(self, message: Message, partition: int, *, expect: Newest | None = None) -> Position:
        self.tries += 1
        if self.tries == 1:
            await self.log.append(message, partition)
            await asyncio.sleep(0.3 * INTERVAL_S)
        raise OutcomeUnknown("no answer in time")

    async def bounds(self, partition: int) -> Bounds:
        first, end = await super().bounds(partition)
        return Bounds(first, end - (self.tries == 1))

    async def read(self, partition: int, offset: int) -> AsyncIterator[LogRecord]:
        end = (await self.bounds(partition)).end
        async for record in super().read(partition, offset):
            if record.offset < end:
                yield record


async def test_an_owner_counts_from_the_first_sending_that_may_have_landed() -> None:
    log, identity = LiveLog(), ClientIdentity("anna", GROUP)
    won = await log.append(identity.claiming(WHERE), 0)
    slow = SlowToShow(log)
    view = LogView(slow, identity, INTERVAL_S, lambda: Backoff("the log", 30))
    await view.read()
    ours = PartitionClaim(view, WHERE, won.offset, offset=lambda: 0, hold=1.0)
    began = own_clock()
    assert await ours.heartbeat()
    assert slow.tries == 2
    claim = view.world.claim_of(*ours.key)
    assert claim is not None
    assert claim.heartbeat_at == won.offset + 1
    counted_from = ours._safe_until - ours._hold_s
    assert counted_from < began + 0.3 * INTERVAL_S, "others may begin two intervals after the stamp"

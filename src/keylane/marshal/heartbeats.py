"""The heartbeats of one tenure, and what is done with each: commit the offset, see whether the owner keeps up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from keylane.core.heartbeat_pace import Pace, heartbeat_delay_s
from keylane.errors import KeylaneError
from keylane.marshal.claiming import Work
from keylane.marshal.logbook import own_clock
from keylane.marshal.source import Source
from keylane.marshal.tenure import Tenure
from keylane.marshal.trouble import may_pass

_log = logging.getLogger("keylane.marshal")


class Heartbeats:
    """Beats until the partition is lost."""

    def __init__(
        self,
        tenure: Tenure,
        work: Work,
        source: Source,
        *,
        interval_s: float,
        fraction: Callable[[], float],
        release_when_behind: bool,
    ) -> None:
        self._tenure = tenure
        self._work = work
        self._source = source
        self._interval_s = interval_s
        self._fraction = fraction
        self._release_when_behind = release_when_behind
        self._pace = Pace()
        self._committed: int | None = None

    async def run(self) -> None:
        """Returns when the partition is somebody else's."""
        beaten_at = own_clock()
        while True:
            due_at = beaten_at + heartbeat_delay_s(self._interval_s, self._fraction())
            await self._account(max(due_at - own_clock(), 0.0))
            await asyncio.sleep(max(due_at - own_clock(), 0.0))
            beaten_at = own_clock()
            if not await self._tenure.heartbeat():
                return

    async def _account(self, within_s: float) -> None:
        """What is of use but not of need: it must not hold up the next heartbeat."""
        try:
            async with asyncio.timeout(within_s):
                await self._commit()
                if self._release_when_behind:
                    await self._look_at_pace()
        except TimeoutError:
            _log.warning("%s/%d: the source was too slow to commit an offset or count its backlog", *self._tenure.where)
        except KeylaneError as error:
            if not may_pass(error):
                raise
            _log.warning("%s/%d: no offset was committed: %s", *self._tenure.where, error)

    async def _commit(self) -> None:
        offset = self._work.offset
        if offset != self._committed:
            await self._source.commit(self._tenure.key.group, *self._tenure.where, offset)
            self._committed = offset

    async def _look_at_pace(self) -> None:
        waiting = self._work.at_work + await self._source.backlog(*self._tenure.where, self._work.read_to)
        done = self._tenure.done
        self._pace = self._pace.sampled(done, done + waiting)
        if self._pace.is_behind:
            self._tenure.ask_to_end(
                f"behind: {waiting} messages wait, {self._pace.inflow:g} come in and {self._pace.velocity:g} are done "
                "in each heartbeat",
                cool_down=True,
            )

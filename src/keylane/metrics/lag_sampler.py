"""How far behind the partitions of a worker are, asked for again and again, and not too often.

A worker with many partitions asks less often: at most 20 requests a second. A lag that could not be read, or that is
old, is unknown, and never 0.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple, Self

from keylane.errors import KeylaneError
from keylane.fleet import PartitionLag, Worker

_log = logging.getLogger("keylane.metrics")

_INTERVAL_S = 5.0
_S_A_PARTITION = 0.05
_AT_ONCE = 4
_OLD_AFTER_INTERVALS = 3


class _Sample(NamedTuple):
    at: float
    lag: PartitionLag


class LagSampler:
    """Samples while its block runs."""

    def __init__(self, worker: Worker, interval_s: float = _INTERVAL_S) -> None:
        self._worker = worker
        self._interval_s = interval_s
        self._samples: dict[str, _Sample] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name=f"lag of {self._worker!r}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def values(self) -> dict[str, Any]:
        """The metrics of the lag. What is not known is left out."""
        owned = self._worker.partitions
        oldest = monotonic() - _OLD_AFTER_INTERVALS * self._pause_s()
        samples = self._samples
        known = [samples[one] for one in owned if one in samples and samples[one].at > oldest]
        values: dict[str, Any] = {"fleet_lag_unknown_partitions": len(owned) - len(known)}
        if len(known) == len(owned):
            lag = sum(one.lag.messages for one in known)
            values["fleet_lag_messages"] = values["consumer_inflight"] = lag
            ages = [one.lag.oldest_s for one in known if one.lag.messages]
            if None not in ages:
                values["fleet_lag_seconds"] = max((age for age in ages if age is not None), default=0.0)
        return values

    def _pause_s(self) -> float:
        return max(self._interval_s, _S_A_PARTITION * len(self._worker.partitions))

    async def _run(self) -> None:
        limit = asyncio.Semaphore(_AT_ONCE)
        while True:
            owned = self._worker.partitions
            self._samples = {one: sample for one, sample in self._samples.items() if one in owned}
            await asyncio.gather(*(self._sample(one, limit) for one in owned))
            await asyncio.sleep(self._pause_s() if owned else 0.5)

    async def _sample(self, partition: str, limit: asyncio.Semaphore) -> None:
        async with limit:
            try:
                lag = await self._worker.lag_of(partition)
            except KeylaneError as error:
                _log.debug("the lag of partition %s is not known: %s", partition, error)
                self._samples.pop(partition, None)
                return
        self._samples[partition] = _Sample(monotonic(), lag)

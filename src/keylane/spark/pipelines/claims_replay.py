"""A coordination log replayed by one process, the driver, into a table of rows: `core/claim_history.py` says which.

One core replays a million records in a few seconds, and records must be judged in the order of the log. So Spark is
given the rows, not the log. `HISTORY_DDL` is the table that they make.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # it has no types

from keylane.core.claim_facts import LogRecord
from keylane.core.claim_history import HistoryRow, HistoryScope, LogHistory
from keylane.errors import InvalidInput
from keylane.spark.pipelines.claims_log import LogPart, open_log, place_of
from keylane.spark.pipelines.spark_jobs import Say
from keylane.spark.tasks import schema_of

if TYPE_CHECKING:
    from keylane.spark.pipelines.claims import Settings

T = TypeVar("T")

_WORDS = (
    "kind", "group", "topic", "client", "instance", "began", "ended", "freshness", "record", "verdict",
    "released_client", "released_instance", "owner_client", "owner_instance", "next_client",
)  # fmt: skip
_NUMBERS = (
    "token", "from_offset", "from_ms", "to_offset", "to_ms", "heartbeat_offset", "heartbeat_ms", "fresh_until_ms",
    "holds_until_ms", "next_offset", "taken_offset", "taken_to", "taken_token", "released_offset", "released_ms",
    "released_next", "expiry_ms", "gap_ms", "paused_ms", "heartbeats", "now_ms", "times", "rank",
)  # fmt: skip
HISTORY_DDL = ", ".join(
    [
        "log_partition INT, partition INT, misplaced BOOLEAN",
        *(f"{name} STRING" for name in _WORDS),
        *(f"{name} BIGINT" for name in _NUMBERS),
    ]
)
_SCHEMA = schema_of(HISTORY_DDL)
_ROWS_A_BATCH = 10_000
_TELL_S = 1.0


@dataclass(frozen=True, slots=True)
class ReplayedLog:
    """A log whose rows are in a file. `since_ms`: the start of what is reported."""

    name: str
    partitions: list[dict[str, int]]
    """Of each partition with a record: its first and last offset, how many, and their times."""
    unreadable: int
    since_ms: int

    @property
    def records(self) -> int:
        return sum(one["records"] for one in self.partitions)


def run_apart(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in a thread with a loop of its own: where a notebook calls, one may be running already."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(work())).result()


async def replay(settings: Settings, path: Path, say: Say) -> ReplayedLog:
    """Replay the part of the log that the settings name, and write its rows as Parquet."""
    at = place_of(settings.at or "latest", "at")
    async with open_log(settings) as part:
        stops = part.stops(at)
        total = sum(stop - part.bounds[number].first for number, stop in stops.items())
        say(f"reading coordination log {part.name}: {total:,} records")
        since_ms = await _since_ms(part, settings, stops)
        histories: list[LogHistory] = []
        progress = _Progress(say, total)
        with pq.ParquetWriter(path, _SCHEMA) as file:
            rows = _RowWriter(file)
            for number, stop in stops.items():
                scope = HistoryScope(
                    since_ms=since_ms or 0,
                    gap_ms=round(settings.longest_gap_s * 1000),
                    group=settings.group,
                    topic=settings.topic,
                )
                history = LogHistory(
                    settings.interval_s,
                    number,
                    scope,
                    partitions=part.log.partitions,
                    placing=settings.placing,
                    first_offset=part.log.first_offset,
                    begins=part.bounds[number].first,
                    end=part.bounds[number].end,
                )
                async for record in _records(part, number, stop, at.time_ms):
                    rows.add(history.apply(record))
                    progress.one_more()
                if history.records:
                    rows.add(history.finish())
                    histories.append(history)
            rows.flush()
    if not histories:
        raise InvalidInput(
            f"coordination log {part.name!r} holds no record up to the time in at: its first ones are younger"
        )
    if since_ms is not None and since_ms > max(one.now_ms for one in histories):
        raise _nothing_from(part, settings)
    first_ms = min(one.first.time_ms for one in histories if one.first is not None)
    return ReplayedLog(
        name=part.name,
        partitions=[_told(one) for one in histories],
        unreadable=sum(one.unreadable for one in histories),
        since_ms=first_ms if since_ms is None else since_ms,
    )


async def _since_ms(part: LogPart, settings: Settings, stops: dict[int, int]) -> int | None:
    """The start of what is reported; None: the start of the log."""
    start = place_of(settings.start, "from")
    if start.offset is None:
        return start.time_ms
    if len(part.bounds) > 1:
        raise InvalidInput(
            f"from is {start.offset}, and coordination log {part.name!r} has {len(part.bounds)} partitions, each with "
            "offsets of its own: give a time"
        )
    if start.offset >= stops[0]:
        raise _nothing_from(part, settings)
    return await part.time_at(start.offset)


def _nothing_from(part: LogPart, settings: Settings) -> InvalidInput:
    return InvalidInput(
        f"coordination log {part.name!r} holds no record from {settings.start} to {settings.at or 'its end'}: give "
        "another range"
    )


async def _records(part: LogPart, number: int, stop: int, until_ms: int | None) -> AsyncIterator[LogRecord]:
    """Those before `stop`, and before the first one that is younger than `until_ms`."""
    async for record in part.log.read(number, part.bounds[number].first):
        if record.offset >= stop or (until_ms is not None and record.time_ms > until_ms):
            return
        yield record


def _told(history: LogHistory) -> dict[str, int]:
    assert history.first is not None
    assert history.last is not None
    return {
        "log_partition": history.number,
        "first": history.first.offset,
        "last": history.last.offset,
        "records": history.records,
        "first_ms": history.first.time_ms,
        "now_ms": history.now_ms,
    }


class _RowWriter:
    """Writes rows in batches."""

    def __init__(self, file: pq.ParquetWriter) -> None:
        self._file = file
        self._rows: list[HistoryRow] = []

    def add(self, rows: Iterable[HistoryRow]) -> None:
        self._rows += rows
        if len(self._rows) >= _ROWS_A_BATCH:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            self._file.write_batch(pa.RecordBatch.from_pylist(self._rows, schema=_SCHEMA))
            self._rows = []


class _Progress:
    def __init__(self, say: Say, total: int) -> None:
        self._say, self._total = say, total
        self._done = 0
        self._told_s = time.monotonic()

    def one_more(self) -> None:
        self._done += 1
        if not self._done % 1000 and time.monotonic() - self._told_s > _TELL_S:
            self._told_s = time.monotonic()
            self._say(f"claims: {self._done:,} of {self._total:,} records replayed")

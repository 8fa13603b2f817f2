"""Where the coordination log of the pipeline `claims` is, and which part of it is meant.

The part is named in words: an offset, a time, or how long ago. A time is compared with what the broker stamped on each
record, as everywhere in Marshal, so its place in the log is found in the records, not asked of the server.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from keylane.core.subjects import shown
from keylane.errors import CoordinationLogError, InvalidInput, NoSuchTopic, NotFound
from keylane.extras import extra_missing
from keylane.jetstream import connect, streams
from keylane.marshal.jetstream_log import DEFAULT_NAME, open_jetstream_log
from keylane.marshal.log import Bounds, CoordinationLog
from keylane.spark.options import read_options
from keylane.spark.pipelines.stream_range import bounds
from keylane.spark.sync_connection import shipped_files

if TYPE_CHECKING:
    from keylane.spark.pipelines.claims import Settings

_OFFSETS = re.compile(r"\d+:\d+(,\d+:\d+)*")


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A place in a log: after these records, or after the last one that is not younger than a time."""

    offset: int | None = None
    """Of a log with one partition."""
    offsets: Mapping[int, int] | None = None
    """By partition of the log."""
    time_ms: int | None = None


def place_of(word: str, name: str, now: datetime | None = None) -> LogPosition:
    """Where `word` is; `earliest` and `latest` are nowhere in particular.

    >>> place_of("17", "at")
    LogPosition(offset=17, offsets=None, time_ms=None)
    >>> place_of("0:17,1:9", "at").offsets
    {0: 17, 1: 9}
    """
    if word in ("earliest", "latest"):
        return LogPosition()
    if word.isdecimal():
        return LogPosition(offset=int(word))
    if _OFFSETS.fullmatch(word):
        pairs = [pair.split(":") for pair in word.split(",")]
        offsets = {int(number): int(offset) for number, offset in pairs}
        if len(offsets) < len(pairs):
            raise InvalidInput(f"{name} is {shown(word)}: it names a partition twice")
        return LogPosition(offsets=offsets)
    try:
        found = bounds(word, None, now)
    except InvalidInput:
        raise InvalidInput(
            f"{name} is {shown(word)}: give an offset of the log, a time such as 2026-05-01T12:00:00Z, or how long "
            "ago, such as -15m; for a log with several partitions PARTITION:OFFSET, with commas"
        ) from None
    try:
        time = read_options({"stream": "log", **found}).start.time
    except InvalidInput as error:
        raise InvalidInput(str(error).replace("option 'startingTimestamp'", name)) from None
    return LogPosition(time_ms=int(time.timestamp() * 1000))


@dataclass(frozen=True, slots=True)
class LogPart:
    """A coordination log, open, and which records of it are read."""

    name: str
    log: CoordinationLog
    bounds: Mapping[int, Bounds]
    """Of each of its partitions, as they were when it was opened."""

    def stops(self, at: LogPosition) -> dict[int, int]:
        """Where to stop reading each partition that has something to read: what came later is not asked for."""
        filled = {number: one for number, one in self.bounds.items() if one.first < one.end}
        if not filled:
            raise InvalidInput(
                f"coordination log {self.name!r} is empty: nobody has claimed anything that it still knows of"
            )
        offsets = at.offsets
        if at.offset is not None:
            if len(self.bounds) > 1:
                raise InvalidInput(
                    f"at is {at.offset}, and coordination log {self.name!r} has {len(self.bounds)} partitions, each "
                    f"with offsets of its own: give a time, or offsets such as 0:{at.offset},1:{at.offset}"
                )
            offsets = {0: at.offset}
        for number, offset in (offsets or {}).items():
            self._check(number, offset)
        return {number: (offsets or {}).get(number, one.end - 1) + 1 for number, one in filled.items()}

    def _check(self, number: int, offset: int) -> None:
        if number not in self.bounds:
            raise InvalidInput(
                f"at names partition {number} of coordination log {self.name!r}, which has 0 to {len(self.bounds) - 1}"
            )
        first, end = self.bounds[number]
        if not first <= offset < end:
            raise InvalidInput(
                f"at is {offset}: partition {number} of coordination log {self.name!r} holds {first} to {end - 1}"
                if first < end
                else f"at is {offset}: partition {number} of coordination log {self.name!r} is empty"
            )

    async def time_at(self, offset: int) -> int | None:
        """The log's time at an offset of a log with one partition; None: it holds no record up to there."""
        time_ms: int | None = None
        async for record in self.log.read(0, self.bounds[0].first):
            if record.offset > offset:
                break
            time_ms = record.time_ms if time_ms is None else max(time_ms, record.time_ms)
        return time_ms


@asynccontextmanager
async def open_log(settings: Settings) -> AsyncIterator[LogPart]:
    """The log that the settings name, as it is now. It is never created here."""
    opened = _on_kafka(settings) if settings.is_on_kafka else _on_jetstream(settings)
    async with opened as (name, log):
        yield LogPart(name, log, {number: await log.bounds(number) for number in range(log.partitions)})


@asynccontextmanager
async def _on_jetstream(settings: Settings) -> AsyncIterator[tuple[str, CoordinationLog]]:
    name = settings.log or DEFAULT_NAME
    async with connect(**settings.address.arguments(shipped_files()), name="keylane-claims") as connection:
        try:
            await streams.info(connection, name)
        except NotFound as error:
            raise no_such_log(name) from error
        async with open_jetstream_log(connection, name, interval_s=settings.interval_s) as log:
            yield name, log


@asynccontextmanager
async def _on_kafka(settings: Settings) -> AsyncIterator[tuple[str, CoordinationLog]]:
    try:
        from keylane.kafka import KafkaAddress, open_kafka, open_kafka_log  # noqa: PLC0415 - needs confluent-kafka
        from keylane.kafka.client import read_properties  # noqa: PLC0415
        from keylane.kafka.topic import DEFAULT_TOPIC, check_topic_name, describe  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "confluent_kafka":
            raise
        raise extra_missing("kafka needs confluent-kafka", "kafka") from error
    name = check_topic_name(settings.log or DEFAULT_TOPIC)
    if settings.kafka_config is not None:
        address = read_properties(Path(settings.kafka_config), settings.kafka)
    else:
        address = KafkaAddress(settings.kafka or "")
    async with open_kafka(address) as link:
        try:
            await describe(link, name)
        except NoSuchTopic as error:
            raise no_such_log(name) from error
        async with open_kafka_log(link, name, interval_s=settings.interval_s) as log:
            yield name, log


def no_such_log(name: str) -> CoordinationLogError:
    return CoordinationLogError(
        f"there is no coordination log {name!r}: name it with --log; a consumer makes it when it starts"
    )

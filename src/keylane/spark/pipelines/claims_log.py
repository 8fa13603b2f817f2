"""Where a coordination log is for the pipeline `claims`, which part of it is meant, and its records as rows.

The part is named in words: an offset, a time, or how long ago. A time is compared with what the broker stamped on each
record, as everywhere in Marshal, so its place in the log is found in the records, not asked of the server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from keylane.core.subjects import shown
from keylane.errors import CoordinationLogError, ExtraMissing, InvalidInput, NotFound
from keylane.jetstream import Connection, streams
from keylane.marshal.jetstream_log import DEFAULT_NAME, JetStreamLog, open_jetstream_log, subjects_of
from keylane.marshal.log import Bounds
from keylane.spark.address import Address
from keylane.spark.options import read_options
from keylane.spark.pipelines.stream_range import SUBJECT_IS_KEY, address_options, bounds, load
from keylane.spark.retry import ask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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


class Log(Protocol):
    """A coordination log as it stood when this was made."""

    name: str
    partitions: int
    first_offset: int
    has_holes: bool
    """Whether offsets may be missing between two records."""
    bounds: Mapping[int, Bounds]
    """Of each of its partitions."""

    def rows(self, spark: SparkSession, stops: Mapping[int, int]) -> DataFrame:
        """The records before `stops` (`claims_replay.ROWS_DDL`)."""
        ...


class JetStreamRows:
    """A log in a stream."""

    partitions = 1
    first_offset = JetStreamLog.first_offset
    has_holes = False

    def __init__(self, address: Address, name: str | None, interval_s: float) -> None:
        self.name = name or DEFAULT_NAME
        self._address = address
        look = ask(address, lambda connection: _look(connection, self.name, interval_s), f"look at log {self.name!r}")
        self.bounds: Mapping[int, Bounds] = {0: look}

    def rows(self, spark: SparkSession, stops: Mapping[int, int]) -> DataFrame:
        options = address_options(self._address) | {
            "stream": self.name,
            "splitBy": "sequence",
            "startingOffsets": "earliest",
            "endingOffsets": str(stops[0] - 1),
            **SUBJECT_IS_KEY,
        }
        from pyspark.sql import functions as F  # noqa: N812, PLC0415 - everybody's name for it; optional and slow

        prefix, subject = subjects_of(self.name).removesuffix(">"), F.col("subject")
        inside = F.startswith(subject, F.lit(prefix))
        own = F.when(inside, F.substr(subject, F.lit(len(prefix) + 1))).otherwise(F.concat(F.lit("."), subject))
        return load(spark, options).select(
            F.lit(0).alias("log_partition"),
            F.col("sequence").alias("offset"),
            F.unix_millis("timestamp").alias("time_ms"),
            F.col("data").alias("value"),
            own.alias("subject"),
        )


async def _look(connection: Connection, name: str, interval_s: float) -> Bounds:
    try:
        await streams.info(connection, name)
    except NotFound as error:
        raise no_such_log(name) from error
    async with open_jetstream_log(connection, name, interval_s=interval_s) as log:
        return await log.bounds()


def no_such_log(name: str) -> CoordinationLogError:
    return CoordinationLogError(
        f"there is no coordination log {name!r}: name it with --log; a consumer makes it when it starts"
    )


def open_log(settings: Settings) -> Log:
    """The log that the settings name, as it is now."""
    if not settings.is_on_kafka:
        return JetStreamRows(settings.address, settings.log, settings.interval_s)
    try:
        from keylane.spark.pipelines.claims_kafka import KafkaRows  # noqa: PLC0415 - needs confluent-kafka
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "confluent_kafka":
            raise
        raise ExtraMissing('kafka needs confluent-kafka: pip install "keylane[kafka]"') from error
    return KafkaRows(settings.kafka, settings.kafka_config, settings.log, settings.interval_s)


def stops_of(log: Log, at: LogPosition) -> dict[int, int]:
    """Where to stop reading each partition of the log that has something to read: what came later is not asked for."""
    filled = {number: one for number, one in log.bounds.items() if one.first < one.end}
    if not filled:
        raise InvalidInput(
            f"coordination log {log.name!r} is empty: nobody has claimed anything that it still knows of"
        )
    offsets = at.offsets
    if at.offset is not None:
        if log.partitions > 1:
            raise InvalidInput(
                f"at is {at.offset}, and coordination log {log.name!r} has {log.partitions} partitions, each with "
                f"offsets of its own: give a time, or offsets such as 0:{at.offset},1:{at.offset}"
            )
        offsets = {0: at.offset}
    for number, offset in (offsets or {}).items():
        if number not in log.bounds:
            raise InvalidInput(
                f"at names partition {number} of coordination log {log.name!r}, which has 0 to {log.partitions - 1}"
            )
        first, end = log.bounds[number]
        if not first <= offset < end:
            raise InvalidInput(
                f"at is {offset}: partition {number} of coordination log {log.name!r} holds {first} to {end - 1}"
                if first < end
                else f"at is {offset}: partition {number} of coordination log {log.name!r} is empty"
            )
    return {number: (offsets or {}).get(number, one.end - 1) + 1 for number, one in filled.items()}

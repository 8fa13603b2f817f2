"""Which part of a stream a pipeline reads, and the reader's options for it.

A part is named in words: `earliest`, `latest`, a sequence, a time, or how long ago (`-15m`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from keylane.core.subjects import shown
from keylane.errors import InvalidInput, NotFound
from keylane.groups import StaticConfig, get_config
from keylane.jetstream import Connection, parse_time, streams
from keylane.spark.address import FIELDS, Address
from keylane.spark.driver.layout import GroupRecord
from keylane.spark.driver.source_stream import SourceStream
from keylane.spark.options import RangeBound, read_options
from keylane.spark.retry import ask
from keylane.spark.stream_state import StreamSnapshot

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SUBJECT_IS_KEY = {"keyFilter": ">", "keyPartitions": "1"}
"""For streams of keylane's own, whose messages have no other key."""

_AGO = re.compile(r"-(?:\d+(?:\.\d*)?[smhd])+")
_AGO_PART = re.compile(r"(\d+(?:\.\d*)?)([smhd])")
_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_CLOCKS_DIFFER = timedelta(minutes=5)


# ---- which messages -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamRange:
    """(after, upto] of a stream as it stood at one moment."""

    stream: str
    created: str
    after: int
    upto: int

    @property
    def is_empty(self) -> bool:
        return self.upto <= self.after

    def __str__(self) -> str:
        return f"{self.stream} {self.after + 1:,} to {self.upto:,}" if not self.is_empty else f"{self.stream}, nothing"


def address_options(address: Address) -> dict[str, str]:
    """An address as options of `format("keylane")`."""
    given = {name: getattr(address, field) for name, field in FIELDS.items()}
    return {name: _text(value) for name, value in given.items() if value is not None}


def bounds(start: str | None, end: str | None, now: datetime | None = None) -> dict[str, str]:
    """The words of a range as options of the reader.

    >>> bounds("17", "2026-05-01T12:00:00Z")
    {'startingOffsets': '17', 'endingTimestamp': '2026-05-01T12:00:00Z'}
    """
    options = {}
    for side, word in (("starting", start), ("ending", end)):
        if word is None:
            continue
        if _AGO.fullmatch(word):
            seconds = sum(float(number) * _UNIT_S[unit] for number, unit in _AGO_PART.findall(word))
            options[f"{side}Timestamp"] = ((now or datetime.now(UTC)) - timedelta(seconds=seconds)).isoformat()
        elif word in ("earliest", "latest") or word.isdecimal():
            options[f"{side}Offsets"] = word
        elif re.match(r"\d{4}-", word):
            options[f"{side}Timestamp"] = word
        else:
            raise InvalidInput(
                f"{'from' if side == 'starting' else 'to'} is {shown(word)}: give earliest, latest, a sequence, a time "
                "such as 2026-05-01T12:00:00Z, or how long ago, such as -15m"
            )
    return options


def find_range(options: Mapping[str, str]) -> StreamRange:
    """Where the reader's options begin and end in the stream now. A range behind its end is empty, not an error."""
    read = read_options(options)
    source = SourceStream(read)
    state = source.state()
    start, upto = (_position(bound, source, state) for bound in (read.start, read.end))
    after = start - 1 if read.start.kind == "sequence" else start
    return StreamRange(state.stream, state.created, after, max(after, min(upto, state.last)))


def find_messages(base: Mapping[str, str], start: str, end: str) -> StreamRange:
    """The part that these words name of the stream in `base`; refuses one without a message."""
    part = find_range({**base, **bounds(start, end)})
    if part.is_empty:
        raise InvalidInput(f"stream {base['stream']!r} has no messages from {start} to {end}: give another range")
    return part


def group_of(address: Address, stream: str, group: str) -> GroupRecord:
    """A group's configuration as it is now."""
    return ask(address, lambda connection: get_config(connection, stream, group), f"look at group {group!r}")


def check_span(name: str, seconds: float, most: float = 3600) -> None:
    """Raise `InvalidInput` unless a setting is a time from 0 to `most` seconds."""
    if not math.isfinite(seconds) or not 0 <= seconds <= most:
        raise InvalidInput(f"{name} is {seconds!r}: give 0 to {most} seconds")


def check_evidence(rows: int) -> None:
    if not 0 <= rows <= 10_000:
        raise InvalidInput(f"evidence is {rows}: give 0 to 10000 rows; all are in the work directory")


def _position(bound: RangeBound, source: SourceStream, state: StreamSnapshot) -> int:
    """The sequence that is named, or the last one before a time or before the start of the stream."""
    if bound.kind == "sequence":
        return bound.sequence
    if bound.kind == "time":
        before = source.before(bound.time)
        return state.last if before is None else before
    return max(state.first - 1, 0) if bound.kind == "earliest" else state.last


def load(spark: SparkSession, options: Mapping[str, str], part: StreamRange | None = None) -> DataFrame:
    """Messages of a stream in a batch; `part` fixes the range, so that two reads of a run see the same."""
    from keylane.spark import register  # noqa: PLC0415 - needs pyspark

    register(spark)
    chosen = dict(options)
    if part is not None:
        for name in ("startingOffsets", "startingTimestamp", "endingOffsets", "endingTimestamp"):
            chosen.pop(name, None)
        chosen |= {"startingOffsets": str(part.after + 1), "endingOffsets": str(part.upto)}
    return spark.read.format("keylane").options(**chosen).load()


def load_group(spark: SparkSession, options: Mapping[str, str], config: GroupRecord, part: StreamRange) -> DataFrame:
    """The messages of the group in `options`, read from its stream, with their partitions in the group, and keys.

    Never reads an elastic group's queue, which forgets what was handled.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as everybody writes it

    chosen = dict(options)
    filters = config.filters if isinstance(config, StaticConfig) else tuple(one.filter for one in config.partitioning)
    if filters:
        chosen["filter"] = ",".join(filters)
    if isinstance(config, StaticConfig):
        del chosen["group"]  # also messages beyond its partitions count
    rows = load(spark, chosen, part).where("partition IS NOT NULL")
    return rows.withColumn("key", F.coalesce("key", "subject"))


def journal_bounds(address: Address, part: StreamRange) -> dict[str, str]:
    """Where to begin in the journal for the messages of a range: nobody wrote of them before they were there.

    The two streams may be on servers whose clocks differ: a few minutes more are read.
    """
    if part.after == 0:
        return {}

    async def look(connection: Connection) -> dict[str, Any]:
        return await streams.get_message(connection, part.stream, sequence=part.after + 1, next_by_subject=">")

    try:
        stored = ask(address, look, f"look at message {part.after + 1} of stream {part.stream!r}")["time"]
    except NotFound:
        return {}
    return {"startingTimestamp": (parse_time(stored) - _CLOCKS_DIFFER).isoformat()}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

"""The options of the reader, checked before anything is asked of a server. Pure: no clock, no I/O.

Spark passes options as text with names in any case. Each error names the option, its value and what is allowed. Which
streams and groups exist is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, get_args

from keylane.core.names import check_group_name, check_member_name, check_query_name, check_stream_name
from keylane.core.partitions import Partitioning, check_partition_count
from keylane.core.subjects import check_filter, overlaps, shown, wildcard_positions
from keylane.errors import InvalidInput
from keylane.spark.address import Address, read_flag
from keylane.spark.options import checked, given_options

Mode = Literal["batch", "streaming"]
SplitBy = Literal["partition", "sequence"]

NAMES = (
    "stream",
    "group",
    "queue",
    "member",
    "partitions",
    "filter",
    "keyFilter",
    "keyWildcards",
    "keyPartitions",
    "splitBy",
    "minPartitions",
    "startingOffsets",
    "startingTimestamp",
    "endingOffsets",
    "endingTimestamp",
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "failOnDataLoss",
    "includeHeaders",
    "includeData",
    "queryName",
    "leaseSeconds",
    "acknowledge",
)
"""The options of the reader besides those of the address, as they are written."""

_BATCH_ONLY = ("endingOffsets", "endingTimestamp")
_STREAMING_ONLY = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "queryName", "leaseSeconds", "acknowledge")
_LARGEST = 2**63 - 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DEFAULT_LEASE_S = 10.0
SHORTEST_LEASE_S = 1.0
LONGEST_LEASE_S = 3600.0


@dataclass(frozen=True, slots=True)
class RangeBound:
    """A place in the stream. A sequence is the first to read at the start, and the last to read at the end."""

    kind: Literal["earliest", "latest", "sequence", "time"]
    sequence: int = 0
    time: datetime = _EPOCH

    def __str__(self) -> str:
        if self.kind == "sequence":
            return str(self.sequence)
        return self.time.isoformat() if self.kind == "time" else self.kind


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of `spark.read` or `spark.readStream` with `format("keylane")`."""

    address: Address
    stream: str
    group: str | None = None
    """Says what the key of a message is; with `queue`, also what is read."""
    queue: bool = False
    """Read the queue of the elastic group instead of the stream."""
    member: str | None = None
    partitions: tuple[int, ...] | None = None
    filters: tuple[str, ...] = ()
    keys: Partitioning | None = None
    split_by: SplitBy | None = None
    min_partitions: int | None = None
    start: RangeBound = RangeBound("earliest")
    end: RangeBound = RangeBound("latest")
    max_offsets: int | None = None
    max_bytes: int | None = None
    fail_on_data_loss: bool = True
    with_headers: bool = False
    with_data: bool = True
    query_name: str | None = None
    lease_s: float = DEFAULT_LEASE_S
    acknowledge: bool = False


def read_options(options: Mapping[str, str], mode: Mode | None = None) -> ReadOptions:
    """What the options say; raises `InvalidInput` for the first one that breaks a rule.

    `mode` is not known yet when Spark first makes the source: what only batch or only streaming takes is checked
    when it is.

    >>> read_options({"stream": "ORDERS", "startingOffsets": "17"}).start
    RangeBound(kind='sequence', sequence=17, time=datetime.datetime(1970, 1, 1, 0, 0, tzinfo=datetime.timezone.utc))
    """
    given = _given(options, mode)
    address = Address.from_options(given)
    if "stream" not in given:
        raise InvalidInput("option 'stream' is missing: name the stream to read, such as .option('stream', 'ORDERS')")
    read = ReadOptions(
        address=address,
        stream=checked("stream", check_stream_name, given["stream"]),
        group=checked("group", check_group_name, given["group"]) if "group" in given else None,
        queue=read_flag("queue", given.get("queue", "false")),
        member=checked("member", check_member_name, given["member"]) if "member" in given else None,
        partitions=_partitions(given["partitions"]) if "partitions" in given else None,
        filters=_filters(given["filter"]) if "filter" in given else (),
        keys=_keys(given),
        split_by=_choice("splitBy", given, get_args(SplitBy)),
        min_partitions=_count("minPartitions", given),
        start=_position(given, "starting") or RangeBound("earliest"),
        end=_position(given, "ending") or RangeBound("latest"),
        max_offsets=_count("maxOffsetsPerTrigger", given),
        max_bytes=_count("maxBytesPerTrigger", given),
        fail_on_data_loss=read_flag("failOnDataLoss", given.get("failondataloss", "true")),
        with_headers=read_flag("includeHeaders", given.get("includeheaders", "false")),
        with_data=read_flag("includeData", given.get("includedata", "true")),
        query_name=_query_name(given),
        lease_s=_lease_s(given),
        acknowledge=read_flag("acknowledge", given.get("acknowledge", "false")),
    )
    _check_together(read, given, mode)
    return read


def _given(options: Mapping[str, str], mode: Mode | None) -> dict[str, str]:
    """The options by their names in lower case; refuses unknown ones and those of the other mode."""
    given = given_options(options, NAMES, whose="reader")
    for only, other, names in (("batch", "streaming", _BATCH_ONLY), ("streaming", "batch", _STREAMING_ONLY)):
        for name in names:
            if mode == other and name.lower() in given:
                raise InvalidInput(
                    f"option {name!r} (value {shown(given[name.lower()])}) is for {only} reads, and this is a {other} "
                    "read: leave it out"
                )
    return given


def _check_together(read: ReadOptions, given: Mapping[str, str], mode: Mode | None) -> None:
    if read.group is None:
        _check_without_group(read)
    if read.member is not None and read.partitions is not None:
        raise InvalidInput(
            f"options 'member' ({read.member!r}) and 'partitions' ({given['partitions']!r}) both say which partitions "
            "to read: give one of them"
        )
    if read.keys is not None and (read.group is not None or read.partitions is not None):
        other = "group" if read.group is not None else "partitions"
        raise InvalidInput(
            f"option 'keyFilter' ({read.keys.filter!r}) is for streams without partition numbers, and {other!r} "
            f"({given[other]!r}) for streams with them: give one of the two"
        )
    if read.keys is not None and read.split_by == "partition":
        raise InvalidInput(
            "option 'splitBy' is 'partition' and 'keyFilter' is given: a partition that the reader computes cannot be "
            "asked for from the server; use splitBy=sequence"
        )
    if read.acknowledge and read.query_name is None:
        raise InvalidInput("option 'acknowledge' is true and needs 'queryName': name the query that acknowledges")
    if "leaseseconds" in given and read.query_name is None:
        raise InvalidInput(
            f"option 'leaseSeconds' ({given['leaseseconds']!r}) needs option 'queryName': it is that name's lease"
        )
    if mode == "streaming" and read.start.kind == "latest" and read.query_name is None:
        raise InvalidInput(
            "option 'startingOffsets' is 'latest' and needs 'queryName': the start is recorded under that name "
            "until the first batch is committed, else a restart before it would lose messages"
        )
    if mode == "batch" and read.start.kind == "latest":
        raise InvalidInput(
            "option 'startingOffsets' is 'latest': a batch read would be empty; give earliest, a "
            "sequence number, or startingTimestamp"
        )
    if read.end.kind == "earliest":
        raise InvalidInput(
            "option 'endingOffsets' is 'earliest': a batch read would be empty; give latest, a "
            "sequence number, or endingTimestamp"
        )
    _check_order(read)


def _check_without_group(read: ReadOptions) -> None:
    if read.queue:
        raise InvalidInput("option 'queue' is true and needs option 'group': name the elastic group of the queue")
    if read.member is not None:
        raise InvalidInput(f"option 'member' ({read.member!r}) needs option 'group': name the group it belongs to")


def _check_order(read: ReadOptions) -> None:
    start, end = read.start, read.end
    if start.kind == end.kind == "sequence" and end.sequence < start.sequence - 1:
        raise InvalidInput(
            f"option 'endingOffsets' is {end.sequence}, before 'startingOffsets' {start.sequence}: swap them"
        )
    if start.kind == end.kind == "time" and end.time < start.time:
        raise InvalidInput(f"option 'endingTimestamp' is {end}, before 'startingTimestamp' {start}: swap them")


def _position(given: Mapping[str, str], which: Literal["starting", "ending"]) -> RangeBound | None:
    offsets, timestamp = given.get(f"{which}offsets"), given.get(f"{which}timestamp")
    if offsets is not None and timestamp is not None:
        raise InvalidInput(
            f"options '{which}Offsets' ({offsets!r}) and '{which}Timestamp' ({timestamp!r}) are both given: give one"
        )
    if timestamp is not None:
        return RangeBound("time", time=_time(f"{which}Timestamp", timestamp))
    if offsets is None:
        return None
    if offsets.lower() == "earliest":
        return RangeBound("earliest")
    if offsets.lower() == "latest":
        return RangeBound("latest")
    if not _is_number(offsets) or not 1 <= int(offsets) <= _LARGEST:
        raise InvalidInput(
            f"option '{which}Offsets' is {shown(offsets)}: give earliest, latest, or a sequence number from 1 on"
        )
    return RangeBound("sequence", sequence=int(offsets))


def _time(name: str, text: str) -> datetime:
    if _is_number(text):
        try:
            return _EPOCH + timedelta(milliseconds=int(text))
        except OverflowError:
            raise InvalidInput(f"option {name!r} is {shown(text)}: that many milliseconds are no date") from None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(
            f"option {name!r} is {shown(text)}: give a time such as 2025-03-31T12:00:00Z, or milliseconds since 1970"
        ) from None
    if time.tzinfo is None:
        raise InvalidInput(f"option {name!r} is {shown(text)}, without a time zone: append Z for UTC, or +02:00")
    return time.astimezone(UTC)


def _partitions(text: str) -> tuple[int, ...]:
    """`0-3,7` as numbers, ascending."""
    found: set[int] = set()
    for part in (one.strip() for one in text.split(",")):
        low, dash, high = part.partition("-")
        if not _is_number(low) or (dash and not _is_number(high)):
            raise InvalidInput(f"option 'partitions' is {shown(text)}: give numbers and ranges, such as 0-3,7")
        first, last = int(low), int(high or low)
        if last < first or last >= 2**31:
            raise InvalidInput(f"option 'partitions' is {shown(text)}: the range {part!r} holds no partition")
        if last - first >= 100_000:
            raise InvalidInput(f"option 'partitions' is {shown(text)}: {part!r} names more than 100,000 partitions")
        numbers = set(range(first, last + 1))
        if twice := sorted(found & numbers):
            raise InvalidInput(f"option 'partitions' is {shown(text)}: partition {twice[0]} is named twice")
        found |= numbers
    return tuple(sorted(found))


def _filters(text: str) -> tuple[str, ...]:
    filters = tuple(one.strip() for one in text.split(","))
    for index, one in enumerate(filters):
        try:
            check_filter(one)
        except InvalidInput as error:
            raise InvalidInput(f"option 'filter' is {shown(text)}: {error}") from error
        for other in filters[:index]:
            if overlaps(one, other):
                raise InvalidInput(
                    f"option 'filter' is {shown(text)}: {other!r} and {one!r} overlap, and a message that matches both "
                    "would come twice; narrow one of them"
                )
    return filters


def _keys(given: Mapping[str, str]) -> Partitioning | None:
    if "keyfilter" not in given:
        for name in ("keyWildcards", "keyPartitions"):
            if name.lower() in given:
                raise InvalidInput(
                    f"option {name!r} (value {shown(given[name.lower()])}) needs option 'keyFilter': the filter whose "
                    "'*' tokens are counted"
                )
        return None
    subject_filter = given["keyfilter"]
    if "keypartitions" not in given:
        raise InvalidInput(
            f"option 'keyFilter' ({shown(subject_filter)}) needs option 'keyPartitions': the number of partitions"
        )
    count = _count("keyPartitions", given)
    assert count is not None
    try:
        check_filter(subject_filter)
        check_partition_count(count)
        wildcards = (
            _wildcards(given["keywildcards"])
            if "keywildcards" in given
            else tuple(range(1, len(wildcard_positions(subject_filter)) + 1))
        )
        return Partitioning(subject_filter, wildcards, count)
    except InvalidInput as error:
        raise InvalidInput(f"options 'keyFilter', 'keyWildcards' and 'keyPartitions': {error}") from error


def _wildcards(text: str) -> tuple[int, ...]:
    numbers = [one.strip() for one in text.split(",")]
    if not all(_is_number(one) for one in numbers):
        raise InvalidInput(f"'keyWildcards' is {shown(text)}: give the places of '*' tokens from 1 on, such as 2,1")
    return tuple(int(one) for one in numbers)


def _choice(name: str, given: Mapping[str, str], allowed: tuple[SplitBy, ...]) -> SplitBy | None:
    value = given.get(name.lower())
    if value is None:
        return None
    for one in allowed:
        if value.lower() == one:
            return one
    raise InvalidInput(f"option {name!r} is {shown(value)}: give {' or '.join(allowed)}")


def _count(name: str, given: Mapping[str, str]) -> int | None:
    value = given.get(name.lower())
    if value is None:
        return None
    if not _is_number(value) or not 1 <= int(value) <= _LARGEST:
        raise InvalidInput(f"option {name!r} is {shown(value)}: give a whole number from 1 on")
    return int(value)


def _query_name(given: Mapping[str, str]) -> str | None:
    if "queryname" not in given:
        return None
    return checked("queryName", check_query_name, given["queryname"])


def _lease_s(given: Mapping[str, str]) -> float:
    text = given.get("leaseseconds")
    if text is None:
        return DEFAULT_LEASE_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not SHORTEST_LEASE_S <= seconds <= LONGEST_LEASE_S:
        raise InvalidInput(
            f"option 'leaseSeconds' is {shown(text)}: give {SHORTEST_LEASE_S:g} to {LONGEST_LEASE_S:g} seconds"
        )
    return seconds


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 20

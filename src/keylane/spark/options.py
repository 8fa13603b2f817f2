"""The options of reader and writer, checked before anything is asked of a server. Pure: no clock, no I/O.

Spark passes options as text with names in any case. Each error names the option, its value and what is allowed. Which
streams and groups exist is not known here.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, TypeVar, get_args

from keylane.core.names import check_group_name, check_member_name, check_query_name, check_stream_name
from keylane.core.partitions import PartitionBy, Partitioning, check_partition_count
from keylane.core.subjects import check_filter, check_subject, overlaps, shown
from keylane.errors import InvalidInput
from keylane.spark.address import (
    ADDRESS_NAMES,
    Address,
    is_secret_name,
    looks_like_login,
    read_flag,
    secret_refused,
    shows_secret,
)

_LARGEST = 2**63 - 1
T = TypeVar("T", bound=str)

# ---- both ---------------------------------------------------------------------------------------------------------


def given_options(options: Mapping[str, str], names: Sequence[str], *, whose: str) -> dict[str, str]:
    """The options by their names in lower case; refuses empty ones, and what is neither in `names` nor an address."""
    known = {name.lower(): name for name in (*names, *ADDRESS_NAMES)}
    given: dict[str, str] = {}
    for name, value in options.items():
        lowered = name.lower()
        if lowered not in known:
            raise _unknown(name, names, known, whose)
        is_address = known[lowered] in ADDRESS_NAMES
        if lowered != "url" and (shows_secret(value) or (is_address and looks_like_login(value))):
            raise secret_refused(known[lowered])  # `Address` has better words for a url
        if not value.strip():
            raise InvalidInput(f"option {known[lowered]!r} is empty: give a value, or leave the option out")
        given[lowered] = value.strip()
    return given


def _unknown(name: str, names: Sequence[str], known: Mapping[str, str], whose: str) -> InvalidInput:
    """The refusal of an option that does not exist. Its value is not repeated: nobody knows what is in it."""
    lowered = name.lower()
    if is_secret_name(lowered) and not lowered.endswith("file"):
        return secret_refused(name)
    near = difflib.get_close_matches(lowered, known, n=1)
    meant = f"did you mean {known[near[0]]!r}? " if near else ""
    return InvalidInput(
        f"option {name!r} is not one of the {whose}'s: {meant}It knows {', '.join(names)}, and for the connection "
        f"{', '.join(ADDRESS_NAMES)}"
    )


def _checked(name: str, check: Callable[[str], str], given: Mapping[str, str]) -> str | None:
    """The value, if it is given and `check` lets it through; its refusal names the option."""
    value = given.get(name.lower())
    try:
        return None if value is None else check(value)
    except InvalidInput as error:
        raise InvalidInput(f"option {name!r}: {error}") from error


def _choice(name: str, given: Mapping[str, str], allowed: tuple[T, ...]) -> T | None:
    value = given.get(name.lower())
    found = [one for one in allowed if value is not None and value.lower() == one]
    if value is not None and not found:
        raise InvalidInput(f"option {name!r} is {shown(value)}: give {', '.join(allowed[:-1])} or {allowed[-1]}")
    return found[0] if found else None


def _count(name: str, given: Mapping[str, str], most: int = _LARGEST) -> int | None:
    value = given.get(name.lower())
    if value is None:
        return None
    if not _is_number(value) or not 1 <= int(value) <= most:
        allowed = "from 1 on" if most == _LARGEST else f"from 1 to {most:,}"
        raise InvalidInput(f"option {name!r} is {shown(value)}: give a whole number {allowed}")
    return int(value)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 20


def _number(text: str) -> float:
    """The number, or NaN if the text is not one."""
    try:
        return float(text)
    except ValueError:
        return math.nan


# ---- the reader ---------------------------------------------------------------------------------------------------

Mode = Literal["batch", "streaming"]
SplitBy = Literal["partition", "sequence"]

READER_NAMES = (
    "stream", "group", "queue", "member", "partitions", "filter", "keyFilter", "keyWildcards", "keyPartitions",
    "splitBy", "minPartitions", "startingOffsets", "startingTimestamp", "endingOffsets", "endingTimestamp",
    "maxOffsetsPerTrigger", "maxBytesPerTrigger", "failOnDataLoss", "includeHeaders", "includeData", "queryName",
    "leaseSeconds", "acknowledge",
)  # fmt: skip
"""The options of the reader besides those of the address, as they are written."""

_BATCH_ONLY = ("endingOffsets", "endingTimestamp")
_STREAMING_ONLY = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "queryName", "leaseSeconds", "acknowledge")
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
    stream = _checked("stream", check_stream_name, given)
    if stream is None:
        raise InvalidInput("option 'stream' is missing: name the stream to read, such as .option('stream', 'ORDERS')")
    read = ReadOptions(
        address=address,
        stream=stream,
        group=_checked("group", check_group_name, given),
        queue=read_flag("queue", given.get("queue", "false")),
        member=_checked("member", check_member_name, given),
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
        query_name=_checked("queryName", check_query_name, given),
        lease_s=_lease_s(given),
        acknowledge=read_flag("acknowledge", given.get("acknowledge", "false")),
    )
    _check_together(read, given, mode)
    return read


def _given(options: Mapping[str, str], mode: Mode | None) -> dict[str, str]:
    """The options by their names in lower case; refuses unknown ones and those of the other mode."""
    given = given_options(options, READER_NAMES, whose="reader")
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
            raise InvalidInput(f"option {name!r} is {shown(text)}: that many milliseconds are not a date") from None
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
        wildcards = _wildcards(given["keywildcards"]) if "keywildcards" in given else None
        return PartitionBy(subject_filter, wildcards).over(count)
    except InvalidInput as error:
        raise InvalidInput(f"options 'keyFilter', 'keyWildcards' and 'keyPartitions': {error}") from error


def _wildcards(text: str) -> tuple[int, ...]:
    numbers = [one.strip() for one in text.split(",")]
    if not all(_is_number(one) for one in numbers):
        raise InvalidInput(f"'keyWildcards' is {shown(text)}: give the places of '*' tokens from 1 on, such as 2,1")
    return tuple(int(one) for one in numbers)


def _lease_s(given: Mapping[str, str]) -> float:
    text = given.get("leaseseconds")
    if text is None:
        return DEFAULT_LEASE_S
    seconds = _number(text)
    if not SHORTEST_LEASE_S <= seconds <= LONGEST_LEASE_S:
        raise InvalidInput(
            f"option 'leaseSeconds' is {shown(text)}: give {SHORTEST_LEASE_S:g} to {LONGEST_LEASE_S:g} seconds"
        )
    return seconds


# ---- the writer ---------------------------------------------------------------------------------------------------

Atomic = Literal["true", "false", "auto"]

WRITER_NAMES = (
    "stream", "subject", "queryName", "idPrefix", "maxInFlight", "maxInFlightBytes", "publishTimeoutSeconds", "atomic",
    "deadLetters",
)  # fmt: skip
"""The options of the writer besides those of the address, as they are written."""

_SPARKS_OWN = ("checkpointlocation",)
_ID_PREFIX = re.compile(r"[!-~]{1,100}")

_INTEGERS = ("bigint", "int", "smallint", "tinyint")
COLUMNS: dict[str, tuple[str, ...]] = {
    "subject": ("string",),
    "data": ("binary", "string"),
    "headers": ("map<string,string>",),
    "message_id": ("string",),
    "sequence": _INTEGERS,
    "source_stream": ("string",),
}
"""The columns of the writer and the types of each, as Spark writes them."""
READ_COLUMNS: dict[str, tuple[str, ...]] = {
    "partition": ("int",),
    "key": ("string",),
    "timestamp": ("timestamp",),
    "source_sequence": ("bigint",),
}
"""What the server decides about a message. SQL's `INSERT INTO` brings all columns of the reader, these as nulls."""


MAX_IN_FLIGHT = 4000
MAX_IN_FLIGHT_BYTES = 16 * 1024 * 1024
PUBLISH_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The options of `df.write` or `df.writeStream` with `format("keylane")`."""

    address: Address
    stream: str
    subject: str | None = None
    """Where all rows go, where there is no column `subject`."""
    query_name: str | None = None
    id_prefix: str | None = None
    max_in_flight: int = MAX_IN_FLIGHT
    max_in_flight_bytes: int = MAX_IN_FLIGHT_BYTES
    publish_timeout_s: float = PUBLISH_TIMEOUT_S
    """How long one row is tried before the task fails."""
    atomic: Atomic = "auto"
    dead_letters: bool = False


def write_options(options: Mapping[str, str], *, streaming: bool) -> WriteOptions:
    """What the options say; raises `InvalidInput` for the first one that breaks a rule.

    >>> write_options({"stream": "ORDERS", "maxInFlight": "100"}, streaming=False).max_in_flight
    100
    """
    given = _writers(options)
    address = Address.from_options(given)
    stream = _checked("stream", check_stream_name, given)
    if stream is None:
        raise InvalidInput(
            "option 'stream' is missing: name the stream that takes the rows, such as .option('stream', 'ORDERS')"
        )
    query_name = _checked("queryName", check_query_name, given)
    if query_name is not None and not streaming:
        raise InvalidInput(
            f"option 'queryName' ({shown(query_name)}) is for streaming writes: give 'idPrefix' to make the ids of two "
            "batch writes the same"
        )
    id_prefix = given.get("idprefix")
    if id_prefix is not None and not _ID_PREFIX.fullmatch(id_prefix):
        raise InvalidInput(
            f"option 'idPrefix' is {shown(id_prefix)}: use 1 to 100 visible ASCII characters without blanks"
        )
    return WriteOptions(
        address=address,
        stream=stream,
        subject=_checked("subject", check_subject, given),
        query_name=query_name,
        id_prefix=id_prefix,
        max_in_flight=_count("maxInFlight", given, 100_000) or MAX_IN_FLIGHT,
        max_in_flight_bytes=_count("maxInFlightBytes", given, 2**30) or MAX_IN_FLIGHT_BYTES,
        publish_timeout_s=_publish_timeout_s(given.get("publishtimeoutseconds")),
        atomic=_choice("atomic", given, get_args(Atomic)) or "auto",
        dead_letters=read_flag("deadLetters", given.get("deadletters", "false")),
    )


def check_columns(columns: Sequence[tuple[str, str]], subject: str | None) -> None:
    """Raise `InvalidInput` unless these columns, given with their types, can be written.

    >>> check_columns([("subject", "string"), ("data", "binary")], None)
    """
    allowed = ", ".join(f"{name} ({' or '.join(types)})" for name, types in COLUMNS.items())
    is_insert = {name for name, _ in columns} >= READ_COLUMNS.keys()
    known_columns = COLUMNS | READ_COLUMNS if is_insert else COLUMNS
    seen: set[str] = set()
    for name, kind in columns:
        known = known_columns.get(name.lower())
        if known is None:
            raise InvalidInput(f"column {name!r} cannot be written: select only {allowed}")
        if kind not in known:
            raise InvalidInput(f"column {name!r} has type {kind}: cast it to {' or '.join(known)}")
        if name.lower() in seen:
            raise InvalidInput(f"column {name!r} is there twice: drop one of them")
        seen.add(name.lower())
    if "data" not in seen:
        raise InvalidInput(f"there is no column 'data' with what to publish; the columns may be {allowed}")
    if "subject" not in seen and subject is None:
        raise InvalidInput("there is no column 'subject' and no option 'subject': give one of them")
    if "subject" in seen and subject is not None:
        raise InvalidInput(f"option 'subject' ({subject!r}) and a column 'subject' both say where rows go: give one")


def _writers(options: Mapping[str, str]) -> dict[str, str]:
    """The options by their names in lower case, without what Spark puts among them."""
    ours = {name: value for name, value in options.items() if name.lower() not in _SPARKS_OWN}
    if any(name.lower() == "path" for name in ours):
        raise InvalidInput("a path was given to save() or start(): rows go to a stream; leave it out")
    return given_options(ours, WRITER_NAMES, whose="writer")


def _publish_timeout_s(text: str | None) -> float:
    if text is None:
        return PUBLISH_TIMEOUT_S
    seconds = _number(text)
    if not 0 < seconds <= 86_400:
        raise InvalidInput(
            f"option 'publishTimeoutSeconds' is {shown(text)}: give a number of seconds above 0, at most 86,400"
        )
    return seconds

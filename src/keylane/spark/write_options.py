"""What a writer's options and columns say, checked before anything is asked of a server. Pure: no clock, no I/O.

Spark hands options over as text with names in any case, and puts some of its own among them. Which streams exist is not
known here.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from keylane.core.names import check_stream_name
from keylane.core.subjects import check_subject, shown
from keylane.errors import InvalidInput
from keylane.spark.address import OPTIONS as ADDRESS_OPTIONS
from keylane.spark.address import SECRETS, Address, read_flag

Atomic = Literal["true", "false", "auto"]

NAMES = (
    "stream",
    "subject",
    "queryName",
    "idPrefix",
    "maxInFlight",
    "maxInFlightBytes",
    "publishTimeoutSeconds",
    "atomic",
    "deadLetters",
)
"""The options of the writer besides those of the address, as they are written."""

_ADDRESS_NAMES = (
    "url, context, credsFile, nkeySeedFile, tlsCa, tlsCert, tlsKey, tlsHostname, tlsFirst, domain, apiPrefix, "
    "inboxPrefix"
)
_SPARKS_OWN = ("checkpointlocation",)
_QUERY_NAME = re.compile(r"[A-Za-z0-9_-]{1,200}")
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
    given = _given(options)
    address = Address.from_options(given)
    if "stream" not in given:
        raise InvalidInput(
            "option 'stream' is missing: name the stream that takes the rows, such as .option('stream', 'ORDERS')"
        )
    query_name = given.get("queryname")
    if query_name is not None and not streaming:
        raise InvalidInput(
            f"option 'queryName' ({shown(query_name)}) is for streaming writes: give 'idPrefix' to make the ids of two "
            "batch writes the same"
        )
    if query_name is not None and not _QUERY_NAME.fullmatch(query_name):
        raise InvalidInput(
            f"queryName is {shown(query_name)}: it names a record on the server; use 1 to 200 of A-Z, a-z, 0-9, '-' "
            "and '_'"
        )
    id_prefix = given.get("idprefix")
    if id_prefix is not None and not _ID_PREFIX.fullmatch(id_prefix):
        raise InvalidInput(
            f"option 'idPrefix' is {shown(id_prefix)}: use 1 to 100 visible ASCII characters without blanks"
        )
    return WriteOptions(
        address=address,
        stream=_checked_name(given["stream"]),
        subject=_checked_subject(given["subject"]) if "subject" in given else None,
        query_name=query_name,
        id_prefix=id_prefix,
        max_in_flight=_count("maxInFlight", given, MAX_IN_FLIGHT, 100_000),
        max_in_flight_bytes=_count("maxInFlightBytes", given, MAX_IN_FLIGHT_BYTES, 2**30),
        publish_timeout_s=_seconds("publishTimeoutSeconds", given, PUBLISH_TIMEOUT_S),
        atomic=_atomic(given.get("atomic", "auto")),
        dead_letters=read_flag("deadLetters", given.get("deadletters", "false")),
    )


def check_columns(columns: Sequence[tuple[str, str]], subject: str | None) -> None:
    """Raise `InvalidInput` unless these columns, given with their types, can be written.

    >>> check_columns([("subject", "string"), ("data", "binary")], None)
    """
    allowed = ", ".join(f"{name} ({' or '.join(types)})" for name, types in COLUMNS.items())
    seen: set[str] = set()
    for name, kind in columns:
        known = COLUMNS.get(name.lower())
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


def _given(options: Mapping[str, str]) -> dict[str, str]:
    """The options by their names in lower case; refuses unknown ones."""
    known = {name.lower(): name for name in NAMES} | {name: name for name in ADDRESS_OPTIONS}
    given: dict[str, str] = {}
    for name, value in options.items():
        lowered = name.lower()
        if lowered in _SPARKS_OWN:
            continue
        if lowered == "path":
            raise InvalidInput(
                f"a path ({shown(value)}) was given to save() or start(): rows go to a stream; leave it out"
            )
        if lowered not in known and lowered not in SECRETS:
            near = difflib.get_close_matches(lowered, known, n=1)
            meant = f"did you mean {known[near[0]]!r}? " if near else ""
            raise InvalidInput(
                f"option {name!r} (value {shown(value)}) is not one of the writer's: {meant}It knows "
                f"{', '.join(NAMES)}, and for the connection {_ADDRESS_NAMES}"
            )
        if not value.strip():
            raise InvalidInput(f"option {known.get(lowered, name)!r} is empty: give a value, or leave the option out")
        given[lowered] = value.strip()
    return given


def _checked_name(stream: str) -> str:
    try:
        return check_stream_name(stream)
    except InvalidInput as error:
        raise InvalidInput(f"option 'stream': {error}") from error


def _checked_subject(subject: str) -> str:
    try:
        return check_subject(subject)
    except InvalidInput as error:
        raise InvalidInput(f"option 'subject': {error}") from error


def _atomic(value: str) -> Atomic:
    match value.lower():
        case "true":
            return "true"
        case "false":
            return "false"
        case "auto":
            return "auto"
    raise InvalidInput(f"option 'atomic' is {shown(value)}: give true, false or auto")


def _count(name: str, given: Mapping[str, str], default: int, most: int) -> int:
    value = given.get(name.lower())
    if value is None:
        return default
    if not (value.isascii() and value.isdecimal() and len(value) <= 12) or not 1 <= int(value) <= most:
        raise InvalidInput(f"option {name!r} is {shown(value)}: give a whole number from 1 to {most:,}")
    return int(value)


def _seconds(name: str, given: Mapping[str, str], default: float) -> float:
    value = given.get(name.lower())
    if value is None:
        return default
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 86_400:
        raise InvalidInput(f"option {name!r} is {shown(value)}: give a number of seconds above 0, at most 86,400")
    return seconds

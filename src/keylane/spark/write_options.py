"""The options and columns of the writer, checked before anything is asked of a server. Pure: no clock, no I/O.

Spark passes options as text with names in any case, and adds some of its own. Which streams exist is not known here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from keylane.core.names import check_query_name, check_stream_name
from keylane.core.subjects import check_subject, shown
from keylane.errors import InvalidInput
from keylane.spark.address import Address, read_flag
from keylane.spark.options import checked, given_options

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
    if query_name is not None:
        check_query_name(query_name)
    id_prefix = given.get("idprefix")
    if id_prefix is not None and not _ID_PREFIX.fullmatch(id_prefix):
        raise InvalidInput(
            f"option 'idPrefix' is {shown(id_prefix)}: use 1 to 100 visible ASCII characters without blanks"
        )
    return WriteOptions(
        address=address,
        stream=checked("stream", check_stream_name, given["stream"]),
        subject=checked("subject", check_subject, given["subject"]) if "subject" in given else None,
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
    """The options by their names in lower case, without what Spark puts among them."""
    ours = {name: value for name, value in options.items() if name.lower() not in _SPARKS_OWN}
    if any(name.lower() == "path" for name in ours):
        raise InvalidInput("a path was given to save() or start(): rows go to a stream; leave it out")
    return given_options(ours, NAMES, whose="writer")


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

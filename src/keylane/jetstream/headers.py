"""NATS message headers: bytes to names and values, and back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from keylane.errors import InvalidInput

_NAME = re.compile(r"[!-9;-~]+")
_LINE_BREAK = re.compile(r"[\r\n]")
_VERSION = b"NATS/1.0"
_STATUS = re.compile(rb"\d{3}")
_NUMBER = re.compile(r"[0-9]{1,20}")


def header_items(raw: bytes) -> Iterator[tuple[str, str]]:
    """All name and value pairs, in order, repeated names included. The status line is left out."""
    for line in raw.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            yield name.strip().decode("utf-8", "replace"), value.strip().decode("utf-8", "replace")


def parse_headers(raw: bytes) -> dict[str, str]:
    """Names to values; of a repeated name the first value, as other NATS clients do."""
    headers: dict[str, str] = {}
    for name, value in header_items(raw):
        headers.setdefault(name, value)
    return headers


def status_of(raw: bytes) -> tuple[int, str]:
    """Code and text of an inline status (`NATS/1.0 408 Request Timeout`); (0, "") if there is none."""
    line = raw.partition(b"\r\n")[0]
    words = line[len(_VERSION) :].strip().split(b" ", 1)
    if not _STATUS.fullmatch(words[0]):
        return 0, ""
    return int(words[0]), words[1].decode("utf-8", "replace") if len(words) > 1 else ""


def number_in(value: str | None) -> int | None:
    """The number that a header's value is; None if it is none. `int` by itself also takes "+5", "1_0" and "٣".

    >>> number_in("42"), number_in("+5"), number_in(None)
    (42, None, None)
    """
    return int(value) if value is not None and _NUMBER.fullmatch(value) else None


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """The header block of a message to publish. Whitespace around a value does not survive the way."""
    lines = [_VERSION]
    for name, value in headers.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidInput(f"header name {name!r} is not valid: use printable ASCII without spaces or colons")
        if not isinstance(value, str):
            raise InvalidInput(f"value of header {name!r} is {type(value).__name__}, not text: give a str")
        if _LINE_BREAK.search(value):
            raise InvalidInput(f"value of header {name!r} holds a line break: remove or encode it")
        try:
            lines.append(b"%b: %b" % (name.encode(), value.encode()))
        except UnicodeEncodeError as error:
            raise InvalidInput(
                f"value of header {name!r} holds {value[error.start]!a}, which stands for a byte that is not "
                "UTF-8: decode the text with its own encoding"
            ) from error
    return b"\r\n".join(lines) + b"\r\n\r\n"

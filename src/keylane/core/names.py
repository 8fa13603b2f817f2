"""Names of streams, consumers, groups and members.

Owns: the rules for names. Never asks a server whether a name is taken.

The server (2.15.1) refuses an empty name, `.`, `*`, `>`, `/`, `\\`, blanks and more than 255 bytes. It does not always
answer: with a dot in a stream name the request matches no API subject, so no answer comes at all, and a blank ends the
connection. keylane is stricter in two ways:

- No whitespace or control characters of any alphabet. The server accepts `"A\\x01"` and `"A\\u2028"`, and nobody can
  tell such names apart on a screen.
- A group name contains only letters, digits, `-`, `_` and `=`. It is part of a key in a KV bucket, and clients in other
  languages refuse to read a key with other characters.
"""

from __future__ import annotations

import re

from keylane.core.subjects import check_characters, describe_char, shown
from keylane.errors import InvalidInput

MAX_NAME_BYTES = 255

_NOT_IN_NAMES = re.compile(r"[.*>/\\]")
_NOT_IN_KEYS = re.compile(r"[^-_=A-Za-z0-9]")
_QUERY_NAME = re.compile(r"[A-Za-z0-9_-]{1,200}")

_REASONS = {
    ".": "a dot separates the tokens of a subject, and names become tokens",
    "*": "'*' is a wildcard",
    ">": "'>' is a wildcard",
    "/": "names become file names, so they hold no path separator",
    "\\": "names become file names, so they hold no path separator",
}


def check_stream_name(name: str) -> str:
    """Return the name of a stream unchanged, or raise `InvalidInput`."""
    return _check(name, "stream name")


def check_consumer_name(name: str) -> str:
    """Return the name of a consumer unchanged, or raise `InvalidInput`."""
    return _check(name, "consumer name")


def check_member_name(name: str) -> str:
    """Return the name of a group's member unchanged, or raise `InvalidInput`."""
    return _check(name, "member name")


def check_group_name(name: str) -> str:
    """Return the name of a consumer group unchanged, or raise `InvalidInput`.

    >>> check_group_name("billing")
    'billing'
    """
    _check(name, "group name")
    if found := _NOT_IN_KEYS.search(name):
        raise InvalidInput(
            f"group name {shown(name)} holds {describe_char(name, found.start())}: "
            "a group name is part of a KV key; use only A-Z, a-z, 0-9, '-', '_' and '='"
        )
    return name


def check_query_name(name: str) -> str:
    """Return the name of a Spark query unchanged, or raise `InvalidInput`."""
    if not isinstance(name, str) or not _QUERY_NAME.fullmatch(name):
        raise InvalidInput(
            f"queryName is {shown(name)}: it names records and a consumer on the server; use 1 to 200 of A-Z, a-z, "
            "0-9, '-' and '_'"
        )
    return name


def _check(name: str, what: str) -> str:
    if not isinstance(name, str):
        raise InvalidInput(f"{what} {shown(name)} is {type(name).__name__}, not text: give a str such as 'ORDERS'")
    if not name:
        raise InvalidInput(f"{what} '' is empty: give at least one character")
    check_characters(name, what)
    if found := _NOT_IN_NAMES.search(name):
        raise InvalidInput(
            f"{what} {shown(name)} holds {describe_char(name, found.start())}: "
            f"{_REASONS[found.group()]}; use '-' or '_' instead"
        )
    if (size := len(name.encode())) > MAX_NAME_BYTES:
        raise InvalidInput(f"{what} {shown(name)} is {size} bytes long: the server allows {MAX_NAME_BYTES}; shorten it")
    return name

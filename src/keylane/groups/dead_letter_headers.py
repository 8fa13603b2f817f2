"""The headers of a dead letter: ours, which say what happened, and those of the original.

Pure, and on bytes. A message that cannot be put blocks its key, so nothing that a publisher wrote into a header (odd
bytes, repeated names, names that steer the server) may make this fail or pass for a header of ours. Names that begin
with `Nats-` or `Keylane-` are the server's and ours; the original's own ones of that kind are kept behind
`Keylane-Original-`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from urllib.parse import quote, unquote

ORIGINAL = "Keylane-Original-"
MAX_HEADER_BYTES = 65_000
"""A server stores no more than 65,535 bytes of headers."""
TRACEBACK_BYTES = 8000

_PLAIN = "!\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
"""Stands in a header as it is, with letters and digits. Everything else is percent-escaped."""
_ADDED_BY_SERVER = (b"nats-stream-source", b"nats-pin-id")
_LINE_BREAK = re.compile(rb"\r\n|\r|\n")
_LONE_SURROGATE = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # the others stand for bytes that are not UTF-8


def kept_lines(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The headers of a delivered message as a dead letter keeps them, without what the server added on the way."""
    for name, value in header_lines(raw):
        if name.lower() not in _ADDED_BY_SERVER:
            yield ORIGINAL.encode() + name if is_reserved(name) else name, value


def replayed_lines(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The original's headers from those of its dead letter, without the ones that would steer the server once more."""
    for name, value in header_lines(raw):
        if not is_reserved(name):
            yield name, value
        elif name.startswith(ORIGINAL.encode()):
            own = name.removeprefix(ORIGINAL.encode())
            if not own.lower().startswith(b"nats-"):
                yield own, value


def is_reserved(name: bytes) -> bool:
    return name.lower().startswith((b"nats-", b"keylane-"))


def header_lines(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Names and values as bytes. A lone CR or LF ends a line too, as some clients read it so."""
    for line in _LINE_BREAK.split(raw)[1:]:
        name, colon, value = line.partition(b":")
        if colon and name.strip():
            yield name.strip(), value.strip()


def header_block(lines: Iterable[tuple[bytes, bytes]]) -> bytes:
    block = list(lines)
    assert not any(_LINE_BREAK.search(part) for line in block for part in line)
    return b"NATS/1.0\r\n" + b"".join(b"%b: %b\r\n" % line for line in block) + b"\r\n"


def escaped(value: object) -> str:
    return _escaped(str(value), safe=_PLAIN)


def _escaped(value: str, safe: str) -> str:
    text = _LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
    return quote(text, safe=safe, errors="surrogateescape")


def traceback_value(text: str) -> str:
    """Escaped so that it can still be read; of what is longer than a header should be, the end."""
    while len(value := _escaped(text, safe=f"{_PLAIN} ")) > TRACEBACK_BYTES:
        text = f"…{text[1 + len(text) // 4 :]}"
    return value


def unescaped(text: str) -> str:
    return unquote(text, errors="surrogateescape")


def number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0

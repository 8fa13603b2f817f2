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
ERROR_CHARS = 500

_PLAIN = "!\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
"""Stands in a header as it is, with letters and digits. Everything else is percent-escaped."""
_ADDED_BY_SERVER = (b"nats-stream-source", b"nats-pin-id")
_LINE_BREAK = re.compile(rb"\r\n|\r|\n")
_NOT_SHOWN = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
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
    text = _LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", str(value))
    return quote(text, safe=_PLAIN, errors="surrogateescape")


def unescaped(text: str) -> str:
    return unquote(text, errors="surrogateescape")


def number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0


def error_line(error: BaseException) -> str:
    """Type and text of an error in one line of at most 500 characters."""
    try:
        text = str(error)[: 4 * ERROR_CHARS]
    except Exception as trouble:  # noqa: BLE001 - errors of users' own classes; the message must get away all the same
        text = f"(no text: {type(trouble).__name__})"
    line = _NOT_SHOWN.sub("?", " ".join(f"{type(error).__qualname__}: {text}".split())).removesuffix(":")
    return line if len(line) <= ERROR_CHARS else f"{line[: ERROR_CHARS - 1]}…"

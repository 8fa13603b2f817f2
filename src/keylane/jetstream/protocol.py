"""Cuts the NATS byte stream into messages, a whole socket buffer at a time.

Owns the client side of the NATS text protocol: finding where each operation begins and ends, and handing
messages to the route of their subscription. Free of I/O. nats-py matches each line with several regular
expressions and shifts its buffer for every message; this scanner walks the buffer once, which is what makes
a Python reader as fast as the server (bench/README.md).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from nats.errors import ProtocolError

_CRLF = b"\r\n"
_WORDS_WITH_REPLY = {b"MSG": 5, b"HMSG": 6}
MAX_CONTROL_LINE = 64 * 1024


class BrokenProtocol(ProtocolError):
    """The server sent what is not NATS protocol: the link cannot be used any more."""

    def __str__(self) -> str:
        return str(self.args[0])


class Route(Protocol):
    """Where the messages of one subscription go."""

    def receive(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        """Take one message. Called many times per buffer: keep it short."""

    def received(self) -> None:
        """The buffer is used up: act on what was received."""


class BulkRoute(Route, Protocol):
    """A route that cuts its own messages out of the buffer, many at a time."""

    def take(self, data: bytes, position: int) -> int:
        """Take the whole messages that begin at `position` and return where they end.

        Returns `position` where the message there is not one to take: it then comes by `receive`.
        """


class Control(NamedTuple):
    """A protocol line that is not a message: PING, PONG, INFO, -ERR or +OK, with its argument."""

    verb: bytes
    argument: bytes


class Unrouted(NamedTuple):
    """A message of a subscription that nats-py itself serves."""

    sid: int
    subject: bytes
    reply: bytes
    headers: bytes
    data: bytes


Event = Control | Unrouted


class Scanner:
    """The parser. `scan` takes what the socket gave; routes get their messages before it returns.

    Everything without a route is appended to `events`, in order, for nats-py to handle.
    """

    __slots__ = ("_chunks", "_have", "_need", "bulk_routes", "events", "routes")

    def __init__(self) -> None:
        self.routes: dict[bytes, Route] = {}
        self.bulk_routes: dict[bytes, BulkRoute] = {}
        self.events: list[Event] = []
        self.reset()

    def reset(self) -> None:
        """Forget a half-read operation: the connection it came from is gone."""
        self._chunks: list[bytes] = []
        self._have = 0
        self._need = 0

    def scan(self, data: bytes) -> None:
        if self._have:
            self._chunks.append(data)
            self._have += len(data)
            # A large message arrives in many pieces: join them once, when all are there.
            if self._have < self._need:
                return
            data = b"".join(self._chunks)
        touched: dict[int, Route] = {}
        try:
            used = self._walk(data, touched)
            rest = data[used:] if used else data
            self._chunks = [rest]
            self._have = len(rest)
        finally:
            for route in touched.values():
                route.received()

    def _walk(self, data: bytes, touched: dict[int, Route]) -> int:
        """Handle every complete operation in `data`; return how many bytes they took."""
        find = data.find
        size = len(data)
        position = 0
        self._need = 0
        sid = b""
        route: Route | None = None
        while position < size:
            end_of_line = find(_CRLF, position)
            if end_of_line < 0:
                if size - position > MAX_CONTROL_LINE:
                    raise BrokenProtocol("nats: control line too long")
                break
            start = end_of_line + 2
            words = data[position:end_of_line].split(b" ")
            kind = words[0]
            if kind not in _WORDS_WITH_REPLY:
                self.events.append(Control(kind.upper(), b" ".join(words[1:]).strip()))
                position = start
                continue
            try:
                end = start + int(words[-1])
                body = start if kind == b"MSG" else start + int(words[-2])
                subject, reply = words[1], words[3] if len(words) == _WORDS_WITH_REPLY[kind] else b""
                if words[2] != sid:
                    sid = words[2]
                    route = self.routes.get(sid)
                    if route is not None:
                        touched[id(route)] = route
            except (ValueError, IndexError) as error:
                raise BrokenProtocol(f"nats: malformed message line {words!r}") from error
            if end + 2 > size:
                self._need = end + 2 - position
                break
            if route is not None:
                route.receive(subject, reply, data[start:body], data[body:end])
                position = end + 2
            else:
                message = Unrouted(int(sid), subject, reply, data[start:body], data[body:end])
                position = self._without_route(message, data, position, touched) or end + 2
        return position

    def _without_route(self, message: Unrouted, data: bytes, position: int, touched: dict[int, Route]) -> int:
        """Let a bulk route have it and what follows; returns where that ends, or 0 for this message alone."""
        bulk = self.bulk_routes.get(b"%d" % message.sid)
        if bulk is None:
            self.events.append(message)
            return 0
        touched[id(bulk)] = bulk
        taken = bulk.take(data, position)
        if taken == position:
            bulk.receive(message.subject, message.reply, message.headers, message.data)
            return 0
        return taken

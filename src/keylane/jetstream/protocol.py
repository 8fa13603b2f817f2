"""Cuts the NATS byte stream into messages, a whole socket buffer at a time.

Owns the client side of the NATS text protocol: finding where each operation begins and ends, handing messages to the
route of their subscription, and refusing what is not NATS. Free of I/O. nats-py matches each line with several regular
expressions and shifts its buffer for every message; this scanner walks the buffer once, which is what makes a Python
reader as fast as the server (bench/README.md).

What is checked: a line ends with CR LF and is not longer than `MAX_CONTROL_LINE`; its verb is known; a message line has
the words of its kind (a reply may be empty: in some answers the server writes two blanks); a size is ASCII digits
within `Scanner.max_message_bytes`; headers are no larger than the whole; CR LF follows the payload. Subjects are taken
as they are: a publisher may put any byte but white space into them, and the server passes it on.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from nats.errors import ProtocolError

from keylane.errors import ProtocolViolation

MAX_CONTROL_LINE = 64 * 1024
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Of headers and payload, unless the server announces a larger `max_payload`: by default it holds back no more."""
ADDED_BYTES = 1024 * 1024
"""Room above `max_payload` for the headers that the server adds to a message."""

_CR = 13
_LF = 10
_VERBS = frozenset((b"PING", b"PONG", b"INFO", b"-ERR", b"+OK"))
_EXCERPT_BYTES = 80
_MOST_DIGITS = 10
_REMEMBERED_DIGITS = 4
_INFO_TYPES: dict[str, type] = {
    "server_id": str,
    "server_name": str,
    "version": str,
    "nonce": str,
    "client_ip": str,
    "max_payload": int,
    "client_id": int,
    "headers": bool,
    "tls_required": bool,
    "tls_available": bool,
    "tls_verify": bool,
    "auth_required": bool,
    "ldm": bool,
    "connect_urls": list,
}
_MOST_PAYLOAD = 2**31 - 1


class BrokenProtocol(ProtocolError, ProtocolViolation):
    """`ProtocolViolation` as nats-py's kind of error, which ends the link and not the client."""

    def __str__(self) -> str:
        return str(self.args[0])


def broken(what: str, received: bytes) -> BrokenProtocol:
    """The error for bytes that are not NATS protocol, with a short excerpt of them."""
    excerpt = repr(received[:_EXCERPT_BYTES])[1:]
    more = f" and {len(received) - _EXCERPT_BYTES} bytes more" if len(received) > _EXCERPT_BYTES else ""
    return BrokenProtocol(f"the server does not speak NATS: {what} ({excerpt}{more})")


def parse_info(argument: bytes) -> dict[str, Any]:
    """The JSON of an INFO line, with the types of all fields that the client uses checked."""
    try:
        info = json.loads(argument)
    except (ValueError, RecursionError) as error:
        raise broken("the argument of INFO is no JSON", argument) from error
    if not isinstance(info, dict):
        raise broken("the argument of INFO is no JSON object", argument)
    check_info(info)
    return info


def check_info(info: dict[str, Any]) -> None:
    for name, kind in _INFO_TYPES.items():
        if name in info and type(info[name]) is not kind:
            raise broken(f"{name} of INFO is no {kind.__name__}", repr(info[name]).encode())
    if not 0 < info.get("max_payload", 1) <= _MOST_PAYLOAD:
        raise broken(f"max_payload of INFO is not from 1 to {_MOST_PAYLOAD}", repr(info["max_payload"]).encode())
    for url in info.get("connect_urls", ()):
        if not _is_address(url):
            raise broken("connect_urls of INFO holds what is no host with a port", repr(url).encode())


def _is_address(url: object) -> bool:
    if not isinstance(url, str):
        return False
    try:
        parts = urlsplit(f"nats://{url}")
        return bool(parts.hostname and parts.port) and "@" not in url and parts.netloc == url and url.isprintable()
    except ValueError:
        return False


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


class _Sizes(dict[bytes, int]):
    """Sizes by the text that the server wrote. Nearly all are met again, and a look-up is quicker than `int`.

    Only short ones are kept, so the number of entries has a bound.
    """

    def __init__(self) -> None:
        super().__init__()
        self.limit = MAX_MESSAGE_BYTES + ADDED_BYTES

    def __missing__(self, written: bytes) -> int:
        # `int` by itself also takes "-15", "+5" and "1_0".
        if not written.isdigit() or len(written) > _MOST_DIGITS:
            raise ValueError
        size = int(written)
        if size > self.limit:
            raise ValueError
        if len(written) <= _REMEMBERED_DIGITS:
            self[written] = size
        return size


class Scanner:
    """The parser. `scan` takes what the socket gave; routes get their messages before it returns.

    Everything without a route is appended to `events`, in order, for nats-py to handle. What is not NATS protocol
    raises `BrokenProtocol`, after everything before it was handed on; then only `reset` makes the scanner usable.
    """

    __slots__ = ("_chunks", "_have", "_need", "_sizes", "bulk_routes", "events", "routes")

    def __init__(self) -> None:
        self.routes: dict[bytes, Route] = {}
        self.bulk_routes: dict[bytes, BulkRoute] = {}
        self.events: list[Event] = []
        self._sizes = _Sizes()
        self.reset()

    @property
    def max_message_bytes(self) -> int:
        """The largest message that is taken, headers included."""
        return self._sizes.limit

    def allow_payload(self, max_payload: int) -> None:
        """Take messages of what the server announces as `max_payload`, with the headers that it adds."""
        self._sizes.limit = max(MAX_MESSAGE_BYTES, max_payload) + ADDED_BYTES

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

    def _walk(self, data: bytes, touched: dict[int, Route]) -> int:  # noqa: C901, PLR0912 - hot: a call costs a tenth
        """Handle every complete operation in `data`; return how many bytes they took."""
        find, sizes = data.find, self._sizes
        size = len(data)
        position = 0
        self._need = 0
        sid = b"-"  # that of no message: the first one's is looked up
        route: Route | None = None
        while position < size:
            end_of_line = find(b"\n", position, position + MAX_CONTROL_LINE)
            if end_of_line < 0:
                if size - position >= MAX_CONTROL_LINE:
                    raise broken(f"a line of more than {MAX_CONTROL_LINE} bytes", data[position:])
                break
            start = end_of_line + 1
            words = data[position : end_of_line - 1].split(b" ")
            kind = words[0]
            try:
                if kind == b"HMSG":
                    body, count = start + sizes[words[-2]], 5
                elif kind == b"MSG":
                    body, count = start, 4
                else:
                    self._control(data[position:start])
                    position = start
                    continue
                end = start + sizes[words[-1]]
                subject, reply = words[1], b""
                if len(words) != count:
                    reply = words[3]
                    count += 1
                if words[2] != sid:
                    sid = words[2]
                    route = self._route(sid, touched)
            except (ValueError, IndexError):
                raise broken("malformed line", data[position:start]) from None
            if len(words) != count or body > end or not subject or data[end_of_line - 1] != _CR:
                raise broken("malformed line", data[position:start])
            if end + 2 > size:
                self._need = end + 2 - position
                break
            if data[end] != _CR or data[end + 1] != _LF:
                raise broken("no line end after the payload of a message", data[position:start])
            if route is not None:
                route.receive(subject, reply, data[start:body], data[body:end])
                position = end + 2
            else:
                message = Unrouted(int(sid), subject, reply, data[start:body], data[body:end])
                position = self._without_route(message, data, position, touched) or end + 2
        return position

    def _control(self, line: bytes) -> None:
        verb, _, argument = line.removesuffix(b"\r\n").partition(b" ")
        verb = verb.upper()
        if verb not in _VERBS or not line.endswith(b"\r\n"):
            raise ValueError
        self.events.append(Control(verb, argument.strip()))

    def _route(self, sid: bytes, touched: dict[int, Route]) -> Route | None:
        route = self.routes.get(sid)
        if route is not None:
            touched[id(route)] = route
        elif not sid.isdigit() or len(sid) > _MOST_DIGITS:
            raise ValueError
        return route

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

"""The scanner gives the same messages however the socket cuts the bytes."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keylane.errors import ProtocolViolation
from keylane.jetstream.protocol import MAX_CONTROL_LINE, BrokenProtocol, Control, Scanner, Unrouted, parse_info

token = st.text(st.sampled_from("abcXYZ019-_$é"), min_size=1, max_size=8)
subject = st.lists(token, min_size=1, max_size=4).map(".".join)


class Recorder:
    def __init__(self) -> None:
        self.messages: list[tuple[bytes, bytes, bytes, bytes]] = []
        self.bursts = 0

    def receive(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        self.messages.append((subject, reply, headers, data))

    def received(self) -> None:
        self.bursts += 1


@st.composite
def operations(draw: st.DrawFn) -> tuple[bytes, object]:
    kind = draw(st.sampled_from(["message", "headers", "ping", "info", "unrouted"]))
    name, reply = draw(subject).encode(), draw(st.one_of(st.just(""), subject)).encode()
    data = draw(st.binary(max_size=300))
    gap = b" " + reply if reply else b""
    if kind == "message":
        return b"MSG %b 7%b %d\r\n%b\r\n" % (name, gap, len(data), data), (name, reply, b"", data)
    if kind == "headers":
        head = b"NATS/1.0\r\nA: b\r\n\r\n"
        wire = b"HMSG %b 7%b %d %d\r\n%b%b\r\n" % (name, gap, len(head), len(head) + len(data), head, data)
        return wire, (name, reply, head, data)
    if kind == "unrouted":
        wire = b"MSG %b 12%b %d\r\n%b\r\n" % (name, gap, len(data), data)
        return wire, Unrouted(12, name, reply, b"", data)
    if kind == "info":
        return b'INFO {"server_id":"x y"}\r\n', Control(b"INFO", b'{"server_id":"x y"}')
    return b"PING\r\n", Control(b"PING", b"")


@given(sequence=st.lists(operations(), max_size=30), cuts=st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_any_cut_gives_the_same_messages(sequence: list[tuple[bytes, object]], cuts: list[int]) -> None:
    scanner, route = Scanner(), Recorder()
    scanner.routes[b"7"] = route
    wire = b"".join(piece for piece, _ in sequence)
    position = 0
    turn = 0
    while position < len(wire):
        step = cuts[turn % len(cuts)]
        scanner.scan(wire[position : position + step])
        position += step
        turn += 1
    expected = [event for _, event in sequence]
    assert route.messages == [event for event in expected if type(event) is tuple]
    assert scanner.events == [event for event in expected if type(event) is not tuple]


def test_a_route_hears_once_per_buffer() -> None:
    scanner, route = Scanner(), Recorder()
    scanner.routes[b"1"] = route
    scanner.scan(b"MSG a 1 1\r\nx\r\n" * 100)
    assert (len(route.messages), route.bursts) == (100, 1)


def test_a_large_message_is_joined_once_it_is_whole() -> None:
    scanner, route = Scanner(), Recorder()
    scanner.routes[b"1"] = route
    data = bytes(5_000_000)
    wire = b"MSG a 1 %d\r\n%b\r\n" % (len(data), data)
    for start in range(0, len(wire), 65536):
        scanner.scan(wire[start : start + 65536])
    assert route.messages == [(b"a", b"", b"", data)]


@pytest.mark.parametrize("line", [b"MSG a\r\n", b"MSG a 1 x\r\n", b"HMSG a 1 z 3\r\nabc\r\n"])
def test_malformed_message_lines_are_refused(line: bytes) -> None:
    with pytest.raises(BrokenProtocol, match="malformed"):
        Scanner().scan(line)


def test_an_endless_line_is_refused() -> None:
    with pytest.raises(BrokenProtocol, match="a line of more than 65536 bytes"):
        Scanner().scan(b"INFO " + b"x" * 70_000)


def test_reset_forgets_half_a_message() -> None:
    scanner, route = Scanner(), Recorder()
    scanner.routes[b"1"] = route
    scanner.scan(b"MSG a 1 100\r\nhalf")
    scanner.reset()
    scanner.scan(b"MSG b 1 2\r\nok\r\n")
    assert route.messages == [(b"b", b"", b"", b"ok")]


# ---- hostile input ----------------------------------------------------------------------------------


class Broken(Exception):
    """The reference parser's word for what is not NATS."""


DIGITS = set("0123456789")
VERBS = {b"PING", b"PONG", b"INFO", b"-ERR", b"+OK"}


def number(word: bytes, most: int) -> int:
    text = word.decode("latin-1")
    if not text or len(text) > 10 or not set(text) <= DIGITS or int(text) > most:
        raise Broken
    return int(text)


def reference(wire: bytes, most: int) -> tuple[list[object], bool]:
    """A dumb parser of a whole wire: its operations up to the end or the first fault, and whether there is a fault."""
    seen: list[object] = []
    while True:
        try:
            taken = operation(wire, most)
        except Broken:
            return seen, True
        if taken is None:
            return seen, False
        what, length = taken
        seen.append(what)
        wire = wire[length:]


def operation(wire: bytes, most: int) -> tuple[object, int] | None:
    """The first operation of a wire and its length; None if it is not whole."""
    length = wire.find(b"\n") + 1
    if length > MAX_CONTROL_LINE or (length == 0 and len(wire) >= MAX_CONTROL_LINE):
        raise Broken
    if length == 0:
        return None
    line, rest = wire[:length], wire[length:]
    words = line[:-2].split(b" ")
    refuse(not line.endswith(b"\r\n"))
    if words[0] not in (b"MSG", b"HMSG"):
        refuse(words[0].upper() not in VERBS)
        return Control(words[0].upper(), b" ".join(words[1:]).strip()), length
    sizes = 1 if words[0] == b"MSG" else 2
    named = words[1:-sizes]
    refuse(len(named) not in (2, 3) or not named[0])
    whole = number(words[-1], most)
    head = number(words[-2], most) if sizes == 2 else 0
    sid = number(named[1], 10**10)
    refuse(head > whole)
    if len(rest) < whole + 2:
        return None
    refuse(rest[whole : whole + 2] != b"\r\n")
    message = named[0], named[2] if len(named) == 3 else b"", rest[:head], rest[head:whole]
    return (message if named[1] == b"7" else Unrouted(sid, *message)), length + whole + 2


def refuse(fault: bool) -> None:
    if fault:
        raise Broken


class InOrder(Recorder):
    """A route that puts its messages between the scanner's other events."""

    def __init__(self, scanner: Scanner) -> None:
        super().__init__()
        self._scanner = scanner
        self.all: list[object] = []

    def receive(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        self.catch_up()
        self.all.append((subject, reply, headers, data))

    def catch_up(self) -> None:
        self.all += self._scanner.events
        self._scanner.events.clear()


def scanned(wire: bytes, cuts: list[int]) -> tuple[list[object], bool]:
    scanner = Scanner()
    route = InOrder(scanner)
    scanner.routes[b"7"] = route
    position = turn = 0
    failed = False
    while position < len(wire) and not failed:
        step = cuts[turn % len(cuts)]
        try:
            scanner.scan(wire[position : position + step])
        except BrokenProtocol:
            failed = True
        position, turn = position + step, turn + 1
    route.catch_up()
    return route.all, failed


ODD_SIZES = ["-15", "+5", "1_0", "٣", "", "0", "00003", "9999999999", "99999999999", "4.0", "0x5", "\t5", "5\n", "²"]
noise = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [b"\r\n", b"\n", b"\r", b" ", b"\x00", b"MSG ", b"HMSG ", b"INFO [1,2]\r\n", b"msg a 7 1\r\nx\r\n"]
    ),
    st.builds(lambda size: f"MSG a 7 {size}\r\n".encode(), st.sampled_from(ODD_SIZES)),
    st.builds(
        lambda head, whole, sid: f"HMSG a {sid} {head} {whole}\r\nabcdefgh\r\n".encode(),
        st.sampled_from([*ODD_SIZES, "4", "8"]),
        st.sampled_from([*ODD_SIZES, "4", "8"]),
        st.sampled_from(["7", "12", "+7", "x", ""]),
    ),
)


@st.composite
def garbled(draw: st.DrawFn) -> bytes:
    """Valid operations with noise between, pieces cut out, and bytes changed."""
    wire = bytearray(
        b"".join(draw(st.lists(st.one_of(operations().map(lambda pair: pair[0]), noise), min_size=1, max_size=8)))
    )
    for _ in range(draw(st.integers(0, 3))):
        if not wire:
            break
        at = draw(st.integers(0, len(wire) - 1))
        match draw(st.sampled_from(["change", "cut", "insert"])):
            case "change":
                wire[at] = draw(st.integers(0, 255))
            case "cut":
                del wire[at : at + draw(st.integers(1, 5))]
            case _:
                wire[at:at] = draw(st.sampled_from([b"-", b"+", b" ", b"\r", b"\n", b"0", b"9", b"_"]))
    return bytes(wire)


@settings(max_examples=500)
@example(wire=b"MSG a  8\r\n12345678\r\n", cuts=[1])
@given(wire=garbled(), cuts=st.lists(st.integers(1, 60), min_size=1, max_size=20))
def test_garbled_input_gives_what_a_simple_parser_gives(wire: bytes, cuts: list[int]) -> None:
    assert scanned(wire, cuts) == reference(wire, Scanner().max_message_bytes)


@pytest.mark.parametrize(
    "line",
    [
        b"MSG a 1 -15\r\n",
        b"MSG a 1 +5\r\nabcde\r\n",
        b"MSG a 1 1_0\r\n",
        "MSG a 1 ٣\r\n".encode(),
        b"MSG a 1 99999999999\r\n",
        b"MSG a 1 " + b"9" * 5000 + b"\r\n",
        b"MSG a 1 r s 1\r\nx\r\n",
        b"MSG  1 1\r\nx\r\n",
        b"MSG a x 1\r\nx\r\n",
        b"HMSG a 1 9 4\r\nabcd\r\n",
        b"HMSG a 1 -2 4\r\nabcd\r\n",
        b"HMSG a 1 4\r\nabcd\r\n",
        b"MSG a 1 1\nx\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\r\n",
    ],
)
def test_nonsense_is_refused_with_an_excerpt(line: bytes) -> None:
    with pytest.raises(BrokenProtocol, match="does not speak NATS: malformed line") as refused:
        Scanner().scan(line)
    assert len(str(refused.value)) < 600
    assert isinstance(refused.value, ProtocolViolation)


def test_a_payload_needs_its_line_end() -> None:
    with pytest.raises(BrokenProtocol, match="no line end after the payload"):
        Scanner().scan(b"MSG a 1 3\r\nabcdeMSG a 1 3\r\n")


def test_a_whole_line_has_a_bound_too() -> None:
    with pytest.raises(BrokenProtocol, match="a line of more than 65536 bytes"):
        Scanner().scan(b"INFO " + b"x" * 70_000 + b"\r\n")


def test_what_came_before_nonsense_counts() -> None:
    assert scanned(b"MSG a 7 1\r\nx\r\nPING\r\nMSG a 7 -1\r\n", [1000]) == (
        [(b"a", b"", b"", b"x"), Control(b"PING", b"")],
        True,
    )


@pytest.mark.parametrize(
    "argument",
    [
        b"[1,2]",
        b"",
        b"{",
        b"[" * 60_000,
        b'{"max_payload":"x"}',
        b'{"max_payload":-1}',
        b'{"max_payload":1e400}',
        b'{"max_payload":true}',
        b'{"version":5}',
        b'{"connect_urls":"a"}',
        b'{"connect_urls":[1]}',
        b'{"connect_urls":["[::"]}',
        b'{"connect_urls":["host"]}',
        b'{"connect_urls":["host:99999"]}',
        b'{"connect_urls":["a:b@host:1"]}',
        b"\xff",
    ],
)
def test_an_info_of_another_form_is_refused(argument: bytes) -> None:
    with pytest.raises(BrokenProtocol, match="INFO") as refused:
        parse_info(argument)
    assert len(str(refused.value)) < 600


def test_an_info_may_name_servers() -> None:
    info = parse_info(
        b'{"version":"2.15.1","connect_urls":["10.0.0.1:4222","[::1]:4222"],"max_payload":1048576,"x":null}'
    )
    assert info["connect_urls"] == ["10.0.0.1:4222", "[::1]:4222"]

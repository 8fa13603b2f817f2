"""The scanner gives the same messages however the socket cuts the bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.jetstream.protocol import BrokenProtocol, Control, Scanner, Unrouted

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
    with pytest.raises(BrokenProtocol, match="too long"):
        Scanner().scan(b"INFO " + b"x" * 70_000)


def test_reset_forgets_half_a_message() -> None:
    scanner, route = Scanner(), Recorder()
    scanner.routes[b"1"] = route
    scanner.scan(b"MSG a 1 100\r\nhalf")
    scanner.reset()
    scanner.scan(b"MSG b 1 2\r\nok\r\n")
    assert route.messages == [(b"b", b"", b"", b"ok")]

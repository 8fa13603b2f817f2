"""Messages cut out of buffers in bulk, against the scanner that takes them one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keylane.jetstream.protocol import BrokenProtocol, Scanner, Unrouted
from keylane.spark.executor import framing
from keylane.spark.executor.consumer_reader import delivered_messages
from keylane.spark.executor.direct_reader import stored_messages
from keylane.spark.executor.framing import MessageFramer, MessageRun, together

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True, scope="module")
def guess_early() -> Iterator[None]:
    """Short runs are walked one by one; here they are to be guessed too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "_FEWEST_TO_GUESS", 8)
        yield


Taken = tuple[bytes, bytes, bytes]
"""Subject, headers, payload."""


@dataclass
class OneByOne:
    """A plain route."""

    taken: list[Taken] = field(default_factory=list)

    def receive(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        self.taken.append((subject, headers, data))

    def received(self) -> None:
        pass


@dataclass
class InBulk(OneByOne):
    """A bulk route: what was cut is unpacked here, so that both can be compared."""

    cutter: MessageFramer = field(default_factory=lambda: MessageFramer(b" 7 $JS.ACK."))
    runs: list[MessageRun] = field(default_factory=list)

    def take(self, data: bytes, position: int) -> int:
        run = self.cutter.cut(data, position)
        if run is None:
            return position
        self.runs.append(run)
        for line, body, payload, end in zip(
            run.lines.tolist(), run.bodies.tolist(), run.payloads.tolist(), run.ends.tolist(), strict=True
        ):
            self.taken.append((data[line:body].split(b" ")[1], data[body:payload], data[payload:end]))
        return int(run.ends[-1]) + 2


payloads = st.one_of(
    st.binary(max_size=40),
    st.just(bytes(20)),
    st.sampled_from(
        [b"", b"\r\n", b"a\r\nb", b"MSG x 7 $JS.ACK.s.c.1.1.1.1.0 2\r\nab\r\n", b" 7 $JS.ACK.", b"PING\r\n"]
    ),
)
headers = st.one_of(st.none(), st.just(b"NATS/1.0\r\nA: b\r\n\r\n"), st.just(b"NATS/1.0\r\nA: b\r\nC: d e\r\n\r\n"))


def message(
    number: int, subject: bytes, data: bytes, block: bytes | None, *, sid: int = 7, reply: bytes | None = None
) -> bytes:
    reply = reply if reply is not None else b"$JS.ACK.s.c.1.%d.%d.1794806849270202684.%d " % (number, number, 5)
    if block is None:
        return b"MSG %b %d %b%d\r\n%b\r\n" % (subject, sid, reply, len(data), data)
    return b"HMSG %b %d %b%d %d\r\n%b%b\r\n" % (subject, sid, reply, len(block), len(block) + len(data), block, data)


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[int]]:
    """Bytes of the server, and where they are cut into buffers."""
    parts: list[bytes] = []
    for number in range(1, draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(["run", "run", "run", "one", "other", "ping", "status"]))
        if kind == "run":
            data, block = draw(payloads), draw(headers)
            many = draw(st.integers(1, 60))
            parts += [message(number + at, b"a.%d" % (at % 3), data, block) for at in range(many)]
        elif kind == "one":
            parts.append(
                message(number, draw(st.sampled_from([b"a", b"long.subject.here"])), draw(payloads), draw(headers))
            )
        elif kind == "other":
            parts.append(message(number, b"_INBOX.x", draw(payloads), draw(headers), sid=8, reply=b""))
        elif kind == "ping":
            parts.append(b"PING\r\n")
        else:
            parts.append(message(number, b"inbox.1", b"", b"NATS/1.0 100 Idle Heartbeat\r\n\r\n", reply=b""))
    whole = b"".join(parts)
    cuts = draw(st.lists(st.integers(0, len(whole)), max_size=6))
    return whole, sorted(cuts)


@given(streams())
@settings(deadline=None)
def test_bulk_and_one_by_one_take_the_same(stream: tuple[bytes, list[int]]) -> None:
    whole, cuts = stream
    plain, bulk = Scanner(), Scanner()
    plain.routes[b"7"] = one_by_one = OneByOne()
    bulk.bulk_routes[b"7"] = in_bulk = InBulk()
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        for scanner in (plain, bulk):
            if begin < end:
                scanner.scan(whole[begin:end])
    assert in_bulk.taken == one_by_one.taken
    assert bulk.events == plain.events


@pytest.mark.parametrize(
    "line",
    [
        b"MSG a.0 7 $JS.ACK.s.c.1.1.1.1.0 -15\r\n",
        b"MSG a.0 7 $JS.ACK.s.c.1.1.1.1.0 +2\r\nab\r\n",
        b"MSG a.0 7 $JS.ACK.s.c.1.1.1.1.0 1_0\r\n0123456789\r\n",
        b"MSG a.0 7 $JS.ACK.s.c.1.1.1.1.0 99999999999\r\n",
        b"HMSG a.0 7 $JS.ACK.s.c.1.1.1.1.0 9 4\r\nabcd\r\n",
        b"HMSG a.0 7 $JS.ACK.s.c.1.1.1.1.0 -2 4\r\nabcd\r\n",
        b"MSG a.0 7 $JS.ACK.s.c.1.1.1.1.0 2\r\nabcd\r\n",
    ],
)
@pytest.mark.parametrize("before", [0, 1, 40])
def test_a_bulk_route_leaves_nonsense_to_the_scanner(line: bytes, before: int) -> None:
    scanner = Scanner()
    scanner.bulk_routes[b"7"] = route = InBulk()
    with pytest.raises(BrokenProtocol):
        scanner.scan(message(1, b"a.0", b"ab", None) * before + line)
    assert len(route.taken) == before


@given(streams())
@settings(deadline=None)
def test_columns_are_what_the_messages_say(stream: tuple[bytes, list[int]]) -> None:
    whole, _ = stream
    scanner = Scanner()
    scanner.bulk_routes[b"7"] = route = InBulk()
    if whole:
        scanner.scan(whole)
    expected = [one for one in route.taken if not one[1].startswith(b"NATS/1.0 ")]
    if not route.runs:
        assert expected == []
        return
    found = delivered_messages(together(route.runs))
    assert found.subjects.to_pylist() == [subject for subject, _, _ in expected]
    assert found.data.to_pylist() == [data for _, _, data in expected]
    if found.headers is not None:
        assert found.headers.to_pylist() == [block for _, block, _ in expected]
    assert {str(one) for one in found.timestamps.cast("int64").to_pylist()} == {"1794806849270202"}


def test_a_stranger_in_the_middle_of_a_long_run_is_served() -> None:
    """Also where a payload holds what tells this subscription's lines from others."""
    mine = [message(number, b"a", b"x" * 20, None) for number in range(1, 200)]
    stranger = message(1, b"_INBOX.x", b"hello", None, sid=8, reply=b"")
    disguise = message(200, b"a", b" 7 $JS.ACK.  too bad", None)
    scanner = Scanner()
    scanner.bulk_routes[b"7"] = route = InBulk()
    scanner.scan(b"".join([*mine[:100], stranger, *mine[100:], disguise]))
    assert len(route.taken) == 200
    assert scanner.events == [Unrouted(8, b"_INBOX.x", b"", b"", b"hello")]


@pytest.mark.parametrize("domain", ["", "hub.ACCHASH."])
def test_both_forms_of_the_ack_subject(domain: str) -> None:
    tail = ".token" if domain else ""
    lines = [
        message(0, b"a.b", b"data", None, reply=f"$JS.ACK.{domain}s.c.1.{number * 10}.{number}.99000.3{tail} ".encode())
        for number in range(1, 50)
    ]
    run = MessageFramer(b" 7 $JS.ACK.").cut(b"".join(lines), 0)
    assert run is not None
    found = delivered_messages(run)
    assert found.sequences.to_pylist() == [number * 10 for number in range(1, 50)]
    assert set(found.timestamps.cast("int64").to_pylist()) == {99}


@pytest.mark.parametrize("fraction", ["", ".1", ".123456789", ".000001"])
def test_times_of_every_length(fraction: str) -> None:
    block = (
        "NATS/1.0\r\nNats-Stream: S\r\nNats-Subject: a\r\nNats-Sequence: 5\r\n"
        f"Nats-Time-Stamp: 2026-11-16T05:27:29{fraction}Z\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: 0\r\n\r\n"
    ).encode()
    run = MessageFramer(b"HMSG in 7 ", b"NATS/1.0\r\n").cut(message(0, b"in", b"x", block, reply=b""), 0)
    assert run is not None
    micros = int((fraction[1:] + "000000000")[:6])
    assert stored_messages(run, 0).timestamps.cast("int64").to_pylist() == [1794806849 * 1_000_000 + micros]

"""A real server has the last word: partition numbers, transform text, matching, overlap, and what it accepts.

Everything goes over a bare socket, byte for byte, so that no client's own opinion of a subject matters.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from keylane.core.names import check_stream_name
from keylane.core.partitions import (
    MAX_PARTITIONS,
    Partitioning,
    insert_partition,
    parse_transform,
    partition_filters,
    strip_partition,
)
from keylane.core.subjects import (
    MAX_SUBJECT_BYTES,
    check_filter,
    check_subject,
    is_subset,
    matches,
    overlaps,
)
from keylane.errors import InvalidInput
from keylane.server import NatsServer

SEED = 20260714
ANSWER_WITHIN_S = 20.0
Unique = Callable[[str], str]


class Wire:
    """The smallest client: publishes, asks, pulls. Subjects are bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.asked = 0
        self.inbox = b"_R.%b" % secrets.token_hex(6).encode()  # its own: answers to another are not for this one

    @staticmethod
    @asynccontextmanager
    async def open(server: NatsServer) -> AsyncIterator[Wire]:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**24)
        try:
            wire = Wire(reader, writer)
            writer.write(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n')
            writer.write(b"SUB %b.> 1\r\n" % wire.inbox)
            assert (await reader.readline()).startswith(b"INFO")
            yield wire
        finally:
            writer.close()
            await writer.wait_closed()

    def send(self, subject: bytes, payload: bytes = b"") -> None:
        self.asked += 1
        head = b"PUB %b %b.%d %d\r\n" % (subject, self.inbox, self.asked, len(payload))
        self.writer.write(head + payload + b"\r\n")

    async def receive(self) -> tuple[bytes, bytes]:
        """Subject and payload of the next message; a message without responders has its status as payload."""
        async with asyncio.timeout(ANSWER_WITHIN_S):
            while True:
                line = await self.reader.readuntil(b"\r\n")
                verb, *words = line.rstrip().split(b" ")
                if verb in (b"MSG", b"HMSG"):
                    body = (await self.reader.readexactly(int(words[-1]) + 2))[:-2]
                    header_size = int(words[-2]) if verb == b"HMSG" else 0
                    return words[0], body[header_size:] or body
                if verb == b"PING":
                    self.writer.write(b"PONG\r\n")

    async def publish(self, subjects: Iterable[bytes]) -> None:
        """Publish each subject with itself as payload; returns when the stream has stored all."""
        waiting = 0
        for subject in subjects:
            self.send(subject, subject)
            waiting += 1
        for _ in range(waiting):
            answer = (await self.receive())[1]
            assert b'"seq"' in answer, answer

    async def api(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        self.send(f"$JS.API.{path}".encode(), json.dumps(body).encode() if body else b"")
        answer: dict[str, Any] = json.loads((await self.receive())[1])
        return answer

    async def error_of(self, path: str, body: dict[str, Any]) -> int:
        """The error code of a request, 0 if it succeeded."""
        return int((await self.api(path, body)).get("error", {}).get("err_code", 0))

    async def stored(self, stream: str, count: int) -> list[tuple[bytes, bytes]]:
        """Subject and payload of the stream's first `count` messages, which may still be on their way."""
        config = {"name": "reader", "ack_policy": "explicit", "max_ack_pending": count}
        assert not await self.error_of(f"CONSUMER.CREATE.{stream}.reader", {"stream_name": stream, "config": config})
        expires_ns = int(ANSWER_WITHIN_S * 1e9)
        self.send(
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.reader".encode(),
            json.dumps({"batch": count, "expires": expires_ns}).encode(),
        )
        return [await self.receive() for _ in range(count)]


@pytest.fixture
async def wire(nats_server: NatsServer) -> AsyncIterator[Wire]:
    async with Wire.open(nats_server) as opened:
        yield opened


@pytest.fixture
async def make_stream(wire: Wire, unique: Unique) -> AsyncIterator[Callable[..., Any]]:
    """Creates a memory stream under a fresh name and deletes it after the test. The answer is the name."""
    names: list[str] = []

    async def make(**config: Any) -> str:
        name = config.pop("name", None) or unique("golden")
        answer = await wire.api(f"STREAM.CREATE.{name}", {"name": name, "storage": "memory", **config})
        assert "error" not in answer, answer
        names.append(name)
        return str(name)

    yield make
    for name in names:
        await wire.api(f"STREAM.DELETE.{name}")


def text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


ODD = "*>$1{}()-_/\\:;,\"'`~!@#%^&+=|?<é߀日本😀\u00a0\u2028\ufeff\ufffd\x01\x0b\x0c\x1f\x7f\x85"

ANY_BYTES = [byte for byte in range(1, 256) if byte not in b"\t\n\r .*>"]


def random_token(rng: random.Random) -> bytes:
    kind = rng.randrange(5)
    if kind == 0:
        return str(rng.randrange(10_000)).encode()
    if kind == 1:
        return f"customer-{rng.randrange(1000)}".encode()
    if kind == 2:
        return "".join(chr(rng.randrange(0xA1, 0x2000)) for _ in range(rng.randint(1, 9))).encode()
    if kind == 3:
        return bytes(rng.choices(ANY_BYTES, k=6))
    # A lone wildcard is no literal token to the server: it would leave the subject untransformed.
    odd = "".join(rng.choices(ODD, k=rng.randint(1, 40)))
    return f"{odd}x".encode()


def random_subjects(subject_filter: str, count: int, seed: int) -> list[bytes]:
    """Different subjects that match the filter."""
    rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
    found: dict[bytes, None] = {}
    while len(found) < count:
        parts: list[bytes] = []
        for part in subject_filter.split("."):
            if part == ">":
                parts += [random_token(rng) for _ in range(rng.randint(1, 4))]
            else:
                parts.append(random_token(rng) if part == "*" else part.encode())
        found[b".".join(parts)] = None
    return list(found)


SHAPES = [
    ("{}.*", (1,), 10),
    ("{}.*.*", (2,), 7),
    ("{}.*.*", (1, 2), 64),
    ("{}.*.*.*", (3, 1, 2), 1000),
    ("{}.*.fixed.*.>", (2, 1), 13),
    ("{}.*.>", (1,), 1),
    ("{}.*.*", (), 10),
    ("{}.>", (), 3),
    (">", (), 257),
    ("{}.*", (1,), MAX_PARTITIONS),
]


@pytest.mark.parametrize(("shape", "wildcards", "partitions"), SHAPES)
async def test_stream_transform_numbers_as_we_do(
    wire: Wire,
    make_stream: Callable[..., Any],
    unique: Unique,
    *,
    shape: str,
    wildcards: tuple[int, ...],
    partitions: int,
) -> None:
    prefix = unique("g")
    spread = Partitioning(shape.format(prefix), wildcards, partitions)
    stream = await make_stream(
        subjects=[f"{prefix}.>"],
        subject_transform={"src": spread.filter, "dest": spread.destination},
    )
    within = spread.filter if spread.filter != ">" else f"{prefix}.>"
    subjects = random_subjects(within, 600, SEED)
    await wire.publish(subjects)

    seen = set()
    for stored, original in await wire.stored(stream, len(subjects)):
        subject = text(original)
        assert text(stored) == insert_partition(spread.partition(subject), subject), f"seed {SEED}"
        assert strip_partition(text(stored)) == (spread.partition(subject), subject)
        seen.add(original)
    assert seen == set(subjects)


async def test_sourced_work_queue_numbers_as_we_do(wire: Wire, make_stream: Callable[..., Any], unique: Unique) -> None:
    prefix = unique("g")
    spreads = [
        Partitioning(f"{prefix}.orders.*.*.>", (2,), 12),
        Partitioning(f"{prefix}.refunds.*", (1,), 12),
        Partitioning(f"{prefix}.news.>", (), 12),
    ]
    origin = await make_stream(subjects=[f"{prefix}.>"])
    transforms = [{"src": spread.filter, "dest": spread.destination} for spread in spreads]
    group = await make_stream(
        retention="workqueue",
        discard="new",
        sources=[{"name": origin, "subject_transforms": transforms}],
    )
    subjects = [subject for spread in spreads for subject in random_subjects(spread.filter, 300, SEED)]
    await wire.publish([*subjects, f"{prefix}.other.1".encode()])

    for stored, original in await wire.stored(group, len(subjects)):
        subject = text(original)
        [spread] = [spread for spread in spreads if matches(spread.filter, subject)]
        assert text(stored) == insert_partition(spread.partition(subject), subject), f"seed {SEED}"


async def test_whole_stream_group_sources_everything(
    wire: Wire, make_stream: Callable[..., Any], unique: Unique
) -> None:
    prefix = unique("g")
    spread = Partitioning(">", (), 5)
    origin = await make_stream(subjects=[f"{prefix}.>"])
    group = await make_stream(
        retention="workqueue",
        sources=[{"name": origin, "subject_transforms": [{"src": spread.filter, "dest": spread.destination}]}],
    )
    subjects = random_subjects(f"{prefix}.>", 200, SEED)
    await wire.publish(subjects)
    for stored, original in await wire.stored(group, len(subjects)):
        assert text(stored) == insert_partition(spread.partition(text(original)), text(original))


VECTORS = [
    ("0", 10, 3),
    ("alice", 10, 9),
    ("customer-42", 10, 6),
    ("é", 10, 7),
    ("foobar", 7, 0),
    ("barfoo", 7, 6),
]


@pytest.mark.parametrize(("key", "partitions", "expected"), VECTORS)
async def test_vectors(
    wire: Wire, make_stream: Callable[..., Any], unique: Unique, *, key: str, partitions: int, expected: int
) -> None:
    prefix = unique("g")
    spread = Partitioning(f"{prefix}.*", (1,), partitions)
    stream = await make_stream(
        subjects=[f"{prefix}.>"], subject_transform={"src": spread.filter, "dest": spread.destination}
    )
    await wire.publish([f"{prefix}.{key}".encode()])
    [(stored, _)] = await wire.stored(stream, 1)
    assert strip_partition(text(stored))[0] == spread.partition(f"{prefix}.{key}") == expected


async def test_vector_of_a_whole_subject(wire: Wire, make_stream: Callable[..., Any]) -> None:
    spread = Partitioning("c.>", (), 5)
    stream = await make_stream(
        subjects=["c.x.y.z"], subject_transform={"src": spread.filter, "dest": spread.destination}
    )
    await wire.publish([b"c.x.y.z"])
    assert await wire.stored(stream, 1) == [(b"0.c.x.y.z", b"c.x.y.z")]


READABLE = [
    ("{}.*.*", "{{{{ Partition ( 10 , 2 ) }}}}.{}.$1.$2"),
    ("{}.*.*", "{{{{\tpartition\t(10,\t2,  1)\t}}}}.{}.$1.$2"),
    ("{}.*.*", "{{{{Partition(+010,+01)}}}}.{}.{{{{ wildcard ( 1 ) }}}}.{{{{Wildcard(2)}}}}"),
    ("{}.*.*", "{{{{Partition(9,2)}}}}.renamed.$2.{}.$1"),
    ("{}.*.*", "{{{{Partition(9,2)}}}}.$2"),
    ("{}.*.*", "{{{{Partition(9,2)}}}}.$x.$2.$0"),
    ("{}.*.>", "{{{{Partition(9,1)}}}}.renamed.$1.>"),
    ("{}.a.b", "{{{{Partition(9,1)}}}}.{}.a.b"),
    ("", "{{{{Partition(9)}}}}.>"),
]


@pytest.mark.parametrize(("source", "destination"), READABLE)
async def test_what_we_read_from_a_transform_is_what_the_server_does(
    wire: Wire, make_stream: Callable[..., Any], unique: Unique, source: str, destination: str
) -> None:
    prefix = unique("g")
    source, destination = source.format(prefix), destination.format(prefix)
    spread = parse_transform(source, destination)
    assert spread is not None
    stream = await make_stream(subjects=[f"{prefix}.>"], subject_transform={"src": source, "dest": destination})
    subjects = [f"{prefix}.a.b".encode()]
    if "*" in source:
        subjects += random_subjects(f"{prefix}.*.*", 50, SEED)
    await wire.publish(subjects)
    for stored, _ in await wire.stored(stream, len(subjects)):
        partition, subject = strip_partition(text(stored))
        assert spread.partition(subject) == partition


def is_read(source: str, destination: str) -> bool:
    try:
        return parse_transform(source, destination) is not None
    except InvalidInput:
        return False


@pytest.mark.parametrize(
    "destination",
    [
        "{{PARTITION(10,1)}}.$1",
        "{{Partition(10\t,1)}}.$1",
        "{{Partition(1_0,1)}}.$1",
        "{{Partition()}}.$1",
        "{{Partition(10,)}}.$1",
        "{{Partition(10,2)}}.$1",
        "{{Partition(2147483648,1)}}.$1",
        "{{Partition(10,1)}}.{{Wildcard(1,2)}}",
        "{{Partition(10,1)}}.*",
    ],
)
async def test_transform_text_that_the_server_refuses(wire: Wire, unique: Unique, destination: str) -> None:
    name = unique("golden")
    config = {
        "name": name,
        "storage": "memory",
        "subjects": [f"{name}.*"],
        "subject_transform": {"src": f"{name}.*", "dest": destination},
    }
    assert await wire.error_of(f"STREAM.CREATE.{name}", config) == 10156
    assert not is_read(f"{name}.*", destination)


async def test_numbers_of_the_server_that_we_refuse(
    wire: Wire, make_stream: Callable[..., Any], unique: Unique
) -> None:
    """The server takes a partition count below one and a wildcard below one; what comes out is of no use."""
    for arguments, expected in (("0,1", "0"), ("-3,1", "2851307223"), ("10,0", None), ("10,1,1", "9")):
        prefix = unique("g")
        transform = {"src": f"{prefix}.*", "dest": f"{{{{Partition({arguments})}}}}.x.$1"}
        stream = await make_stream(subjects=[f"{prefix}.>"], subject_transform=transform)
        await wire.publish([f"{prefix}.foo".encode()])
        [(stored, _)] = await wire.stored(stream, 1)
        assert expected is None or text(stored) == f"{expected}.x.foo"
        assert not is_read(transform["src"], transform["dest"])


# ---- matching and overlap ---------------------------------------------------------------------------


def random_filter(rng: random.Random) -> str:
    parts = rng.choices("ab*", k=rng.randint(1, 4))
    if rng.random() < 0.4:
        parts[-1] = ">"
    return ".".join(parts)


async def test_matches_as_the_server_does(wire: Wire, make_stream: Callable[..., Any], unique: Unique) -> None:
    prefix = unique("g")
    rng = random.Random(SEED)  # noqa: S311 - repeatable on purpose
    subjects = {f"{prefix}.{'.'.join(rng.choices('abc', k=rng.randint(1, 5)))}" for _ in range(300)}
    stream = await make_stream(subjects=[f"{prefix}.>"])
    await wire.publish(subject.encode() for subject in sorted(subjects))
    for _ in range(200):
        wanted = f"{prefix}.{random_filter(rng)}"
        answer = await wire.api(f"STREAM.INFO.{stream}", {"subjects_filter": wanted})
        selected = set(answer["state"].get("subjects") or ())
        assert selected == {subject for subject in subjects if matches(wanted, subject)}, wanted


async def test_overlap_and_nesting_as_the_server_sees_them(
    wire: Wire, make_stream: Callable[..., Any], unique: Unique
) -> None:
    prefix = unique("g")
    rng = random.Random(SEED)  # noqa: S311 - repeatable on purpose
    stream = await make_stream(subjects=[f"{prefix}.>"], retention="workqueue")

    async def create(name: str, *filters: str) -> int:
        config = {"name": name, "ack_policy": "explicit", "filter_subjects": list(filters)}
        return await wire.error_of(f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "config": config})

    answers = set()
    for _ in range(200):
        left, right = f"{prefix}.{random_filter(rng)}", f"{prefix}.{random_filter(rng)}"
        nested = is_subset(left, right) or is_subset(right, left)
        assert await create("both", left, right) == (10138 if nested else 0), (left, right)
        await wire.api(f"CONSUMER.DELETE.{stream}.both")
        assert await create("one", left) == 0
        assert await create("two", right) == (10100 if overlaps(left, right) else 0), (left, right)
        await wire.api(f"CONSUMER.DELETE.{stream}.one")
        await wire.api(f"CONSUMER.DELETE.{stream}.two")
        answers.add((nested, overlaps(left, right)))
    assert answers == {(True, True), (False, True), (False, False)}


async def test_partition_filters_are_taken_in_our_order_only(
    wire: Wire, make_stream: Callable[..., Any], unique: Unique
) -> None:
    prefix = unique("g")
    stream = await make_stream(
        subjects=[f"{prefix}.>"], subject_transform={"src": f"{prefix}.>", "dest": "{{Partition(12)}}.x.>"}
    )
    listed = partition_filters([11, 2, 0], ["x.*.a", "x.b.*"])
    # Without a threshold of our own the server fills one in, and then every second create is "different".
    config: dict[str, Any] = {"name": "c", "ack_policy": "explicit", "inactive_threshold": 5 * 10**9}
    request = {"stream_name": stream, "action": "create", "config": config}
    for order, code in ((listed, 0), (listed, 0), (listed[::-1], 10148)):
        config["filter_subjects"] = order
        assert await wire.error_of(f"CONSUMER.CREATE.{stream}.c", request) == code


# ---- what the server accepts, and where we are stricter ---------------------------------------------


def taken_by_us(check: Callable[[str], str], value: bytes) -> bool:
    try:
        check(text(value))
    except InvalidInput:
        return False
    return True


PUBLISHED = [  # token, what the server does with `<prefix>.<token>`, whether we take it
    (b"a", "stores", True),
    ("é😀日本\ufffd".encode(), "stores", True),
    (b"/\\:{}$1", "stores", True),
    (b"*", "stores", False),
    (b">", "stores", False),
    (b">.a", "stores", False),
    (b"foo*", "stores", False),
    (b"a\x01", "stores", False),
    (b"a\x00b", "stores", False),
    (b"a\x0bb", "stores", False),
    (b"a\x0cb", "stores", False),
    (b"a\rb", "stores", False),
    (b"a\x7f", "stores", False),
    (b"\xff", "stores", False),
    ("\u00a0".encode(), "stores", False),
    ("\u2028".encode(), "stores", False),
    ("\u0085".encode(), "stores", False),
    (b"", "no stream", False),
    (b".a", "no stream", False),
    (b"a.", "no stream", False),
    (b"a b", "hangs up", False),
    (b"a\tb", "hangs up", False),
    (b"a\nb", "hangs up", False),
    (b"a" * 4096, "hangs up", False),
    (b"a" * 3900, "stores", False),
    (b"a" * (MAX_SUBJECT_BYTES - 20), "stores", True),
]


@pytest.mark.parametrize(("token", "server_does", "we_take_it"), PUBLISHED)
async def test_subjects_to_publish(
    nats_server: NatsServer,
    make_stream: Callable[..., Any],
    unique: Unique,
    *,
    token: bytes,
    server_does: str,
    we_take_it: bool,
) -> None:
    prefix = unique("g")
    await make_stream(subjects=[f"{prefix}.>"])
    subject = prefix.encode() + b"." + token
    assert taken_by_us(check_subject, subject) == we_take_it
    async with Wire.open(nats_server) as own:
        own.send(subject)
        if server_does == "hangs up":
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await own.receive()
        else:
            answer = (await own.receive())[1]
            assert (b'"seq"' if server_does == "stores" else b"503") in answer


async def test_a_message_published_to_a_wildcard_gets_no_number(
    wire: Wire, make_stream: Callable[..., Any], unique: Unique
) -> None:
    prefix = unique("g")
    spread = Partitioning(f"{prefix}.*", (1,), 3)
    stream = await make_stream(
        subjects=[f"{prefix}.>"], subject_transform={"src": spread.filter, "dest": spread.destination}
    )
    await wire.publish([f"{prefix}.*".encode(), f"{prefix}.a.b".encode()])
    for stored, original in await wire.stored(stream, 2):
        assert stored == original
        with pytest.raises(InvalidInput, match="does not start with a partition number"):
            strip_partition(text(stored))


FILTERS = [  # filter behind the prefix, whether the server takes it, whether we do
    (">", True, True),
    ("*.*.>", True, True),
    ("é", True, True),
    ("foo*", True, False),
    ("*foo", True, False),
    ("foo>", True, False),
    ("a\x01", True, False),
    ("a\x0bb", True, False),
    ("a\u00a0b", True, False),
    ("", False, False),
    (".a", False, False),
    ("a.", False, False),
    (">.a", False, False),
    ("a b", False, False),
    ("a\tb", False, False),
    ("a\nb", False, False),
    ("a\x0cb", False, False),
    ("a\rb", False, False),
]


@pytest.mark.parametrize(("rest", "server_takes_it", "we_take_it"), FILTERS)
async def test_filters(
    wire: Wire,
    make_stream: Callable[..., Any],
    unique: Unique,
    *,
    rest: str,
    server_takes_it: bool,
    we_take_it: bool,
) -> None:
    prefix = unique("g")
    stream = await make_stream(subjects=[f"{prefix}.>"])
    wanted = f"{prefix}.{rest}"
    config = {"name": "c", "ack_policy": "explicit", "filter_subjects": [wanted]}
    code = await wire.error_of(f"CONSUMER.CREATE.{stream}.c", {"stream_name": stream, "config": config})
    assert code == (0 if server_takes_it else 10052)
    assert taken_by_us(check_filter, wanted.encode()) == we_take_it


NAMES = [  # name, error code of the server (0: taken), whether we take it
    ("é😀", 0, True),
    ("A:{$=-_", 0, True),
    ("A" * 255, 0, True),
    ("é" * 127 + "a", 0, True),
    ("é" * 128, 10052, False),
    ("A\x01", 0, False),
    ("A\u2028", 0, False),
    ("A*", 10052, False),
    ("A>", 10052, False),
    ("A/b", 10128, False),
    ("A\\b", 10128, False),
]


@pytest.mark.parametrize(("name", "code", "we_take_it"), NAMES)
async def test_stream_names(wire: Wire, unique: Unique, name: str, code: int, we_take_it: bool) -> None:
    config = {"name": name, "storage": "memory", "subjects": [unique("g")]}
    assert await wire.error_of(f"STREAM.CREATE.{name}", config) == code
    if not code:
        await wire.api(f"STREAM.DELETE.{name}")
    assert taken_by_us(check_stream_name, name.encode()) == we_take_it

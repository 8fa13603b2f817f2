"""What is stored for a row: subject, data, headers, id; and which rows are refused. Real server, no JVM."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pytest

from keylane.dead_letters import replay
from keylane.errors import GroupError, InvalidInput, RowRejected
from keylane.server import NatsServer
from tests.integration.spark.sink_rig import WAYS, Sink, judge, make_stream, numbered, on, rows

pytestmark = pytest.mark.spark


@pytest.fixture(params=WAYS)
def stream(request: pytest.FixtureRequest, nats_server: NatsServer, unique: Callable[..., str]) -> str:
    return make_stream(nats_server.url, unique("sink"), **WAYS[request.param])


@pytest.fixture
def plain(nats_server: NatsServer, unique: Callable[..., str]) -> str:
    return make_stream(nats_server.url, unique("sink"))


@pytest.fixture(autouse=True, scope="module")
def _links_closed(nats_server: NatsServer) -> Iterator[None]:
    yield
    from keylane.spark.address import Address  # noqa: PLC0415
    from keylane.spark.sync_connection import shared_connection  # noqa: PLC0415

    shared_connection(Address(url=nats_server.url)).close()


def test_every_row_is_stored_once_and_in_order(nats_server: NatsServer, stream: str) -> None:
    sink = Sink(nats_server.url, stream)
    written = sink.write(numbered(stream, 5000, 7))
    assert (written.rows, written.dead_letters) == (5000, 0)
    judge(sink.stored(), range(5000))


def test_a_task_that_runs_again_stores_nothing_new(nats_server: NatsServer, stream: str) -> None:
    sink = Sink(nats_server.url, stream)
    for _ in range(2):
        sink.write(numbered(stream, 3000, 5))
    judge(sink.stored(), range(3000))


def test_a_task_that_failed_half_way_is_completed(nats_server: NatsServer, stream: str) -> None:
    def half() -> Iterator[pa.RecordBatch]:
        yield from numbered(stream, 2500, 5, by=500)
        raise RuntimeError("executor lost")

    sink = Sink(nats_server.url, stream)
    with pytest.raises(RuntimeError, match="executor lost"):
        sink.write(half())
    deadline = time.monotonic() + 20
    while not (stored := sink.stored()):  # the first rows are on their way: the server stores them a moment later
        assert time.monotonic() < deadline, "none of the rows that were sent was stored"
    assert len(stored) <= 2500
    sink.write(numbered(stream, 5000, 5, by=700))
    judge(sink.stored(), range(5000))


def test_two_attempts_at_the_same_time(nats_server: NatsServer, stream: str) -> None:
    """Speculation: both publish the same rows over two connections."""
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415

    one = Sink(nats_server.url, stream)
    other = Sink(nats_server.url, stream, inboxPrefix="_OTHER")
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(each.write, numbered(stream, 4000, 3)) for each in (one, other)]:
            done.result(timeout=50)
    other.unlink()
    judge(one.stored(), range(4000))


def test_few_rows_in_flight(nats_server: NatsServer, stream: str) -> None:
    for number, (count, size) in enumerate([("1", "1"), ("3", "100000"), ("4000", "300")]):
        sink = Sink(nats_server.url, stream, maxInFlight=count, maxInFlightBytes=size)
        sink.write(numbered(stream, 300, 5, first=300 * number))
    judge(sink.stored(), range(900))


def test_text_bytes_and_nothing(nats_server: NatsServer, plain: str) -> None:
    sink = Sink(nats_server.url, plain, subject=f"{plain}.all")
    sink.write(rows({"data": ["grün", None, ""]}, {"data": pa.string()}), run="text")
    sink.write(rows({"data": [b"\x00\xff\r\n", None, b""]}), run="bytes")
    sink.write(rows({"data": ["wide", None]}, {"data": pa.large_string()}), run="wide")
    assert [one.data for one in sink.stored()] == ["grün".encode(), b"", b"", b"\x00\xff\r\n", b"", b"", b"wide", b""]
    assert {one.subject for one in sink.stored()} == {f"{plain}.all"}


def test_a_slice_of_a_batch_is_that_slice(nats_server: NatsServer, plain: str) -> None:
    [whole] = rows({"subject": [f"{plain}.{n}" for n in range(6)], "data": [b"%d" % n for n in range(6)]})
    sink = Sink(nats_server.url, plain)
    sink.write([whole.slice(2, 3)])
    assert [(one.subject, one.data) for one in sink.stored()] == [(f"{plain}.{n}", b"%d" % n) for n in (2, 3, 4)]


def test_headers_are_kept_but_for_those_that_steer_the_server(nats_server: NatsServer, stream: str) -> None:
    sink = Sink(nats_server.url, stream)
    headers = [
        [("Colour", "grün"), ("empty", ""), ("null", None)],
        [("Nats-Msg-Id", "theirs"), ("nats-rollup", "all"), ("Nats-Expected-Last-Sequence", "99"), ("kept", "1")],
        None,
        [],
    ]
    sink.write(rows({"subject": [f"{stream}.a"] * 4, "data": [b"%d" % n for n in range(4)], "headers": headers}))
    kept = [{name: value for name, value in one.headers.items() if "Batch" not in name} for one in sink.stored()]
    ids = [one.pop("Nats-Msg-Id") for one in kept]
    assert kept == [{"Colour": "grün", "empty": ""}, {"kept": "1"}, {}, {}]
    assert "theirs" not in ids
    assert len(set(ids)) == 4


def test_an_id_that_a_row_brings_along_wins(nats_server: NatsServer, stream: str) -> None:
    sink = Sink(nats_server.url, stream)
    sink.write(
        rows(
            {
                "subject": [f"{stream}.{n}" for n in range(4)],
                "data": [b"a", b"b", b"c", b"d"],
                "message_id": ["one", "two", "one", None],
                "sequence": [1, 2, 3, 4],
            }
        )
    )
    found = sink.stored()
    assert [one.data for one in found] == [b"a", b"b", b"d"]
    assert [one.headers["Nats-Msg-Id"] for one in found][:2] == ["one", "two"]
    assert found[2].headers["Nats-Msg-Id"].startswith("copy:4:")


BAD: dict[str, tuple[dict[str, object], str]] = {
    "no subject": ({"subject": None}, "its subject is null"),
    "empty subject": ({"subject": ""}, "subject '' is empty"),
    "wildcard": ({"subject": "{stream}.*"}, "holds the wildcard"),
    "blank": ({"subject": "{stream}.a b"}, "holds no whitespace"),
    "line break": ({"subject": "{stream}.a\r\nPUB x 0"}, "holds no whitespace"),
    "nobody's subject": ({"subject": "nobody.takes.this"}, "no stream takes its subject"),
    "header name": ({"headers": [("a b", "1")]}, "header name 'a b' is not valid"),
    "header value": ({"headers": [("a", "1\r\nb: 2")]}, "line break"),
    "large headers": ({"headers": [("a", "x" * 70_000)]}, "64 kB"),
    "too large": ({"data": bytes(1024 * 1024)}, "max_payload"),
    "empty id": ({"message_id": ""}, "message_id is ''"),
    "id with a line break": ({"message_id": "a\r\nb: c"}, "message_id is 'a"),
}


def bad_row(stream: str, fault: str) -> list[pa.RecordBatch]:
    """A good row, the bad one, and another good one."""
    columns: dict[str, list[object]] = {
        "subject": [f"{stream}.a"] * 3,
        "data": [b"0", b"bad", b"1"],
        "headers": [None] * 3,
        "message_id": [None] * 3,
    }
    for name, value in BAD[fault][0].items():
        columns[name][1] = value.replace("{stream}", stream) if isinstance(value, str) else value
    return rows(columns)  # type: ignore[arg-type]  # lists of what a column takes


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_row_fails_the_task(nats_server: NatsServer, plain: str, fault: str) -> None:
    sink = Sink(nats_server.url, plain)
    with pytest.raises(RowRejected, match=BAD[fault][1]) as raised:
        sink.write(bad_row(plain, fault))
    assert "deadLetters" in str(raised.value)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_row_becomes_a_dead_letter_once(nats_server: NatsServer, stream: str, fault: str) -> None:
    sink = Sink(nats_server.url, stream, deadLetters="true")
    for _ in range(2):
        written = sink.write(bad_row(stream, fault))
        assert (written.rows, written.dead_letters) == (3, 1)
    assert [one.data for one in sink.stored()] == [b"0", b"1"]
    [letter] = sink.dead_letters()
    assert (letter.stream, letter.group, letter.member, letter.tries) == (stream, "copy", "spark", 1)
    assert letter.error.startswith("RowRejected: subject")
    if fault != "large headers":
        assert letter.data == b"bad" or (fault == "too large" and 0 < len(letter.data) < 1024 * 1024)
    if "subject" in BAD[fault][0] and fault != "no subject":
        assert letter.subject == str(BAD[fault][0]["subject"]).replace("{stream}", stream)


def test_part_of_a_row_cannot_be_replayed(nats_server: NatsServer, plain: str) -> None:
    sink = Sink(nats_server.url, plain, deadLetters="true")
    sink.write(bad_row(plain, "too large"))
    [letter] = sink.dead_letters()
    with pytest.raises(GroupError, match="no subject"):
        on(nats_server.url, lambda connection: replay(connection, plain, letter.sequence))


def test_a_dead_letter_keeps_the_headers(nats_server: NatsServer, plain: str) -> None:
    sink = Sink(nats_server.url, plain, deadLetters="true")
    sink.write(rows({"subject": ["no.stream"], "data": [b"x"], "headers": [[("Colour", "red"), ("Keylane-Key", "k")]]}))
    [letter] = sink.dead_letters()
    assert letter.headers["Colour"] == "red"
    assert letter.headers["Keylane-Key"] == "k"
    assert letter.key == ""


def test_a_row_for_another_stream_is_not_stored_there(
    nats_server: NatsServer, stream: str, unique: Callable[..., str]
) -> None:
    other = make_stream(nats_server.url, unique("other"), allow_batched=True, allow_atomic=True)
    sink = Sink(nats_server.url, stream)
    with pytest.raises(RowRejected, match="belongs to another stream"):
        sink.write(rows({"subject": [f"{stream}.a", f"{other}.b"], "data": [b"0", b"1"]}))
    assert Sink(nats_server.url, other).stored() == []


def test_the_limit_of_the_stream_counts(nats_server: NatsServer, unique: Callable[..., str]) -> None:
    stream = make_stream(nats_server.url, unique("sink"), max_msg_size=1000)
    sink = Sink(nats_server.url, stream, deadLetters="true")
    written = sink.write(rows({"subject": [f"{stream}.a"] * 2, "data": [b"0", bytes(1000)]}))
    assert written.dead_letters == 1
    assert [one.data for one in sink.stored()] == [b"0"]
    assert sink.dead_letters()[0].data == bytes(1000)


@pytest.mark.parametrize(
    ("config", "options", "told"),
    [
        (None, {}, "there is no stream"),
        ({"no_ack": True}, {}, "has no_ack"),
        ({"sealed": True}, {}, "is sealed"),
        ({}, {"atomic": "true"}, "option 'atomic' is true.*allow_atomic"),
        ({}, {"subject": "other.subject"}, "does not take: its subjects are"),
    ],
)
def test_streams_that_take_no_rows(
    nats_server: NatsServer,
    unique: Callable[..., str],
    config: dict[str, object] | None,
    options: dict[str, str],
    told: str,
) -> None:
    stream = unique("sink")
    if config is not None:
        make_stream(nats_server.url, stream, **{key: value for key, value in config.items() if key != "sealed"})
        if "sealed" in config:
            wanted = {"name": stream, "subjects": [f"{stream}.>"], "storage": "file", "sealed": True, "num_replicas": 1}
            on(nats_server.url, lambda c: c.api.request(f"STREAM.UPDATE.{stream}", wanted | {"allow_direct": True}))
    with pytest.raises(InvalidInput, match=told):
        Sink(nats_server.url, stream, **options)


def test_a_mirror_takes_no_rows(nats_server: NatsServer, plain: str, unique: Callable[..., str]) -> None:
    name = unique("mirror")
    wanted = {"name": name, "mirror": {"name": plain}, "storage": "file", "num_replicas": 1}
    on(nats_server.url, lambda connection: connection.api.request(f"STREAM.CREATE.{name}", wanted))
    with pytest.raises(InvalidInput, match="copies other streams"):
        Sink(nats_server.url, name)


@pytest.mark.parametrize(
    ("allowed", "atomic", "way"),
    [
        ({}, "auto", "lanes"),
        ({"allow_atomic": True}, "auto", "atomic"),
        ({"allow_atomic": True}, "false", "lanes"),
        ({"allow_atomic": True, "allow_batched": True}, "auto", "ingest"),
        ({"allow_atomic": True, "allow_batched": True}, "true", "atomic"),
        ({"allow_batched": True}, "false", "ingest"),
    ],
)
def test_the_way_is_chosen_by_stream_and_option(
    nats_server: NatsServer, unique: Callable[..., str], allowed: dict[str, bool], atomic: str, way: str
) -> None:
    stream = make_stream(nats_server.url, unique("sink"), **allowed)
    assert Sink(nats_server.url, stream, atomic=atomic).target.way == way


def test_a_short_window_is_warned_of(
    nats_server: NatsServer, unique: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    stream = make_stream(nats_server.url, unique("sink"), duplicate_window=30_000_000_000)
    assert Sink(nats_server.url, stream).target.window_s == 30
    assert "for 30 s only" in caplog.text

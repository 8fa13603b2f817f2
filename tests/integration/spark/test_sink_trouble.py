"""Faults while rows are written: order and number of what is stored, and the error where it cannot go on. No JVM."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pytest

from keylane import Connection
from keylane.errors import ApiError, KeylaneError, PermissionDenied, RequestTimeout, RowRejected, WriteFailed
from keylane.jetstream import StoredMessage, read_all, streams
from keylane.server import NatsCluster, NatsServer
from tests.integration.spark.sink_rig import WAYS, Sink, judge, make_stream, numbered, on, rows

pytestmark = [pytest.mark.spark, pytest.mark.timeout(120)]

way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def own_server() -> Iterator[NatsServer]:
    with NatsServer.start(sync="always") as server:
        yield server


def with_trouble(
    batches: Iterator[pa.RecordBatch], trouble: Callable[[], None], *, after: int, join_after: int
) -> Iterator[pa.RecordBatch]:
    """Batches, with a trouble that begins in the background before one of them and is over before a later one."""
    thread = threading.Thread(target=trouble)
    for number, batch in enumerate(batches):
        if number == after:
            thread.start()
        if number == join_after:
            thread.join()
        yield batch


@way
def test_a_server_that_restarts_breaks_no_order(own_server: NatsServer, way: str) -> None:
    stream = make_stream(own_server.url, "RESTARTED", **WAYS[way])
    sink = Sink(own_server.url, stream)
    batches = with_trouble(numbered(stream, 12_000, 5, by=400), own_server.restart, after=4, join_after=25)
    sink.write(batches)
    judge(sink.stored(), range(12_000))
    sink.unlink()


@way
def test_a_server_that_is_killed_breaks_no_order(own_server: NatsServer, way: str) -> None:
    """What it confirmed it must still have: it syncs always here."""
    stream = make_stream(own_server.url, "KILLED", **WAYS[way])

    def kill() -> None:
        own_server.kill()
        own_server.restart()

    sink = Sink(own_server.url, stream)
    sink.write(with_trouble(numbered(stream, 8000, 5, by=400), kill, after=4, join_after=15))
    judge(sink.stored(), range(8000))
    sink.unlink()


@way
def test_leaders_that_move_break_no_order(nats_cluster: NatsCluster, unique: Callable[..., str], way: str) -> None:
    url = nats_cluster.urls[0]
    stream = make_stream(url, unique("moved"), num_replicas=3, **WAYS[way])

    def move() -> None:
        async def step_down(connection: Connection) -> None:
            for _ in range(3):
                with suppress(RequestTimeout, ApiError):  # no leader at this moment
                    await connection.api.request(f"STREAM.LEADER.STEPDOWN.{stream}", timeout_s=1.0)

        on(url, step_down)

    sink = Sink(url, stream)
    sink.write(with_trouble(numbered(stream, 8000, 5, by=400), move, after=4, join_after=15))

    async def leader_knows_all(connection: Connection) -> int:
        return (await streams.state(connection, stream)).messages

    assert on(url, leader_knows_all) == 8000
    deadline = time.monotonic() + 30
    while len(found := sink.stored()) < 8000:  # a replica that answers may lag behind the leader
        assert time.monotonic() < deadline, f"a replica has {len(found)} only"
    judge(found, range(8000))
    sink.unlink()


@way
def test_a_full_stream_fails_after_the_deadline_and_says_so(
    nats_server: NatsServer, unique: Callable[..., str], way: str
) -> None:
    stream = make_stream(nats_server.url, unique("full"), max_msgs=1500, discard="new", **WAYS[way])
    sink = Sink(nats_server.url, stream, publishTimeoutSeconds="4", deadLetters="true")
    with pytest.raises(WriteFailed, match=r"not stored in stream .* within 4 s .*maximum messages exceeded"):
        sink.write(numbered(stream, 5000, 5))
    judge(sink.stored(), range(1500)) if way != "atomic" else None
    assert sink.dead_letters() == []


@way
def test_a_full_stream_that_is_emptied_gets_the_rest_in_order(
    nats_server: NatsServer, unique: Callable[..., str], way: str
) -> None:
    """Every refusal hits a row whose followers of the same subject would find room a moment later."""
    stream = make_stream(nats_server.url, unique("full"), max_msgs=300, discard="new", **WAYS[way])
    sink = Sink(nats_server.url, stream)
    taken: list[StoredMessage] = []
    done = threading.Event()

    def empty() -> None:
        async def take(connection: Connection) -> None:
            last = 0
            while not done.is_set() or (await streams.state(connection, stream)).messages:
                async for one in read_all(connection, stream):
                    taken.append(one)
                    last = one.sequence
                await streams.purge(connection, stream, before_sequence=last + 1)

        on(nats_server.url, take)

    thread = threading.Thread(target=empty)
    thread.start()
    try:
        sink.write(numbered(stream, 3000, 5))
    finally:
        done.set()
        thread.join()
    judge(taken, range(3000))


def test_a_server_that_stays_away_fails_the_task(own_server: NatsServer) -> None:
    stream = make_stream(own_server.url, "AWAY")
    sink = Sink(own_server.url, stream, publishTimeoutSeconds="2")
    begun = time.monotonic()
    with pytest.raises(WriteFailed, match=r"within 2 s .*connection to the server was lost"):
        sink.write(with_trouble(numbered(stream, 4000, 5, by=400), own_server.kill, after=2, join_after=3))
    assert time.monotonic() - begun < 60
    own_server.restart()
    sink.unlink()


def test_a_server_that_is_not_there_is_a_clear_error(own_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keylane.spark.retry.FIRST_DEADLINE_S", 1.0)
    own_server.stop()
    with pytest.raises(KeylaneError, match=r"look at stream 'GONE'.*127\.0\.0\.1"):
        Sink(own_server.url, "GONE")


def test_a_deleted_stream_fails_the_task(nats_server: NatsServer, unique: Callable[..., str]) -> None:
    stream = make_stream(nats_server.url, unique("deleted"))
    sink = Sink(nats_server.url, stream, publishTimeoutSeconds="2", deadLetters="true")

    def delete() -> None:
        on(nats_server.url, lambda connection: streams.delete(connection, stream))

    with pytest.raises(WriteFailed, match="no stream took it"):
        sink.write(with_trouble(numbered(stream, 4000, 5, by=400), delete, after=2, join_after=3))
    assert sink.dead_letters() == []


def test_a_row_that_ended_up_elsewhere_is_an_error(nats_server: NatsServer, unique: Callable[..., str]) -> None:
    """Another stream got the subject after the driver had looked."""
    stream = make_stream(nats_server.url, unique("robbed"))
    sink = Sink(nats_server.url, stream, publishTimeoutSeconds="5")
    narrow = {
        "name": stream,
        "subjects": [f"{stream}.kept"],
        "storage": "file",
        "num_replicas": 1,
        "allow_direct": True,
    }
    on(nats_server.url, lambda connection: connection.api.request(f"STREAM.UPDATE.{stream}", narrow))
    thief = make_stream(nats_server.url, unique("thief"), subjects=[f"{stream}.lost"])
    with pytest.raises(WriteFailed, match=f"stored in stream '{thief}'"):
        sink.write(rows({"subject": [f"{stream}.kept", f"{stream}.lost"], "data": [b"0", b"1"]}))


@pytest.mark.parametrize("way", ["ingest", "atomic"])
def test_batches_that_are_forbidden_meanwhile(
    nats_server: NatsServer, unique: Callable[..., str], way: str, caplog: pytest.LogCaptureFixture
) -> None:
    stream = make_stream(nats_server.url, unique("forbidden"), **WAYS[way])
    sink = Sink(nats_server.url, stream)
    plain = {"name": stream, "subjects": [f"{stream}.>"], "storage": "file", "num_replicas": 1, "allow_direct": True}
    on(nats_server.url, lambda connection: connection.api.request(f"STREAM.UPDATE.{stream}", plain))
    sink.write(numbered(stream, 8000, 50))
    judge(sink.stored(), range(8000))
    assert "takes no batches" in caplog.text


USERS = """
accounts {
  APP {
    jetstream: enabled
    users: [
      { user: all, password: pw }
      { user: some, password: pw, permissions: { publish: { deny: ["SECRET.b"] } } }
    ]
  }
}
"""


@way
def test_a_forbidden_subject_fails_the_task_at_once(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    with NatsServer.start(extra_config=USERS) as server:
        monkeypatch.setenv("NATS_USER", "all")
        monkeypatch.setenv("NATS_PASSWORD", "pw")
        stream = make_stream(server.url, "SECRET", **WAYS[way])
        monkeypatch.setenv("NATS_USER", "some")
        sink = Sink(server.url, stream)
        begun = time.monotonic()
        with pytest.raises(PermissionDenied, match=r"SECRET\.b.*Allow it"):
            sink.write(rows({"subject": [f"{stream}.a", f"{stream}.b"], "data": [b"0", b"1"]}))
        assert time.monotonic() - begun < 30
        sink.unlink()


def test_a_full_place_for_dead_letters_fails_the_task(nats_server: NatsServer, unique: Callable[..., str]) -> None:
    stream = make_stream(nats_server.url, unique("sink"))
    make_stream(nats_server.url, f"{stream}@dlq", subjects=[f"keylane.dlq.{stream}.>"], max_msgs=1, discard="new")
    sink = Sink(nats_server.url, stream, deadLetters="true")
    with pytest.raises(KeylaneError, match="maximum messages exceeded"):
        sink.write(rows({"subject": [None, None], "data": [b"0", b"1"]}))
    assert len(sink.dead_letters()) == 1


def test_the_row_before_a_bad_one_is_stored(nats_server: NatsServer, unique: Callable[..., str]) -> None:
    stream = make_stream(nats_server.url, unique("sink"))
    sink = Sink(nats_server.url, stream)
    good, bad = rows({"subject": [f"{stream}.a"], "data": [b"0"]}), rows({"subject": [None], "data": [b"1"]})
    with pytest.raises(RowRejected, match="row 2 of its task"):
        sink.write([*good, *bad])

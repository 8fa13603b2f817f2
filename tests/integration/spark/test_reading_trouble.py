"""Splits whose reader, link, consumer or server goes away in the middle of them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keylane.errors import ApiError, InvalidInput, NotFound, PermissionDenied, ReadIncomplete
from keylane.jetstream import Outgoing, consumers
from keylane.server import NatsServer
from keylane.spark.executor import split_reader
from keylane.spark.executor.split_reader import read_split
from keylane.spark.tasks import ReadMethod, Split
from tests.integration.spark.splits import WAYS, Ground, ground_at, sequences_of
from tests.waiter import wait_until

pytestmark = pytest.mark.spark
both_ways = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer.start() as started:
        yield started


@pytest.fixture
def ground(server: NatsServer, unique: Callable[..., str]) -> Iterator[Ground]:
    """On a server of its own, so that its counters tell of one reader only."""
    with ground_at(server.url, unique("S")) as made:
        yield made


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that little data makes many batches, and most of it is still to be sent after the first."""
    for name in (
        "split_reader._ROWS",
        "consumer_reader._MOST_HELD",
        "consumer_reader._FIRST_PULL",
        "direct_reader._BATCH",
    ):
        monkeypatch.setattr(f"keylane.spark.executor.{name}", 100)


def fill(ground: Ground, count: int, size: int = 10) -> None:
    ground.create(f"{ground.stream}.>")
    ground.publish([Outgoing(f"{ground.stream}.{number % 3}", bytes(size)) for number in range(count)])


def first_batch(split: Split) -> tuple[list[int], Iterator[list[int]]]:
    """The sequences of the first batch, and those of the others as they are asked for."""
    batches = (batch.column("sequence").to_pylist() for batch in read_split(split))
    return next(batches), batches


DENIED = """
authorization { users: [ { user: some, password: pw, permissions: { publish: { deny: [
    "$JS.API.CONSUMER.MSG.NEXT.>", "$JS.API.DIRECT.GET.>"
] } } } ] }
no_auth_user: some
"""


@both_ways
def test_a_reader_that_may_not_ask_fails_at_once(unique: Callable[..., str], way: ReadMethod) -> None:
    with NatsServer.start(extra_config=DENIED) as server, ground_at(server.url, unique("S")) as ground:
        fill(ground, 10)
        begun = time.monotonic()
        with pytest.raises(PermissionDenied, match=rf"may not publish to .*{ground.stream}.* messages"):
            sequences_of(ground.split(way))
        assert time.monotonic() - begun < 10


def open_subscriptions(server: NatsServer) -> int:
    """Of the clients: JetStream's own come and go with consumers."""
    return sum(int(one["subscriptions"]) for one in server.monitor("connz")["connections"])


def sent_by(server: NatsServer) -> int:
    return int(server.monitor("varz")["out_msgs"])


@both_ways
@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("how", ["restart", "kill"])
def test_a_server_that_restarts_in_the_middle(server: NatsServer, ground: Ground, way: ReadMethod, how: str) -> None:
    fill(ground, 2000)
    begun, rest = first_batch(ground.split(way))
    if how == "kill":
        server.kill()
    server.restart()
    assert begun + [sequence for batch in rest for sequence in batch] == list(range(1, 2001))
    wait_until(lambda: ground.consumers() == [], deadline_s=15)


@pytest.mark.usefixtures("small_batches")
def test_a_consumer_that_is_deleted_in_the_middle(ground: Ground) -> None:
    fill(ground, 2000)
    seen: list[int] = []
    for batch in read_split(ground.split("consumer")):
        seen += batch.column("sequence").to_pylist()
        for name in ground.consumers():
            ground.link.call(consumers.delete(ground.link.connection, ground.stream, name))
    assert seen == list(range(1, 2001))


@both_ways
@pytest.mark.usefixtures("small_batches")
def test_a_link_that_is_closed_in_the_middle(ground: Ground, way: ReadMethod) -> None:
    """As another user of the process's link may do."""
    fill(ground, 1000)
    begun, rest = first_batch(ground.split(way))
    ground.link.close()
    assert begun + [sequence for batch in rest for sequence in batch] == list(range(1, 1001))


@both_ways
@pytest.mark.usefixtures("small_batches")
def test_a_reader_that_stops_early_leaves_nothing_behind(server: NatsServer, ground: Ground, way: ReadMethod) -> None:
    fill(ground, 1000)
    split = ground.split(way)
    before = open_subscriptions(server)
    rows = read_split(split)
    next(rows)
    assert len(ground.consumers()) == (1 if way == "consumer" else 0)
    rows.close()  # type: ignore[attr-defined]  # Spark closes the generator in the same way
    wait_until(lambda: ground.consumers() == [], deadline_s=15)
    wait_until(lambda: open_subscriptions(server) == before)


@both_ways
def test_a_reader_that_is_done_leaves_nothing_behind(ground: Ground, way: ReadMethod) -> None:
    fill(ground, 100)
    assert len(sequences_of(ground.split(way))) == 100
    wait_until(lambda: ground.consumers() == [], deadline_s=15)


@both_ways
def test_a_slow_reader_is_sent_no_more_than_it_can_hold(server: NatsServer, ground: Ground, way: ReadMethod) -> None:
    count = 80_000
    fill(ground, count, 1)
    split = ground.split(way)
    before = sent_by(server)
    seen = 0
    for number, batch in enumerate(read_split(split)):
        seen += batch.num_rows
        if number < 2:
            settled = -1
            while settled != (settled := sent_by(server)):
                time.sleep(0.3)
            assert settled - before - seen <= 45_000
    assert seen == count


@both_ways
def test_memory_stays_the_same_however_long_the_split_is(ground: Ground, way: ReadMethod) -> None:
    ground.create(f"{ground.stream}.>")
    for _ in range(10):
        ground.publish([Outgoing(f"{ground.stream}.x", bytes(100_000))] * 200)
    split = ground.split(way)
    sizes = []
    for batch in read_split(split):
        del batch
        sizes.append(_resident_megabytes())
    assert max(sizes) - sizes[0] < 80  # of 200


def _resident_megabytes() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


@both_ways
def test_a_stream_that_is_gone_is_told_soon(ground: Ground, way: ReadMethod) -> None:
    fill(ground, 10)
    split = ground.split(way)
    ground.api(f"STREAM.DELETE.{ground.stream}")
    with pytest.raises(NotFound, match="there is no stream"):
        list(read_split(split))
    ground.create(f"{ground.stream}.>")


def test_a_stream_without_direct_get_is_told_at_once(ground: Ground) -> None:
    ground.create(f"{ground.stream}.>", allow_direct=False)
    ground.publish([Outgoing(f"{ground.stream}.x")])
    with pytest.raises(InvalidInput, match="allow_direct"):
        list(read_split(ground.split("direct")))


def test_a_work_queue_refuses_a_consumer_without_acks(ground: Ground) -> None:
    ground.create(f"{ground.stream}.>", retention="workqueue")
    ground.publish([Outgoing(f"{ground.stream}.x")])
    with pytest.raises(ApiError, match="10084"):
        list(read_split(ground.split("consumer")))
    assert sequences_of(ground.split("direct")) == [1]


@both_ways
def test_a_server_that_stays_away_ends_the_read_with_a_reason(
    server: NatsServer, ground: Ground, way: ReadMethod
) -> None:
    fill(ground, 100)
    split = ground.split(way, 10, 90)
    server.kill()
    begun = time.monotonic()
    with pytest.raises(ReadIncomplete) as caught:
        list(read_split(split, patience_s=3))
    assert time.monotonic() - begun < 30
    for words in (ground.stream, "11 to 90", "read up to 10", "again"):
        assert words in str(caught.value)
    server.restart()
    assert sequences_of(split) == list(range(11, 91))


@both_ways
def test_a_message_that_nobody_can_send_is_named(
    ground: Ground, way: ReadMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader says that there is more, and whoever answers has no more: as a replica that never catches up."""

    async def lacking(*_: object) -> str:
        return "sequence 77, which the leader has"

    fill(ground, 10)
    monkeypatch.setattr(split_reader, "what_is_missing", lacking)
    split = ground.split(way, upto=100, last=100)
    with pytest.raises(ReadIncomplete, match=r"read up to 10.*lacks sequence 77"):
        list(read_split(split, patience_s=3))


def test_a_worker_needs_no_pandas(ground: Ground) -> None:
    """It takes a second to import, in every new worker, and the first batch would wait for it."""
    fill(ground, 50)
    program = f"""
import sys
from keylane.spark.address import Address
from keylane.spark.executor import split_reader
from keylane.spark.executor.split_reader import read_split
from keylane.spark.tasks import ReadSpec, Split
for way in ("consumer", "direct"):
    reading = ReadSpec(Address(url={ground.address.url!r}), {ground.stream!r}, way, True, (), True)
    assert sum(batch.num_rows for batch in read_split(Split(reading, 0, 50, None, 50))) == 50
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)

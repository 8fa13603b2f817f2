"""One driver of a query at a time: taking, keeping, losing and handing over its lease."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import keylane
from keylane import Connection
from keylane.errors import InvalidInput, KeylaneError, OutcomeUnknown, QueryFenced, RevisionConflict
from keylane.jetstream import Bucket, KvEntry, StreamConfig, streams
from keylane.server import NatsCluster, NatsServer
from keylane.spark.driver.lease import Lease, LeaseRecord, holder_name
from keylane.spark.parent_process import ParentProcess, end_properly
from keylane.spark.query_records import BUCKET, bucket_of, lease_key
from tests.peers.store import REPOSITORY
from tests.waiter import until

Unique = Callable[..., str]


@pytest.fixture
async def other(nats_server: NatsServer) -> AsyncIterator[Connection]:
    """A connection of another process, so to speak."""
    async with await keylane.connect(nats_server.url) as connected:
        yield connected


@asynccontextmanager
async def taken(connection: Connection, name: str, lease_s: float, holder: str = "me") -> AsyncIterator[Lease]:
    lease = Lease(connection, name, holder, lease_s)
    await lease.take()
    try:
        yield lease
    finally:
        await lease.release()


def is_held(lease: Lease) -> bool:
    try:
        lease.check()
    except QueryFenced:
        return False
    return True


def is_running(pid: int) -> bool:
    """Whether the process works; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---- taking and giving back -----------------------------------------------------------------------------


async def test_a_free_lease_is_taken_at_once_and_says_who_has_it(connection: Connection, unique: Unique) -> None:
    name = unique("query")
    async with taken(connection, name, 30, holder_name("app-7")) as lease:
        lease.check()
        record = LeaseRecord.of(await bucket_of(connection).get(lease_key(name)))
        assert record is not None
        assert socket.gethostname() in record.holder
        assert f"process {os.getppid()}, application app-7" in record.holder
        assert record.lease_s == 30
    assert LeaseRecord.of(await bucket_of(connection).get(lease_key(name))) is None
    with pytest.raises(QueryFenced, match=rf"lease of query '{name}': it was released"):
        lease.check()


async def test_a_lease_that_was_never_taken_is_not_held(connection: Connection, unique: Unique) -> None:
    lease = Lease(connection, unique("query"), "me", 5)
    with pytest.raises(QueryFenced, match="it was not taken"):
        lease.check()
    await lease.release()


async def test_a_standby_waits_while_the_holder_renews_and_takes_over_when_it_releases(
    connection: Connection, other: Connection, unique: Unique
) -> None:
    name = unique("query")
    waits_for: list[str] = []
    first = Lease(connection, name, "the first", 5.0)
    await first.take()
    second = Lease(other, name, "the second", 5.0)
    taking = asyncio.create_task(second.take(on_waiting=waits_for.append))
    await asyncio.sleep(6)
    assert not taking.done()
    first.check()
    assert waits_for == ["the first"]
    await first.release()
    await asyncio.wait_for(taking, 20)
    second.check()
    assert not is_held(first)
    await second.release()


async def test_a_release_is_noticed_long_before_the_lease_is_over(
    connection: Connection, other: Connection, unique: Unique
) -> None:
    name = unique("query")
    first, second = Lease(connection, name, "the first", 60), Lease(other, name, "the second", 60)
    await first.take()
    waits = asyncio.Event()
    taking = asyncio.create_task(second.take(on_waiting=lambda _: waits.set()))
    await asyncio.wait_for(waits.wait(), 10)
    await first.release()
    await asyncio.wait_for(taking, 10)
    await second.release()


async def test_of_many_that_want_it_one_has_it_at_a_time(connection: Connection, unique: Unique) -> None:
    name = unique("query")
    leases = [Lease(connection, name, f"driver {number}", 60) for number in range(8)]
    order: list[int] = []

    async def run(number: int) -> None:
        await leases[number].take()
        order.append(number)
        assert [one for one in range(8) if is_held(leases[one])] == [number]
        await asyncio.sleep(0.01)
        await leases[number].release()

    async with asyncio.timeout(40):
        await asyncio.gather(*(run(number) for number in range(8)))
    assert sorted(order) == list(range(8))


async def test_a_hint_that_runs_ahead_of_the_stream_is_not_wasted(
    connection: Connection, other: Connection, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subscriber hears of a write before the stream has stored it: the first look then shows the old record."""
    name = unique("query")
    first, second = Lease(connection, name, "the first", 60), Lease(other, name, "the second", 60)
    await first.take()
    waits = asyncio.Event()
    taking = asyncio.create_task(second.take(on_waiting=lambda _: waits.set()))
    async with asyncio.timeout(20):
        await waits.wait()
    bucket = second._bucket
    look, old, looks = bucket.get, await bucket.get(lease_key(name)), 0

    async def late(key: str) -> KvEntry | None:
        nonlocal looks
        looks += 1
        return old if looks == 1 else await look(key)

    monkeypatch.setattr(bucket, "get", late)
    await first.release()
    async with asyncio.timeout(20):
        await taking
    await second.release()


async def test_a_standby_asks_the_server_once_for_each_renewal(
    connection: Connection, other: Connection, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = unique("query")
    asked = 0
    request = other.api.request

    async def counted(*arguments: Any, **named: Any) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return await request(*arguments, **named)

    monkeypatch.setattr(other.api, "request", counted)
    async with taken(connection, name, 3.0):
        before = await _revision(connection, name)
        taking = asyncio.create_task(Lease(other, name, "the second", 3.0).take())
        await until(lambda: asked > 0)
        await asyncio.sleep(3.5)
        renewals = await _revision(connection, name) - before
        assert asked <= 2 + 2 * renewals  # a hint may run ahead of the stream: then it looks twice
        taking.cancel()
        await asyncio.wait({taking})


async def _revision(connection: Connection, name: str) -> int:
    """Counts the writes of a key whose bucket nobody else writes to meanwhile."""
    entry = await bucket_of(connection).get(lease_key(name))
    assert entry is not None
    return entry.revision


@pytest.mark.parametrize("seconds", [0, 0.5, -1, float("nan"), 4000])
async def test_a_lease_of_no_sensible_length_is_refused(connection: Connection, seconds: float) -> None:
    with pytest.raises(InvalidInput, match=r"leaseSeconds is .*: give 1 to 3600"):
        Lease(connection, "query", "me", seconds)


@pytest.mark.parametrize("name", ["", "a.b", "a b", "x" * 201, "a*"])
async def test_a_name_that_is_no_key_is_refused(connection: Connection, name: str) -> None:
    with pytest.raises(InvalidInput, match=r"queryName is .*use 1 to 200 of A-Z"):
        Lease(connection, name, "me", 5)


# ---- losing it ------------------------------------------------------------------------------------------


async def test_a_holder_without_its_server_is_fenced_before_a_standby_has_the_lease(
    nats_server: NatsServer, connection: Connection, unique: Unique
) -> None:
    name = unique("query")
    cut_off = await keylane.connect(nats_server.url)
    first = Lease(cut_off, name, "the first", 2.0)
    await first.take()
    second = Lease(connection, name, "the second", 1.0)
    taking = asyncio.create_task(second.take())
    began_at = time.monotonic()
    await cut_off.close()
    await until(taking.done)
    assert not is_held(first)
    with pytest.raises(QueryFenced, match="could not be renewed for 2 s"):
        first.check()
    # The standby goes by the holder's lease, not by its own shorter one.
    assert time.monotonic() - began_at >= 2.0
    await second.release()
    await first.release()


async def test_a_lease_that_somebody_else_wrote_is_lost_at_the_next_renewal(
    connection: Connection, unique: Unique
) -> None:
    name = unique("query")
    async with taken(connection, name, 9.0) as lease:
        bucket = bucket_of(connection)
        entry = await bucket.get(lease_key(name))
        assert entry is not None
        thief = LeaseRecord("an impatient driver", "another token", 9.0)
        await bucket.put(lease_key(name), thief.to_json(), revision=entry.revision)
        taken_at = time.monotonic()
        await until(lambda: not is_held(lease))
        with pytest.raises(QueryFenced, match="an impatient driver took it"):
            lease.check()
        assert time.monotonic() - taken_at < 9.0
    left = LeaseRecord.of(await bucket.get(lease_key(name)))
    assert left == thief  # a lease that is lost is not released for its new holder


async def test_a_deleted_record_fences_its_holder(connection: Connection, unique: Unique) -> None:
    name = unique("query")
    async with taken(connection, name, 9.0) as lease:
        bucket = bucket_of(connection)
        entry = await bucket.get(lease_key(name))
        assert entry is not None
        await bucket.delete(lease_key(name), revision=entry.revision)
        await until(lambda: not is_held(lease))
        with pytest.raises(QueryFenced, match="somebody deleted it"):
            lease.check()


@pytest.mark.long("waits for three renewals and for the end of a lease")
async def test_renewals_whose_answer_is_lost_do_not_cost_the_lease(
    connection: Connection, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = unique("query")
    put = Bucket.put
    stored = 0

    async def stored_but_not_answered(self: Bucket, *arguments: Any, **named: Any) -> int:
        nonlocal stored
        await put(self, *arguments, **named)
        stored += 1
        if stored % 2:
            raise OutcomeUnknown("the answer is lost")
        return -1  # nobody may use it: the first of two answers that were lost must be found out by reading

    async with taken(connection, name, 5.0) as lease:
        monkeypatch.setattr(Bucket, "put", stored_but_not_answered)
        await until(lambda: stored >= 3)
        monkeypatch.setattr(Bucket, "put", put)
        await asyncio.sleep(5.5)
        lease.check()


async def test_a_take_whose_answer_is_lost_is_a_take(
    connection: Connection, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = unique("query")
    put = Bucket.put
    tried = 0

    async def once_not_answered(self: Bucket, *arguments: Any, **named: Any) -> int:
        nonlocal tried
        tried += 1
        revision = await put(self, *arguments, **named)
        if tried == 1:
            raise OutcomeUnknown("the answer is lost")
        return revision

    monkeypatch.setattr(Bucket, "put", once_not_answered)
    lease = Lease(connection, name, "me", 60)
    await asyncio.wait_for(lease.take(), 10)  # and not after the minute that the first write would last
    lease.check()
    await lease.release()


async def test_a_record_that_is_no_lease_is_an_error_that_names_it(connection: Connection, unique: Unique) -> None:
    name = unique("query")
    bucket = bucket_of(connection)
    await bucket.ensure(replicas=1)
    await bucket.put(lease_key(name), b"[]", revision=0)
    with pytest.raises(InvalidInput, match=rf"record 'lease\.{name}' in bucket '{BUCKET}' is not a lease"):
        await Lease(connection, name, "me", 5).take()


async def test_a_lease_outlives_a_restart_of_the_server(unique: Unique) -> None:
    with NatsServer.start() as server:
        async with await keylane.connect(server.url) as connection:
            name = unique("query")
            async with taken(connection, name, 15.0) as lease:
                before = await _revision(connection, name)
                await asyncio.to_thread(server.restart)
                await _written_since(connection, name, before)
                lease.check()


async def _written_since(connection: Connection, name: str, before: int) -> None:
    """Wait for the next renewal, whatever happens to the server meanwhile."""
    async with asyncio.timeout(30):
        while True:
            with suppress(KeylaneError):
                if await _revision(connection, name) > before:
                    return
            await asyncio.sleep(0.1)


@pytest.mark.long("an election may take nine seconds, and there are two")
async def test_a_lease_outlives_its_bucket_changing_leaders(nats_cluster: NatsCluster, unique: Unique) -> None:
    async with await keylane.connect(nats_cluster.urls) as connection:
        name = unique("query")
        # Longer than an election may take: up to 9 s, where the old leader found no successor.
        lease = Lease(connection, name, "me", 18.0, replicas=3)
        await lease.take()
        info = await connection.api.request(f"STREAM.INFO.KV_{BUCKET}")
        assert info["config"]["num_replicas"] == 3
        for _ in range(2):
            before = await _revision(connection, name)
            await streams.step_down(connection, f"KV_{BUCKET}")
            await _written_since(connection, name, before)
            lease.check()
        second = Lease(connection, name, "the second", 18.0, replicas=3)
        await lease.release()
        await asyncio.wait_for(second.take(), 10)
        second.check()
        with pytest.raises(RevisionConflict):
            await bucket_of(connection).put(lease_key(name), b"{}", revision=before)
        await second.release()


# ---- real processes: killed, frozen, orphaned -------------------------------------------------------------


class Holder:
    """A running `lease_holder`, and what it prints."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process = process
        self._output = output

    def said(self, text: str) -> tuple[float, str] | None:
        """The first line that begins so, and when it was said."""
        for line in self._output.read_text().splitlines(keepends=True):
            at, _, words = line.partition(" ")
            if words.startswith(text) and words.endswith("\n"):
                return float(at), words.rstrip()
        return None

    async def says(self, text: str) -> tuple[float, str]:
        await until(lambda: self.said(text), deadline_s=30)
        found = self.said(text)
        assert found is not None
        return found


@contextmanager
def holder(server: NatsServer, name: str, lease_s: float, *, below: bool = False) -> Iterator[Holder]:
    command = [sys.executable, "-m", "tests.integration.spark.lease_holder", *(["--below"] if below else [])]
    with tempfile.NamedTemporaryFile() as output:
        process = subprocess.Popen(
            [*command, server.url, name, str(lease_s)], cwd=REPOSITORY, stdout=output, start_new_session=True
        )
        try:
            yield Holder(process, Path(output.name))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


async def test_a_killed_holder_is_followed_after_its_lease(
    nats_server: NatsServer, connection: Connection, unique: Unique
) -> None:
    name = unique("query")
    with holder(nats_server, name, 6.0) as first:
        await first.says("holds")
        second = Lease(connection, name, "the second", 6.0)
        waits = asyncio.Event()
        taking = asyncio.create_task(second.take(on_waiting=lambda _: waits.set()))
        await asyncio.wait_for(waits.wait(), 20)
        first.process.kill()
        killed_at = time.monotonic()
        await asyncio.wait_for(taking, 30)
        assert 1.0 < time.monotonic() - killed_at < 20.0  # 6 s after its last renewal, which was up to 2 s before
        second.check()
        await second.release()


async def test_a_frozen_holder_that_wakes_up_finds_itself_fenced_before_it_acts(
    nats_server: NatsServer, connection: Connection, unique: Unique
) -> None:
    name = unique("query")
    with holder(nats_server, name, 2.0) as first:
        await first.says("holds")
        first.process.send_signal(signal.SIGSTOP)
        second = Lease(connection, name, "the second", 9.0)
        await asyncio.wait_for(second.take(), 20)
        taken_at = time.monotonic()
        first.process.send_signal(signal.SIGCONT)
        await first.says("fenced")
        _, acted = await first.says("acted last at")
        assert float(acted.rpartition(" ")[2]) < taken_at
        await until(lambda: first.process.poll() is not None)
        # Whatever it did when it woke up, it must not disturb the next renewal.
        await _written_since(connection, name, await _revision(connection, name))
        second.check()
        await second.release()


async def test_a_frozen_holder_is_fenced_even_if_nobody_took_over(nats_server: NatsServer, unique: Unique) -> None:
    with holder(nats_server, unique("query"), 1.0) as only:
        await only.says("holds")
        only.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.5)
        woken_at = time.monotonic()
        only.process.send_signal(signal.SIGCONT)
        await only.says("fenced")
        _, acted = await only.says("acted last at")
        assert float(acted.rpartition(" ")[2]) < woken_at


@pytest.mark.parametrize("waiting", [False, True])
async def test_a_process_whose_parent_was_killed_neither_keeps_nor_takes_the_lease(
    nats_server: NatsServer, connection: Connection, unique: Unique, waiting: bool
) -> None:
    name = unique("query")
    ours = Lease(connection, name, "ours", 60)
    if waiting:
        await ours.take()
    with holder(nats_server, name, 60, below=True) as orphan:
        _, started = await orphan.says("started")
        child = int(started.split()[1])
        await orphan.says("waits for ours" if waiting else "holds")
        orphan.process.kill()  # the parent; its child lives on
        _, fenced = await orphan.says("fenced")
        assert "its JVM ended" in fenced
        if waiting:
            ours.check()
        else:
            await asyncio.wait_for(ours.take(), 20)  # at once, not after the minute
        await until(lambda: not is_running(child))
    ours.check()
    await ours.release()


# ---- the JVM's side of the socket -------------------------------------------------------------------------


def socket_of(caller: ParentProcess) -> socket.socket:
    """The one to its parent, which it keeps as long as the process lives."""
    kept = caller._socket
    assert kept is not None
    return kept


def test_a_caller_that_closes_its_socket_is_gone_and_nothing_is_taken_from_the_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as jvm, socket.create_connection(jvm.getsockname()) as ours:
        monkeypatch.setenv("PYTHON_WORKER_FACTORY_PORT", str(jvm.getsockname()[1]))
        theirs, _ = jvm.accept()
        caller = ParentProcess()
        with socket_of(caller):
            assert not caller.is_gone()
            theirs.sendall(b"next")
            assert not caller.is_gone()
            assert ours.recv(4) == b"next"
            assert os.get_blocking(ours.fileno())  # both handles share it: Spark's own reads must go on blocking
            assert not caller.is_gone()
            theirs.close()
            assert caller.is_gone()


async def test_a_driver_that_waits_gives_up_when_its_query_is_stopped(
    connection: Connection, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = unique("query")
    async with taken(connection, name, 60, "the first"):
        with socket.create_server(("127.0.0.1", 0)) as jvm, socket.create_connection(jvm.getsockname()):
            monkeypatch.setenv("PYTHON_WORKER_FACTORY_PORT", str(jvm.getsockname()[1]))
            theirs, _ = jvm.accept()
            caller = ParentProcess()
            with socket_of(caller):
                second = Lease(connection, name, "the second", 60, caller=caller)
                waits = asyncio.Event()
                taking = asyncio.create_task(second.take(on_waiting=lambda _: waits.set()))
                await asyncio.wait_for(waits.wait(), 10)
                theirs.close()
                with pytest.raises(QueryFenced, match="the query was stopped, while it waited"):
                    await asyncio.wait_for(taking, 10)


def test_spark_may_end_its_child_twice_and_what_must_be_done_is_done(tmp_path: Path) -> None:
    """Spark sends SIGTERM two times to the child of a query that is over."""
    done, ended_with = tmp_path / "done", tmp_path / "ended"
    program = f"""
import os, signal, time
from keylane.spark.parent_process import end_properly
end_properly(lambda: open({str(ended_with)!r}, "w").close())
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
finally:
    os.kill(os.getpid(), signal.SIGTERM)
    open({str(done)!r}, "w").close()
"""
    environment = {**os.environ, "PYTHON_WORKER_FACTORY_PORT": "1"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, timeout=30, check=False)
    assert done.exists()
    assert ended_with.exists()
    assert ended.returncode == 128 + signal.SIGTERM


async def test_spark_may_end_its_child_while_it_gives_its_lease_back(
    connection: Connection, nats_server: NatsServer, unique: Unique
) -> None:
    """A query that is stopped closes its socket first, so its child ends by itself, and SIGTERM comes in between."""
    name, stream = unique("query"), unique("ORDERS")
    await streams.create(connection, StreamConfig(name=stream, subjects=[f"{stream}.>"]))
    options = {"url": nats_server.url, "stream": stream, "queryName": name, "leaseSeconds": "600"}
    program = f"""
import asyncio, os, signal
from keylane.spark.driver.lease import Lease
from keylane.spark.source import StreamReader, read_options

release = Lease.release

async def release_late(lease):
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(1)
    await release(lease)

Lease.release = release_late
reader = StreamReader(read_options({options!r}, "streaming"))
try:
    reader.getDefaultReadLimit()
finally:
    reader.stop()
"""
    environment = {**os.environ, "PYTHON_WORKER_FACTORY_PORT": "1"}
    ended = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], env=environment, timeout=50, check=False
    )
    assert ended.returncode == 128 + signal.SIGTERM
    assert (await bucket_of(connection).get(lease_key(name))) is not None  # it was taken
    assert LeaseRecord.of(await bucket_of(connection).get(lease_key(name))) is None
    await streams.delete(connection, stream)


def test_a_process_that_is_not_sparks_keeps_its_signals() -> None:
    before = signal.getsignal(signal.SIGTERM)
    end_properly(lambda: None)
    assert signal.getsignal(signal.SIGTERM) is before

"""Splits read while a replica of the stream lags behind: it ends early without a word, and no row may be missing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from keylane.errors import ApiError, RequestTimeout
from keylane.jetstream import Connection, Outgoing
from keylane.server import NatsCluster, NatsServer
from keylane.spark.address import Address
from keylane.spark.executor import split_reader
from keylane.spark.executor.split_reader import read_split, what_is_missing
from keylane.spark.sync_connection import shared_connection
from keylane.spark.tasks import ReadMethod, Split
from tests.integration.spark.splits import WAYS, Ground, ground_at

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]

BACKLOG = 20_000
TAIL = 100


@contextmanager
def behind(node: NatsServer, publish: Callable[[], None]) -> Iterator[None]:
    """The node misses what is published, and then runs so little that it takes a while to catch up."""
    done = threading.Event()

    def run_now_and_then() -> None:
        while not done.is_set():
            os.kill(node.pid, signal.SIGCONT)
            done.wait(0.01)
            os.kill(node.pid, signal.SIGSTOP)
            done.wait(0.05)

    thread = threading.Thread(target=run_now_and_then)
    os.kill(node.pid, signal.SIGSTOP)
    try:
        publish()
        thread.start()
        yield
    finally:
        done.set()
        if thread.is_alive():
            thread.join()
        os.kill(node.pid, signal.SIGCONT)


@pytest.fixture
def lags(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the leader said was missing when a reader was at the end of what it was sent."""
    told: list[str] = []

    async def listening(connection: Connection, split: Split, position: int) -> str | None:
        missing = await what_is_missing(connection, split, position)
        if missing is not None:
            told.append(missing)
        return missing

    monkeypatch.setattr(split_reader, "what_is_missing", listening)
    return told


@pytest.mark.parametrize("way", WAYS)
def test_a_lagging_replica_hides_no_row(
    nats_cluster: NatsCluster, unique: Callable[..., str], lags: list[str], way: ReadMethod
) -> None:
    with ground_at(nats_cluster.wait_ready().url, unique("S")) as ground:
        ground.create(f"{ground.stream}.>", num_replicas=3)
        rounds = 0
        while not lags:
            rounds += 1
            assert rounds <= 15, "no read met the replica that lags: the test says nothing"
            _read_while_one_lags(nats_cluster, ground, way, lags)


def _read_while_one_lags(cluster: NatsCluster, ground: Ground, way: ReadMethod, lags: list[str]) -> None:
    """Reads the newest messages again and again until one read met the lag. Each read must be whole."""
    leader = ground.api(f"STREAM.INFO.{ground.stream}")["cluster"]["leader"]
    follower = next(node for node in cluster.nodes if node.name not in (leader, cluster.wait_ready().name))
    near_leader = Ground(Address(url=cluster.node(leader).url), ground.stream)
    # A direct get is often answered by the server that the reader is connected to, a consumer may live anywhere.
    reader = Ground(Address(url=follower.url), ground.stream) if way == "direct" else near_leader
    for one in (reader, near_leader):
        shared_connection(one.address)

    def publish() -> None:
        near_leader.publish([Outgoing(f"{ground.stream}.x", bytes(500))] * BACKLOG)

    try:
        with behind(follower, publish):
            last = last_of(near_leader)
            split = reader.split(way, last - TAIL, last, last=last)
            expected = list(range(split.after + 1, split.upto + 1))
            deadline = time.monotonic() + 4
            while not lags and time.monotonic() < deadline:
                found = [one for batch in read_split(split) for one in batch.column("sequence").to_pylist()]
                assert found == expected
        cluster.wait_ready()
    finally:
        for one in (reader, near_leader):
            if one.address != ground.address:
                one.link.close()


def last_of(ground: Ground) -> int:
    """What the leader says, once there is one: a replica that stood still for long calls an election."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return ground.last()
        except (ApiError, RequestTimeout):
            assert time.monotonic() < deadline


@pytest.mark.parametrize("way", WAYS)
def test_a_restarted_replica_hides_no_row(
    nats_cluster: NatsCluster, unique: Callable[..., str], way: ReadMethod
) -> None:
    with ground_at(nats_cluster.wait_ready().url, unique("S")) as ground:
        ground.create(f"{ground.stream}.>", num_replicas=3)
        leader = ground.api(f"STREAM.INFO.{ground.stream}")["cluster"]["leader"]
        follower = next(
            node for node in nats_cluster.nodes if node.name not in (leader, nats_cluster.wait_ready().name)
        )
        follower.kill()
        ground.publish([Outgoing(f"{ground.stream}.x", bytes(500))] * BACKLOG)
        last = ground.last()
        follower.restart()
        reader = Ground(Address(url=follower.url), ground.stream) if way == "direct" else ground
        try:
            split = reader.split(way, last - TAIL, last, last=last)
            deadline, reads = time.monotonic() + 5, 0
            while time.monotonic() < deadline or not reads:
                found = [one for batch in read_split(split) for one in batch.column("sequence").to_pylist()]
                assert found == list(range(last - TAIL + 1, last + 1))
                reads += 1
            nats_cluster.wait_ready()
        finally:
            if reader.address != ground.address:
                reader.link.close()

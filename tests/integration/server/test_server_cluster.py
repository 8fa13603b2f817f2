"""A cluster on loopback: it forms, lives on with a node killed, and keeps its data."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError

from keylane.core.run_state import RunState
from keylane.errors import InvalidInput, ServerStartFailed
from keylane.server import NatsCluster, NatsServer
from keylane.server.ports import ReservedPort

DEADLINE_S = 20.0


async def quiet(error: Exception) -> None:
    """The kill tests break links on purpose: nothing to log."""


async def client(nodes: list[NatsServer]) -> Client:
    return await nats.connect([node.url for node in nodes], error_cb=quiet, reconnect_time_wait=0.1)


async def stream_leader(connection: Client, stream: str) -> str:
    info = await connection.jetstream().stream_info(stream)
    assert info.cluster is not None
    assert info.cluster.leader is not None
    return info.cluster.leader


async def publish_until_acknowledged(connection: Client, subject: str) -> int:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return (await connection.jetstream(timeout=0.5).publish(subject, b"x")).seq
            except NatsError:
                await asyncio.sleep(0.05)  # no leader yet


def test_the_cluster_forms(nats_cluster: NatsCluster) -> None:
    leader = nats_cluster.wait_ready()
    assert len(set(nats_cluster.urls)) == 3
    for node in nats_cluster.nodes:
        meta = node.monitor("jsz")["meta_cluster"]
        assert (meta["leader"], meta["cluster_size"]) == (leader.name, 3)
        assert node.monitor("healthz") == {"status": "ok"}
    with pytest.raises(InvalidInput, match="no node is named 'other'"):
        nats_cluster.node("other")


async def test_a_killed_node_stops_no_publish_and_a_killed_cluster_loses_nothing(
    tmp_path: Path, unique: Callable[..., str]
) -> None:
    """One node dies and publishes go on; then all die, and a new cluster on other ports has every message."""
    stream = unique("S")
    with NatsCluster.start(store_dir=tmp_path) as cluster:
        connection = await client(cluster.nodes)
        await connection.jetstream().add_stream(name=stream, subjects=[stream], num_replicas=3)
        assert await publish_until_acknowledged(connection, stream) == 1
        leader = cluster.node(await stream_leader(connection, stream))
        await connection.close()

        # Not the leader: the servers would take many seconds to elect another one.
        victim = next(node for node in cluster.nodes if node is not leader)
        victim.kill()
        connection = await client([leader])
        for expected in range(2, 200):
            assert (await connection.jetstream().publish(stream, b"x")).seq == expected
        await connection.close()

        victim.restart()
        for node in cluster.nodes:
            node.kill()
    with pytest.raises(InvalidInput, match="holds a cluster of 3 nodes, not 5"):
        NatsCluster.start(5, store_dir=tmp_path)
    with NatsCluster.start(store_dir=tmp_path) as cluster:
        connection = await client(cluster.nodes)
        assert await publish_until_acknowledged(connection, stream) == 200
        await connection.close()


def test_stop_leaves_nothing_of_a_temporary_cluster() -> None:
    with NatsCluster.start() as cluster:
        assert all(node.state is RunState.RUNNING and node.store_dir.exists() for node in cluster.nodes)
    assert not any(node.state is RunState.RUNNING or node.store_dir.exists() for node in cluster.nodes)


def test_without_a_majority_the_wait_ends_with_an_error() -> None:
    with NatsCluster.start() as cluster:
        for node in cluster.nodes:
            node.kill()
        cluster.nodes[0].restart()
        with pytest.raises(ServerStartFailed, match=r"no JetStream leader .* within 0\.5 s"):
            cluster.wait_ready(0.5)


@pytest.mark.parametrize("size", [0, 1, 10, "3", True, 2.0])
def test_bad_size_is_refused(size: Any) -> None:
    with pytest.raises(InvalidInput, match="2 to 9"):
        NatsCluster.start(size)


def test_bad_options_are_refused_before_a_directory_is_made(tmp_path: Path) -> None:
    bad: list[dict[str, Any]] = [{"sync": "soon"}, {"port": "4222"}, {"port": 0}]
    for options in bad:
        with pytest.raises(InvalidInput):
            NatsCluster.start(store_dir=tmp_path / "c", **options)
    assert not (tmp_path / "c").exists()


def test_ports_beyond_the_last_one_are_refused() -> None:
    with pytest.raises(InvalidInput, match="leaves no room"):
        NatsCluster.start(3, port=65534)


def test_a_start_that_fails_half_way_can_be_repeated(tmp_path: Path) -> None:
    with adjacent_ports() as (first, second):
        with (
            socket.create_server(("127.0.0.1", second)),
            pytest.raises(ServerStartFailed, match=f"port {second} .*in use"),
        ):
            NatsCluster.start(2, store_dir=tmp_path, port=first)
        with NatsCluster.start(2, store_dir=tmp_path, port=first) as cluster:
            assert [node.port for node in cluster.nodes] == [first, second]


@contextmanager
def adjacent_ports() -> Iterator[tuple[int, int]]:
    """Two ports side by side that nobody else gets meanwhile."""
    with ExitStack() as held:
        for _ in range(50):
            first = ReservedPort()
            held.callback(first.release)
            try:
                second = ReservedPort(first.number + 1)
            except ServerStartFailed:
                continue
            held.callback(second.release)
            yield first.number, second.number
            return
    raise AssertionError("no two free ports side by side")


def test_a_node_that_cannot_start_fails_the_cluster() -> None:
    with pytest.raises(ServerStartFailed, match="Parse error"):
        NatsCluster.start(extra_config="nonsense {")

"""Several embedded servers joined into one JetStream cluster on loopback, for tests and trials.

Owns the routes between the nodes and the wait for a leader. `node` manages a single node.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from keylane.core.run_state import RunState
from keylane.errors import InvalidInput, ServerStartFailed, ServerUnreachable
from keylane.server.node import START_DEADLINE_S, NatsServer, usable_directory
from keylane.server.ports import ReservedPort, checked_port
from keylane.server.settings import SYNC_DEFAULT, ClusterRoutes, checked_sync

CLUSTER_NAME = "keylane"
_SMALLEST, _LARGEST = 2, 9
_LOOK_EVERY_S = 0.02


class NatsCluster:
    """A cluster of real nats-servers. Create one with `NatsCluster.start()`."""

    def __init__(self, nodes: list[NatsServer], route_ports: list[ReservedPort]) -> None:
        self.nodes = nodes
        self._route_ports = route_ports

    @classmethod
    def start(
        cls,
        size: int = 3,
        *,
        port: int | None = None,
        store_dir: Path | None = None,
        sync: str = SYNC_DEFAULT,
        extra_config: str = "",
        timeout_s: float = START_DEADLINE_S,
    ) -> Self:
        """Start `size` nodes and return when they have a leader and each is up to date with it.

        `port` is that of the first node, the others take the next ones; None takes free ones. Each node has its own
        directory under `store_dir`; None stores in temporary directories.
        """
        _check(size, port, store_dir)
        checked_sync(sync)
        deadline = time.monotonic() + timeout_s
        names = [f"node-{number}" for number in range(1, size + 1)]
        # All directories first: a start that fails half-way must not look like a smaller cluster next time.
        stores = [None if store_dir is None else usable_directory(Path(store_dir) / name) for name in names]
        cluster = cls([], [])
        try:
            cluster._route_ports = [ReservedPort() for _ in range(size)]
            peers = [reserved.number for reserved in cluster._route_ports]
            for index, name in enumerate(names):
                node = NatsServer.prepare(
                    port=None if port is None else port + index,
                    store_dir=stores[index],
                    sync=sync,
                    extra_config=extra_config,
                    name=name,
                    routes=ClusterRoutes(CLUSTER_NAME, peers[index], peers),
                )
                cluster.nodes.append(node)
            for node in cluster.nodes:
                node.launch()
            for node in cluster.nodes:
                node.wait_up(deadline - time.monotonic())
            cluster.wait_ready(deadline - time.monotonic())
        except BaseException:
            cluster.stop()
            raise
        return cluster

    @property
    def urls(self) -> list[str]:
        return [node.url for node in self.nodes]

    def node(self, name: str) -> NatsServer:
        """The node with this server name, as the server reports it for a leader or a replica."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise InvalidInput(f"no node is named {name!r}. Its nodes are {[node.name for node in self.nodes]}")

    def wait_ready(self, timeout_s: float = START_DEADLINE_S) -> NatsServer:
        """Wait until the running nodes agree on a JetStream leader and are up to date; return the leader."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                leader = self._agreed_leader()
            except ServerUnreachable:
                leader = None  # a node that is just starting or ending; the deadline bounds the wait
            if leader is not None:
                return leader
            time.sleep(_LOOK_EVERY_S)
        raise ServerStartFailed(
            f"no JetStream leader that all running nodes follow within {timeout_s:g} s. A leader needs more "
            f"than half of the nodes: {', '.join(f'{node!r} (log {node.log_path})' for node in self.nodes)}"
        )

    def stop(self) -> None:
        """Stop every node. Safe to repeat."""
        for node in self.nodes:
            node.stop()
        for reserved in self._route_ports:
            reserved.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    def _agreed_leader(self) -> NatsServer | None:
        running = [node for node in self.nodes if node.state is RunState.RUNNING]
        metas = {node.name: node.monitor("jsz").get("meta_cluster", {}) for node in running}
        leaders = {meta.get("leader") for meta in metas.values()}
        # For a while after a kill the others still name the dead node.
        if len(leaders) != 1 or not leaders <= metas.keys():
            return None
        leader = self.node(leaders.pop())
        replicas: list[dict[str, Any]] = metas[leader.name].get("replicas", [])
        current = {replica["name"] for replica in replicas if replica.get("current")}
        healthy = all(node.monitor("healthz").get("status") == "ok" for node in running)
        return leader if healthy and metas.keys() - {leader.name} <= current else None


def _check(size: int, port: int | None, store_dir: Path | None) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or not _SMALLEST <= size <= _LARGEST:
        raise InvalidInput(f"cluster size {size!r} is not a whole number from {_SMALLEST} to {_LARGEST}")
    checked_port(port)
    if port is not None and port + size - 1 > 65535:
        raise InvalidInput(f"port {port!r} leaves no room for {size} ports up to 65535. Give a lower one")
    kept = 0 if store_dir is None else len(list(Path(store_dir).glob("node-*")))
    if kept not in {0, size}:
        raise InvalidInput(
            f"store directory {str(store_dir)!r} holds a cluster of {kept} nodes, not {size}. "
            f"Start {kept} nodes or give another directory"
        )

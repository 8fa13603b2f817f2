"""Fixtures of the tests that run beside members written in Go."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from chaos.members import Group
from keylane import Connection
from keylane.server import NatsServer
from tests.integration.go.mixed import GROUP, Mixed, group_of_both
from tests.peers import go
from tests.peers.pcgroups import PcgroupsPeer


@pytest.fixture
def pcgroups(nats_server: NatsServer, tmp_path: Path) -> PcgroupsPeer:
    """The Go peer at work on `nats_server`."""
    return PcgroupsPeer(go.program("pcgroups-peer"), nats_server.url, tmp_path)


@pytest.fixture
async def elastic_group(
    connection: Connection,
    pcgroups: PcgroupsPeer,
    nats_server: NatsServer,
    unique: Callable[..., str],
    tmp_path: Path,
) -> AsyncIterator[Mixed]:
    """A stream for an elastic group of Go and Python members."""
    group = Group(nats_server.url, unique("both"), GROUP, "elastic")
    async with group_of_both(connection, pcgroups, group, tmp_path) as mixed:
        yield mixed


@pytest.fixture
async def static_group(
    connection: Connection,
    pcgroups: PcgroupsPeer,
    nats_server: NatsServer,
    unique: Callable[..., str],
    tmp_path: Path,
) -> AsyncIterator[Mixed]:
    """A stream with partition numbers for a static group of Go and Python members."""
    group = Group(nats_server.url, unique("both"), GROUP, "static")
    async with group_of_both(connection, pcgroups, group, tmp_path) as mixed:
        yield mixed

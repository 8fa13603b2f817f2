"""Fixtures of the tests that run beside members written in Go."""

from __future__ import annotations

from pathlib import Path

import pytest

from keylane.server import NatsServer
from tests.peers import go
from tests.peers.pcgroups import PcgroupsPeer


@pytest.fixture
def pcgroups(nats_server: NatsServer, tmp_path: Path) -> PcgroupsPeer:
    """The Go peer at work on `nats_server`."""
    return PcgroupsPeer(go.program("pcgroups-peer"), nats_server.url, tmp_path)

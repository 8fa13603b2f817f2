"""The embedded NATS server: the real nats-server, started on loopback and ended with its owner.

A test or a trial needs two lines:

    with NatsServer.start() as server:
        connection = await keylane.connect(server.url)

`node` manages one server, `cluster` several; `watchdog` explains why no server is ever left behind.
"""

from __future__ import annotations

from keylane.core.run_state import RunState
from keylane.lazy import public_names
from keylane.server.binary import MINIMUM_VERSION, ServerBinary, find_binary
from keylane.server.cluster import NatsCluster
from keylane.server.node import NatsServer

__all__ = ["MINIMUM_VERSION", "NatsCluster", "NatsServer", "RunState", "ServerBinary", "find_binary"]

__dir__ = public_names(__all__)

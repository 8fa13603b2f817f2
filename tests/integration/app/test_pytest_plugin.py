"""The fixtures of the pytest plugin, as a user's tests have them."""

from __future__ import annotations

import keylane
from keylane.jetstream import open_publisher
from keylane.server import NatsServer
from keylane.testing import Evidence
from keylane.testing.pytest_plugin import StartApp, keylane_app, keylane_evidence, keylane_server
from tests.waiter import until

__all__ = ["keylane_app", "keylane_evidence", "keylane_server"]


async def test_an_app_on_a_real_server(
    keylane_app: StartApp, keylane_server: NatsServer, keylane_evidence: Evidence
) -> None:
    app = keylane.App("nats://nowhere:1", create_streams=True)
    handled: list[int] = []

    @app.handler("ORDERS", group="billing", partition_by="orders.*", partitions=4)
    async def bill(order: bytes, message: keylane.Message) -> None:
        keylane_evidence.handled(message.key, message.sequence)
        handled.append(message.sequence)

    async with (
        keylane_app(app) as running,
        keylane.connect(keylane_server.url) as connection,
        open_publisher(connection) as publisher,
    ):
        for number in range(20):
            ack = await (await publisher.send(f"orders.{number % 3}", b"x"))
            keylane_evidence.sent(ack.sequence)
        await until(lambda: len(handled), lambda count: count == 20)
        assert running.state == "running"
    assert (keylane_evidence.lost, keylane_evidence.duplicated, keylane_evidence.out_of_order) == ((), (), ())

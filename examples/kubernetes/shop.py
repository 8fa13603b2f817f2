"""The app of deploy/kubernetes/fleet.yaml: workers of a fleet share the orders, each customer's in order.

keylane run shop:app --workers 2 --metrics-port 9464
"""

from __future__ import annotations

from dataclasses import dataclass

import keylane
from keylane import App

app = App(create_streams=True)


@dataclass
class Order:
    """What a message carries."""

    amount: float


@app.handler("ORDERS", group="shop", partition_by="orders.*", partitions=24, max_tries=5)
async def handle(order: Order, message: keylane.Message) -> None:
    print(f"customer {message.key}: {order.amount:.2f}", flush=True)

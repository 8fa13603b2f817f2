"""An app whose handlers run in processes of their own, which import this module."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import keylane

STREAM = os.environ.get("PROCESS_SHOP_STREAM", "ORDERS")

app = keylane.App()


@dataclass
class Order:
    cents: int


@dataclass
class Bill:
    cents: int
    pid: int
    sequence: int
    key: str


@app.handler(
    STREAM,
    group="billing",
    partition_by=f"{STREAM}.*",
    partitions=4,
    publish=f"billed.{STREAM}.{{key}}",
    executor="process",
    max_tries=2,
    time_limit_s=20,
)
def bill(order: Order, message: keylane.Message) -> Bill | None:
    if order.cents == 0:
        return None
    if order.cents < 0:
        raise ValueError(f"{order.cents} cents")
    time.sleep(0.01)
    return Bill(order.cents, os.getpid(), message.sequence, message.key)

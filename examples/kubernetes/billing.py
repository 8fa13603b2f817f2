"""The app of deploy/kubernetes/elastic.yaml: a member of an elastic group, by the name in MEMBER.

MEMBER=billing-0 keylane run billing:app --metrics-port 9464
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import keylane
from keylane import App

app = App()


@dataclass
class Order:
    """What a message carries."""

    amount: float


@app.handler("ORDERS", group="billing", member=os.environ.get("MEMBER", "billing-0"))
async def bill(order: Order, message: keylane.Message) -> None:
    print(f"bill for customer {message.key}: {order.amount:.2f}", flush=True)

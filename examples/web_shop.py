"""A web shop: FastAPI takes orders and publishes them, handlers of a `keylane.App` in the same process mail receipts.

Starts its own NATS server and web server, orders by HTTP, and needs nothing prepared (pip install fastapi uvicorn):

    python examples/web_shop.py
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

import keylane
from keylane import App
from keylane.server import NatsServer

ORDERS = 20


class Order(BaseModel):
    """What a customer orders."""

    item: str
    number: int


receipts: dict[str, list[int]] = defaultdict(list)
"""What was mailed to each customer, in this order."""
started, mailed = asyncio.Event(), asyncio.Event()


def shop(url: str) -> FastAPI:
    app = App(url, create_streams=True)

    @app.handler("ORDERS", group="mail", partition_by="orders.*", partitions=8, max_tries=3)
    async def mail(order: Order, message: keylane.Message) -> None:
        receipts[message.key].append(order.number)
        if sum(map(len, receipts.values())) >= ORDERS:
            mailed.set()

    @asynccontextmanager
    async def lifespan(web: FastAPI) -> AsyncIterator[None]:
        async with keylane.connect(url) as connection, app.start(connection=connection):
            web.state.connection = connection
            started.set()
            yield

    web = FastAPI(lifespan=lifespan)

    @web.post("/customers/{customer}/orders", status_code=202)
    async def take(customer: str, order: Order) -> dict[str, int]:
        stored = await keylane.publish(web.state.connection, f"orders.{customer}", order.model_dump_json().encode())
        return {"sequence": stored.sequence}

    return web


def order(port: int, customer: str, number: int) -> None:
    body = json.dumps({"item": "book", "number": number}).encode()
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/customers/{customer}/orders", body, headers)
    with urllib.request.urlopen(asked, timeout=10) as answer:  # noqa: S310 - our own server
        answer.read()


async def main() -> None:
    with NatsServer.start() as server, socket.create_server(("127.0.0.1", 0)) as listening:
        web = uvicorn.Server(uvicorn.Config(shop(server.url), log_level="warning"))
        web.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]  # keylane.run has them
        serving = asyncio.create_task(web.serve([listening]))
        try:
            async with asyncio.timeout(60):
                await started.wait()
                print("the shop is open")
                print(f"{ORDERS} orders by HTTP")
                for number in range(ORDERS):
                    port = listening.getsockname()[1]
                    await asyncio.to_thread(order, port, "ann" if number % 2 else "bob", number)
                await mailed.wait()
        finally:
            web.should_exit = True  # the lifespan ends: handlers finish, then the connection closes
            await serving
    for customer, numbers in sorted(receipts.items()):
        print(f"{customer}: {len(numbers)} receipts, in order: {'yes' if numbers == sorted(numbers) else 'no'}")


if __name__ == "__main__":
    keylane.run(main())

"""The examples of docs/jetstream.md run as they stand."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.js.api import StreamConfig

import keylane
from keylane import Connection
from keylane.jetstream import ConsumerConfig, Outgoing, consumers, open_feed, publish_many, streams
from keylane.server import NatsServer

PAGE = Path(__file__).parents[3] / "docs" / "jetstream.md"
PROGRAM, *PARTS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
async def ground() -> AsyncIterator[Connection]:
    """What the page says its later examples stand in."""
    with NatsServer.start() as server:
        async with await keylane.connect(server.url) as connection:
            config = StreamConfig(name="ORDERS", subjects=["orders.>"], allow_direct=True)
            await streams.create(connection, config)
            await publish_many(connection, [Outgoing(f"orders.eu.{number}") for number in range(20)])
            await consumers.create(connection, "ORDERS", ConsumerConfig(durable_name="billing"))
            yield connection


async def test_the_program_runs() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    _, complaints = await process.communicate()
    assert (process.returncode, complaints.decode()) == (0, "")


@pytest.mark.parametrize("part", PARTS, ids=lambda part: textwrap.shorten(part, 40))
async def test_the_parts_run(ground: Connection, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = {
        "connection": ground,
        "open_feed": open_feed,
        "streams": streams,
        "StreamConfig": StreamConfig,
        "Outgoing": Outgoing,
    }
    code = compile(part, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, known)  # noqa: S307 - our own page
    if inspect.isawaitable(result):
        await result
    said = capsys.readouterr().out
    if "publish_many" in part:
        assert "stored as ORDERS/21\nstored as ORDERS/21 before\nrefused: wrong last sequence: 21 (10071)" in said
    if "publish_atomic" in part:
        assert said == "[1, 2]\n"
    if "read_batch" in part:
        assert said.startswith("20 read, 0 to come\n")

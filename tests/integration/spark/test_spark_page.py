"""The first example of docs/spark.md, as it is written, gives what the page shows."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import pytest

import keylane
from keylane.jetstream import streams
from keylane.server import NatsServer
from tests.peers.store import REPOSITORY
from tests.waiter import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

URL = "nats://127.0.0.1:4222"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run(program: str, url: str) -> None:
    assert program.count(URL) == 1
    exec(compile(program.replace(URL, url), "docs/spark.md", "exec"), {})  # noqa: S102 - ours


async def handle_all(url: str) -> None:
    """What the members of the group would do: the queue is empty then, and the stream as it was."""
    async with await keylane.connect(url) as connection:
        await until(lambda: streams.state(connection, "ORDERS-billing"), lambda state: state.last_sequence >= 6)
        await streams.purge(connection, "ORDERS-billing")


def test_the_first_example(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs" / "spark.md").read_text()
    (_, _), (first, fill), (second, read), (output, shown), *_ = BLOCK.findall(
        page.split("## The first ten minutes")[1]
    )
    assert (first, second, output) == ("python", "python", "")
    with NatsServer.start() as server:  # of its own: the page gives its streams their names
        run(fill, server.url)
        asyncio.run(handle_all(server.url))
        run(read, server.url)
    assert capsys.readouterr().out.strip() == shown.strip()
    assert spark.sparkContext._jsc is not None, "the program used the session of the tests, and left it as it was"

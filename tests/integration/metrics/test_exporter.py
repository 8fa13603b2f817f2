"""`keylane exporter` as a process, on groups and fleets that are at work."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import keylane
from keylane.groups import GroupMessage
from keylane.jetstream import ConsumerConfig
from keylane.metrics import METRICS
from keylane.server import NatsServer
from tests.integration.fleet.rig import FleetGround
from tests.integration.groups.conftest import stack
from tests.integration.groups.rig import make_ground
from tests.waiter import until

__all__ = ["stack"]

KEYLANE = [sys.executable, "-c", "from keylane.cli.main import main; main()"]
OF_THE_EXPORTER = {one.name for one in METRICS if one.name.startswith(("exporter_", "group_"))}


class Exporter:
    """The command, and what its pages answer."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port

    async def ask(self, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(_get, f"http://127.0.0.1:{self.port}{path}")

    async def samples(self) -> list[Any]:
        code, page = await self.ask("/metrics")
        assert code == 200
        return [sample for family in text_string_to_metric_families(page) for sample in family.samples]

    async def value(self, name: str, **labels: str) -> float | None:
        """Of the one series; None: there is none."""
        found = [
            one.value
            for one in await self.samples()
            if one.name == f"keylane_{name}" and labels.items() <= one.labels.items()
        ]
        assert len(found) <= 1, found
        return found[0] if found else None


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - http, on this machine
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@asynccontextmanager
async def exporter(url: str, *options: str) -> AsyncIterator[Exporter]:
    command = [*KEYLANE, "exporter", "-s", url, "--port", "0", "--host", "127.0.0.1", "--interval", "0", *options]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        yield Exporter(process, int(line.rpartition(":")[2].partition("/")[0]))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def waits_for(event: asyncio.Event) -> Callable[[GroupMessage], Any]:
    async def handle(message: GroupMessage) -> None:
        await event.wait()
        raise ValueError("no")

    return handle


@pytest.mark.timeout(180)
async def test_every_metric_of_the_exporter_is_set_by_real_groups(stack: AsyncExitStack) -> None:
    server = stack.enter_context(NatsServer.start())
    connection = await stack.enter_async_context(await keylane.connect(server.url))
    plain = await make_ground(stack, connection, "plain", server.url)
    numbered = await make_ground(stack, connection, "numbered", server.url, partitions=8, allow_direct=True)
    workers = FleetGround(numbered)
    go_on = asyncio.Event()
    await plain.elastic(members=["a"], max_buffered_messages=100)
    await plain.join("a", waits_for(go_on), max_tries=1, settings=ConsumerConfig(ack_wait_s=30, max_ack_pending=2))
    await numbered.static("s", members=["a", "b"], partitions=8)
    await numbered.join("a", group="s")
    worker = await workers.join("w")
    await until(lambda: len(worker.partitions) == 8, deadline_s=30)
    sent = await numbered.publish([f"k{one}" for one in range(20)])
    await plain.publish(["k1", "k2", "k3", "k4"])
    async with exporter(server.url) as at:
        elastic = {"stream": "plain", "group": "g", "kind": "elastic"}
        await until(lambda: at.value("group_in_flight", **elastic), lambda count: count == 2, deadline_s=30)
        assert await at.value("group_queue_messages", **elastic) == 4
        assert await at.value("group_queue_fill_ratio", **elastic) == 0.04
        assert await at.value("group_lag_messages", **elastic) == 4
        await until(lambda: at.value("group_lag_seconds", **elastic), lambda age: 0.5 < (age or 0) < 60, deadline_s=30)
        assert await at.value("group_member_max_in_flight", member="a", **elastic) == 2
        in_partitions = [
            one.value
            for one in await at.samples()
            if one.name == "keylane_group_partition_lag_messages" and elastic.items() <= one.labels.items()
        ]
        assert (len(in_partitions), sum(in_partitions)) == (4, 4)
        go_on.set()
        await until(lambda: at.value("group_dead_letters", **elastic), lambda count: count == 4, deadline_s=30)
        # A member that never ran has no lag yet, and so the group has none: it is unknown, and not 0.
        static = {"stream": "numbered", "group": "s", "kind": "static"}
        assert await at.value("group_lag_messages", **static) is None
        assert await at.value("group_member_lag_messages", member="b", **static) is None
        await until(lambda: at.value("group_member_lag_messages", member="a", **static), lambda lag: lag == 0)
        assert await at.value("group_unowned_partitions", **static) == 4
        await numbered.evidence.all_of(sent)
        fleet = {"stream": "numbered", "group": "f", "kind": "fleet"}
        await until(lambda: at.value("group_lag_messages", **fleet), lambda lag: lag == 0, deadline_s=30)
        assert await at.value("group_lag_seconds", **fleet) == 0
        assert await at.value("group_partition_owner", partition="7", member=worker.id or "", **fleet) == 1
        set_ = {one.name.removeprefix("keylane_") for one in await at.samples()}
        assert set_ >= OF_THE_EXPORTER, OF_THE_EXPORTER - set_


async def test_an_account_that_cannot_be_read_is_unknown(stack: AsyncExitStack) -> None:
    server = stack.enter_context(NatsServer.start())
    async with exporter(server.url, "--timeout", "2") as at:
        assert await at.value("exporter_up") == 1
        assert [code for code, _ in (await at.ask("/healthz"), await at.ask("/readyz"))] == [200, 200]
        server.stop()
        assert await at.value("exporter_up") == 0
        assert {one.name for one in await at.samples()} == {"keylane_exporter_up"}
        code, told = await at.ask("/healthz")
        assert (code, json.loads(told)["status"]) == (200, "degraded")
        assert (await at.ask("/readyz"))[0] == 503
        at.process.send_signal(signal.SIGTERM)
        assert await at.process.wait() == 0

"""The metrics of fleet workers on a real server, against what the handlers did."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from keylane.fleet import Worker
from keylane.groups import GroupMessage
from keylane.metrics import FleetMetrics, HealthReport, LagSampler, Reading, serve_metrics
from tests.integration.fleet.conftest import limits
from tests.integration.fleet.rig import KEYS, PARTITIONS, FleetGround
from tests.integration.groups.conftest import make, stack
from tests.waiter import until

__all__ = ["limits", "make", "stack"]


def value(readings: list[Reading], name: str, **labels: str) -> Any:
    """The one reading of this name and these labels; None: there is none."""
    found = [one.value for one in readings if one.name == name and labels.items() <= one.labels.items()]
    assert len(found) <= 1
    return found[0] if found else None


@asynccontextmanager
async def measured(
    ground: FleetGround, name: str, handler: object = None, **options: object
) -> AsyncIterator[tuple[Worker, Callable[..., Any]]]:
    metrics = FleetMetrics()
    worker = await ground.join(name, handler, hooks=metrics.hooks(), **options)
    sampler = metrics.watch(worker)
    sampler._interval_s = 0.1
    async with sampler:
        yield worker, lambda name, **labels: value(metrics.readings(), name, **labels)


async def test_messages_latencies_and_lag(limits: FleetGround) -> None:
    async with measured(limits, "a") as (worker, told):
        await limits.shared(worker)
        sent = await limits.publish(KEYS * 30)
        await limits.evidence.all_of(sent)
        await until(lambda: told("handler_tries_total", outcome="done"), lambda done: done == len(sent))
        assert told("consumer_messages_total") == len(sent)
        assert told("consumer_redeliveries_total") == 0
        counts, seconds = told("handler_latency_seconds")
        assert sum(counts) == len(sent)
        assert seconds > 0
        assert told("fleet_partitions") == told("consumer_subject_count") == told("fleet_claims_total") == PARTITIONS
        assert told("fleet_leader") == told("fleet_worker_state", state="leading") == 1
        assert told("fleet_degraded") == 0
        await until(lambda: told("fleet_lag_messages"), lambda lag: lag == 0)
        assert told("fleet_lag_seconds") == 0
        assert told("fleet_rebalances_total", cause="start") == 1
        counts, _ = told("fleet_rebalance_duration_seconds")
        assert sum(counts) == 1
        counts, _ = told("consumer_update_duration_seconds")
        assert sum(counts) == PARTITIONS


async def test_failures_dead_letters_and_a_lag_that_grows_old(limits: FleetGround) -> None:
    go_on = asyncio.Event()

    async def fails_for_k1(message: GroupMessage) -> None:
        await go_on.wait()
        if message.key == "k1":
            raise ValueError("no")

    async with measured(limits, "a", fails_for_k1, max_tries=2) as (worker, told):
        await limits.shared(worker)
        await limits.publish(["k1", "k2", "k3"])
        await until(lambda: told("fleet_lag_messages"), lambda lag: lag == 3)
        await until(lambda: told("fleet_lag_seconds"), lambda age: isinstance(age, float) and age > 0.3)
        assert told("consumer_inflight") == 3
        go_on.set()
        await until(lambda: told("dead_letters_total"), lambda dead: dead == 1)
        assert told("retries_total") == told("handler_tries_total", outcome="failed") == 1
        assert told("handler_tries_total", outcome="done") == 2
        await until(lambda: told("fleet_lag_messages"), lambda lag: lag == 0)


async def test_redeliveries_are_counted(limits: FleetGround) -> None:
    metrics = FleetMetrics()
    hooks = metrics.hooks()
    assert hooks.on_delivered is not None

    class Delivered:
        def __init__(self, reply: bytes) -> None:
            self.reply = reply

    plain = [b"$JS.ACK.S.f-p1.1.7.7.1.0", b"$JS.ACK.S.f-p1.2.8.8.1.0", b"$JS.ACK.S.f-p1.12.9.9.1.0"]
    domain = [b"$JS.ACK.d.acc.S.f-p1.1.7.7.1.0.x", b"$JS.ACK.d.acc.S.f-p1.3.8.8.1.0.x"]
    for batch in (plain, domain, plain[1:]):
        hooks.on_delivered([Delivered(one) for one in batch])  # type: ignore[misc]
    worker = await limits.join("a")
    metrics.watch(worker)
    assert value(metrics.readings(), "consumer_redeliveries_total") == 5
    assert value(metrics.readings(), "consumer_messages_total") == 7


async def test_a_lag_that_cannot_be_read_is_unknown_and_not_0(limits: FleetGround) -> None:
    async with measured(limits, "a") as (worker, told):
        await limits.shared(worker)
        await until(lambda: told("fleet_lag_messages"), lambda lag: lag == 0)
        await limits.clients[-1].close()
        await until(lambda: told("fleet_lag_messages"), lambda lag: lag is None)
        assert told("fleet_lag_seconds") is None
        assert told("consumer_inflight") is None


async def test_a_sampler_that_has_not_looked_knows_nothing(limits: FleetGround) -> None:
    worker = await limits.join("a")
    await limits.shared(worker)
    assert LagSampler(worker).values() == {"fleet_lag_unknown_partitions": PARTITIONS}


async def test_the_port(stack: AsyncExitStack) -> None:
    state = HealthReport()
    reading = Reading("fleet_partitions", {"stream": "S", "fleet": "f", "worker": "f-0"}, 4)
    port = await stack.enter_async_context(
        serve_metrics(lambda: [reading], port=0, host="127.0.0.1", prefix="k_", health=lambda: state)
    )

    async def ask(path: str, method: str = "GET") -> tuple[int, str]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
        head, _, body = answer.partition("\r\n\r\n")
        return int(head.split(" ")[1]), body

    code, body = await ask("/metrics")
    samples = [sample for family in text_string_to_metric_families(body) for sample in family.samples]
    assert (code, samples[0].name, samples[0].value) == (200, "k_fleet_partitions", 4)
    assert (await ask("/healthz"))[0] == (await ask("/readyz"))[0] == 200
    state = HealthReport(degraded=("worker 0: fenced",), ready=False)
    code, body = await ask("/healthz")
    assert (code, json.loads(body)["status"], json.loads(body)["degraded"]) == (200, "degraded", ["worker 0: fenced"])
    assert (await ask("/readyz"))[0] == 503
    state = HealthReport(failed=True)
    assert (await ask("/healthz"))[0] == 503
    assert (await ask("/nothing"))[0] == 404
    assert (await ask("/metrics", "POST"))[0] == 405

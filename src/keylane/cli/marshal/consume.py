"""`keylane marshal consume`: join a group and print every message.

The first Ctrl-C or SIGTERM finishes what is at work, releases and ends with success; the second ends at once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from keylane.cli.command import ConnectionOptions
from keylane.cli.event_lines import EventLines, wait_for_end
from keylane.cli.formatting import excerpt, payload_fields, printable
from keylane.cli.marshal.commands import PlacedLogOptions
from keylane.cli.marshal.log_access import open_log
from keylane.cli.metrics_port import MetricsOptions, metrics_port
from keylane.core.claim_choice import Appetite, TopicPartition
from keylane.core.run_state import RunState
from keylane.marshal.consumer import Consumer
from keylane.marshal.message import MarshalMessage
from keylane.marshal.options import ConsumerHooks, Mode
from keylane.metrics import MarshalMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class MarshalConsumeOptions:
    """Which consumer joins, and how it claims and handles."""

    group: str
    client: str
    topics: tuple[str, ...]
    mode: Mode
    appetite: Appetite
    batch_size: int
    sleep_s: float
    release_when_behind: bool
    rebalance: bool


async def consume(
    options: MarshalConsumeOptions,
    log: PlacedLogOptions,
    metrics: MetricsOptions,
    link: ConnectionOptions,
    *,
    as_json: bool,
) -> None:
    """Until a signal, or until something ends it. Raises the error if one did."""
    lines, counts = EventLines(as_json=as_json), MarshalMetrics()

    async def handler(message: MarshalMessage) -> None:
        if options.sleep_s:
            await asyncio.sleep(options.sleep_s)
        _print(lines, message)
        if lines.failure is not None:
            raise lines.failure  # it was not printed

    async with open_log(log, link, may_create=True) as opened:
        consumer = Consumer(
            opened.log,
            opened.source,
            options.group,
            options.client,
            options.topics,
            handler,
            mode=options.mode,
            pick=options.appetite,
            placing=log.placing,
            batch_size=options.batch_size,
            release_when_behind=options.release_when_behind,
            rebalance=options.rebalance,
            hooks=_hooks(lines) if metrics.metrics_port is None else counts.hooks(_hooks(lines)),
        )
        counts.watch(consumer)
        await consumer.start()
        async with metrics_port(metrics, counts.readings, lambda: consumer.state is RunState.RUNNING, lines):
            await wait_for_end(lines, consumer.wait(), consumer.stop)
    if lines.failure is not None:
        raise lines.failure


def _print(lines: EventLines, message: MarshalMessage) -> None:
    key = (message.key or b"").decode("utf-8", "backslashreplace")
    where = f"{message.topic}/{message.partition}  offset {message.offset}"
    lines.write(
        "message",
        f"{where}  {printable(key)}  {excerpt(message.data)}",
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        key=key,
        token=message.token,
        subject=message.subject,
        **payload_fields(message.data),
    )


def _hooks(lines: EventLines) -> ConsumerHooks:
    def claimed(where: TopicPartition, token: int) -> None:
        text = f"claimed {where.topic}/{where.partition}, token {token}"
        lines.write("claimed", text, **_partition_fields(where), token=token)

    def released(where: TopicPartition, why: str) -> None:
        text = f"released {where.topic}/{where.partition}: {why}"
        lines.write("released", text, **_partition_fields(where), reason=why)

    return ConsumerHooks(
        on_claimed=claimed,
        on_released=released,
        on_trouble=lambda error: lines.write("trouble", f"trying again: {error}", reason=str(error)),
        on_failure=lambda *_: None,  # only a closed pipe fails, and that ends the command
    )


def _partition_fields(where: TopicPartition) -> dict[str, Any]:
    return {"topic": where.topic, "partition": where.partition}

"""`keylane marshal consume`: take part in a group and print every message, for trials and for a look inside.

The first Ctrl-C or SIGTERM finishes what is at work, releases and ends with success; the second ends at once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from keylane.cli.group_consume import Lines, excerpt, payload_fields, printable, signals
from keylane.cli.marshal_ground import Where, open_ground
from keylane.core.picking import Appetite, TopicPartition
from keylane.marshal.consumer import Consumer
from keylane.marshal.message import MarshalMessage
from keylane.marshal.options import ConsumerHooks, Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Who takes part, and how."""

    group: str
    client: str
    topics: tuple[str, ...]
    mode: Mode
    appetite: Appetite
    batch_size: int
    sleep_s: float
    release_when_behind: bool
    rebalance: bool


async def consume(trial: Trial, where: Where, *, as_json: bool) -> None:
    """Until a signal, or until something ends it. Raises the error if one did."""
    lines = Lines(as_json=as_json)

    async def handler(message: MarshalMessage) -> None:
        if trial.sleep_s:
            await asyncio.sleep(trial.sleep_s)
        _print(lines, message)
        if lines.failure is not None:
            raise lines.failure  # nobody saw it

    async with open_ground(where) as ground:
        consumer = Consumer(
            ground.log,
            ground.source,
            trial.group,
            trial.client,
            trial.topics,
            handler,
            mode=trial.mode,
            pick=trial.appetite,
            placing=where.placing,
            batch_size=trial.batch_size,
            release_when_behind=trial.release_when_behind,
            rebalance=trial.rebalance,
            hooks=_hooks(lines),
        )
        await consumer.start()
        with signals(lines.stop):
            ended = asyncio.create_task(consumer.wait())
            asked = asyncio.create_task(lines.stop.wait())
            try:
                await asyncio.wait({ended, asked}, return_when=asyncio.FIRST_COMPLETED)
                if not ended.done():
                    lines.tell("stopping", "stopping: what is at work is finished first; Ctrl-C again ends at once")
                await consumer.terminate()
            finally:
                asked.cancel()
                ended.cancel()
                await asyncio.gather(asked, ended, return_exceptions=True)
    if lines.failure is not None:
        raise lines.failure


def _print(lines: Lines, message: MarshalMessage) -> None:
    key = (message.key or b"").decode("utf-8", "backslashreplace")
    where = f"{message.topic}/{message.partition}  offset {message.offset}"
    lines.tell(
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


def _hooks(lines: Lines) -> ConsumerHooks:
    def claimed(where: TopicPartition, token: int) -> None:
        words = f"claimed {where.topic}/{where.partition}, token {token}"
        lines.tell("claimed", words, **_place(where), token=token)

    def let_go(where: TopicPartition, why: str) -> None:
        lines.tell("let_go", f"let go of {where.topic}/{where.partition}: {why}", **_place(where), reason=why)

    return ConsumerHooks(
        on_claimed=claimed,
        on_let_go=let_go,
        on_trouble=lambda error: lines.tell("trouble", f"trying again: {error}", reason=str(error)),
        on_failure=lambda *_: None,  # only a closed pipe fails, and that ends the command
    )


def _place(where: TopicPartition) -> dict[str, Any]:
    return {"topic": where.topic, "partition": where.partition}

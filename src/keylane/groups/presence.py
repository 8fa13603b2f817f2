"""Which process an instance of a member is: every running one says so when a command asks all of a group.

The server knows an instance by its pin alone. Instances listen below their connection's inbox prefix, where every user
may subscribe. One with a prefix of its own, of another language or of an older
keylane does not answer, and its pin is all that is shown.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from keylane.jetstream import Connection

ANSWER_WITHIN_S = 0.3


@dataclass(frozen=True, slots=True)
class RunningInstance:
    """An instance that answered: where it runs, and its pin; None: it is on standby."""

    member: str
    host: str
    pid: int
    pin_id: str | None


@asynccontextmanager
async def answering(
    connection: Connection, stream: str, group: str, member: str, pin_id: Callable[[], str | None]
) -> AsyncIterator[None]:
    """Answer for this instance for as long as the block lasts."""

    async def answer(message: Msg) -> None:
        told = {"member": member, "host": socket.gethostname(), "pid": os.getpid(), "pin_id": pin_id()}
        with suppress(NatsError):  # whoever asked looks at the rest
            await message.respond(json.dumps(told).encode())

    async with AsyncExitStack() as subscribed:
        with suppress(NatsError):  # the connection is closed: nobody asks any more
            subscription = await connection.nats.subscribe(_subject(connection, stream, group), cb=answer)
            subscribed.push_async_callback(_end, subscription)
        yield


async def running_instances(
    connection: Connection, stream: str, group: str, pins: Collection[str]
) -> dict[str, RunningInstance]:
    """The pinned instances of a group, by their pins. Waits until all of them have answered, or not for long."""
    if not pins:
        return {}
    found: dict[str, RunningInstance] = {}
    async with _answers(connection, stream, group) as answers:
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_WITHIN_S):
                while len(found) < len(pins):
                    one = await answers.get()
                    if one.pin_id in pins:
                        found[str(one.pin_id)] = one
    return found


async def all_instances(connection: Connection, stream: str, group: str) -> list[RunningInstance]:
    """The instances of a group that answer, also those on standby. Nobody knows how many there are, so this waits."""
    async with _answers(connection, stream, group) as answers:
        await asyncio.sleep(ANSWER_WITHIN_S)
        return [answers.get_nowait() for _ in range(answers.qsize())]


@asynccontextmanager
async def _answers(connection: Connection, stream: str, group: str) -> AsyncIterator[asyncio.Queue[RunningInstance]]:
    """Ask the instances of a group who they are: their answers, as they come."""
    found: asyncio.Queue[RunningInstance] = asyncio.Queue()

    async def take(message: Msg) -> None:
        with suppress(ValueError, KeyError, TypeError):  # somebody else's message
            told = json.loads(message.data)
            found.put_nowait(RunningInstance(str(told["member"]), str(told["host"]), int(told["pid"]), told["pin_id"]))

    inbox = connection.nats.new_inbox()
    subscription = await connection.nats.subscribe(inbox, cb=take)
    try:
        await connection.nats.publish(_subject(connection, stream, group), b"", reply=inbox)
        yield found
    finally:
        await _end(subscription)


async def _end(subscription: Subscription) -> None:
    with suppress(NatsError):  # the connection is closed
        await subscription.unsubscribe()


def _subject(connection: Connection, stream: str, group: str) -> str:
    prefix = connection.nats.new_inbox().rpartition(".")[0]
    return f"{prefix}.keylane.{stream}.{group}"

"""`consume` of static and elastic groups and of Marshal ends the same way on SIGTERM as on Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from signal import SIGINT, SIGTERM, Signals

import pytest

from keylane import Connection, PartitionBy, groups
from keylane.jetstream import streams
from keylane.server import NatsServer
from tests.integration.cli.groups_rig import Running, parted_stream, running

Command = tuple[str, ...]


@pytest.fixture(params=["elastic", "static", "marshal"])
async def consume(
    request: pytest.FixtureRequest, nats_server: NatsServer, connection: Connection, unique: Callable[..., str]
) -> AsyncIterator[tuple[str, Command]]:
    """A stream, and the command that consumes it."""
    stream, kind, at = unique("ORDERS"), str(request.param), ("--json", "-s", nats_server.url)
    async with parted_stream(connection, stream, 4):
        if kind == "marshal":
            log = unique("claims")
            yield (
                stream,
                ("marshal", "consume", "billing", "a", stream, "--greedy", "--log", log, *at),
            )
            await streams.delete(connection, log)
            return
        if kind == "static":
            await groups.create_static(connection, stream, "billing", partitions=4, members=["a"])
        else:
            by = PartitionBy(f"*.{stream}.*", key=[2])
            await groups.create_elastic(connection, stream, "billing", partitions=4, partition_by=by, members=["a"])
        yield stream, (kind, "consume", stream, "billing", "a", *at)


def sleep(words: Command, seconds: float) -> Command:
    """Marshal's command takes a number, those of groups a length of time."""
    return "--sleep", f"{seconds}" if words[0] == "marshal" else f"{seconds}s"


async def begun(connection: Connection, stream: str, command: Running) -> None:
    """The first message is printed, so the second one, of the same key, is at work."""
    for number in range(3):
        await connection.jetstream.publish(f"{stream}.k", b"%d" % number)
    await command.event("message")


@pytest.mark.parametrize("by", [pytest.param(SIGINT, marks=pytest.mark.long("again, by Ctrl-C")), SIGTERM])
async def test_the_first_signal_finishes_what_is_at_work(
    connection: Connection, consume: tuple[str, Command], by: Signals
) -> None:
    stream, words = consume
    async with running(*words, *sleep(words, 0.5)) as command:
        await begun(connection, stream, command)
        done = await command.end(by)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line["event"] for line in command.said if line["event"] == "stopping"] == ["stopping"]
    first = [line["data"] for line in command.messages]
    assert first[:2] == ["0", "1"]
    async with running(*words, *sleep(words, 0)) as command:
        async with asyncio.timeout(20):
            while len(first) + len(command.messages) < 3:
                await command.event("message")
        await command.end(by)
    assert first + [line["data"] for line in command.messages] == ["0", "1", "2"]


async def test_the_second_signal_ends_at_once(connection: Connection, consume: tuple[str, Command]) -> None:
    stream, words = consume
    async with running(*words, *sleep(words, 3600)) as command:
        await connection.jetstream.publish(f"{stream}.k", b"0")
        await command.event("claimed" if words[0] == "marshal" else "active")
        command.process.send_signal(SIGTERM)
        await command.event("stopping")
        done = await command.end(SIGINT)
    assert (done.returncode, done.stderr) == (130, "")
    assert command.messages == []

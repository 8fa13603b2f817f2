"""Everything that runs is stopped, waited for and looked at with the same words (docs/lifecycle.md)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from nats.js.api import ConsumerConfig, StreamConfig

import keylane
from keylane import Connection, fleet, groups, marshal
from keylane.app import RunningApp
from keylane.core.run_state import RunState
from keylane.jetstream import Feed, open_feed, open_publisher
from keylane.journal import Journal
from keylane.server import NatsServer

DRAINED = [groups.Member, fleet.Worker, RunningApp, marshal.Consumer]
ALL = [*DRAINED, Feed, keylane.Publisher, Journal, NatsServer]


@pytest.mark.parametrize("kind", ALL)
def test_all_have_the_same_words(kind: Any) -> None:
    assert {"__aenter__", "__aexit__", "stop"} <= set(dir(kind))
    assert not {"close", "terminate", "shutdown", "is_running", "running"} & set(dir(kind))
    assert (inspect.getdoc(kind.stop) or "").split(",")[0].split(" ")[0] in ("Finish", "Drain", "Wait", "Store", "End")


@pytest.mark.parametrize("kind", DRAINED)
def test_what_runs_handlers_takes_a_time_to_finish_them_and_says_why_it_ended(kind: Any) -> None:
    timeout = inspect.signature(kind.stop).parameters["timeout_s"]
    assert timeout.default == 25.0
    assert inspect.signature(kind.wait).return_annotation == "str"


@pytest.fixture
async def stream(connection: Connection, unique: Callable[..., str]) -> str:
    name = unique("LIFE")
    await connection.jetstream.add_stream(StreamConfig(name=name, subjects=[f"{name}.>"]))
    return name


async def test_the_states_of_a_publisher_a_journal_and_a_feed(connection: Connection, stream: str) -> None:
    publisher = keylane.Publisher(connection)
    journal = Journal(connection, stream=stream)
    assert (publisher.state, journal.state) == (RunState.NEW, RunState.NEW)
    try:
        async with publisher, journal:
            states = (str(publisher.state), str(journal.state))
            assert states == ("running", "running")
            await (await publisher.send(f"{stream}.a", b"x"))
        assert (str(publisher.state), str(journal.state)) == ("ended", "ended")
        await connection.jetstream.add_consumer(stream, ConsumerConfig(durable_name="c"))
        async with open_feed(connection, stream, "c") as feed:
            assert feed.state is RunState.RUNNING
            (await anext(feed)).ack()
        assert await feed.wait() == "stopped"
        assert str(feed.state) == "ended"
        async with open_publisher(connection) as opened:
            assert opened.state is RunState.RUNNING
        for one in (publisher, journal, feed, opened):
            await one.stop()  # again, which does nothing
            assert one.state is RunState.ENDED
    finally:
        await connection.jetstream.delete_stream(stream)
        await connection.jetstream.delete_stream(journal.journal_stream)

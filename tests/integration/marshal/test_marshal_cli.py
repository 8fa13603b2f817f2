"""`keylane marshal …` as a program, on a real server."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest

from keylane import Connection
from keylane.core.claim_records import ClaimingPartition
from keylane.errors import NotFound
from keylane.jetstream import Outgoing, publish_many, streams
from keylane.marshal import StreamSource, open_jetstream_log
from keylane.marshal.jetstream_log import subject_of
from keylane.server import NatsServer
from tests.integration.cli.groups_rig import terminal
from tests.integration.marshal.command import Command, count, events

pytestmark = pytest.mark.timeout(240)

PARTITIONS = 4


class OnStream(Command):
    """On one stream and one log."""

    def __init__(self, server: NatsServer, connection: Connection, stream: str, log: str) -> None:
        super().__init__("--log", log, "--interval", "3", "--server", server.url, deadline_s=60)
        self.connection = connection
        self.stream = stream
        self.log = log

    async def publish(self, count: int) -> None:
        await publish_many(
            self.connection, [Outgoing(f"{self.stream}.k{number % 20}", b"x") for number in range(count)]
        )


@pytest.fixture
async def marshal(
    nats_server: NatsServer, connection: Connection, unique: Callable[..., str]
) -> AsyncIterator[OnStream]:
    stream, log = unique("orders"), unique("claims")
    transform = {"src": f"{stream}.*", "dest": f"{{{{Partition({PARTITIONS},1)}}}}.{stream}.{{{{Wildcard(1)}}}}"}
    await connection.api.request(
        f"STREAM.CREATE.{stream}",
        {"name": stream, "subjects": [f"{stream}.*"], "subject_transform": transform, "allow_direct": True},
    )
    try:
        yield OnStream(nats_server, connection, stream, log)
    finally:
        for name in (stream, log):
            with suppress(NotFound):
                await streams.delete(connection, name)


async def test_consume_watch_world_pause_and_resume(marshal: OnStream) -> None:
    await marshal.publish(100)
    consuming = marshal.running("consume", "billing", "anna", marshal.stream, "--greedy", "--json")
    async with consuming as consumer:
        got = await events(consumer, lambda found: count(found, "message") == 100)
        assert count(got, "claimed") == PARTITIONS
        message = next(one for one in got if one["event"] == "message")
        assert {"topic", "partition", "offset", "key", "token", "data"} <= message.keys()
        async with marshal.running("watch", "--json") as watching:
            seen = await events(watching, lambda found: count(found, "owned") == PARTITIONS)
            assert {one["owner"] for one in seen} == {"anna"}

            told = await marshal.told("world", "--lag", "--group", "billing")
            assert [one["partition"] for one in told["claims"]] == list(range(PARTITIONS))
            assert {one["owner"] for one in told["claims"]} == {"anna"}
            assert told["misplaced"] == 0
            assert all(isinstance(one["lag"], int) for one in told["claims"])

            assert (await marshal.told("release-group", "billing", "1h"))["group"] == "billing"
            await events(watching, lambda found: count(found, "free") == PARTITIONS)
            assert (await marshal.told("world"))["pauses"][0]["group"] == "billing"
            await marshal.told("resume", "billing")
            back = await events(watching, lambda found: count(found, "owned") == PARTITIONS)
            assert {one["owner"] for one in back if one["event"] == "owned"} == {"anna"}
            watching.send_signal(signal.SIGINT)
            async with asyncio.timeout(60):
                assert await watching.wait() == 0
        consumer.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            await consumer.communicate()
        assert consumer.returncode == 0
    told = await marshal.told("world")
    assert {one["owner"] for one in told["claims"]} == {None}, "released at the end"
    assert (await marshal.told("world", "--at", "1d"))["claims"] == []


async def test_watch_on_a_terminal(marshal: OnStream, nats_server: NatsServer) -> None:
    """A live table with a log of events; the last picture stays."""
    await marshal.publish(5)
    async with marshal.running("consume", "billing", "anna", marshal.stream, "--greedy", "--json") as consumer:
        await events(consumer, lambda found: count(found, "claimed") == PARTITIONS)
        where = ("--log", marshal.log, "--interval", "3", "--server", nats_server.url)
        async with terminal("marshal", "watch", *where) as screen:
            shown = await screen.until(rf"(?s)token .*events.*/{PARTITIONS - 1}: owned by anna")
            assert re.search(rf"{PARTITIONS} partitions .*Ctrl-C ends", shown)
            assert re.search(rf"billing +{marshal.stream} +0 +anna", shown)
            screen.type("\x03")
            assert await screen.end() == 0
            await screen.until(rf"(?s)partitions  [\d:]+ *\r\n.*events.*/{PARTITIONS - 1}: owned by anna")


async def test_a_group_that_nobody_knows(marshal: OnStream) -> None:
    await marshal.publish(5)
    async with marshal.running("consume", "billing", "anna", marshal.stream, "--json") as consumer:
        await events(consumer, lambda found: count(found, "message") == 5)
        for words in (["release-group", "nosuch", "10m"], ["resume", "nosuch"]):
            code, out, err = await marshal(*words)
            assert (code, out) == (1, "")
            assert "the log has no consumer and no record of group 'nosuch': it has 'billing'; --force does it" in err
            assert len(err.splitlines()) == 1
        assert (await marshal.told("world"))["pauses"] == []
        _, _, err = await marshal("world", "--group", "nosuch")
        assert "no record of group 'nosuch': it has 'billing'" in err
        assert (await marshal.told("release-group", "nosuch", "10m", "--force"))["group"] == "nosuch"
        assert [one["group"] for one in (await marshal.told("world"))["pauses"]] == ["nosuch"]
        await marshal.told("resume", "nosuch")
        assert (await marshal.told("world"))["groups"] == ["billing", "nosuch"]


async def test_the_lag_of_any_stream_and_what_was_skipped(marshal: OnStream) -> None:
    """Without allow_direct, as streams are made by default; of topics that are gone; and with strays in the log."""
    connection = marshal.connection
    config = (await connection.api.request(f"STREAM.INFO.{marshal.stream}"))["config"]
    await connection.api.request(f"STREAM.UPDATE.{marshal.stream}", config | {"allow_direct": False})
    await marshal.publish(40)
    async with open_jetstream_log(connection, marshal.log, interval_s=3) as log:
        for topic in (marshal.stream, "gone"):
            await log.append(ClaimingPartition("i", "anna", "billing", topic, 0, 1))
        lost = ClaimingPartition("i", "bert", "billing", marshal.stream, 0, 1)
        await log.append(lost)
        await connection.nats.request(subject_of(marshal.log, lost), b"\x00\x01", timeout=5)
    told = await marshal.told("world", "--lag")
    [gone, ours] = sorted(told["claims"], key=lambda one: one["topic"])
    assert gone["lag"] is None
    assert ours["lag"] == await StreamSource(connection).backlog(marshal.stream, 0, 1) > 0
    assert ours["requested_by"] == ["bert"]
    assert (told["unreadable"], told["skipped"][0]["record"]) == (1, 4)
    code, out, err = await marshal("world", "--lag")
    assert code == 0
    assert "anna" in out
    assert "lag unknown: there is no stream 'gone'" in err
    assert "1 records cannot be read and were skipped, such as record 4 in partition 0: unknown type" in err


async def test_the_interval_is_given_once(marshal: OnStream) -> None:
    async with open_jetstream_log(marshal.connection, marshal.log, interval_s=7) as log:
        await log.append(ClaimingPartition("i", "anna", "billing", marshal.stream, 0, 1))
    code, _, err = await marshal("world")
    assert code == 1
    assert "interval_s is 3, and the heartbeat interval of coordination log" in err
    assert "is 7 s: everybody on a log has the same; leave it out" in err


async def test_the_world_in_words(marshal: OnStream) -> None:
    await marshal.publish(5)
    async with marshal.running("consume", "billing", "anna", marshal.stream, "--json") as consumer:
        await events(consumer, lambda found: count(found, "message") == 5)
        code, out, _ = await marshal("world")
        assert code == 0
        assert "anna" in out
        assert "fresh" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["world"], "there is no coordination log"),
        (["consume", "a/b", "anna", "orders"], "group id 'a/b' holds '/' at position 2"),
        (["consume", "billing", "anna", "nowhere"], "there is no stream 'nowhere'"),
        (["world", "--at", "yesterday"], "'yesterday' is no time: give an ISO time with a zone"),
        (["release-group", "billing", "2001-01-01T00:00:00Z"], "there is no coordination log"),
    ],
)
async def test_one_line_says_what_is_wrong(marshal: OnStream, words: list[str], said: str) -> None:
    code, out, err = await marshal(*words)
    assert code == 1
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1

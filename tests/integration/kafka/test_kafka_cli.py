"""`keylane marshal … --kafka` as a program, on a real Kafka."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from keylane.kafka import open_kafka
from tests.integration.kafka.topic_rig import Unique, fill, make_topic
from tests.integration.marshal.command import Command, count, events
from tests.peers.kafka import Kafka

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(240)]

PARTITIONS = 4


class OnTopic(Command):
    """On one topic and one log."""

    def __init__(self, bootstrap: str, topic: str, log: str) -> None:
        super().__init__("--log", log, "--interval", "3", "--kafka", bootstrap, deadline_s=60)
        self.bootstrap = bootstrap
        self.topic = topic
        self.log = log


@pytest.fixture
async def marshal(kafka: Kafka, unique: Unique) -> OnTopic:
    topic = unique("orders")
    async with open_kafka(kafka.bootstrap) as link:
        await make_topic(link, topic, PARTITIONS)
    return OnTopic(kafka.bootstrap, topic, unique("__marshal"))


async def test_consume_watch_world_pause_and_resume(marshal: OnTopic) -> None:
    fill(marshal.bootstrap, marshal.topic, PARTITIONS, 100)
    consuming = marshal.running("consume", "billing", "anna", marshal.topic, "--greedy", "--json")
    async with consuming as consumer:
        got = await events(consumer, lambda found: count(found, "message") == 100)
        assert count(got, "claimed") == PARTITIONS
        message = next(one for one in got if one["event"] == "message")
        assert {"topic", "partition", "offset", "key", "token", "data"} <= message.keys()
        async with marshal.running("watch", "--json") as watching:
            await events(watching, lambda found: count(found, "owned") == PARTITIONS)

            told = await marshal.told("world", "--lag", "--group", "billing")
            assert [one["partition"] for one in told["claims"]] == list(range(PARTITIONS))
            assert {one["owner"] for one in told["claims"]} == {"anna"}
            assert told["misplaced"] == 0
            assert {type(one["lag"]) for one in told["claims"]} == {int}

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
            _, err = await consumer.communicate()
        assert consumer.returncode == 0
        assert err == b""
    told = await marshal.told("world", "--lag")
    assert {one["owner"] for one in told["claims"]} == {None}, "released at the end"
    assert sum(one["lag"] for one in told["claims"]) == 0
    code, out, _ = await marshal("world")
    assert code == 0
    assert marshal.topic in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["world"], "there is no coordination log '__marshal"),
        (["resume", "billing"], "there is no coordination log '__marshal"),
        (["consume", "a/b", "anna", "orders"], "group id 'a/b' holds '/' at position 2"),
        (["consume", "billing", "anna", "nowhere"], "looking for topic 'nowhere'"),
        (["world", "--server", "nats://x"], "--server is for NATS and --kafka for Kafka"),
        (["world", "--kafka-config", "/nowhere/at/all"], "the Kafka properties cannot be read"),
    ],
)
async def test_one_line_says_what_is_wrong(marshal: OnTopic, words: list[str], said: str) -> None:
    code, out, err = await marshal(*words)
    assert (code, out) == (1, "")
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("brokers", "said"),
    [
        ("not a broker", "bootstrap is 'not a broker': give brokers as host:port"),
        ("127.0.0.1:1", "check that a broker listens at 127.0.0.1:1"),
    ],
)
async def test_brokers_that_cannot_be_reached(marshal: OnTopic, brokers: str, said: str) -> None:
    code, out, err = await OnTopic(brokers, marshal.topic, marshal.log)("world", "--timeout", "1.5")
    assert (code, out) == (1, "")
    assert said in err
    assert len(err.splitlines()) == 1


async def test_properties_are_used(marshal: OnTopic, tmp_path: Path) -> None:
    """The broker talks plainly: a client that wants TLS is told so."""
    path = tmp_path / "client.properties"
    path.write_text("security.protocol=SSL\n")
    code, _, err = await marshal("world", "--timeout", "3", "--kafka-config", str(path))
    assert code == 1
    assert "security.protocol" in err
    path.write_text("no.such.option=1\n")
    code, _, err = await marshal("world", "--kafka-config", str(path))
    assert code == 1
    assert "no.such.option" in err
    assert len(err.splitlines()) == 1

"""A misspelt stream, group, fleet or URL gets the same answer in every command and in Python."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable

import pytest

import keylane
from keylane import Connection, fleet, groups
from keylane.cli.command import ConnectionOptions
from keylane.errors import (
    InvalidInput,
    KeylaneError,
    NoSuchFleet,
    NoSuchGroup,
    NoSuchTopic,
    NotFound,
    ServerUnreachable,
)
from keylane.jetstream import consumers, open_feed
from keylane.journal import Journal
from keylane.marshal import StreamSource
from keylane.server import NatsServer
from tests.integration.cli.groups_rig import here, plain_stream


@pytest.fixture
async def orders(connection: Connection, unique: Callable[..., str]) -> AsyncIterator[str]:
    async with plain_stream(connection, unique("ORDERS")) as name:
        await groups.create_elastic(connection, name, "billing", partitions=2, partition_by=f"{name}.*")
        await consumers.create(connection, name, consumers.ConsumerConfig(durable_name="reader"))
        yield name


def misspelt(name: str) -> str:
    return name.replace("ORDERS", "ORDRES")


COMMANDS = [
    "stream info {x}",
    "stream rm {x} --yes",
    "sub --stream {x} --all",
    "consumer info {x} reader",
    "consumer watch {x}",
    "static ls {x}",
    "static create balanced {x} g 4 a",
    "elastic ls {x}",
    "elastic info {x} billing",
    "elastic add {x} billing a",
    "elastic consume {x} billing a",
    "elastic create {x} g 4",
    "fleet ls {x}",
    "fleet status {x} f",
    "fleet history {x} f",
    "fleet drain {x} f f-1",
    "fleet repartition {x} f 4",
    "dlq ls {x}",
    "pipeline run audit --stream {x} --group billing",
]


@pytest.mark.parametrize("words", COMMANDS)
async def test_every_command_says_the_same_of_a_misspelt_stream(
    words: str, orders: str, nats_server: NatsServer
) -> None:
    done = await here(*words.format(x=misspelt(orders)).split(), "-s", nats_server.url)
    expected = rf"keylane: there is no stream '{misspelt(orders)}'; did you mean '{orders}'\? There is: .*{orders}"
    assert re.match(expected, done.refusal)


async def test_python_says_the_same_of_a_misspelt_stream(connection: Connection, orders: str) -> None:
    wrong = misspelt(orders)
    whole = fleet.hashed(2, f"{wrong}.*")

    async def handler(message: object) -> None: ...

    for call in (
        lambda: groups.create_elastic(connection, wrong, "g", partitions=2),
        lambda: groups.get_config(connection, wrong, "g"),
        lambda: groups.join(connection, wrong, "g", "a", handler),
        lambda: fleet.status(connection, wrong, "f"),
        lambda: fleet.join(connection, wrong, "f", handler, partitions=whole),
        lambda: open_feed(connection, wrong, "reader"),
        lambda: Journal(connection, stream=wrong).start(),
        lambda: StreamSource(connection).partitions(wrong),
    ):
        with pytest.raises((NotFound, NoSuchTopic), match=rf"there is no stream '{wrong}'; did you mean '{orders}'\?"):
            await call()


async def test_groups_fleets_and_consumers_are_named_too(connection: Connection, orders: str) -> None:
    with pytest.raises(NoSuchGroup, match=r"has no group 'biling'; did you mean 'billing'\? There is: billing"):
        await groups.get_config(connection, orders, "biling")
    with pytest.raises(NoSuchGroup, match=r"has no elastic group 'biling'; did you mean 'billing'\?"):
        await groups.add_members(connection, orders, "biling", ["a"])
    with pytest.raises(NoSuchFleet, match=r"has no fleet 'f'; there is: none"):
        await fleet.history(connection, orders, "f")
    with pytest.raises(NotFound, match=r"has no consumer 'raeder'; did you mean 'reader'\? There is: reader"):
        await open_feed(connection, orders, "raeder")


async def test_a_misspelt_group_of_a_pipeline_is_told_before_spark_starts(orders: str, nats_server: NatsServer) -> None:
    pytest.importorskip("pyspark")
    for pipeline in ("audit", "slo", "skew"):
        words = ("pipeline", "run", pipeline, "--stream", orders, "--group", "biling", "-s", nats_server.url)
        done = await here(*words)
        assert f"stream '{orders}' has no group 'biling'; did you mean 'billing'? There is: billing" in done.refusal
        assert "Spark" not in done.stderr


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nat://127.0.0.1", r"unknown scheme 'nat'; did you mean 'nats'\? There is: nats, tls, ws, wss"),
        ("nats://127.0.0.1:x", "the port must be a number"),
        ("nats://127.0.0.1:1", "no server could be reached .*: connection refused; nothing listens there"),
    ],
)
async def test_a_wrong_url_sounds_alike_in_commands_and_in_python(url: str, said: str) -> None:
    for words in ("stream ls", "pub a b", "sub a", "elastic ls", "fleet ls", "consumer info S c", "dlq ls S"):
        assert re.search(said, (await here(*words.split(), "-s", url)).refusal), words
    with pytest.raises(KeylaneError, match=said):
        await keylane.connect(url, connect_timeout_s=2)


async def test_a_beginner_without_a_server_is_told_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable = ServerUnreachable("no server could be reached: nats://127.0.0.1:4222: connection refused")
    monkeypatch.setattr(ConnectionOptions, "connect", lambda self, hooks: _raise(unreachable))
    assert (await here("stream", "ls")).refusal.endswith("; `keylane server run --port 4222` starts one\n")


async def _raise(error: Exception) -> None:
    raise error


async def test_names_are_shown_as_they_are(connection: Connection, nats_server: NatsServer) -> None:
    async with plain_stream(connection, "Größe"):
        done = await here("stream", "info", "Grösse", "-s", nats_server.url)
        assert "there is no stream 'Grösse'; did you mean 'Größe'? There is: " in done.refusal
        assert "Größe" in (await here("stream", "ls", "--json", "-s", nats_server.url)).stdout
    with pytest.raises(InvalidInput, match="group name 'grün' holds 'ü' at position 3"):
        await groups.get_config(connection, "S", "grün")

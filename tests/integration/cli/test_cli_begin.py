"""The first commands of a new user: streams are created, filled, read and removed with our own tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from keylane import Connection
from keylane.core.partitions import partition_of
from keylane.errors import NotFound
from keylane.jetstream import read_all, streams
from keylane.server import NatsServer
from tests.integration.cli.groups_rig import here, running

ROOT = Path(__file__).parents[3]


@pytest.fixture
async def name(connection: Connection, unique: Callable[..., str]) -> AsyncIterator[str]:
    """A name of a stream that is gone at the end."""
    chosen = unique("BEGIN")
    yield chosen
    for stream in await streams.names(connection):
        if stream.startswith(chosen):
            await streams.delete(connection, stream)


@pytest.fixture(autouse=True)
def server_in_environment(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, no_nats_environment: None) -> None:
    monkeypatch.setenv("NATS_URL", nats_server.url)


async def events(*arguments: str) -> list[dict[str, object]]:
    done = await here("sub", *arguments, "--json")
    assert done.returncode == 0, done
    return [json.loads(line) for line in done.stdout.splitlines()]


# ---- streams --------------------------------------------------------------------------------------------------


async def test_a_partitioned_stream_is_created_filled_read_and_removed(connection: Connection, name: str) -> None:
    create = ("stream", "create", name, "--partition-by", f"{name}.*", "--partitions", "10")
    made = await here(*create)
    assert (made.returncode, made.stderr) == (0, "")
    assert f"created stream {name}: subjects {name}.*, 10 partitions by {name}.*" in made.stdout
    assert "there already is, with these settings" in (await here(*create)).stdout

    stored = await here("pub", f"{name}.k{{{{Count % 3}}}}", "order {{Count}}", "--count", "30")
    assert stored.stdout.startswith(f"stored 30 in {name}, sequences 1 to 30\n30 in ")
    assert " a second" in stored.stdout

    shown = await events("--stream", name, "--all", "--end")
    assert [one["data"] for one in shown] == [f"order {number}" for number in range(1, 31)]
    assert [one["sequence"] for one in shown] == list(range(1, 31))
    assert {(one["subject"], one["partition"]) for one in shown} == {
        (f"{name}.k{key}", partition_of(f"{name}.k{key}", f"{name}.*", [1], 10)) for key in range(3)
    }
    assert [one["data"] for one in await events(f"{name}.k1", "--all", "--count", "2")] == ["order 1", "order 4"]
    assert [one["data"] for one in await events("--stream", name, "--last", "--end")] == ["order 30"]

    listed = (await here("stream", "ls", "--json")).json
    assert next(one for one in listed if one["stream"] == name).items() >= {"partitions": 10, "messages": 30}.items()
    assert f"10 partitions by {name}.* (key: * 1)" in (await here("stream", "info", name)).stdout
    asked = await here("stream", "rm", name)
    assert asked.returncode == 1
    assert f"Remove stream '{name}' and its 30 messages? [y/N]" in asked.stderr
    assert (await here("stream", "rm", name, "--yes")).stdout == f"removed stream {name}\n"
    with pytest.raises(NotFound):
        await streams.info(connection, name)


async def test_settings_of_a_stream_are_those_of_the_options(connection: Connection, name: str) -> None:
    words = "--retention work --storage memory --max-age 1d --max-bytes 1GiB --max-msgs 5 --max-msg-size 64KB"
    made = await here("stream", "create", name, "--subjects", f"{name}.a,{name}.b", *words.split(), "--discard", "new")
    assert made.returncode == 0, made
    config = (await streams.info(connection, name)).config
    assert config.subjects == [f"{name}.a", f"{name}.b"]
    assert (config.retention, config.storage, config.discard) == ("workqueue", "memory", "new")
    assert (config.max_age, config.max_bytes, config.max_msgs, config.max_msg_size) == (86400, 1 << 30, 5, 64_000)
    assert config.allow_direct


async def test_readers_of_a_stream_are_named_before_it_is_removed(connection: Connection, name: str) -> None:
    await here("stream", "create", name, "--subjects", f"{name}.*")
    await here("elastic", "create", name, "billing", "4", f"{name}.*", "1")
    assert "It is read by elastic group billing." in (await here("stream", "rm", name)).stderr
    assert "elastic group billing" in (await here("stream", "info", name)).stdout
    assert (await here("elastic", "delete", name, "billing", "--force")).returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("stream create {s}", "needs its subjects: --subjects '"),
        ("stream create {s} --partition-by {s}.*", "needs --partitions"),
        ("stream create {s} --subjects {s} --partitions 3", "need --partition-by"),
        ("stream create {s} --subjects a.> --partition-by {s}.* --partitions 3", "would get no partition number"),
        ("stream create {s} --partition-by {s}.* --partitions 3 --key 2", "wildcard 2 is out of range"),
        ("stream create {s} --partition-by {s}.* --partitions 3 --key one", "give the numbers of the '*'"),
        ("stream create {s} --subjects {s} --max-age soon", "duration 'soon' is invalid"),
        ("stream create {s} --subjects {s} --max-bytes lots", "write a size such as 64KB"),
        ("pub {s}.* x", "holds the wildcard '*'"),
        ("pub {s} x --count 2 --id a", "write --id 'a-{{Count}}'"),
        ("pub {s} x --file y", "--file and --lines read it from elsewhere"),
        ("pub {s}", "standard input is empty"),
        ("pub {s} --file /not/there", "/not/there cannot be read: No such file"),
        ("pub {s} x --header colour", "write NAME:VALUE"),
        ("sub", "nothing to show"),
        ("sub {s} --all --last", "give one of the two"),
        ("sub .{s}", "starts with a dot"),
    ],
)
async def test_what_does_not_fit_is_refused_in_one_line(words: str, said: str, name: str) -> None:
    assert said in (await here(*words.replace("{s}", name).split())).refusal


async def test_another_stream_in_the_way_is_named(name: str) -> None:
    await here("stream", "create", name, "--subjects", f"{name}.>")
    other = await here("stream", "create", f"{name}-2", "--subjects", f"{name}.a")
    assert f"stored by another stream already: {name} ({name}.>)" in other.refusal
    changed = await here("stream", "create", name, "--subjects", f"{name}.>", "--max-msgs", "3")
    assert f"there already is a stream '{name}' with other settings" in changed.refusal


# ---- publishing -------------------------------------------------------------------------------------------------


async def test_an_id_is_stored_once_and_the_answer_says_so(connection: Connection, name: str) -> None:
    await here("stream", "create", name, "--subjects", name)
    assert (await here("pub", name, "x", "--id", "1")).stdout == f"stored in {name}, sequence 1\n"
    assert (await here("pub", name, "x", "--id", "1")).stdout == f"not stored again: {name} has this id, sequence 1\n"
    again = (await here("pub", name, "x", "--count", "3", "--id", "{{Count}}", "--json")).json
    assert (again["stored"], again["duplicates"], again["failed"]) == (2, 1, 0)
    assert (await streams.state(connection, name)).messages == 3


async def test_stdin_is_one_message_or_one_for_each_line(connection: Connection, name: str) -> None:
    await here("stream", "create", name, "--subjects", name)
    assert (await here("pub", name, "--header", "Colour: red", stdin="a\nb\n")).returncode == 0
    assert (await here("pub", name, "--lines", stdin="line {{Count}}\nb\n")).returncode == 0
    found = [(one.data, one.headers) async for one in read_all(connection, name)]
    assert [data for data, _ in found] == [b"a\nb\n", b"line 1", b"b"]
    assert found[0][1]["Colour"] == "red"


async def test_a_rate_is_kept(name: str) -> None:
    await here("stream", "create", name, "--subjects", name)
    done = (await here("pub", name, "x", "--count", "20", "--rate", "50", "--json")).json
    assert 0.3 < done["seconds"] < 5


async def test_what_nobody_stores_fails_with_the_subjects_that_streams_have(name: str) -> None:
    await here("stream", "create", name, "--subjects", f"{name}.orders.*")
    done = await here("pub", f"{name}.ordres.1", "x")
    assert f"no stream stores subject '{name}.ordres.1'; did you mean '{name}.orders.*'?" in done.refusal


# ---- showing ----------------------------------------------------------------------------------------------------


async def test_live_messages_are_shown_as_they_are_published(connection: Connection, name: str) -> None:
    await here("stream", "create", name, "--subjects", f"{name}.>")
    async with running("sub", f"{name}.>", "--count", "1", "--json") as showing:
        await showing.ask_on_stderr(b"new messages\n")
        await here("pub", f"{name}.müller", "größer")
        shown = await showing.event("message")
        assert (shown["subject"], shown["data"]) == (f"{name}.müller", "größer")
        assert (await showing.end()).returncode == 0


async def test_showing_leaves_no_consumer_behind(connection: Connection, name: str) -> None:
    await here("stream", "create", name, "--subjects", name)
    await here("pub", name, "x")
    assert len(await events("--stream", name, "--all", "--count", "1")) == 1
    assert (await streams.state(connection, name)).consumers == 0
    assert [one["data"] for one in await events("--stream", name, "--end")] == ["x"]

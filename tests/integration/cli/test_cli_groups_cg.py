"""The words of the newest `cg` tool, and what the commands of groups say before something goes wrong."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from keylane import Connection, groups
from keylane.groups.config import Kind
from keylane.groups.store import bucket_of
from keylane.jetstream import consumers, streams
from keylane.server import NatsServer
from tests.integration.cli.groups_rig import DEADLINE_S, here, parted_stream, plain_stream, running

pytestmark = pytest.mark.timeout(240)

At = tuple[str, str]


@pytest.fixture
async def orders(connection: Connection, unique: Callable[..., str]) -> AsyncIterator[str]:
    async with plain_stream(connection, unique("ORDERS")) as name:
        yield name


@pytest.fixture
async def parted(connection: Connection, unique: Callable[..., str]) -> AsyncIterator[str]:
    async with parted_stream(connection, unique("PARTED"), 10) as name:
        yield name


@pytest.fixture
def at(nats_server: NatsServer) -> At:
    return ("-s", nats_server.url)


async def record_of(connection: Connection, kind: Kind, stream: str, group: str = "g") -> object:
    entry = await bucket_of(connection, kind).get(f"{stream}.{group}")
    return None if entry is None or entry.value is None else json.loads(entry.value)


# ---- filters are options ------------------------------------------------------------------------------------------


async def test_static_groups_in_the_words_of_cg(connection: Connection, parted: str, at: At) -> None:
    done = await here(
        "static", "create", "balanced", parted, "g", "10", "--filter", f"{parted}.*", "m2", "m1", *at
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert await record_of(connection, "static", parted) == {
        "max_members": 10,
        "filters": [f"{parted}.*"],
        "members": ["m2", "m1"],
    }
    done = await here("static", "create", "mapped", parted, "h", "10", "a:0,1,2", "b:3-9", *at)
    assert (done.returncode, done.stderr) == (0, "")
    assert await record_of(connection, "static", parted, "h") == {
        "max_members": 10,
        "member_mappings": [
            {"member": "a", "partitions": [0, 1, 2]},
            {"member": "b", "partitions": [3, 4, 5, 6, 7, 8, 9]},
        ],
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("balanced {s} g 10 > m1 m2", "'>' is a filter, and a filter is an option: leave it out"),
        ("balanced {s} g 10 {s}.* m1 m2", "'{s}.*' is a filter, and a filter is an option: --filter '{s}.*'"),
        ("mapped {s} g 10 {s}.* m1:0-9", "'{s}.*' is a filter, and a filter is an option: --filter '{s}.*'"),
    ],
)
async def test_the_old_place_of_a_filter_is_wrong_usage(
    connection: Connection, parted: str, at: At, words: str, said: str
) -> None:
    done = await here("static", "create", *words.format(s=parted).split(), *at)
    assert (done.returncode, done.stdout) == (2, "")
    assert said.format(s=parted) in done.stderr
    assert await record_of(connection, "static", parted) is None


async def test_a_plain_word_that_is_a_subject_is_doubted(
    connection: Connection, at: At, unique: Callable[..., str]
) -> None:
    name = unique("plain")
    transform = {"src": name, "dest": f"{{{{Partition(4)}}}}.{name}"}
    await connection.api.request(
        f"STREAM.CREATE.{name}", {"name": name, "subjects": [name], "subject_transform": transform}
    )
    try:
        done = await here("static", "create", "balanced", name, "g", "4", name, "m1", *at)
        assert done.returncode == 0
        assert f"'{name}' is taken for a member" in done.stderr
        assert f"a filter is given as --filter '{name}'" in done.stderr
    finally:
        await groups.delete(connection, name, "g")
        await streams.delete(connection, name)


@pytest.mark.parametrize(("answer", "wildcards"), [("2 1\n", [2, 1]), ("2,1", [2, 1]), ("\n", [])])
async def test_elastic_groups_in_the_words_of_cg(
    connection: Connection, orders: str, at: At, answer: str, wildcards: list[int]
) -> None:
    """The wildcards are asked for."""
    done = await here("elastic", "create", orders, "g", "4", "--filter", f"{orders}.*.*", *at, stdin=answer)
    assert done.returncode == 0
    assert done.stderr.startswith(f"numbers of the '*' of '{orders}.*.*' that make up the key")
    assert await record_of(connection, "elastic", orders) == {
        "max_members": 4,
        "partitioning_filters": [{"filter": f"{orders}.*.*", "partitioning_wildcards": wildcards}],
    }
    assert ("the whole subject" in (await here("elastic", "info", orders, "g", *at)).stdout) == (not wildcards)


async def test_a_filter_whose_wildcards_nobody_names_is_refused(connection: Connection, orders: str, at: At) -> None:
    done = await here("elastic", "create", orders, "g", "4", "--filter", f"{orders}.*", *at)
    assert done.returncode == 1
    assert "nobody said which '*' of filter" in done.stderr
    both = await here("elastic", "create", orders, "g", "4", f"{orders}.*", "1", "--filter", "x.*", *at)
    assert "with --filter and without" in both.refusal
    assert await record_of(connection, "elastic", orders) is None


# ---- consuming beside cg ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["static", "elastic"])
async def test_ack_wait_and_max_ack_pending_are_those_of_the_consumer(
    connection: Connection, parted: str, at: At, kind: Kind
) -> None:
    if kind == "static":
        await groups.create_static(connection, parted, "g", partitions=10, members=["a"])
    else:
        await groups.create_elastic(connection, parted, "g", partitions=10, members=["a"])
    words = ("--ack-wait", "2s", "--max-ack-pending", "1", "--json")
    async with running(kind, "consume", parted, "g", "a", *words, *at) as command:
        await command.event("rebalanced")
        where, name = (parted, "g-a") if kind == "static" else (f"{parted}-g", "a")
        config = (await consumers.info(connection, where, name)).config
        done = await command.end(signal.SIGINT)
    assert done.returncode == 0
    assert (config.ack_wait_s, config.priority_timeout_s, config.max_ack_pending) == (2.0, 2.0, 1)


async def test_a_member_without_partitions_is_told_that_it_waits(connection: Connection, orders: str, at: At) -> None:
    await groups.create_elastic(connection, orders, "g", partitions=1, members=["a", "b"])
    async with running("elastic", "consume", orders, "g", "b", *at) as command:
        assert command.process.stderr is not None
        async with asyncio.timeout(DEADLINE_S):
            said = (await command.process.stderr.readline()).decode()
        command.process.send_signal(signal.SIGINT)
        await command.process.communicate()
    assert said.startswith("keylane: no partitions, waiting for a partition: the group has 1 for 2 members;")


# ---- mappings that stop members in Go -----------------------------------------------------------------------------


async def test_a_mapping_that_stops_go_members_is_asked_for(
    connection: Connection, orders: str, at: At, tmp_path: Path
) -> None:
    await groups.create_elastic(
        connection, orders, "g", partitions=4, partition_by=[f"{orders}.a.*", f"{orders}.b.*"],
        members=["a"],
    )  # fmt: skip
    before = await record_of(connection, "elastic", orders)
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"a": [0, 1], "b": [2, 3]}))
    for words in (
        ("create-mapping", orders, "g", "a:0-3"),
        ("add", orders, "g", "b", "--plan", "sticky"),
        ("drop", orders, "g", "a", "--plan", "sticky"),
        ("apply-plan", str(plan), orders, "g"),
    ):
        for answer in ("n\n", ""):
            done = await here("elastic", *words, *at, stdin=answer)
            assert (done.returncode, done.stdout) == (1, ""), done
            assert "has 2 filters: with a mapping its members in Go stop (the server's error 10138)" in done.stderr
            assert "nothing was changed" in done.stderr
            assert ("--stop-go-members does not ask" in done.stderr) == (not answer)
    forced = await here("elastic", "apply-plan", str(plan), orders, "g", "--force", *at)
    assert "nothing was changed. Give --stop-go-members" in forced.refusal
    assert await record_of(connection, "elastic", orders) == before
    yes = await here("elastic", "add", orders, "g", "b", "--plan", "sticky", *at, stdin="y\n")
    assert yes.returncode == 0
    applied = await here("elastic", "apply-plan", str(plan), orders, "g", "--force", *at)
    assert (applied.returncode, applied.stderr) == (0, ""), "they have stopped by now: it is not asked again"


async def test_a_static_mapping_that_stops_go_members_is_asked_for(connection: Connection, parted: str, at: At) -> None:
    words = (
        "static",
        "create",
        "mapped",
        parted,
        "g",
        "10",
        "a:0-9",
        "--filter",
        f"{parted}.a",
        "--filter",
        f"{parted}.b",
    )
    assert "its members in Go stop" in (await here(*words, *at, stdin="n\n")).stderr
    assert await record_of(connection, "static", parted) is None
    assert (await here(*words, "--stop-go-members", *at)).returncode == 0


# ---- records that nobody can work with ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["static", "elastic"])
@pytest.mark.parametrize("record", [b"{nonsense", b'{"max_members": 1000000, "members": ["a"]}'])
async def test_a_broken_record_goes_with_force(
    connection: Connection, parted: str, at: At, kind: Kind, record: bytes
) -> None:
    if kind == "elastic":
        await groups.create_elastic(connection, parted, "g", partitions=2)
    await connection.jetstream.publish(f"$KV.{kind}-consumer-groups.{parted}.g", record)
    refused = await here(kind, "delete", parted, "g", *at, stdin="y\n")
    assert "--force deletes it" in refused.refusal
    done = await here(kind, "delete", parted, "g", "--force", *at)
    assert (done.returncode, done.stderr) == (0, "")
    assert await record_of(connection, kind, parted) is None
    assert f"{parted}-g" not in await streams.names(connection)


async def test_consumers_that_a_broken_static_record_leaves_are_named(
    connection: Connection, parted: str, at: At
) -> None:
    await connection.jetstream.publish(f"$KV.static-consumer-groups.{parted}.g", b"{nonsense")
    await consumers.create(connection, parted, consumers.ConsumerConfig(durable_name="g-a"), action="create")
    done = await here("static", "delete", parted, "g", "--force", *at)
    assert done.returncode == 0
    assert "among these: g-a. Delete those that no other group uses" in done.stderr


# ---- numbers without sense ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["info", "consume", "add", "plan", "member-info"])
async def test_a_record_with_a_million_partitions_is_one_line_at_once(
    connection: Connection, orders: str, at: At, words: str
) -> None:
    await bucket_of(connection, "elastic").ensure(replicas=1)
    record = b'{"max_members": 1000000, "members": ["a"]}'
    await connection.jetstream.publish(f"$KV.elastic-consumer-groups.{orders}.g", record)
    member = [] if words in ("info", "plan") else ["a"]
    began = time.process_time()
    done = await here("elastic", words, orders, "g", *member, *at)
    assert "1,000,000 partitions are more than the 16,384 that are allowed here" in done.refusal
    assert time.process_time() - began < 2, "a million partitions take minutes"


async def test_more_partitions_than_16384_need_an_option(
    connection: Connection, orders: str, at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keylane.groups.config._chosen", None)
    done = await here("elastic", "create", orders, "g", "2147483647", *at)
    assert "2,147,483,647 partitions are more than the 16,384" in done.refusal
    assert await record_of(connection, "elastic", orders) is None
    assert f"{orders}-g" not in await streams.names(connection)
    done = await here("elastic", "--max-partitions", "16385", "create", orders, "g", "16385", *at)
    assert done.returncode == 0
    assert "its 16,385 partitions need at least 9 members" in done.stderr
    monkeypatch.setattr("keylane.groups.config._chosen", None)
    assert "16,385 partitions are more than" in (await here("elastic", "info", orders, "g", *at)).refusal
    monkeypatch.setenv("KEYLANE_MAX_PARTITIONS", "16385")
    assert (await here("elastic", "info", orders, "g", "--json", *at)).json["max_members"] == 16385


async def test_info_says_which_group_is_too_large_for_its_members(connection: Connection, orders: str, at: At) -> None:
    await bucket_of(connection, "elastic").ensure(replicas=1)
    record = b'{"max_members": 5000, "partitioning_filters": null, "members": ["a", "b"]}'
    await connection.jetstream.publish(f"$KV.elastic-consumer-groups.{orders}.g", record)
    shown = (await here("elastic", "info", orders, "g", *at)).stdout
    assert "member 'a' would read 2,500 partitions" in shown
    joined = await here("elastic", "consume", orders, "g", "b", *at)
    assert "member 'b' would read 2,500 partitions" in joined.refusal
    assert "at least 3 members" in joined.refusal


# ---- said at once -------------------------------------------------------------------------------------------------


async def test_what_a_new_group_cannot_get_is_said_on_stderr(connection: Connection, orders: str, at: At) -> None:
    done = await here("elastic", "create", orders, "g", "2", "ordres.*", "1", "--json", *at)
    assert done.returncode == 0
    assert json.loads(done.stdout)["group"] == "g"
    assert done.stderr.startswith("keylane: warning: group 'g': filter 'ordres.*' matches nothing")
    added = await here("elastic", "add", orders, "g", "a", "b", "c", *at)
    assert added.returncode == 0
    assert "keylane: warning: " in added.stderr
    assert "3 members for 2 partitions: c owns no partition" in added.stderr
    refused = await here("static", "create", "balanced", orders, "h", "4", "a", *at)
    assert f"stream '{orders}' has no partition numbers" in refused.refusal
    assert await record_of(connection, "static", orders, "h") is None

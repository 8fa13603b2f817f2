"""`keylane dlq`: looking at dead letters, replaying and dropping them, and what it says to wrong input."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

from keylane import Connection, groups
from keylane.dead_letters import DeadLetters, dead_letter_stream, list_dead_letters, parked_count
from keylane.errors import NotFound
from keylane.groups import GroupMessage, retry_counts
from keylane.jetstream import Outgoing, publish_many, streams
from keylane.processing.delayed_retries import retry_stream
from keylane.server import NatsServer
from tests.integration.cli.groups_rig import DEADLINE_S, Done, here, plain_stream, run
from tests.waiter import until

pytestmark = pytest.mark.timeout(240)

Names = Callable[..., str]


@pytest.fixture
def at(nats_server: NatsServer) -> tuple[str, str]:
    return ("-s", nats_server.url)


@pytest.fixture
async def orders(connection: Connection, unique: Names) -> AsyncIterator[str]:
    async with clean(connection, unique("ORDERS")) as name:
        yield name


@asynccontextmanager
async def clean(connection: Connection, name: str) -> AsyncIterator[str]:
    async with plain_stream(connection, name):
        try:
            yield name
        finally:
            for other in (dead_letter_stream(name), retry_stream(name)):
                with suppress(NotFound):  # some tests make none
                    await streams.delete(connection, other)


def fail(message: GroupMessage) -> None:
    raise ValueError(f"bad {message.key}")


async def bury(connection: Connection, stream: str, outgoing: Sequence[Outgoing], group: str = "billing") -> None:
    """Publish these and let a member of the group put them all into the dead letters."""
    await groups.create_elastic(connection, stream, group, partitions=4, partition_by=f"{stream}.*", members=["alice"])
    letters = DeadLetters(connection, stream, group)
    buried = asyncio.Semaphore(0)

    async def handler(message: GroupMessage) -> None:
        try:
            fail(message)
        except ValueError as error:
            await letters.put(message, member="alice", tries=3, error=error)
        buried.release()

    before = (await streams.state(connection, stream)).messages
    await publish_many(connection, outgoing)
    member = await groups.join(connection, stream, group, "alice", handler, order="strict")
    try:
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(before + len(outgoing)):
                await buried.acquire()
    finally:
        await member.stop()


async def bury_keys(connection: Connection, stream: str, keys: Sequence[str], group: str = "billing") -> None:
    await bury(connection, stream, [Outgoing(f"{stream}.{key}", key.encode()) for key in keys], group)


async def left(connection: Connection, stream: str) -> list[int]:
    return [one.sequence async for one in list_dead_letters(connection, stream)]


# ---- look ---------------------------------------------------------------------------------------------


async def test_listing(connection: Connection, orders: str, at: tuple[str, str]) -> None:
    await bury_keys(connection, orders, ["k1", "k2", "k1"])
    done = await run("dlq", "ls", orders, *at)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"sequence +group +partition +key +tries +state +ago +error", done.stdout)
    assert re.search(r"1 +billing +\d +k1 +3 +dead +\d+ s +ValueError: bad k1", done.stdout)
    assert re.search(r"2 +billing +\d +k2 +3 +dead +\d+ s +ValueError: bad k2", done.stdout)
    told = (await here("dlq", "ls", orders, "billing", "--key", "k1", "--json", *at)).json
    assert (told["stream"], told["next"]) == (orders, None)
    first, third = told["dead_letters"]
    assert third["sequence"] == 3
    del first["time"], first["partition"]
    assert first == {
        "sequence": 1,
        "stream": orders,
        "source_sequence": 1,
        "subject": f"{orders}.k1",
        "group": "billing",
        "key": "k1",
        "member": "alice",
        "tries": 3,
        "error": "ValueError: bad k1",
        "headers": {},
        "bytes": 2,
        "parked": False,
    }
    partition = str(third["partition"])
    told = (await here("dlq", "ls", orders, "--partition", partition, "2-", "--json", *at)).json
    assert 3 in [one["sequence"] for one in told["dead_letters"]]
    assert 1 not in [one["sequence"] for one in told["dead_letters"]]


async def test_a_long_list_goes_on_where_it_stopped(connection: Connection, orders: str, at: tuple[str, str]) -> None:
    await bury_keys(connection, orders, [f"k{number}" for number in range(150)])
    done = await here("dlq", "ls", orders, *at)
    assert "and more, from sequence 101 on: add 101- to the command, or a higher --limit\n" in done.stdout
    first = (await here("dlq", "ls", orders, "--json", *at)).json
    second = (await here("dlq", "ls", orders, f"{first['next']}-", "--json", *at)).json
    assert (len(first["dead_letters"]), first["next"], second["next"]) == (100, 101, None)
    both = [*first["dead_letters"], *second["dead_letters"]]
    assert [one["sequence"] for one in both] == list(range(1, 151))
    told = (await here("dlq", "ls", orders, "billing", "7", "7", "20-30", "--limit", "4", "--json", *at)).json
    assert [one["sequence"] for one in told["dead_letters"]] == [7, 20, 21, 22]
    assert told["next"] == 23


async def test_showing(connection: Connection, orders: str, at: tuple[str, str]) -> None:
    binary = b"\xff\x00\x1b[2J"
    await bury(
        connection,
        orders,
        [Outgoing(f"{orders}.k1", b"hello\nworld", {"Colour": "green"}), Outgoing(f"{orders}.k2", binary)],
    )
    done = await run("dlq", "show", orders, "1", "2", *at)
    assert (done.returncode, done.stderr) == (0, "")
    for words in (f"{orders} / dead letter 1", f"subject +{orders}.k1", "header Colour +green", "ValueError: bad k1",
                  f"sequence 1 of stream {orders}", "billing, member alice", "data +hello", "world",
                  r"traceback +Traceback \(most recent call last\):", r'raise ValueError\(f"bad'):  # fmt: skip
        assert re.search(words, done.stdout), words
    assert r"\xff\x00\x1b[2J" in done.stdout
    assert "\x1b" not in done.stdout
    told = (await here("dlq", "show", orders, "billing", "1", "2", "--json", *at)).json["dead_letters"]
    assert told[0]["data"] == "hello\nworld"
    assert told[0]["traceback"].endswith("\nValueError: bad k1")
    assert told[0]["headers"] == {"Colour": "green"}
    assert base64.b64decode(told[1]["data_base64"]) == binary


async def test_no_dead_letters_is_a_plain_sentence(connection: Connection, orders: str, at: tuple[str, str]) -> None:
    assert await here("dlq", "ls", orders, *at) == Done(0, f"stream '{orders}' has no dead letters\n", "")
    group = await here("dlq", "ls", orders, "billing", *at)
    assert group == Done(0, f"stream '{orders}' has no dead letters of group 'billing'\n", "")
    assert (await here("dlq", "ls", orders, "--json", *at)).json == {
        "stream": orders,
        "dead_letters": [],
        "next": None,
        "retries": {},
    }
    for verb, past in (("replay", "replayed"), ("drop", "dropped")):
        done = await here("dlq", verb, orders, "--all", *at)
        assert done == Done(0, f"stream '{orders}' has no dead letters\n", "")
        done = await here("dlq", verb, orders, "5-", *at)
        assert done == Done(0, f"no dead letter of stream '{orders}' matches\n", "")
        assert (await here("dlq", verb, orders, "--all", "--json", *at)).json == {
            "stream": orders,
            past: [],
            "gone": [],
        }
    await bury_keys(connection, orders, ["k1"])
    done = await here("dlq", "ls", orders, "--key", "nobody", *at)
    assert done == Done(0, f"no dead letter of stream '{orders}' matches\n", "")


# ---- out ----------------------------------------------------------------------------------------------


async def test_replaying(connection: Connection, orders: str, at: tuple[str, str]) -> None:
    await groups.create_elastic(connection, orders, "audit", partitions=2, partition_by=f"{orders}.*")
    await bury_keys(connection, orders, ["k1", "k2", "k1", "k3"])
    no = await run("dlq", "replay", orders, "1", *at, stdin="n\n")
    assert (no.returncode, no.stdout) == (1, "")
    assert f"Replay 1 dead letter of stream '{orders}'?" in no.stderr
    assert "reach every group of the stream that takes their subjects (audit, billing)" in no.stderr
    assert no.stderr.endswith("keylane: nothing was replayed\n")
    nobody = await here("dlq", "replay", orders, "1", *at)
    assert nobody.stderr.endswith("nothing was replayed: nobody answered, and --force does not ask\n")
    assert await left(connection, orders) == [1, 2, 3, 4]

    yes = await run("dlq", "replay", orders, "billing", "--all", "--key", "k1", *at, stdin="y\n")
    assert (yes.returncode, yes.stdout) == (0, f"replayed 2 dead letters of stream '{orders}'\n")
    assert await left(connection, orders) == [2, 4]
    assert (await streams.state(connection, orders)).messages == 6

    forced = (await here("dlq", "replay", orders, "2", "--force", "--json", *at)).json
    assert forced == {"stream": orders, "replayed": [{"sequence": 2, "stored_sequence": 7}], "gone": []}
    again = await here("dlq", "replay", orders, "2", "--force", *at)
    assert f"stream '{orders}' has no dead letter 2" in again.refusal
    assert await left(connection, orders) == [4]
    assert (await streams.state(connection, orders)).messages == 7


async def test_dropping(connection: Connection, orders: str, at: tuple[str, str]) -> None:
    await bury_keys(connection, orders, [f"k{number % 3}" for number in range(100)])
    no = await here("dlq", "drop", orders, "--all", *at, stdin="\n")
    assert no.stderr == (
        f"Drop 100 dead letters of stream '{orders}'? They are gone for good then. [y/N] keylane: nothing was dropped\n"
    )
    assert no.returncode == 1
    yes = await here("dlq", "drop", orders, "2", "5-7", "6-8", *at, stdin="y\n")
    assert (yes.returncode, yes.stdout) == (0, f"dropped 5 dead letters of stream '{orders}'\n")
    assert await left(connection, orders) == [1, 3, 4, *range(9, 101)]
    told = (await here("dlq", "drop", orders, "--all", "--key", "k0", "--force", "--json", *at)).json
    assert [one["sequence"] for one in told["dropped"]] == [1, 4, *range(10, 101, 3)]
    await here("dlq", "drop", orders, "--all", "--force", *at)
    assert await left(connection, orders) == []
    assert (await streams.state(connection, orders)).messages == 100


async def test_only_the_named_group_is_touched(connection: Connection, orders: str, at: tuple[str, str]) -> None:
    await bury_keys(connection, orders, ["k1"], "billing")
    await bury_keys(connection, orders, [], "7")
    assert await left(connection, orders) == [1, 2]
    done = await here("dlq", "drop", orders, "billing", "2", "--force", *at)
    assert "dead letter 2 is of group '7', not 'billing'" in done.refusal
    told = (await here("dlq", "drop", orders, "--group", "7", "--all", "--force", "--json", *at)).json
    assert told["dropped"] == [{"sequence": 2}]
    assert await left(connection, orders) == [1]


async def test_a_replay_that_stops_says_how_far_it_came(
    connection: Connection, orders: str, at: tuple[str, str]
) -> None:
    await bury_keys(connection, orders, ["k1", "k2", "k3"])
    config = (await streams.info(connection, orders)).config
    await streams.update(connection, config.evolve(subjects=[f"{orders}.k1", f"{orders}.k3"]))
    done = await here("dlq", "replay", orders, "--all", "--force", *at)
    assert "1 of 3 replayed; stopped at 2: publish to " in done.refusal
    assert await left(connection, orders) == [2, 3]


async def test_dead_letters_outlive_their_stream(connection: Connection, unique: Names, at: tuple[str, str]) -> None:
    async with clean(connection, unique("ORDERS")) as orders:
        await bury_keys(connection, orders, ["k1"])
        config = (await streams.info(connection, orders)).config
        await streams.delete(connection, orders)
        told = (await here("dlq", "ls", orders, "--json", *at)).json
        assert [one["sequence"] for one in told["dead_letters"]] == [1]
        await streams.create(connection, config)


# ---- wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ls NOT_THERE", "there is no stream 'NOT_THERE'; there is: "),
        ("show NOT_THERE 1", "there is no stream 'NOT_THERE'; there is: "),
        ("replay NOT_THERE --all", "there is no stream 'NOT_THERE'; there is: "),
        ("drop NOT_THERE 1", "there is no stream 'NOT_THERE'; there is: "),
        ("ls a.b", "'a.b'"),
        ("ls {s} a.b", "'a.b'"),
        ("ls {s} billing x", "sequence 'x' is not one: write 5, 5-9"),
        ("ls {s} billing 1 other", "sequence 'other' is not one"),
        ("ls {s} 0", "sequences start at 1"),
        ("ls {s} 9-5", "the lower one comes first"),
        ("show {s} billing", "show takes single sequences"),
        ("show {s} 1-5", "show takes single sequences"),
        ("show {s} 99", "stream '{s}' has no dead letter 99"),
        ("replay {s}", "no dead letter named: give sequences"),
        ("drop {s} billing", "no dead letter named: give sequences"),
        ("drop {s} 1 --all", "sequences and --all: give one of them"),
        ("drop {s} 1 99 --force", "stream '{s}' has no dead letter 99"),
        ("drop {s} 1 --key other --force", "dead letter 1 is of key 'k1', not 'other'"),
    ],
)
async def test_wrong_input_is_one_line_and_exit_code_1(
    connection: Connection, orders: str, at: tuple[str, str], words: str, said: str
) -> None:
    await bury_keys(connection, orders, ["k1"])
    done = await here("dlq", *words.format(s=orders).split(), *at)
    assert said.format(s=orders) in done.refusal
    assert await left(connection, orders) == [1]


@pytest.mark.parametrize(
    "words", ["ls", "show S", "ls S --limit 0", "ls S --partition -1", "ls S --partition x", "nonsense S"]
)
async def test_wrong_usage_is_exit_code_2(words: str) -> None:
    done = await here("dlq", *words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: " in done.stderr


# ---- delayed retries --------------------------------------------------------------------------------------


async def test_what_waits_for_a_delayed_retry_is_counted(
    connection: Connection, orders: str, at: tuple[str, str]
) -> None:
    await groups.create_elastic(
        connection, orders, "billing", partitions=4, partition_by=f"{orders}.*", members=["alice"]
    )
    async with groups.join(connection, orders, "billing", "alice", fail, retry_delays=[600]):
        await publish_many(connection, [Outgoing(f"{orders}.{key}") for key in ("k1", "k2")])
        await until(lambda: retry_counts(connection, orders), bool)
        await until(lambda: retry_counts(connection, orders), lambda found: found["billing"] == (2, 0))
    listed = await here("dlq", "ls", orders, *at)
    assert listed.stdout == (
        f"stream '{orders}' has no dead letters\ngroup billing: 2 wait for a delayed retry, 0 are due\n"
    )
    assert (await here("dlq", "ls", orders, "other", "--json", *at)).json["retries"] == {}
    counts = {"waiting": 2, "due": 0}
    assert (await here("dlq", "ls", orders, "--json", *at)).json["retries"] == {"billing": counts}
    assert (await here("elastic", "info", orders, "billing", "--json", *at)).json["retries"] == counts
    shown = await here("elastic", "info", orders, "billing", *at)
    assert "2 wait for a delayed retry, 0 are due" in shown.stdout


# ---- parked keys ------------------------------------------------------------------------------------------


async def test_a_parked_key_is_listed_and_released(connection: Connection, orders: str, at: tuple[str, str]) -> None:
    is_broken = True
    handled: list[tuple[str, bytes]] = []

    async def handler(message: GroupMessage) -> None:
        if is_broken and message.key == "k1":
            fail(message)
        handled.append((message.key, message.data))

    await groups.create_elastic(
        connection, orders, "billing", partitions=4, partition_by=f"{orders}.*", members=["alice"]
    )
    member = groups.join(connection, orders, "billing", "alice", handler, max_tries=1, after_tries="park")
    async with member:
        await publish_many(connection, [Outgoing(f"{orders}.{key}", data) for key, data in MIXED])
        await until(lambda: handled, lambda done: done == [("k2", b"2")])
        await until(lambda: parked_count(connection, orders, "billing", "k1"), lambda count: count == 2)
        listed = await run("dlq", "ls", orders, *at)
        assert listed.stdout.count("parked") >= 2
        shown = await run("dlq", "show", orders, (await letters_of(connection, orders))[0], *at)
        assert "parked, with later messages of its key behind it" in shown.stdout
        refused = await run("dlq", "replay", orders, "--all", "--force", *at)
        assert refused.returncode == 1
        assert f"keylane dlq release {orders} billing k1" in refused.stderr.replace("\n", " ")
        again = await run("dlq", "release", orders, "billing", "k1", *at)
        assert again.returncode == 1
        assert "is parked again, with 2 messages" in again.stderr
        is_broken = False
        released = await run("dlq", "release", orders, "billing", "k1", *at)
        assert released.stdout == f"released key 'k1' of {orders}/billing: 2 messages handled in order\n"
        assert handled == [("k2", b"2"), ("k1", b"1"), ("k1", b"3")]
    missing = await run("dlq", "release", orders, "billing", "k1", *at)
    assert missing.returncode == 1
    assert "key 'k1' of" in missing.stderr
    assert "is not parked" in missing.stderr


MIXED = [("k1", b"1"), ("k2", b"2"), ("k1", b"3")]


async def letters_of(connection: Connection, stream: str) -> list[str]:
    return [str(one.sequence) async for one in list_dead_letters(connection, stream)]

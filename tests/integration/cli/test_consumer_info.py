"""`keylane consumer info` and `unpin` against a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from keylane import Connection, priority
from keylane.cli.formatting import as_utc
from keylane.jetstream import consumers
from keylane.priority import ConsumerConfig
from keylane.server import NatsServer
from tests.waiter import until

pytestmark = pytest.mark.timeout(240)

Run = Callable[..., Awaitable[Any]]
RunHere = Callable[..., Any]
NEXT_S = 30.0


def pinned(name: str, **more: Any) -> ConsumerConfig:
    return ConsumerConfig(
        durable_name=name,
        priority_groups=("jobs",),
        priority_policy="pinned_client",
        priority_timeout_s=10,
        **more,
    )


def facts(panel: str) -> dict[str, str]:
    """The lines of a panel, name to value."""
    lines = [line.strip("│ ") for line in panel.splitlines()[1:-1]]
    return {name.strip(): value.strip() for name, _, value in (line.partition("  ") for line in lines)}


async def test_info_of_a_pinned_consumer(
    connection: Connection, nats_server: NatsServer, stream: str, keylane_run: Run, keylane_here: RunHere
) -> None:
    await priority.create(connection, stream, pinned("workers", filter_subjects=(f"{stream}.a",), max_ack_pending=7))
    for _ in range(10):
        await connection.jetstream.publish(f"{stream}.a", b"x")
    async with await priority.consume(connection, stream, "workers") as feed:
        first = await feed.next(NEXT_S)
        second = await feed.next(NEXT_S)
        assert first is not None
        assert second is not None
        await first.ack_confirmed()
        # until the server has filled the place that the ack made
        await until(
            lambda: consumers.info(connection, stream, "workers"),
            lambda seen: seen.delivered_sequence >= 8,
            deadline_s=NEXT_S,
        )
        words = ("consumer", "info", stream, "workers", "-s", nats_server.url)
        shown, as_json = await asyncio.gather(keylane_run(*words), asyncio.to_thread(keylane_here, *words, "--json"))
        state = await priority.group_state(connection, stream, "workers")
        assert (shown.returncode, shown.stderr) == (0, "")
        assert f"{stream} / workers" in shown.stdout.splitlines()[0]
        found = facts(shown.stdout)
        assert state.pinned_since is not None
        since, ago = found.pop("since").split(" (")
        assert since == f"{state.pinned_since:%Y-%m-%d %H:%M:%S} UTC"
        assert ago.removesuffix(" s ago)").isdigit()
        assert found == {
            "policy": "pinned_client",
            "group": "jobs",
            "pinned": state.pinned_client_id,
            "pin timeout": "10 s without a pull",
            "pending": "2",
            "ack pending": "7 of 7",
            "redelivered": "0",
            "waiting pulls": found["waiting pulls"],
            "delivered": "up to sequence 8",
            "ack floor": "sequence 1",
            "filter": f"{stream}.a",
            "leader": "none (a single server)",
            "paused": "no",
        }
        assert (as_json.returncode, as_json.stderr) == (0, "")
        told = json.loads(as_json.stdout)
        assert datetime.fromisoformat(told["pinned_since"]) - state.pinned_since < timedelta(milliseconds=1)
        async with asyncio.timeout(NEXT_S):
            while told["waiting_pulls"] < 1:  # none may be open between one pull and the next
                told = json.loads((await asyncio.to_thread(keylane_here, *words, "--json")).stdout)
        expected = {
            "stream": stream,
            "consumer": "workers",
            "policy": "pinned_client",
            "group": "jobs",
            "priority_timeout_s": 10.0,
            "pinned_id": state.pinned_client_id,
            "pending": 2,
            "ack_pending": 7,
            "max_ack_pending": 7,
            "redelivered": 0,
            "delivered": 8,
            "ack_floor": 1,
            "leader": None,
            "paused": False,
        }
        assert {name: told[name] for name in expected} == expected


async def test_info_without_a_pin(
    connection: Connection, nats_server: NatsServer, stream: str, keylane_here: RunHere
) -> None:
    """Nobody is pinned; other policies; no policy at all, and paused."""
    await priority.create(connection, stream, pinned("idle"))
    await priority.create(
        connection,
        stream,
        ConsumerConfig(durable_name="regional", priority_groups=("jobs",), priority_policy="overflow"),
    )
    await consumers.create(connection, stream, ConsumerConfig(durable_name="plain"))
    await consumers.pause(connection, stream, "plain", datetime.now(UTC) + timedelta(hours=1))
    idle, regional, plain = [
        await asyncio.to_thread(keylane_here, "consumer", "info", stream, name, "-s", nats_server.url)
        for name in ("idle", "regional", "plain")
    ]
    found = facts(idle.stdout)
    assert found["pinned"] == "nobody"
    assert "since" not in found
    found = facts(regional.stdout)
    assert (found["policy"], found["group"]) == ("overflow", "jobs")
    assert "pinned" not in found
    found = facts(plain.stdout)
    assert (found["policy"], found["paused"]) == ("none (no priority group)", "yes")
    assert not found.keys() & {"pinned", "group", "since", "pin timeout"}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command waits for a new pin longer than a second, which this machine may take."""
    monkeypatch.setattr("keylane.cli.command.NEXT_PIN_S", NEXT_S)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("as_json", [False, True], ids=["words", "json"])
async def test_unpin_says_who_was_pinned_and_who_is(
    connection: Connection, nats_server: NatsServer, stream: str, keylane_here: RunHere, as_json: bool
) -> None:
    await priority.create(connection, stream, pinned("workers", max_ack_pending=1))
    async with (
        await priority.consume(connection, stream, "workers") as first,
        await priority.consume(connection, stream, "workers", reset_on_takeover=False) as second,
    ):
        for _ in range(2):
            await connection.jetstream.publish(f"{stream}.a", b"x")
        message = await first.next(NEXT_S)
        assert message is not None
        was = await priority.group_state(connection, stream, "workers")
        assert was.pinned_since is not None

        async def free_the_next_message() -> None:
            """One in flight: the second message, and with it the new pin, can come only after this ack."""
            async with priority.advisories(connection, stream, "workers") as events, asyncio.timeout(60):
                asked.set()
                async for event in events:
                    if isinstance(event, priority.Unpinned):
                        message.ack()
                        return

        asked = asyncio.Event()
        freeing = asyncio.create_task(free_the_next_message())
        await asked.wait()
        how = ["--json"] if as_json else []
        done = await asyncio.to_thread(
            keylane_here, "consumer", "unpin", stream, "workers", *how, "-s", nats_server.url
        )
        await freeing
        assert (done.returncode, done.stderr) == (0, "")
        state = await priority.group_state(connection, stream, "workers")
        assert state.pinned_client_id not in (None, was.pinned_client_id)
        # whose pull was the first to come after the unpin
        await until(lambda: (first.pin_id, second.pin_id), lambda ids: state.pinned_client_id in ids, deadline_s=NEXT_S)
        if as_json:
            assert json.loads(done.stdout) == {
                "stream": stream,
                "consumer": "workers",
                "unpinned_id": was.pinned_client_id,
                "pinned_since": as_utc(was.pinned_since),
                "pinned_id": state.pinned_client_id,
            }
        else:
            unpinned, now = done.stdout.splitlines()
            assert unpinned.startswith(f"unpinned {was.pinned_client_id}, which was pinned for ")
            assert now == f"pinned now: {state.pinned_client_id}"


async def test_unpin_with_nobody_there(
    connection: Connection, nats_server: NatsServer, stream: str, keylane_here: RunHere
) -> None:
    await priority.create(connection, stream, pinned("idle"))
    done = await asyncio.to_thread(keylane_here, "consumer", "unpin", stream, "idle", "-s", nats_server.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "nobody was pinned",
        "nobody is pinned yet: a reader is pinned with the next message that it is given",
    ]
    done = await asyncio.to_thread(keylane_here, "consumer", "unpin", stream, "idle", "--json", "-s", nats_server.url)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told == {
        "stream": stream, "consumer": "idle", "unpinned_id": None, "pinned_since": None, "pinned_id": None,
    }  # fmt: skip


# ---- wrong input --------------------------------------------------------------------------------------


@pytest.fixture
async def some_consumers(connection: Connection, stream: str) -> str:
    """The stream, with a consumer without a group and one that knows no pins."""
    await consumers.create(connection, stream, ConsumerConfig(durable_name="plain"))
    await priority.create(
        connection,
        stream,
        ConsumerConfig(durable_name="tiers", priority_groups=("jobs",), priority_policy="prioritized"),
    )
    return stream


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("info {stream} gone", "stream '{stream}' has no consumer 'gone'; there is: plain, tiers"),
        ("unpin {stream} gone", "stream '{stream}' has no consumer 'gone'; there is: plain, tiers"),
        ("watch {stream} gone", "stream '{stream}' has no consumer 'gone'; there is: plain, tiers"),
        ("info NOT_THERE plain", "there is no stream 'NOT_THERE'; there is: "),
        ("watch NOT_THERE", "there is no stream 'NOT_THERE'; there is: "),
        ("watch NOT_THERE --json", "there is no stream 'NOT_THERE'; there is: "),
        ("info a.b plain", "'a.b'"),
        ("info {stream} *", "'*'"),
        ("watch {stream} a>", "'a>'"),
        ("unpin {stream} plain", "consumer 'plain' of stream '{stream}' has no priority group"),
        ("unpin {stream} tiers", "consumer 'tiers' has the policy prioritized: only pinned_client has a pin"),
    ],
)
def test_wrong_names_are_one_line_and_exit_code_1(
    some_consumers: str,
    nats_server: NatsServer,
    keylane_here: RunHere,
    arguments: str,
    said: str,
) -> None:
    words = arguments.format(stream=some_consumers).split()
    done = keylane_here("consumer", *words, "-s", nats_server.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("keylane: ")
    assert done.stderr.count("\n") == 1
    assert said.format(stream=some_consumers) in done.stderr


async def test_many_names_are_cut_short(
    connection: Connection, nats_server: NatsServer, stream: str, keylane_here: RunHere
) -> None:
    for number in range(12):
        await consumers.create(connection, stream, ConsumerConfig(durable_name=f"c{number:02}"))
    done = await asyncio.to_thread(keylane_here, "consumer", "info", stream, "gone", "-s", nats_server.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is: c00, c01, c02, c03, c04, c05, c06, c07, c08, c09 and 2 more" in done.stderr


@pytest.mark.parametrize(
    "words",
    ["info", "info S", "unpin S", "watch", "info S C --timeout 0", "info S C --nonsense", "watch S C D"],
)
def test_wrong_usage_is_exit_code_2(keylane_here: RunHere, words: str) -> None:
    done = keylane_here("consumer", *words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: " in done.stderr
    assert "Traceback" not in done.stderr

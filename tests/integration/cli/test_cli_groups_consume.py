"""`keylane static consume` and `keylane elastic consume` as processes: what they print, and how they end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable

import pytest

from keylane import Connection, groups
from keylane.core.partitions import partition_of
from keylane.server import NatsServer
from keylane.server.ports import ReservedPort
from tests.integration.cli.groups_rig import (
    DEADLINE_S,
    KEYLANE,
    Running,
    here,
    parted_stream,
    plain_stream,
    publish,
    running,
)
from tests.waiter import until

pytestmark = pytest.mark.timeout(240)

At = tuple[str, str]


@pytest.fixture
def at(nats_server: NatsServer) -> At:
    return ("-s", nats_server.url)


@pytest.fixture
async def orders(connection: Connection, unique: Callable[..., str]) -> AsyncIterator[str]:
    """A stream with an elastic group `billing` of member `a`."""
    async with plain_stream(connection, unique("ORDERS")) as stream:
        await groups.create_elastic(
            connection, stream, "billing", partitions=6, partition_by=f"{stream}.*", members=["a"]
        )
        yield stream


async def test_each_message_is_printed_and_ctrl_c_ends_it(connection: Connection, orders: str, at: At) -> None:
    await publish(connection, orders, 30, keys=3)
    async with running("elastic", "consume", orders, "billing", "a", "--sleep", "0", "--json", *at) as command:
        last = await command.until(lambda line: line.get("sequence") == 30)
        done = await command.end(signal.SIGINT)
    assert (done.returncode, done.stderr) == (0, "")
    assert command.said[0]["event"] == "joined"
    assert command.said[0]["listed"] is True
    assert {"event": "rebalanced", "before": [], "after": [0, 1, 2, 3, 4, 5]}.items() <= command.said[1].items()
    assert [line["event"] for line in command.said if line["event"] in ("stopping", "ended")] == ["stopping", "ended"]
    assert command.said[-1]["reason"] == "stopped"
    assert len(command.messages) == 30
    for key in ("k0", "k1", "k2"):
        sequences = [line["sequence"] for line in command.messages if line["key"] == key]
        assert sequences == sorted(sequences)
    assert last["subject"] == f"{orders}.k2"
    assert last["data"] == "29"
    assert last["delivered_count"] == 1
    assert last["pinned_id"]
    info = await groups.member_info(connection, orders, "billing", "a")
    assert info is None or info.num_ack_pending == 0


async def test_words_for_people(connection: Connection, orders: str, at: At) -> None:
    where = f"partition {partition_of(f'{orders}.k', f'{orders}.*', [1], 6)}  seq 1"
    await connection.jetstream.publish(f"{orders}.k", b"\x1b[31mred\n" + b"x" * 100)
    process = await asyncio.create_subprocess_exec(
        *KEYLANE, "elastic", "join", orders, "billing", "a", *at,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        lines = []
        async with asyncio.timeout(DEADLINE_S):
            while where not in (line := (await process.stdout.readline()).decode()):
                assert line
                lines.append(line[14:])
            process.terminate()
            rest, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert lines == [
        "joined billing as a\n", "partitions 0-5 (before: none)\n", "active: this instance is pinned\n",
    ]  # fmt: skip
    shown = r"\x1b[31mred\n" + "x" * 47
    assert line[14:] == f"{orders}.k  {where}  {shown}… (109 bytes)\n"
    assert rest.decode().splitlines()[-1][14:] == "ended: stopped"
    assert (process.returncode, errors) == (0, b"")


async def test_ctrl_c_finishes_what_is_at_work_and_hands_over(connection: Connection, orders: str, at: At) -> None:
    """The message at work is printed and acked; the second instance goes on with the next, long before a timeout."""
    where = ("elastic", "consume", orders, "billing", "a", "--json", "--order", "strict")
    async with running(*where, "--sleep", "1s", *at) as first:
        await first.event("joined")
        await publish(connection, orders, 1)
        await first.event("active")
        async with running(*where, "--sleep", "0", *at) as second:
            await second.event("joined")
            await publish(connection, orders, 4)
            await asyncio.gather(_is_at_work(connection, orders, 2), _has_joined(connection, orders))
            done = await first.end(signal.SIGINT)
            assert (done.returncode, done.stderr) == (0, "")
            await second.until(lambda line: line.get("sequence") == 5)
            await second.end(signal.SIGINT)
    handled = [line["sequence"] for line in [*first.messages, *second.messages]]
    assert handled == [1, 2, 3, 4, 5]
    assert len(first.messages) >= 2  # the one printed before Ctrl-C, and the one at work


async def _is_at_work(connection: Connection, stream: str, sequence: int) -> None:
    """The message before is acked, and this one is with the active instance."""
    await until(
        lambda: groups.member_info(connection, stream, "billing", "a"),
        lambda info: info is not None and info.delivered_sequence >= sequence and info.ack_floor >= sequence - 1,
        deadline_s=DEADLINE_S,
    )


async def _has_joined(connection: Connection, stream: str) -> None:
    """Wait until both instances pull: the pinned one has one or more open, the other at least one."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            info = await groups.member_info(connection, stream, "billing", "a")
            if info is not None and info.num_waiting >= 1:
                return
            await asyncio.sleep(0.05)


async def test_a_second_ctrl_c_ends_at_once(connection: Connection, orders: str, at: At) -> None:
    where = ("elastic", "consume", orders, "billing", "a", "--json", "--sleep", "1h")
    async with running(*where, *at) as command:
        await publish(connection, orders, 1)
        await command.event("active")
        command.process.send_signal(signal.SIGINT)
        await command.event("stopping")
        done = await command.end(signal.SIGINT)
    assert (done.returncode, done.stderr) == (130, "")
    assert command.messages == []


async def test_an_unlisted_member_waits_until_it_is_added_and_ends_with_the_group(
    connection: Connection, orders: str, at: At
) -> None:
    await publish(connection, orders, 5)
    where = (orders, "billing")
    async with running("elastic", "consume", *where, "b", "--sleep", "0", "--json", *at) as command:
        waiting = await command.event("state")
        assert waiting["state"] == "not listed"
        assert waiting["waiting_for"] == f"the group to list it: keylane elastic add {orders} billing b"
        assert (await command.event("joined"))["listed"] is False
        await groups.set_mapping(connection, *where, {"b": range(6)})
        await command.until(lambda line: line.get("sequence") == 5)
        await groups.delete(connection, *where)
        done = await command.end()
    assert (done.returncode, done.stderr) == (0, "")
    assert command.said[-1]["event"] == "ended"
    assert "was deleted" in command.said[-1]["reason"]


async def test_a_static_member(connection: Connection, unique: Callable[..., str], at: At) -> None:
    async with parted_stream(connection, unique("PARTED"), 4) as stream:
        await groups.create_static(connection, stream, "g", partitions=4, members=["a", "b"])
        await publish(connection, stream, 20)
        async with (
            running("static", "consume", stream, "g", "a", "--sleep", "0", "--json", *at) as first,
            running("static", "consume", stream, "g", "b", "--sleep", "1ms", "--json", *at) as second,
        ):
            await _all_of(first, second, 20)
            assert (await first.end(signal.SIGINT)).returncode == 0
            assert (await second.end(signal.SIGTERM)).returncode == 0
        assert {line["partition"] for line in first.messages} <= {0, 1}
        assert {line["partition"] for line in second.messages} <= {2, 3}


async def _all_of(first: Running, second: Running, count: int) -> None:
    """Read both until together they printed this many messages."""

    async def read(one: Running) -> None:
        while True:
            await one.event("message")
            if len(first.messages) + len(second.messages) >= count:
                return

    reading = [asyncio.create_task(read(one)) for one in (first, second)]
    await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)


async def test_a_closed_pipe_ends_it_and_loses_nothing(connection: Connection, orders: str, at: At) -> None:
    """As in `keylane elastic consume … | head -1`."""
    async with running("elastic", "consume", orders, "billing", "a", "--sleep", "0", "--json", *at) as command:
        await publish(connection, orders, 1)
        await command.event("message")
        assert command.process.stdout is not None
        command.process.stdout._transport.close()  # type: ignore[attr-defined]
        await publish(connection, orders, 2)
        async with asyncio.timeout(DEADLINE_S):
            assert await command.process.wait() == 1
        assert command.process.stderr is not None
        assert await command.process.stderr.read() == b""
    async with running("elastic", "consume", orders, "billing", "a", "--sleep", "0", "--json", *at) as command:
        await command.until(lambda line: line.get("sequence") == 3)
        assert [line["sequence"] for line in command.messages] == [2, 3]
        await command.end(signal.SIGINT)


async def test_instances_that_ask_for_different_consumers_are_told(connection: Connection, orders: str, at: At) -> None:
    async def nothing(_: groups.GroupMessage) -> None:
        """It only holds the consumer."""

    joined = asyncio.Event()
    hooks = groups.MemberHooks(on_partitions=lambda *_: joined.set())
    other = await groups.join(connection, orders, "billing", "a", nothing, max_ack_pending=7, hooks=hooks)
    async with asyncio.timeout(DEADLINE_S):
        await joined.wait()
    async with running("elastic", "consume", orders, "billing", "a", "--json", *at) as command:
        warning = await command.event("warning")
        assert "max_ack_pending is 7 there and 1000 here" in warning["text"]
        assert (await command.end(signal.SIGINT)).returncode == 0
    await other.stop()


async def test_without_a_server_it_is_one_line() -> None:
    port = ReservedPort()
    done = await here("elastic", "consume", "S", "g", "a", "-s", f"nats://127.0.0.1:{port.number}")
    port.release()
    assert f"127.0.0.1:{port.number}" in done.refusal


async def test_a_member_that_gets_nothing_says_why_on_stderr(connection: Connection, orders: str, at: At) -> None:
    process = await asyncio.create_subprocess_exec(
        *KEYLANE, "elastic", "consume", orders, "billing", "b", *at,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            assert (await process.stdout.readline())[14:] == b"joined billing as b\n"
            process.terminate()
            _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    add = f"keylane elastic add {orders} billing b"
    assert errors.decode() == f"keylane: not listed, waiting for the group to list it: {add}\n"


async def test_its_metrics_are_on_a_port(connection: Connection, orders: str, at: At) -> None:
    options = ("--sleep", "0", "--json", "--metrics-port", "0", "--metrics-host", "127.0.0.1")
    async with running("elastic", "consume", orders, "billing", "a", *options, *at) as command:
        port = (await command.until(lambda line: line.get("event") == "metrics"))["port"]
        await publish(connection, orders, 30, keys=3)
        await command.until(lambda line: line.get("sequence") == 30)

        async def page(path: str) -> str:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            answer = (await reader.read()).decode()
            writer.close()
            return answer

        labels = f'{{group="billing",member="a",outcome="done",process="",stream="{orders}"}}'
        done = f"keylane_member_handler_tries_total{labels} 30.0"
        await until(lambda: page("/metrics"), lambda told: done in told)
        assert (await page("/readyz")).startswith("HTTP/1.1 200 ")
        assert (await command.end(signal.SIGINT)).returncode == 0

"""A user who may not do what is needed: one clear error in time, and nothing waits in silence."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import pytest

import keylane
from keylane import Connection, groups, priority
from keylane.errors import OutcomeUnknown, PermissionDenied, PublishDenied
from keylane.jetstream import (
    Bucket,
    ConnectionHooks,
    ConsumerConfig,
    Feed,
    Outgoing,
    PublishAck,
    consumers,
    open_feed,
    publish_atomic,
    publish_many,
    read_batch,
    streams,
)
from keylane.server import NatsServer
from tests.integration.groups.rig import Ground, make_ground

STREAM = "Orders"
IN_TIME_S = 10.0
"""Far below the timeouts that a silent refusal would run into."""


@contextmanager
def restricted(publish: Sequence[str], subscribe: Sequence[str]) -> Iterator[NatsServer]:
    """A server where `alice` may do all but these."""
    denied = {"publish": {"deny": list(publish)}, "subscribe": {"deny": list(subscribe)}}
    users = f"""authorization {{ users: [
        {{ user: admin, password: admin }}
        {{ user: alice, password: alice, permissions: {json.dumps(denied)} }}
    ] }}"""
    with NatsServer.start(extra_config=users) as server:
        yield server


@asynccontextmanager
async def ground(
    publish: Sequence[str] = (), subscribe: Sequence[str] = (), *, partitions: int | None = 4
) -> AsyncIterator[tuple[Ground, Connection, list[Exception]]]:
    """A stream with 20 messages, made by the admin; and alice's connection with its errors."""
    errors: list[Exception] = []
    with restricted(publish, subscribe) as server:
        async with (
            AsyncExitStack() as stack,
            await keylane.connect(server.url, user="admin", password="admin") as admin,  # noqa: S106
        ):
            made = await make_ground(stack, admin, STREAM, server.url, partitions=partitions, allow_direct=True)
            await made.publish(f"k{number}" for number in range(20))
            alice = await keylane.connect(
                server.url,
                user="alice",
                password="alice",  # noqa: S106
                hooks=ConnectionHooks(on_error=errors.append),
                request_timeout_s=30,
            )
            async with alice:
                yield made, alice, errors


async def make_group(made: Ground, kind: str) -> None:
    if kind == "static":
        await made.static(members=["m"])
    else:
        await made.elastic(members=["m"])


async def take_part(made: Ground, connection: Connection) -> None:
    await (await made.join("m", connection=connection)).wait()


async def read_to_the_end(feed: Feed) -> None:
    async for message in feed:
        message.ack()


def warnings_of(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and words in record.getMessage()
    ]


# ---- members ----------------------------------------------------------------------------------------------

NEEDED = [
    ("static", "$JS.API.CONSUMER.MSG.NEXT.Orders.g-m", "to pull messages"),
    ("static", "$JS.ACK.Orders.g-m.>", "to ack messages"),
    ("static", "$JS.API.CONSUMER.CREATE.Orders.g-m", "to create or change a consumer"),
    ("static", "$JS.API.CONSUMER.INFO.Orders.g-m", "to look at a consumer"),
    ("static", "$JS.API.STREAM.MSG.GET.KV_static-consumer-groups", "to read the records of static groups"),
    ("static", "$JS.API.STREAM.INFO.Orders", "to look at a stream"),
    ("elastic", "$JS.API.CONSUMER.MSG.NEXT.Orders-g.m", "to pull messages"),
    ("elastic", "$JS.ACK.Orders-g.m.>", "to ack messages"),
    ("elastic", "$JS.API.CONSUMER.CREATE.Orders-g.m", "to create or change a consumer"),
    ("elastic", "$JS.API.CONSUMER.RESET.Orders-g.m", "to keep each key's order"),
    ("elastic", "$JS.API.STREAM.MSG.GET.KV_elastic-consumer-groups", "to read the records of elastic groups"),
]


@pytest.mark.parametrize(("kind", "subject", "purpose"), NEEDED, ids=[f"{one[0]} {one[1]}" for one in NEEDED])
async def test_a_member_ends_with_what_it_may_not_do(
    kind: str, subject: str, purpose: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with ground(publish=[subject], partitions=4 if kind == "static" else None) as (made, alice, errors):
        await make_group(made, kind)
        async with asyncio.timeout(IN_TIME_S):
            with pytest.raises(PermissionDenied) as refused:
                await take_part(made, alice)
        beginning = subject.removesuffix(">")
        assert str(refused.value).startswith(f"user 'alice' may not publish to \"{beginning}")
        assert f"which it needs {purpose}" in str(refused.value)
        assert refused.value.operation == "publish"
        assert refused.value.subject.startswith(beginning)
        assert [type(error) for error in errors] == [PermissionDenied]
    assert len(warnings_of(caplog, beginning)) == 1, caplog.text


async def test_a_member_who_may_not_receive() -> None:
    with restricted([], ["_INBOX.>"]) as server:
        async with asyncio.timeout(IN_TIME_S):
            with pytest.raises(
                PermissionDenied, match=r"may not subscribe to \"_INBOX\..*to receive answers.*inbox_prefix"
            ):
                await keylane.connect(server.url, user="alice", password="alice")  # noqa: S106


OPTIONAL = [
    ("publish", "$JS.API.CONSUMER.UNPIN.Orders.g-m", "without it the next one begins after the pin's timeout"),
    ("subscribe", "$KV.static-consumer-groups.Orders.g", "without it changes are seen late"),
]


@pytest.mark.parametrize(("operation", "subject", "consequence"), OPTIONAL, ids=[one[1] for one in OPTIONAL])
async def test_what_a_member_can_do_without_is_said_once(
    operation: str, subject: str, consequence: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish, subscribe = ([subject], []) if operation == "publish" else ([], [subject])
    async with ground(publish, subscribe) as (made, alice, errors), asyncio.timeout(2 * IN_TIME_S):
        await make_group(made, "static")
        member = await made.join("m", connection=alice)
        await made.evidence.all_of(range(1, 21))
        await member.stop()
        assert await member.wait() == "stopped"
        (error,) = errors
        assert isinstance(error, PermissionDenied)
        assert (error.operation, error.subject) == (operation, subject)
        assert consequence in str(error)
    assert len(warnings_of(caplog, subject)) == 1, caplog.text


async def test_a_takeover_without_reset_ends_the_member() -> None:
    """Taking over without a reset would break the order: the standby says why it cannot."""
    async with ground(publish=["$JS.API.CONSUMER.RESET.Orders.g-m"]) as (made, alice, _), asyncio.timeout(30):
        await make_group(made, "static")
        stuck = asyncio.Event()

        async def block(_: object) -> None:
            await stuck.wait()

        other = await keylane.connect(made.url, user="admin", password="admin")  # noqa: S106
        first = await made.join("m", block, connection=other)
        await made.asked("m")
        standby = await made.join("m", connection=alice)
        await other.nats._close(other.nats.CLOSED)  # it is gone with messages at work
        with pytest.raises(PermissionDenied, match=r"CONSUMER\.RESET\.Orders\.g-m.*keep each key's order"):
            await standby.wait()
        stuck.set()
        del first


# ---- feeds, publishes, reads -------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", ["$JS.API.CONSUMER.MSG.NEXT.Orders.r", "$JS.ACK.Orders.r.>"])
async def test_a_feed_ends_with_what_it_may_not_do(subject: str, caplog: pytest.LogCaptureFixture) -> None:
    async with ground(publish=[subject]) as (made, alice, errors), asyncio.timeout(IN_TIME_S):
        await consumers.create(made.connection, STREAM, ConsumerConfig(durable_name="r"))
        async with await open_feed(alice, STREAM, "r") as feed:
            with pytest.raises(PermissionDenied, match="user 'alice' may not publish"):
                await read_to_the_end(feed)
            with pytest.raises(PermissionDenied):
                await feed.wait()
    assert len(errors) == len(warnings_of(caplog, "may not publish")) == 1, caplog.text


async def test_a_confirmed_ack_that_is_denied() -> None:
    async with ground(publish=["$JS.ACK.Orders.r.>"]) as (made, alice, _), asyncio.timeout(IN_TIME_S):
        await consumers.create(made.connection, STREAM, ConsumerConfig(durable_name="r"))
        async with await open_feed(alice, STREAM, "r") as feed:
            message = await feed.next(5)
            assert message is not None
            with pytest.raises(PermissionDenied, match="to ack messages"):
                await message.ack_confirmed(timeout_s=30)


async def test_a_priority_reader_that_may_not_pull() -> None:
    async with ground(publish=["$JS.API.CONSUMER.MSG.NEXT.Orders.p"]) as (made, alice, _), asyncio.timeout(IN_TIME_S):
        await consumers.create(
            made.connection,
            STREAM,
            ConsumerConfig(durable_name="p", priority_groups=("jobs",), priority_policy="overflow"),
        )
        with pytest.raises(PermissionDenied, match="to pull messages"):
            async with await priority.consume(alice, STREAM, "p", group="jobs") as feed:
                await anext(feed)


async def test_advisories_that_may_not_be_heard() -> None:
    async with ground(subscribe=["$JS.EVENT.>"]) as (_, alice, _), asyncio.timeout(IN_TIME_S):
        with pytest.raises(
            PermissionDenied, match=r"may not subscribe to \"\$JS\.EVENT\.ADVISORY.*to hear of advisories"
        ):
            async with priority.advisories(alice, STREAM):
                pass


async def test_a_publish_that_is_denied() -> None:
    async with ground(publish=["Orders.Secret.>"]) as (_, alice, errors), asyncio.timeout(IN_TIME_S):
        subjects = ["Orders.k1", "Orders.Secret.a", "Orders.Secret.a", "Orders.k2"]
        results = await publish_many(alice, [Outgoing(subject) for subject in subjects], timeout_s=30)
        assert [type(result) for result in results] == [PublishAck, PublishDenied, PublishDenied, PublishAck]
        assert "user 'alice' may not publish to \"Orders.Secret.a\", which it needs to publish messages" in str(
            results[1]
        )
        assert len(errors) == 1


@pytest.mark.parametrize("denied_at", [0, 1])
async def test_an_atomic_batch_with_a_message_that_is_denied(denied_at: int) -> None:
    async with ground(publish=["batch.Secret"]) as (made, alice, _), asyncio.timeout(IN_TIME_S):
        config = {"name": "batch", "subjects": ["batch.>"], "allow_atomic": True}
        await made.connection.api.request("STREAM.CREATE.batch", config)
        subjects = ["batch.k1", "batch.k2"]
        subjects[denied_at] = "batch.Secret"
        with pytest.raises(PublishDenied, match=r"may not publish to \"batch\.Secret"):
            await publish_atomic(alice, [Outgoing(subject) for subject in subjects], timeout_s=30)
        assert (await streams.state(made.connection, "batch")).messages == 0


async def test_answers_that_may_not_be_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this inbox is denied, so that it is not the connection's own requests that find out."""
    async with ground(subscribe=["Denied.>"]) as (made, alice, _), asyncio.timeout(IN_TIME_S):
        await consumers.create(made.connection, STREAM, ConsumerConfig(durable_name="r"))
        await alice.api.request("STREAM.NAMES")
        monkeypatch.setattr(alice.nats, "new_inbox", lambda: "Denied.inbox")
        told = r"may not subscribe to \"Denied\.inbox"
        (result,) = await publish_many(alice, [Outgoing("Orders.k1")], timeout_s=30)
        assert isinstance(result, OutcomeUnknown)
        assert "no answer can come: user 'alice' may not subscribe" in str(result)
        with pytest.raises(PermissionDenied, match=told):
            await read_batch(alice, STREAM, timeout_s=30)
        async with await open_feed(alice, STREAM, "r") as feed:
            with pytest.raises(PermissionDenied, match=told):
                await anext(feed)


async def test_reads_that_are_denied() -> None:
    denied = ["$JS.API.DIRECT.GET.Orders", "$JS.API.STREAM.MSG.GET.KV_b", "$KV.b.>"]
    async with ground(publish=denied) as (made, alice, _), asyncio.timeout(IN_TIME_S):
        with pytest.raises(PermissionDenied, match=r"DIRECT\.GET\.Orders.*direct get"):
            await read_batch(alice, STREAM, timeout_s=30)
        await Bucket(made.connection, "b").ensure(replicas=1)
        with pytest.raises(PermissionDenied, match="to read a KV bucket"):
            await Bucket(alice, "b").get("k")
        with pytest.raises(PermissionDenied, match="to write a record"):
            await Bucket(alice, "b").put("k", b"x", revision=0, timeout_s=30)


async def test_case_of_a_subject_is_kept() -> None:
    async with ground(publish=["$JS.API.STREAM.PURGE.Orders"]) as (made, alice, _), asyncio.timeout(IN_TIME_S):
        await streams.create(made.connection, streams.StreamConfig(name="orders", subjects=["lower.>"]))
        allowed = streams.purge(alice, "orders")
        refused = streams.purge(alice, "Orders")
        results = await asyncio.gather(allowed, refused, return_exceptions=True)
        assert results[0] == 0
        assert isinstance(results[1], PermissionDenied)
        assert results[1].subject == "$JS.API.STREAM.PURGE.Orders"


# ---- admins and the command ---------------------------------------------------------------------------------


async def test_an_admin_who_may_not() -> None:
    denied = ["$KV.static-consumer-groups.>", "$JS.API.STREAM.CREATE.Orders-e"]
    async with ground(publish=denied) as (made, alice, _), asyncio.timeout(IN_TIME_S):
        with pytest.raises(PermissionDenied, match="to write a record"):
            await groups.create_static(alice, STREAM, "s", partitions=4, members=["m"])
        with pytest.raises(PermissionDenied, match="to create a stream"):
            await groups.create_elastic(alice, STREAM, "e", partitions=4, partition_by=f"{STREAM}.*")
        assert await groups.list_groups(made.connection, STREAM) == []


@pytest.mark.parametrize(
    ("denied", "command"),
    [
        ("$JS.API.STREAM.MSG.GET.>", ["static", "info", "Orders", "g"]),
        ("$JS.API.CONSUMER.MSG.NEXT.>", ["static", "consume", "Orders", "g", "m"]),
        ("$JS.ACK.>", ["static", "consume", "Orders", "g", "m"]),
        ("$JS.API.STREAM.CREATE.>", ["elastic", "create", "Orders", "e", "4"]),
    ],
    ids=["info", "consume, pull", "consume, ack", "create"],
)
async def test_the_command_says_it_in_one_line(denied: str, command: list[str]) -> None:
    import sys  # noqa: PLC0415 - for the program's own path

    async with ground(publish=[denied]) as (made, _, _), asyncio.timeout(3 * IN_TIME_S):
        await make_group(made, "static")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "from keylane.cli.main import main; main()",
            *command,
            "--server",
            str(made.url),
            "--user",
            "alice",
            "--password",
            "alice",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        _, told = await process.communicate()
        assert process.returncode == 1
        (line,) = told.decode().splitlines()
        assert line.startswith("keylane: ")
        assert "user 'alice' may not publish to" in line
        assert denied.removesuffix(">") in line

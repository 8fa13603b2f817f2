"""The table of permissions in docs/connection.md: each program runs with exactly these, and is denied nothing."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from nats.js.api import SubjectTransform
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

import keylane
from keylane import Connection, groups
from keylane.exactly_once import ExactlyOnce
from keylane.jetstream import (
    ConnectionHooks,
    ConsumerConfig,
    Outgoing,
    PublishAck,
    consumers,
    open_feed,
    publish_many,
    streams,
)
from keylane.journal import Journal
from keylane.server import NatsServer
from tests.integration.groups.rig import QUICK, Evidence
from tests.waiter import until

GUIDE = (Path(__file__).parents[3] / "docs" / "connection.md").read_text()
SECTION = GUIDE.split("## Permissions")[1]
STREAM, GROUP, MEMBER = "ORDERS", "billing", "worker-1"
KEYS = [f"orders.k{number}" for number in range(20)]


def row(program: str) -> dict[str, list[str]]:
    """What the table allows this program."""
    (line,) = [line for line in SECTION.splitlines() if line.startswith(f"| {program} |")]
    _, _, publish, subscribe, _ = line.split("|")
    return {"publish": re.findall(r"`([^`]+)`", publish), "subscribe": re.findall(r"`([^`]+)`", subscribe)}


def extra(beginning: str) -> list[str]:
    """What the list below the table adds."""
    items = SECTION.split("A member also needs, to publish:")[1].split("\n\n")[1].replace("\n  ", " ").splitlines()
    (item,) = [item for item in items if item.startswith(f"- {beginning}")]
    return re.findall(r"`([^`]+)`", item.partition(":")[2])


class Restricted:
    """A server on which alice has certain permissions, and what she is denied."""

    def __init__(self, url: str, admin: Connection, stack: AsyncExitStack) -> None:
        self.url = url
        self.admin = admin
        self.stack = stack
        self.denied: list[Exception] = []

    async def alice(self) -> Connection:
        return await self.stack.enter_async_context(
            await keylane.connect(
                self.url,
                user="alice",
                password="alice",  # noqa: S106
                hooks=ConnectionHooks(on_error=self.denied.append),
            )
        )

    async def publish(self) -> list[int]:
        acks = await publish_many(self.admin, [Outgoing(key) for key in KEYS])
        return [ack.sequence for ack in acks if isinstance(ack, PublishAck)]


@asynccontextmanager
async def restricted(permissions: dict[str, list[str]], *, transform: bool = False) -> AsyncIterator[Restricted]:
    users = f"""authorization {{ users: [
        {{ user: admin, password: admin }}
        {{ user: alice, password: alice, permissions: {json.dumps(permissions)} }}
    ] }}"""
    partitioned = SubjectTransform(src="orders.*", dest="{{Partition(4,1)}}.orders.{{Wildcard(1)}}")
    with NatsServer.start(extra_config=users) as server:
        async with (
            AsyncExitStack() as stack,
            await keylane.connect(server.url, user="admin", password="admin") as admin,  # noqa: S106
            asyncio.timeout(40),
        ):
            config = streams.StreamConfig(name=STREAM, subjects=["orders.>"])
            config.subject_transform = partitioned if transform else None
            await streams.create(admin, config)
            yield Restricted(server.url, admin, stack)


async def test_a_publisher() -> None:
    async with restricted(row("publisher")) as place:
        alice = await place.alice()
        results = await publish_many(alice, [Outgoing(key) for key in KEYS])
        assert [type(result) for result in results] == [PublishAck] * 20
        assert place.denied == []


async def test_a_reader() -> None:
    async with restricted(row("reader of consumer `billing` (feed)")) as place:
        await consumers.create(place.admin, STREAM, ConsumerConfig(durable_name="billing"))
        await place.publish()
        async with await open_feed(await place.alice(), STREAM, "billing") as feed:
            for _ in KEYS:
                message = await feed.next(10)
                assert message is not None
                message.ack()
        assert place.denied == []


@pytest.mark.parametrize("kind", ["static", "elastic"])
async def test_a_member(kind: str) -> None:
    """Two instances, with a handover; an elastic one also gives partitions away and takes them back."""
    allowed = row(f"member of {'a static' if kind == 'static' else 'an elastic'} group")
    async with restricted(allowed, transform=kind == "static") as place:
        if kind == "static":
            await groups.create_static(place.admin, STREAM, GROUP, partitions=4, members=[MEMBER])
        else:
            await groups.create_elastic(
                place.admin, STREAM, GROUP, partitions=4, members=[MEMBER], partition_by="orders.*"
            )
        done = Evidence()
        sequences = await place.publish()
        first, second = [
            await groups.join(await place.alice(), STREAM, GROUP, MEMBER, done.handler(name), settings=QUICK)
            for name in ("first", "second")
        ]
        await done.all_of(sequences)
        ended, left = (first, second) if first.is_active else (second, first)
        await ended.stop()
        sequences += await place.publish()
        await done.all_of(sequences)
        if kind == "elastic":
            await groups.add_members(place.admin, STREAM, GROUP, ["worker-2"])
            other = await groups.join(place.admin, STREAM, GROUP, "worker-2", done.handler("other"), settings=QUICK)
            await until(lambda: asyncio.sleep(0, other.partitions), bool)
            sequences += await place.publish()
            await done.all_of(sequences)
            await groups.drop_members(place.admin, STREAM, GROUP, ["worker-2"])
            await until(lambda: asyncio.sleep(0, left.partitions), lambda seen: len(seen) == 4)
            await other.stop()
            await groups.drop_members(place.admin, STREAM, GROUP, [MEMBER])
            await until(lambda: asyncio.sleep(0, left.partitions), lambda seen: not seen)
        for member in (first, second):
            await member.stop()
        assert done.verdict(sequences).clean
        assert place.denied == []


async def test_a_member_with_dead_letters_and_a_journal() -> None:
    allowed = row("member of a static group")
    allowed["publish"] += extra("with `max_tries`") + extra("with a journal")

    async def fail(_: groups.GroupMessage) -> None:
        raise ValueError("not today")

    async with restricted(allowed, transform=True) as place:
        await groups.create_static(place.admin, STREAM, GROUP, partitions=4, members=[MEMBER])
        await place.publish()
        alice = await place.alice()
        async with Journal(alice, stream=STREAM) as journal:
            member = await groups.join(alice, STREAM, GROUP, MEMBER, fail, settings=QUICK, max_tries=1, journal=journal)
            await until(lambda: streams.names(place.admin), lambda names: f"{STREAM}@dlq" in names)
            await until(lambda: streams.state(place.admin, f"{STREAM}@dlq"), lambda state: state.messages == len(KEYS))
            await member.stop()
        assert (await streams.state(place.admin, f"{STREAM}+journal")).messages > 0
        assert place.denied == []


async def test_a_member_with_delayed_retries() -> None:
    allowed = row("member of a static group")
    allowed["publish"] += extra("with `max_tries`") + extra("with `retry_delays`")
    tries: list[int] = []

    async def fail(message: groups.GroupMessage) -> None:
        tries.append(message.sequence)
        raise ValueError("not today")

    async with restricted(allowed, transform=True) as place:
        await groups.create_static(place.admin, STREAM, GROUP, partitions=4, members=[MEMBER])
        await place.publish()
        member = await groups.join(await place.alice(), STREAM, GROUP, MEMBER, fail, settings=QUICK, retry_delays=[0.2])
        await until(lambda: len(tries) == 2 * len(KEYS))
        await until(lambda: streams.names(place.admin), lambda names: f"{STREAM}@dlq" in names)
        await until(lambda: streams.state(place.admin, f"{STREAM}@retry"), lambda state: state.messages == 0)
        await member.stop()
        assert place.denied == []


async def test_a_member_with_exactly_once(tmp_path: Path) -> None:
    allowed = row("member of an elastic group")
    allowed["publish"] += extra("with exactly once")
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'effects.db'}")
    done: list[int] = []

    async def effect(message: groups.GroupMessage, _: AsyncConnection) -> None:
        done.append(message.delivery_sequence)

    async with restricted(allowed) as place:
        await groups.create_elastic(place.admin, STREAM, GROUP, partitions=4, partition_by="orders.*", members=[MEMBER])
        await place.publish()
        handler = ExactlyOnce(engine).handler(effect)
        async with groups.join(await place.alice(), STREAM, GROUP, MEMBER, handler, settings=QUICK):
            await until(lambda: len(done) == len(KEYS))
        assert place.denied == []
    await engine.dispose()


async def test_an_admin() -> None:
    async with restricted(row("admin of the groups of `ORDERS`"), transform=True) as place:
        alice = await place.alice()
        await groups.create_static(alice, STREAM, "fixed", partitions=4, members=[MEMBER])
        await groups.create_elastic(alice, STREAM, GROUP, partitions=4, members=[MEMBER])
        await groups.add_members(alice, STREAM, GROUP, ["worker-2"])
        await groups.drop_members(alice, STREAM, GROUP, ["worker-2"])
        assert [one.group for one in await groups.list_groups(alice, STREAM)] == ["fixed", GROUP]
        done = Evidence()
        for group in ("fixed", GROUP):
            member = await groups.join(place.admin, STREAM, group, MEMBER, done.handler("m"), settings=QUICK)
            await until(lambda: asyncio.sleep(0, member.partitions), bool)  # noqa: B023 - awaited here
            assert await groups.member_info(alice, STREAM, group, MEMBER) is not None
            assert await groups.active_members(alice, STREAM, group) is not None
            await groups.step_down(alice, STREAM, group, MEMBER)
            await groups.delete(alice, STREAM, group)
            await member.wait()
        assert place.denied == []

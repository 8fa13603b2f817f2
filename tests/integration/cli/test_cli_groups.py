"""`keylane static` and `keylane elastic`: making, looking at, changing and deleting groups, against a real server."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from keylane import Connection, groups, priority
from keylane.cli.groups.render import render_group
from keylane.cli.groups.snapshot import group_object, read_snapshot
from keylane.groups import consumer_spec
from keylane.groups.store import bucket_of
from keylane.jetstream import ConsumerConfig, consumers, streams
from keylane.server import NatsServer
from tests.integration.cli.groups_rig import DEADLINE_S, Done, here, parted_stream, plain_stream, publish, run
from tests.waiter import until

pytestmark = pytest.mark.timeout(240)

Names = Callable[..., str]


@pytest.fixture
async def orders(connection: Connection, unique: Names) -> AsyncIterator[str]:
    async with plain_stream(connection, unique("ORDERS")) as name:
        yield name


@pytest.fixture
async def parted(connection: Connection, unique: Names) -> AsyncIterator[str]:
    async with parted_stream(connection, unique("PARTED"), 10) as name:
        yield name


@pytest.fixture
def at(nats_server: NatsServer) -> tuple[str, str]:
    return ("-s", nats_server.url)


async def names(connection: Connection, stream: str) -> list[str]:
    return [one.group for one in await groups.list_groups(connection, stream)]


async def held(connection: Connection, stream: str, messages: int) -> None:
    """Wait until a stream holds this many messages. The server tells nobody when it has copied one."""
    await until(
        lambda: streams.info(connection, stream), lambda seen: seen.state.messages >= messages, deadline_s=DEADLINE_S
    )


async def nothing(_: groups.GroupMessage) -> None:
    """A handler that has nothing to do."""


# ---- from creation to deletion ------------------------------------------------------------------------


async def test_the_life_of_a_static_group(connection: Connection, parted: str, at: tuple[str, str]) -> None:
    done = await run("static", "create", "balanced", parted, "billing", "10", "m1", "m2", *at)
    assert done == Done(0, f"created static group 'billing' of stream '{parted}': 10 partitions, members m1, m2\n", "")
    assert await groups.get_config(connection, parted, "billing") == groups.StaticConfig(
        partitions=10, members=("m1", "m2")
    )
    mapped = await here(
        "static", "create", "mapped", parted, "audit", "10", "m1:0-7", "m2:8,9",
        "--filter", f"{parted}.a", "--filter", f"{parted}.b", "--stop-go-members", "--json", *at,
    )  # fmt: skip
    audit = {
        "stream": parted,
        "group": "audit",
        "kind": "static",
        "max_members": 10,
        "filters": [f"{parted}.a", f"{parted}.b"],
        "dialect": "present",
        "mapped": True,
        "members": [
            {"member": "m1", "partitions": [0, 1, 2, 3, 4, 5, 6, 7]},
            {"member": "m2", "partitions": [8, 9]},
        ],
        "unowned": [],
    }
    assert mapped.json == audit
    listed = await run("static", "ls", parted, *at)
    as_json = await here("static", "ls", parted, "--json", *at)
    assert re.search(rf"audit +10 +{parted}\.a +2 mapped: m1, m2 *\n +{parted}\.b", listed.stdout)
    assert re.search(r"billing +10 +none \(every subject\) +2 balanced: m1, m2", listed.stdout)
    assert as_json.json["kind"] == "static"
    assert as_json.json["groups"][0] == audit
    done = await here("static", "delete", parted, "billing", "--force", *at)
    assert done == Done(0, f"deleted static group 'billing' of stream '{parted}'\n", "")
    assert await names(connection, parted) == ["audit"]


async def test_the_life_of_an_elastic_group(connection: Connection, orders: str, at: tuple[str, str]) -> None:
    where = (orders, "billing")
    created = await run(
        "elastic", "create", *where, "6", f"{orders}.a.*.*", "2", "1", f"{orders}.b.*", "1",
        "--max-buffered-msgs", "500", "--max-buffered-bytes", "100000", "--json", *at,
    )  # fmt: skip
    assert created.json == {
        "stream": orders,
        "group": "billing",
        "kind": "elastic",
        "max_members": 6,
        "partitioning": [
            {"filter": f"{orders}.a.*.*", "wildcards": [2, 1]},
            {"filter": f"{orders}.b.*", "wildcards": [1]},
        ],
        "max_buffered_messages": 500,
        "max_buffered_bytes": 100000,
        "dialect": "present",
        "mapped": False,
        "members": [],
        "unowned": [0, 1, 2, 3, 4, 5],
    }
    added = await run("elastic", "add", *where, "a", "b", *at)
    assert (added.returncode, added.stderr) == (0, "")
    assert "billing: 6 of 6 partitions change hands" in added.stdout
    assert re.search(r"a +none +0-2 \+3", added.stdout)

    added = await here("elastic", "add", *where, "b", "c", "--plan", "sticky", "--stop-go-members", "--json", *at)
    assert added.json["mapped"] is True
    assert added.json["moves"] == 2
    assert {one["to"] for one in added.json["moved"]} == {"c"}
    assert added.json["notes"] == ["b was in the group already"]

    refused = await here("elastic", "drop", *where, "a", *at)
    assert "has a mapping, and balanced would throw it away: give --plan sticky" in refused.refusal
    dropped = await run("elastic", "drop", *where, "a", "--plan", "sticky", "--json", *at)
    assert [one["member"] for one in dropped.json["members"]] == ["b", "c"]
    assert {one["from"] for one in dropped.json["moved"]} == {"a"}

    mapped = await here("elastic", "create-mapping", *where, "x:0-4", "y:5", "--json", *at)
    assert mapped.json["members"] == [
        {"member": "x", "partitions": [0, 1, 2, 3, 4]},
        {"member": "y", "partitions": [5]},
    ]
    unmapped = await here("elastic", "delete-mapping", *where, "--force", *at)
    assert "nobody owns partitions 0-5 now: their messages wait" in unmapped.stdout
    assert (await groups.get_config(connection, *where)).plan.members == ()
    deleted = await here("elastic", "delete", *where, "-f", "--json", *at)
    assert deleted.json == {"stream": orders, "group": "billing", "kind": "elastic", "deleted": True}
    assert await names(connection, orders) == []
    assert f"{orders}-billing" not in await streams.names(connection)


async def test_without_filters_whole_subjects_are_hashed(
    connection: Connection, orders: str, at: tuple[str, str]
) -> None:
    assert (await here("elastic", "create", orders, "all", "4", *at)).returncode == 0
    config = await groups.get_config(connection, orders, "all")
    assert isinstance(config, groups.ElasticConfig)
    assert config.partitioning == ()
    listed = await here("elastic", "ls", orders, *at)
    assert re.search(r"all +4 +none \(every subject, hashed whole\) +nobody", listed.stdout)


async def test_the_other_words_of_the_cg_tool(orders: str, at: tuple[str, str]) -> None:
    async def said(*words: str) -> Any:
        return (await here("elastic", *words, "--json", *at)).json

    await said("create", orders, "g", "4", f"{orders}.*", "1", "--dialect", "go-0.1")
    for word in ("createmapping", "cm"):
        assert (await said(word, orders, "g", "a:0,1", "b:2,3"))["mapped"] is True
    for word in ("memberinfo", "minfo"):
        assert (await said(word, orders, "g", "a"))["partitions"] == [0, 1]
    for word in ("list", "ls"):
        assert [one["dialect"] for one in (await said(word, orders))["groups"]] == ["go-0.1"]
    for word in ("deletemapping", "dm"):
        assert (await said(word, orders, "g", "--force"))["unowned"] == [0, 1, 2, 3]
        await said("cm", orders, "g", "a:0-3")
    assert (await said("rm", orders, "g", "-f"))["deleted"] is True


async def test_two_kinds_of_one_name_are_told_apart(connection: Connection, parted: str, at: tuple[str, str]) -> None:
    """The Go tool lets both be made."""
    await groups.create_static(connection, parted, "twin", partitions=10, members=["a"])
    record = groups.ElasticConfig(partitions=4, members=("b",)).to_json()
    await bucket_of(connection, "elastic").ensure(replicas=1)
    await bucket_of(connection, "elastic").put(f"{parted}.twin", record, revision=0)
    assert (await here("static", "info", parted, "twin", "--json", *at)).json["max_members"] == 10
    assert (await here("elastic", "info", parted, "twin", "--json", *at)).json["max_members"] == 4
    assert (await here("static", "delete", parted, "twin", "--force", *at)).returncode == 0
    assert [one.kind for one in await groups.list_groups(connection, parted)] == ["elastic"]


# ---- asking first -------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["n\n", "\n", "", "yess\n", "delete\n"])
async def test_only_a_yes_deletes(connection: Connection, parted: str, at: tuple[str, str], answer: str) -> None:
    await groups.create_static(connection, parted, "billing", partitions=10, members=["m1"])
    done = await here("static", "delete", parted, "billing", "--json", *at, stdin=answer)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"Delete static group 'billing' of stream '{parted}'? Its members end. [y/N] ")
    assert "keylane: nothing was deleted" in done.stderr
    assert ("--force does not ask" in done.stderr) == (answer == "")
    assert await names(connection, parted) == ["billing"]


async def test_a_yes_deletes(connection: Connection, orders: str, at: tuple[str, str]) -> None:
    where = (orders, "billing")
    await groups.create_elastic(connection, *where, partitions=4, partition_by=f"{orders}.*")
    await groups.set_mapping(connection, *where, {"a": range(4)})
    await publish(connection, orders, 3)
    await held(connection, f"{orders}-billing", 3)
    no = await run("elastic", "delete-mapping", *where, *at, stdin="no\n")
    assert (no.returncode, no.stdout) == (1, "")
    assert "Nobody gets messages after that. [y/N] keylane: nothing was changed\n" in no.stderr
    assert (await groups.get_config(connection, *where)).has_member("a")
    yes = await here("elastic", "delete-mapping", *where, *at, stdin="yes\n")
    assert yes.returncode == 0
    assert not (await groups.get_config(connection, *where)).has_member("a")
    yes = await run("elastic", "delete", *where, *at, stdin="Y\n")
    assert yes.returncode == 0
    assert "3 messages wait in its queue" in yes.stderr
    assert await names(connection, orders) == []


# ---- info ---------------------------------------------------------------------------------------------


async def test_info_draws_who_owns_what(connection: Connection, orders: str, at: tuple[str, str]) -> None:
    where = (orders, "billing")
    await groups.create_elastic(
        connection,
        *where,
        partitions=6,
        partition_by=f"{orders}.*",
        members=["a", "b"],
        max_buffered_messages=200,
    )
    started, free = asyncio.Event(), asyncio.Event()

    async def handler(_: groups.GroupMessage) -> None:
        started.set()
        await free.wait()

    member = await groups.join(connection, *where, "a", handler, max_ack_pending=3)
    await publish(connection, orders, 50, keys=40)
    await held(connection, f"{orders}-billing", 50)
    async with asyncio.timeout(DEADLINE_S):
        await started.wait()
    await until(lambda: consumers.info(connection, f"{orders}-billing", "a"), lambda info: info.num_ack_pending >= 3)
    shown = await run("elastic", "info", *where, *at)
    as_json = await here("elastic", "info", *where, "--json", *at)
    one = await run("elastic", "member-info", *where, "a", *at)
    absent = await here("elastic", "member-info", *where, "b", "--json", *at)
    info = await groups.member_info(connection, *where, "a")
    free.set()
    await member.stop()
    assert info is not None
    pin = info.priority_groups[0].pinned_client_id
    assert info.num_ack_pending == 3
    pending = info.num_pending
    assert pending > 3
    process = f"{re.escape(socket.gethostname())} pid {os.getpid()}"
    assert (shown.returncode, shown.stderr) == (0, "")
    for line in (
        rf"─ {orders} / billing ─",
        r"elastic +6 partitions, balanced over 2 members",
        rf"filters +{orders}\.\*, key: wildcard 1",
        rf"queue +50 messages, [\d.]+ kB in stream {orders}-billing",
        r"buffer +25% of 200 messages; when full, the server pauses sourcing for about two seconds",
        r"member +partitions +state +instance +for +pending +ack pending",
        rf"a +0-2 +active +{process} +\d+ s +{pending} +3",
        r"b +3-5 +absent +nobody +- +- +-",
        rf"total +{pending} +3",
    ):
        assert re.search(line, shown.stdout), f"{line} is not in\n{shown.stdout}"
    told = as_json.json
    assert told["queue"] == {
        "stream": f"{orders}-billing",
        "messages": 50,
        "bytes": told["queue"]["bytes"],
        "max_messages": 200,
        "max_bytes": None,
        "fill": 0.25,
        "source_lag": 0,
    }
    active, other = told["members"]
    assert active.pop("pinned_since").endswith("Z")
    assert active.pop("waiting_pulls") >= 0
    assert active == {
        "member": "a",
        "partitions": [0, 1, 2],
        "state": "active",
        "covered": [0, 1, 2],
        "consumer": "a",
        "pinned_id": pin,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pending": pending,
        "ack_pending": 3,
        "max_ack_pending": 3,
        "redelivered": 0,
    }
    assert other["state"] == "absent"
    assert {name for name, value in other.items() if value is None} == other.keys() - {
        "member", "partitions", "state",
    }  # fmt: skip
    assert re.search(rf"instance +{process} for \d+ s", one.stdout)
    assert re.search(rf"pin +{pin}", one.stdout)
    assert re.search(r"ack pending +3 of 3", one.stdout)
    assert absent.json == {"stream": orders, "group": "billing", "kind": "elastic"} | other


async def test_info_while_partitions_move(connection: Connection, orders: str, at: tuple[str, str]) -> None:
    """A member whose consumer is not yet what the plan says, and one that is not in the group any more."""
    where = (orders, "billing")
    config = await groups.create_elastic(
        connection, *where, partitions=6, partition_by=f"{orders}.*", members=["a", "b"]
    )
    kept = ConsumerConfig(inactive_threshold_s=60)
    for member in ("a", "b"):
        wanted = consumer_spec.consumer_config(config, "billing", member, kept)
        await consumers.create(connection, f"{orders}-billing", wanted)
    await groups.drop_members(connection, *where, ["b"])
    shown = await here("elastic", "info", *where, *at)
    as_json = await here("elastic", "info", *where, "--json", *at)
    assert re.search(r"a +0-5 \(still reads 0-2\) +absent", shown.stdout)
    assert re.search(r"b +none \(still reads 3-5\) +leaving", shown.stdout)
    assert [(one["member"], one["state"], one["covered"]) for one in as_json.json["members"]] == [
        ("a", "absent", [0, 1, 2]),
        ("b", "leaving", [3, 4, 5]),
    ]


async def test_info_of_a_full_queue_and_of_none(connection: Connection, orders: str, at: tuple[str, str]) -> None:
    where = (orders, "billing")
    await groups.create_elastic(connection, *where, partitions=3, partition_by=f"{orders}.*", max_buffered_messages=5)
    await publish(connection, orders, 30)
    await held(connection, f"{orders}-billing", 5)
    shown = await here("elastic", "info", *where, *at)
    assert re.search(r"unowned +0-2: nobody gets their messages", shown.stdout)
    assert re.search(r"buffer +100% of 5 messages; when full, the server pauses", shown.stdout)
    assert re.search(rf"behind +about \d+ messages of {orders} are not copied yet", shown.stdout)
    await streams.delete(connection, f"{orders}-billing")
    shown = await here("elastic", "info", *where, *at)
    as_json = await here("elastic", "info", *where, "--json", *at)
    assert re.search(rf"queue +{orders}-billing does not exist", shown.stdout)
    assert as_json.json["queue"] is None


@pytest.mark.alone("measures a request")
async def test_info_of_a_large_group_is_one_list(
    connection: Connection, nats_server: NatsServer, orders: str, at: tuple[str, str]
) -> None:
    """1,000 partitions and 50 members: the same few requests as for one member, and well within a second."""
    members = [f"worker-{number:02}" for number in range(50)]
    config = await groups.create_elastic(
        connection, orders, "big", partitions=1000, partition_by=f"{orders}.*", members=members
    )
    kept = ConsumerConfig(inactive_threshold_s=60)
    for member in members:
        await consumers.create(
            connection, f"{orders}-big", consumer_spec.consumer_config(config, "big", member, kept), action="create"
        )
    asked: list[str] = []

    async def note(message: Any) -> None:
        asked.append(message.subject)

    subscription = await connection.nats.subscribe("$JS.API.>", cb=note)
    done = await run("elastic", "info", orders, "big", "--json", *at)
    await connection.nats.flush()
    await subscription.unsubscribe()
    assert [one["partitions"] for one in done.json["members"]] == [
        list(range(first, first + 20)) for first in range(0, 1000, 20)
    ]
    assert all(one["covered"] == one["partitions"] for one in done.json["members"])
    assert asked.count(f"$JS.API.CONSUMER.LIST.{orders}-big") == 1
    assert len(asked) < 8
    assert not [one for one in asked if ".CONSUMER.INFO." in one]

    took_s = []
    for _ in range(5):  # the machine may stand still in one of them
        began = time.perf_counter()
        sight = await read_snapshot(connection, "elastic", orders, "big")
        screen = Console(width=100)
        with screen.capture() as captured:
            screen.print(render_group(sight, datetime.now(UTC), width=100))
        took_s.append(time.perf_counter() - began)
        assert len(captured.get().splitlines()) > 50
        assert len(group_object(sight)["members"]) == 50
    assert min(took_s) < 1, took_s


# ---- step-down ----------------------------------------------------------------------------------------


async def test_step_down_says_who_was_pinned_and_who_is(
    connection: Connection, orders: str, at: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = (orders, "billing")
    await groups.create_elastic(connection, *where, partitions=2, partition_by=f"{orders}.*", members=["a"])
    alone = await here("elastic", "step-down", *where, "a", *at)
    assert "member 'a' of group 'billing' has no running instance that could step down" in alone.refusal
    active = asyncio.Event()
    hooks = groups.MemberHooks(on_activated=active.set)
    member = await groups.join(connection, *where, "a", nothing, hooks=hooks)
    await publish(connection, orders, 1)
    async with asyncio.timeout(DEADLINE_S):
        await active.wait()
    before = await _pin(connection, where)

    async def publish_once_unpinned(events: AsyncIterator[priority.Pinned | priority.Unpinned]) -> None:
        async for event in events:
            if isinstance(event, priority.Unpinned):
                await publish(connection, orders, 1)
                return

    async with priority.advisories(connection, f"{orders}-billing", "a") as events:
        publishing = asyncio.create_task(publish_once_unpinned(events))
        with monkeypatch.context() as patient:  # this machine may take longer than a second
            patient.setattr("keylane.cli.command.NEXT_PIN_S", DEADLINE_S)
            done = await here("elastic", "step-down", *where, "a", *at)
        async with asyncio.timeout(DEADLINE_S):
            await publishing
    assert (done.returncode, done.stderr) == (0, "")
    now = await _pin(connection, where)
    assert before != now
    assert done.stdout == f"unpinned {before}\npinned now: {now}\n"
    as_json = await here("elastic", "sd", *where, "a", "--json", *at)
    assert as_json.json == {
        "stream": orders, "group": "billing", "member": "a", "unpinned_id": now, "pinned_id": None,
    }  # fmt: skip
    await member.stop()


async def _pin(connection: Connection, where: tuple[str, str]) -> str | None:
    info = await groups.member_info(connection, *where, "a")
    assert info is not None
    return info.priority_groups[0].pinned_client_id

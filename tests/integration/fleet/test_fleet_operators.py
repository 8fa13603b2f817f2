"""What operators do and see: a worker is drained and resumed, and the history tells what moved."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime

import pytest
from rich.console import Console
from typer.testing import CliRunner

from keylane import fleet
from keylane.cli.fleet.commands import app
from keylane.cli.fleet.render import history_table
from keylane.errors import InvalidInput, NotAMember
from tests.integration.fleet.rig import KEYS, FleetGround
from tests.integration.groups.rig import flawless
from tests.waiter import until


async def test_a_drained_worker_has_nothing_until_it_is_resumed(limits: FleetGround) -> None:
    a, b = await limits.join("a"), await limits.join("b")
    await limits.shared(a, b)
    async with limits.load() as sent:
        await fleet.drain(limits.connection, limits.stream, "f", "f-1")
        await limits.shared(a)
        assert not b.partitions
        assert await until(lambda: b.waiting_for) == "an operator, who has drained this worker, to resume it"
        await fleet.resume(limits.connection, limits.stream, "f", "f-1")
        await limits.shared(a, b)
    await limits.evidence.all_of(sent)
    assert flawless(limits.evidence.verdict(sent))
    newest = (await fleet.status(limits.connection, limits.stream, "f")).version
    first, *_, drained, resumed = await until(
        lambda: fleet.history(limits.connection, limits.stream, "f"),
        lambda seen: [one.version for one in seen] == list(range(1, newest + 1)),
    )
    assert first.cause == "start"
    assert {move.before for move in first.moves} == {None}
    assert (drained.cause, drained.reason) == ("drain", "worker 1 drained")
    assert {(move.before, move.after) for move in drained.moves} == {("f-1", "f-0")}
    assert {(move.before, move.after) for move in resumed.moves} == {("f-0", "f-1")}


async def test_a_restart_ends_a_drain(limits: FleetGround) -> None:
    a, b = await limits.join("a"), await limits.join("b")
    await limits.shared(a, b)
    await fleet.drain(limits.connection, limits.stream, "f", "f-1")
    await limits.shared(a)
    await b.stop()
    b = await limits.join("b")
    await limits.shared(a, b)
    assert b.id == "f-1"


async def test_who_cannot_be_drained(limits: FleetGround) -> None:
    a = await limits.join("a")
    await limits.shared(a)
    with pytest.raises(NotAMember, match="worker 'f-7' of fleet 'f' does not run"):
        await fleet.drain(limits.connection, limits.stream, "f", "f-7")
    with pytest.raises(InvalidInput, match="they are called f-<number>"):
        await fleet.drain(limits.connection, limits.stream, "f", "7")
    await fleet.drain(limits.connection, limits.stream, "f", "f-0")  # nobody else could take its partitions
    sent = await limits.publish(KEYS)
    await limits.evidence.all_of(sent)


async def test_the_commands_of_operators(limits: FleetGround) -> None:
    a, b = await limits.join("a"), await limits.join("b")
    await limits.shared(a, b)

    async def told(command: str, *arguments: str) -> str:
        """What a command prints. In a thread and not in a process, which would take a second to start."""
        line = [command, limits.stream, "f", *arguments, "-s", limits.url]
        done = await asyncio.to_thread(CliRunner().invoke, app, line, catch_exceptions=False)
        assert done.exit_code == 0, done.stderr
        return done.stdout

    said = await told("drain", "f-1")
    assert said == f"f-1 hands its partitions over: `keylane fleet status {limits.stream} f` shows how far it is\n"
    await limits.shared(a)
    status = json.loads(await told("status", "--json"))
    assert [(one["id"], one["is_drained"]) for one in status["workers"]] == [("f-0", False), ("f-1", True)]
    assert "live, drained" in await told("status")
    await until(
        lambda: fleet.history(limits.connection, limits.stream, "f"), lambda seen: seen[-1].version == status["version"]
    )
    first, *_, drained = json.loads(await told("history", "--json"))
    assert (first["cause"], first["version"], drained["cause"]) == ("start", 1, "drain")
    assert [(one["before"], one["after"]) for one in drained["moves"]] == [("f-1", "f-0")]
    assert drained["at"] in (await told("history")).splitlines()[-1]
    assert json.loads(await told("resume", "f-1", "--json"))["was_drained"] is True
    assert await told("resume", "f-1") == "f-1 was not drained: nothing has changed\n"
    with pytest.raises(NotAMember, match="worker 'f-7' of fleet 'f' does not run"):
        await told("drain", "f-7")


def test_the_history_as_a_table() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, 678_000, UTC)
    new = fleet.MovedPartitions(before=None, after="f-0", partitions=("0", "1", "2"))
    moved = fleet.MovedPartitions(before="f-1", after="f-0", partitions=("7",))
    found = [
        fleet.PastAssignment(at=at, epoch=1, version=1, cause="start", reason="[0] came", moves=(new, moved)),
        fleet.PastAssignment(at=at, epoch=2, version=2, cause="leader", reason="another leader", moves=()),
    ]
    screen = Console(width=120)
    with screen.capture() as shown:
        screen.print(history_table(found))
    assert [line.split() for line in shown.get().splitlines()] == [
        ["written", "version", "epoch", "cause", "reason", "moves"],
        ["2026-01-02T03:04:05.678Z", "1", "1", "start", "[0]", "came", "0-2:", "nobody", "→", "f-0"],
        ["7:", "f-1", "→", "f-0"],
        ["2026-01-02T03:04:05.678Z", "2", "2", "leader", "another", "leader", "nothing"],
    ]

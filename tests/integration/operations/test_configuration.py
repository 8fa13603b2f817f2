"""`keylane plan` and `keylane apply` on a real server, also with somebody else in between."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from keylane import Connection, fleet, groups
from keylane.cli.main import main
from keylane.core.configuration_difference import ConfigurationPlan, PlannedStep
from keylane.core.configuration_file import ResourceKey, WantedResource
from keylane.dead_letters import dead_letter_stream
from keylane.errors import InvalidInput, RevisionConflict
from keylane.fleet.store import FLEET_BUCKET
from keylane.jetstream import Bucket, Outgoing, consumers, publish_many, streams
from keylane.operations.configuration import make_plan, perform, read_configuration_file
from keylane.server import NatsServer
from tests.waiter import until


@dataclass
class Place:
    """A file about one stream, and the server that it is for."""

    connection: Connection
    stream: str
    path: Path
    said: list[str] = field(default_factory=list)

    def write(self, text: str) -> dict[ResourceKey, WantedResource]:
        self.path.write_text(text.replace("ORDERS", self.stream).replace("orders", self.stream.lower()))
        return read_configuration_file(self.path)

    async def plan(self, text: str) -> ConfigurationPlan:
        return await make_plan(self.connection, self.write(text))

    async def apply(self, text: str) -> list[str]:
        """What was done, in order."""
        wanted = self.write(text)
        plan = await make_plan(self.connection, wanted)
        assert plan.refused == ()
        self.said.clear()
        await perform(self.connection, plan, wanted, self._say)
        return list(self.said)

    def _say(self, step: PlannedStep) -> None:
        self.said.append(f"{step.action} {step.key.kind} {step.key.name}".strip())

    async def publish(self, keys: int) -> None:
        subjects = [f"{self.stream.lower()}.k{number}" for number in range(keys)]
        await publish_many(self.connection, [Outgoing(subject, b"x") for subject in subjects])


@pytest.fixture
async def place(connection: Connection, unique: Callable[..., str], tmp_path: Path) -> AsyncIterator[Place]:
    made = Place(connection, unique("P"), tmp_path / "shop.toml")
    yield made
    for one in await groups.list_groups(connection, made.stream):
        await groups.delete(connection, one.stream, one.group, kind=one.kind)
    for entry in await Bucket(connection, FLEET_BUCKET).entries(made.stream):
        if entry.value is not None:
            await Bucket(connection, FLEET_BUCKET).delete(entry.key, revision=entry.revision)
    for name in await streams.names(connection):
        if name.startswith(made.stream):
            await streams.delete(connection, name)


SHOP = """
[streams.ORDERS]
partition_by = "orders.*"
partitions = 8
max_age = "30d"
max_bytes = "1GiB"
duplicate_window = "5m"
description = "what customers want"
dead_letters = { max_age = "90d", max_messages = 1000 }

[streams.ORDERS.static.audit]
members = ["x", "y"]

[streams.ORDERS.elastic.billing]
partitions = 4
partition_by = { filter = "*.orders.*", key = [2] }
members = ["a", "b"]
max_buffered_messages = 1000

[streams.ORDERS.fleets.shipping]
lease_s = 2
"""


async def test_all_of_it_is_made_and_a_second_time_changes_nothing(place: Place) -> None:
    assert await place.apply(SHOP) == [
        "create stream",
        "create dead letters",
        "create static audit",
        "create elastic billing",
        "create fleet shipping",
    ]
    assert await place.apply(SHOP) == []
    config = (await streams.info_json(place.connection, place.stream))["config"]
    assert config["max_age"] == 30 * 86_400_000_000_000
    assert config["duplicate_window"] == 300_000_000_000
    assert config["subject_transform"]["dest"].startswith("{{Partition(8,1)}}.")
    letters = (await streams.info_json(place.connection, dead_letter_stream(place.stream)))["config"]
    assert (letters["max_msgs"], letters["discard"]) == (1000, "new")
    audit = await groups.get_config(place.connection, place.stream, "audit")
    assert audit.plan.partitions_of("y") == (4, 5, 6, 7)


async def test_a_worker_joins_the_fleet_that_the_file_made(place: Place) -> None:
    await place.apply(SHOP)
    handled: list[str] = []

    async def handler(message: Any) -> None:
        handled.append(message.key)

    by = fleet.hashed(8, f"{place.stream.lower()}.*")
    async with fleet.join(place.connection, place.stream, "shipping", handler, partitions=by, lease_s=2) as worker:
        await until(lambda: len(worker.partitions) == 8)
        await place.publish(20)
        await until(lambda: len(handled) == 20)
        assert await place.apply(SHOP) == [], "a running fleet is as the file says"
        plan = await place.plan("[streams.ORDERS.fleets.shipping]\nabsent = true")
        assert [one.reason for one in plan.refused] == ["1 of its workers run"]


async def test_members_move_and_other_fields_are_left_alone(place: Place) -> None:
    await place.apply(SHOP)
    config = (await streams.info_json(place.connection, place.stream))["config"]
    await streams.update_json(place.connection, {**config, "max_msgs": 77_777})
    more = SHOP.replace('["a", "b"]', '["a", "b", "c"]').replace("30d", "20d")
    [stream, group] = (await place.plan(more)).steps
    assert [one.name for one in stream.changes] == ["max_age"]
    assert group.notes[0].startswith("moves 3 of 4 partitions")
    assert await place.apply(more) == ["change stream", "change elastic billing"]
    assert (await streams.info_json(place.connection, place.stream))["config"]["max_msgs"] == 77_777
    billing = await groups.get_config(place.connection, place.stream, "billing")
    assert billing.plan.members == ("a", "b", "c")
    mapped = SHOP.replace('members = ["a", "b"]', "mapping = { a = [0, 1, 2], b = [3] }").replace("30d", "20d")
    assert await place.apply(mapped) == ["change elastic billing"]
    billing = await groups.get_config(place.connection, place.stream, "billing")
    assert billing.plan.partitions_of("a") == (0, 1, 2)
    assert await place.apply(mapped) == []


async def test_members_that_the_file_leaves_out_come_and_go_by_themselves(place: Place) -> None:
    await place.apply(SHOP)
    await groups.add_members(place.connection, place.stream, "billing", ["c"])
    assert (await place.plan(SHOP.replace('members = ["a", "b"]\n', ""))).is_empty


async def test_what_would_lose_messages_or_order_is_refused_and_changes_nothing(place: Place) -> None:
    await place.apply(SHOP)
    await place.publish(10)
    before = (await streams.info_json(place.connection, place.stream))["config"]
    for changed, words, way in (
        (SHOP.replace("partitions = 8", "partitions = 16"), "mix the order of keys", "keylane stream create"),
        (SHOP.replace("1GiB", "100"), "would delete what is beyond", "nats stream purge"),
        (SHOP.replace('"y"', '"z"'), "a static group never changes", "static delete"),
        (SHOP.replace("partitions = 4", "partitions = 5"), "is fixed when it is created", "another name"),
        (SHOP.replace("lease_s = 2", "lease_s = 4"), "lease_s of a fleet is fixed", "another name"),
    ):
        plan = await place.plan(changed)
        said = [(one.reason, one.command) for one in plan.refused]
        assert any(words in reason and way in command for reason, command in said), said
    assert (await streams.info_json(place.connection, place.stream))["config"] == before


ONLY_FLEET = SHOP.split("[streams.ORDERS.static", maxsplit=1)[0] + "\n[streams.ORDERS.fleets.shipping]\nlease_s = 2\n"


async def test_a_fleet_alone_is_told_how_to_repartition(place: Place) -> None:
    await place.apply(ONLY_FLEET)
    plan = await place.plan(ONLY_FLEET.replace("partitions = 8", "partitions = 16"))
    assert {one.command.split(",")[0] for one in plan.refused} == {
        f"keylane fleet repartition {place.stream} shipping 16"
    }
    handler = asyncio.Event()

    async def wait(_: Any) -> None:
        await handler.wait()

    by = fleet.hashed(8, f"{place.stream.lower()}.*")
    async with fleet.join(place.connection, place.stream, "shipping", wait, partitions=by, lease_s=2):
        await fleet.repartition(place.connection, place.stream, "shipping", 16)
    assert (await place.plan(ONLY_FLEET.replace("partitions = 8", "partitions = 16"))).is_empty


GONE = """
[streams.ORDERS]
absent = true
[streams.ORDERS.dead_letters]
absent = true
[streams.ORDERS.static.audit]
absent = true
[streams.ORDERS.elastic.billing]
absent = true
[streams.ORDERS.fleets.shipping]
absent = true
"""


async def test_nothing_is_deleted_that_the_file_does_not_say(place: Place) -> None:
    await place.apply(SHOP)
    await place.publish(3)
    only_stream = "[streams.ORDERS]\nmax_age = '30d'\n"
    assert (await place.plan(only_stream)).is_empty, "what is not named is left alone"
    plan = await place.plan("[streams.ORDERS]\nabsent = true\n")
    assert ["would remain without it" in one.reason for one in plan.refused] == [True]
    plan = await place.plan(GONE)
    assert plan.steps[-1].notes == ("3 messages are deleted with it",)
    done = await place.apply(GONE)
    assert done[-1] == "delete stream"
    assert await place.apply(GONE) == []
    assert [name for name in await streams.names(place.connection) if name.startswith(place.stream)] == []
    left = await Bucket(place.connection, FLEET_BUCKET).entries(place.stream)
    assert [one.key for one in left if one.value is not None] == []


async def test_a_fleet_is_deleted_with_its_consumers_and_no_others(place: Place) -> None:
    await place.apply(ONLY_FLEET)

    async def handler(_: Any) -> None:
        return

    by = fleet.hashed(8, f"{place.stream.lower()}.*")
    async with fleet.join(place.connection, place.stream, "shipping", handler, partitions=by, lease_s=2) as worker:
        await until(lambda: len(worker.partitions) == 8)
    other = consumers.ConsumerConfig(durable_name="shipping-pallets")
    await consumers.create(place.connection, place.stream, other)
    assert await place.apply("[streams.ORDERS.fleets.shipping]\nabsent = true\n") == ["delete fleet shipping"]
    assert await consumers.names(place.connection, place.stream) == ["shipping-pallets"]


# ---- somebody else in between ---------------------------------------------------------------------------------


async def test_a_group_that_was_changed_since_the_plan_is_left_as_it_is(place: Place) -> None:
    await place.apply(SHOP)
    wanted = place.write(SHOP.replace('["a", "b"]', '["a", "b", "c"]'))
    plan = await make_plan(place.connection, wanted)
    await groups.add_members(place.connection, place.stream, "billing", ["z"])
    with pytest.raises(RevisionConflict, match="was changed by somebody else since the plan was made: plan again"):
        await perform(place.connection, plan, wanted, place._say)
    billing = await groups.get_config(place.connection, place.stream, "billing")
    assert billing.plan.members == ("a", "b", "z")
    again = await make_plan(place.connection, wanted)
    assert again.digest != plan.digest
    await perform(place.connection, again, wanted, place._say)
    billing = await groups.get_config(place.connection, place.stream, "billing")
    assert billing.plan.members == ("a", "b", "c")


async def test_a_stream_that_was_changed_since_the_plan_is_left_as_it_is(place: Place) -> None:
    await place.apply(SHOP)
    wanted = place.write(SHOP.replace("30d", "20d"))
    plan = await make_plan(place.connection, wanted)
    config = (await streams.info_json(place.connection, place.stream))["config"]
    await streams.update_json(place.connection, {**config, "max_age": 5 * 86_400_000_000_000})
    with pytest.raises(RevisionConflict, match="plan again"):
        await perform(place.connection, plan, wanted, place._say)
    assert (await streams.info_json(place.connection, place.stream))["config"]["max_age"] == 5 * 86_400_000_000_000


async def test_what_somebody_made_since_the_plan_is_left_as_it_is(place: Place) -> None:
    wanted = place.write(SHOP)
    plan = await make_plan(place.connection, wanted)
    config = {"name": place.stream, "subjects": [f"{place.stream.lower()}.>"]}
    await streams.create_json(place.connection, config)
    with pytest.raises(RevisionConflict, match="plan again"):
        await perform(place.connection, plan, wanted, place._say)
    assert place.said == []


# ---- the commands ---------------------------------------------------------------------------------------------


@pytest.fixture
def keylane_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nats_server: NatsServer
) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["keylane", *arguments, "-s", nats_server.url])
        monkeypatch.setattr("sys.stdin", io.StringIO())  # nobody answers
        code: object = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        assert isinstance(code, int)
        return code, *capsys.readouterr()

    return run


async def test_the_commands(place: Place, keylane_here: Callable[..., tuple[int, str, str]]) -> None:
    async def run(*arguments: str) -> tuple[int, str, str]:
        return await asyncio.to_thread(keylane_here, *arguments)

    place.write(SHOP)
    file = str(place.path)
    code, out, _ = await run("plan", file)
    assert code == 1
    assert f"+ stream {place.stream}\n" in out
    assert "    max_age = 30d\n" in out
    code, _, err = await run("apply", file)
    assert (code, "nobody answered, and --yes does not ask" in err) == (1, True)
    code, _, err = await run("apply", file, "--yes", "--expect", "0123456789ab")
    assert (code, "look at it again; nothing was changed" in err) == (1, True)
    assert place.stream not in await streams.names(place.connection)
    code, out, _ = await run("plan", file, "--json")
    made = json.loads(out)
    assert [one["action"] for one in made["steps"]] == ["create"] * 5
    code, out, _ = await run("apply", file, "--yes", "--expect", made["id"])
    assert (code, f"created fleet {place.stream}/shipping" in out) == (0, True)
    assert await run("plan", file) == (0, "nothing to do: the server is as the file says\n", "")
    place.write(SHOP.replace("partitions = 8", "partitions = 16"))
    code, out, _ = await run("apply", file, "--yes")
    assert (code, "3 refused: nothing is changed until the file is" in out) == (2, True)
    place.write(GONE)
    code, _, err = await run("apply", file, "--yes")
    assert (code, "--allow-delete does not ask" in err) == (1, True)
    code, out, _ = await run("apply", file, "--yes", "--allow-delete")
    assert (code, f"deleted stream {place.stream}" in out) == (0, True)
    place.path.write_text("[streams.ORDERS]\npartition = 3\n")
    code, _, err = await run("plan", file)
    assert (code, "did you mean 'partitions'?" in err) == (2, True)


@pytest.mark.parametrize(("text", "words"), [("[", "is not TOML"), ("", "names no stream")])
def test_a_file_that_is_none(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "shop.toml"
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_configuration_file(path)
    path.write_text(text)
    with pytest.raises(InvalidInput, match=words):
        read_configuration_file(path)

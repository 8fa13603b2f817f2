"""`keylane elastic plan` and `apply-plan`, and the words that mappings are written in."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from io import StringIO
from pathlib import Path

import pytest

from keylane import Connection, PartitionBy, groups
from keylane.cli.groups.arguments import (
    parse_mappings,
    parse_partition_by,
)
from keylane.core.plans import Plan, balanced, ranges, sticky
from keylane.core.quantities import parse_duration_s
from keylane.errors import InvalidInput
from keylane.groups.admin import read_plan_file
from keylane.server import NatsServer
from tests.integration.cli.groups_rig import here, plain_stream, run, running

pytestmark = pytest.mark.timeout(240)

At = tuple[str, str]
Where = tuple[str, str]


@pytest.fixture
def at(nats_server: NatsServer) -> At:
    return ("-s", nats_server.url)


@pytest.fixture
async def group(connection: Connection, unique: Callable[..., str]) -> AsyncIterator[Where]:
    """Stream and name of an elastic group: 64 partitions over m0 to m3."""
    async with plain_stream(connection, unique("ORDERS")) as stream:
        await groups.create_elastic(
            connection,
            stream,
            "billing",
            partitions=64,
            partition_by=f"{stream}.*",
            members=["m0", "m1", "m2", "m3"],
        )
        yield stream, "billing"


async def plan_of(connection: Connection, where: Where) -> Plan:
    return (await groups.get_config(connection, *where)).plan


# ---- plan ---------------------------------------------------------------------------------------------


async def test_plan_compares_balanced_and_sticky(connection: Connection, group: Where, at: At) -> None:
    now = await plan_of(connection, group)
    done = await run("elastic", "plan", *group, "--add", "m4", *at)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "balanced: 39 of 64 partitions change hands\nsticky: 12 of 64 partitions change hands\n"
    )
    assert re.search(r"member +now +balanced +sticky", done.stdout)
    assert re.search(r"m0 +0-15 +0-11,60 \+1 -4 +0-12 -3", done.stdout)
    told = (await here("elastic", "plan", *group, "--add", "m4", "--json", *at)).json
    names = [f"m{number}" for number in range(5)]
    for name, wanted in (("balanced", balanced(names, 64)), ("sticky", sticky(now, names, 64))):
        assert told[name]["moves"] == len(told[name]["moved"]) == len(wanted.moves_from(now))
        assert {one["member"]: one["partitions"] for one in told[name]["member_mappings"]} == dict(wanted.mappings())
    assert told["add"] == ["m4"]
    assert told["drop"] == []
    assert told["max_members"] == 64
    assert {one["member"] for one in told["now"]} == set(names[:4])
    assert {one["to"] for one in told["sticky"]["moved"]} == {"m4"}
    assert await plan_of(connection, group) == now  # a dry run


async def test_plan_with_several_changes_and_of_a_mapped_group(connection: Connection, group: Where, at: At) -> None:
    told = (await here("elastic", "plan", *group, "--add", "x", "--drop", "m0", "--drop", "m1", "--json", *at)).json
    assert [one["member"] for one in told["sticky"]["member_mappings"]] == ["m2", "m3", "x"]
    await groups.add_members(connection, *group, ["x"], plan="sticky")
    done = await here("elastic", "plan", *group, "--drop", "x", *at)
    assert "only sticky can change it" in done.stdout
    assert re.search(r"x +\S+ +none -\d+ +none -\d+", done.stdout)


# ---- apply-plan ---------------------------------------------------------------------------------------


async def test_a_saved_plan_is_applied_after_a_yes(
    connection: Connection, group: Where, at: At, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    saved = await here("elastic", "plan", *group, "--add", "m4", "--save", str(file), *at)
    assert f"keylane elastic apply-plan {file}" in saved.stdout
    now = await plan_of(connection, group)
    for answer in ("n\n", ""):
        done = await here("elastic", "apply-plan", str(file), *at, stdin=answer)
        assert (done.returncode, done.stdout) == (1, "")
        assert re.search(r"m0 +0-15 +0-12 -3", done.stderr)
        assert "Apply this plan? 12 of 64 partitions change hands. [y/N] " in done.stderr
        assert "keylane: nothing was changed" in done.stderr
        assert await plan_of(connection, group) == now
    done = await run("elastic", "apply-plan", str(file), "--json", *at, stdin="y\n")
    assert done.returncode == 0
    assert json.loads(done.stdout)["moves"] == 12
    after = await groups.get_config(connection, *group)
    assert after.mappings == sticky(now, [f"m{number}" for number in range(5)], 64)
    again = await here("elastic", "apply-plan", str(file), *group, "--force", *at)
    assert again.stdout == "billing: 0 of 64 partitions change hands\n"


@pytest.mark.parametrize("form", ["stored", "list", "plain"])
async def test_a_plan_from_standard_input(connection: Connection, group: Where, at: At, form: str) -> None:
    owned = {"a": list(range(60)), "b": [60, 61, 62, 63]}
    listed = [{"member": member, "partitions": partitions} for member, partitions in owned.items()]
    text = json.dumps({"stored": {"member_mappings": listed}, "list": listed, "plain": owned}[form])
    done = await here("elastic", "apply-plan", "-", *group, "--force", *at, stdin=text)
    assert (done.returncode, done.stderr) == (0, "")
    assert await plan_of(connection, group) == Plan(owned)


async def test_a_plan_is_not_applied_over_somebody_elses_change(
    connection: Connection, group: Where, at: At, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"a": list(range(64))}))
    async with running("elastic", "apply-plan", str(file), *group, *at) as command:
        await command.ask_on_stderr(b"[y/N] ")
        await groups.add_members(connection, *group, ["m4"])
        changed = await plan_of(connection, group)
        assert command.process.stdin is not None
        command.process.stdin.write(b"y\n")
        done = await command.end()
    assert "was changed by somebody else meanwhile: run the command again" in done.refusal
    assert await plan_of(connection, group) == changed


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON"),
        ("[", "is not JSON"),
        ("7", "has no mapping of members to partitions"),
        ('{"a": 7}', "has no mapping of members to partitions"),
        ('{"a": "01"}', "has no mapping of members to partitions"),
        ('[{"member": "a"}]', "has no mapping of members to partitions"),
        ('{"member_mappings": null}', "has no mapping of members to partitions"),
        ('{"a": [0, "1"]}', "is not a whole number"),
        ("{}", "names no member"),
        ('{"a.b": [0]}', "'a.b'"),
        ('{"a": [0, 1]}', "partitions 2-63 of 64 belong to no member"),
        ('{"a": [64]}', "partition 64 of member 'a' is out of range"),
        ('{"stream": "X", "member_mappings": [{"member": "a", "partitions": [0]}]}', "was made for stream 'X'"),
        ('{"stream": 7, "member_mappings": [{"member": "a", "partitions": [0]}]}', "has stream 7"),
    ],
)
async def test_a_bad_plan_changes_nothing(connection: Connection, group: Where, at: At, text: str, said: str) -> None:
    now = await plan_of(connection, group)
    done = await here("elastic", "apply-plan", "-", *group, "--force", *at, stdin=text)
    assert said in done.refusal
    assert await plan_of(connection, group) == now


async def test_a_plan_that_is_not_there_or_names_no_group(at: At, tmp_path: Path) -> None:
    missing = await here("elastic", "apply-plan", str(tmp_path / "none.json"), "S", "g", *at)
    assert "cannot be read: No such file or directory" in missing.refusal
    file = tmp_path / "plan.json"
    file.write_text('{"a": [0]}')
    assert "the plan names no stream" in (await here("elastic", "apply-plan", str(file), *at)).refusal
    assert "the plan names no group" in (await here("elastic", "apply-plan", str(file), "S", *at)).refusal
    nobody = await here("elastic", "apply-plan", "-", "S", "g", *at, stdin='{"a": [0]}')
    assert "nobody can be asked: give --force, or a file" in nobody.refusal
    unwritable = await here("elastic", "plan", "S", "g", "--save", str(tmp_path), *at)
    assert unwritable.returncode == 1


# ---- words --------------------------------------------------------------------------------------------


def test_mappings_in_words() -> None:
    assert parse_mappings(["a:0-2,7", "b:3,4,5-6"]) == Plan({"a": [0, 1, 2, 7], "b": [3, 4, 5, 6]})
    assert parse_mappings(["with:colon:0"]) == Plan({"with:colon": [0]})
    for word in ("a", "a:", ":0", "a:0,", "a:-1", "a:0-", "a:1.5", "a:0 1", "a:0-99999999999", "a:0-9999999999"):
        with pytest.raises(InvalidInput, match="mapping "):
            parse_mappings([word])


def test_filters_in_words() -> None:
    assert parse_partition_by(["a.*.*", "2", "1", "b.*", "1"]) == [PartitionBy("a.*.*", [2, 1]), PartitionBy("b.*")]
    assert parse_partition_by(["a.*.*", "2,1"]) == [PartitionBy("a.*.*", [2, 1])]
    assert parse_partition_by(["a.>", "b.*", "1"]) == [PartitionBy("a.>"), PartitionBy("b.*", [1])]
    assert parse_partition_by([]) == []


@pytest.mark.parametrize(
    ("word", "seconds"), [("0", 0), ("20ms", 0.02), ("1.5s", 1.5), ("1m30s", 90), ("2h", 7200), ("250us", 0.00025)]
)
def test_durations_in_words(word: str, seconds: float) -> None:
    assert parse_duration_s(word) == pytest.approx(seconds)


@pytest.mark.parametrize("word", ["", "5", "soon", "-1s", "1 s", "s", "1w"])
def test_what_is_no_duration(word: str) -> None:
    with pytest.raises(InvalidInput, match="give for example 20ms"):
        parse_duration_s(word)


def test_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7,8"
    assert ranges([3]) == "3"
    assert ranges([]) == "none"
    assert ranges([], none="-") == "-"


def test_a_plan_file_is_read_from_the_given_stdin() -> None:
    read = read_plan_file(Path("-"), StringIO('{"group": "g", "member_mappings": [{"member": "a", "partitions": []}]}'))
    assert (read.stream, read.group, read.plan) == (None, "g", Plan({"a": []}))

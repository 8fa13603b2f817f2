"""What `keylane static` and `keylane elastic` say to wrong names, wrong usage and broken records."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable

import pytest

from keylane import Connection, PartitionBy, groups
from keylane.server import NatsServer
from tests.integration.cli.groups_rig import here, parted_stream


@pytest.fixture
async def parted(connection: Connection, unique: Callable[..., str]) -> AsyncIterator[str]:
    async with parted_stream(connection, unique("PARTED"), 10) as name:
        yield name


@pytest.fixture
def at(nats_server: NatsServer) -> tuple[str, str]:
    return ("-s", nats_server.url)


@pytest.fixture
async def both(connection: Connection, parted: str) -> str:
    """A stream with a static group `fixed` and an elastic one, `loose`, of member `a`."""
    await groups.create_static(connection, parted, "fixed", partitions=10, members=["a"])
    await groups.create_elastic(
        connection, parted, "loose", partitions=4, partition_by=PartitionBy(f"*.{parted}.*", key=[2]), members=["a"]
    )
    return parted


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("static info {s} gone", "stream '{s}' has no static group 'gone'; there is: fixed"),
        ("elastic info {s} gone", "stream '{s}' has no elastic group 'gone'; there is: loose"),
        ("static info {s} loose", "group 'loose' of stream '{s}' is elastic, not static: use `keylane elastic"),
        ("elastic add {s} fixed b", "group 'fixed' of stream '{s}' is static, not elastic: use `keylane static"),
        ("static delete {s} gone", "has no static group 'gone'"),
        ("static consume {s} loose a", "is elastic, not static"),
        ("static ls NOT_THERE", "there is no stream 'NOT_THERE'; there is: "),
        ("elastic info NOT_THERE g", "there is no stream 'NOT_THERE'; there is: "),
        ("elastic create NOT_THERE g 4", "there is no stream 'NOT_THERE'; there is: "),
        ("static create balanced NOT_THERE g 4 a", "there is no stream 'NOT_THERE'; there is: "),
        ("static info a.b g", "'a.b'"),
        ("static info {s} a.b", "'a.b'"),
        ("elastic add {s} loose a.b", "'a.b'"),
        ("elastic drop {s} loose b", "group 'loose' does not list member 'b'; there is: a"),
        ("static member-info {s} fixed b", "group 'fixed' does not list member 'b'; there is: a"),
        ("static step-down {s} fixed b", "group 'fixed' does not list member 'b'; there is: a"),
        ("static consume {s} fixed b", "does not list member 'b'"),
        ("static create balanced {s} g 7 a", "makes 10 partitions"),
        ("static create balanced {s} fixed 10 a b", "with another configuration"),
        ("static create mapped {s} g 10 a:0-8", "partitions 9 of 10 belong to no member"),
        ("static create mapped {s} g 10 a:0-9 a:1", "member 'a' has two mappings"),
        ("static create mapped {s} g 10 a:0-9 b:9", "partition 9 belongs to member 'a' and to member 'b'"),
        ("static create mapped {s} g 10 a", "mapping 'a' is not a member and its partitions"),
        ("static create mapped {s} g 10 a:x", "mapping 'a:x' is not a member and its partitions"),
        ("static create mapped {s} g 10 a:9-0", "has the range 9-0: write the lower number first"),
        ("elastic create {s} g 4 1", "wildcard 1 comes before any filter"),
        ("elastic create {s} g 4 a.*", "filter 'a.*' names no wildcards to hash"),
        ("elastic create {s} g 4 a.* 2", "2"),
        ("elastic create {s} g 4 a.* 1 *.b 1", "overlap"),
        ("elastic create-mapping {s} loose a:0-4", "out of range"),
        ("elastic delete-mapping {s} loose", "group 'loose' of stream '{s}' has no mapping"),
        ("elastic plan {s} loose --drop b", "does not list member 'b'"),
        ("elastic plan {s} loose --add a.b", "'a.b'"),
    ],
)  # fmt: skip
async def test_wrong_input_is_one_line_and_exit_code_1(both: str, at: tuple[str, str], words: str, said: str) -> None:
    done = await here(*words.format(s=both).split(), *at)
    assert said.format(s=both) in done.refusal


@pytest.mark.parametrize(
    "words",
    [
        "static info S",
        "static create balanced S g 0 a",
        "static create balanced S g ten a",
        "static create balanced S g 4",
        "static create balanced S g 4 > a",
        "static create balanced S g 4 orders.* a b",
        "static create mapped S g 4 orders.* a:0-3",
        "static create S g 4 a",
        "static add S g a",
        "elastic create S g 4 a.* 1 --max-buffered-msgs -1",
        "elastic create S g 4 --dialect old",
        "elastic add S g",
        "elastic add S g a --plan weighted",
        "elastic consume S g a --sleep soon",
        "elastic consume S g a --ack-wait soon",
        "elastic consume S g a --order sometimes",
        "elastic consume S g a --concurrency 0",
        "elastic nonsense",
    ],
)
async def test_wrong_usage_is_exit_code_2(words: str) -> None:
    done = await here(*words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: " in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_broken_record_hides_no_other_group(connection: Connection, parted: str, at: tuple[str, str]) -> None:
    await groups.create_static(connection, parted, "good", partitions=10, members=["a"])
    await connection.jetstream.publish(f"$KV.static-consumer-groups.{parted}.bad", b"{nonsense")
    listed = await here("static", "ls", parted, *at)
    as_json = await here("static", "ls", parted, "--json", *at)
    info = await here("static", "info", parted, "bad", *at)
    assert re.search(r"good +10 ", listed.stdout)
    assert re.search(r"bad +- +broken +record ", listed.stdout)
    bad, good = as_json.json["groups"]
    assert bad["group"] == "bad"
    assert "is not JSON" in bad["broken"]
    assert good["members"] == [{"member": "a", "partitions": list(range(10))}]
    assert f"{parted}.bad" in info.refusal

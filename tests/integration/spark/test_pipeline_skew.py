"""Skew: a stream with Zipf keys is measured and planned for, and the plan, once applied, does what it said."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from keylane import Connection, groups
from keylane.core.partitions import partition_number
from keylane.core.plans import Plan
from keylane.errors import GroupError, InvalidInput, NotFound
from keylane.jetstream import Outgoing, publish_many
from keylane.server import NatsServer
from keylane.spark.address import Address
from keylane.spark.pipelines import skew
from tests.integration.cli.groups_rig import here, parted_stream, plain_stream
from tests.integration.spark.journal_rig import MS, START_NS, Act, Ground, Past, write

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

Unique = Callable[..., str]
PNG = b"\x89PNG\r\n\x1a\n"
MEMBERS = ["alice", "bob", "carol", "dave"]


def zipf(messages: int, keys: int, exponent: float, seed: int = 5) -> list[str]:
    chance = random.Random(seed)  # noqa: S311 - repeatable, guards nothing
    names = [f"customer-{number}" for number in range(1, keys + 1)]
    return chance.choices(names, [1 / number**exponent for number in range(1, keys + 1)], k=messages)


@asynccontextmanager
async def group(
    connection: Connection, stream: str, keys: list[str], partitions: int = 32
) -> AsyncIterator[tuple[str, str]]:
    """An elastic group of four on a stream that holds one message for each of the keys."""
    async with plain_stream(connection, stream):
        await groups.create_elastic(
            connection,
            stream,
            "billing",
            partitions=partitions,
            partition_by=[f"{stream}.orders.*", f"{stream}.refunds.*"],
            members=MEMBERS,
        )
        kinds = ("orders", "orders", "refunds")
        await publish_many(
            connection,
            [Outgoing(f"{stream}.{kinds[place % 3]}.{key}", b"x" * (10 + place % 5)) for place, key in enumerate(keys)],
        )
        yield stream, "billing"


def imbalance(plan: Plan, loads: Counter[int]) -> float:
    sums = [sum(loads[one] for one in owned) for _, owned in plan.shares]
    return max(sums) * len(sums) / sum(sums)


async def test_a_plan_that_is_measured_written_and_applied(
    connection: Connection, nats_server: NatsServer, unique: Unique, spark: SparkSession, tmp_path: Path
) -> None:
    keys = zipf(3000, 300, 0.9)
    loads = Counter(partition_number(key, 32) for key in keys)
    at = ("-s", nats_server.url)
    async with group(connection, unique("ZIPF"), keys) as (stream, name):
        before = (await groups.get_config(connection, stream, name)).plan
        assert imbalance(before, loads) > 1.15
        plan, chart = tmp_path / "plan.json", tmp_path / "skew.png"
        asked = ("--stream", stream, "--group", name, *at)
        done = await here("pipeline", "run", "skew", *asked, "--plan", str(plan), "--chart", str(chart), "--json", "-q")
        assert done.returncode == 2  # there is no -q
        done = await here(
            "pipeline", "run", "skew", *asked, "--plan", str(plan), "--chart", str(chart), "--json", "--quiet"
        )
        assert (done.returncode, done.stderr) == (3, "")
        told = json.loads(done.stdout)
        assert told["messages"] == 3000
        assert told["keys"] == len(set(keys))
        hottest, times = Counter(keys).most_common(1)[0]
        assert {name: told["hot_keys"][0][name] for name in ("key", "messages")} == {"key": hottest, "messages": times}
        assert {one["partition"]: one["messages"] for one in told["partitions"]} == dict(loads)
        assert told["imbalance"] == pytest.approx(imbalance(before, loads), abs=1e-4)
        assert told["plan"]["imbalance"] <= 1.15
        assert chart.read_bytes().startswith(PNG)

        apply = ("elastic", "apply-plan", str(plan), "--force", "--json", *at)
        assert "2 filters: with a mapping its members in Go stop" in (await here(*apply)).refusal
        assert (await groups.get_config(connection, stream, name)).plan == before
        applied = (await here(*apply, "--stop-go-members")).json
        assert applied["moves"] == told["plan"]["moves"]
        assert applied["moved"] == told["plan"]["moved"]
        after = (await groups.get_config(connection, stream, name)).plan
        assert imbalance(after, loads) == pytest.approx(told["plan"]["imbalance"], abs=1e-4)
        assert imbalance(after, loads) <= 1.15
        again = await here("pipeline", "run", "skew", *asked, "--plan", str(tmp_path / "none.json"), "--quiet")
        assert again.returncode == 0
        assert "none is needed" in again.stdout
        assert not (tmp_path / "none.json").exists()


async def test_a_key_that_no_plan_can_split(
    connection: Connection, nats_server: NatsServer, unique: Unique, spark: SparkSession
) -> None:
    keys = ["hot"] * 600 + [f"cold-{number}" for number in range(400)]
    async with group(connection, unique("HOT"), keys) as (stream, name):
        asked = skew.Settings(stream=stream, group=name, address=Address(url=nats_server.url), top=2)
        report = skew.run(spark, asked)
    assert not report.verdict
    assert not report.proposal.is_within_cap
    assert "key 'hot' 2.40 times: a key stays with one member" in report.bound
    assert report.proposal.floor >= 2.4
    assert report.bound in report.as_text()
    assert report.as_json()["bound"] == report.bound


async def test_partitions_that_are_too_coarse(
    connection: Connection, nats_server: NatsServer, unique: Unique, spark: SparkSession
) -> None:
    warm = [f"w{number}" for number in range(2000) if partition_number(f"w{number}", 4) == 0][:100]
    rest = [f"r{number}" for number in range(2000) if partition_number(f"r{number}", 4) != 0][:60]
    async with group(connection, unique("COARSE"), warm * 4 + rest, partitions=4) as (stream, name):
        report = skew.run(spark, skew.Settings(stream=stream, group=name, address=Address(url=nats_server.url)))
    assert not report.proposal.is_within_cap
    assert "partition 0 alone carries 3.48 times the mean" in report.bound
    assert "more partitions would help" in report.bound


async def test_handler_time_from_the_journal(
    connection: Connection, nats_server: NatsServer, unique: Unique, spark: SparkSession
) -> None:
    """Few messages that take long weigh more than many quick ones."""
    keys = ["quick"] * 90 + ["slow"] * 10
    address = Address(url=nats_server.url)
    async with group(connection, unique("TIME"), keys, partitions=4) as (stream, name):
        with pytest.raises(NotFound, match="has no journal"):
            skew.run(spark, skew.Settings(stream=stream, group=name, address=address, by="time"))
        past = Past(keys)
        for sequence, key in enumerate(keys, 1):
            took = 100 * MS if key == "slow" else MS
            start = START_NS + sequence * MS
            past.acts.append(Act(Ground("alice", "a1", "p"), sequence, key, start, start + took))
        await write(connection, stream, past.batches(stream))
        report = skew.run(spark, skew.Settings(stream=stream, group=name, address=address, by="time"))
        assert [(one.key, one.load.messages) for one in report.hot_keys] == [("slow", 10), ("quick", 90)]
        assert report.hot_keys[0].load.time_s == pytest.approx(1.0)
        assert report.total == pytest.approx(1.09)
        assert "handler times of every key" in report.as_text()
        none = skew.Settings(stream=stream, group=name, address=address, by="time", start="95", end="95")
        await publish_many(connection, [Outgoing(f"{stream}.orders.new", b"")])
        with pytest.raises(InvalidInput, match="has no record of group 'billing' in this range"):
            skew.run(spark, skew.Settings(stream=stream, group=name, address=address, by="time", start="101"))
        assert skew.run(spark, none).total == pytest.approx(0.1)


async def test_a_static_group_is_measured_and_left_alone(
    connection: Connection, nats_server: NatsServer, unique: Unique, spark: SparkSession, tmp_path: Path
) -> None:
    async with parted_stream(connection, unique("STATIC"), 8) as stream:
        await groups.create_static(connection, stream, "g", partitions=8, members=["a", "b"])
        keys = zipf(500, 20, 1.0)
        await publish_many(connection, [Outgoing(f"{stream}.{key}", b"x") for key in keys])
        plan = tmp_path / "plan.json"
        report = skew.run(
            spark, skew.Settings(stream=stream, group="g", address=Address(url=nats_server.url), plan=str(plan))
        )
    assert {number: load.messages for number, load in report.partitions.items()} == dict(
        Counter(partition_number(key, 8) for key in keys)
    )
    assert report.plan_file is None
    assert not plan.exists()


async def test_an_empty_range_and_a_group_of_nobody(
    connection: Connection, nats_server: NatsServer, unique: Unique, spark: SparkSession
) -> None:
    address = Address(url=nats_server.url)
    async with group(connection, unique("EMPTY"), ["a"]) as (stream, name):
        with pytest.raises(InvalidInput, match="has no messages from 2 to latest: give another range"):
            skew.run(spark, skew.Settings(stream=stream, group=name, address=address, start="2"))
        await publish_many(connection, [Outgoing(f"{stream}.other", b"")])
        with pytest.raises(InvalidInput, match="none matches its filters"):
            skew.run(spark, skew.Settings(stream=stream, group=name, address=address, start="2"))
        await groups.drop_members(connection, stream, name, MEMBERS)
        with pytest.raises(GroupError, match="has no members"):
            skew.run(spark, skew.Settings(stream=stream, group=name, address=address))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"by": "weight"}, "by is 'weight': give messages, bytes, time"),
        ({"max_imbalance": 0.9}, "max_imbalance is 0.9"),
        ({"top": 0}, "top is 0"),
        ({"start": "x"}, "from is 'x'"),
        ({"group": "a b"}, "a b"),
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        skew.Settings(**({"stream": "ORDERS", "group": "billing"} | wrong))  # type: ignore[arg-type]

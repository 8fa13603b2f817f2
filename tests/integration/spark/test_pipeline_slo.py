"""Service levels from planted journals: every figure is known beforehand."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from keylane import Connection, groups
from keylane.core.journal_record import in_sample
from keylane.errors import InvalidInput, NotFound
from keylane.jetstream import Outgoing, publish_many, read_all, streams
from keylane.journal import journal_stream
from keylane.server import NatsServer
from keylane.spark.address import Address
from keylane.spark.pipelines import slo
from keylane.spark.pipelines.slo import Cell, Report, read_thresholds
from tests.integration.cli.groups_rig import here
from tests.integration.spark.journal_rig import ALICE, BOB, MS, Act, Past, make_group, make_stream, partition_of, write

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

Unique = Callable[..., str]
SECOND = 1_000 * MS
ALICES = [f"k{number}" for number in range(200) if partition_of(f"k{number}") < 2][:4]
BOBS = [f"k{number}" for number in range(200) if partition_of(f"k{number}") >= 2][:4]


@asynccontextmanager
async def stage(connection: Connection, stream: str, keys: list[str]) -> AsyncIterator[tuple[Past, list[int]]]:
    """A group of alice and bob, a message for each key, and when each was stored, in nanoseconds."""
    await make_stream(connection, stream)
    await make_group(connection, stream)
    try:
        await publish_many(connection, [Outgoing(f"{stream}.{key}", b"x") for key in keys])
        stored = [round(one.timestamp.timestamp() * 1e6) * 1000 async for one in read_all(connection, stream)]
        yield Past(keys), stored
    finally:
        for name in (stream, groups.queue_stream(stream, "billing"), journal_stream(stream)):
            try:
                await streams.delete(connection, name)
            except NotFound:
                continue


def total(report: Report, name: str) -> Cell:
    return next(one for one in report.totals if one.name == name)


async def test_times_waits_and_redeliveries(
    connection: Connection, nats_server: NatsServer, unique: Unique, spark: SparkSession, tmp_path: Path
) -> None:
    keys = [*ALICES, *BOBS] * 25
    stream = unique("SLO")
    async with stage(connection, stream, keys) as (past, stored):
        for sequence, key in enumerate(keys, 1):
            ground = ALICE if key in ALICES else BOB
            # Of 100 messages each: alice takes 1 to 100 ms after 10 ms, bob 7 ms after 500 ms.
            place = sum(one in ALICES for one in keys[:sequence])
            start = stored[sequence - 1] + (10 if ground is ALICE else 500) * MS
            took = place if ground is ALICE else 7
            past.acts.append(Act(ground, sequence, key, start, start + took * MS, delivered=1 + (sequence % 40 == 1)))
        await write(connection, stream, past.batches(stream))
        address = Address(url=nats_server.url)
        asked = slo.Settings(stream=stream, group="billing", address=address, window_s=3600)
        report = slo.run(spark, asked)
        assert (report.messages, report.tries, report.unhandled) == (200, 200, 0)
        alice, bob, everything = (total(report, name) for name in ("alice", "bob", ""))
        assert [alice.values[f"handler_{one}_ms"] for one in ("p50", "p95", "p99")] == pytest.approx([50, 95, 99])
        assert [bob.values[f"handler_{one}_ms"] for one in ("p50", "p95", "p99")] == pytest.approx([7, 7, 7])
        assert everything.tries == 200
        assert alice.values["wait_p99_ms"] == pytest.approx(10, abs=0.01)  # timestamps have microseconds
        assert bob.values["wait_p50_ms"] == pytest.approx(500, abs=0.01)
        assert alice.values["redelivered_ratio"] == pytest.approx(0.05)
        assert bob.values["redelivered_ratio"] == 0
        assert report.as_json()["verdict"] == "not judged"
        assert report.exit_code == 0

        limits = tmp_path / "limits.toml"
        limits.write_text("handler_p99_ms = 100.5\nwait_p95_ms = 499\nredelivered_ratio = 0.04\n")
        chart = tmp_path / "slo.png"
        done = await here(
            "pipeline", "run", "slo", "-s", nats_server.url, "--stream", stream, "--group", "billing", "--quiet",
            "--window", "3600", "--thresholds", str(limits), "--chart", str(chart), "--json",
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (3, "")
        told = json.loads(done.stdout)
        assert told["verdict"] == "not met"
        broken = {one["measure"]: {f"{cell['scope']} {cell.get('name', '')}" for cell in one["worst"]}
                  for one in told["breaches"] if one["windows"]}  # fmt: skip
        assert "handler_p99_ms" not in broken
        assert "member bob" in broken["wait_p95_ms"]
        assert "member alice" not in broken["wait_p95_ms"]
        assert {one for one in broken["redelivered_ratio"] if one.startswith("member")} == {"member alice"}
        assert chart.read_bytes().startswith(b"\x89PNG")


async def test_lag_and_windows(
    connection: Connection, nats_server: NatsServer, unique: Unique, spark: SparkSession
) -> None:
    """Ten messages at once: alice finishes one a second, bob none."""
    keys = [ALICES[0]] * 6 + [BOBS[0]] * 4
    stream = unique("SLO")
    async with stage(connection, stream, keys) as (past, stored):
        for sequence in range(1, 7):
            start = stored[-1] // SECOND * SECOND + sequence * SECOND
            past.acts.append(Act(ALICE, sequence, keys[0], start, start + 200 * MS))
        # A failed try and one that was given back finish nothing.
        past.acts.append(Act(BOB, 7, keys[-1], stored[-1] + SECOND, stored[-1] + SECOND + MS, outcome="failed"))
        past.acts.append(Act(BOB, 8, keys[-1], stored[-1] + SECOND, stored[-1] + SECOND + MS, outcome="returned"))
        await write(connection, stream, past.batches(stream))
        report = slo.run(
            spark, slo.Settings(stream=stream, group="billing", address=Address(url=nats_server.url), window_s=1)
        )
    assert report.unhandled == 4
    lags: dict[str, list[int]] = {"alice": [], "bob": [], "": []}
    for one in report.cells:
        if "lag_messages" in one.values:
            lags[one.name].append(int(one.values["lag_messages"]))
    assert lags["alice"][-1] == 0
    falling = lags["alice"][lags["alice"].index(6) :]  # a new second may begin while they are published
    assert falling == sorted(falling, reverse=True)
    assert lags["bob"][-1] == 4
    assert lags[""][-1] == 4
    assert total(report, "bob").tries == 2


async def test_a_sample_counts_only_its_keys(
    connection: Connection, nats_server: NatsServer, unique: Unique, spark: SparkSession
) -> None:
    keys = [f"k{number}" for number in range(60)]
    chosen = [key for key in keys if in_sample(key, 0.3)]
    assert 5 < len(chosen) < 40
    stream = unique("SLO")
    async with stage(connection, stream, keys) as (past, stored):
        past.sample = 0.3
        for sequence, key in enumerate(keys, 1):
            if key in chosen:
                start = stored[sequence - 1]
                past.acts.append(Act(ALICE, sequence, key, start, start + MS))
        await write(connection, stream, past.batches(stream))
        report = slo.run(spark, slo.Settings(stream=stream, group="billing", address=Address(url=nats_server.url)))
    assert (report.messages, report.unhandled, report.sample) == (len(chosen), 0, 0.3)
    assert "a sample of 30.0% of the keys" in report.as_text()


async def test_nothing_to_look_at(
    connection: Connection, nats_server: NatsServer, unique: Unique, spark: SparkSession
) -> None:
    address = Address(url=nats_server.url)
    stream = unique("SLO")
    async with stage(connection, stream, ["a", "b"]) as (past, stored):
        asked = slo.Settings(stream=stream, group="billing", address=address)
        with pytest.raises(NotFound, match="has no journal"):
            slo.run(spark, asked)
        past.acts.append(Act(ALICE, 1, "a", stored[0], stored[0] + MS))
        await write(connection, stream, past.batches(stream))
        with pytest.raises(InvalidInput, match="has no messages from 3 to latest"):
            slo.run(spark, slo.Settings(stream=stream, group="billing", address=address, start="3"))
        with pytest.raises(InvalidInput, match="has no record of group 'billing' for messages from 2"):
            slo.run(spark, slo.Settings(stream=stream, group="billing", address=address, start="2"))
        past.acts[:] = [Act(BOB, 2, "b", stored[0], stored[0] + 7200 * SECOND)]
        await write(connection, stream, past.batches(stream))
        with pytest.raises(InvalidInput, match="makes 72,001 windows"):
            slo.run(spark, slo.Settings(stream=stream, group="billing", address=address, window_s=0.1))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("handler_p98_ms = 1", "have 'handler_p98_ms', which is not a threshold: give handler_p50_ms"),
        ("handler_p99_ms = 'x'", "handler_p99_ms = 'x': give a number"),
        ("handler_p99_ms = true", "give a number"),
        ("handler_p99_ms = -1", "give a number, 0 or more"),
        ("min_tries = 3", "set none"),
        ("", "set none"),
        ("[", "are not TOML"),
    ],
)
def test_thresholds_that_make_no_sense(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=said):
        read_thresholds(path)


def test_thresholds_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        read_thresholds(tmp_path / "none.toml")


@pytest.mark.parametrize(("wrong", "said"), [({"window_s": 0}, "window_s is 0"), ({"end": "x"}, "to is 'x'")])
def test_settings_that_make_no_sense(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        slo.Settings(**({"stream": "ORDERS", "group": "billing"} | wrong))  # type: ignore[arg-type]

"""Parity tells in what two groups of one stream differ, and what it cannot know."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import keylane
from keylane import Connection
from keylane.errors import InvalidInput, NotFound
from keylane.server import NatsServer
from keylane.spark.address import Address
from keylane.spark.pipelines import parity as pipeline
from keylane.spark.pipelines.parity import Report, Settings
from tests.integration.cli.groups_rig import here
from tests.integration.spark import journal_rig as rig
from tests.integration.spark.journal_rig import GROUP, MS, Past

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

NEW = "billing-new"
SAME = {"missing": 0, "extra": 0, "other_outcome": 0, "other_order": 0}
Parity = Callable[..., Awaitable[Report]]


@pytest.fixture
async def stream(connection: Connection, unique: Callable[..., str]) -> AsyncIterator[str]:
    async with rig.named(connection, unique("orders"), NEW) as name:
        yield name


@pytest.fixture
def parity(spark: SparkSession, nats_server: NatsServer, stream: str) -> Parity:
    async def run(**more: Any) -> Report:
        asked: dict[str, Any] = {"stream": stream, "group": GROUP, "other_group": NEW, "settle_s": 0.0} | more
        return await asyncio.to_thread(pipeline.run, spark, Settings(address=Address(url=nats_server.url), **asked))

    return run


def sequences(report: Report, kind: str) -> list[int]:
    return sorted(one["sequence"] for one in report.evidence.get(kind, ()))


async def stage(connection: Connection, stream: str, one: Past, other: Past, pending: set[int]) -> None:
    """Two groups; `pending` is what the new one has still to do."""
    await rig.make_stream(connection, stream)
    for group in (GROUP, NEW):
        await rig.make_group(connection, stream, group)
    await rig.publish(connection, stream, one.keys)
    await rig.empty_queue(connection, stream, len(one.keys))
    await rig.empty_queue(connection, stream, len(one.keys), pending.__contains__ if pending else None, NEW)
    await rig.write(connection, stream, one.batches(stream) + other.batches(stream))


def twins(messages: int, keys: int) -> tuple[Past, Past]:
    """The same, done by two groups: the second by other instances, three seconds later."""
    one, other = Past.clean(messages, keys), Past.clean(messages, keys)
    other.group = NEW
    for act in list(other.acts):
        ground = replace(act.ground, instance=f"{act.ground.instance}-new", writer=f"{act.ground.writer[:-3]}new")
        later = {"started_ns": act.started_ns + 3_000 * MS, "ended_ns": act.ended_ns + 3_000 * MS}
        other.change(act, ground=ground, **later)
    return one, other


async def test_two_groups_that_do_the_same_are_the_same(connection: Connection, stream: str, parity: Parity) -> None:
    one, other = twins(2_000, 40)
    await stage(connection, stream, one, other, set())
    report = await parity(tolerance_s=0.0)
    assert report.differences == SAME, report.as_text()
    assert not any(report.unproven.values()), report.as_text()
    assert (report.verdict, report.exit_code) == (True, 0)
    assert (report.facts["handled_here"], report.facts["handled_there"]) == (2_000, 2_000)
    assert report.as_text().splitlines()[0] == f"{stream}: {GROUP} here, {NEW} there: no difference"


async def test_every_difference_is_told(connection: Connection, stream: str, parity: Parity, tmp_path: Path) -> None:
    one, other = twins(2_000, 40)
    keys = list(dict.fromkeys(one.keys))
    missing, extra = one.of(keys[0])[20].sequence, one.of(keys[1])[20].sequence
    other.lose(missing)
    one.lose(extra)
    dead = one.of(keys[2])[10].sequence
    other.change(other.act(dead), outcome="dead")
    swapped = [act.sequence for act in one.of(keys[3])[10:12]]
    other.swap(*swapped)
    disorderly = [act.sequence for act in one.of(keys[4])[10:12]]
    one.swap(*disorderly)
    other.swap(*disorderly)  # both do it in the same wrong order: no difference
    pending, unproven = one.of(keys[5])[-1].sequence, one.of(keys[6])[-1].sequence
    other.lose(pending)
    other.lose(unproven)
    await stage(connection, stream, one, other, {pending})

    report = await parity(work=str(tmp_path / "work"))
    told = report.as_text()
    assert sequences(report, "missing") == [missing], told
    assert sequences(report, "extra") == [extra], told
    assert sequences(report, "other_outcome") == [dead], told
    assert sequences(report, "other_order") == [swapped[0]], told
    assert sequences(report, "missing_unproven") == [unproven], told
    assert report.differences == dict.fromkeys(SAME, 1)
    assert report.facts["pending_there"] == 1
    assert (report.verdict, report.exit_code) == (False, 3)
    assert report.causes["other_outcome"] == {"done here, dead there": 1}
    assert (tmp_path / "work" / "findings" / "_SUCCESS").exists()
    sure = await parity(complete=True, start=str(unproven), end=str(unproven))
    assert sure.differences == SAME | {"missing": 1}, sure.as_text()


async def test_a_group_on_another_server_from_the_command_line(
    spark: SparkSession, connection: Connection, nats_server: NatsServer, stream: str, tmp_path: Path
) -> None:
    """The other server has the stream with the same sequences. It runs in the session that is there."""
    one, other = twins(600, 6)
    dead = one.of("k0")[70].sequence
    other.change(other.act(dead), outcome="dead")
    await rig.make_stream(connection, stream)
    await rig.make_group(connection, stream)
    await rig.publish(connection, stream, one.keys)
    await rig.empty_queue(connection, stream, len(one.keys))
    await rig.write(connection, stream, one.batches(stream))
    with NatsServer.start() as there:
        async with await keylane.connect(there.url) as link:
            await rig.make_stream(link, stream)
            await rig.make_group(link, stream, NEW)
            await rig.publish(link, stream, other.keys)
            await rig.empty_queue(link, stream, len(other.keys), group=NEW)
            await rig.write(link, stream, other.batches(stream))
        config = tmp_path / "parity.toml"
        config.write_text(
            f'stream = "{stream}"\ngroup = "{GROUP}"\nother-group = "{NEW}"\nserver = "{nats_server.url}"\n'
            f'other_server = "{there.url}"\nto = {dead - 1}\nsettle = 0\nquiet = true\n'
        )
        asked = ("pipeline", "run", "parity", "--config", str(config))
        same = await here(*asked, "--json")
        assert (same.returncode, same.stderr) == (0, "")
        told = json.loads(same.stdout)
        assert (told["pipeline"], told["verdict"], told["differences"]) == ("parity", "same", SAME)
        assert (told["facts"]["handled_here"], told["facts"]["handled_there"]) == (dead - 1, dead - 1)
        differs = await here(*asked, "--to", "latest")
        assert (differs.returncode, differs.stderr) == (3, "")
        assert differs.stdout.splitlines()[0] == f"{stream}: {GROUP} here, {NEW} there: 1 other outcome"
        assert "1 times: done here, dead there" in differs.stdout
        assert f"{dead} of key k0" in differs.stdout


async def test_nothing_to_compare_is_said_in_one_message(connection: Connection, stream: str, parity: Parity) -> None:
    past = Past.clean(10, 2)
    await rig.make_stream(connection, stream)
    for group in (GROUP, NEW):
        await rig.make_group(connection, stream, group)
    with pytest.raises(InvalidInput, match="nothing to compare"):
        await parity()
    await rig.publish(connection, stream, past.keys)
    with pytest.raises(NotFound, match="has no journal"):
        await parity()
    await rig.write(connection, stream, past.batches(stream))
    with pytest.raises(InvalidInput, match=f"has nothing of group '{NEW}'"):
        await parity()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"other_group": "a"}, "group and other_group are both 'a'"),
        ({"other_group": "a.b"}, "a.b"),
        ({"tolerance_s": 4000.0}, "tolerance_s is 4000.0: give 0 to 3600 seconds"),
        ({"evidence": 20_000}, "evidence is 20000"),
        ({"end": "never"}, "to is 'never'"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"stream": "ORDERS", "group": "a", "other_group": "b"} | wrong
    with pytest.raises(InvalidInput) as refused:
        Settings(**given)
    assert said in str(refused.value)

"""The audit finds every fault that was planted in a journal, nothing in a clean one, and says when it cannot know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import run as command
from typing import TYPE_CHECKING, Any

import pytest

from keylane import Connection
from keylane.core.journal_record import in_sample
from keylane.errors import InvalidInput, JournalTooNew, KeylaneError, NotFound
from keylane.server import NatsServer
from keylane.spark.address import Address
from keylane.spark.pipelines import audit as pipeline
from keylane.spark.pipelines.audit import Report, Settings
from keylane.spark.pipelines.spark_jobs import no_guessed_broadcasts
from tests.integration.spark import journal_rig as rig
from tests.integration.spark.journal_rig import ALICE, BOB, GROUP, MS, STANDBY, Act, Past
from tests.integration.spark.planted import eventful, faulty, findings_in, keys_of, sequences, told

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Audit = Callable[..., Awaitable[Report]]

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

CLEAN = {"lost": 0, "duplicated": 0, "out_of_order": 0, "two_owners": 0, "late_effect": 0}


@pytest.fixture
async def stream(connection: Connection, unique: Callable[..., str]) -> AsyncIterator[str]:
    async with rig.named(connection, unique("orders")) as name:
        yield name


@pytest.fixture
def audit(spark: SparkSession, nats_server: NatsServer, stream: str) -> Audit:
    async def run(**more: Any) -> Report:
        settings: dict[str, Any] = {"stream": stream, "group": GROUP, "settle_s": 0.0} | more
        return await asyncio.to_thread(pipeline.run, spark, Settings(address=Address(url=nats_server.url), **settings))

    return run


def test_nothing_large_is_broadcast_because_its_files_look_small(spark: SparkSession, tmp_path: Path) -> None:
    spark.range(1000).write.parquet(str(tmp_path / "t"))

    def joined() -> str:
        table = spark.read.parquet(str(tmp_path / "t"))
        return str(table.join(table.select("id"), "id", "left_anti")._jdf.queryExecution().executedPlan().toString())

    assert "Broadcast" in joined()
    with no_guessed_broadcasts(spark):
        assert "Broadcast" not in joined()
    assert "Broadcast" in joined()


# ---- clean ----------------------------------------------------------------------------------------------


async def test_nothing_is_found_in_a_clean_journal_of_50_000_records(
    connection: Connection, stream: str, audit: Audit
) -> None:
    past = eventful(50_000)
    await rig.stage(connection, stream, past)
    report = await audit(tolerance_s=0.0)
    assert report.violations == CLEAN, report.as_text()
    assert not any(report.unproven.values()), report.as_text()
    assert (report.verdict, report.exit_code) == (True, 0)
    assert report.facts["messages"] == report.facts["handled"] == report.facts["final_records"] == 50_000
    assert report.facts["records"] == len(past.acts)
    assert report.facts["batches_copied"] == 1
    assert report.as_text().splitlines()[0] == f"{stream}/{GROUP}: no violation"


# ---- faults ---------------------------------------------------------------------------------------------


async def test_every_planted_fault_is_found_in_a_batch_and_in_a_stream_alike(
    connection: Connection, stream: str, audit: Audit, tmp_path: Path
) -> None:
    past, planted, (shared, overtaken) = faulty()
    batches = past.batches(stream)
    await rig.make_stream(connection, stream)
    await rig.make_group(connection, stream)
    await rig.publish(connection, stream, past.keys[:2_500])
    await rig.empty_queue(connection, stream, 2_500, keep=lambda sequence: True)
    await rig.write(connection, stream, batches[:2])
    work = str(tmp_path / "work")
    soon = await audit(available_now=True, work=work, tolerance_s=0.1)
    assert soon.facts["messages"] == 2_500
    assert soon.facts["pending"] == 2_500 - soon.facts["handled"] > 0
    assert not soon.violations["lost"], soon.as_text()
    assert not any(soon.unproven.values()), soon.as_text()

    await rig.publish(connection, stream, past.keys[2_500:])
    await rig.empty_queue(connection, stream, len(past.keys))
    await rig.write(connection, stream, batches[2:])
    batch = await audit(tolerance_s=0.1, complete=True, work=str(tmp_path / "batch"))
    for kind, expected in planted.items():
        assert sequences(batch, kind) == expected, (kind, batch.as_text())
    owners = {one["key"]: (one["record"]["instance"], one["other"]["instance"]) for one in batch.evidence["two_owners"]}
    assert owners == {past.keys[shared - 1]: ("a1", "a2"), past.keys[overtaken - 1]: ("b1", "b2")}
    assert batch.violations == {kind: len(found) for kind, found in planted.items()} | {"two_owners": 2}
    assert batch.causes["duplicated"]["the server copied it into the queue twice"] == 1
    assert (batch.verdict, batch.exit_code) == (False, 3)

    streamed = await audit(available_now=True, work=work, tolerance_s=0.1, complete=True)
    assert told(streamed.as_json()) == told(batch.as_json())
    assert findings_in(tmp_path / "work") == findings_in(tmp_path / "batch") != []
    assert streamed.findings == str(tmp_path / "work" / "findings")

    with pytest.raises(InvalidInput, match=r"start is '2', and the audit in .* is about 'earliest'"):
        await audit(available_now=True, work=work, start="2")


async def test_what_cannot_be_proven_is_told_apart(connection: Connection, stream: str, audit: Audit) -> None:
    """Drops, missing batches, changes of hands, ends of keys, pending messages, keys outside the sample."""
    past = Past.clean(6_000, 60)
    past.batch_records, past.sample = 200, 0.5
    past.acts = [act for act in past.acts if in_sample(act.key, past.sample)]
    bobs = [key for key in keys_of_sample(past) if past.of(key)[0].ground == BOB]
    alices = [key for key in keys_of_sample(past) if past.of(key)[0].ground == ALICE]
    proven = past.of(bobs[0])[90].sequence
    at_the_end = past.of(bobs[1])[-1].sequence
    pending = past.of(bobs[2])[-1].sequence
    handed = past.of(alices[0])
    past.move(alices[0], handed[50].sequence, handed[-1].sequence, STANDBY)
    given_back = past.of(bobs[3])[90]
    past.change(given_back, outcome="returned")
    for sequence in (proven, at_the_end, pending, handed[50].sequence):
        past.lose(sequence)
    past.dropped[ALICE] = {3: 7}
    in_order = sorted((act for act in past.acts if act.ground == ALICE), key=lambda act: act.ended_ns)
    dropped = [act for act in in_order[:400] if act.key == alices[1]][-1].sequence  # two batches of 200 are before it
    past.lose(dropped)
    past.unsent.add(("b1", 2))
    # The first of its key: lost beyond doubt, as alice had the partition before the message was there.
    old = next(act for act in past.acts if act.ground == ALICE and same_partition(act.key, alices[2]))
    past.change(old, started_ns=old.started_ns - 48 * 3_600_000 * MS)
    first = past.of(alices[2])[0].sequence
    past.lose(first)
    # The same, of a key whose partition bob may have got only after that.
    doubtful = past.of(bobs[4])[0].sequence
    past.lose(doubtful)
    unsent = sorted((act for act in past.acts if act.ground == BOB), key=lambda act: act.ended_ns)[200:400]
    await rig.stage(connection, stream, past, keep=lambda sequence: sequence == pending)
    await connection.nats.publish(f"keylane.journal.{stream}.{GROUP}.alice", b"nonsense")
    await connection.nats.flush()

    report = await audit(evidence=1000, complete=True)
    assert sequences(report, "lost") == sorted([proven, first]), report.as_text()
    missing = {
        doubtful,
        at_the_end,
        handed[50].sequence,
        given_back.sequence,
        dropped,
        *(act.sequence for act in unsent),
    }
    assert set(sequences(report, "unproven")) == missing
    assert report.violations == CLEAN | {"lost": 2}
    facts = report.facts
    assert facts["pending"] == 1
    assert facts["outside_the_sample"] == sum(not in_sample(key, 0.5) for key in past.keys)
    assert (facts["records_dropped"], facts["batches_missing"], facts["batches_broken"]) == (7, 1, 1)
    why = {one["sequence"]: one["why"] for one in report.evidence["unproven"]}
    assert "nothing of its key" in why[at_the_end]
    assert "changed hands" in why[handed[50].sequence]
    assert "changed hands" in why[doubtful]
    assert "given back" in why[given_back.sequence]
    assert "missing in the journal" in why[dropped]


def same_partition(key: str, other: str) -> bool:
    return key != other and rig.partition_of(key) == rig.partition_of(other)


def keys_of_sample(past: Past) -> list[str]:
    return list(dict.fromkeys(act.key for act in past.acts))


async def test_clocks_that_may_differ_prove_no_order(connection: Connection, stream: str, audit: Audit) -> None:
    past = Past.clean(600, 6)
    key = keys_of(past, ALICE)[0]
    handed = past.of(key)
    past.move(key, handed[50].sequence, handed[-1].sequence, STANDBY)
    late = past.change(past.act(handed[49].sequence), ended_ns=handed[50].ended_ns + 3 * MS)
    await rig.stage(connection, stream, past)
    report = await audit(tolerance_s=0.05)
    assert report.verdict, report.as_text()
    assert sequences(report, "order_unproven") == [late.sequence]
    ranged = await audit(tolerance_s=0.0, start=str(late.sequence + 1), end=str(len(past.keys)))
    assert ranged.verdict, "the message is not in the range"
    assert not any(ranged.unproven.values())
    assert (ranged.first, ranged.last) == (late.sequence + 1, 600)


# ---- what cannot be audited -----------------------------------------------------------------------------


async def test_nothing_to_audit_is_said_in_one_message(connection: Connection, stream: str, audit: Audit) -> None:
    await rig.make_stream(connection, stream)
    await rig.make_group(connection, stream)
    await rig.publish(connection, stream, ["a", "b"])
    with pytest.raises(NotFound, match=f"stream '{stream}' has no journal .* does not exist"):
        await audit()
    await rig.write(connection, stream, [])
    with pytest.raises(InvalidInput, match=r"nothing to audit: stream .* holds no message from 3 to its end"):
        await audit(start="3")
    with pytest.raises(InvalidInput, match=r"the journal of stream .* is empty"):
        await audit()
    past = Past(["a", "b"], [Act(ALICE, 1, "a", 1, 2)], group="another")
    await rig.write(connection, stream, past.batches(stream))
    with pytest.raises(InvalidInput, match=f"has nothing of group '{GROUP}'"):
        await audit()


async def test_a_journal_of_a_newer_version_is_refused(connection: Connection, stream: str, audit: Audit) -> None:
    past = Past.clean(10, 2)
    await rig.stage(connection, stream, past)
    [(subject, data), *_] = past.batches(stream)
    await rig.write(connection, stream, [(subject, data[:3] + bytes([9]) + data[4:])])
    with pytest.raises(JournalTooNew, match="a journal batch of version 9: this keylane reads version 1") as raised:
        await audit()
    assert "\n" not in str(raised.value)


async def test_a_full_disk_is_said_and_nothing_half_written_counts(
    connection: Connection, stream: str, audit: Audit, tmp_path: Path
) -> None:
    past = Past.clean(20_000, 2_000)
    lost = past.of("k7")[4].sequence
    past.lose(lost)
    await rig.stage(connection, stream, past)
    with small_disk(tmp_path / "disk") as disk:
        with pytest.raises(KeylaneError, match="no space is left on the disk") as raised:
            await audit(work=str(disk))
        assert "\n" not in str(raised.value)
        assert list(disk.iterdir()) == []
        with pytest.raises(KeylaneError, match="no space is left on the disk"):
            await audit(work=str(disk), available_now=True)
        assert not (disk / "findings").exists()
        make_room(disk)
        report = await audit(work=str(disk), available_now=True)
        assert sequences(report, "lost") == [lost], report.as_text()
        assert report.violations == CLEAN | {"lost": 1}
        assert report.facts["handled"] == report.facts["final_records"] == len(past.keys) - 1


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    place.mkdir()
    mounted = command(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("a small disk can be mounted by root only")
    try:
        yield place
    finally:
        command(["umount", "--lazy", str(place)], check=True)  # Spark may hold a file that it could not close


def make_room(disk: Path) -> None:
    command(["mount", "-o", "remount,size=64m", str(disk)], check=True)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"stream": "a b"}, "a b"),
        ({"start": "soon"}, "from is 'soon'"),
        ({"tolerance_s": -1.0}, "tolerance_s is -1.0: give 0 to 3600 seconds"),
        ({"settle_s": float("nan")}, "settle_s is nan"),
        ({"evidence": -1}, "evidence is -1: give 0 to 10000 rows"),
        ({"follow": True}, "work is missing"),
        ({"follow": True, "available_now": True}, "both given"),
        ({"work": "s3://bucket/x"}, "work is 's3://bucket/x'"),
        ({"start": "9", "end": "4"}, "'endingOffsets' is 4, before 'startingOffsets' 9"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"stream": "ORDERS", "group": "billing"} | wrong
    with pytest.raises(InvalidInput) as refused:
        Settings(**given)
    assert said in str(refused.value)

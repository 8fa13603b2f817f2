"""The lake: every sequence exactly once in the table, however often it is stopped, killed or told to write it again.

What is in a table is read by `deltalake`, which is not Spark.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable as Reader

from keylane import groups
from keylane.errors import InvalidInput, LakeBroken, LakeConflict, NotFound
from keylane.server import NatsServer
from keylane.spark.address import Address
from keylane.spark.pipelines import lake
from keylane.spark.pipelines.delta_table import DeltaTable, TakenOver
from tests.integration.spark.source_rig import Ground, ground
from tests.peers.delta import find_delta
from tests.peers.presence import require

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(600),
    pytest.mark.long("every run commits to a Delta table several times"),
]

Unique = Callable[..., str]


@pytest.fixture
def here(nats_server: NatsServer, spark: SparkSession) -> Iterator[Ground]:
    require(find_delta)
    with ground(nats_server.url, spark) as made:
        yield made


def settings(here: Ground, stream: str, table: Path, **more: object) -> lake.Settings:
    return lake.Settings(stream=stream, table=str(table), address=Address(url=here.url), **more)  # type: ignore[arg-type]


def seen(table: Path) -> list[int]:
    found: list[int] = Reader(table).to_pyarrow_table(columns=["sequence"])["sequence"].to_pylist()
    return sorted(found)


def once(*ranges: tuple[int, int]) -> list[int]:
    return sorted(number for first, last in ranges for number in range(first, last + 1))


def test_the_keys_of_a_group_and_the_queue_of_a_group_are_two_tables(
    here: Ground, unique: Unique, tmp_path: Path
) -> None:
    name = here.make(unique("L"))
    here.publish(name, range(20))
    here.call(lambda c: groups.create_elastic(c, name, "g", partitions=4, partition_by=f"{name}.*", members=["a"]))
    try:
        table = tmp_path / "lake"
        report = lake.run(here.spark, settings(here, name, table, group="g", end="latest"))
        assert (report.stream, report.rows) == (name, 20)
        assert set(Reader(table).to_pyarrow_table(columns=["key"])["key"].to_pylist()) == {f"k{n}" for n in range(7)}
        with pytest.raises(LakeConflict, match=rf"is of stream '{name}', and this run reads stream '{name}-g'"):
            lake.run(here.spark, settings(here, name, table, group="g", queue=True, end="latest"))
        of_queue = settings(here, name, tmp_path / "queue", group="g", queue=True, end="latest")
        assert lake.run(here.spark, of_queue).stream == f"{name}-g"
    finally:
        here.call(lambda c: groups.delete(c, name, "g"))


# ---- streaming and batch ----------------------------------------------------------------------------------


def test_a_stream_becomes_a_table_by_partition_and_day(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("L"), numbered=True)
    here.publish(name, range(300))
    table = tmp_path / "a lake"
    said: list[str] = []
    report = lake.run(here.spark, settings(here, name, table, available_now=True, max_rows=100), said.append)
    assert (report.rows, report.batches, report.rows_in_table, report.stopped) == (300, 3, 300, False)
    assert (report.first, report.last, report.streamed_after) == (1, 300, 0)
    assert "300 rows so far" in said[-1]
    today = datetime.now(UTC).date()
    rows = {row["sequence"]: row for row in here.spark.read.format("delta").load(str(table)).collect()}
    source = {row["sequence"]: row for row in here.read(name).collect()}
    assert len(rows) == 300
    for sequence, row in source.items():
        got = rows[sequence].asDict()
        assert {column: got[column] for column in row.asDict()} == row.asDict()
        assert abs((got["day"] - today).days) <= 1
    other = Reader(table)
    assert other.metadata().partition_columns == ["partition", "day"]
    assert seen(table) == once((1, 300))
    found = other.to_pyarrow_table(columns=["sequence", "data", "partition", "timestamp"]).to_pylist()
    for row in found:
        expected = source[row["sequence"]]
        assert (row["data"], row["partition"]) == (bytes(expected["data"]), expected["partition"])
        assert row["timestamp"].replace(tzinfo=None) == expected["timestamp"].astimezone(UTC).replace(tzinfo=None)


def test_runs_go_on_where_the_last_one_ended(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("L"))
    table = tmp_path / "lake"
    first = settings(here, name, table, start="latest", available_now=True)
    here.publish(name, range(10))
    assert lake.run(here.spark, first).rows == 0  # it begins behind what is there
    here.publish(name, range(10, 30))
    again = lake.run(here.spark, first)
    assert (again.rows, again.first, again.last, again.streamed_after) == (20, 11, 30, 10)
    nothing = lake.run(here.spark, first)
    assert (nothing.rows, nothing.rows_in_table) == (0, 20)
    # What is older is filled in later, in steps; what a streaming run writes is left to it; a repetition adds nothing.
    here.publish(name, range(30, 40))
    back = settings(here, name, table, end="35", max_rows=4)
    filled = lake.run(here.spark, back)
    assert (filled.rows, filled.batches, filled.left_to_streaming) == (10, 3, 25)
    assert "left out        25 sequences above 10: the streaming run writes them" in filled.as_text()
    assert lake.run(here.spark, back).rows == 0
    assert seen(table) == once((1, 30))
    # Without its checkpoint a streaming run still knows from the table where it was.
    shutil.rmtree(table / "_keylane" / "checkpoint")
    assert lake.run(here.spark, first).rows == 10
    assert seen(table) == once((1, 40))


def test_backfills_that_overlap_before_a_streaming_run(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("L"), numbered=True)
    here.publish(name, range(40))
    time.sleep(0.05)
    between = datetime.now(UTC).isoformat()
    time.sleep(0.05)
    here.publish(name, range(40, 70))
    table = tmp_path / "lake"
    report = lake.run(here.spark, settings(here, name, table, start=between, end="latest"))
    assert (report.rows, report.first, report.last, report.streamed_after) == (30, 41, 70, None)
    assert lake.run(here.spark, settings(here, name, table, start="-1h", end="50", max_rows=30)).rows == 40
    here.publish(name, range(70, 90))
    assert lake.run(here.spark, settings(here, name, table, available_now=True)).rows == 20
    assert seen(table) == once((1, 90))


def test_a_streaming_run_that_is_told_to_stop(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("L"))
    here.publish(name, range(50))
    table = tmp_path / "lake"
    stop = threading.Event()

    def say(line: str) -> None:
        if "rows so far" in line:
            stop.set()

    report = lake.run(here.spark, settings(here, name, table, max_rows=10, interval_s=0), say, stop=stop)
    assert report.stopped
    assert 10 <= report.rows <= 50
    assert seen(table) == once((1, report.rows))
    assert lake.run(here.spark, settings(here, name, table, available_now=True)).rows == 50 - report.rows
    assert seen(table) == once((1, 50))


def test_small_files_are_merged_and_old_ones_deleted(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("L"))
    here.publish(name, range(60))
    table = tmp_path / "lake"
    here.spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    try:
        report = lake.run(here.spark, settings(here, name, table, available_now=True, max_rows=20, compact=True))
        assert report.files < report.files_merged
        assert report.files_made == report.files == len(Reader(table).file_uris())
        assert seen(table) == once((1, 60))
        assert len(list(table.rglob("part-*.parquet"))) > report.files
        again = lake.run(here.spark, settings(here, name, table, only_compact=True, vacuum_hours=0))
    finally:
        here.spark.conf.unset("spark.databricks.delta.retentionDurationCheck.enabled")
    assert (again.rows, again.files_merged, again.rows_in_table) == (0, 0, 60)
    assert len(list(table.rglob("part-*.parquet"))) == report.files
    here.publish(name, range(60, 80))
    assert lake.run(here.spark, settings(here, name, table, available_now=True)).rows == 20, (
        "VACUUM kept the checkpoint"
    )
    assert seen(table) == once((1, 80))


def test_an_empty_range_makes_an_empty_table(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("L"))
    table = tmp_path / "lake"
    assert lake.run(here.spark, settings(here, name, table, end="latest")).rows == 0
    empty = lake.run(here.spark, settings(here, name, table, available_now=True))
    assert (empty.rows, empty.rows_in_table, empty.files) == (0, 0, 0)
    here.publish(name, range(3))
    assert lake.run(here.spark, settings(here, name, table, available_now=True)).rows == 3


def test_parquet_by_the_file_sink_of_spark(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("L"), numbered=True)
    here.publish(name, range(50))
    table = tmp_path / "lake"
    into = settings(here, name, table, format="parquet", available_now=True, max_rows=20)
    report = lake.run(here.spark, into)
    assert (report.rows, report.batches, report.first, report.last, report.format) == (50, 3, 1, 50, "parquet")
    assert report.files == len(list(table.rglob("part-*.parquet")))
    assert report.bytes > 0
    here.publish(name, range(50, 60))
    assert lake.run(here.spark, into).rows == 10
    rows = here.spark.read.parquet(str(table)).select("sequence").collect()
    assert sorted(row["sequence"] for row in rows) == once((1, 60))


# ---- two runs on one table --------------------------------------------------------------------------------


def test_who_claims_a_side_of_a_table_shuts_out_who_had_it(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("L"))
    here.publish(name, range(3))
    lake.run(here.spark, settings(here, name, tmp_path / "lake", end="latest"))
    table = DeltaTable(here.spark, str(tmp_path / "lake"))
    held = here.spark.read.format("delta").load(table.path)
    rows = here.spark.createDataFrame(held.collect(), held.schema)
    stream, backfill = table.claim("stream"), table.claim("backfill")
    stream.append(rows.where("sequence = 1"))
    backfill.append(rows.where("sequence = 1"))
    assert table.totals().rows == 5, "the two sides do not disturb each other"
    newer = table.claim("stream")
    with pytest.raises(TakenOver, match="another streaming run began to write table"):
        stream.append(rows)
    newer.append(rows.where("sequence = 3"))
    assert table.totals().rows == 6, "what lost its claim writes nothing"


def test_a_backfill_goes_on_below_a_streaming_run_that_begins(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("L"))
    here.publish(name, range(60))
    table = tmp_path / "lake"
    streamed: list[int] = []

    def begin_streaming(line: str) -> None:
        if "rows so far" in line and not streamed:
            streamed.append(lake.run(here.spark, settings(here, name, table, start="41", available_now=True)).rows)

    report = lake.run(here.spark, settings(here, name, table, end="latest", max_rows=10), begin_streaming)
    assert streamed == [20]
    assert (report.rows, report.left_to_streaming, report.streamed_after) == (40, 20, 40)
    assert seen(table) == once((1, 60))


def test_a_second_backfill_ends_the_first(
    here: Ground, unique: Unique, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake, "_BOUNDARY_S", 0.5)
    name = here.make(unique("L"))
    here.publish(name, range(30))
    table = tmp_path / "lake"
    rows: list[int] = []

    def begin_another(line: str) -> None:
        if "rows so far" in line and not rows:
            rows.append(lake.run(here.spark, settings(here, name, table, end="latest", max_rows=15)).rows)

    with pytest.raises(TakenOver, match="another backfill"):
        lake.run(here.spark, settings(here, name, table, end="latest", max_rows=10), begin_another)
    assert rows == [20]
    assert seen(table) == once((1, 30))


# ---- what is refused --------------------------------------------------------------------------------------


def test_a_stream_that_was_made_anew_or_is_another(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("L"))
    here.publish(name, range(5))
    table = tmp_path / "lake"
    lake.run(here.spark, settings(here, name, table, end="latest"))
    with pytest.raises(LakeConflict, match="filter"):
        lake.run(here.spark, settings(here, name, table, end="latest", filter=f"{name}.k1"))
    here.api(f"STREAM.DELETE.{name}")
    with pytest.raises(NotFound, match="there is no stream"):
        lake.run(here.spark, settings(here, name, table, end="latest"))
    here.make(name)
    here.publish(name, range(5))
    with pytest.raises(LakeConflict, match="was made anew"):
        lake.run(here.spark, settings(here, name, table, end="latest"))
    assert seen(table) == once((1, 5))
    with pytest.raises(InvalidInput, match="there is no table"):
        lake.run(here.spark, settings(here, name, tmp_path / "none", only_compact=True))
    here.spark.range(3).write.format("delta").save(str(tmp_path / "foreign"))
    with pytest.raises(LakeConflict, match="was not made by this pipeline"):
        lake.run(here.spark, settings(here, name, tmp_path / "foreign", end="latest"))


def fill(path: Path, *, leave: int) -> None:
    free = shutil.disk_usage(path.parent).free
    path.write_bytes(bytes(free - leave))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("L"))
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], check=False).returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        here.publish(name, range(50))
        lake.run(here.spark, settings(here, name, small / "lake", end="latest"))
        fill(small / "ballast", leave=40_000)
        here.publish(name, range(50, 9000))
        with pytest.raises(LakeBroken, match=r"no space is left|No space left"):
            lake.run(here.spark, settings(here, name, small / "lake", end="latest"))
        assert seen(small / "lake") == once((1, 50))  # nothing half-written counts
        (small / "ballast").unlink()
        lake.run(here.spark, settings(here, name, small / "lake", end="latest"))
        assert seen(small / "lake") == once((1, 9000))
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)  # a worker of Spark may still look at it

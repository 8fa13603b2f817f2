"""The lake: every sequence exactly once in the files, however often it is stopped, killed or told to write it again."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.dataset as ds  # type: ignore[import-untyped]  # it has no types
import pytest

from keylane import groups
from keylane.core.sequence_ranges import Coverage
from keylane.errors import InvalidInput, LakeBroken, LakeConflict, NotFound
from keylane.server import NatsServer
from keylane.spark.address import Address
from keylane.spark.pipelines import lake
from keylane.spark.pipelines.table import Identity, Table
from tests.integration.spark.source_rig import Ground, ground
from tests.peers.java import LIGHT_JAVA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

Unique = Callable[..., str]


@pytest.fixture
def here(nats_server: NatsServer, spark: SparkSession) -> Iterator[Ground]:
    with ground(nats_server.url, spark) as made:
        yield made


def settings(here: Ground, stream: str, table: Path, **more: object) -> lake.Settings:
    return lake.Settings(stream=stream, table=str(table), address=Address(url=here.url), **more)  # type: ignore[arg-type]


def seen(table: Path) -> list[int]:
    """The sequences that a plain reader finds, without Spark and without keylane."""
    found: list[int] = (
        ds.dataset(str(table), format="parquet", partitioning="hive").to_table(["sequence"])["sequence"].to_pylist()
    )
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
        assert {row["key"] for row in lake.read_lake(here.spark, str(table)).collect()} == {f"k{n}" for n in range(7)}
        with pytest.raises(LakeConflict, match=rf"is of stream '{name}' .*, and this run reads stream '{name}-g'"):
            lake.run(here.spark, settings(here, name, table, group="g", queue=True, end="latest"))
        # As a table of the queue was begun when `group` alone read it.
        queue = Table(tmp_path / "queue")
        queue.open(Identity(f"{name}-g", here.api(f"STREAM.INFO.{name}-g")["created"], {"group": "g"}))
        of_queue = settings(here, name, queue.path, group="g", queue=True, end="latest")
        assert lake.run(here.spark, of_queue).stream == f"{name}-g"
    finally:
        here.call(lambda c: groups.delete(c, name, "g"))


# ---- streaming and batch ----------------------------------------------------------------------------------


def test_a_stream_becomes_a_table_by_partition_and_day(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("L"), numbered=True)
    here.publish(name, range(300))
    table = tmp_path / "lake"
    said: list[str] = []
    report = lake.run(here.spark, settings(here, name, table, available_now=True, max_rows=100), said.append)
    assert (report.rows, report.batches, report.rows_in_table, report.stopped) == (300, 3, 300, False)
    assert report.covered == Coverage([(0, 300)])
    assert "300 rows so far" in said[-1]
    today = datetime.now(UTC).date()
    frame = here.spark.read.parquet(str(table))
    rows = {row["sequence"]: row for row in frame.collect()}
    source = {row["sequence"]: row for row in here.read(name).collect()}
    assert len(rows) == frame.count() == 300
    for sequence, row in source.items():
        got = rows[sequence].asDict()
        assert {column: got[column] for column in row.asDict()} == row.asDict()
        assert abs((got["day"] - today).days) <= 1
    assert seen(table) == once((1, 300))
    assert lake.read_lake(here.spark, str(table)).count() == 300
    for day in table.glob("partition=*/day=*"):
        for path in day.glob("*.parquet"):
            held = ds.dataset(path).to_table(["sequence"])["sequence"].to_pylist()
            assert held == sorted(held)


def test_runs_go_on_where_the_last_one_ended(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("L"))
    table = tmp_path / "lake"
    first = settings(here, name, table, start="latest", available_now=True)
    here.publish(name, range(10))
    assert lake.run(here.spark, first).rows == 0  # it begins behind what is there
    here.publish(name, range(10, 30))
    again = lake.run(here.spark, first)
    assert (again.rows, again.covered) == (20, Coverage([(10, 30)]))
    nothing = lake.run(here.spark, first)
    assert (nothing.rows, nothing.rows_in_table) == (0, 20)
    # What is older is filled in later, in two steps, and a repetition adds nothing.
    back = settings(here, name, table, end="20", max_rows=4)
    assert (lake.run(here.spark, back).rows, lake.run(here.spark, back).rows) == (10, 0)
    assert seen(table) == once((1, 30))
    assert lake.run(here.spark, first).rows == 0
    assert {row[0] for row in here.spark.read.parquet(str(table)).select("partition").distinct().collect()} == {-1}


def test_a_backfill_by_time_and_a_lost_checkpoint(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("L"), numbered=True)
    here.publish(name, range(40))
    time.sleep(0.05)
    between = datetime.now(UTC).isoformat()
    time.sleep(0.05)
    here.publish(name, range(40, 70))
    table = tmp_path / "lake"
    report = lake.run(here.spark, settings(here, name, table, start=between, end="latest"))
    assert (report.rows, report.covered) == (30, Coverage([(40, 70)]))
    report = lake.run(here.spark, settings(here, name, table, start="-1h", end=between, max_rows=15))
    assert (report.rows, report.covered) == (40, Coverage([(0, 70)]))
    here.publish(name, range(70, 90))
    streaming = settings(here, name, table, available_now=True)
    assert lake.run(here.spark, streaming).rows == 20
    shutil.rmtree(table / "_keylane" / "checkpoint")
    assert lake.run(here.spark, streaming).rows == 0
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


def test_small_files_are_merged(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("L"), numbered=True)
    here.publish(name, range(60))
    table = tmp_path / "lake"
    report = lake.run(here.spark, settings(here, name, table, end="latest", max_rows=20, compact=True))
    days = len(list(table.glob("partition=*/day=*")))
    assert (report.files_merged, report.files_made, report.files) == (3 * days, days, days)
    before = here.spark.read.parquet(str(table)).schema
    assert seen(table) == once((1, 60))
    again = lake.run(here.spark, settings(here, name, table, only_compact=True))
    assert (again.rows, again.files_merged, again.rows_in_table) == (0, 0, 60)
    # A table of merged files and new ones is read as one.
    here.publish(name, range(60, 80))
    lake.run(here.spark, settings(here, name, table, available_now=True))
    frame = here.spark.read.parquet(str(table))
    assert frame.schema == before
    assert frame.count() == 80
    assert seen(table) == once((1, 80))


def test_an_empty_range_makes_an_empty_table(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("L"))
    table = tmp_path / "lake"
    assert lake.run(here.spark, settings(here, name, table, end="latest")).rows == 0
    assert lake.run(here.spark, settings(here, name, table, available_now=True)).rows == 0
    with pytest.raises(InvalidInput, match="has no rows yet"):
        lake.read_lake(here.spark, str(table))
    here.publish(name, range(3))
    assert lake.run(here.spark, settings(here, name, table, available_now=True)).rows == 3


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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"table": "s3a://bucket/x"}, "can rename in one step"),
        ({"end": "latest", "available_now": True}, "give one of them"),
        ({"max_rows": 0}, "max_rows is 0"),
        ({"interval_s": -1}, "interval_s is -1"),
        ({"target_mb": 0}, "target_mb is 0"),
        ({"start": "soon"}, "from is 'soon'"),
        ({"end": "later"}, "to is 'later'"),
        ({"partitions": "x"}, "option 'partitions' is 'x'"),
        ({"stream": "a.b"}, "a.b"),
        ({"start": "20", "end": "10"}, "before 'startingOffsets' 20"),
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        lake.Settings(**({"stream": "ORDERS", "table": "/tmp/x"} | wrong))  # type: ignore[arg-type]  # noqa: S108 - never made


def fill(path: Path, *, leave: int) -> None:
    free = shutil.disk_usage(path.parent).free
    path.write_bytes(bytes(free - leave))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("L"))
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(small)], check=False).returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        here.publish(name, range(50))
        lake.run(here.spark, settings(here, name, small / "lake", end="latest"))
        fill(small / "ballast", leave=16_000)
        here.publish(name, range(50, 4000))
        with pytest.raises(LakeBroken, match=r"no space is left|No space left"):
            lake.run(here.spark, settings(here, name, small / "lake", end="latest"))
        assert seen(small / "lake") == once((1, 50))  # nothing half-written counts
        (small / "ballast").unlink()
        lake.run(here.spark, settings(here, name, small / "lake", end="latest"))
        assert seen(small / "lake") == once((1, 4000))
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)  # a worker of Spark may still look at it


# ---- kills ------------------------------------------------------------------------------------------------


@contextmanager
def driver(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a session of its own; whatever is left of it is killed at the end, JVM and all."""
    process = subprocess.Popen(
        [sys.executable, "-m", "keylane.cli.main", "pipeline", "run", "lake", "--master", "local[2]", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=os.environ | LIGHT_JAVA,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def commits(table: Path) -> int:
    state = table / "_keylane" / "state.json"
    return int(json.loads(state.read_text())["commits"]) if state.is_file() else 0


@pytest.mark.timeout(900)
def test_drivers_killed_while_they_write_and_merge(here: Ground, unique: Unique, tmp_path: Path) -> None:
    name = here.make(unique("L"), numbered=True)
    table = tmp_path / "lake"
    chance = random.Random(7)  # noqa: S311 - repeatable, guards nothing
    common = ("-s", here.url, "--stream", name, "--table", str(table), "--compact")
    for life in range(2):
        here.publish(name, range(life * 1000, (life + 1) * 1000))
        enough, deadline = commits(table) + chance.randint(3, 8), time.monotonic() + 240
        with driver(*common, "--max-rows", "50", "--interval", "0") as process:
            while commits(table) < enough:
                assert process.poll() is None, process.stdout.read() if process.stdout else ""
                assert time.monotonic() < deadline, "it did not write"
                time.sleep(0.02)
        if table.is_dir():
            times = Counter(seen(table))
            assert set(times.values()) <= {1}  # what a plain reader sees right after the kill
    with driver(*common, "--available-now", "--max-rows", "500", "--json") as process:
        told, _ = process.communicate(timeout=240)
    assert process.returncode == 0, told.decode()
    assert seen(table) == once((1, 2000))
    report = json.loads(told[told.index(b"{") :])
    assert report["rows_in_table"] == 2000
    assert report["files_merged"] > 0

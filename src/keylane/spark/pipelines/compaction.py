"""Compaction: the small files of a day become few large ones, in one step for every reader.

Tasks on the executors merge files row group by row group, so their memory does not grow with the files. The driver
then exchanges the day's directory (`Table.replace`). Nothing is deleted before its rows are in the place that readers
look at. A query that listed the old files and opens them after the exchange fails for want of a file: it never sees
rows twice or not at all.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from keylane.errors import InvalidInput, LakeBroken
from keylane.spark.pipelines.table import DataFile, Table
from keylane.spark.pipelines.work_directory import can_exchange

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from keylane.spark.pipelines.spark_jobs import Say

_ROWS_AT_ONCE = 64 * 1024


@dataclass(frozen=True, slots=True)
class Compacted:
    merged: int = 0
    made: int = 0
    directories: int = 0


@dataclass(frozen=True, slots=True)
class Merge:
    """Files of one directory that become one."""

    directory: str
    old: tuple[str, ...]
    new: str


def plan_merges(files: Sequence[DataFile], target_bytes: int) -> list[Merge]:
    """Which files to merge: neighbours in the order of their sequences that are small, up to the target together."""
    merges: list[Merge] = []
    for directory in dict.fromkeys(one.directory for one in files):
        own = [one for one in files if one.directory == directory]
        taken = {one.name for one in own}
        for group in _groups(own, target_bytes):
            merges.append(Merge(directory, tuple(one.name for one in group), _name(group, taken)))
            taken.add(merges[-1].new)
    return merges


def _groups(files: Sequence[DataFile], target_bytes: int) -> Iterator[list[DataFile]]:
    group: list[DataFile] = []
    for one in files:
        if one.bytes * 2 > target_bytes or sum(other.bytes for other in group) + one.bytes > target_bytes:
            if len(group) > 1:
                yield group
            group = []
        if one.bytes * 2 <= target_bytes:
            group.append(one)
    if len(group) > 1:
        yield group


def _name(group: Sequence[DataFile], taken: set[str]) -> str:
    stem = f"{min(one.first for one in group)}-{max(one.last for one in group)}"
    number, name = 0, f"{stem}.parquet"
    while name in taken:
        number += 1
        name = f"{stem}.{number}.parquet"
    return name


def compact(spark: SparkSession, table: Table, *, target_bytes: int, say: Say) -> Compacted:
    """Merge what is small. May run while another process fills the table."""
    with table.locked():
        files = table.files()
    merges = plan_merges(files, target_bytes)
    if not merges:
        return Compacted()
    if not can_exchange(table.room):
        raise InvalidInput(
            f"table {str(table.path)!r} cannot be compacted: its file system cannot exchange two directories in one "
            "step (ext4, xfs, btrfs, tmpfs and APFS can), so a reader could miss or double rows; nothing was changed"
        )
    by_directory: dict[str, list[Merge]] = {}
    for merge in merges:
        by_directory.setdefault(merge.directory, []).append(merge)
    made = merged = 0
    with table.staging() as staging:
        tasks = [
            (
                [str(table.path / one.directory / name) for name in one.old],
                str(staging / one.directory / one.new),
            )
            for one in merges
        ]
        say(f"compaction: {sum(len(one.old) for one in merges):,} files become {len(merges):,}")
        _merge_all(spark, tasks)
        for directory, own in by_directory.items():
            old = [name for merge in own for name in merge.old]
            if table.replace(staging, directory, old, [merge.new for merge in own]):
                merged += len(old)
                made += len(own)
    return Compacted(merged, made, len(by_directory))


def _merge_all(spark: SparkSession, tasks: list[tuple[list[str], str]]) -> None:
    context = spark.sparkContext
    slices = min(len(tasks), max(1, context.defaultParallelism) * 4)
    counted = context.parallelize(tasks, slices).map(_merge).collect()
    for (_, target), (before, after) in zip(tasks, counted, strict=True):
        if before != after:
            raise LakeBroken(f"{before:,} rows became {after:,} in {target!r}: nothing was replaced")


def _merge(task: tuple[list[str], str]) -> tuple[int, int]:
    """Runs on an executor. The rows of the old files and of the new one."""
    import pyarrow.parquet as pq  # type: ignore[import-untyped]  # noqa: PLC0415 - it has no types; loaded when used

    sources, target = task
    place = Path(target)
    place.parent.mkdir(parents=True, exist_ok=True)
    # A task may run twice at the same time: each has a name of its own until it is whole.
    temporary = place.with_name(f".{uuid.uuid4().hex}")
    files = [pq.ParquetFile(source) for source in sources]
    rows = sum(file.metadata.num_rows for file in files)
    with pq.ParquetWriter(temporary, files[0].schema_arrow, compression="snappy") as writer:
        for file in files:
            for batch in file.iter_batches(_ROWS_AT_ONCE):
                writer.write_batch(batch)
    for file in files:
        file.close()
    os.replace(temporary, place)
    return rows, pq.read_metadata(place).num_rows

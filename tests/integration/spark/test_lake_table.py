"""The lake's table on disk, without Spark: killed at every single step, it is whole, and no row is there twice."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from keylane.core.sequence_ranges import Coverage
from keylane.errors import InvalidInput, LakeBroken, LakeConflict
from keylane.spark.pipelines import table as module
from keylane.spark.pipelines.compaction import plan_merges
from keylane.spark.pipelines.table import DataFile, Identity, Table

IDENTITY = Identity("ORDERS", "2026-05-01T00:00:00Z", {})
DAY = "partition=0/day=2026-05-01"
OTHER_DAY = "partition=1/day=2026-05-02"


def staged(staging: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).write_text(text)


def add(table: Table, first: int, last: int) -> None:
    seen = table.state().coverage
    with table.staging() as staging:
        staged(staging, {f"{DAY}/a.parquet": f"{first}-{last}", f"{OTHER_DAY}/b.parquet": f"{first}-{last} other"})
        assert table.add(staging, (first - 1, last), last - first + 1, seen=seen) is not None


def merge(table: Table) -> None:
    """The first two files of a day become one."""
    files = [one for one in table.files() if one.directory == DAY][:2]
    text = " ".join((table.path / one.path).read_text() for one in files)
    with table.staging() as staging:
        staged(staging, {f"{DAY}/1-20.parquet": text})
        assert table.replace(staging, DAY, [one.name for one in files], ["1-20.parquet"])


def contents(table: Table, directory: str = DAY) -> list[str]:
    """What a plain reader of a day sees, word by word."""
    found = [path.read_text() for path in (table.path / directory).glob("*.parquet")]
    return sorted(word for text in found for word in text.split())


@pytest.fixture
def table(tmp_path: Path) -> Table:
    made = Table(tmp_path / "a table")
    made.open(IDENTITY)
    return made


def test_files_come_to_their_place(table: Table) -> None:
    add(table, 1, 10)
    add(table, 11, 20)
    assert [one.path for one in table.files()] == [
        f"{DAY}/1-10.parquet",
        f"{DAY}/11-20.parquet",
        f"{OTHER_DAY}/1-10.parquet",
        f"{OTHER_DAY}/11-20.parquet",
    ]
    state = table.open(IDENTITY)
    assert (state.coverage, state.rows, state.commits, state.pending) == (Coverage([(0, 20)]), 20, 2, None)
    assert list((table.room / "staged").iterdir()) == []


def test_several_files_of_one_range_and_day(table: Table) -> None:
    with table.staging() as staging:
        staged(staging, {f"{DAY}/{name}.parquet": name for name in "xyz"})
        table.add(staging, (4, 9), 3, seen=Coverage())
    assert [one.name for one in table.files()] == ["5-9.1.parquet", "5-9.2.parquet", "5-9.parquet"]
    assert {(one.first, one.last) for one in table.files()} == {(5, 9)}


def test_a_range_that_somebody_else_covered_is_not_added(table: Table) -> None:
    seen = table.state().coverage
    add(table, 5, 10)
    with table.staging() as staging:
        staged(staging, {f"{DAY}/late.parquet": "late"})
        assert table.add(staging, (0, 8), 8, seen=seen) is None
    assert contents(table) == ["5-10"]
    assert table.state().coverage == Coverage([(4, 10)])


def test_a_merge_of_what_is_gone_does_nothing(table: Table) -> None:
    add(table, 1, 10)
    with table.staging() as staging:
        staged(staging, {f"{DAY}/n.parquet": "n"})
        assert not table.replace(staging, DAY, ["1-10.parquet", "gone.parquet"], ["n.parquet"])
    assert contents(table) == ["1-10"]


# ---- kills ------------------------------------------------------------------------------------------------

_STEPS = (
    (os, "fsync"),
    (os, "link"),
    (os, "open"),
    (Path, "replace"),
    (Path, "mkdir"),
    (Path, "touch"),
    (Path, "unlink"),
    (module, "exchange"),
    (shutil, "rmtree"),
    (fcntl, "flock"),
)


def _dying(path: Path, work: Callable[[Table], None], step: int) -> None:
    """In a process of its own: do the work and die before the given step; exit code 9 if it came to that."""
    left = step

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            nonlocal left
            if left == 0:
                os._exit(9)
            left -= 1
            return real(*arguments, **named)

        return call

    for owner, name in _STEPS:
        setattr(owner, name, counted(getattr(owner, name)))
    work(Table(path))
    os._exit(0)


def kill_at_each_step(table: Table, work: Callable[[Table], None], check: Callable[[bool], None]) -> int:
    """Kill the work before its first step, its second … until it comes to its end. Returns the number of kills."""
    context = multiprocessing.get_context("fork")
    for step in range(1000):
        process = context.Process(target=_dying, args=(table.path, work, step))
        process.start()
        process.join(30)
        assert process.exitcode in (0, 9), process.exitcode
        check(process.exitcode == 0)
        if process.exitcode == 0:
            return step
    raise AssertionError("it never came to its end")


def test_adding_killed_at_every_step(table: Table) -> None:
    add(table, 1, 10)

    def work(one: Table) -> None:
        one.open(IDENTITY)
        one.clear()
        if not one.state().coverage.touches((10, 20)):
            add(one, 11, 20)

    def check(ended: bool) -> None:
        before = contents(table)  # as a plain reader sees it right after the kill
        assert before in (["1-10"], ["1-10", "11-20"])
        state = table.state()
        assert contents(table) == (["1-10", "11-20"] if state.coverage.last == 20 else ["1-10"])
        assert len(contents(table, OTHER_DAY)) == 2 * len(contents(table))
        assert state.rows == state.coverage.last
        if not ended and state.coverage.last == 20:  # begin anew, to die at a later step
            for path in table.path.glob("partition=*/day=*/11-20.parquet"):
                path.unlink()
            wire = json.loads((table.room / "state.json").read_text())
            wire |= {"covered": [[1, 10]], "rows": 10}
            (table.room / "state.json").write_text(json.dumps(wire))

    kills = kill_at_each_step(table, work, check)
    assert kills > 20
    assert list((table.room / "staged").iterdir()) == []


def test_merging_killed_at_every_step(table: Table) -> None:
    for first in (1, 11, 21):
        add(table, first, first + 9)
    whole = ["1-10", "11-20", "21-30"]

    def work(one: Table) -> None:
        one.open(IDENTITY)
        one.clear()
        merge(one)

    def check(ended: bool) -> None:
        assert contents(table) == whole  # at no moment more or less
        was_merged = (table.path / DAY / "1-20.parquet").exists()
        table.state()
        assert contents(table) == whole
        names = [one.name for one in table.files() if one.directory == DAY]
        assert names in (["1-10.parquet", "11-20.parquet", "21-30.parquet"], ["1-20.parquet", "21-30.parquet"])
        assert len(names) == 2 or not was_merged  # what is done is not undone
        if not ended and len(names) == 2:  # begin anew, to die at a later step
            (table.path / DAY / "1-10.parquet").write_text("1-10")
            (table.path / DAY / "11-20.parquet").write_text("11-20")
            (table.path / DAY / "1-20.parquet").unlink()

    kills = kill_at_each_step(table, work, check)
    assert kills > 20
    assert list((table.room / "staged").iterdir()) == []


def test_what_a_living_writer_has_staged_is_left_alone(table: Table) -> None:
    with table.staging() as staging:
        staged(staging, {f"{DAY}/a.parquet": "a"})
        table.clear()
        assert (staging / DAY / "a.parquet").is_file()
        assert table.add(staging, (0, 1), 1, seen=Coverage()) is not None


# ---- what is refused --------------------------------------------------------------------------------------


def test_another_stream_or_selection_is_refused(table: Table) -> None:
    with pytest.raises(LakeConflict, match="is of stream 'ORDERS', and this run reads stream 'OTHER'"):
        table.open(Identity("OTHER", IDENTITY.created, {}))
    with pytest.raises(LakeConflict, match="reads stream 'ORDERS' with filter 'a'"):
        table.open(Identity("ORDERS", IDENTITY.created, {"filter": "a"}))
    with pytest.raises(LakeConflict, match="was made anew at 2026-06-01"):
        table.open(Identity("ORDERS", "2026-06-01", {}))


def test_places_that_are_no_table(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InvalidInput, match="is a file: name a directory"):
        Table(file).open(IDENTITY)
    with pytest.raises(InvalidInput, match="with other things in it"):
        Table(tmp_path).open(IDENTITY)
    with pytest.raises(InvalidInput, match="holds no table"):
        Table(tmp_path / "none").state()


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    # Root may write everywhere but into the kernel's own file system.
    place = Path("/sys/keylane") if os.geteuid() == 0 else closed / "table"
    with pytest.raises(InvalidInput, match=r"cannot be written: (Permission denied|Operation not permitted)"):
        Table(place).open(IDENTITY)


def test_a_state_that_cannot_be_read(table: Table) -> None:
    path = table.room / "state.json"
    whole = path.read_text()
    path.write_text(whole.replace('"version": 1', '"version": 2'))
    with pytest.raises(LakeBroken, match="has version 2"):
        table.state()
    path.write_text(whole[:40])
    with pytest.raises(LakeBroken, match="cannot be read"):
        table.state()


def test_a_decided_file_that_somebody_removed(table: Table) -> None:
    wire = json.loads((table.room / "state.json").read_text())
    wire["pending"] = {"change": "x", "moves": [["_keylane/staged/x/a", f"{DAY}/1-2.parquet"]], "exchanges": []}
    (table.room / "state.json").write_text(json.dumps(wire))
    with pytest.raises(LakeBroken, match="neither is there"):
        table.state()


# ---- which files are merged -------------------------------------------------------------------------------


def file(name: str, size: int, directory: str = DAY) -> DataFile:
    return DataFile(directory, name, size)


def test_small_neighbours_are_merged() -> None:
    files = [file(f"{first}-{first + 9}.parquet", 10) for first in (1, 11, 21)]
    [one] = plan_merges(files, 100)
    assert (one.directory, one.old, one.new) == (DAY, tuple(one.name for one in files), "1-30.parquet")
    assert [merge.old for merge in plan_merges(files, 20)] == [("1-10.parquet", "11-20.parquet")]
    assert plan_merges(files, 15) == []
    assert plan_merges(files[:1], 100) == []


def test_a_large_file_is_left_and_parts_its_neighbours() -> None:
    sizes = {"1-10": 10, "11-20": 10, "21-30": 80, "31-40": 10, "41-50": 10}
    merges = plan_merges([file(f"{name}.parquet", size) for name, size in sizes.items()], 100)
    assert [merge.new for merge in merges] == ["1-20.parquet", "31-50.parquet"]


def test_a_merged_file_never_takes_a_name_that_is_there() -> None:
    files = [file("1-10.1.parquet", 5), file("1-10.2.parquet", 5), file("1-10.parquet", 90)]
    [one] = plan_merges(files, 100)
    assert (one.old, one.new) == (("1-10.1.parquet", "1-10.2.parquet"), "1-10.3.parquet")

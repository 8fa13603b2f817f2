"""A Spark query whose driver is killed: the run itself, short, and that its judge sees what it should."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from chaos.spark import KEYS, Row, Settings, _committed_files, _judged
from tests.peers.java import LIGHT_JAVA
from tests.peers.store import REPOSITORY

pytestmark = pytest.mark.spark


async def run(*arguments: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "chaos", "spark", *arguments, "--json",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=REPOSITORY, env=os.environ | LIGHT_JAVA,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, (out.decode(), err.decode())
    told: dict[str, Any] = json.loads(out)
    return told


@pytest.mark.timeout(600)
@pytest.mark.parametrize("into", ["parquet", "stream"])
async def test_every_sequence_is_there_once_after_two_deaths(into: str) -> None:
    told = await run("--messages", "12000", "--kills", "2", "--seed", "3", "--into", into)
    assert told["clean"] is True
    assert told["kills"] == 2
    assert told["rows"] == 12_000


@pytest.mark.timeout(900)
@pytest.mark.long("two deaths, and a table that is written from two sides")
async def test_a_table_with_a_backfill_beside_the_streaming_run() -> None:
    told = await run("--messages", "50000", "--kills", "2", "--seed", "5", "--into", "lake")
    assert told["clean"] is True
    assert (told["kills"], told["rows"]) == (2, 50_000)


def rows(*sequences: int) -> list[Row]:
    return [Row(sequence, f"k{(sequence - 1) % KEYS}", sequence) for sequence in sequences]


def test_the_judge_sees_what_is_wrong() -> None:
    settings = Settings(messages=KEYS + 1)
    everything = range(1, KEYS + 2)
    assert _judged(settings, 1.0, rows(*everything)).clean
    assert _judged(settings, 1.0, rows(*everything[1:])).missing == 1
    assert _judged(settings, 1.0, rows(*everything, 7, 7)).repeated == 2
    assert _judged(settings, 1.0, rows(*everything, KEYS + 9)).unknown == 1
    assert _judged(settings, 1.0, rows(*reversed(everything))).out_of_order == 1
    assert _judged(settings, 1.0, [Row(1, "k0", 2), *rows(*everything[1:])]).wrong == 1


def test_only_committed_files_count(tmp_path: Path) -> None:
    """A compaction repeats the batches before it, and files of a batch that failed are not in the log."""
    log = tmp_path / "_spark_metadata"
    log.mkdir()

    def batch(name: str, *files: str) -> None:
        lines = [json.dumps({"path": f"file://{tmp_path}/{file}", "action": "add"}) for file in files]
        (log / name).write_text("\n".join(["v1", *lines]))

    for file in ("a", "b", "c", "stray"):
        pq.write_table(pa.table({"sequence": [1]}), tmp_path / file)
    batch("0", "a")
    batch("1.compact", "a", "b")
    batch("2", "c")
    assert [path.name for path in _committed_files(log)] == ["a", "b", "c"]

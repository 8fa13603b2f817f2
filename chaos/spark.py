"""Does a Spark query lose or repeat a row when its driver is killed? One stream, one query, many deaths.

The query's driver runs in a process of its own and is killed with SIGKILL at random moments, JVM and all; the next one
goes on from the checkpoint with another batch size. At the end the files, or the stream that the query wrote, are read
without Spark and without keylane's Spark room, and every sequence must be there once.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from deltalake import DeltaTable

import keylane
from chaos.members import RunBroken
from chaos.spark_driver import OUT, READ_BY_SPARK, SECONDS_TO_FINISH, Into, Query
from keylane.jetstream import Connection, open_publisher, read_all, streams
from keylane.server import NatsServer
from keylane.testing import Effect, judge
from tests.peers import tether

Say = Callable[[str], None]

STREAM = "ORDERS"
PARTITIONS, KEYS = 10, 500
_START_S = 180.0
_LONGEST_LIFE_S = 3.0
_POLL_S = 0.05
_BATCHES_A_LIFE = (2, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    messages: int = 1_000_000
    kills: int = 10
    seed: int = 1
    into: Into = "parquet"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the output shows."""

    settings: Settings
    kills: int
    seconds: float
    rows: int
    missing: int
    repeated: int
    unknown: int
    out_of_order: int
    wrong: int
    """Rows whose data is not that of their sequence."""

    @property
    def clean(self) -> bool:
        return not (self.missing or self.repeated or self.unknown or self.out_of_order or self.wrong)

    def as_json(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "settings"}
        settings = {name: getattr(self.settings, name) for name in self.settings.__dataclass_fields__}
        return {"scenario": "spark", "clean": self.clean, "settings": settings} | told


async def run(settings: Settings, say: Say) -> Outcome:
    """Publish a part, let a driver begin on it, kill it; at the end let one finish; then read and judge."""
    chance = random.Random(settings.seed)  # noqa: S311 - repeatable, guards nothing
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos spark ") as directory, NatsServer.start() as server:
        async with await keylane.connect(server.url) as connection:
            await _create(connection)
            part = settings.messages // (settings.kills + 1)
            for number in range(settings.kills):
                await _publish(connection, number * part, part)
                query = _query(settings, server.url, directory, part // chance.randint(*_BATCHES_A_LIFE))
                lived_s = await asyncio.to_thread(_life, query, chance.uniform(0, _LONGEST_LIFE_S))
                say(f"driver {number + 1} killed {lived_s:.1f} s after its start")
            await _publish(connection, settings.kills * part, settings.messages - settings.kills * part)
            query = _query(settings, server.url, directory, part, available_now=True)
            await asyncio.to_thread(_finish, query)
            say("the last driver is done; reading what is there")
            if settings.into == "lake":
                _check_spark(query, settings.messages)
            rows = [row async for row in _written(connection)] if settings.into == "stream" else _files(query)
    return _judged(settings, time.monotonic() - began_s, rows)


def _query(settings: Settings, url: str, directory: str, rows: int, *, available_now: bool = False) -> Query:
    after = settings.messages // (settings.kills + 1) // 2 if settings.into == "lake" else 0
    return Query(url, STREAM, directory, max(rows, 1), available_now, settings.into, after)


async def _create(connection: Connection) -> None:
    transform = {"src": "orders.*", "dest": f"{{{{Partition({PARTITIONS},1)}}}}.orders.{{{{Wildcard(1)}}}}"}
    await connection.api.request(
        f"STREAM.CREATE.{STREAM}",
        {"name": STREAM, "subjects": ["orders.*"], "subject_transform": transform, "allow_direct": True},
    )
    await streams.create(connection, streams.StreamConfig(name=OUT, subjects=["out.*"], allow_direct=True))


async def _publish(connection: Connection, first: int, count: int) -> None:
    """The payload names the sequence that the message gets: one publisher, in order, into an empty stream."""
    async with open_publisher(connection, max_in_flight=4000) as publisher:
        pending = [
            await publisher.send(f"orders.k{number % KEYS}", b"%d" % (number + 1))
            for number in range(first, first + count)
        ]
    for number, one in zip(range(first, first + count), pending, strict=True):
        if (stored := one.result().sequence) != number + 1:
            raise RunBroken(f"message {number + 1} was stored as {stored}")


# ---- drivers --------------------------------------------------------------------------------------------


def _life(query: Query, extra_s: float) -> float:
    """Start a driver, wait until it has planned a batch, then kill it within `extra_s`. Returns its age."""
    before = _planned(query)
    began_s = time.monotonic()
    with _driver(query) as process:
        while _planned(query) == before:
            _check(process, query)
            if time.monotonic() - began_s > _START_S:
                raise RunBroken(f"no batch was planned within {_START_S:g} s; {_last_words(query)}")
            time.sleep(_POLL_S)
        time.sleep(extra_s)
        _check(process, query)
    return time.monotonic() - began_s


def _finish(query: Query) -> None:
    with _driver(query) as process:
        try:
            code = process.wait(SECONDS_TO_FINISH)
        except subprocess.TimeoutExpired:
            raise RunBroken(f"the last driver did not finish; {_last_words(query)}") from None
        if code != 0:
            raise RunBroken(f"the last driver ended with {code}; {_last_words(query)}")


@contextmanager
def _driver(query: Query) -> Iterator[subprocess.Popen[bytes]]:
    """A driver in a session of its own; whatever is left of it is killed at the end."""
    with _log(query).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, tether.__file__, sys.executable, "-m", "chaos.spark_driver", query.as_argument()],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _planned(query: Query) -> int:
    """How many batches the checkpoint knows."""
    offsets = query.checkpoint / "offsets"
    return sum(1 for path in offsets.iterdir() if path.name.isdigit()) if offsets.is_dir() else 0


def _check(process: subprocess.Popen[bytes], query: Query) -> None:
    if process.poll() is not None:
        raise RunBroken(f"a driver ended by itself with {process.returncode}; {_last_words(query)}")


def _log(query: Query) -> Path:
    return Path(query.directory) / "driver.log"


def _last_words(query: Query) -> str:
    return f"its last words:\n{_log(query).read_text(errors='replace')[-4000:]}"


# ---- evidence -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    sequence: int
    key: str
    said: int
    """The sequence that the data speaks of."""


def _files(query: Query) -> list[Row]:
    """The rows of the files, task by task in order.

    Of a stream's files: those that Spark's own log of committed files names. Of a lake: what a reader of Delta tables
    that is not Spark finds, by sequence.
    """
    rows: list[Row] = []
    for table in _tables(query, ["sequence", "key", "data"]):
        columns = (table.column(name).to_pylist() for name in ("sequence", "key", "data"))
        rows += [Row(sequence, key, int(data)) for sequence, key, data in zip(*columns, strict=True)]
    return rows


def _tables(query: Query, columns: list[str]) -> Iterator[pa.Table]:
    if query.into == "lake":
        yield DeltaTable(query.files).to_pyarrow_table(columns=columns).sort_by("sequence")
        return
    batch = query.into == "batch"
    paths = sorted(query.files.glob("part-*.parquet")) if batch else _committed_files(query.files / "_spark_metadata")
    for path in paths:
        yield pq.read_table(path, columns=columns)


def _check_spark(query: Query, messages: int) -> None:
    """Spark itself found every row, and each once."""
    if f"{READ_BY_SPARK} {messages} {messages}\n" not in _log(query).read_text(errors="replace"):
        raise RunBroken(f"Spark did not read {messages} rows, all different; {_last_words(query)}")


def _committed_files(log: Path) -> list[Path]:
    """Batches since the newest compaction, which itself repeats those before it."""
    entries = [path for path in log.iterdir() if path.name.removesuffix(".compact").isdigit()]
    entries.sort(key=lambda path: int(path.name.removesuffix(".compact")))
    compactions = [place for place, path in enumerate(entries) if path.name.endswith(".compact")]
    lines = [
        json.loads(line)
        for path in entries[compactions[-1] if compactions else 0 :]
        for line in path.read_text().splitlines()[1:]
    ]
    return [Path(unquote(urlparse(line["path"]).path)) for line in lines if line["action"] == "add"]


async def _written(connection: Connection) -> AsyncIterator[Row]:
    """The rows of the stream that the query wrote. A copy speaks of the message that it was made from."""
    async for message in read_all(connection, OUT):
        said = int(message.data.removeprefix(b"seen "))
        yield Row(said, message.subject.removeprefix("out."), said)


def _judged(settings: Settings, seconds: float, rows: list[Row]) -> Outcome:
    verdict = judge(range(1, settings.messages + 1), (Effect(row.key, row.sequence) for row in rows))
    times = Counter(row.sequence for row in rows)
    return Outcome(
        settings,
        settings.kills,
        seconds,
        rows=len(rows),
        missing=len(verdict.lost),
        repeated=sum(count - 1 for count in times.values()),
        unknown=len(verdict.unknown),
        out_of_order=len(verdict.out_of_order),
        wrong=sum(row.said != row.sequence or row.key != f"k{(row.sequence - 1) % KEYS}" for row in rows),
    )


def as_text(outcome: Outcome) -> str:
    """For a terminal."""
    rows = {
        "messages": f"{outcome.settings.messages:,} into {outcome.settings.into}, {outcome.seconds:.0f} s",
        "drivers killed": str(outcome.kills),
        "rows": f"{outcome.rows:,}",
        "missing": str(outcome.missing),
        "repeated": str(outcome.repeated),
        "out of order": str(outcome.out_of_order),
        "wrong or unknown": str(outcome.wrong + outcome.unknown),
        "verdict": "every sequence exactly once, in order per key" if outcome.clean else "NOT CLEAN",
    }
    return "\n".join(f"{name:<20} {value}" for name, value in rows.items())

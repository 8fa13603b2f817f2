"""What the sink's tests share: streams to write to, rows to write, and a look at what was stored."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

import keylane
from keylane import Connection
from keylane.dead_letters import DeadLetter, list_dead_letters
from keylane.jetstream import StoredMessage, read_all
from keylane.spark.options import WriteOptions, write_options
from keylane.spark.sink.row_ids import IdScope
from keylane.spark.sink.task_writer import write_batches
from keylane.spark.sink.writers import look_at_target
from keylane.spark.sync_connection import shared_connection
from keylane.spark.tasks import Target, TaskDone

T = TypeVar("T")

WAYS = {"ingest": {"allow_batched": True}, "atomic": {"allow_atomic": True}, "lanes": {}}
"""Each way to publish, and the setting of the stream that it needs."""


def on(url: str, work: Callable[[Connection], Awaitable[T]]) -> T:
    """Run a coroutine on a connection of its own."""

    async def run() -> T:
        async with await keylane.connect(url) as connection:
            return await work(connection)

    return asyncio.run(run())


def make_stream(url: str, name: str, **config: Any) -> str:
    """A file stream that takes `<name>.>`; returns its name."""
    wanted = {"name": name, "subjects": [f"{name}.>"], "storage": "file", "num_replicas": 1, "allow_direct": True}
    on(url, lambda connection: connection.api.request(f"STREAM.CREATE.{name}", wanted | config))
    return name


def stored(url: str, stream: str) -> list[StoredMessage]:
    """All messages of a stream, in its order."""

    async def read(connection: Connection) -> list[StoredMessage]:
        return [one async for one in read_all(connection, stream)]

    return on(url, read)


def dead_letters(url: str, stream: str) -> list[DeadLetter]:
    async def read(connection: Connection) -> list[DeadLetter]:
        return [one async for one in list_dead_letters(connection, stream)]

    return on(url, read)


class Sink:
    """The writer of one stream, without Spark."""

    def __init__(self, url: str, stream: str, **options: str) -> None:
        self.url = url
        self.stream = stream
        self.options: WriteOptions = write_options({"url": url, "stream": stream} | options, streaming=True)
        self.target: Target = look_at_target(self.options)

    def write(
        self, batches: Iterable[pa.RecordBatch], *, scope: str = "copy", run: str = "query:0", partition: int = 0
    ) -> TaskDone:
        return write_batches(self.options, self.target, IdScope(scope, run, partition), batches, group="copy")

    def stored(self) -> list[StoredMessage]:
        return stored(self.url, self.stream)

    def dead_letters(self) -> list[DeadLetter]:
        return dead_letters(self.url, self.stream)

    def unlink(self) -> None:
        """Close the connection that the writer uses."""
        shared_connection(self.options.address).close()


def numbered(stream: str, count: int, keys: int, *, first: int = 0, by: int = 1000) -> Iterator[pa.RecordBatch]:
    """Rows whose data is their number, spread over some subjects."""
    for at in range(first, first + count, by):
        numbers = range(at, min(at + by, first + count))
        yield pa.record_batch(
            {
                "subject": pa.array([f"{stream}.{number % keys}" for number in numbers]),
                "data": pa.array([b"%d" % number for number in numbers], pa.binary()),
                "sequence": pa.array(numbers, pa.int64()),
            }
        )


def rows(columns: dict[str, Sequence[Any]], types: dict[str, pa.DataType] | None = None) -> list[pa.RecordBatch]:
    kinds = {
        "subject": pa.string(),
        "data": pa.binary(),
        "headers": pa.map_(pa.string(), pa.string()),
        "message_id": pa.string(),
        "sequence": pa.int64(),
    } | (types or {})
    return [pa.record_batch({name: pa.array(values, kinds[name]) for name, values in columns.items()})]


def judge(messages: Iterable[StoredMessage], expected: Iterable[int], *, ordered: bool = True) -> None:
    """Every number once, and ascending within each subject; from the stored stream alone."""
    by_subject: dict[str, list[int]] = defaultdict(list)
    for one in messages:
        by_subject[one.subject].append(int(one.data))
    seen = Counter(number for numbers in by_subject.values() for number in numbers)
    wanted = set(expected)
    assert not wanted - seen.keys(), f"lost: {sorted(wanted - seen.keys())[:10]}"
    assert not seen.keys() - wanted, f"strange: {sorted(seen.keys() - wanted)[:10]}"
    twice = [number for number, times in seen.items() if times > 1]
    assert not twice, f"twice: {sorted(twice)[:10]} of {len(twice)}"
    for subject, numbers in by_subject.items() if ordered else ():
        assert numbers == sorted(numbers), f"out of order: {subject}"

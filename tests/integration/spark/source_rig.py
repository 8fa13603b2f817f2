"""Ground for the tests of the source: streams filled from plain functions, and reads of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import keylane
import keylane.errors
from keylane import Connection
from keylane.core.partitions import Partitioning
from keylane.jetstream import Outgoing, publish_many

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

T = TypeVar("T")


@dataclass(slots=True)
class Ground:
    """A server and a Spark session. Streams that it makes are deleted at the end."""

    url: str
    spark: SparkSession
    login: dict[str, Any]
    _made: list[str] = field(default_factory=list)

    def call(self, work: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
        """Run something on a connection of its own."""

        async def run() -> T:
            async with await keylane.connect(self.url, **self.login) as connection:
                return await work(connection)

        return asyncio.run(run())

    def api(self, subject: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        return self.call(lambda connection: connection.api.request(subject, payload))

    def make(self, name: str, *, numbered: bool = False, **config: Any) -> str:
        """A memory stream on `orders.*`, by itself under the stream's name: `orders` stands for it."""
        wire: dict[str, Any] = {"name": name, "subjects": [f"{name}.*"], "storage": "memory", "allow_direct": True}
        if numbered:
            keys = Partitioning(f"{name}.*", (1,), 4)
            wire["subject_transform"] = {"src": keys.filter, "dest": keys.destination}
        self.api(f"STREAM.CREATE.{name}", wire | config)
        self._made.append(name)
        return name

    def publish(self, name: str, numbers: Iterable[int], keys: int = 7) -> None:
        """Messages `name.<number % keys>` with the number as text, in this order."""
        messages = [Outgoing(f"{name}.k{number % keys}", str(number).encode()) for number in numbers]

        async def send(connection: Connection) -> None:
            await publish_many(connection, messages)

        self.call(send)

    def read(self, name: str, **options: str | int) -> DataFrame:
        reader = self.spark.read.format("keylane").option("url", self.url).option("stream", name)
        return reader.options(**{key: str(value) for key, value in options.items()}).load()

    def stream(self, name: str, **options: str | int) -> DataFrame:
        reader = self.spark.readStream.format("keylane").option("url", self.url).option("stream", name)
        return reader.options(**{key: str(value) for key, value in options.items()}).load()

    def run(self, frame: DataFrame, directory: Path) -> StreamingQuery:
        """All there is now, into Parquet files below the directory, from its checkpoint on."""
        query = self.start(frame, directory, available_now=True)
        try:
            assert query.awaitTermination(150), "the query did not end"
        finally:
            query.stop()
        return query

    def start(self, frame: DataFrame, directory: Path, *, available_now: bool = False) -> StreamingQuery:
        writer = frame.writeStream.format("parquet").option("path", str(directory / "rows"))
        writer = writer.option("checkpointLocation", str(directory / "checkpoint"))
        return (writer.trigger(availableNow=True) if available_now else writer).start()

    def written(self, directory: Path) -> list[Row]:
        return self.spark.read.parquet(str(directory / "rows")).orderBy("sequence").collect()

    def close(self) -> None:
        async def delete(connection: Connection) -> None:
            for name in self._made:
                try:
                    await connection.api.request(f"STREAM.DELETE.{name}")
                except keylane.errors.NotFound:
                    continue

        self.call(delete)


@contextmanager
def ground(url: str, spark: SparkSession, **login: Any) -> Iterator[Ground]:
    import keylane.spark as keylane_spark  # noqa: PLC0415 - optional

    keylane_spark.register(spark)
    made = Ground(url, spark, login)
    try:
        yield made
    finally:
        made.close()


def numbers(rows: Iterable[Row]) -> list[int]:
    """What `Ground.publish` put into the rows."""
    return [int(bytes(row["data"])) for row in rows]

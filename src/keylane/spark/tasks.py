"""What travels between the driver and its tasks: what a task reads, the columns of its rows, where a task writes.

Spark pickles these. They hold data only and open no connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
from pyspark.sql.datasource import InputPartition, WriterCommitMessage

from keylane.core.partitions import Partitioning
from keylane.core.subjects import matches
from keylane.spark.address import Address

ReadMethod = Literal["consumer", "direct"]
"""An ordered consumer without acks, or batch direct get: a work queue allows only the latter."""


@dataclass(frozen=True, slots=True)
class ReadSpec:
    """What all splits of a batch have in common."""

    address: Address
    stream: str
    way: ReadMethod
    numbered: bool
    """Stored subjects begin with a partition number, which rows show as `partition` and not in `subject`."""
    partitioning: tuple[Partitioning, ...] = ()
    """Tells the key of a subject without its number; where not `numbered`, its partition too. Empty: no keys."""
    with_headers: bool = False
    with_data: bool = True
    """False: payloads are left out, at the server where it can, and the column `data` is null."""


class Split(InputPartition):
    """The messages of (after, upto] that match `subject_filter`, in order of their sequence."""

    def __init__(
        self,
        reading: ReadSpec,
        after: int,
        upto: int,
        subject_filter: str | None,
        last: int,
        *,
        created: str | None = None,
        head_may_go: bool = False,
    ) -> None:
        self.reading = reading
        self.after = after
        self.upto = upto
        self.subject_filter = subject_filter
        self.last = last
        """The newest message of this filter when the split was planned, as the stream's leader reported it.

        Up to `upto` the reader must see it; beyond, it must see something beyond. Otherwise the replica that answered
        lags behind, or the message was deleted meanwhile, which only the leader can say.
        """
        self.created = created
        """The creation time of the planned stream, as the server writes it; None: not compared."""
        self.head_may_go = head_may_go
        """The read starts with whatever the stream begins with: nothing is lost if that is trimmed meanwhile."""

    def __repr__(self) -> str:
        return f"<Split {self.reading.stream} ({self.after}, {self.upto}] {self.subject_filter or 'whole'}>"


# ---- the columns of a read ---------------------------------------------------------------------------------------

_TYPES = {
    "STRING": pa.string(),
    "BINARY": pa.binary(),
    "BOOLEAN": pa.bool_(),
    "INT": pa.int32(),
    "BIGINT": pa.int64(),
    "DOUBLE": pa.float64(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
}
_DDL = (
    "subject STRING, partition INT, key STRING, data BINARY, sequence BIGINT, timestamp TIMESTAMP, "
    "source_stream STRING, source_sequence BIGINT"
)


def schema_of(ddl: str) -> pa.Schema:
    """Columns of simple types, as Spark's DDL has them, for Arrow: both must say exactly the same."""
    columns = (column.split() for column in ddl.split(","))
    return pa.schema([(name.strip("`"), _TYPES[kind]) for name, kind in columns])


_ARROW = schema_of(_DDL)
_ARROW_WITH_HEADERS = _ARROW.append(pa.field("headers", pa.map_(pa.string(), pa.string())))


def ddl(*, with_headers: bool) -> str:
    """The columns of `format("keylane")` as Spark reads them."""
    return f"{_DDL}, headers MAP<STRING, STRING>" if with_headers else _DDL


def arrow_schema(*, with_headers: bool) -> pa.Schema:
    return _ARROW_WITH_HEADERS if with_headers else _ARROW


# ---- writing -----------------------------------------------------------------------------------------------------

PublishMethod = Literal["ingest", "atomic", "lanes"]
"""How rows are published: fast-ingest batches, atomic batches, or each by itself and one per subject at a time."""


@dataclass(frozen=True, slots=True)
class Target:
    """A stream that takes rows."""

    stream: str
    subjects: tuple[str, ...]
    max_message_bytes: int | None
    replicas: int
    window_s: float
    """How long the server remembers a message id."""
    way: PublishMethod

    def takes(self, subject: str) -> bool:
        """Whether one of the stream's own subjects selects it. An account's mappings may bring others to it too."""
        return any(matches(each, subject) for each in self.subjects)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch of the query with this id, which lives in its checkpoint."""

    query_id: str
    number: int


@dataclass(frozen=True, slots=True)
class TaskDone(WriterCommitMessage):
    """What a task reports to the driver."""

    rows: int
    dead_letters: int
    batch: MicroBatch | None = None

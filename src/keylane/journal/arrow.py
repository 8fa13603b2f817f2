"""A journal batch as an Arrow record batch, for Spark and similar tools. Needs pyarrow (`keylane[spark]`).

Numbers are used in place, without a copy.
"""

from __future__ import annotations

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from keylane.core.journal_record import OUTCOMES, JournalBatch

_NUMBERS = {
    "sequence": pa.uint64(),
    "source_sequence": pa.uint64(),
    "started_ns": pa.int64(),
    "ended_ns": pa.int64(),
    "partition": pa.uint32(),
    "delivered": pa.uint32(),
}


def to_arrow(batch: JournalBatch) -> pa.RecordBatch:
    """The records of a batch, with the columns of `JournalRecord`, in their order."""
    head, count = batch.head, batch.records
    columns = {name: _numbers(batch, name, kind) for name, kind in _NUMBERS.items()}
    for name in ("stream", "group", "member", "instance", "writer"):
        columns[name] = pa.repeat(pa.scalar(getattr(head, name), pa.string()), count)
    tenures = _numbers(batch, "tenure", pa.uint16())
    columns["pin"] = pa.array([tenure.pin for tenure in batch.tenures], pa.string()).take(tenures)
    columns["revision"] = pa.array([tenure.revision for tenure in batch.tenures], pa.int64()).take(tenures)
    columns["key"] = _keys(batch).take(_numbers(batch, "key", pa.uint32()))
    columns["outcome"] = pa.array(OUTCOMES, pa.string()).take(_numbers(batch, "outcome", pa.uint8()))
    columns["batch"] = pa.repeat(pa.scalar(head.batch, pa.uint64()), count)
    columns["row"] = pa.array(range(count), pa.uint32())
    return pa.RecordBatch.from_pydict({name: columns[name] for name in ARROW_COLUMNS})


ARROW_COLUMNS = (
    "stream",
    "group",
    "member",
    "instance",
    "pin",
    "revision",
    "sequence",
    "source_sequence",
    "key",
    "partition",
    "delivered",
    "started_ns",
    "ended_ns",
    "outcome",
    "writer",
    "batch",
    "row",
)


def _numbers(batch: JournalBatch, name: str, kind: pa.DataType) -> pa.Array:
    span = batch.spans[name]
    lies = pa.py_buffer(batch.data).slice(span.start, span.length * kind.bit_width // 8)
    return pa.Array.from_buffers(kind, span.length, [None, lies])


def _keys(batch: JournalBatch) -> pa.Array:
    """The distinct keys. Bytes that are not UTF-8, which Arrow's strings cannot hold, become `\\xNN`."""
    return pa.array([value.decode("utf-8", "backslashreplace") for value in batch.key_values()], pa.string())

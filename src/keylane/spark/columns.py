"""The columns of `format("keylane")`, for Spark and for Arrow: both must say exactly the same."""

from __future__ import annotations

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

DDL = (
    "subject STRING, partition INT, key STRING, data BINARY, sequence BIGINT, timestamp TIMESTAMP, "
    "source_stream STRING, source_sequence BIGINT"
)
HEADERS_DDL = "headers MAP<STRING, STRING>"

ARROW = pa.schema(
    [
        ("subject", pa.string()),
        ("partition", pa.int32()),
        ("key", pa.string()),
        ("data", pa.binary()),
        ("sequence", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("source_stream", pa.string()),
        ("source_sequence", pa.int64()),
    ]
)
ARROW_WITH_HEADERS = ARROW.append(pa.field("headers", pa.map_(pa.string(), pa.string())))


def ddl(*, with_headers: bool) -> str:
    """The schema as Spark reads it."""
    return f"{DDL}, {HEADERS_DDL}" if with_headers else DDL


def arrow_schema(*, with_headers: bool) -> pa.Schema:
    return ARROW_WITH_HEADERS if with_headers else ARROW

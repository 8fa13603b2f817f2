"""Per-key processing on Spark: a function that gets the rows of one key in the order of their sequence.

Owns the grouping and the calls, on executors, Arrow in and Arrow out. Whether a shuffle is needed is `whole_keys`'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pyarrow.compute as pc  # type: ignore[import-untyped]

from keylane.errors import FunctionFailed, InvalidInput
from keylane.spark.whole_keys import why_spread

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

KeyFunction = Callable[[Any, pa.Table], pa.Table | None]
Group = tuple[Any, pa.Table]


def in_key_order(
    df: DataFrame,
    function: KeyFunction,
    schema: StructType | str,
    *,
    key: str = "key",
    order: str = "sequence",
    shuffle: bool | None = None,
) -> DataFrame:
    """Call `function(key, rows)` for each key, with its rows in order, and return what it returns as rows of `schema`.

    Works on batch and streaming DataFrames and inside foreachBatch. It is called once per key in a batch read, and once
    per key and micro-batch in a stream. `rows` has all columns of `df`; the answer is a table with the columns of
    `schema`, or None for no rows. Rows without a key are handed over together with the key None, once per task.

    Where the source's splits hold whole keys, no shuffle happens, and a task's rows are held in memory at once; the
    same on streams. Otherwise rows are repartitioned by key; a batch read is sorted by Spark then, and only one key's
    rows are held. `shuffle=False` refuses to shuffle: `InvalidInput` where it is needed. `shuffle=True` always does.

    >>> def last(key: str, rows: pa.Table) -> pa.Table:
    ...     return pa.table({"key": [key], "data": rows["data"][-1:]})
    >>> in_key_order(df, last, "key STRING, data BINARY")  # doctest: +SKIP
    """
    from pyspark.sql.functions import col  # noqa: PLC0415 - slow to import, and optional
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415
    from pyspark.sql.types import StructType  # noqa: PLC0415

    for name in (key, order):
        if df.columns.count(name) != 1:
            raise InvalidInput(f"column {name!r} must be in the DataFrame once, and it has: {', '.join(df.columns)}")
    if not callable(function):
        raise InvalidInput(f"function is {function!r}: give a function of a key and a table of rows")
    rows_of = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    if not isinstance(rows_of, StructType):
        raise InvalidInput(f"schema is {schema!r}: give columns, such as 'key STRING, total BIGINT', or a StructType")
    spread = "it was asked for" if shuffle else why_spread(df, key)
    if spread is not None and shuffle is False:
        raise InvalidInput(
            f"shuffle=False, but rows with the same {key!r} may be in several tasks: {spread}. Leave shuffle out, or "
            "read a stream with partition numbers with splitBy=partition and one filter at most"
        )
    sorted_by_spark = spread is not None and not df.isStreaming
    if spread is not None:
        df = df.repartition(col(_quoted(key)))
    if sorted_by_spark:  # Spark refuses to sort a stream
        df = df.sortWithinPartitions(col(_quoted(key)), col(_quoted(order)))
    call = _Calls(function, to_arrow_schema(rows_of, timezone="UTC"), key, order, sorted_by_spark)
    return df.mapInArrow(call, rows_of)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


@dataclass(frozen=True, slots=True)
class _Calls:
    """The work of one task: record batches in, record batches out."""

    function: KeyFunction
    schema: pa.Schema
    key: str
    order: str
    is_sorted: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        groups = runs(batches, self.key) if self.is_sorted else grouped(batches, self.key, self.order)
        for key, rows in groups:
            answer = self._call(key, rows)
            if answer is not None:
                yield from self._fitting(answer, key, rows).to_batches()

    def _call(self, key: Any, rows: pa.Table) -> Any:
        try:
            return self.function(key, rows)
        except Exception as error:
            raise FunctionFailed(
                f"the function failed for {self._named(key, rows)}: {type(error).__name__}: {error}"
            ) from error

    def _fitting(self, answer: Any, key: Any, rows: pa.Table) -> pa.Table:
        """The answer with exactly the promised columns; Spark would say less clearly what is wrong with it."""
        if isinstance(answer, pa.RecordBatch):
            answer = pa.Table.from_batches([answer])
        if not isinstance(answer, pa.Table):
            raise FunctionFailed(
                f"the function returned {type(answer).__name__} for {self._named(key, rows)}: return a pyarrow.Table, "
                "or None for no rows"
            )
        if sorted(answer.column_names) != sorted(self.schema.names):
            raise FunctionFailed(
                f"the function returned columns {answer.column_names} for {self._named(key, rows)}, and the schema has "
                f"{self.schema.names}: make them the same"
            )
        try:
            return answer.select(self.schema.names).cast(self.schema)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
            raise FunctionFailed(
                f"the function's answer for {self._named(key, rows)} does not fit the schema "
                f"{', '.join(f'{field.name} {field.type}' for field in self.schema)}: {error}"
            ) from error

    def _named(self, key: Any, rows: pa.Table) -> str:
        first, last = rows[self.order][0], rows[self.order][-1]
        return f"{self.key} {key!r}, {self.order} {first} to {last} ({rows.num_rows} rows)"


def grouped(batches: Iterator[pa.RecordBatch], key: str, order: str) -> Iterator[Group]:
    """All rows of a task, by key in the order of first appearance, each key's by `order`."""
    held = [batch for batch in batches if batch.num_rows]
    if not held:
        return
    table = pa.Table.from_batches(held)
    keys = table[key].combine_chunks().dictionary_encode(null_encoding="encode")
    by = pa.table({"key": keys.indices, "order": table[order]})
    table = table.take(pc.sort_indices(by, sort_keys=[("key", "ascending"), ("order", "ascending")]))
    counts = pc.value_counts(keys.indices)
    sizes = dict(zip(counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True))
    start = 0
    for code in range(len(keys.dictionary)):
        yield keys.dictionary[code].as_py(), table.slice(start, sizes[code])
        start += sizes[code]


def runs(batches: Iterator[pa.RecordBatch], key: str) -> Iterator[Group]:
    """Rows that come sorted by key, cut where the key changes; one key's rows are held at a time."""
    held: list[pa.RecordBatch] = []
    current: Any = None
    for batch in batches:
        start = 0
        encoded = pc.run_end_encode(batch.column(key))
        for end, value in zip(encoded.run_ends.to_pylist(), encoded.values.to_pylist(), strict=True):
            if held and value != current:
                yield current, pa.Table.from_batches(held)
                held = []
            current = value
            held.append(batch.slice(start, end - start))
            start = end
    if held:
        yield current, pa.Table.from_batches(held)

"""Per-key processing on Spark: a function that gets the rows of one key in the order of their sequence.

Owns the grouping and the calls, on executors, Arrow in and Arrow out; and the decision whether a shuffle is needed: a
look at Spark's analyzed plan tells whether each task of a DataFrame holds its keys whole. Anything not known to be
whole counts as spread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pyarrow.compute as pc  # type: ignore[import-untyped]

from keylane.errors import FunctionFailed, InvalidInput
from keylane.spark.driver.layout import Layout
from keylane.spark.options import ReadOptions, read_options

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


# ---- whether a task holds its keys whole ---------------------------------------------------------------------


_FORMAT = "keylane"
_ROW_BY_ROW = frozenset({"Project", "Filter", "SubqueryAlias", "View", "EventTimeWatermark"})
_BATCH_SOURCE = "DataSourceV2Relation"
_STREAM_SOURCE = "StreamingRelationV2"
_ROWS_OF_A_BATCH = "LogicalRDD"
_DECIDED_BY_PARTITION = frozenset({"key", "subject", "partition"})
"""Columns of the source whose equal values are all in one partition."""


def why_spread(df: DataFrame, column: str) -> str | None:
    """Why rows with the same value of the column may be in several tasks; None where they are not."""
    try:
        plan = df._jdf.queryExecution().analyzed()
    except AttributeError:
        return "this session is a remote one, which does not show its plans"
    wanted = _attribute(plan, column)
    leaf, reason = _leaf(plan)
    if leaf is not None and leaf.nodeName() == _ROWS_OF_A_BATCH:
        leaf, reason = _leaf_of_query(df, leaf)
    if leaf is None:
        return reason
    if leaf.nodeName() == _BATCH_SOURCE:
        found, options = leaf.table().name(), leaf.options()
    elif leaf.nodeName() == _STREAM_SOURCE:
        found, options = leaf.sourceName(), leaf.extraOptions()
    else:
        return f"they come from {leaf.nodeName()}, not from format('{_FORMAT}')"
    if found != _FORMAT:
        return f"they come from format('{found}')"
    own = [name for name, id_ in _columns(leaf) if id_ == wanted]
    if not set(own) & _DECIDED_BY_PARTITION:
        return f"column {column!r} is not the source's own"
    return _why_source_spreads(read_options(dict(options)))


def why_layout_spreads(layout: Layout, options: ReadOptions) -> str | None:
    """The rule: a task reads one partition, all of it, and a key is in one partition."""
    if layout.split_by != "partition":
        return f"stream {layout.stream!r} is split by sequence"
    if (options.min_partitions or 1) > 1:
        return f"minPartitions={options.min_partitions} may cut a partition into several tasks"
    partitions = [one.partition(".")[0] for one in layout.subject_filters if one is not None]
    if len(set(partitions)) < len(partitions):
        return "several filters make several tasks of one partition"
    if len({one.partitions for one in layout.partitioning}) > 1:
        return f"the sources of stream {layout.stream!r} have different numbers of partitions"
    return None


def _why_source_spreads(options: ReadOptions) -> str | None:
    from keylane.spark.driver.source_stream import SourceStream  # noqa: PLC0415 - brings the client along

    if options.split_by == "sequence":
        return "splitBy is sequence"
    return why_layout_spreads(SourceStream(options).layout, options)


def _leaf(plan: Any) -> tuple[Any, str]:
    """The one source below nodes that treat each row by itself, or None and what is in the way."""
    while True:
        children = _items(plan.children())
        if not children:
            return plan, ""
        if plan.nodeName() not in _ROW_BY_ROW or _items(plan.subqueries()):
            return None, f"the plan has {plan.nodeName()} above its source"
        plan = children[0]


def _leaf_of_query(df: DataFrame, rows: Any) -> tuple[Any, str]:
    """Inside foreachBatch the plan has bare rows: their source is in the plan of the query that runs."""
    query_id = df.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
    if query_id is None:
        return None, "they come from an RDD"
    java = df.sparkSession.sparkContext._jvm
    queries = df._jdf.sparkSession().sharedState().activeStreamingQueries()
    query = queries.get(java.java.util.UUID.fromString(str(UUID(query_id)))) if java is not None else None
    if query is None or query.lastExecution().toRdd().id() != rows.rdd().id():
        return None, "they come from an RDD"
    return _leaf(query.analyzedPlan())


def _attribute(plan: Any, column: str) -> int | None:
    found = [id_ for name, id_ in _columns(plan) if name == column]
    return found[0] if len(found) == 1 else None


def _columns(plan: Any) -> list[tuple[str, int]]:
    return [(one.name(), one.exprId().id()) for one in _items(plan.output())]


def _items(sequence: Any) -> list[Any]:
    return [sequence.apply(index) for index in range(sequence.size())]

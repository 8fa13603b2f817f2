"""Tells whether each task of a DataFrame holds its keys whole, so that order per key needs no shuffle.

Owns the rule, and the look at Spark's analyzed plan that it is applied to. What it does not know it calls spread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from keylane.spark.driver.layout import Layout
from keylane.spark.driver.options import ReadOptions, read_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
    from keylane.spark.driver.standing import Source  # noqa: PLC0415 - brings the client along

    if options.split_by == "sequence":
        return "splitBy is sequence"
    return why_layout_spreads(Source(options).layout, options)


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

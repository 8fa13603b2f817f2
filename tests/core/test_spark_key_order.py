"""Grouping by key against a dumb version, and the rule for when a task holds whole keys."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")

from keylane.core.partitions import Partitioning  # noqa: E402 - Arrow is optional
from keylane.spark.address import Address  # noqa: E402
from keylane.spark.driver.layout import Layout  # noqa: E402
from keylane.spark.key_order import grouped, runs, why_layout_spreads  # noqa: E402
from keylane.spark.options import ReadOptions  # noqa: E402

Rows = list[tuple[str | None, int]]

ROWS = st.lists(st.tuples(st.sampled_from([None, "", "a", "b", "äé"]), st.integers(0, 50)), max_size=40)
CUTS = st.lists(st.integers(0, 40), max_size=6)


def batches(rows: Rows, cuts: list[int]) -> list[Any]:
    edges = [0, *sorted(cut for cut in cuts if cut < len(rows)), len(rows)]
    return [
        pa.record_batch(
            {
                "key": pa.array([key for key, _ in rows[low:high]], pa.string()),
                "sequence": pa.array([number for _, number in rows[low:high]], pa.int64()),
            }
        )
        for low, high in pairwise(edges)
    ]


def dumb(rows: Rows) -> dict[str | None, list[int]]:
    found: dict[str | None, list[int]] = defaultdict(list)
    for key, number in rows:
        found[key].append(number)
    return {key: sorted(numbers) for key, numbers in found.items()}


def read(groups: Any) -> list[tuple[str | None, list[int]]]:
    return [(key, table["sequence"].to_pylist()) for key, table in groups]


@settings(deadline=None)
@given(ROWS, CUTS)
def test_all_rows_of_a_task_are_grouped_in_order_of_appearance(rows: Rows, cuts: list[int]) -> None:
    assert read(grouped(iter(batches(rows, cuts)), "key", "sequence")) == list(dumb(rows).items())


@settings(deadline=None)
@given(ROWS, CUTS)
def test_sorted_rows_are_cut_where_the_key_changes(rows: Rows, cuts: list[int]) -> None:
    in_order = sorted(rows, key=lambda row: (row[0] is not None, row[0] or "", row[1]))
    assert read(runs(iter(batches(in_order, cuts)), "key")) == list(dumb(in_order).items())


def layout(**changes: Any) -> Layout:
    facts: dict[str, Any] = {
        "stream": "S",
        "way": "consumer",
        "numbered": True,
        "partitioning": (Partitioning("orders.*", (1,), 4),),
        "subject_filters": ("0.>", "1.>", "2.>", "3.>"),
        "split_by": "partition",
        "whole": True,
    }
    return Layout(**(facts | changes))


OPTIONS = ReadOptions(address=Address(), stream="S")


def test_one_filter_for_each_partition_holds_whole_keys() -> None:
    assert why_layout_spreads(layout(), OPTIONS) is None
    assert why_layout_spreads(layout(subject_filters=("1.orders.*", "3.orders.*")), OPTIONS) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split_by": "sequence"}, "split by sequence"),
        ({"subject_filters": ("0.a.*", "0.b.*")}, "several filters make several tasks"),
        (
            {"partitioning": (Partitioning("a.*", (1,), 4), Partitioning("b.*", (1,), 8))},
            "different numbers of partitions",
        ),
    ],
)
def test_what_may_spread_a_key(changes: dict[str, Any], words: str) -> None:
    reason = why_layout_spreads(layout(**changes), OPTIONS)
    assert reason is not None
    assert words in reason


def test_more_tasks_than_partitions_cut_partitions() -> None:
    reason = why_layout_spreads(layout(), ReadOptions(address=Address(), stream="S", min_partitions=5))
    assert reason is not None
    assert "minPartitions=5" in reason

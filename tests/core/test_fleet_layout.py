"""Which layout `auto` takes."""

from __future__ import annotations

import pytest

from keylane.core.fleet_layout import StreamShape, choose_layout


@pytest.mark.parametrize(
    ("in_files", "replicas", "subjects", "partitions", "layout"),
    [
        (True, 1, 1000, 32, "partition"),
        (True, 1, 1000, 2000, "partition"),  # a second filter costs ten times
        (True, 1, 1000, 20_000, "worker"),
        (True, 1, 10, 2000, "worker"),
        (True, 1, 100_000, 2000, "worker"),
        (False, 1, 1000, 2000, "worker"),
        (False, 1, 1000, 1000, "partition"),
        (True, 3, 10, 100, "partition"),
        (True, 3, 10, 101, "worker"),
        (True, 3, 1000, 101, "partition"),
        (True, 3, 1000, 1001, "worker"),
        (True, 1, 0, 32, "partition"),
    ],
)
def test_the_choice(*, in_files: bool, replicas: int, subjects: int, partitions: int, layout: str) -> None:
    choice = choose_layout(StreamShape(in_files=in_files, replicas=replicas, subjects=subjects, partitions=partitions))
    assert choice.layout == layout
    assert choice.reason

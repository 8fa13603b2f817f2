"""The table of server versions."""

from __future__ import annotations

from typing import get_args

import pytest

from keylane.errors import InvalidInput
from keylane.jetstream import supports
from keylane.jetstream.features import MINIMUM_SERVER, SINCE, Feature, parse_version


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2.15.1", (2, 15, 1)),
        ("2.12.0-RC.3", (2, 12, 0)),
        ("v2.11.4+build", (2, 11, 4)),
        ("", (0, 0, 0)),
        ("dev", (0, 0, 0)),
    ],
)
def test_versions_are_read(text: str, expected: tuple[int, int, int]) -> None:
    assert parse_version(text) == expected


@pytest.mark.parametrize(
    ("feature", "since"),
    [
        ("priority_groups", (2, 11, 0)),
        ("direct_get_batch", (2, 11, 0)),
        ("prioritized", (2, 12, 0)),
        ("atomic_batch", (2, 12, 0)),
        ("whole_subject_hash", (2, 12, 0)),
        ("consumer_reset", (2, 14, 0)),
        ("fast_ingest", (2, 14, 0)),
    ],
)
def test_a_feature_is_there_from_its_version_on(feature: Feature, since: tuple[int, int, int]) -> None:
    major, minor, _ = since
    assert supports(since, feature)
    assert supports((major + 1, 0, 0), feature)
    assert not supports((major, minor - 1, 99), feature)


def test_the_table_is_whole() -> None:
    assert set(SINCE) == set(get_args(Feature))
    assert min(SINCE.values()) >= MINIMUM_SERVER


def test_an_unknown_feature_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"'teleport'.*consumer_reset"):
        supports((2, 15, 0), "teleport")  # type: ignore[arg-type]

"""What a stream can store, from its configuration alone."""

from __future__ import annotations

import pytest
from nats.js.api import StreamConfig, StreamSource, SubjectTransform

from keylane.groups.stream_subjects import can_store, inserts_numbers, may_carry_numbers, stored_subjects

NUMBERS = SubjectTransform(src="o.*", dest="{{Partition(4,1)}}.o.{{Wildcard(1)}}")


def test_without_a_transform_subjects_are_stored_as_they_are() -> None:
    assert stored_subjects(StreamConfig(subjects=["o.>", "r.*"])) == ["o.>", "r.*"]


def test_a_transform_changes_what_it_matches_and_nothing_else() -> None:
    config = StreamConfig(subjects=["o.*", "o.>", "r.*"], subject_transform=NUMBERS)
    assert stored_subjects(config) == ["*.o.*", "o.>", "r.*"]
    assert inserts_numbers(config)
    assert not inserts_numbers(StreamConfig(subjects=["ordres.*"], subject_transform=NUMBERS)), "never applied"
    everything = SubjectTransform(src="", dest="x.$1.>")
    assert stored_subjects(StreamConfig(subjects=["o.>"], subject_transform=everything)) == ["x.*.>"]


def test_a_copy_says_what_it_stores_only_with_transforms_or_a_filter() -> None:
    transformed = StreamSource(name="A", subject_transforms=[NUMBERS])
    filtered = StreamSource(name="B", filter_subject="b.>")
    assert stored_subjects(StreamConfig(sources=[transformed, filtered])) == ["*.o.*", "b.>"]
    assert inserts_numbers(StreamConfig(sources=[transformed]))
    assert not inserts_numbers(StreamConfig(sources=[filtered]))
    assert stored_subjects(StreamConfig(sources=[filtered, StreamSource(name="C")])) is None
    assert stored_subjects(StreamConfig(mirror=StreamSource(name="C"))) is None


@pytest.mark.parametrize(
    ("stored", "may"),
    [("*.o.*", True), (">", True), ("3.o", True), ("*.>", True), ("o.>", False), ("*", False), ("7", False)],
)
def test_which_subjects_can_begin_with_a_partition_number(stored: str, may: bool) -> None:
    assert may_carry_numbers(stored) is may


@pytest.mark.parametrize(
    ("subject_filter", "can"),
    [
        ("*.o.*", True),
        ("3.o.*", True),
        ("o.*", False),
        ("o.a", False),
        ("o.*.*", True),
        ("o.>", True),
        ("r.*", True),
        ("x.*", False),
    ],
)
def test_what_is_stored_under_another_subject_is_not_matched_by_the_published_one(
    subject_filter: str, can: bool
) -> None:
    config = StreamConfig(subjects=["o.>", "r.*"], subject_transform=NUMBERS)
    assert can_store(config, subject_filter) is can


def test_a_copy_of_unknown_streams_may_store_anything() -> None:
    assert can_store(StreamConfig(mirror=StreamSource(name="C")), "x.*") is None

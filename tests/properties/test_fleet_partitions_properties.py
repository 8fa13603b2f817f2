"""Partitions of a fleet: overlaps held beside every pair, names that never meet, subjects in one partition each."""

from __future__ import annotations

import re
from itertools import combinations

from hypothesis import assume, given
from hypothesis import strategies as st

from keylane.core.fleet_names import partition_consumer, subject_id
from keylane.core.fleet_partitions import discovered, overlapping_filters
from keylane.core.names import check_consumer_name
from keylane.core.partitions import PartitionBy
from keylane.core.subjects import matches, overlaps

TOKENS = st.sampled_from(["a", "b", "c"])
FILTERS = st.tuples(st.lists(st.one_of(TOKENS, st.just("*")), min_size=1, max_size=4), st.booleans()).map(
    lambda drawn: ".".join([*drawn[0], *([">"] if drawn[1] else [])])
)
TEXTS = st.text(st.sampled_from("ab.-p0é*"), min_size=1, max_size=12)
FLEETS = st.text(st.sampled_from("a-p0"), min_size=1, max_size=8)
IDS = st.one_of(st.integers(0, 999).map(str), TEXTS.map(subject_id))


@given(st.lists(FILTERS, max_size=8))
def test_overlaps_are_those_of_all_pairs(filters: list[str]) -> None:
    crossed = [pair for pair in combinations(filters, 2) if overlaps(*pair)]
    found = overlapping_filters(filters)
    if found is None:
        assert not crossed
    else:
        assert found in crossed


@given(FLEETS, IDS, FLEETS, IDS)
def test_two_partitions_never_share_a_consumer(fleet: str, one: str, other_fleet: str, other: str) -> None:
    assume((fleet, one) != (other_fleet, other))
    assert partition_consumer(fleet, one) != partition_consumer(other_fleet, other)


@given(TEXTS)
def test_ids_are_parts_of_keys_and_of_names(subject: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*", subject_id(subject))
    check_consumer_name(partition_consumer("fleet", subject_id(subject)))


@given(
    st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(".".join), max_size=12),
    st.sampled_from([(), (1,), (2,), (1, 2)]),
)
def test_a_discovered_subject_is_in_one_partition(subjects: list[str], key: tuple[int, ...]) -> None:
    source = discovered(PartitionBy("a.*.*", key=key))
    filters = [one.filter for one in source.resolve(subjects).partitions]
    assert overlapping_filters(filters) is None
    for subject in subjects:
        assert sum(matches(one, subject) for one in filters) == matches("a.*.*", subject)

"""Coverage: ranges of sequences, held beside plain sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.core.sequence_ranges import Coverage, Span

spans = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair)))


def sequences(ranges: tuple[Span, ...] | list[Span]) -> set[int]:
    return {number for after, upto in ranges for number in range(after + 1, upto + 1)}


@given(st.lists(spans), spans)
def test_coverage_is_a_set_of_sequences(ranges: list[Span], asked: Span) -> None:
    covered = Coverage(ranges)
    held = sequences(ranges)
    assert sequences(covered.spans) == held
    assert covered == Coverage((number - 1, number) for number in held)
    assert covered.last == max(held, default=0)
    assert sequences(covered.missing(asked)) == sequences([asked]) - held
    assert covered.touches(asked) == bool(sequences([asked]) & held)
    assert covered.with_span(asked) == Coverage([*ranges, asked])
    assert all(one[1] < other[0] for one, other in zip(covered.spans, covered.spans[1:], strict=False))


def test_words() -> None:
    assert str(Coverage([(0, 10), (20, 21)])) == "1-10 21-21"
    assert repr(Coverage()) == "<Coverage nothing>"
    assert not Coverage([(3, 3)])
    for wrong in ((5, 4), (-1, 2)):
        with pytest.raises(ValueError, match="is not a range"):
            Coverage([wrong])

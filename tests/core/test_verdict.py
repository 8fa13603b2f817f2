"""The judge itself must see every kind of fault."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keylane.testing import Effect, judge


def test_a_clean_run() -> None:
    verdict = judge(range(1, 5), [Effect("a", 1), Effect("b", 2), Effect("b", 4), Effect("a", 3)])
    assert verdict.clean
    assert not verdict.duplicated


def test_each_fault_is_named_by_its_sequence() -> None:
    effects = [Effect("a", 3), Effect("a", 1), Effect("b", 2), Effect("b", 2), Effect("c", 9)]
    verdict = judge([1, 2, 3, 4], effects)
    assert verdict.lost == (4,)
    assert verdict.duplicated == (2,)
    assert verdict.out_of_order == (1,)
    assert verdict.unknown == (9,)
    assert not verdict.clean


def test_a_repeat_is_no_disorder() -> None:
    verdict = judge([1, 2], [Effect("a", 1), Effect("a", 2), Effect("a", 1)])
    assert verdict.duplicated == (1,)
    assert verdict.out_of_order == ()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 12)), unique_by=lambda pair: pair[1]))
def test_order_against_every_pair(effects: list[tuple[str, int]]) -> None:
    late = {
        second[1]
        for index, second in enumerate(effects)
        for first in effects[:index]
        if first[0] == second[0] and first[1] > second[1]
    }
    verdict = judge([], [Effect(key, sequence) for key, sequence in effects])
    assert set(verdict.out_of_order) == late

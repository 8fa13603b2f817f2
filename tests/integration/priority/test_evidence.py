"""The judge of this room sees each kind of fault, and only that."""

from __future__ import annotations

import pytest

from tests.integration.priority.evidence import Findings, Line, descents, judge, receivers


def log(*sequences: int, by: str = "a", start: int = 0) -> list[Line]:
    return [Line(start + index, by, sequence) for index, sequence in enumerate(sequences)]


@pytest.mark.parametrize(
    ("sequences", "findings"),
    [
        ((1, 2, 3), Findings((), (), (), ())),
        ((1, 3), Findings((2,), (), (), ())),
        ((1, 2, 2, 3), Findings((), (2,), (), ())),
        ((1, 2, 3, 2), Findings((), (2,), (), ())),
        ((1, 3, 2), Findings((), (), (2,), ())),
        ((1, 2, 3, 4), Findings((), (), (), (4,))),
        ((3, 1, 1), Findings((2,), (1,), (1,), ())),
    ],
)
def test_one_log(sequences: tuple[int, ...], findings: Findings) -> None:
    assert judge([1, 2, 3], log(*sequences)) == findings


def test_logs_are_put_together_by_time() -> None:
    early, late = log(1, 2, by="a"), log(2, 3, by="b", start=10)
    assert judge([1, 2, 3], late, early) == Findings((), (2,), (), ())
    assert judge([1, 2, 3], log(3, by="b"), log(1, 2, by="a", start=5)).out_of_order == (1, 2)


def test_what_the_verdicts_allow() -> None:
    assert Findings((), (), (), ()).exactly_once_in_order
    repeated = Findings((), (1,), (), ())
    assert repeated.in_order_and_complete
    assert not repeated.exactly_once
    late = Findings((), (), (1,), ())
    assert late.exactly_once
    assert not late.in_order_and_complete
    assert not late.exactly_once_in_order
    for broken in (Findings((1,), (), (), ()), Findings((), (), (), (1,))):
        assert not broken.exactly_once
        assert not broken.in_order_and_complete


def test_descents_and_receivers() -> None:
    assert descents(log(1, 2, 2, 4, 3)) == [(2, 2), (4, 3)]
    assert receivers({"b": log(1), "a": log(2), "c": []}) == ["a", "b"]

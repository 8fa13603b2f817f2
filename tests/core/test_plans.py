"""Plans, their rules, and the three planners, from tables of known answers."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from keylane.core.plans import Move, Plan, balanced, check_plan, sticky
from keylane.core.weighted_plan import lowest_top, spread_loads, weighted
from keylane.errors import InvalidInput

FOUR, FIVE = list("abcd"), list("abcde")


def wrong(value: object) -> Any:
    """A value of a type that the signature does not allow."""
    return value


# ---- plans ------------------------------------------------------------------------------------------


def test_a_plan_is_sorted_whatever_order_it_was_given_in() -> None:
    plan = Plan({"b": [5, 3], "c": [], "a": iter([4, 0, 1, 2])})
    assert plan.shares == (("a", (0, 1, 2, 4)), ("b", (3, 5)), ("c", ()))
    assert plan.members == ("a", "b", "c")
    assert plan.partitions == (0, 1, 2, 3, 4, 5)
    assert plan.idle == ("c",)


@pytest.mark.parametrize(
    ("owned", "text"),
    [
        ({}, "<Plan>"),
        ({"a": []}, "<Plan a=->"),
        ({"a": [0, 1, 2, 4, 6, 7], "b": [3]}, "<Plan a=0-2,4,6,7 b=3>"),
        ({"a": range(1000)}, "<Plan a=0-999>"),
    ],
)
def test_the_repr_is_short_and_complete(owned: dict[str, list[int]], text: str) -> None:
    assert repr(Plan(owned)) == text


def test_plans_are_equal_by_value() -> None:
    plan = Plan({"a": [0, 1], "b": [2]})
    same = Plan({"b": [2], "a": [1, 0]})
    assert plan == same
    assert hash(plan) == hash(same)
    assert plan != Plan({"a": [0, 1], "c": [2]})
    assert plan != Plan({"a": [0, 1], "b": [2], "c": []})
    copied = pickle.loads(pickle.dumps(plan))  # noqa: S301 - our own bytes
    assert copied == plan
    assert copied.owner_of(2) == "b"


def test_a_plan_cannot_be_changed() -> None:
    plan = Plan({"a": [0]})
    with pytest.raises(AttributeError):
        plan.shares = ()  # type: ignore[misc]


def test_owners_and_partitions() -> None:
    plan = Plan({"a": [3, 0], "b": [1]})
    assert [plan.owner_of(partition) for partition in range(4)] == ["a", "b", None, "a"]
    assert plan.partitions_of("a") == (0, 3)
    assert plan.partitions_of("nobody") == ()


def test_moves_name_both_sides_also_where_one_is_missing() -> None:
    before = Plan({"a": [0, 1, 5], "left": [2], "c": [4]})
    after = Plan({"a": [0], "b": [1, 2, 3], "c": [4]})
    assert after.moves_from(before) == [
        Move(1, "a", "b"),
        Move(2, "left", "b"),
        Move(3, None, "b"),
        Move(5, "a", None),
    ]
    assert after.moves_from(after) == []


def test_mappings_there_and_back() -> None:
    plan = Plan({"b": [2], "a": [1, 0]})
    assert plan.mappings() == [("a", [0, 1]), ("b", [2])]
    assert Plan.from_mappings([("b", [2]), ("a", [1, 0])]) == plan


def test_mappings_leave_out_members_that_own_nothing() -> None:
    plan = balanced(["a", "b", "c"], 2)
    assert plan.idle == ("c",)
    assert plan.mappings() == [("a", [0]), ("b", [1])]


# ---- rules, each with its own words -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Plan.from_mappings([("a", [0]), ("b", [1]), ("a", [2])]),
            "member 'a' has two mappings: list each member once, with all its partitions",
        ),
        (
            lambda: Plan({"a": [0, 7], "b": [7]}),
            "partition 7 belongs to member 'a' and to member 'b': "
            "two members would work on the same keys; give it to one of them",
        ),
        (lambda: Plan({"a": [3, 3]}), "partition 3 is listed twice for member 'a': list it once"),
        (
            lambda: Plan({"a": [wrong(1.5)]}),
            "partition 1.5 of member 'a' is not a whole number: partitions count from 0",
        ),
        (
            lambda: Plan({"a": [True]}),
            "partition True of member 'a' is not a whole number: partitions count from 0",
        ),
        (
            lambda: Plan({"a": [wrong("1")]}),
            "partition '1' of member 'a' is not a whole number: partitions count from 0",
        ),
        (
            lambda: check_plan(Plan({"a": [0, 1], "b": [2, 3]}), 3),
            "partition 3 of member 'b' is out of range: with 3 partitions give 0 to 2",
        ),
        (
            lambda: check_plan(Plan({"a": [-1, 0]}), 1),
            "partition -1 of member 'a' is out of range: with 1 partitions give 0 to 0",
        ),
        (
            lambda: check_plan(Plan({"a": [1], "b": [6]}), 8),
            "partitions 0,2-5,7 of 8 belong to no member: "
            "their messages would wait forever; give each partition to a member",
        ),
        (lambda: check_plan(Plan({}), 0), "number of partitions 0 is out of range"),
        (lambda: balanced("abc", 3), "members 'abc' is a str: give a list of names"),
        (lambda: balanced(["a", "b c"], 3), "member name 'b c' holds ' ' at position 2"),
        (lambda: balanced([wrong(None)], 3), "member name None is NoneType, not text"),
        (lambda: balanced(["a"], 0), "number of partitions 0 is out of range"),
        (
            lambda: sticky(Plan({"a": [4]}), ["a"], 4),
            "partition 4 of member 'a' is out of range: with 4 partitions give 0 to 3",
        ),
        (
            lambda: weighted(Plan({"a": [4]}), ["a"], 4, {}),
            "partition 4 of member 'a' is out of range: with 4 partitions give 0 to 3",
        ),
        (
            lambda: weighted(Plan({}), ["a"], 4, {4: 1}),
            "partition 4 in the loads is out of range: give 0 to 3",
        ),
        (
            lambda: weighted(Plan({}), ["a"], 4, {wrong("0"): 1}),
            "partition '0' in the loads is not a whole number: partitions count from 0",
        ),
        *(
            (
                lambda load=load: weighted(Plan({}), ["a"], 4, {2: load}),
                f"load {load!r} of partition 2 is not a load: give a finite number, 0 or more",
            )
            for load in (-1, float("nan"), float("inf"), "3", None, True)
        ),
        *(
            (
                lambda cap=cap: weighted(Plan({}), ["a"], 4, {}, max_imbalance=cap),
                f"max_imbalance {cap!r} is out of range: "
                "the heaviest member carries at least the mean; give 1.0 or more, such as 1.15",
            )
            for cap in (0.99, 0, -2, float("nan"), float("inf"), "1.2", True)
        ),
    ],
)
def test_what_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        make()
    assert str(refused.value).startswith(message)


def test_a_complete_plan_is_returned_as_it_is() -> None:
    plan = Plan({"a": [0, 2], "b": [1], "c": []})
    assert check_plan(plan, 3) is plan


# ---- balanced ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "partitions", "expected"),
    [
        (["a"], 3, "<Plan a=0-2>"),
        (["c", "a", "b"], 6, "<Plan a=0,1 b=2,3 c=4,5>"),
        (["c", "a", "b"], 8, "<Plan a=0,1,6 b=2,3,7 c=4,5>"),
        (["b", "a", "b", "a"], 4, "<Plan a=0,1 b=2,3>"),
        (["d", "c", "b", "a"], 2, "<Plan a=0 b=1 c=- d=->"),
        (["m10", "m2", "M1"], 3, "<Plan M1=0 m10=1 m2=2>"),
        (["z", "é", "\U0001f600", "\uffee"], 4, "<Plan z=0 é=1 \uffee=2 \U0001f600=3>"),
        ([], 5, "<Plan>"),
    ],
)
def test_balanced(members: list[str], partitions: int, expected: str) -> None:
    assert repr(balanced(members, partitions)) == expected


# ---- sticky -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "partitions", "moves"),
    [
        (FOUR, FIVE, 64, 12),
        (FIVE, FOUR, 64, 12),
        (FOUR, FOUR, 64, 0),
        (["a"], ["b"], 10, 10),
        ([f"m{n}" for n in range(50)], [f"m{n}" for n in range(49)], 1000, 20),
        ([f"m{n}" for n in range(49)], [f"m{n}" for n in range(50)], 1000, 20),
    ],
)
def test_sticky_moves_what_it_must(before: list[str], after: list[str], partitions: int, moves: int) -> None:
    current = balanced(before, partitions)
    assert len(check_plan(sticky(current, after, partitions), partitions).moves_from(current)) == moves


def test_the_reference_moves_three_times_as_many() -> None:
    assert len(balanced(FIVE, 64).moves_from(balanced(FOUR, 64))) == 39


@pytest.mark.parametrize(
    ("current", "members", "partitions", "expected"),
    [
        # Those who already have more keep one more.
        ({"a": [0, 1], "b": [2, 3, 4]}, ["a", "b"], 5, "<Plan a=0,1 b=2-4>"),
        # b changes either way, so c is the one that stays as it is.
        ({"a": [0], "b": [1, 2, 3, 4], "c": [5, 6, 7], "d": []}, FOUR, 9, "<Plan a=0,3 b=1,2 c=5-7 d=4,8>"),
        # b changes either way, so a is not made larger.
        ({"a": [1, 2], "b": [0]}, ["a", "b"], 5, "<Plan a=1,2 b=0,3,4>"),
        # The late name keeps its partition; the early ones get what is left.
        ({"z": [1], "y": [0]}, ["a", "b", "z"], 2, "<Plan a=0 b=- z=1>"),
        ({"a": [0], "b": [1]}, [], 2, "<Plan>"),
        ({}, ["b", "a", "b"], 3, "<Plan a=0,1 b=2>"),
    ],
)
def test_sticky(current: dict[str, list[int]], members: list[str], partitions: int, expected: str) -> None:
    assert repr(sticky(Plan(current), members, partitions)) == expected


# ---- weighted ---------------------------------------------------------------------------------------


def test_weighted_leaves_a_plan_within_the_cap_alone() -> None:
    current = Plan({"a": [0, 1], "b": [2, 3]})
    result = weighted(current, ["a", "b"], 4, {0: 10, 1: 11, 2: 10, 3: 10})
    assert result.plan == current
    assert result.moves == ()
    assert result.imbalance_before == result.imbalance_after == pytest.approx(21 / 20.5)
    assert result.is_within_cap
    assert result.unmeasured == ()


def test_weighted_moves_one_partition_where_one_is_enough() -> None:
    current = Plan({"a": [0, 1, 2], "b": [3]})
    result = weighted(current, ["a", "b"], 4, {0: 50, 1: 30, 2: 20, 3: 10})
    assert result.moves == (Move(0, "a", "b"),)
    assert result.imbalance_before == pytest.approx(100 / 55)
    assert result.imbalance_after == pytest.approx(60 / 55)


def test_weighted_swaps_where_no_single_move_helps() -> None:
    current = Plan({"a": [0, 1], "b": [2, 3]})
    result = weighted(current, ["a", "b"], 4, {0: 6, 1: 6, 2: 4, 3: 4}, max_imbalance=1.0)
    assert len(result.moves) == 2
    assert result.imbalance_after == 1.0


def test_weighted_moves_fewer_than_even_sizes_would() -> None:
    current = balanced(FOUR, 64)
    result = weighted(current, FIVE, 64, dict.fromkeys(range(64), 1.0))
    assert len(result.moves) == 8
    assert result.is_within_cap
    evenly = weighted(current, FIVE, 64, dict.fromkeys(range(64), 1.0), max_imbalance=1.0)
    assert len(evenly.moves) == 12
    assert evenly.imbalance_after == evenly.floor == pytest.approx(13 / 12.8)
    assert not evenly.is_within_cap


def test_a_partition_hotter_than_the_cap_is_the_floor() -> None:
    current = Plan({"a": [0, 1, 2], "b": [3, 4], "c": [5]})
    loads = {0: 90, 1: 1, 2: 1, 3: 4, 4: 4, 5: 5}
    result = weighted(current, ["a", "b", "c"], 6, loads)
    assert result.floor == pytest.approx(90 / 35)
    assert result.imbalance_after == result.floor
    assert not result.is_within_cap
    # Every other member carries something, so the small ones leave the hot one alone.
    assert {(move.partition, move.source) for move in result.moves} == {(1, "a"), (2, "a")}


def test_members_beside_a_hot_one_still_keep_the_cap() -> None:
    current = Plan({"a": [0], "b": [1, 2, 3, 4], "c": [5], "d": [6]})
    loads = {0: 45, 1: 10, 2: 10, 3: 10, 4: 10, 5: 0, 6: 0}
    result = weighted(current, FOUR, 7, loads, max_imbalance=1.2)
    assert result.imbalance_after == result.floor
    sums = [sum(loads[partition] for partition in owned) for _, owned in result.plan.shares]
    assert sums[0] == 45
    assert max(sums[1:]) <= 1.2 * 85 / 4
    assert len(result.moves) == 2


def test_a_hot_partition_moves_if_that_is_cheapest() -> None:
    current = Plan({"a": range(20)})
    loads = {0: 100.0} | dict.fromkeys(range(1, 20), 1.0)
    assert weighted(current, ["a", "b"], 20, loads).moves == (Move(0, "a", "b"),)


def test_partitions_of_members_that_left_go_to_the_lightest() -> None:
    current = Plan({"a": [0, 1], "b": [2], "left": [3, 4]})
    result = weighted(current, ["a", "b"], 6, {0: 5, 1: 5, 2: 4, 3: 4, 4: 2, 5: 1}, max_imbalance=1.1)
    assert [(move.partition, move.source, move.target) for move in result.moves] == [
        (3, "left", "b"),
        (4, "left", "b"),
        (5, None, "a"),
    ]


def test_missing_loads_count_as_zero_and_are_reported() -> None:
    result = weighted(Plan({"a": [0, 1]}), ["a", "b"], 4, {0: 3, 1: 3, 3: 0})
    assert result.unmeasured == (2,)
    check_plan(result.plan, 4)
    assert result.imbalance_after == 1.0


@pytest.mark.parametrize("loads", [{}, {0: 0, 5: 0.0}])
def test_with_nothing_measured_the_plan_is_the_sticky_one(loads: dict[int, float]) -> None:
    current = balanced(FOUR, 64)
    result = weighted(current, FIVE, 64, loads)
    assert result.plan == sticky(current, FIVE, 64)
    assert len(result.moves) == 12
    assert result.imbalance_before == result.imbalance_after == result.floor == 1.0


def test_a_new_member_gets_something_even_if_the_cap_is_met_without_it() -> None:
    members = [f"m{n:02}" for n in range(20)]
    current = balanced(members, 200)
    result = weighted(current, [*members, "new"], 200, dict.fromkeys(range(200), 1.0))
    assert [move.target for move in result.moves] == ["new"]


def test_a_new_member_shares_the_load_of_the_heaviest() -> None:
    current = Plan({"a": [0, 1], "b": [2, 3, 4]})
    result = weighted(current, ["a", "b", "c"], 5, {0: 2, 1: 3, 2: 1, 3: 2, 4: 3}, max_imbalance=2)
    assert result.moves == (Move(4, "b", "c"),)


def test_weighted_with_more_members_than_partitions() -> None:
    result = weighted(Plan({"c": [0, 1]}), ["a", "b", "c", "d"], 2, {0: 1, 1: 2})
    check_plan(result.plan, 2)
    assert len(result.moves) == 1
    assert len(result.plan.idle) == 2


def test_weighted_without_members_is_empty() -> None:
    result = weighted(Plan({"a": [0, 1]}), [], 2, {0: 1})
    assert result.plan == Plan({})
    assert result.moves == (Move(0, "a", None), Move(1, "a", None))


def test_loads_of_any_size_are_added_up_exactly() -> None:
    tenths = dict.fromkeys(range(6), 0.1)
    # As floats, 0.1 + 0.1 + 0.1 is above half of their sum.
    assert weighted(Plan({"a": [0, 1, 2], "b": [3, 4, 5]}), ["a", "b"], 6, tenths, max_imbalance=1.0).moves == ()
    thirds = {0: 7, 1: 4, 2: 3, 4: 1, 5: 2, 6: 5}
    current = Plan({"a": [0, 2, 4], "b": [1, 5], "c": [6]})
    for unit in (1, 3, 0.25):
        in_units = {partition: load * unit for partition, load in thirds.items()}
        assert len(weighted(current, ["a", "b", "c"], 7, in_units, max_imbalance=1.0).moves) == 2
    extremes = {0: 1.7e308, 1: 1.7e308, 2: 5e-324, 3: 10**400}
    result = weighted(Plan({"a": [0, 1, 2, 3]}), ["a", "b"], 4, extremes)
    assert result.moves == (Move(3, "a", "b"),)


# ---- the search behind it ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "members", "expected"),
    [
        ([], 3, 0),
        ([7], 3, 7),
        ([4, 4, 4], 2, 8),
        ([4, 4, 4], 3, 4),
        ([9, 5, 5, 5], 3, 10),
        ([5, 5, 5, 5, 5], 2, 15),
        ([3, 3, 3, 1], 2, 6),
        ([1, 1, 1], 2, 2),
    ],
)
def test_the_lowest_top(weights: list[int], members: int, expected: int) -> None:
    assert lowest_top(weights, members) == expected


@pytest.mark.parametrize(
    ("weights", "homes", "members", "cap", "top_and_away"),
    [
        pytest.param([5, 5, 1, 1], [0, 0, 1, 1], 2, 6, (6, 2), id="a swap"),
        pytest.param([2, 9, 1, 2, 2], [0, 0, 0, 0, -1], 2, 8, (9, 2), id="loosen before placing"),
        pytest.param([22, 34, 11, 12, 25], [0, 1, 0, 1, 0], 2, 52, (56, 2), id="loosening is not always best"),
        pytest.param([7, 4, 3, 0, 1, 2, 5], [0, 1, 0, -1, 0, 1, 2], 3, 7, (8, 2), id="22 over 3 is 8 at best"),
        pytest.param([116, 92, 86, 98, 112, 118], [1, 0, 1, 2, 1, 0], 3, 207, (210, 1), id="crowding"),
        pytest.param([4, 10, 0, 0, 3, 6, 2], [0, 0, 0, 1, 2, 0, 1], 3, 8, (10, 2), id="one large move, not two small"),
        pytest.param([0, 1, 7, 6], [0, 1, 1, 1], 3, 4, (7, 2), id="two hot ones do not share"),
        pytest.param(
            *([24, 28, 23, 30, 895, 672, 59], [1, 1, 1, 2, 0, 0, 2], 3, 605, (895, 3)),
            id="a little beside a hot one may stay",
        ),
        pytest.param(
            *([35, 51, 15, 10, 18, 15, 18, 56, 61], [0, 1, 0, 1, 1, -1, 1, 0, 0], 5, 55, (61, 6)),
            id="members beside the hottest count too",
        ),
        pytest.param(
            *([106, 48, 78, 229, 3, 83, 94, 133], [0, 2, 1, 3, 0, 1, 2, 0], 4, 203, (229, 2)),
            id="a move that was not needed is undone",
        ),
        pytest.param([86, 99, 87, 84, 93], [2, 1, 0, 0, -1], 3, 172, (177, 2), id="afresh"),
        pytest.param(
            *([54, 36, 120, 16, 95, 127, 40, 196], [1, 0, 0, 1, 2, 0, 0, 1], 3, 228, (232, 4)),
            id="afresh, and piles stay where most of them was",
        ),
        pytest.param(
            *([113, 113, 94, 112, 113, 90, 84, 85], [0, 3, 2, 1, 2, 1, 2, 3], 5, 168, (197, 3)),
            id="afresh, and what was not needed is undone",
        ),
    ],
)
def test_loads_that_need_each_of_the_steps(
    weights: list[int], homes: list[int], members: int, cap: int, top_and_away: tuple[int, int]
) -> None:
    holders = spread_loads(weights, homes, members, cap)
    sums = [0] * members
    for weight, holder in zip(weights, holders, strict=True):
        sums[holder] += weight
    away = sum(home != holder for home, holder in zip(homes, holders, strict=True))
    assert (max(sums), away) == top_and_away

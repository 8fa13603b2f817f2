"""Which partitions a consumer goes for: every order, every limit, whole topics."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keylane.core.claim_choice import Appetite, PickOrder, Standing, TopicPartition, give_up, pick
from keylane.errors import InvalidInput

TOPICS = {"orders": 3, "refunds": 2}


def seen(**standings: dict[int, Standing]) -> Callable[[TopicPartition], Standing]:
    """Free, but for what is named: `seen(orders={0: Standing.TAKEN})`."""
    return lambda one: standings.get(one.topic, {}).get(one.partition, Standing.FREE)


def first(_: int) -> int:
    return 0


def last(count: int) -> int:
    return count - 1


OURS, TAKEN = Standing.OURS, Standing.TAKEN
EVERYTHING_TAKEN = seen(orders=dict.fromkeys(range(3), TAKEN), refunds=dict.fromkeys(range(2), TAKEN))


def test_random_picks_one_by_the_dice() -> None:
    standing = seen(orders={0: TAKEN, 1: OURS})
    assert pick(Appetite(), TOPICS, standing, choose=first) == [("orders", 2)]
    assert pick(Appetite(), TOPICS, standing, choose=last) == [("refunds", 1)]


def test_the_dice_are_asked_about_what_is_free_only() -> None:
    asked = []

    def choose(count: int) -> int:
        asked.append(count)
        return 0

    pick(Appetite(greedy=True), TOPICS, seen(orders={0: TAKEN}), choose=choose)
    assert asked == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("after", "picked"),
    [
        (None, ("orders", 0)),
        (TopicPartition("orders", 0), ("orders", 2)),
        (TopicPartition("orders", 1), ("orders", 2)),
        (TopicPartition("orders", 2), ("refunds", 0)),
        (TopicPartition("refunds", 1), ("orders", 0)),
        (TopicPartition("zebra", 9), ("orders", 0)),
    ],
)
def test_round_robin_goes_on_after_the_last_one_tried(after: TopicPartition | None, picked: tuple[str, int]) -> None:
    appetite = Appetite("round_robin")
    assert pick(appetite, TOPICS, seen(orders={1: TAKEN}), choose=first, after=after) == [picked]


def test_greedy_takes_all_that_is_free() -> None:
    standing = seen(orders={1: TAKEN})
    random_order = pick(Appetite(greedy=True), TOPICS, standing, choose=last)
    assert random_order == [("refunds", 1), ("refunds", 0), ("orders", 2), ("orders", 0)]
    in_turn = pick(
        Appetite("round_robin", greedy=True), TOPICS, standing, choose=first, after=TopicPartition("orders", 2)
    )
    assert in_turn == [("refunds", 0), ("refunds", 1), ("orders", 0), ("orders", 2)]


@pytest.mark.parametrize("order", ["random", "round_robin"])
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(("ours", "room"), [(0, 2), (1, 1), (2, 0), (3, 0)])
def test_no_more_than_the_maximum(order: PickOrder, greedy: bool, ours: int, room: int) -> None:
    standing = seen(orders=dict.fromkeys(range(ours), OURS))
    picked = pick(Appetite(order, greedy=greedy, max_claims=2), TOPICS, standing, choose=first)
    assert len(picked) == (room if greedy else min(room, 1))


@pytest.mark.parametrize("appetite", [Appetite(), Appetite("round_robin", greedy=True), Appetite(whole_topic=True)])
def test_nothing_free_nothing_picked(appetite: Appetite) -> None:
    assert pick(appetite, TOPICS, EVERYTHING_TAKEN, choose=first) == []
    assert pick(appetite, {}, seen(), choose=first) == []
    assert pick(appetite, {"empty": 0}, seen(), choose=first) == []


def test_a_whole_topic_begins_with_partition_zero() -> None:
    whole = Appetite("round_robin", whole_topic=True)
    assert pick(whole, TOPICS, seen(), choose=first) == [("orders", 0)]
    assert pick(whole, TOPICS, seen(orders={0: TAKEN}), choose=first) == [("refunds", 0)]
    assert pick(whole, TOPICS, seen(orders={0: TAKEN}, refunds={0: TAKEN}), choose=first) == []
    greedy = Appetite("round_robin", whole_topic=True, greedy=True)
    assert pick(greedy, TOPICS, seen(), choose=first) == [("orders", 0), ("refunds", 0)]


def test_who_has_partition_zero_takes_the_others_first() -> None:
    whole = Appetite("round_robin", whole_topic=True)
    standing = seen(orders={0: OURS, 2: TAKEN})
    assert pick(whole, TOPICS, standing, choose=first) == [("orders", 1), ("refunds", 0)]


def test_the_maximum_counts_topics_where_topics_are_claimed() -> None:
    one = Appetite("round_robin", whole_topic=True, greedy=True, max_claims=1)
    assert pick(one, TOPICS, seen(), choose=first) == [("orders", 0)]
    assert pick(one, TOPICS, seen(orders={0: OURS}), choose=first) == [("orders", 1), ("orders", 2)]
    assert pick(one, TOPICS, seen(orders=dict.fromkeys(range(3), OURS)), choose=first) == []


def test_a_part_of_a_topic_is_given_up() -> None:
    standing = seen(orders={0: TAKEN, 1: OURS, 2: OURS}, refunds={0: OURS, 1: OURS})
    assert give_up(Appetite(whole_topic=True), TOPICS, standing) == [("orders", 1), ("orders", 2)]
    assert give_up(Appetite(), TOPICS, standing) == []


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "2"])
def test_a_maximum_that_cannot_be(limit: int) -> None:
    with pytest.raises(InvalidInput, match="max_claims is"):
        Appetite(max_claims=limit)


def test_an_order_that_is_not_known() -> None:
    with pytest.raises(InvalidInput, match="use one of random, round_robin"):
        Appetite("fair")  # type: ignore[arg-type]

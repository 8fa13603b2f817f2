"""Which partitions a consumer tries to claim next, and which it should give up.

Owns: the choice. Never looks up owners (`standing` does) and uses no randomness (`choose` does): the same answers give
the same partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal, NamedTuple, TypeAlias, get_args

from keylane.errors import InvalidInput

PickOrder: TypeAlias = Literal["random", "round_robin"]


class TopicPartition(NamedTuple):
    topic: str
    partition: int


class Standing(Enum):
    """A partition, as one consumer sees it."""

    OURS = auto()
    FREE = auto()
    """Nobody's claim holds: it can be claimed."""
    TAKEN = auto()


@dataclass(frozen=True, slots=True)
class Appetite:
    """How a consumer picks.

    `order`: random (consumers rarely collide), or round robin from the last one tried. `greedy`: try all free
    partitions at once, not one at a time. `max_claims`: own no more than this; None for no limit. `whole_topic`: own
    all partitions of a topic or none; the owner of partition 0 takes the others, and `max_claims` counts topics.
    """

    order: PickOrder = "random"
    greedy: bool = False
    whole_topic: bool = False
    max_claims: int | None = None

    def __post_init__(self) -> None:
        if self.order not in get_args(PickOrder):
            raise InvalidInput(f"order is {self.order!r}: use one of {', '.join(get_args(PickOrder))}")
        limit = self.max_claims
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise InvalidInput(f"max_claims is {limit!r}: give a whole number, at least 1, or None for no limit")


def pick(
    appetite: Appetite,
    topics: Mapping[str, int],
    standing: Callable[[TopicPartition], Standing],
    *,
    choose: Callable[[int], int],
    after: TopicPartition | None = None,
) -> list[TopicPartition]:
    """The partitions to claim now, in this order.

    `topics`: their numbers of partitions. `choose(n)`: a number from 0 to n - 1. `after`: the last one tried.

    >>> taken = {TopicPartition("orders", 0): Standing.TAKEN}
    >>> pick(Appetite("round_robin"), {"orders": 3}, lambda p: taken.get(p, Standing.FREE), choose=lambda n: 0)
    [TopicPartition(topic='orders', partition=1)]
    """
    if not appetite.whole_topic:
        everything = list(_all_of(topics))
        free = [one for one in everything if standing(one) is Standing.FREE]
        ours = sum(standing(one) is Standing.OURS for one in everything)
        return _take(appetite, free, ours, choose, after)
    rest: list[TopicPartition] = []
    first: list[TopicPartition] = []
    begun = 0
    for topic, count in sorted(topics.items()):
        of_topic = [TopicPartition(topic, number) for number in range(count)]
        if of_topic and standing(of_topic[0]) is Standing.OURS:
            begun += 1
            rest += [one for one in of_topic if standing(one) is Standing.FREE]
        elif of_topic and standing(of_topic[0]) is Standing.FREE:
            first.append(of_topic[0])
    return rest + _take(appetite, first, begun, choose, after)


def give_up(
    appetite: Appetite, topics: Mapping[str, int], standing: Callable[[TopicPartition], Standing]
) -> list[TopicPartition]:
    """The partitions to release: with `whole_topic`, all of a topic whose partition 0 is no longer ours."""
    if not appetite.whole_topic:
        return []
    return [
        one
        for one in _all_of(topics)
        if standing(one) is Standing.OURS and standing(TopicPartition(one.topic, 0)) is not Standing.OURS
    ]


def _all_of(topics: Mapping[str, int]) -> Iterator[TopicPartition]:
    for topic, count in sorted(topics.items()):
        for number in range(count):
            yield TopicPartition(topic, number)


def _take(
    appetite: Appetite,
    free: Sequence[TopicPartition],
    owned: int,
    choose: Callable[[int], int],
    after: TopicPartition | None,
) -> list[TopicPartition]:
    room = len(free) if appetite.max_claims is None else max(appetite.max_claims - owned, 0)
    count = min(room, len(free), len(free) if appetite.greedy else 1)
    if appetite.order == "random":
        left = list(free)
        return [left.pop(choose(len(left))) for _ in range(count)]
    start = 0 if after is None else sum(one <= after for one in free)
    return [free[(start + step) % len(free)] for step in range(count)]

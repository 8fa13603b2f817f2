"""How a group stands, in one sentence, and totals of values of which some may be unknown. Pure.

What is unknown is None. It is never counted as 0: a total with an unknown part is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeVar

Number = TypeVar("Number", int, float)

Standing = Literal["unreadable", "paused", "empty", "stopped", "working", "behind", "good"]
"""How a group stands, as one word. `empty`: it has no members. `stopped`: none is at work. `working`: whether it keeps
up is not known."""

BEHIND_AFTER_S = 10.0
"""A group whose oldest message has waited for longer is said to be behind."""


def known_sum(values: Iterable[int | None]) -> int | None:
    """The sum; None if one of them is unknown.

    >>> known_sum([1, 2]), known_sum([]), known_sum([1, None])
    (3, 0, None)
    """
    total = 0
    for one in values:
        if one is None:
            return None
        total += one
    return total


def known_max(values: Iterable[float | None]) -> float | None:
    """The highest, 0 of none; None if one of them is unknown.

    >>> known_max([0.5, 2.0]), known_max([]), known_max([0.5, None])
    (2.0, 0.0, None)
    """
    highest = 0.0
    for one in values:
        if one is None:
            return None
        highest = max(highest, one)
    return highest


class GroupFacts(NamedTuple):
    """What the sentence about a group is made of."""

    name: str
    members: int
    """That the group lists, or the workers that hold an id."""
    active: int
    """Of these, those that are at work."""
    partitions: int
    unowned: int
    """Partitions that nobody handles now."""
    lag: int | None
    lag_s: float | None
    dead_letters: int | None = 0
    parked_keys: int | None = 0
    is_paused: bool = False
    problem: str | None = None
    member_word: str = "member"


def summary(facts: GroupFacts) -> str:
    """One sentence.

    >>> summary(GroupFacts("billing", members=3, active=3, partitions=8, unowned=0, lag=12, lag_s=0.4))
    'billing keeps up: 3 members, lag 12, 0.4 s'
    >>> summary(GroupFacts("billing", members=3, active=2, partitions=8, unowned=3, lag=90, lag_s=75, parked_keys=1))
    'billing is behind: 2 of 3 members, 3 of 8 partitions without owner, lag 90, 75 s, 1 parked key'
    >>> summary(GroupFacts("billing", members=0, active=0, partitions=8, unowned=8, lag=None, lag_s=None))
    'billing has no members: lag unknown'
    """
    if facts.problem is not None:
        return f"{facts.name} {_verdict(facts)}: {facts.problem}"
    parts: list[str] = []
    if facts.active:
        of_all = "" if facts.active == facts.members else f" of {facts.members}"
        parts.append(f"{facts.active}{of_all} {counted(facts.members, facts.member_word)[1]}")
        if facts.unowned:
            parts.append(f"{facts.unowned} of {facts.partitions} partitions without owner")
    parts.append("lag unknown" if facts.lag is None else f"lag {facts.lag:,}")
    if facts.lag and facts.lag_s is not None:
        parts.append(age_text(facts.lag_s))
    for number, word in ((facts.dead_letters, "dead letter"), (facts.parked_keys, "parked key")):
        if number:
            parts.append(" ".join(counted(number, word)))
    return f"{facts.name} {_verdict(facts)}: {', '.join(parts)}"


def standing(facts: GroupFacts) -> Standing:
    """How the group stands.

    >>> standing(GroupFacts("billing", members=3, active=3, partitions=8, unowned=0, lag=90, lag_s=75))
    'behind'
    """
    if facts.problem is not None:
        return "unreadable"
    if facts.is_paused:
        return "paused"
    if not facts.active:
        return "stopped" if facts.members else "empty"
    if facts.lag is None or (facts.lag and facts.lag_s is None):
        return "working"
    return "behind" if facts.lag and facts.lag_s is not None and facts.lag_s > BEHIND_AFTER_S else "good"


def _verdict(facts: GroupFacts) -> str:
    return {
        "unreadable": "cannot be read",
        "paused": "is paused",
        "empty": f"has no {facts.member_word}s",
        "stopped": f"stands still, no {facts.member_word} is at work",
        "working": "is at work",
        "behind": "is behind",
        "good": "keeps up",
    }[standing(facts)]


def counted(number: int, word: str) -> tuple[str, str]:
    """A number and its noun.

    >>> counted(1, "member"), counted(1200, "member")
    (('1', 'member'), ('1,200', 'members'))
    """
    return f"{number:,}", word if number == 1 else f"{word}s"


def age_text(seconds: float) -> str:
    """A short text.

    >>> [age_text(one) for one in (0.04, 0.4, 12.3, 75, 5400, 200000)]
    ['0.0 s', '0.4 s', '12 s', '75 s', '1.5 h', '2.3 d']
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"

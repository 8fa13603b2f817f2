"""Who owns which partition: plans, what moves between two of them, and three ways to make one.

Owns: the `Plan`, its rules, and the planners `balanced` and `sticky`; `core/weighted_plan.py` has `weighted`. Never
stores a plan, never knows whether a member is alive, and never measures a load.

- `balanced` is what members of every language compute by themselves from a list of names. It moves much:
  64 partitions from four to five members move 39.
- `sticky` has sizes just as even and moves the fewest partitions: 12 in the same case.
- `weighted` counts load in place of partitions and moves only what brings the heaviest member under a cap.

The last two depend on what was before, so they are stored as member mappings, which other languages follow
as they are. Members that own nothing are left out of the mappings: members in Go refuse a record with more
mappings than partitions.

All three take names in any order and count a name once; without members the plan is empty. The same input
gives the same plan on any machine: names sort by code point, which is also the byte order of their UTF-8,
and loads are added up exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from keylane.core.names import check_member_name
from keylane.core.partitions import check_partition_count
from keylane.core.subjects import shown
from keylane.errors import InvalidInput

# ---- plans ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Move:
    """A partition that changes its owner. `source` is None if nobody had it, `target` if nobody gets it."""

    partition: int
    source: str | None
    target: str | None


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Plan:
    """Which member owns which partitions: sorted, and no partition twice. Two plans are equal by value.

    `shares` has every member with its partitions, including members that own nothing. Some partitions may have no
    owner while a group is being changed; `check_plan` checks for that.

    >>> Plan({"b": [4, 3], "a": [0, 2, 1], "c": []})
    <Plan a=0-2 b=3,4 c=->
    """

    shares: tuple[tuple[str, tuple[int, ...]], ...]
    _owners: dict[int, str] = field(compare=False)

    def __init__(self, owned: Mapping[str, Iterable[int]]) -> None:
        owners: dict[int, str] = {}
        shares = []
        for member in sorted(check_member_name(name) for name in owned):
            partitions = list(owned[member])
            for partition in partitions:
                check_whole(partition, f"partition {shown(partition)} of member {shown(member)}")
                if partition in owners:
                    raise _owned_twice(partition, owners[partition], member)
                owners[partition] = member
            shares.append((member, tuple(sorted(partitions))))
        object.__setattr__(self, "shares", tuple(shares))
        object.__setattr__(self, "_owners", owners)

    def __repr__(self) -> str:
        shares = (f" {member}={ranges(partitions, none='-')}" for member, partitions in self.shares)
        return f"<Plan{''.join(shares)}>"

    @classmethod
    def from_mappings(cls, mappings: Iterable[tuple[str, Iterable[int]]]) -> Plan:
        """The plan of stored member mappings, given as pairs of member and partitions."""
        owned: dict[str, Iterable[int]] = {}
        for member, partitions in mappings:
            if member in owned:
                raise InvalidInput(
                    f"member {shown(member)} has two mappings: list each member once, with all its partitions"
                )
            owned[member] = partitions
        return cls(owned)

    def mappings(self) -> list[tuple[str, list[int]]]:
        """The member mappings to store: members that own something, with their partitions."""
        return [(member, list(partitions)) for member, partitions in self.shares if partitions]

    @property
    def members(self) -> tuple[str, ...]:
        """All members, by name."""
        return tuple(member for member, _ in self.shares)

    @property
    def idle(self) -> tuple[str, ...]:
        """Members that own nothing; `mappings` omits them."""
        return tuple(member for member, partitions in self.shares if not partitions)

    @property
    def partitions(self) -> tuple[int, ...]:
        """All partitions that have an owner."""
        return tuple(sorted(self._owners))

    def owner_of(self, partition: int) -> str | None:
        """The member that owns a partition, or None."""
        return self._owners.get(partition)

    def partitions_of(self, member: str) -> tuple[int, ...]:
        """The partitions of a member, ascending; none if the plan does not have the member."""
        return next((partitions for name, partitions in self.shares if name == member), ())

    def moves_from(self, other: Plan) -> list[Move]:
        """The moves from the other plan to this one, by partition.

        >>> Plan({"a": [0], "b": [1, 2]}).moves_from(Plan({"a": [0, 1]}))
        [Move(partition=1, source='a', target='b'), Move(partition=2, source=None, target='b')]
        """
        return [
            Move(partition, other.owner_of(partition), self.owner_of(partition))
            for partition in sorted(self._owners.keys() | other._owners.keys())
            if self.owner_of(partition) != other.owner_of(partition)
        ]


def check_plan(plan: Plan, partitions: int) -> Plan:
    """Return a plan unchanged if it gives every partition from 0 to `partitions` - 1, and no other, an owner.

    Raises `InvalidInput` otherwise. A `Plan` never gives a partition two owners.
    """
    check_partition_count(partitions)
    check_range(plan, partitions)
    if missing := [partition for partition in range(partitions) if plan.owner_of(partition) is None]:
        raise InvalidInput(
            f"partitions {ranges(missing)} of {partitions} belong to no member: "
            "their messages would wait forever; give each partition to a member"
        )
    return plan


# ---- by number of partitions ------------------------------------------------------------------------


def change_of(before: Plan | None, after: Plan) -> str:
    """Why a plan differs from the one before, in one word: start, join, leave or mapping.

    >>> change_of(None, Plan({"a": [0]})), change_of(Plan({"a": [0, 1]}), Plan({"a": [0], "b": [1]}))
    ('start', 'join')
    """
    if before is None:
        return "start"
    if set(after.members) - set(before.members):
        return "join"
    return "leave" if set(before.members) - set(after.members) else "mapping"


def balanced(members: Iterable[str], partitions: int) -> Plan:
    """The plan that every member, in any language, computes itself from the list of names.

    Each member gets a block, in name order; the remaining partitions go one by one to the first members. With more
    members than partitions, the last ones by name own nothing.

    >>> balanced(["c", "a", "b"], 8)
    <Plan a=0,1,6 b=2,3,7 c=4,5>
    """
    names = distinct_names(members)
    check_partition_count(partitions)
    if not names:
        return Plan({})
    size, rest = divmod(partitions, len(names))
    owned = {name: list(range(index * size, (index + 1) * size)) for index, name in enumerate(names)}
    for name, partition in zip(names[:rest], range(partitions - rest, partitions), strict=True):
        owned[name].append(partition)
    return Plan(owned)


def sticky(current: Plan, members: Iterable[str], partitions: int) -> Plan:
    """The plan with the fewest moves from the current one among those whose sizes differ by at most 1.

    Of those it is one that changes the fewest members. A partition leaves a remaining member only if that member has
    too many. With more members than partitions, those that own one keep it and the others own nothing.

    >>> sticky(Plan({"a": [0, 1, 2, 3, 4, 5]}), ["a", "b"], 6)
    <Plan a=0-2 b=3-5>
    """
    names = distinct_names(members)
    check_partition_count(partitions)
    check_range(current, partitions)
    if not names:
        return Plan({})
    size, rest = divmod(partitions, len(names))
    had = dict(current.shares)

    def claim_to_larger(name: str) -> tuple[bool, bool, bool, str]:
        # Each member above `size` that may keep one more saves a move. The other keys prefer members that then do
        # not change at all: those with one above, and those with exactly `size`.
        has = len(had.get(name, ()))
        return has <= size, has != size + 1, has == size, name

    larger = set(sorted(names, key=claim_to_larger)[:rest])
    quota = {name: size + (name in larger) for name in names}
    owned = {name: list(had.get(name, ())[: quota[name]]) for name in names}
    kept = {partition for held in owned.values() for partition in held}
    loose = [partition for partition in reversed(range(partitions)) if partition not in kept]
    for name, held in owned.items():
        while len(held) < quota[name]:
            held.append(loose.pop())
    return Plan(owned)


# ---- checks and texts -------------------------------------------------------------------------------


def distinct_names(members: Iterable[str]) -> list[str]:
    if isinstance(members, str):
        raise InvalidInput(f"members {shown(members)} is a str: give a list of names")
    return sorted({check_member_name(name) for name in members})


def check_range(plan: Plan, partitions: int) -> None:
    for partition in plan.partitions:
        if not 0 <= partition < partitions:
            raise InvalidInput(
                f"partition {partition} of member {shown(plan.owner_of(partition))} is out of range: "
                f"with {partitions} partitions give 0 to {partitions - 1}"
            )


def check_whole(value: object, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInput(f"{what} is not a whole number: partitions count from 0")


def _owned_twice(partition: int, first: str, second: str) -> InvalidInput:
    if first == second:
        return InvalidInput(f"partition {partition} is listed twice for member {shown(first)}: list it once")
    return InvalidInput(
        f"partition {partition} belongs to member {shown(first)} and to member {shown(second)}: "
        "two members would work on the same keys; give it to one of them"
    )


def ranges(partitions: Iterable[int], *, none: str = "none") -> str:
    """Ascending numbers in short form: `0-2,5,7,8`; `none` is the text for no numbers.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7,8'
    """
    runs: list[list[int]] = []
    for one in partitions:
        if runs and one == runs[-1][1] + 1:
            runs[-1][1] = one
        else:
            runs.append([one, one])
    texts = (
        str(first) if first == last else f"{first}{',' if last == first + 1 else '-'}{last}" for first, last in runs
    )
    return ",".join(texts) or none

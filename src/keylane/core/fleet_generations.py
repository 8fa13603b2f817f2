"""Another number of partitions while a fleet runs: which generation of numbers is handled, and what comes next.

Owns: the partitions of every generation, the barrier between two, and the next step of a change. Never asks a server.

Theory of operation. Messages that are stored keep their number, and both numberings use the same subjects: only the
sequence tells which one a message has. So every generation has its own consumers and its own range of sequences, and
the next one begins when everything of the one before is handled. Then the messages of a key are in order, whatever
partitions they are in.

| the table | what else holds | the next step |
| --- | --- | --- |
| a target | | write `last`: the stream's last sequence now. Workers start nothing that is newer: HOLD |
| held | a worker does not follow it yet | wait: it might handle a new number before the old ones |
| held | the stream still has the old number | update its transform: UPDATE |
| held | the stream has the new number | find the barrier, write the generations: SPLIT |
| two generations | something up to `last` is not handled | wait |
| two generations | everything is | write `retired`: nobody may own its partitions: RETIRE |
| retired | somebody owns one of its partitions | wait |
| retired | nobody does | delete its consumers, write the table without it: DROP. The next generation is open |

Every step is a compare-and-set on the table, or can be repeated: whoever leads goes on where the one before ended.

The barrier. The update takes a moment, and messages are stored meanwhile. A message whose number is that of one
numbering only tells on which side it is. What has the same number in both may be on either side. Normally all old ones
come before all new ones. If the stream's leader changed in the middle, they may be mixed: then one partition with all
numbers handles what lies between the first new one and the last old one, as a generation of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple

from keylane.core.fleet_partitions import HashedPartitions, Partition
from keylane.core.fleet_records import Generation, PartitionTable
from keylane.core.partitions import Partitioning, check_partition_count, strip_partition
from keylane.errors import FleetError, InvalidInput


def first_table(partitions: int) -> PartitionTable:
    """The table of a fleet that never had another number of partitions."""
    return PartitionTable(version=0, generations=(Generation(0, partitions),), numbers=(partitions,))


def partition_id(generation: Generation, number: int) -> str:
    """`3` in the fleet's first generation, `3g1` later.

    >>> partition_id(Generation(1, 16), 3)
    '3g1'
    """
    if generation.every:
        return f"allg{generation.number}"
    return f"{number}g{generation.number}" if generation.number else str(number)


def partitions_of(source: HashedPartitions, generation: Generation) -> tuple[Partition, ...]:
    wanted = source.partitioning.filter
    if generation.every:
        return (Partition(partition_id(generation, 0), f"*.{wanted}", first=generation.first),)
    return tuple(
        Partition(
            partition_id(generation, number),
            f"{number}.{wanted}",
            source.weights.get(number, 1.0),
            source.labels.get(number),
            generation.first,
        )
        for number in range(generation.partitions)
    )


# ---- the barrier ------------------------------------------------------------------------------------


class Barrier(NamedTuple):
    """Everything up to `last` has old numbers, everything after `mixed_last` new ones."""

    last: int
    mixed_last: int
    """Higher than `last` only where both are mixed between the two."""


def find_barrier(
    stored: Iterable[tuple[int, str]], old: Partitioning, new: Partitioning, low: int, high: int
) -> Barrier:
    """The barrier between two numberings.

    `stored`: sequences and subjects after `low` and up to `high`, as far as they still exist. Everything up to `low`
    was stored before the update, everything after `high` after it.

    >>> ten, two = Partitioning("o.*", (1,), 10), Partitioning("o.*", (1,), 2)
    >>> find_barrier([(6, "9.o.alice"), (7, "1.o.alice")], ten, two, 5, 8)
    Barrier(last=6, mixed_last=6)
    """
    last_old, first_new = low, high + 1
    for sequence, subject in stored:
        if not low < sequence <= high:
            continue
        try:
            number, plain = strip_partition(subject)
            before, after = old.partition(plain), new.partition(plain)
        except InvalidInput:
            continue  # not one that is numbered
        if before == after:
            continue
        if number == before:
            last_old = max(last_old, sequence)
        elif number == after:
            first_new = min(first_new, sequence)
    return Barrier(first_new - 1, max(first_new - 1, last_old))


# ---- the steps --------------------------------------------------------------------------------------


class ChangeStep(Enum):
    """What the leader does next."""

    NOTHING = auto()
    HOLD = auto()
    UPDATE = auto()
    SPLIT = auto()
    RETIRE = auto()
    DROP = auto()
    AWAIT_WORKERS = auto()
    AWAIT_MESSAGES = auto()
    AWAIT_OWNERS = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeFacts:
    """What the leader has found out. Only what a step needs is looked at."""

    followed: bool = False
    """Every worker follows this table."""
    numbered: int = 0
    """How many partitions the stream's transform numbers now."""
    handled: bool = False
    """Everything of the first generation up to its last sequence is acked."""
    owned: bool = True
    """A partition of the first generation has an owner."""


def next_step(table: PartitionTable, facts: ChangeFacts) -> ChangeStep:
    front, *later = table.generations
    if later:
        if front.retired:
            return ChangeStep.AWAIT_OWNERS if facts.owned else ChangeStep.DROP
        return ChangeStep.RETIRE if facts.handled else ChangeStep.AWAIT_MESSAGES
    if not table.target:
        return ChangeStep.NOTHING
    if front.last is None:
        return ChangeStep.HOLD
    if not facts.followed:
        return ChangeStep.AWAIT_WORKERS
    return ChangeStep.SPLIT if facts.numbered == table.target else ChangeStep.UPDATE


def wanted(table: PartitionTable, partitions: int) -> PartitionTable:
    """The table with the wish for another number of partitions. The same one if it has that number, or the wish."""
    check_partition_count(partitions)
    present = table.target or table.generations[-1].partitions
    if present == partitions:
        return table
    if table.target:
        raise FleetError(
            f"a change to {table.target} partitions is under way: wait for its end, `keylane fleet status` shows it"
        )
    numbers = tuple(sorted({*table.numbers, partitions}))
    return replace(table, version=table.version + 1, target=partitions, numbers=numbers)


def held(table: PartitionTable, last_sequence: int) -> PartitionTable:
    front = table.generations[0]._replace(last=last_sequence)
    return replace(table, version=table.version + 1, generations=(front,))


def split(table: PartitionTable, barrier: Barrier) -> PartitionTable:
    front = table.generations[0]._replace(last=barrier.last)
    generations, first = [front], barrier.last + 1
    if barrier.mixed_last > barrier.last:
        generations.append(Generation(front.number + 1, 1, first, barrier.mixed_last, every=True))
        first = barrier.mixed_last + 1
    generations.append(Generation(generations[-1].number + 1, table.target, first))
    return replace(table, version=table.version + 1, generations=tuple(generations), target=0)


def retired(table: PartitionTable) -> PartitionTable:
    front, *later = table.generations
    return replace(table, version=table.version + 1, generations=(front._replace(retired=True), *later))


def dropped(table: PartitionTable) -> PartitionTable:
    return replace(table, version=table.version + 1, generations=table.generations[1:])


def in_words(table: PartitionTable) -> str | None:
    """Where a change stands; None: there is none."""
    front, *later = table.generations
    if later:
        new = later[-1].partitions
        what = "is deleted" if front.retired else f"is handled up to sequence {front.last}"
        return f"{_shown(front)} → {new} partitions: generation {front.number} {what}, then the next one begins"
    if not table.target:
        return None
    if front.last is None:
        return f"{front.partitions} → {table.target} partitions: waits for the leader"
    return f"{front.partitions} → {table.target} partitions: workers hold after sequence {front.last}"


def _shown(generation: Generation) -> str:
    return "mixed" if generation.every else str(generation.partitions)

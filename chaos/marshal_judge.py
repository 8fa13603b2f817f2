"""Judges a run of Marshal consumers: what handlers did, by their own evidence, and what the whole log says.

Two questions that do not lean on each other. Handlers: was anything lost, done twice, begun by an old owner after a new
one had begun? Log: are there two owners at any of its places, and how long was a dead consumer's partition nobody's?
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from keylane.core.claim_facts import LogRecord, Tenure, Verdict, overlaps
from keylane.core.claim_records import ClaimingMessages, decode
from keylane.core.claims import World
from keylane.marshal.tenure import MARGIN
from keylane.testing import Effect, judge

_NS = 1_000_000_000
_EXAMPLES = 5


class Handled(NamedTuple):
    """One run of a handler. `ended_ns` None: its process did not live to see it."""

    partition: int
    offset: int
    token: int
    key: str
    begun_ns: int
    ended_ns: int | None
    process: str


class Trouble(NamedTuple):
    """What was done to a process, by the monotonic clock and by the wall clock."""

    process: str
    kind: str
    at_ns: int
    wall_ms: int
    until_ns: int


@dataclass(frozen=True, slots=True)
class Findings:
    handled: int
    lost: int
    """At least once: never handled. At most once: more than a killed consumer's last batch of a partition."""
    lost_with_their_owner: int
    repeated: int
    unexplained_repeats: int
    examples: tuple[str, ...]
    """The first of them."""
    oldest_repeat_s: float
    """How long before its process was hit a message was done that was done again."""
    out_of_order: int
    two_owners: int
    """Handlers begun for an older token after one for a newer token had begun."""
    late_starts: int
    """The same by a process that had just been thawed: it stood still between asking and beginning."""
    overlaps_in_log: int
    slowest_reclaim_s: float
    log_records: int

    @property
    def clean(self) -> bool:
        return not (
            self.lost or self.unexplained_repeats or self.out_of_order or self.two_owners or self.overlaps_in_log
        )


def read_evidence(path: Path) -> tuple[str | None, list[Handled]]:
    """The instance and what its handlers did."""
    instance, open_now, found = None, dict[tuple[int, int, int], int](), list[Handled]()
    for line in path.read_text().split("\n")[:-1]:
        words = line.split(" ")
        if words[0] == "instance":
            instance = words[1]
        elif words[0] in ("b", "e"):
            partition, offset, token, at_ns = map(int, words[1:5])
            place = (partition, offset, token)
            if words[0] == "b":
                open_now[place] = len(found)
                found.append(Handled(partition, offset, token, words[5], at_ns, None, path.stem))
            else:
                number = open_now.pop(place)
                found[number] = found[number]._replace(ended_ns=at_ns)
    return instance, found


def claimed_after_s(paths: Iterable[Path]) -> float:
    """From when all consumers had begun until the last partition had its first owner; 0 if that was sooner."""
    began, first = list[int](), dict[int, int]()
    for path in paths:
        for line in path.read_text().split("\n")[:-1]:
            words = line.split(" ")
            if words[0] == "instance":
                began.append(int(words[2]))
            elif words[0] == "claimed":
                partition, at_ns = int(words[1]), int(words[3])
                first[partition] = min(at_ns, first.get(partition, at_ns))
    return max(max(first.values()) - max(began), 0) / _NS


def findings(
    *,
    sent: Mapping[tuple[int, int], str],
    handled: Sequence[Handled],
    troubles: Sequence[Trouble],
    instances: Mapping[str, str],
    records: Iterable[LogRecord],
    interval_s: float,
    log_partitions: int,
    first_offset: int,
    at_most_once: bool,
) -> Findings:
    """`sent`: partition and offset → key. `instances`: process → instance id."""
    world = World(interval_s, log_partitions, first_offset=first_offset, keep_history=True)
    taken: dict[int, list[tuple[int, str, int]]] = defaultdict(list)
    count = 0
    for record in records:
        count += 1
        verdict = world.apply(record)
        if verdict is Verdict.COUNTED and isinstance(message := decode(record.value), ClaimingMessages):
            taken[message.partition].append((message.proposed, message.instance, record.offset))
    hit = {instances[one.process] for one in troubles if one.process in instances}
    tenures = world.tenures()
    ended = sorted((one for one in handled if one.ended_ns is not None), key=lambda one: one.ended_ns or 0)
    verdict_of_all = judge(
        (_number(*place) for place in sent), (Effect(one.key, _number(one.partition, one.offset)) for one in ended)
    )
    missing = set(sent) - {(one.partition, one.offset) for one in (handled if at_most_once else ended)}
    with_owner = _lost_with_their_owner(missing, taken, hit) if at_most_once else 0
    repeated, unexplained, oldest_s = _repeats(handled, troubles, interval_s, allowed=not at_most_once)
    two_owners, late = _late_starts(handled, troubles)
    return Findings(
        handled=len(handled),
        lost=len(missing) - with_owner,
        lost_with_their_owner=with_owner,
        repeated=repeated,
        unexplained_repeats=len(unexplained),
        examples=tuple(unexplained[:_EXAMPLES]),
        oldest_repeat_s=oldest_s,
        out_of_order=len(verdict_of_all.out_of_order),
        two_owners=two_owners,
        late_starts=late,
        overlaps_in_log=sum(1 for _ in overlaps(tenures)),
        slowest_reclaim_s=_slowest_reclaim_s(tenures, troubles, instances),
        log_records=count,
    )


def _number(partition: int, offset: int) -> int:
    """One number for a message: `judge` takes sequences."""
    return (partition << 48) + offset


def _repeats(
    handled: Sequence[Handled], troubles: Sequence[Trouble], interval_s: float, *, allowed: bool
) -> tuple[int, list[str], float]:
    """Repeats; those without a cause; and how old the oldest was.

    A cause: whoever did it before was hit before its next heartbeat could tell. An owner that could not tell for longer
    than it may act starts nothing, so that is the bound.
    """
    hits = defaultdict(list)
    for one in troubles:
        hits[one.process].append(one.at_ns)
    by_place: dict[tuple[int, int], list[Handled]] = defaultdict(list)
    for run in handled:
        by_place[run.partition, run.offset].append(run)
    repeated, unexplained, oldest_ns = 0, list[str](), 0
    for runs in by_place.values():
        runs.sort(key=lambda one: one.begun_ns)
        for before, after in pairwise(runs):
            repeated += 1
            ages = [at_ns - before.begun_ns for at_ns in hits[before.process] if at_ns >= before.begun_ns]
            if not allowed or not ages or min(ages) > (2 - MARGIN) * interval_s * _NS:
                unexplained.append(f"{before}, then {after}; {before.process} was hit at {hits[before.process]}")
            else:
                oldest_ns = max(oldest_ns, min(ages))
    return repeated, unexplained, oldest_ns / _NS


def _late_starts(handled: Sequence[Handled], troubles: Sequence[Trouble]) -> tuple[int, int]:
    thaws = defaultdict(list)
    for one in troubles:
        if one.kind == "freeze":
            thaws[one.process].append(one.until_ns)
    two_owners, late = 0, 0
    newest: dict[int, int] = defaultdict(int)
    begun = sorted(handled, key=lambda one: one.begun_ns)
    first_after: dict[tuple[str, int], int] = {}
    for run in begun:
        for until_ns in thaws[run.process]:
            if run.begun_ns >= until_ns:
                first_after.setdefault((run.process, until_ns), run.begun_ns)
    for run in begun:
        if run.token < newest[run.partition]:
            if run.begun_ns in (first_after.get((run.process, until_ns)) for until_ns in thaws[run.process]):
                late += 1
            else:
                two_owners += 1
        newest[run.partition] = max(newest[run.partition], run.token)
    return two_owners, late


def _lost_with_their_owner(
    missing: set[tuple[int, int]], taken: Mapping[int, list[tuple[int, str, int]]], hit: set[str]
) -> int:
    """How many of the missing were in the last batch that a consumer took of a partition before it was hit."""
    last_of: dict[tuple[int, str], int] = {}
    for partition, batches in taken.items():
        for _, instance, at in batches:
            last_of[partition, instance] = max(at, last_of.get((partition, instance), -1))
    lost = set[tuple[int, int]]()
    for partition, batches in taken.items():
        before = 0
        for proposed, instance, at in sorted(batches, key=lambda one: one[2]):
            if at == last_of[partition, instance] and instance in hit:
                lost |= {place for place in missing if place[0] == partition and before <= place[1] < proposed}
            before = max(before, proposed)
    return len(lost)


def _slowest_reclaim_s(tenures: Sequence[Tenure], troubles: Sequence[Trouble], instances: Mapping[str, str]) -> float:
    """The longest time from a kill until another owner had a partition of the dead one."""
    slowest_ms = 0
    for trouble in troubles:
        if trouble.kind != "kill" or trouble.process not in instances:
            continue
        for number, tenure in enumerate(tenures):
            owned = tenure.owner.instance == instances[trouble.process] and tenure.since_ms <= trouble.wall_ms
            follows = tenures[number + 1] if number + 1 < len(tenures) else None
            if owned and follows is not None and follows.key == tenure.key and tenure.until_ms > trouble.wall_ms:
                slowest_ms = max(slowest_ms, follows.since_ms - trouble.wall_ms)
    return slowest_ms / 1000

"""Judges a run of Marshal consumers: what handlers did, by their own evidence, and what the whole log says.

Two questions that do not lean on each other. Handlers: was anything lost, done twice, begun by an old owner after a new
one had begun? Log: are there two owners at any of its places, and how long was a dead consumer's partition nobody's?

What may be: a consumer that is hit before a heartbeat could tell how far it was repeats what it began within one
interval, of each partition that it had. At most once, it loses as many messages as one batch has, over all partitions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from chaos.log_check import two_fresh_owners
from keylane.core.claim_facts import LogRecord, Tenure, Verdict, overlaps
from keylane.core.claim_records import ClaimingMessages, decode
from keylane.core.world import World
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


class Start(NamedTuple):
    """How soon every partition had its first owner."""

    after_spawn_s: float
    """From when the first process was asked for: all that Python and the client library need to start is in it."""
    after_ready_s: float
    """From when the last consumer had begun; 0 if that was later."""
    claimed_twice: int
    """Partitions that had more than one owner by then; nothing was killed yet."""


@dataclass(frozen=True, slots=True)
class Findings:
    handled: int
    lost: int
    """At least once: never handled. At most once: more than one batch for each time that a consumer was hit."""
    lost_with_their_owner: int
    most_lost_by_one: int
    """At most once: how many messages were lost with one consumer."""
    repeated: int
    unexplained_repeats: int
    examples: tuple[str, ...]
    """The first of them."""
    most_repeated_of_one: int
    """How many messages of one consumer were done again."""
    longest_window_s: float
    """From the first to the last begin of one consumer's messages of one partition that were done again."""
    out_of_order: int
    two_owners: int
    """Handlers begun for an older token after one for a newer token had begun."""
    late_starts: int
    """The same by a process that had just been thawed: it stood still between asking and beginning."""
    overlaps_in_log: int
    """By the rules of `core/world.py`, and by a reading of the log that does not know them."""
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
    for words in _lines_of(path):
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


def claims_in(path: Path) -> list[tuple[int, int]]:
    """Which partitions a process has claimed, and when."""
    return [(int(words[1]), int(words[3])) for words in _lines_of(path) if words[0] == "claimed"]


def _lines_of(path: Path) -> list[list[str]]:
    return [line.split(" ") for line in path.read_text().split("\n")[:-1]]


def start_of(spawned_ns: int, paths: Iterable[Path], partitions: int) -> Start | None:
    """None: some partition was not claimed yet."""
    began, claims = list[int](), defaultdict[int, list[int]](list)
    for path in paths:
        began += [int(words[2]) for words in _lines_of(path) if words[0] == "instance"]
        for partition, at_ns in claims_in(path):
            claims[partition].append(at_ns)
    if len(claims) < partitions:
        return None
    last_ns = max(min(times) for times in claims.values())
    twice = sum(len(times) > 1 for times in claims.values())
    return Start((last_ns - spawned_ns) / _NS, max(last_ns - max(began), 0) / _NS, twice)


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
    batch: int | None,
) -> Findings:
    """`sent`: partition and offset → key. `instances`: process → instance id. `batch`: at most once, its size."""
    records = list(records)
    world = World(interval_s, log_partitions, first_offset=first_offset, keep_history=True)
    taken: dict[int, list[tuple[int, str, int]]] = defaultdict(list)
    for record in records:
        verdict = world.apply(record)
        if verdict is Verdict.COUNTED and isinstance(message := decode(record.value), ClaimingMessages):
            taken[message.partition].append((message.proposed, message.instance, record.offset))
    hits = Counter(instances[one.process] for one in troubles if one.process in instances)
    tenures = world.tenures()
    ended = sorted((one for one in handled if one.ended_ns is not None), key=lambda one: one.ended_ns or 0)
    verdict_of_all = judge(
        (_number(*place) for place in sent), (Effect(one.key, _number(one.partition, one.offset)) for one in ended)
    )
    missing = set(sent) - {(one.partition, one.offset) for one in (ended if batch is None else handled)}
    lost_by = _lost_by(missing, taken)
    with_owner = sum(min(lost_by[one], (batch or 0) * hits[one]) for one in lost_by)
    repeats = _repeats(handled, troubles, interval_s, allowed=batch is None)
    two_owners, late = _late_starts(handled, troubles)
    return Findings(
        handled=len(handled),
        lost=len(missing) - with_owner,
        lost_with_their_owner=with_owner,
        most_lost_by_one=max(lost_by.values(), default=0),
        repeated=repeats.messages,
        unexplained_repeats=len(repeats.unexplained),
        examples=tuple(repeats.unexplained[:_EXAMPLES]),
        most_repeated_of_one=repeats.most_of_one,
        longest_window_s=repeats.longest_window_s,
        out_of_order=len(verdict_of_all.out_of_order),
        two_owners=two_owners,
        late_starts=late,
        overlaps_in_log=sum(1 for _ in overlaps(tenures)) + len(two_fresh_owners(records, interval_s)),
        slowest_reclaim_s=_slowest_reclaim_s(tenures, troubles, instances),
        log_records=len(records),
    )


def _number(partition: int, offset: int) -> int:
    """One number for a message: `judge` takes sequences."""
    return (partition << 48) + offset


class _Repeats(NamedTuple):
    messages: int
    unexplained: list[str]
    most_of_one: int
    longest_window_s: float


def _repeats(handled: Sequence[Handled], troubles: Sequence[Trouble], interval_s: float, *, allowed: bool) -> _Repeats:
    """A repeat has a cause if whoever did it before was hit, and if all such of its partition were begun within one
    interval. What was at work at the heartbeat before was begun a little sooner: as long as a handler takes.
    """
    hits = defaultdict(list)
    for one in troubles:
        hits[one.process].append(one.at_ns)
    by_place: dict[tuple[int, int], list[Handled]] = defaultdict(list)
    for run in handled:
        by_place[run.partition, run.offset].append(run)
    done_again: dict[tuple[str, int, int], list[Handled]] = defaultdict(list)
    unexplained: list[str] = []
    for runs in by_place.values():
        runs.sort(key=lambda one: one.begun_ns)
        for before, after in pairwise(runs):
            done_again[before.process, before.partition, before.token].append(before)
            if not allowed or not any(at_ns >= before.begun_ns for at_ns in hits[before.process]):
                unexplained.append(f"{before}, then {after}; {before.process} was hit at {hits[before.process]}")
    longest_ns = _longest_runs(handled, hits)
    windows_ns = [0]
    for (process, *_), runs in done_again.items():
        first_ns = min(one.begun_ns for one in runs)
        windows_ns.append(max(one.begun_ns for one in runs) - first_ns)
        limit_ns = interval_s * _NS + longest_ns[process]
        unexplained += [
            f"{one} was done again, and so was one begun {(one.begun_ns - first_ns) / _NS:.3f} s before it"
            for one in runs
            if one.begun_ns - first_ns > limit_ns
        ]
    of_one = Counter(process for (process, *_), runs in done_again.items() for _ in runs)
    return _Repeats(of_one.total(), unexplained, max(of_one.values(), default=0), max(windows_ns) / _NS)


def _longest_runs(handled: Sequence[Handled], hits: Mapping[str, Sequence[int]]) -> Mapping[str, int]:
    """How long handlers of each process took at most, except those that were hit in their midst."""
    longest: dict[str, int] = defaultdict(int)
    for one in handled:
        if one.ended_ns is not None and not any(one.begun_ns <= at <= one.ended_ns for at in hits[one.process]):
            longest[one.process] = max(longest[one.process], one.ended_ns - one.begun_ns)
    return longest


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


def _lost_by(missing: set[tuple[int, int]], taken: Mapping[int, list[tuple[int, str, int]]]) -> Counter[str]:
    """How many of the missing each instance had taken."""
    found: Counter[str] = Counter()
    for partition, batches in taken.items():
        before = 0
        for proposed, instance, _ in sorted(batches, key=lambda one: one[2]):
            found[instance] += sum(place[0] == partition and before <= place[1] < proposed for place in missing)
            before = max(before, proposed)
    return found


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

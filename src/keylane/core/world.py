"""`World`: who owns what, computed from the records of a coordination log and nothing else.

Owns: every question about the log as a whole. `core/claim_rules.py` has the rules, which never look across partitions
of the log: there is no order between them. Never reads a clock: time is the log's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import MappingProxyType

from keylane.core.claim_facts import (
    Broken,
    Claim,
    Freshness,
    Key,
    LogRecord,
    Misplaced,
    Owner,
    Pause,
    Snapshot,
    Tenure,
    Verdict,
)
from keylane.core.claim_records import Placing, check_placing, coordinating_partition
from keylane.core.claim_rules import LONG_AGO, VERDICTS_REMEMBERED, KeyState, PartitionRules
from keylane.errors import InvalidInput

__all__ = ["VERDICTS_REMEMBERED", "World", "replay"]


class World:
    """The state of the world after the records applied so far.

    `interval_s` and `placing` must be the same for all consumers on the log. `partitions`: how many the log has.
    `first_offset`: that of a log from which no record has expired (0 for Kafka, 1 for JetStream). `keep_history`: keep
    every tenure, for audits; without it memory is bounded by the number of keys.

    >>> world = World(interval_s=60)
    >>> world.apply(LogRecord(0, 0, 1000, b"ClaimingPartition/1/1/i1/anna/billing/orders/0")).value
    'won'
    >>> world.apply(LogRecord(0, 1, 1500, b"ClaimingPartition/1/1/i2/bert/billing/orders/0")).value
    'lost'
    >>> world.claim_of("billing", "orders", 0).owner.client
    'anna'
    """

    def __init__(
        self,
        interval_s: float,
        partitions: int = 1,
        *,
        placing: Placing = "topic_partition",
        first_offset: int = 0,
        keep_history: bool = False,
    ) -> None:
        if isinstance(interval_s, bool) or not isinstance(interval_s, int | float) or not 0.001 <= interval_s < 1e9:
            raise InvalidInput(f"interval_s is {interval_s!r}: give the heartbeat interval in seconds, such as 10")
        if isinstance(partitions, bool) or not isinstance(partitions, int) or partitions < 1:
            raise InvalidInput(f"a coordination log of {partitions!r} partitions: give a whole number, at least 1")
        self.interval_ms = round(interval_s * 1000)
        self.placing: Placing = check_placing(placing)
        self._other: Placing = "topic" if placing == "topic_partition" else "topic_partition"
        self._parts = [
            PartitionRules(
                number,
                self.interval_ms,
                first_offset=first_offset,
                keep_history=keep_history,
                placed=self._placed,
            )
            for number in range(partitions)
        ]

    def __repr__(self) -> str:
        read = [part.next_offset for part in self._parts]
        return f"<World of {sum(1 for _ in self.claims())} keys, read to {read}>"

    # ---- reading the log ----------------------------------------------------------------------------

    @property
    def partitions(self) -> int:
        """How many partitions the log has."""
        return len(self._parts)

    def begins(self, log_partition: int, first_offset: int, end: int) -> None:
        """Before the first record of a partition is applied: the first offset and the end of the log.

        Records from `end` on are at least the retention younger than the expired ones. With a retention of two
        intervals or more, no owner from before can be alive there. Without this call the offset of the first record
        shows whether records have expired, and claims are unsure for two intervals after it. It may be called again
        as long as there is no record; the first call counts.
        """
        part = self._part(log_partition)
        if part.is_begun:
            raise InvalidInput(
                f"partition {log_partition} of the log was already read: call begins before the first record"
            )
        part.begins(first_offset, end)

    def apply(self, record: LogRecord) -> Verdict:
        """Apply the next record of a partition of the log. Partitions may be interleaved in any way.

        A record that was applied before changes nothing, so reading again from an earlier offset is safe.
        """
        partition, offset, time_ms, value, subject = record
        return self._part(partition).apply(offset, time_ms, value, subject)

    # ---- asking -------------------------------------------------------------------------------------

    def where(self, topic: str, partition: int) -> int:
        """The partition of the log that coordinates this partition of this topic."""
        return coordinating_partition(topic, partition, len(self._parts), placing=self.placing)

    def now_ms(self, log_partition: int) -> int | None:
        """The log's time in one of its partitions; None before its first record."""
        now_ms = self._part(log_partition).now_ms
        return None if now_ms == LONG_AGO else now_ms

    def next_offset(self, log_partition: int) -> int:
        """The offset after the last record applied; everything before it is in this world."""
        return self._part(log_partition).next_offset

    def claim_of(self, group: str, topic: str, partition: int) -> Claim | None:
        """The claim on a key, according to the log; None if it has no record of the key."""
        part, state = self._state(group, topic, partition)
        return None if state is None else part.claim_view(state)

    def newest_of(self, group: str, topic: str, partition: int) -> int | None:
        """The offset of the newest record about a key, whatever its verdict; None if there is none."""
        _, state = self._state(group, topic, partition)
        return None if state is None else state.last_at

    def holds(self, group: str, topic: str, partition: int) -> bool:
        """Whether somebody's claim holds, at the log's time."""
        claim = self.claim_of(group, topic, partition)
        return claim is not None and claim.holds(self._parts[claim.log_partition].now_ms)

    def freshness(self, group: str, topic: str, partition: int) -> Freshness | None:
        """The freshness of the owner, at the log's time; None if there is no owner."""
        claim = self.claim_of(group, topic, partition)
        return None if claim is None else claim.freshness(self._parts[claim.log_partition].now_ms)

    def verdict_of(self, log_partition: int, offset: int) -> Verdict | None:
        """The verdict on the claim (of a partition or of messages) in this record.

        None: the log was not read that far, or the verdict is no longer remembered (only the newest 10,000 are).
        """
        return self._part(log_partition).verdicts.get(offset)

    def foresee(self, group: str, topic: str, partition: int, claimer: Owner, *, elapsed_ms: int = 0) -> Verdict:
        """The verdict that a claim would get as the next record, `elapsed_ms` after the newest one.

        The log's time does not advance while nobody writes, so a claimer that has waited passes how long.
        """
        return self._parts[self.where(topic, partition)].judge(Key(group, topic, partition), claimer, elapsed_ms)

    def claims(self) -> Iterator[Claim]:
        for part in self._parts:
            yield from map(part.claim_view, part.states.values())

    def owned_by(self, group: str, client: str, instance: str | None = None) -> list[Claim]:
        """The claims that hold for a client, or for one instance of it, in the order of keys.

        An instance must immediately release claims that it does not know: it won them after it had given up.
        """
        found = [
            claim
            for part in self._parts
            for claim in map(part.claim_view, part.states.values())
            if claim.key.group == group
            and claim.owner is not None
            and claim.owner.client == client
            and instance in (None, claim.owner.instance)
            and claim.holds(part.now_ms)
        ]
        return sorted(found, key=lambda claim: claim.key)

    def pauses(self, group: str | None = None) -> list[Pause]:
        """The pauses in force, one for each partition of the log that has it."""
        return [
            pause
            for part in self._parts
            for pause in part.pauses.values()
            if part.now_ms < pause.until_ms and group in (None, pause.group)
        ]

    def groups(self) -> list[str]:
        """Every group that the log has a record of."""
        of_keys = {key[0] for part in self._parts for key in part.states}
        return sorted(of_keys.union(*(part.pauses for part in self._parts)))

    @property
    def unreadable(self) -> int:
        """How many records were skipped: none of the five messages, or on another key's subject."""
        return sum(part.unreadable for part in self._parts)

    @property
    def broken(self) -> list[Broken]:
        """The first of them in each partition of the log."""
        return [broken for part in self._parts for broken in part.broken]

    @property
    def misplaced(self) -> int:
        """How many records are in a partition where the hash does not put them."""
        return sum(part.misplaced for part in self._parts)

    @property
    def misplaced_evidence(self) -> list[Misplaced]:
        """The first of them in each partition of the log."""
        return [misplaced for part in self._parts for misplaced in part.evidence]

    def other_hash(self, elapsed_ms: Callable[[int], int] = lambda _: 0) -> Misplaced | None:
        """A record in the partition of the other hash, whose writer may be alive: stop, two hashes are in use.

        `elapsed_ms`: the time since the newest record of a partition of the log. Two intervals after such a record its
        writer cannot own anything; a record that fits neither hash is ignored.
        """
        for part in self._parts:
            found = part.other_hash
            if found and part.now_ms + elapsed_ms(part.number) <= found.time_ms + 2 * self.interval_ms:
                return found
        return None

    def snapshot(self) -> Snapshot:
        """An immutable copy of the current state. Only keys that changed since the last snapshot are built again."""
        return Snapshot(
            claims=MappingProxyType({claim.key: claim for claim in self.claims()}),
            pauses=tuple(self.pauses()),
            now_ms=tuple(part.now_ms for part in self._parts),
            ends=tuple(part.next_offset for part in self._parts),
            unreadable=self.unreadable,
            misplaced=self.misplaced,
        )

    def tenures(self) -> list[Tenure]:
        """Who owned what, from when to when, and why it ended, in the order of keys and of the log."""
        found: list[Tenure] = []
        for part in self._parts:
            if part.ended is None:
                raise InvalidInput("this world keeps no history: make it with keep_history=True")
            owned = (state for state in part.states.values() if state.owner is not None)
            found += [*part.ended, *map(part.open_tenure, owned)]
        return sorted(found, key=lambda tenure: (tenure.key, tenure.since))

    def take_ended(self, log_partition: int) -> list[Tenure]:
        """The tenures of a partition of the log that ended since the last call. `tenures` forgets them.

        Use it to store a history as it grows: with `keep_history` and this, memory stays bounded.
        """
        part = self._part(log_partition)
        ended = part.ended
        if not ended:
            return []
        part.ended = []
        return ended

    def _state(self, group: str, topic: str, partition: int) -> tuple[PartitionRules, KeyState | None]:
        part = self._parts[self.where(topic, partition)]
        return part, part.states.get((group, topic, partition))

    def _part(self, number: int) -> PartitionRules:
        if 0 <= number < len(self._parts):
            return self._parts[number]
        raise InvalidInput(
            f"partition {number} of a coordination log with {len(self._parts)} partitions: the number of "
            "partitions decides where claims are kept and must not change; stop all consumers before you change it"
        )

    def _placed(self, topic: str, partition: int) -> tuple[int, int]:
        other = coordinating_partition(topic, partition, len(self._parts), placing=self._other)
        return self.where(topic, partition), other


def replay(
    records: Iterable[LogRecord],
    interval_s: float,
    partitions: int = 1,
    *,
    placing: Placing = "topic_partition",
    first_offset: int = 0,
    keep_history: bool = False,
    until_ms: int | None = None,
) -> World:
    """The world after all these records, or as it was at an earlier time of the log.

    `until_ms`: in each partition of the log, stop before the first younger record.
    """
    world = World(interval_s, partitions, placing=placing, first_offset=first_offset, keep_history=keep_history)
    if until_ms is None:
        for record in records:
            world.apply(record)
        return world
    over: set[int] = set()
    for record in records:
        if record.time_ms > until_ms:
            over.add(record.partition)
        if record.partition not in over:
            world.apply(record)
    return world

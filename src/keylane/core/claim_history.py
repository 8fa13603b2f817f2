"""The history of one partition of a coordination log: who owned what when, gaps, pauses, rivals, the world in the end.

Owns: `LogHistory`, which is given every record once, in order, and returns rows for what became known with it. The
rules are those of `core/world.py`. Memory is bounded by the number of keys and pauses, not by the length of the log.

| kind of row | what it says |
| --- | --- |
| `span` | one owner's time with a key, when it has ended, or in the end |
| `gap` | nobody held a key that somebody had held before, for longer than asked for |
| `overlap` | a span began before the one before it had ended. The rules do not let this happen |
| `pause` | a group was paused |
| `rival` | somebody who is not the owner sent heartbeats for a key whose claim held |
| `claim` | a key as it is in the end |
| `unreadable` | a record that is none of the five messages, or on another key's subject |
| `count` | how many records of a type got which verdict |

`rank` says which rows of a kind are shown first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from keylane.core.claim_facts import Claim, Ended, Key, LogRecord, Owner, Tenure, Verdict, gaps, overlaps
from keylane.core.claim_records import HEARTBEAT, RELEASE_GROUP, Fields, Placing, Unreadable, split
from keylane.core.world import World

FOREVER_MS: Final = 253_402_300_799_000
"""The last second of the year 9999: later times are reported as this."""

IN_FORCE, PAUSE_EXPIRED, RESUMED, REPLACED = "in_force", "expired", "resumed", "replaced"
"""How a pause ended."""

HELD, EXPIRED, PAUSED = "held", "expired", "paused"
ENDS = (HELD, EXPIRED, Ended.TAKEN.value, Ended.RELEASED.value, PAUSED, Ended.RECLAIMED.value, Ended.LAPSED.value)
"""How a span ended, besides the words of `Ended`: it still holds; it ran out and nobody has won it since; it was
released because its group was paused."""

_RIVALS_KEPT = 100_000

HistoryRow = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryScope:
    """What is reported: what did not end before `since_ms`, of one group or topic or all, and gaps that are long."""

    since_ms: int
    gap_ms: int
    group: str | None = None
    topic: str | None = None

    def has(self, group: str, topic: str) -> bool:
        return self.group in (None, group) and self.topic in (None, topic)


class LogHistory:
    """One partition of the log.

    `partitions`, `placing`, `first_offset`: as for `World`. `begins` and `end`: the bounds of the partition before it
    was read.

    A key may be looked for where it does not belong: by another hash, or with another number of partitions. A second
    world, of the records that are not in their place, shows whom that made an owner beside the right one.
    """

    def __init__(
        self,
        interval_s: float,
        number: int,
        scope: HistoryScope,
        *,
        partitions: int,
        placing: Placing,
        first_offset: int,
        begins: int,
        end: int,
    ) -> None:
        self.number = number
        self.records = self.unreadable = 0
        self.first: LogRecord | None = None
        self.last: LogRecord | None = None
        self._scope = scope
        self._world = World(interval_s, partitions, placing=placing, first_offset=first_offset, keep_history=True)
        self._astray = World(interval_s, 1, placing=placing, first_offset=first_offset, keep_history=True)
        self._world.begins(number, begins, end)
        self._astray.begins(0, begins, end)
        self._pauses: dict[str, _PauseRow] = {}
        self._paused: dict[str, list[tuple[int, int]]] = {}
        self._last_span: dict[Key, tuple[Tenure, str]] = {}
        self._rivals: dict[tuple[Key, Owner], HistoryRow] = {}
        self._counts: Counter[tuple[str, Verdict]] = Counter()

    @property
    def now_ms(self) -> int:
        """The log's time in this partition. Ask after the first record."""
        now_ms = self._world.now_ms(self.number)
        assert now_ms is not None, self.number
        return now_ms

    def apply(self, record: LogRecord) -> Iterable[HistoryRow]:
        """Take the next record. Most say nothing that ends here."""
        if self.first is None:
            self.first = record
        self.last = record
        self.records += 1
        verdict = self._world.apply(record)
        kind = record.value.partition(b"/")[0].decode(errors="replace")
        if verdict is Verdict.UNREADABLE:
            self.unreadable += 1
            return [self._unreadable(record)]
        if kind == RELEASE_GROUP:
            self._apply_astray(record)
            return self._shown(self._pause(record))
        if self._is_meant(record):
            self._counts[kind, verdict] += 1
        if verdict is Verdict.MISPLACED:
            self._apply_astray(record)
            ended = self._astray.take_ended(0)
            return self._shown(row for one in ended for row in self._span(one, misplaced=True))
        if verdict is Verdict.IGNORED:
            return self._rival(record) if kind == HEARTBEAT else ()
        ended = self._world.take_ended(self.number)
        return self._shown(row for one in ended for row in self._span(one)) if ended else ()

    def finish(self) -> Iterator[HistoryRow]:
        """What holds in the end. Ask once, after the last record."""
        for tenure in self._world.tenures():
            yield from self._shown(self._span(tenure))
        for tenure in self._astray.tenures():
            yield from self._shown(self._span(tenure, misplaced=True))
        for tenure, ended in self._last_span.values():
            if ended != HELD:
                yield from self._shown(self._gap(tenure, ended, None))
        for group, pause in self._pauses.items():
            how = IN_FORCE if self.now_ms < pause.expiry_ms else PAUSE_EXPIRED
            yield from self._shown([pause.row(group, self.number, how)])
        yield from self._rivals.values()
        for claim in self._world.claims():
            if self._scope.has(claim.key.group, claim.key.topic):
                yield self._claim(claim)
        for (kind, verdict), times in self._counts.items():
            yield {"kind": "count", "record": kind, "verdict": verdict.value, "times": times}

    def _apply_astray(self, record: LogRecord) -> None:
        assert self.first is not None, record
        if self._astray.now_ms(0) is None and record.offset > self.first.offset:
            self._astray.apply(self.first._replace(partition=0, value=b""))  # it begins where the log begins
        self._astray.apply(record._replace(partition=0, time_ms=self.now_ms))

    def _is_meant(self, record: LogRecord) -> bool:
        if self._scope.group is None and self._scope.topic is None:
            return True
        _, _, _, group, topic, *_ = fields_of(record)
        return self._scope.has(group, topic)

    def _shown(self, rows: Iterable[HistoryRow]) -> list[HistoryRow]:
        scope = self._scope
        return [
            row
            for row in rows
            if (row["to_ms"] is None or row["to_ms"] >= scope.since_ms)
            and scope.group in (None, row["group"])
            and (row["kind"] == "pause" or scope.topic in (None, row["topic"]))
        ]

    # ---- rows -----------------------------------------------------------------------------------------------------

    def _span(self, tenure: Tenure, *, misplaced: bool = False) -> Iterator[HistoryRow]:
        ended = self._how_ended(tenure)
        yield {
            "kind": "span",
            "log_partition": self.number,
            **tenure.key._asdict(),
            **tenure.owner._asdict(),
            "misplaced": misplaced,
            "token": tenure.token,
            "began": tenure.began.value,
            "ended": ended,
            "from_offset": tenure.since,
            "from_ms": tenure.since_ms,
            "to_offset": tenure.until,
            "to_ms": tenure.until_ms,
            "now_ms": self.now_ms,
            "rank": -tenure.since_ms,
        }
        if misplaced:
            return
        if tenure.key in self._last_span:
            before, before_ended = self._last_span[tenure.key]
            yield from self._gap(before, before_ended, tenure)
            if any(overlaps((before, tenure))):
                yield {"kind": "overlap", **tenure.key._asdict(), "to_ms": tenure.until_ms}
        self._last_span[tenure.key] = tenure, ended

    def _how_ended(self, tenure: Tenure) -> str:
        """Asked at once after a tenure ended, so pauses in force are those that were in force then."""
        if tenure.ended is None:
            return HELD if self.now_ms <= tenure.until_ms else EXPIRED
        pauses = self._world.pauses(tenure.key.group)
        if tenure.ended is Ended.RELEASED and any(one.by != tenure.owner for one in pauses):
            return PAUSED
        return tenure.ended.value

    def _gap(self, before: Tenure, ended: str, after: Tenure | None) -> Iterator[HistoryRow]:
        """The time between two spans, or since the last one, if it is long."""
        from_ms, to_ms = before.until_ms, self.now_ms
        if after is not None:
            found = next(gaps((before, after)), None)
            to_ms = from_ms if found is None else found.to_ms
        if to_ms - from_ms > self._scope.gap_ms:
            yield {
                "kind": "gap",
                "log_partition": self.number,
                **before.key._asdict(),
                "client": before.owner.client,
                "next_client": None if after is None else after.owner.client,
                "ended": ended,
                "from_ms": from_ms,
                "to_ms": None if after is None else to_ms,
                "gap_ms": to_ms - from_ms,
                "paused_ms": self._paused_ms(before.key.group, from_ms, to_ms),
                "rank": from_ms - to_ms,
            }

    def _paused_ms(self, group: str, from_ms: int, to_ms: int) -> int:
        """How long of a time the group was paused."""
        times = list(self._paused.get(group, ()))
        if group in self._pauses:
            times.append((self._pauses[group].from_ms, self._pauses[group].to_ms))
        return sum(max(0, min(to_ms, end_ms) - max(from_ms, begin_ms)) for begin_ms, end_ms in times)

    def _pause(self, record: LogRecord) -> Iterator[HistoryRow]:
        """The pause that ended here or before; the newest `ReleaseGroup` of a group is the one that counts."""
        _, instance, client, group, _, _, seconds, _ = fields_of(record)
        now_ms, expiry_ms = self.now_ms, min(1000 * seconds, FOREVER_MS)
        before = self._pauses.pop(group, None)
        if before is not None:
            cut_short = now_ms < before.expiry_ms
            how = (RESUMED if expiry_ms <= now_ms else REPLACED) if cut_short else PAUSE_EXPIRED
            before = replace(before, to_ms=min(now_ms, before.expiry_ms))
            self._paused.setdefault(group, []).append((before.from_ms, before.to_ms))
            yield before.row(group, self.number, how)
        if expiry_ms > now_ms:
            self._pauses[group] = _PauseRow(Owner(client, instance), record.offset, now_ms, expiry_ms, expiry_ms)

    def _rival(self, record: LogRecord) -> Iterable[HistoryRow]:
        """A heartbeat that did not count is a rival's if somebody else's claim holds."""
        _, instance, client, group, topic, partition, _, _ = fields_of(record)
        key, writer, now_ms = Key(group, topic, partition), Owner(client, instance), self.now_ms
        claim = self._world.claim_of(*key)
        if claim is None or claim.owner is None or not claim.holds(now_ms):
            return ()
        if now_ms < self._scope.since_ms or not self._scope.has(group, topic):
            return ()
        full = list(self._rivals.values()) if len(self._rivals) >= _RIVALS_KEPT else []
        if full:
            self._rivals.clear()
        row = self._rivals.setdefault(
            (key, writer),
            {
                "kind": "rival",
                "log_partition": self.number,
                **key._asdict(),
                **writer._asdict(),
                "owner_client": claim.owner.client,
                "owner_instance": claim.owner.instance,
                "from_offset": record.offset,
                "from_ms": now_ms,
                "heartbeats": 0,
            },
        )
        heartbeats = row["heartbeats"] + 1
        row |= {"heartbeats": heartbeats, "to_offset": record.offset, "to_ms": now_ms, "rank": -heartbeats}
        return full

    def _unreadable(self, record: LogRecord) -> HistoryRow:
        fields = split(record.value, record.subject)
        assert isinstance(fields, Unreadable), record
        return {
            "kind": "unreadable",
            "log_partition": self.number,
            "from_offset": record.offset,
            "from_ms": record.time_ms,
            "verdict": fields.reason,
            "rank": record.offset,
        }

    def _claim(self, claim: Claim) -> HistoryRow:
        owner, taken, released = claim.owner, claim.messages, claim.released
        freshness = claim.freshness(self.now_ms)
        return {
            "kind": "claim",
            "log_partition": claim.log_partition,
            **claim.key._asdict(),
            "client": owner.client if owner else None,
            "instance": owner.instance if owner else None,
            "token": claim.token,
            "freshness": freshness.value if freshness else None,
            "from_ms": claim.since_ms,
            "heartbeat_offset": claim.heartbeat_at,
            "heartbeat_ms": claim.heartbeat_ms,
            "fresh_until_ms": claim.fresh_until_ms,
            "holds_until_ms": claim.holds_until_ms,
            "next_offset": claim.offset,
            "taken_offset": taken.at if taken else None,
            "taken_to": taken.proposed if taken else None,
            "taken_token": taken.token if taken else None,
            "released_client": released.owner.client if released else None,
            "released_instance": released.owner.instance if released else None,
            "released_offset": released.at if released else None,
            "released_ms": released.time_ms if released else None,
            "released_next": released.offset if released else None,
            "now_ms": self.now_ms,
            "rank": 0,
        }


@dataclass(frozen=True, slots=True)
class _PauseRow:
    """One pause. `to_ms`: when it ended, or will."""

    by: Owner
    offset: int
    from_ms: int
    expiry_ms: int
    to_ms: int

    def row(self, group: str, log_partition: int, how: str) -> HistoryRow:
        return {
            "kind": "pause",
            "log_partition": log_partition,
            "group": group,
            **self.by._asdict(),
            "ended": how,
            "from_offset": self.offset,
            "from_ms": self.from_ms,
            "to_ms": self.to_ms,
            "expiry_ms": self.expiry_ms,
            "rank": -self.from_ms,
        }


def fields_of(record: LogRecord) -> Fields:
    """The fields of a record that can be read."""
    fields = split(record.value)
    assert not isinstance(fields, Unreadable), record
    return fields

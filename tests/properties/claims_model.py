"""A dumb model of the coordination log's rules, for the properties of `core/world.py`.

It knows nothing of the ledger. It asks of every place in the log, again and again and backwards, who made whom the
owner there. It is slow and keeps no state but a memory of its own answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from keylane.core.claim_facts import Owner, Verdict
from keylane.core.claim_records import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Message,
    ReleaseGroup,
    ReleasingPartition,
    encode,
)

INTERVAL_S = 10
HOLD_MS = 2 * INTERVAL_S * 1000
GROUP = "g"


@dataclass(frozen=True)
class Event:
    """One record before it is written. `number`: an offset, or how many seconds a pause lasts."""

    kind: str
    writer: Owner
    partition: int
    number: int
    time_ms: int

    @property
    def expiry_s(self) -> int:
        return max(0, self.time_ms // 1000 + self.number - 10)

    def encoded(self) -> bytes:
        client, instance = self.writer
        makers: dict[str, Callable[[], Message]] = {
            "claim": lambda: ClaimingPartition(instance, client, GROUP, "t", self.partition, 1),
            "beat": lambda: Heartbeat(instance, client, GROUP, "t", self.partition, self.number, 1),
            "release": lambda: ReleasingPartition(instance, client, GROUP, "t", self.partition, self.number, 1),
            "take": lambda: ClaimingMessages(instance, client, GROUP, "t", self.partition, self.number, 1),
            "pause": lambda: ReleaseGroup(instance, client, GROUP, self.expiry_s, 1),
        }
        return encode(makers[self.kind]()) if self.kind in makers else b"noise"


class Model:
    """Who owns what before the record at place `i`, by looking back over the whole log each time."""

    def __init__(self, events: list[Event], *, trimmed: bool) -> None:
        self.events = events
        self.trimmed = trimmed
        for name in ("verdict", "gives", "giver", "taken_by"):
            setattr(self, name, cache(getattr(self, name)))

    def now(self, i: int) -> int:
        return max(event.time_ms for event in self.events[: i + 1])

    def of_key(self, i: int, kind: str, key: int) -> list[int]:
        """Places before `i` of records of a kind about a key, newest first."""
        return [j for j in reversed(range(i)) if self.events[j].kind == kind and self.events[j].partition == key]

    def giver(self, i: int, key: int) -> int | None:
        """The place of the newest record before `i` that made somebody the owner."""
        for j in reversed(range(i)):
            if self.events[j].partition == key and self.gives(j):
                return j
        return None

    def owner(self, i: int, key: int) -> Owner | None:
        giver = self.giver(i, key)
        if giver is None:
            return None
        owner = self.events[giver].writer
        if any(j > giver and self.events[j].writer == owner for j in self.of_key(i, "release", key)):
            return None
        return owner

    def last_beat(self, i: int, key: int) -> int:
        giver = self.giver(i, key)
        assert giver is not None
        beats = [j for j in self.of_key(i, "beat", key) if j > giver and self.events[j].writer == self.owner(i, key)]
        return self.now(beats[0] if beats else giver)

    def held(self, i: int, key: int) -> bool:
        return self.owner(i, key) is not None and self.now(i) <= self.last_beat(i, key) + HOLD_MS

    def is_paused(self, i: int) -> bool:
        pauses = [j for j in range(i) if self.events[j].kind == "pause"]
        if not pauses:
            return False
        newest = self.events[pauses[-1]]
        until_ms = newest.expiry_s * 1000
        return self.now(pauses[-1]) < until_ms > self.now(i) and newest.writer != self.events[i].writer

    def is_known(self, i: int, key: int) -> bool:
        return not self.trimmed or self.giver(i, key) is not None

    def former(self, i: int, key: int) -> set[Owner]:
        """Everybody who was the owner before the owner of now was."""
        found: set[Owner] = set()
        giver = self.giver(i, key)
        while giver is not None:
            giver = self.giver(giver, key)
            if giver is not None:
                found.add(self.events[giver].writer)
        return found

    def verdict(self, i: int) -> Verdict:
        """What the record at place `i` is worth."""
        event = self.events[i]
        if event.kind in ("noise", "pause"):
            return Verdict.UNREADABLE if event.kind == "noise" else Verdict.COUNTED
        if event.kind == "claim":
            return self.verdict_of_claim(i)
        if not self.is_known(i, event.partition):
            return Verdict.COUNTED if event.kind == "beat" else Verdict.UNSURE
        return Verdict.COUNTED if self.counts(i) else Verdict.IGNORED

    def counts(self, i: int) -> bool:
        """Whether a heartbeat, release or claim of messages changes anything."""
        event = self.events[i]
        key, writer, owner = event.partition, event.writer, self.owner(i, event.partition)
        if owner == writer:
            return event.kind != "take" or (self.held(i, key) and self.goes_beyond(i))
        return (
            event.kind == "beat"
            and owner is not None
            and owner.client == writer.client
            and self.held(i, key)
            and writer not in self.former(i, key)
            and not self.is_paused(i)
        )

    def verdict_of_claim(self, i: int) -> Verdict:
        key, writer = self.events[i].partition, self.events[i].writer
        if self.is_paused(i):
            return Verdict.PAUSED
        if not self.is_known(i, key):
            near_head = self.now(i) <= self.events[0].time_ms + HOLD_MS
            near_claim = any(
                self.verdict(j) is Verdict.UNSURE and self.now(i) <= self.now(j) + HOLD_MS
                for j in self.of_key(i, "claim", key)
            )
            return Verdict.UNSURE if near_head or near_claim else Verdict.WON
        return Verdict.LOST if self.held(i, key) and self.owner(i, key) != writer else Verdict.WON

    def gives(self, i: int) -> bool:
        event = self.events[i]
        is_own = self.owner(i, event.partition) == event.writer
        if event.kind == "claim":
            return self.verdict(i) is Verdict.WON and not (is_own and self.held(i, event.partition))
        return event.kind == "beat" and self.verdict(i) is Verdict.COUNTED and not is_own

    def offset(self, i: int, key: int) -> int | None:
        for j in reversed(range(i)):
            event = self.events[j]
            said = event.kind in ("beat", "release") and event.partition == key
            if said and self.verdict(j) in (Verdict.COUNTED, Verdict.UNSURE):
                return event.number
        return None

    def taken_by(self, i: int, key: int) -> int | None:
        """The place of the claim of messages that stands before `i`."""
        takes = [j for j in self.of_key(i, "take", key) if self.verdict(j) is Verdict.COUNTED]
        if not takes:
            return None
        take = takes[0]
        for j in range(take + 1, i):
            event = self.events[j]
            if event.partition != key or self.verdict(j) is not Verdict.COUNTED:
                continue
            is_later_owners = self.giver(j + 1, key) != self.giver(take, key)
            if event.kind == "release" or (
                event.kind == "beat" and (event.number >= self.events[take].number or is_later_owners)
            ):
                return None
        return take

    def goes_beyond(self, i: int) -> bool:
        event = self.events[i]
        standing = self.taken_by(i, event.partition)
        if standing is None:
            offset = self.offset(i, event.partition)
            return offset is None or event.number > offset
        proposed = self.events[standing].number
        same_owner = self.giver(standing, event.partition) == self.giver(i, event.partition)
        return event.number > proposed or (event.number == proposed and same_owner)

"""The rules of who owns what, applied record by record to one partition of a coordination log.

Owns: the state that these records make; `World` in `core/world.py` answers questions about it. Never reads a clock:
"now" is the log's own time, the newest broker timestamp seen so far in this partition of the log, so two readers of one
log never disagree. The time of a log that nobody writes to does not advance; a claimer's own record advances it.
Mutable and stepped for every record: a log has a million of them.

The rules
1. The first claim wins, and holds until more than two intervals have passed since the owner's last heartbeat (or its
   claim). At exactly two it still holds.
2. A claim is judged once, at its own place in the log: won, lost, or paused. Later records change nothing, so a claim
   that lost does not win later when the owner releases. It is kept as a request: its writer is alive and wants the
   partition.
3. Heartbeats, releases and claims of messages count from the owner only: client, group and instance. A heartbeat of
   anybody else changes nothing.
4. A late heartbeat of the owner revives an expired claim, if nobody has won the partition since.
5. A heartbeat of a new instance of the owner's client takes over while the claim holds: this is the fast restart with
   a stable client id. An earlier owner instance cannot take it back this way: it may have been frozen and woken.
6. A claim of messages counts if it comes from the owner while its claim holds, and goes beyond the taken messages.
7. A paused group wins nothing until its pause ends, except the consumer that paused it. Owners keep their partitions
   until they release them. The newest `ReleaseGroup` counts.
8. If the log was trimmed, the first heartbeat determines the owner. Until then, for two intervals after the first
   record and after each claim, a claim is neither won nor lost: `UNSURE`.
9. A record in the wrong partition of the log changes nothing and is kept as evidence. One that cannot be read, or that
   is on another key's subject, is counted. All of them move the log's time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from keylane.core.claim_facts import (
    Began,
    Broken,
    Claim,
    Ended,
    Key,
    MessageClaim,
    Misplaced,
    Owner,
    Pause,
    Release,
    Request,
    Tenure,
    Verdict,
)
from keylane.core.claim_records import (
    CLAIMING_MESSAGES,
    CLAIMING_PARTITION,
    HEARTBEAT,
    RELEASE_GROUP,
    RELEASING_PARTITION,
    Unreadable,
    split,
    split_roughly,
    subject_for,
)

VERDICTS_REMEMBERED = 10_000
EVIDENCE_KEPT = 100
FORMER_KEPT = 100
REQUESTS_KEPT = 100
_IDENTITIES_KEPT = 100_000

LONG_AGO: Final = -(1 << 62)
_NEVER: Final = 1 << 62

WON, LOST, PAUSED, UNSURE, COUNTED, IGNORED, UNREADABLE, MISPLACED, REPEATED = Verdict


@dataclass(slots=True, eq=False)
class KeyState:
    """One key. `established`: whether the log has shown who owns it, or that nobody does."""

    key: Key
    established: bool
    subject: str
    owner: Owner | None = None
    token: int = -1
    began: Began = Began.CLAIM
    since: int = -1
    since_ms: int = LONG_AGO
    beat_ms: int = LONG_AGO
    beat_at: int = -1
    offset: int | None = None
    messages: MessageClaim | None = None
    released: Release | None = None
    former: dict[Owner, None] = field(default_factory=dict)
    """The earlier owners, the newest last."""
    requests: dict[Owner, Request] = field(default_factory=dict)
    """The newest claim of everybody who lost to this owner, the newest last."""
    doubt_until_ms: int = LONG_AGO
    last_at: int = -1
    view: Claim | None = None


class PartitionRules:
    """The state of one partition of the log, as far as it was read, and the rules that change it.

    `first_offset` is that of a log which was never trimmed. `placed` returns which partition of the log coordinates a
    topic's partition, under the hash in use and under the other one.
    """

    def __init__(
        self,
        number: int,
        interval_ms: int,
        *,
        first_offset: int,
        keep_history: bool,
        placed: Callable[[str, int], tuple[int, int]],
    ) -> None:
        self.number = number
        self.next_offset = first_offset
        self.now_ms = LONG_AGO
        self.unreadable = 0
        self.misplaced = 0
        self.broken: list[Broken] = []
        self.evidence: list[Misplaced] = []
        self.other_hash: Misplaced | None = None
        """The newest record in a partition where the other hash puts it."""
        self.verdicts: dict[int, Verdict] = {}
        self.is_begun = False
        self._first_offset = first_offset
        self._interval_ms = interval_ms
        self._hold_ms = 2 * interval_ms
        self._placed = placed
        self._trimmed: bool | None = None
        self._shadow_until_ms = LONG_AGO
        self._shadow_below = _NEVER
        self.pauses: dict[str, Pause] = {}
        """The newest of each group, even if it has ended."""
        self.states: dict[tuple[str, str, int], KeyState] = {}
        self._verdict_order: deque[int] = deque()
        self.ended: list[Tenure] | None = [] if keep_history else None
        """None: no history is kept."""
        self._known: dict[bytes, tuple[KeyState, Owner]] = {}
        self._takers: dict[bytes, Callable[[KeyState, int, Owner, int], Verdict]] = {
            HEARTBEAT.encode(): self._heartbeat,
            CLAIMING_PARTITION.encode(): self._claim,
            RELEASING_PARTITION.encode(): self._release,
            CLAIMING_MESSAGES.encode(): self._messages,
        }

    # ---- records ------------------------------------------------------------------------------------

    def begins(self, first_offset: int, end: int) -> None:
        assert not self.is_begun, self.number
        self._trimmed = first_offset > self._first_offset
        if first_offset > self._shadow_below or self._shadow_below == _NEVER:
            self._shadow_below = end

    def apply(self, offset: int, time_ms: int, value: bytes, subject: str | None = None) -> Verdict:
        if offset < self.next_offset:
            return REPEATED
        if not self.is_begun:
            self._begin_log(offset, time_ms)
        self.next_offset = offset + 1
        if time_ms > self.now_ms:  # noqa: PLR1730 - max() costs a call for every record
            self.now_ms = time_ms
        rough = split_roughly(value)
        if rough is None:
            return self._apply_any(offset, value, subject, b"")
        kind, identity, number = rough
        known = self._known.get(identity)
        if known is None or (subject is not None and subject != known[0].subject):
            return self._apply_any(offset, value, subject, identity)
        state, writer = known
        state.last_at = offset
        return self._takers[kind](state, offset, writer, number)

    def _apply_any(self, offset: int, value: bytes, subject: str | None, identity: bytes) -> Verdict:
        fields = split(value, subject)
        if isinstance(fields, Unreadable):
            self.unreadable += 1
            if len(self.broken) < EVIDENCE_KEPT:
                self.broken.append(Broken(self.number, offset, fields))
            return UNREADABLE
        kind, instance, client, group, topic, partition, number, _ = fields
        writer = Owner(client, instance)
        if kind == RELEASE_GROUP:
            return self._pause(offset, group, writer, 1000 * number)
        key = Key(group, topic, partition)
        state = self.states.get(key)
        if state is None:
            expected, by_other_hash = self._placed(topic, partition)
            if expected != self.number:
                return self._misplaced(offset, key, writer, expected, by_other_hash == self.number)
            state = self.states[key] = self._new_state(key)
        if identity:
            if len(self._known) >= _IDENTITIES_KEPT:
                self._known.clear()
            self._known[identity] = state, writer
        state.last_at = offset
        return self._takers[kind.encode()](state, offset, writer, number)

    def _begin_log(self, offset: int, time_ms: int) -> None:
        self.is_begun = True
        if self._trimmed is None:
            self._trimmed = offset > self._first_offset
        if self._trimmed:
            self._shadow_until_ms = time_ms + self._hold_ms

    def _misplaced(self, offset: int, key: Key, writer: Owner, expected: int, fits_other_hash: bool) -> Verdict:
        self.misplaced += 1
        found = Misplaced(self.number, offset, key, writer, expected, fits_other_hash, self.now_ms)
        if fits_other_hash:
            self.other_hash = found
        if len(self.evidence) < EVIDENCE_KEPT:
            self.evidence.append(found)
        return MISPLACED

    # ---- the rules ----------------------------------------------------------------------------------

    def judge(self, key: Key, claimer: Owner, elapsed_ms: int) -> Verdict:
        """The verdict that a claim would get as the next record, this much later than the newest."""
        state = self.states.get(key)
        if state is None:
            state = self._new_state(key)
        return self._judge(state, claimer, self.now_ms + elapsed_ms, self.next_offset)

    def _new_state(self, key: Key) -> KeyState:
        return KeyState(key, established=not self._trimmed, subject=subject_for(CLAIMING_PARTITION, *key))

    def _judge(self, state: KeyState, claimer: Owner, now_ms: int, offset: int) -> Verdict:
        if self._is_paused(state.key.group, claimer, now_ms):
            return PAUSED
        if not state.established:
            in_shadow = now_ms <= self._shadow_until_ms and offset < self._shadow_below
            return UNSURE if in_shadow or now_ms <= state.doubt_until_ms else WON
        if state.owner is not None and state.owner != claimer and now_ms <= state.beat_ms + self._hold_ms:
            return LOST
        return WON

    def _is_paused(self, group: str, claimer: Owner, now_ms: int) -> bool:
        pause = self.pauses.get(group)
        return pause is not None and now_ms < pause.until_ms and claimer != pause.by

    def _claim(self, state: KeyState, offset: int, claimer: Owner, _: int) -> Verdict:
        verdict = self._judge(state, claimer, self.now_ms, offset)
        if verdict is UNSURE:
            state.doubt_until_ms = self.now_ms + self._hold_ms
        elif verdict is WON:
            held_until_ms = state.beat_ms + self._hold_ms
            # A second claim of an owner whose claim holds is won as well, but begins no new tenure.
            if state.owner != claimer or self.now_ms > held_until_ms:
                if state.owner is not None:
                    self._end(state, offset, held_until_ms, Ended.TAKEN)
                self._begin(state, offset, claimer, Began.CLAIM)
        elif verdict is LOST:
            state.requests.pop(claimer, None)
            state.requests[claimer] = Request(claimer, offset, self.now_ms)
            if len(state.requests) > REQUESTS_KEPT:
                del state.requests[next(iter(state.requests))]
            state.view = None
        return self._remember(offset, verdict)

    def _heartbeat(self, state: KeyState, offset: int, writer: Owner, next_to_read: int) -> Verdict:
        now_ms = self.now_ms
        if state.owner != writer:
            if not self._takes_over(state, writer):
                return IGNORED
            if state.owner is None:
                self._begin(state, offset, writer, Began.FIRST_HEARTBEAT)
            else:
                self._end(state, offset, now_ms, Ended.RECLAIMED)
                self._begin(state, offset, writer, Began.RECLAIM)
        elif now_ms > state.beat_ms + self._hold_ms:
            self._end(state, offset, state.beat_ms + self._hold_ms, Ended.LAPSED)
            self._begin(state, offset, writer, Began.REVIVAL)
        state.beat_ms = now_ms
        state.beat_at = offset
        if next_to_read >= 0:
            state.offset = next_to_read
        taken = state.messages
        if taken is not None and (next_to_read >= taken.proposed or taken.token != state.token):
            state.messages = None
        state.view = None
        return COUNTED

    def _takes_over(self, state: KeyState, writer: Owner) -> bool:
        """Whether a heartbeat of a writer that is not the owner makes it the owner."""
        if not state.established:
            return True
        return (
            state.owner is not None
            and state.owner.client == writer.client
            and writer not in state.former
            and self.now_ms <= state.beat_ms + self._hold_ms
            and not self._is_paused(state.key.group, writer, self.now_ms)
        )

    def _release(self, state: KeyState, offset: int, writer: Owner, next_to_read: int) -> Verdict:
        if not state.established:
            # The writer had read that far, so it is a valid position; the owner is still unknown.
            if next_to_read >= 0:
                state.offset, state.view = next_to_read, None
            return UNSURE
        if state.owner != writer:
            return IGNORED
        self._end(state, offset, min(self.now_ms, state.beat_ms + self._hold_ms), Ended.RELEASED)
        state.owner = None
        state.beat_ms = LONG_AGO
        if next_to_read >= 0:
            state.offset = next_to_read
        state.messages = None
        state.released = Release(writer, offset, self.now_ms, state.offset)
        state.view = None
        return COUNTED

    def _messages(self, state: KeyState, offset: int, writer: Owner, proposed: int) -> Verdict:
        if not state.established:
            return self._remember(offset, UNSURE)
        if state.owner != writer or self.now_ms > state.beat_ms + self._hold_ms or proposed < 0:
            return self._remember(offset, IGNORED)
        taken = state.messages
        is_repeat = taken is not None and taken.token == state.token and taken.proposed == proposed
        taken_to = state.offset if taken is None else taken.proposed
        if not is_repeat and taken_to is not None and proposed <= taken_to:
            return self._remember(offset, IGNORED)
        state.messages = MessageClaim(offset, proposed, state.token)
        state.view = None
        return self._remember(offset, COUNTED)

    def _pause(self, offset: int, group: str, by: Owner, until_ms: int) -> Verdict:
        """Record a pause. An expiry in the past makes a pause that has ended: a resume."""
        self.pauses[group] = Pause(group, self.number, until_ms, by, offset, self.now_ms)
        return COUNTED

    def _begin(self, state: KeyState, offset: int, owner: Owner, began: Began) -> None:
        state.established = True
        state.owner = owner
        if began is not Began.REVIVAL:  # nobody else had it in between
            state.token = offset
            state.requests.clear()
        state.began = began
        state.since = state.beat_at = offset
        state.since_ms = state.beat_ms = self.now_ms
        state.view = None

    def _end(self, state: KeyState, offset: int, until_ms: int, ended: Ended) -> None:
        assert state.owner is not None, state.key
        state.former.pop(state.owner, None)
        state.former[state.owner] = None
        if len(state.former) > FORMER_KEPT:
            del state.former[next(iter(state.former))]
        if self.ended is not None:
            self.ended.append(self._tenure(state, offset, until_ms, ended))

    def _remember(self, offset: int, verdict: Verdict) -> Verdict:
        self.verdicts[offset] = verdict
        self._verdict_order.append(offset)
        if len(self._verdict_order) > VERDICTS_REMEMBERED:
            del self.verdicts[self._verdict_order.popleft()]
        return verdict

    # ---- values for `World` -------------------------------------------------------------------------

    def claim_view(self, state: KeyState) -> Claim:
        if state.view is None:
            owned = state.owner is not None
            state.view = Claim(
                key=state.key,
                log_partition=self.number,
                owner=state.owner,
                token=state.token if owned else None,
                since_ms=state.since_ms if owned else None,
                heartbeat_ms=state.beat_ms if owned else None,
                heartbeat_at=state.beat_at if owned else None,
                fresh_until_ms=state.beat_ms + self._interval_ms if owned else None,
                holds_until_ms=state.beat_ms + self._hold_ms if owned else None,
                offset=state.offset,
                messages=state.messages,
                released=state.released,
                requests=tuple(state.requests.values()),
            )
        return state.view

    def open_tenure(self, state: KeyState) -> Tenure:
        """The tenure of the current owner."""
        return self._tenure(state, None, state.beat_ms + self._hold_ms, None)

    def _tenure(self, state: KeyState, until: int | None, until_ms: int, ended: Ended | None) -> Tenure:
        assert state.owner is not None, state.key
        return Tenure(
            key=state.key,
            log_partition=self.number,
            owner=state.owner,
            token=state.token,
            since=state.since,
            since_ms=state.since_ms,
            began=state.began,
            until=until,
            until_ms=until_ms,
            ended=ended,
        )

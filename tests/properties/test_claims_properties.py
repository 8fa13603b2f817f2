"""Random coordination logs: the world against a dumb model, and what must hold whatever the log says.

The model is in claims_model.py.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keylane.core.claim_facts import Claim, LogRecord, Owner, Verdict, overlaps
from keylane.core.claim_records import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Message,
    ReleaseGroup,
    ReleasingPartition,
    Unreadable,
    coordinating_partition,
    decode,
    encode,
    split,
    split_roughly,
)
from keylane.core.world import World, replay
from tests.properties.claims_model import GROUP, HOLD_MS, INTERVAL_S, Event, Model

WRITERS = [Owner(client, instance) for client in ("a", "b", "c") for instance in ("1", "2")]


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    kinds = st.sampled_from(["claim"] * 4 + ["beat"] * 6 + ["release"] * 2 + ["take"] * 3 + ["pause", "noise"])
    steps = st.sampled_from([0, 0, 1, 500, 4000, 9999, 10_000, 19_999, 20_000, 20_001, 25_000, -3000])
    time_ms, events = 100_000, []
    # Few writers in most logs, so that somebody's own records meet often.
    writers = draw(st.lists(st.sampled_from(WRITERS), min_size=1, max_size=4, unique=True))
    for _ in range(draw(st.integers(1, 24))):
        time_ms = max(0, time_ms + draw(steps))
        writer, partition = draw(st.sampled_from(writers)), draw(st.sampled_from([0, 0, 0, 1]))
        events.append(Event(draw(kinds), writer, partition, draw(st.integers(0, 40)), time_ms))
    return events


def records_of(events: list[Event], first: int) -> list[LogRecord]:
    # Offsets of a real log have holes.
    return [LogRecord(0, first + 3 * i, event.time_ms, event.encoded()) for i, event in enumerate(events)]


@settings(max_examples=250, deadline=None)
@given(events=logs(), first=st.sampled_from([0, 500]))
def test_the_world_is_what_the_dumb_model_says(events: list[Event], first: int) -> None:
    model: Any = Model(events, trimmed=first > 0)
    world = World(INTERVAL_S)
    for i, record in enumerate(records_of(events, first)):
        assert world.apply(record) is model.verdict(i), (i, events[i])
        for key in (0, 1):
            claim = world.claim_of(GROUP, "t", key)
            if claim is None:
                assert model.owner(i + 1, key) is None
                continue
            owner, giver = model.owner(i + 1, key), model.giver(i + 1, key)
            assert claim.owner == owner
            assert claim.token == (None if owner is None else first + 3 * giver)
            assert claim.offset == model.offset(i + 1, key)
            assert claim.heartbeat_ms == (None if owner is None else model.last_beat(i + 1, key))
            standing = model.taken_by(i + 1, key)
            assert (None if claim.messages is None else claim.messages.at) == (
                None if standing is None else first + 3 * standing
            )


@settings(max_examples=150, deadline=None)
@given(events=logs(), first=st.sampled_from([0, 500]), seed=st.integers(0, 1 << 32))
def test_the_same_log_gives_the_same_world_however_it_is_read(events: list[Event], first: int, seed: int) -> None:
    """Looked at in between, read again from earlier places, snapshots taken: nothing of it matters."""
    records = records_of(events, first)
    plain = replay(records, INTERVAL_S, keep_history=True)
    dice = random.Random(seed)  # noqa: S311 - dice of a test
    restless = World(INTERVAL_S, keep_history=True)
    verdicts: dict[int, Verdict | None] = {}
    at = 0
    while at < len(records):
        for again in records[max(0, at - dice.randrange(4)) : at]:
            assert restless.apply(again) is Verdict.REPEATED
        restless.apply(records[at])
        at += 1
        if dice.random() < 0.5:
            restless.snapshot()
            restless.foresee(GROUP, "t", 0, dice.choice(WRITERS), elapsed_ms=dice.randrange(30_000))
        if dice.random() < 0.3:
            assert replay(records[:at], INTERVAL_S).snapshot() == restless.snapshot()
        now = {record.offset: restless.verdict_of(0, record.offset) for record in records[:at]}
        assert {offset: now[offset] for offset in verdicts} == verdicts, "a verdict changed"
        verdicts = now
    assert restless.snapshot() == plain.snapshot()
    assert restless.tenures() == plain.tenures()


@settings(max_examples=200, deadline=None)
@given(events=logs(), first=st.sampled_from([0, 500]))
def test_nobody_ever_wins_from_an_owner_who_lives(events: list[Event], first: int) -> None:
    """From the verdicts alone: a win needs a release, or two intervals of silence of everybody who was an owner."""
    world = World(INTERVAL_S)
    alive: dict[int, tuple[Owner, int]] = {}
    tokens: dict[int, int] = {}
    now_ms = 0
    for record, event in zip(records_of(events, first), events, strict=True):
        now_ms = max(now_ms, event.time_ms)
        verdict = world.apply(record)
        owner, beat_ms = alive.get(event.partition, (event.writer, now_ms - HOLD_MS - 1))
        if event.kind == "claim" and verdict is Verdict.WON:
            assert owner == event.writer or now_ms > beat_ms + HOLD_MS, event
            if now_ms > beat_ms + HOLD_MS:
                alive[event.partition] = event.writer, now_ms
        elif event.kind == "beat" and verdict is Verdict.COUNTED:
            assert owner.client == event.writer.client
            alive[event.partition] = event.writer, now_ms
        elif event.kind == "release" and verdict is Verdict.COUNTED:
            assert alive.pop(event.partition)[0] == event.writer
        for claim in world.claims():
            key = claim.key.partition
            assert (alive[key][0] if key in alive else None) == claim.owner
            assert claim.token is None or claim.token >= tokens.get(key, -1), "a fencing token went back"
            tokens[key] = tokens.get(key, -1) if claim.token is None else claim.token


@settings(max_examples=150, deadline=None)
@given(events=logs(), first=st.sampled_from([0, 500]))
def test_at_no_place_in_the_log_are_there_two_owners(events: list[Event], first: int) -> None:
    records = records_of(events, first)
    tenures = replay(records, INTERVAL_S, keep_history=True).tenures()
    assert list(overlaps(tenures)) == []
    for record in records:
        for key in (0, 1):
            there = [
                tenure
                for tenure in tenures
                if tenure.key.partition == key
                and tenure.since <= record.offset
                and (tenure.until is None or record.offset < tenure.until)
            ]
            assert len(there) <= 1


@settings(max_examples=150, deadline=None)
@given(events=logs(), first=st.sampled_from([0, 500]))
def test_what_is_foreseen_is_what_happens(events: list[Event], first: int) -> None:
    world = World(INTERVAL_S)
    now_ms = None
    for record, event in zip(records_of(events, first), events, strict=True):
        if event.kind == "claim" and now_ms is not None:
            later_ms = max(0, event.time_ms - now_ms)
            foreseen = world.foresee(GROUP, "t", event.partition, event.writer, elapsed_ms=later_ms)
            assert world.apply(record) is foreseen
        else:
            world.apply(record)
        now_ms = world.now_ms(0)


@settings(max_examples=60, deadline=None)
@given(
    events=logs(),
    partitions=st.sampled_from([2, 4, 64]),
    seed=st.integers(0, 1 << 32),
    topics=st.lists(st.sampled_from(["t", "u", "v"]), min_size=24, max_size=24),
)
def test_how_partitions_of_the_log_are_mixed_does_not_matter(
    events: list[Event], partitions: int, seed: int, topics: list[str]
) -> None:
    by_partition: list[list[LogRecord]] = [[] for _ in range(partitions)]
    for event, topic in zip(events, topics, strict=False):
        value = event.encoded().replace(b"/t/", f"/{topic}/".encode())
        home = coordinating_partition(topic, event.partition, partitions)
        for where in range(partitions) if event.kind == "pause" else [home]:
            by_partition[where].append(LogRecord(where, len(by_partition[where]), event.time_ms, value))
    one_by_one = replay([record for log in by_partition for record in log], INTERVAL_S, partitions)
    dice = random.Random(seed)  # noqa: S311 - dice of a test
    mixed = World(INTERVAL_S, partitions)
    left = [list(log) for log in by_partition if log]
    while left:
        log = dice.choice(left)
        mixed.apply(log.pop(0))
        left = [log for log in left if log]
    assert mixed.snapshot() == one_by_one.snapshot()
    assert mixed.misplaced == 0


class Fleet:
    """Consumers that read the whole log and keep to the protocol, and now and then die, sleep, or pause the group."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)  # noqa: S311 - dice of a test
        self.world = World(INTERVAL_S)
        self.records: list[LogRecord] = []
        self.time_ms = 0
        self.asleep: dict[Owner, int] = {}

    def run(self) -> list[LogRecord]:
        for _ in range(150):
            self.time_ms += self.dice.choice([10, 500, 1500, 3000])
            who = self.dice.choice([Owner(client, "1") for client in "abcd"])
            if self.asleep.get(who, 0) > self.time_ms:
                continue
            if self.dice.random() < 0.04:
                self.asleep[who] = self.time_ms + self.dice.choice([15_000, 30_000, 60_000])
                continue
            if self.dice.random() < 0.02:
                self.write(ReleaseGroup("1", "admin", GROUP, self.time_ms // 1000 + self.dice.choice([0, 10, 30]), 1))
            for key in (0, 1, 2):
                self.act(who, key)
        return self.records

    def act(self, who: Owner, key: int) -> None:
        claim = self.world.claim_of(GROUP, "t", key)
        client, instance = who
        if claim is not None and claim.owner == who:
            number = (claim.offset or 0) + 1
            if self.dice.random() < 0.1:
                self.write(ReleasingPartition(instance, client, GROUP, "t", key, number, 1))
            else:
                self.write(Heartbeat(instance, client, GROUP, "t", key, number, 1))
        elif self.dice.random() < (0.05 if self.world.holds(GROUP, "t", key) else 0.7):
            won = self.write(ClaimingPartition(instance, client, GROUP, "t", key, 1)) is Verdict.WON
            if won and self.dice.random() < 0.9:  # else it dies before its first heartbeat
                self.time_ms += self.dice.choice([1, 100])
                self.write(Heartbeat(instance, client, GROUP, "t", key, 1, 1))

    def write(self, message: Message) -> Verdict:
        record = LogRecord(0, len(self.records), self.time_ms, encode(message))
        self.records.append(record)
        return self.world.apply(record)


@pytest.mark.parametrize("seed", range(12))
def test_a_log_trimmed_anywhere_never_tells_of_another_owner(seed: int) -> None:
    """Whoever owns by what is left owns by the whole log, and what could be won there could be won by the whole log."""
    records = Fleet(seed).run()
    stranger = Owner("stranger", "1")
    settled = 0
    for cut in range(1, len(records), 11):
        whole, trimmed = World(INTERVAL_S), World(INTERVAL_S)
        for record in records[:cut]:
            whole.apply(record)
        # A pause whose record is gone is forgotten: compare without those.
        if whole.pauses():
            continue
        for record in records[cut:]:
            whole.apply(record)
            trimmed.apply(record)
            for key in (0, 1, 2):
                if trimmed.holds(GROUP, "t", key):
                    settled += 1
                    assert owner_of(trimmed, key) == owner_of(whole, key)
                    assert whole.holds(GROUP, "t", key)
                foreseen = trimmed.foresee(GROUP, "t", key, stranger)
                assert foreseen in (whole.foresee(GROUP, "t", key, stranger), Verdict.UNSURE)
        assert [owner_of(trimmed, key) for key in (0, 1, 2) if trimmed.holds(GROUP, "t", key)] == [
            owner_of(whole, key) for key in (0, 1, 2) if trimmed.holds(GROUP, "t", key)
        ]
    assert settled > 100, "this log tells nothing"


def owner_of(world: World, key: int) -> Owner | None:
    claim: Claim | None = world.claim_of(GROUP, "t", key)
    return None if claim is None else claim.owner


# ---- the format -------------------------------------------------------------------------------------

IDS = st.text(st.characters(blacklist_characters="/", blacklist_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1)
NUMBERS = st.integers(0, (1 << 63) - 1)
SMALL = st.integers(0, (1 << 31) - 1)
MESSAGES = st.one_of(
    st.builds(Heartbeat, IDS, IDS, IDS, IDS, SMALL, NUMBERS, NUMBERS),
    st.builds(ClaimingPartition, IDS, IDS, IDS, IDS, SMALL, NUMBERS),
    st.builds(ReleasingPartition, IDS, IDS, IDS, IDS, SMALL, NUMBERS, NUMBERS),
    st.builds(ClaimingMessages, IDS, IDS, IDS, IDS, SMALL, NUMBERS, NUMBERS),
    st.builds(ReleaseGroup, IDS, IDS, IDS, NUMBERS, NUMBERS),
)


@given(message=MESSAGES)
def test_what_is_written_is_read(message: Message) -> None:
    assert decode(encode(message)) == message


PIECES = st.sampled_from(
    ["Heartbeat", "ClaimingPartition", "ReleaseGroup", "1", "0", "", "7", "x", "-1", "²", "9" * 20]
)


@settings(max_examples=500)
@given(
    value=st.one_of(st.binary(max_size=60), st.lists(PIECES, max_size=11).map(lambda parts: "/".join(parts).encode()))
)
def test_any_bytes_are_read_without_an_exception(value: bytes) -> None:
    message = decode(value)
    if not isinstance(message, Unreadable):
        assert World(INTERVAL_S).apply(LogRecord(0, 0, 0, value)) is not Verdict.UNREADABLE
    else:
        assert World(INTERVAL_S).apply(LogRecord(0, 0, 0, value)) is Verdict.UNREADABLE


@settings(max_examples=500)
@given(
    kind=st.sampled_from(["Heartbeat", "ClaimingPartition", "ClaimingMessages", "ReleasingPartition", "ReleaseGroup"]),
    middle=st.lists(PIECES, max_size=2),
    seconds=PIECES,
    end=st.sampled_from(["", "/"]).flatmap(lambda slash: PIECES.map(lambda piece: slash + piece)),
)
def test_the_short_way_to_read_a_record_reads_nothing_else(
    kind: str, middle: list[str], seconds: str, end: str
) -> None:
    """Where it answers with an identity that was read in full before, the long way reads the same."""
    value = ("/".join([kind, "1", seconds, *middle, "i/c/g/t/3"]) + end).encode()
    short = split_roughly(value)
    if short is not None and short[1] == b"i/c/g/t/3":
        assert split(value) == (short[0].decode(), "i", "c", "g", "t", 3, short[2], int(seconds))

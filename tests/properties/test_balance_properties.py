"""An even share, simulated: consumers that know nothing but the log, which they read late, and a clock that goes on."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keylane.core.claim_balance import MOST_REQUESTS, GroupView, is_spoken_for, to_ask_for, to_give_up
from keylane.core.claim_facts import Claim, Ended, Key, LogRecord, Owner, Verdict, overlaps
from keylane.core.claim_records import (
    ClaimingPartition,
    Heartbeat,
    ReleasingPartition,
    coordinating_partition,
    encode,
)
from keylane.core.world import World

pytestmark = pytest.mark.timeout(240)  # it computes for seconds, and other tests may have the cores meanwhile

INTERVAL_S, GROUP, TOPIC = 10, "g", "t"
INTERVAL_MS = INTERVAL_S * 1000


@dataclass
class Member:
    """One consumer. `yields`: whether it knows of even shares; the Go library does not."""

    owner: Owner
    world: World
    yields: bool
    drain_ms: int
    most: int | None = None
    leaving: dict[Key, int] = field(default_factory=dict)
    ask_again_ms: dict[Owner, int] = field(default_factory=dict)


class Fleet:
    """Writes a log. Members read it when it is their turn, and act on what they read."""

    def __init__(self, seed: int, partitions: int, log_partitions: int) -> None:
        self.dice = random.Random(seed)  # noqa: S311 - dice of a test
        self.now_ms = 0
        self.keys = [Key(GROUP, TOPIC, number) for number in range(partitions)]
        self.places = {key: coordinating_partition(TOPIC, key.partition, log_partitions) for key in self.keys}
        self.log: list[list[LogRecord]] = [[] for _ in range(log_partitions)]
        self.members: list[Member] = []
        self.moves: list[tuple[Key, int]] = []
        self.judge = World(INTERVAL_S, log_partitions, keep_history=True)

    def join(self, name: str, *, yields: bool = True, most: int | None = None) -> Member:
        drain_ms = self.dice.choice([0, 300, 5000, 15_000])
        member = Member(Owner(name, "1"), World(INTERVAL_S, len(self.log)), yields, drain_ms, most)
        self.members.append(member)
        return member

    def write(self, message: ClaimingPartition | Heartbeat | ReleasingPartition) -> Verdict:
        number = self.places[Key(message.group, message.topic, message.partition)]
        record = LogRecord(number, len(self.log[number]), self.now_ms, encode(message))
        self.log[number].append(record)
        return self.judge.apply(record)

    def run(self, seconds: float) -> None:
        until_ms = self.now_ms + int(seconds * 1000)
        while self.now_ms < until_ms:
            for one in self.dice.sample(self.members, len(self.members)):  # nobody is silent for too long
                self.now_ms += self.dice.randrange(1, 800)
                self.turn(one)

    def turn(self, one: Member) -> None:
        self.read(one)
        self.keep_or_release(one)
        self.read(one)
        view = self.view(one)
        if one.yields:
            for key in to_give_up(view, one.owner, one.leaving):
                one.leaving[key] = self.now_ms + one.drain_ms
        claims = {claim.key: claim for claim in view.claims}
        mine = {claim.key for claim in view.claims if claim.owner == one.owner}
        free = [key for key in self.keys if key not in mine and self.is_free(one, key, claims.get(key))]
        if free and (one.most is None or len(mine) < one.most):
            self.claim(one, self.dice.choice(free))
        elif one.yields:
            self.ask(one, view)

    def ask(self, one: Member, view: GroupView) -> None:
        """Those who did not listen are asked again after a while."""

        def may_ask(claim: Claim) -> bool:
            return claim.owner is not None and self.now_ms >= one.ask_again_ms.get(claim.owner, 0)

        wanted = to_ask_for(view, one.owner, may_ask=may_ask, choose=self.dice.randrange, most=one.most)
        assert len(wanted) <= MOST_REQUESTS
        for claim in view.claims:
            if claim.key in wanted and claim.owner is not None:
                one.ask_again_ms[claim.owner] = self.now_ms + 8 * INTERVAL_MS
        for key in wanted:
            self.claim(one, key)

    def read(self, one: Member) -> None:
        for number, records in enumerate(self.log):
            for record in records[one.world.next_offset(number) :]:
                one.world.apply(record)

    def keep_or_release(self, one: Member) -> None:
        client, instance = one.owner
        for claim in list(one.world.claims()):
            if claim.owner != one.owner:
                continue
            if one.leaving.get(claim.key, self.now_ms + 1) <= self.now_ms:
                del one.leaving[claim.key]
                if self.write(ReleasingPartition(instance, client, *claim.key, 1, 1)) is Verdict.COUNTED:
                    self.moves.append((claim.key, self.now_ms))
            elif self.now_ms >= (claim.heartbeat_ms or 0) + 0.6 * INTERVAL_MS:
                self.write(Heartbeat(instance, client, *claim.key, 1, 1))

    def claim(self, one: Member, key: Key) -> None:
        client, instance = one.owner
        if self.write(ClaimingPartition(instance, client, *key, 1)) is Verdict.WON:
            self.write(Heartbeat(instance, client, *key, 1, 1))
            one.ask_again_ms.clear()

    def view(self, one: Member) -> GroupView:
        return GroupView(list(one.world.claims()), [self.now_ms] * len(self.log), INTERVAL_MS)

    def is_free(self, one: Member, key: Key, claim: Claim | None) -> bool:
        elapsed_ms = self.now_ms - (one.world.now_ms(self.places[key]) or 0)
        if claim is not None and one.yields and is_spoken_for(claim, one.owner, self.now_ms, INTERVAL_MS):
            return False
        return one.world.foresee(*key, one.owner, elapsed_ms=elapsed_ms) is Verdict.WON

    def shares(self) -> Counter[str]:
        return Counter(
            claim.owner.client for claim in self.judge.claims() if claim.owner is not None and claim.holds(self.now_ms)
        )


SEEDS = st.integers(0, 1 << 32)


def check(fleet: Fleet) -> None:
    assert list(overlaps(fleet.judge.tenures())) == []
    last: dict[Key, int] = {}
    for key, at_ms in fleet.moves:
        assert at_ms > last.get(key, -INTERVAL_MS) + INTERVAL_MS, "a partition moved twice within an interval"
        last[key] = at_ms


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, partitions=st.integers(1, 24), log_partitions=st.sampled_from([1, 4]), members=st.integers(1, 5))
def test_shares_end_within_one_and_then_nothing_moves(
    seed: int, partitions: int, log_partitions: int, members: int
) -> None:
    fleet = Fleet(seed, partitions, log_partitions)
    for number in range(members):
        fleet.join(f"c{number}")
        fleet.run(fleet.dice.choice([0, 5, 60]))
    fleet.run(300)
    shares = [fleet.shares()[one.owner.client] for one in fleet.members]
    assert sum(shares) == partitions
    assert max(shares) - min(shares) <= 1, shares
    moves = len(fleet.moves)
    fleet.run(60)
    assert len(fleet.moves) == moves, "it goes on and on"
    check(fleet)


@settings(max_examples=12, deadline=None)
@given(seed=SEEDS, partitions=st.integers(1, 20), leavers=st.integers(1, 2))
def test_members_that_come_and_die(seed: int, partitions: int, leavers: int) -> None:
    fleet = Fleet(seed, partitions, 1)
    for number in range(4):
        fleet.join(f"c{number}")
        fleet.run(fleet.dice.choice([1, 30]))
    for _ in range(leavers):
        fleet.members.remove(fleet.dice.choice(fleet.members))
        fleet.run(fleet.dice.choice([1, 30]))
    fleet.run(300)
    shares = [fleet.shares()[one.owner.client] for one in fleet.members]
    assert sum(shares) == partitions
    assert max(shares) - min(shares) <= 1, shares
    check(fleet)


@settings(max_examples=12, deadline=None)
@given(seed=SEEDS, partitions=st.integers(2, 20))
def test_those_who_never_yield_keep_what_they_have(seed: int, partitions: int) -> None:
    """As consumers of the Go library do. The others share the rest evenly, and no more than they want."""
    fleet = Fleet(seed, partitions, 1)
    fleet.join("go", yields=False, most=partitions // 2)
    fleet.run(60)
    kept = fleet.shares()["go"]
    fleet.join("a")
    fleet.run(60)
    fleet.join("b", most=2)
    fleet.run(300)
    shares = fleet.shares()
    assert shares["go"] == kept == partitions // 2
    assert shares["a"] + shares["b"] == partitions - kept
    assert shares["b"] <= 2
    assert abs(shares["a"] - shares["b"]) <= 1 or shares["b"] == 2
    assert all(one.ended is not Ended.TAKEN for one in fleet.judge.tenures())
    check(fleet)


def claim(partition: int, owner: Owner | None, *, since_ms: int = 0, requests: tuple[Owner, ...] = ()) -> Claim:
    world = World(INTERVAL_S)
    who = owner or Owner("gone", "1")
    world.apply(
        LogRecord(0, 0, since_ms, encode(ClaimingPartition(who.instance, who.client, GROUP, TOPIC, partition, 1)))
    )
    for at, one in enumerate(requests, start=1):
        value = encode(ClaimingPartition(one.instance, one.client, GROUP, TOPIC, partition, 1))
        world.apply(LogRecord(0, at, since_ms + at, value))
    if owner is None:
        value = encode(ReleasingPartition(who.instance, who.client, GROUP, TOPIC, partition, 1, 1))
        world.apply(LogRecord(0, 9, since_ms + 9, value))
    found = world.claim_of(GROUP, TOPIC, partition)
    assert found is not None
    return found


ANNA, BERT, CARL = Owner("anna", "1"), Owner("bert", "1"), Owner("carl", "1")


def view(*claims: Claim, now_ms: int = INTERVAL_MS + 1) -> GroupView:
    return GroupView(claims, [now_ms], INTERVAL_MS)


def test_an_owner_gives_up_what_makes_the_shares_more_even() -> None:
    asked = [claim(number, ANNA, requests=(BERT,)) for number in range(4)]
    assert to_give_up(view(*asked), ANNA) == {asked[0].key: BERT, asked[1].key: BERT}
    assert to_give_up(view(*asked), BERT) == {}
    assert to_give_up(view(*asked[:1]), ANNA) == {}, "one and none is even"
    assert to_give_up(view(*asked[:2]), ANNA, [asked[0].key]) == {}, "one is on its way"


def test_a_partition_rests_for_an_interval_and_a_request_stands_for_two() -> None:
    asked = [claim(number, ANNA, requests=(BERT,)) for number in range(2)]
    assert to_give_up(view(*asked, now_ms=INTERVAL_MS), ANNA) == {}
    assert to_give_up(view(*asked, now_ms=2 * INTERVAL_MS), ANNA) != {}
    stale = [claim(number, ANNA, since_ms=-1, requests=(BERT,)) for number in range(2)]
    assert to_give_up(view(*stale, now_ms=2 * INTERVAL_MS + 1), ANNA) == {}


def test_what_was_asked_for_elsewhere_counts_as_given() -> None:
    claims = [claim(0, CARL, requests=(BERT,)), *(claim(number, ANNA, requests=(BERT,)) for number in (1, 2))]
    assert to_give_up(view(*claims), ANNA) == {}


def test_one_asks_those_who_have_most() -> None:
    claims = [*(claim(number, ANNA) for number in range(4)), *(claim(number, CARL) for number in (4, 5, 6))]
    found = to_ask_for(view(*claims), BERT, may_ask=lambda _: True, choose=lambda n: 0)
    assert [key.partition for key in found] == [0, 4]
    assert to_ask_for(view(*claims), BERT, may_ask=lambda _: True, choose=lambda n: 0, most=1) == [claims[0].key]
    assert to_ask_for(view(*claims), BERT, may_ask=lambda _: False, choose=lambda n: 0) == []
    assert to_ask_for(view(*claims), CARL, may_ask=lambda _: True, choose=lambda n: 0) == []


def test_a_released_partition_is_for_whoever_asked() -> None:
    released = claim(0, None, requests=(BERT,))
    assert is_spoken_for(released, CARL, 9 + INTERVAL_MS, INTERVAL_MS)
    assert not is_spoken_for(released, BERT, 10, INTERVAL_MS)
    assert not is_spoken_for(released, CARL, 10 + INTERVAL_MS, INTERVAL_MS), "it did not come"
    assert not is_spoken_for(claim(0, None), CARL, 10, INTERVAL_MS)
    assert not is_spoken_for(claim(0, ANNA, requests=(BERT,)), CARL, 10, INTERVAL_MS)

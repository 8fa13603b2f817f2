"""Golden traces of messages taken for at most once, and of paused groups. claim_traces.py says how to read them."""

from __future__ import annotations

import pytest

from keylane.core.claim_facts import (
    LogRecord,
    MessageClaim,
    Owner,
    Verdict,
)
from keylane.core.claim_records import (
    ReleaseGroup,
    encode,
)
from keylane.core.world import World
from tests.core.claim_traces import GROUP, INTERVAL_S, TOPIC, play

# ---- messages, at most once --------------------------------------------------------------------------


def test_messages_are_taken_and_confirmed() -> None:
    trace = """
        0  anna claims    -> won     anna@0 fresh, next None
        1  anna beats 50  -> counted anna@0 fresh, next 50
        2  anna takes 80  -> counted anna@0 fresh, next 50
    """
    anna = Owner("anna", "i1")
    world = play(trace)
    claim = world.claim_of(GROUP, TOPIC, 0)
    assert claim is not None
    assert claim.messages == MessageClaim(at=2, proposed=80, token=0)
    assert claim.messages_stand(anna, token=0, at=2, now_ms=2000)
    assert not claim.messages_stand(anna, token=0, at=1, now_ms=2000)
    assert not claim.messages_stand(anna, token=1, at=2, now_ms=2000)
    assert not claim.messages_stand(Owner("anna", "i2"), token=0, at=2, now_ms=2000)
    assert not claim.messages_stand(anna, token=0, at=2, now_ms=21_001), "the claim of the partition ran out"
    assert (claim.offset, claim.resume_at_most_once) == (50, 80)
    assert world.verdict_of(0, 2) is Verdict.COUNTED
    confirmed = play(trace + "3 anna beats 80 -> counted anna@0 fresh, next 80").claim_of(GROUP, TOPIC, 0)
    assert confirmed is not None
    assert confirmed.messages is None
    assert confirmed.resume_at_most_once == 80


def test_messages_of_somebody_else_do_not_count() -> None:
    world = play("""
        0   anna.1 claims    -> won     anna@0 fresh, next None
        1   anna.1 beats 50  -> counted anna@0 fresh, next 50
        2   bert takes 80    -> ignored anna@0 fresh, next 50
        2   anna.2 takes 80  -> ignored anna@0 fresh, next 50
        21.1 anna.1 takes 80 -> ignored anna@0 stale, next 50
        22  bert claims      -> won     bert@5 fresh, next 50
        23  anna.1 takes 80  -> ignored bert@5 fresh, next 50
        24  bert takes 60    -> counted bert@5 fresh, next 50
    """)
    assert [world.verdict_of(0, offset) for offset in (2, 3, 4, 6)] == [Verdict.IGNORED] * 4


def test_messages_are_given_to_nobody_twice() -> None:
    """Anna takes messages and freezes. Whoever comes next begins after them, also if she never confirms."""
    world = play("""
        0   anna claims    -> won     anna@0 fresh, next None
        1   anna beats 50  -> counted anna@0 fresh, next 50
        2   anna takes 80  -> counted anna@0 fresh, next 50
        30  bert claims    -> won     bert@3 fresh, next 50
        31  bert takes 80  -> ignored bert@3 fresh, next 50
        32  bert takes 90  -> counted bert@3 fresh, next 50
        33  anna beats 80  -> ignored bert@3 fresh, next 50
        34  bert beats 90  -> counted bert@3 fresh, next 90
        35  bert takes 90  -> ignored bert@3 fresh, next 90
    """)
    claim = world.claim_of(GROUP, TOPIC, 0)
    assert claim is not None
    assert claim.resume_at_most_once == 90


def test_a_claim_of_messages_that_is_sent_twice_counts() -> None:
    world = play("""
        0  anna claims    -> won     anna@0 fresh, next None
        1  anna takes 80  -> counted anna@0 fresh, next None
        2  anna takes 80  -> counted anna@0 fresh, next None
        3  anna takes 70  -> ignored anna@0 fresh, next None
    """)
    claim = world.claim_of(GROUP, TOPIC, 0)
    assert claim is not None
    assert claim.messages == MessageClaim(at=2, proposed=80, token=0)


@pytest.mark.parametrize(
    ("then", "pending"),
    [
        ("3 anna beats 60 -> counted anna@0 fresh, next 60", True),
        ("3 anna beats 80 -> counted anna@0 fresh, next 80", False),
        ("3 anna releases 50 -> counted nobody, next 50", False),
        ("3 anna.2 beats 60 -> counted anna.2@3 fresh, next 60", False),
    ],
    ids=["a heartbeat in between", "the confirmation", "a release says where to go on", "the next owner says it"],
)
def test_how_long_taken_messages_stay_taken(then: str, pending: bool) -> None:
    world = play(
        """
        0  anna claims    -> won     anna@0 fresh, next None
        1  anna beats 50  -> counted anna@0 fresh, next 50
        2  anna takes 80  -> counted anna@0 fresh, next 50
        """
        + then
    )
    claim = world.claim_of(GROUP, TOPIC, 0)
    assert claim is not None
    assert (claim.messages is not None) is pending


# ---- pauses ------------------------------------------------------------------------------------------


def test_a_pause_until_its_expiry() -> None:
    world = play("""
        0       anna claims        -> won     anna@0 fresh, next None
        1       admin pauses 100   -> counted anna@0 fresh, next None
        2       bert claims        -> paused  anna@0 fresh, next None
        3       anna beats 50      -> counted anna@0 fresh, next 50
        4       anna releases 60   -> counted nobody, next 60
        5       anna claims        -> paused  nobody, next 60
        99.999  bert claims        -> paused  nobody, next 60
        100     carl claims        -> won     carl@7 fresh, next 60
    """)
    assert world.pauses() == []
    assert world.verdict_of(0, 6) is Verdict.PAUSED


def test_a_pause_over_an_owner_that_ran_out() -> None:
    play("""
        0   anna claims       -> won     anna@0 fresh, next None
        1   admin pauses 100  -> counted anna@0 fresh, next None
        50  bert claims       -> paused  anna@0 stale, next None
        51  anna.2 beats 7    -> ignored anna@0 stale, next None
        52  anna.1 beats 8    -> counted anna@0 fresh, next 8
        53  anna.2 beats 8    -> ignored anna@0 fresh, next 8
    """)


def test_a_resume_is_a_pause_whose_expiry_is_past() -> None:
    trace = """
        0  admin pauses 100  -> counted nobody, next None
        1  anna claims       -> paused  nobody, next None
    """
    world = play(trace)
    [pause] = world.pauses(GROUP)
    assert (pause.until_ms, pause.by, pause.at, pause.since_ms) == (100_000, Owner("admin", "i1"), 0, 0)
    assert world.pauses("other") == []
    assert world.foresee(GROUP, TOPIC, 0, Owner("anna", "i1")) is Verdict.PAUSED
    resumed = play(
        trace
        + """2  other pauses 2  -> counted nobody, next None
        2  anna claims         -> won     anna@3 fresh, next None"""
    )
    assert resumed.pauses() == []


def test_the_newest_pause_is_the_one_that_counts() -> None:
    play("""
        0   admin pauses 100  -> counted nobody, next None
        1   admin pauses 20   -> counted nobody, next None
        20  anna claims       -> won     anna@2 fresh, next None
        21  admin pauses 30   -> counted anna@2 fresh, next None
        22  admin pauses 200  -> counted anna@2 fresh, next None
        60  bert claims       -> paused  anna@2 stale, next None
    """)


def test_who_paused_the_group_may_claim_to_set_its_position() -> None:
    """The Go admin does so: pause, claim what is released, release it with another offset."""
    play("""
        0   anna claims          -> won     anna@0 fresh, next None
        1   anna beats 50        -> counted anna@0 fresh, next 50
        2   admin pauses 100     -> counted anna@0 fresh, next 50
        3   admin claims         -> lost    anna@0 fresh, next 50
        4   anna releases 55     -> counted nobody, next 55
        5   admin.2 claims       -> paused  nobody, next 55
        6   admin claims         -> won     admin@6 fresh, next 55
        7   admin releases 10    -> counted nobody, next 10
        100 anna claims          -> won     anna@8 fresh, next 10
    """)


def test_a_pause_is_of_one_group_and_of_one_partition_of_the_log() -> None:
    world = World(INTERVAL_S, 64)
    here, there = world.where(TOPIC, 0), world.where(TOPIC, 3)
    pause = encode(ReleaseGroup("i", "admin", GROUP, 1000, 0))
    world.apply(LogRecord(here, 0, 0, pause))
    anna = Owner("anna", "i")
    assert world.foresee(GROUP, TOPIC, 0, anna) is Verdict.PAUSED
    assert world.foresee("other", TOPIC, 0, anna) is Verdict.WON
    assert world.foresee(GROUP, TOPIC, 3, anna) is Verdict.WON, "a pause must be written to every partition"
    world.apply(LogRecord(there, 0, 0, pause))
    assert world.foresee(GROUP, TOPIC, 3, anna) is Verdict.PAUSED
    assert [pause.log_partition for pause in world.pauses(GROUP)] == sorted([here, there])

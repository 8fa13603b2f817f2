"""Golden traces of the coordination log: one readable story for each rule and each fault.

A trace is a table. Every line is a record: the broker's time in seconds, who wrote it (`anna`, or `anna.2` for her
second instance), what it says, and behind the arrow what the log makes of it: the verdict, then the owner with the
fencing token, then how fresh the owner is and the next offset to read. The interval is 10 s. Records have the offsets
0, 1, 2 …, or begin at the offset that the test names.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from keylane.core.claim_facts import (
    Began,
    Ended,
    Freshness,
    Gap,
    Key,
    LogRecord,
    MessageClaim,
    Misplaced,
    Owner,
    Release,
    Tenure,
    Verdict,
    gaps,
    overlaps,
)
from keylane.core.claim_ledger import EVIDENCE_KEPT, VERDICTS_REMEMBERED
from keylane.core.claim_records import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Message,
    Placing,
    ReleaseGroup,
    ReleasingPartition,
    coordinating_partition,
    encode,
)
from keylane.core.claims import World, replay
from keylane.errors import InvalidInput

INTERVAL_S = 10
GROUP, TOPIC = "billing", "orders"
KEY = Key(GROUP, TOPIC, 0)
LINE = re.compile(
    r"(?P<time>[\d.]+)\s+(?P<who>\S+)\s+(?P<what>\w+)\s*(?P<number>\d*)\s*(?:skew (?P<skew>-?\d+))?\s*"
    r"->\s+(?P<verdict>\w+)\s+(?P<after>.*)"
)


def owner_named(who: str) -> Owner:
    client, _, instance = who.partition(".")
    return Owner(client, f"i{instance or 1}")


def message(who: str, what: str, number: int, seconds: int) -> bytes:
    client, instance = owner_named(who)
    makers: dict[str, Callable[[], Message]] = {
        "claims": lambda: ClaimingPartition(instance, client, GROUP, TOPIC, 0, seconds),
        "beats": lambda: Heartbeat(instance, client, GROUP, TOPIC, 0, number, seconds),
        "releases": lambda: ReleasingPartition(instance, client, GROUP, TOPIC, 0, number, seconds),
        "takes": lambda: ClaimingMessages(instance, client, GROUP, TOPIC, 0, number, seconds),
        "pauses": lambda: ReleaseGroup(instance, client, GROUP, number, seconds),
    }
    return encode(makers[what]()) if what in makers else b"what is this?"


def told(world: World) -> str:
    """The owner with its token, its freshness and the next offset, as a trace writes it."""
    claim = world.claim_of(GROUP, TOPIC, 0)
    if claim is None or claim.owner is None:
        who = "nobody"
    else:
        now_ms = world.now_ms(claim.log_partition)
        assert now_ms is not None
        freshness = claim.freshness(now_ms)
        assert freshness is not None
        instance = claim.owner.instance.removeprefix("i")
        who = claim.owner.client + ("" if instance == "1" else f".{instance}") + f"@{claim.token} {freshness.value}"
    return f"{who}, next {None if claim is None else claim.offset}"


def play(trace: str, *, first: int = 0, begins: tuple[int, int] | None = None) -> World:
    """Apply a trace line by line and compare what it says with what the world says."""
    world = World(INTERVAL_S, keep_history=True)
    if begins is not None:
        world.begins(0, *begins)
    lines = [line.strip() for line in trace.strip().splitlines()]
    seen = []
    for offset, line in enumerate(lines, start=first):
        found = LINE.fullmatch(line)
        assert found, f"not a line of a trace: {line!r}"
        seconds = float(found["time"])
        value = message(
            found["who"], found["what"], int(found["number"] or 0), max(0, int(seconds) + int(found["skew"] or 0))
        )
        verdict = world.apply(LogRecord(0, offset, round(seconds * 1000), value))
        seen.append(line[: line.index("->")] + f"-> {verdict.value} {told(world)}")
    assert seen == [re.sub(r"->\s+(\w+)\s+", r"-> \1 ", line) for line in lines]
    assert list(overlaps(world.tenures())) == []
    return world


# ---- claims -----------------------------------------------------------------------------------------


def test_the_first_claim_wins() -> None:
    world = play("""
        0    anna claims    -> won     anna@0 fresh, next None
        0    bert claims    -> lost    anna@0 fresh, next None
        0.1  carl claims    -> lost    anna@0 fresh, next None
        0.2  anna beats 50  -> counted anna@0 fresh, next 50
        0.3  bert claims    -> lost    anna@0 fresh, next 50
    """)
    assert [world.verdict_of(0, offset) for offset in range(5)] == [
        Verdict.WON,
        Verdict.LOST,
        Verdict.LOST,
        None,  # a heartbeat is no claim
        Verdict.LOST,
    ]
    assert world.verdict_of(0, 5) is None, "the log was not read that far"


def test_freshness_by_the_intervals() -> None:
    play("""
        0      anna claims    -> won        anna@0 fresh, next None
        1      anna beats 5   -> counted    anna@0 fresh, next 5
        10.999 bert noise     -> unreadable anna@0 fresh, next 5
        11     bert noise     -> unreadable anna@0 unknown, next 5
        20.999 bert noise     -> unreadable anna@0 unknown, next 5
        21     bert noise     -> unreadable anna@0 stale, next 5
    """)


def test_a_claim_just_before_expiry_loses_and_just_at_it_wins() -> None:
    play("""
        0      anna claims    -> won     anna@0 fresh, next None
        1      anna beats 5   -> counted anna@0 fresh, next 5
        20.999 bert claims    -> lost    anna@0 unknown, next 5
        21     carl claims    -> won     carl@3 fresh, next 5
        21     bert claims    -> lost    carl@3 fresh, next 5
    """)


def test_a_claim_without_a_heartbeat_holds_for_two_intervals_too() -> None:
    play("""
        0      anna claims    -> won     anna@0 fresh, next None
        19.999 bert claims    -> lost    anna@0 unknown, next None
        20     bert claims    -> won     bert@2 fresh, next None
    """)


def test_a_heartbeat_saves_a_claim_that_is_nearly_over() -> None:
    play("""
        0      anna claims    -> won     anna@0 fresh, next None
        19.999 anna beats 7   -> counted anna@0 fresh, next 7
        20     bert claims    -> lost    anna@0 fresh, next 7
        39.998 bert claims    -> lost    anna@0 unknown, next 7
        39.999 bert claims    -> won     bert@4 fresh, next 7
    """)


def test_the_owners_second_claim_is_won_and_changes_nothing() -> None:
    play("""
        0   anna claims    -> won     anna@0 fresh, next None
        15  anna claims    -> won     anna@0 unknown, next None
        20  bert claims    -> won     bert@2 fresh, next None
    """)


def test_an_owner_that_ran_out_and_claims_again_gets_a_new_token() -> None:
    world = play("""
        0   anna claims    -> won     anna@0 fresh, next None
        30  anna claims    -> won     anna@1 fresh, next None
    """)
    assert [(tenure.token, tenure.ended) for tenure in world.tenures()] == [(0, Ended.TAKEN), (1, None)]


def test_a_claim_that_lost_does_not_wake_up_when_the_owner_releases() -> None:
    world = play("""
        0  bert claims      -> won     bert@0 fresh, next None
        1  anna claims      -> lost    bert@0 fresh, next None
        2  bert releases 9  -> counted nobody, next 9
    """)
    assert world.verdict_of(0, 1) is Verdict.LOST
    assert world.owned_by(GROUP, "anna") == []


def test_the_ghost_claim() -> None:
    """Anna gave up before her claim was in the log. It wins, she sees a win that she does not know, and releases."""
    trace = """
        0  bert claims      -> won     bert@0 fresh, next None
        1  bert releases 9  -> counted nobody, next 9
        2  anna claims      -> won     anna@2 fresh, next 9
    """
    world = play(trace)
    believed: set[int] = set()
    strays = [claim for claim in world.owned_by(GROUP, "anna", "i1") if claim.token not in believed]
    assert [(claim.key, claim.token, claim.offset) for claim in strays] == [(KEY, 2, 9)]
    after = play(
        trace
        + """3  anna releases 9  -> counted nobody, next 9
        4  carl claims          -> won     carl@4 fresh, next 9"""
    )
    assert after.verdict_of(0, 2) is Verdict.WON, "what was judged stays judged"
    assert after.owned_by(GROUP, "anna") == []


def test_many_racers_have_one_winner_and_everybody_knows() -> None:
    lines = ["0 c0 claims -> won c0@0 fresh, next None"]
    lines += [f"0 c{number} claims -> lost c0@0 fresh, next None" for number in range(1, 30)]
    world = play("\n".join(lines))
    verdicts = [world.verdict_of(0, offset) for offset in range(30)]
    assert verdicts.count(Verdict.WON) == 1
    assert verdicts.count(Verdict.LOST) == 29


def test_instances_of_one_client_that_race_have_one_winner_too() -> None:
    play("""
        0  anna.1 claims    -> won     anna@0 fresh, next None
        0  anna.2 claims    -> lost    anna@0 fresh, next None
        0  anna.3 claims    -> lost    anna@0 fresh, next None
    """)


# ---- heartbeats -------------------------------------------------------------------------------------


def test_a_thiefs_heartbeat_steals_nothing() -> None:
    play("""
        0   anna claims     -> won     anna@0 fresh, next None
        1   anna beats 50   -> counted anna@0 fresh, next 50
        2   bert beats 999  -> ignored anna@0 fresh, next 50
        12  bert beats 999  -> ignored anna@0 unknown, next 50
        22  bert beats 999  -> ignored anna@0 stale, next 50
        23  carl claims     -> won     carl@5 fresh, next 50
    """)


def test_a_heartbeat_without_any_claim_makes_no_owner() -> None:
    play("""
        0  bert beats 7    -> ignored nobody, next None
        1  anna claims     -> won     anna@1 fresh, next None
        2  anna releases 3 -> counted nobody, next 3
        3  anna beats 4    -> ignored nobody, next 3
    """)


def test_the_former_owners_heartbeat_steals_nothing_back() -> None:
    """A frozen consumer wakes up after somebody else has won."""
    play("""
        0   anna claims    -> won     anna@0 fresh, next None
        1   anna beats 50  -> counted anna@0 fresh, next 50
        30  bert claims    -> won     bert@2 fresh, next 50
        31  anna beats 60  -> ignored bert@2 fresh, next 50
        32  anna releases 60 -> ignored bert@2 fresh, next 50
    """)


def test_a_late_heartbeat_revives_a_claim_that_nobody_took() -> None:
    world = play("""
        0   anna claims    -> won     anna@0 fresh, next None
        1   anna beats 50  -> counted anna@0 fresh, next 50
        30  anna beats 60  -> counted anna@0 fresh, next 60
        31  bert claims    -> lost    anna@0 fresh, next 60
    """)
    owner = Owner("anna", "i1")
    assert world.tenures() == [
        Tenure(KEY, 0, owner, 0, 0, 0, Began.CLAIM, 2, 21_000, Ended.LAPSED),
        Tenure(KEY, 0, owner, 0, 2, 30_000, Began.REVIVAL, None, 50_000, None),
    ]
    assert list(gaps(world.tenures())) == [Gap(KEY, 21_000, 30_000, Ended.LAPSED)]


def test_a_new_instance_of_the_client_goes_on_by_a_heartbeat() -> None:
    world = play("""
        0   anna.1 claims    -> won     anna@0 fresh, next None
        1   anna.1 beats 50  -> counted anna@0 fresh, next 50
        5   anna.2 beats 50  -> counted anna.2@2 fresh, next 50
        6   anna.1 beats 55  -> ignored anna.2@2 fresh, next 50
        7   anna.1 releases 55 -> ignored anna.2@2 fresh, next 50
        8   anna.1 claims    -> lost    anna.2@2 fresh, next 50
        15  anna.3 beats 70  -> counted anna.3@6 fresh, next 70
        16  anna.2 beats 71  -> ignored anna.3@6 fresh, next 70
        17  anna.1 beats 72  -> ignored anna.3@6 fresh, next 70
    """)
    assert [(tenure.owner.instance, tenure.began, tenure.ended) for tenure in world.tenures()] == [
        ("i1", Began.CLAIM, Ended.RECLAIMED),
        ("i2", Began.RECLAIM, Ended.RECLAIMED),
        ("i3", Began.RECLAIM, None),
    ]
    assert list(gaps(world.tenures())) == []


def test_a_new_instance_is_too_late_once_the_claim_ran_out() -> None:
    play("""
        0   anna.1 claims    -> won     anna@0 fresh, next None
        20  anna.2 beats 50  -> ignored anna@0 stale, next None
        21  anna.2 claims    -> won     anna.2@2 fresh, next None
    """)


def test_an_instance_that_was_replaced_may_win_a_later_claim() -> None:
    play("""
        0  anna.1 claims      -> won     anna@0 fresh, next None
        1  anna.2 beats 5     -> counted anna.2@1 fresh, next 5
        2  anna.2 releases 6  -> counted nobody, next 6
        3  anna.1 claims      -> won     anna@3 fresh, next 6
        4  anna.1 beats 7     -> counted anna@3 fresh, next 7
        5  anna.2 beats 8     -> counted anna.2@5 fresh, next 8
        6  anna.2 releases 8  -> counted nobody, next 8
        7  anna.3 claims      -> won     anna.3@7 fresh, next 8
        8  anna.1 beats 9     -> ignored anna.3@7 fresh, next 8
        9  anna.3 releases 9  -> counted nobody, next 9
        10 bert claims        -> won     bert@10 fresh, next 9
        11 bert releases 9    -> counted nobody, next 9
        12 anna.2 claims      -> won     anna.2@12 fresh, next 9
        13 anna.1 beats 9     -> counted anna@13 fresh, next 9
        14 anna.2 beats 9     -> ignored anna@13 fresh, next 9
    """)


def test_the_owner_may_go_back() -> None:
    play("""
        0  anna claims    -> won     anna@0 fresh, next None
        1  anna beats 50  -> counted anna@0 fresh, next 50
        2  anna beats 20  -> counted anna@0 fresh, next 20
    """)


# ---- releases ---------------------------------------------------------------------------------------


def test_a_release_counts_from_the_owner_only() -> None:
    world = play("""
        0  anna.1 claims       -> won     anna@0 fresh, next None
        1  anna.1 beats 50     -> counted anna@0 fresh, next 50
        2  bert releases 60    -> ignored anna@0 fresh, next 50
        3  anna.2 releases 70  -> ignored anna@0 fresh, next 50
        4  anna.1 releases 80  -> counted nobody, next 80
        4  bert claims         -> won     bert@5 fresh, next 80
    """)
    claim = world.claim_of(GROUP, TOPIC, 0)
    assert claim is not None
    assert claim.released == Release(Owner("anna", "i1"), 4, 4000, 80)
    assert [(tenure.until, tenure.until_ms, tenure.ended) for tenure in world.tenures()] == [
        (4, 4000, Ended.RELEASED),
        (None, 24_000, None),
    ]


def test_a_release_that_comes_late_counts_if_nobody_else_has_won() -> None:
    world = play("""
        0   anna claims       -> won     anna@0 fresh, next None
        50  anna releases 80  -> counted nobody, next 80
        60  bert claims       -> won     bert@2 fresh, next 80
    """)
    assert list(gaps(world.tenures())) == [Gap(KEY, 20_000, 60_000, Ended.RELEASED)]


# ---- the log's time ---------------------------------------------------------------------------------


def test_the_writers_clock_changes_nothing() -> None:
    """Ten minutes fast or slow, in the record's own seconds."""
    play("""
        1000  anna claims   skew -600   -> won     anna@0 fresh, next None
        1001  bert claims   skew 600    -> lost    anna@0 fresh, next None
        1002  anna beats 5  skew -600   -> counted anna@0 fresh, next 5
        1003  bert beats 9  skew 600    -> ignored anna@0 fresh, next 5
        1021  bert claims   skew -600   -> lost    anna@0 unknown, next 5
        1022  bert claims   skew 600    -> won     bert@5 fresh, next 5
    """)


def test_broker_times_that_go_back_do_not_turn_back_the_log() -> None:
    """A new leader whose clock is behind: the log waits for it, and nobody gets younger."""
    world = play("""
        100  anna claims    -> won     anna@0 fresh, next None
        50   bert claims    -> lost    anna@0 fresh, next None
        60   anna beats 5   -> counted anna@0 fresh, next 5
        115  bert claims    -> lost    anna@0 unknown, next 5
        90   bert claims    -> lost    anna@0 unknown, next 5
        120  bert claims    -> won     bert@5 fresh, next 5
    """)
    assert world.now_ms(0) == 120_000


def test_a_log_that_nobody_writes_to_stands_still_and_a_claim_moves_it() -> None:
    trace = """
        0  anna claims    -> won     anna@0 fresh, next None
        1  anna beats 5   -> counted anna@0 fresh, next 5
    """
    world = play(trace)
    bert = Owner("bert", "i1")
    assert world.freshness(GROUP, TOPIC, 0) is Freshness.FRESH
    assert world.foresee(GROUP, TOPIC, 0, bert) is Verdict.LOST
    assert world.foresee(GROUP, TOPIC, 0, bert, elapsed_ms=19_999) is Verdict.LOST
    assert world.foresee(GROUP, TOPIC, 0, bert, elapsed_ms=20_000) is Verdict.WON
    assert world.foresee(GROUP, TOPIC, 0, Owner("anna", "i1")) is Verdict.WON
    play(trace + "21 bert claims -> won bert@2 fresh, next 5")


def test_partitions_of_the_log_have_their_own_time() -> None:
    world = World(INTERVAL_S, 64)
    here, there = world.where(TOPIC, 0), world.where(TOPIC, 3)
    assert here != there
    claim = b"ClaimingPartition/1/1/i/anna/billing/orders/0"
    world.apply(LogRecord(here, 0, 1000, claim))
    world.apply(LogRecord(there, 0, 99_000, b"noise"))
    assert world.now_ms(here) == 1000
    assert world.now_ms(there) == 99_000
    assert world.now_ms(0) is None
    assert world.freshness(GROUP, TOPIC, 0) is Freshness.FRESH
    assert world.holds(GROUP, TOPIC, 0)


# ---- messages, at most once -------------------------------------------------------------------------


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
    assert not claim.messages_stand(anna, token=0, at=2, now_ms=21_000), "the claim of the partition ran out"
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
        21  anna.1 takes 80  -> ignored anna@0 stale, next 50
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


# ---- pauses -----------------------------------------------------------------------------------------


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


# ---- a log trimmed by age ---------------------------------------------------------------------------


def test_in_a_trimmed_log_the_first_heartbeat_seen_makes_the_owner() -> None:
    world = play(
        """
        0   anna beats 50    -> counted anna@700 fresh, next 50
        1   bert beats 60    -> ignored anna@700 fresh, next 50
        2   bert claims      -> lost    anna@700 fresh, next 50
        20  bert claims      -> won     bert@703 fresh, next 50
        """,
        first=700,
    )
    assert [tenure.began for tenure in world.tenures()] == [Began.FIRST_HEARTBEAT, Began.CLAIM]


def test_near_the_head_of_a_trimmed_log_a_claim_is_unsure_until_a_heartbeat_tells() -> None:
    world = play(
        """
        0   bert claims      -> unsure  nobody, next None
        1   carl claims      -> unsure  nobody, next None
        2   carl takes 9     -> unsure  nobody, next None
        3   anna beats 50    -> counted anna@703 fresh, next 50
        4   bert claims      -> lost    anna@703 fresh, next 50
        """,
        first=700,
    )
    assert world.verdict_of(0, 700) is Verdict.UNSURE


def test_two_intervals_without_a_sign_of_an_owner_settle_it() -> None:
    """An owner from before the trimming would have been heard: the claim wins."""
    play(
        """
        0       bert noise       -> unreadable nobody, next None
        19.999  bert claims      -> unsure     nobody, next None
        39.998  carl claims      -> unsure     nobody, next None
        60      carl claims      -> won        carl@703 fresh, next None
        """,
        first=700,
    )
    play(
        """
        0       bert noise       -> unreadable nobody, next None
        20      bert claims      -> won        bert@701 fresh, next None
        21      anna beats 9     -> ignored    bert@701 fresh, next None
        """,
        first=700,
    )


def test_an_unsure_claim_that_was_won_is_settled_by_its_own_heartbeat() -> None:
    play(
        """
        0    dora releases 40  -> unsure  nobody, next 40
        0.1  bert claims       -> unsure  nobody, next 40
        0.2  bert beats 40     -> counted bert@702 fresh, next 40
        0.3  carl claims       -> lost    bert@702 fresh, next 40
        """,
        first=700,
    )


def test_claims_written_after_the_trimmed_log_was_opened_are_sure() -> None:
    """A fleet that comes back after all its records were trimmed need not wait."""
    play("0 anna claims -> won anna@700 fresh, next None", first=700, begins=(700, 700))
    play(
        """
        0    dora claims       -> unsure  nobody, next None
        0.1  anna claims       -> unsure  nobody, next None
        0.2  dora beats 7      -> counted dora@702 fresh, next 7
        """,
        first=700,
        begins=(700, 701),
    )


def test_an_empty_log_may_be_looked_at_often() -> None:
    claim = encode(ClaimingPartition("i", "anna", GROUP, TOPIC, 0, 1))
    world = World(INTERVAL_S)
    for end in (700, 701):
        world.begins(0, 700, end)
    assert world.apply(LogRecord(0, 700, 0, claim)) is Verdict.WON, "it was written after the first look"
    missed = World(INTERVAL_S)
    missed.begins(0, 0, 0)
    missed.begins(0, 700, 701)
    assert missed.apply(LogRecord(0, 700, 0, claim)) is Verdict.UNSURE, "records came and went between the looks"


def test_a_log_that_begins_at_its_first_offset_is_whole() -> None:
    play("5 anna beats 9 -> ignored nobody, next None", first=0)
    play("5 anna beats 9 -> ignored nobody, next None", first=3, begins=(0, 9))
    jetstream = World(INTERVAL_S, first_offset=1)
    beat = b"Heartbeat/1/1/i/anna/billing/orders/0/5"
    assert jetstream.apply(LogRecord(0, 1, 0, beat)) is Verdict.IGNORED
    trimmed = World(INTERVAL_S, first_offset=1)
    assert trimmed.apply(LogRecord(0, 2, 0, beat)) is Verdict.COUNTED


def test_where_the_log_begins_is_said_before_it_is_read() -> None:
    world = World(INTERVAL_S)
    world.apply(LogRecord(0, 0, 0, b"noise"))
    with pytest.raises(InvalidInput, match="say where it begins before that"):
        world.begins(0, 0, 1)


# ---- what does not belong there ---------------------------------------------------------------------


def test_broken_records_are_counted_skipped_and_move_the_log() -> None:
    world = play("""
        0   anna claims   -> won        anna@0 fresh, next None
        5   bert noise    -> unreadable anna@0 fresh, next None
        20  bert noise    -> unreadable anna@0 stale, next None
        20  bert claims   -> won        bert@3 fresh, next None
    """)
    assert world.unreadable == 2
    assert [(broken.log_partition, broken.at, broken.unreadable.value) for broken in world.broken] == [
        (0, 1, b"what is this?"),
        (0, 2, b"what is this?"),
    ]


def test_evidence_is_bounded_and_counts_are_not() -> None:
    world = World(INTERVAL_S)
    for offset in range(3 * EVIDENCE_KEPT):
        world.apply(LogRecord(0, offset, 0, b"noise"))
    assert world.unreadable == 3 * EVIDENCE_KEPT
    assert len(world.broken) == EVIDENCE_KEPT


@pytest.mark.parametrize(("ours", "theirs"), [("topic_partition", "topic"), ("topic", "topic_partition")])
def test_a_record_where_the_other_hash_puts_it_is_told_loudly(ours: Placing, theirs: Placing) -> None:
    world = World(INTERVAL_S, 64, placing=ours)
    wrong = coordinating_partition(TOPIC, 0, 64, placing=theirs)
    right = world.where(TOPIC, 0)
    assert wrong != right
    claim = encode(ClaimingPartition("i", "anna", GROUP, TOPIC, 0, 1))
    assert world.apply(LogRecord(wrong, 0, 5000, claim)) is Verdict.MISPLACED
    assert world.apply(LogRecord(wrong, 1, 6000, claim)) is Verdict.MISPLACED
    assert world.misplaced == 2
    assert world.misplaced_evidence[0] == Misplaced(wrong, 0, KEY, Owner("anna", "i"), right, True)
    assert world.claim_of(GROUP, TOPIC, 0) is None, "it makes no owner"
    assert world.now_ms(wrong) == 6000, "but it is a record of that partition"
    assert world.apply(LogRecord(right, 0, 5000, claim)) is Verdict.WON
    assert world.snapshot().misplaced == 2


def test_a_record_where_no_hash_puts_it() -> None:
    world = World(INTERVAL_S, 64)
    wrong = ({0, 1, 2} - {world.where(TOPIC, 0), coordinating_partition(TOPIC, 0, 64, placing="topic")}).pop()
    beat = encode(Heartbeat("i", "anna", GROUP, TOPIC, 0, 1, 1))
    for offset in range(2):
        assert world.apply(LogRecord(wrong, offset, 0, beat)) is Verdict.MISPLACED
    assert not any(evidence.fits_other_hash for evidence in world.misplaced_evidence)


@pytest.mark.parametrize("partition", [-1, 4])
def test_a_partition_that_the_log_does_not_have(partition: int) -> None:
    with pytest.raises(InvalidInput, match="must not change; stop all consumers"):
        World(INTERVAL_S, 4).apply(LogRecord(partition, 0, 0, b"noise"))


def test_groups_topics_and_partitions_are_apart() -> None:
    world = World(INTERVAL_S)
    others = [("billing", "orders", 0), ("billing", "orders", 1), ("billing", "refunds", 0), ("audit", "orders", 0)]
    for offset, (group, topic, partition) in enumerate(others):
        value = encode(ClaimingPartition("i", f"c{offset}", group, topic, partition, 1))
        assert world.apply(LogRecord(0, offset, 0, value)) is Verdict.WON
    assert [claim.owner.client for claim in world.claims() if claim.owner] == ["c0", "c1", "c2", "c3"]


def test_a_record_that_comes_again_changes_nothing() -> None:
    world = World(INTERVAL_S)
    claim = encode(ClaimingPartition("i", "anna", GROUP, TOPIC, 0, 1))
    release = encode(ReleasingPartition("i", "anna", GROUP, TOPIC, 0, 5, 1))
    assert world.apply(LogRecord(0, 0, 0, claim)) is Verdict.WON
    assert world.apply(LogRecord(0, 1, 1, release)) is Verdict.COUNTED
    assert world.apply(LogRecord(0, 0, 9, claim)) is Verdict.REPEATED
    assert not world.holds(GROUP, TOPIC, 0)
    assert world.now_ms(0) == 1
    assert world.next_offset(0) == 2


def test_old_verdicts_are_forgotten() -> None:
    world = World(INTERVAL_S)
    claim = encode(ClaimingPartition("i", "anna", GROUP, TOPIC, 0, 1))
    for offset in range(VERDICTS_REMEMBERED + 1):
        world.apply(LogRecord(0, offset, 0, claim))
    assert world.verdict_of(0, 0) is None
    assert world.verdict_of(0, 1) is Verdict.WON
    assert world.verdict_of(0, VERDICTS_REMEMBERED) is Verdict.WON


# ---- looking at it ----------------------------------------------------------------------------------


def test_a_snapshot_stays_as_it_was() -> None:
    world = World(INTERVAL_S)
    world.apply(LogRecord(0, 0, 0, encode(ClaimingPartition("i", "anna", GROUP, TOPIC, 0, 1))))
    before = world.snapshot()
    world.apply(LogRecord(0, 1, 11_000, encode(Heartbeat("i", "anna", GROUP, TOPIC, 0, 7, 1))))
    world.apply(LogRecord(0, 2, 30_999, b"noise"))
    after = world.snapshot()
    assert (before.claims[KEY].offset, after.claims[KEY].offset) == (None, 7)
    assert (before.freshness(KEY), after.freshness(KEY)) == (Freshness.FRESH, Freshness.UNKNOWN)
    assert (before.holds(KEY), before.holds(Key("x", "y", 0)), before.freshness(Key("x", "y", 0))) == (
        True,
        False,
        None,
    )
    assert (before.ends, after.ends, after.now_ms, after.unreadable) == ((1,), (3,), (30_999,), 1)
    with pytest.raises(TypeError):
        after.claims[KEY] = before.claims[KEY]  # type: ignore[index]


def test_the_world_at_an_earlier_time() -> None:
    values = [
        (0, message("anna", "claims", 0, 0)),
        (5000, message("anna", "beats", 10, 0)),
        (4000, message("anna", "beats", 20, 0)),
        (9000, message("anna", "releases", 30, 0)),
        (8000, message("bert", "claims", 0, 0)),
    ]
    records = [LogRecord(0, offset, time_ms, value) for offset, (time_ms, value) in enumerate(values)]
    seen = [told(replay(records, INTERVAL_S, until_ms=until_ms)) for until_ms in (-1, 0, 4999, 5000, 8999, 9000)]
    assert seen == [
        "nobody, next None",
        "anna@0 fresh, next None",
        "anna@0 fresh, next None",
        "anna@0 fresh, next 20",
        "anna@0 fresh, next 20",
        "bert@4 fresh, next 30",
    ]
    assert told(replay(records, INTERVAL_S)) == seen[-1]


def test_who_owns_what() -> None:
    world = World(INTERVAL_S)
    for offset, (who, partition) in enumerate([("anna", 2), ("bert", 1), ("anna", 0)]):
        value = encode(ClaimingPartition(f"{who}-1", who, GROUP, TOPIC, partition, 1))
        world.apply(LogRecord(0, offset, 0, value))
    assert [claim.key.partition for claim in world.owned_by(GROUP, "anna")] == [0, 2]
    assert [claim.key.partition for claim in world.owned_by(GROUP, "anna", "anna-1")] == [0, 2]
    assert world.owned_by(GROUP, "anna", "anna-2") == []
    assert world.owned_by("other", "anna") == []
    world.apply(LogRecord(0, 3, 20_000, b"noise"))
    assert world.owned_by(GROUP, "anna") == [], "they ran out"


def test_the_newest_record_about_a_key_whatever_it_was_worth() -> None:
    world = play("""
        0  anna claims       -> won        anna@0 fresh, next None
        1  bert claims       -> lost       anna@0 fresh, next None
        2  bert noise        -> unreadable anna@0 fresh, next None
        3  admin pauses 9    -> counted    anna@0 fresh, next None
    """)
    assert world.newest_of(GROUP, TOPIC, 0) == 1
    assert world.newest_of(GROUP, TOPIC, 1) is None
    for offset in (4, 5):
        world.apply(LogRecord(0, offset, 4000, message("bert", "beats", 0, 0)))
        assert world.newest_of(GROUP, TOPIC, 0) == offset


def test_history_is_kept_on_request() -> None:
    with pytest.raises(InvalidInput, match="keep_history=True"):
        World(INTERVAL_S).tenures()


def test_overlaps_are_found_in_what_is_no_work_of_ours() -> None:
    anna = Tenure(KEY, 0, Owner("anna", "i"), 0, 0, 0, Began.CLAIM, 5, 5000, Ended.RELEASED)
    bert = Tenure(KEY, 0, Owner("bert", "i"), 3, 3, 4000, Began.CLAIM, None, 9000, None)
    carl = Tenure(Key("g", "t", 1), 0, Owner("carl", "i"), 1, 1, 0, Began.CLAIM, None, 9000, None)
    assert list(overlaps([carl, bert, anna])) == [(anna, bert)]


@pytest.mark.parametrize(("interval_s", "partitions"), [(0, 1), (-1, 1), (float("nan"), 1), ("9", 1), (9, 0), (9, 1.5)])
def test_a_world_that_cannot_be(interval_s: float, partitions: int) -> None:
    with pytest.raises(InvalidInput):
        World(interval_s, partitions)


def test_it_can_be_looked_at() -> None:
    assert repr(play("0 anna claims -> won anna@0 fresh, next None")) == "<World of 1 keys, read to [1]>"

"""Golden traces of ownership: a readable story for each rule and each fault. claim_traces.py says how to read them."""

from __future__ import annotations

from keylane.core.claim_facts import (
    Began,
    Ended,
    Freshness,
    Gap,
    LogRecord,
    Owner,
    Release,
    Tenure,
    Verdict,
    gaps,
)
from keylane.core.claim_rules import FORMER_KEPT, REQUESTS_KEPT
from keylane.core.world import World
from tests.core.claim_traces import GROUP, INTERVAL_S, KEY, TOPIC, message, play

# ---- claims ------------------------------------------------------------------------------------------


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
        21     bert noise     -> unreadable anna@0 unknown, next 5
        21.001 bert noise     -> unreadable anna@0 stale, next 5
    """)


def test_a_claim_at_twice_the_interval_loses_and_one_after_it_wins() -> None:
    play("""
        0      anna claims    -> won     anna@0 fresh, next None
        1      anna beats 5   -> counted anna@0 fresh, next 5
        21     bert claims    -> lost    anna@0 unknown, next 5
        21.001 carl claims    -> won     carl@3 fresh, next 5
        21.001 bert claims    -> lost    carl@3 fresh, next 5
    """)


def test_a_claim_without_a_heartbeat_holds_for_two_intervals_too() -> None:
    play("""
        0      anna claims    -> won     anna@0 fresh, next None
        20     bert claims    -> lost    anna@0 unknown, next None
        20.001 bert claims    -> won     bert@2 fresh, next None
    """)


def test_a_heartbeat_saves_a_claim_that_is_nearly_over() -> None:
    play("""
        0      anna claims    -> won     anna@0 fresh, next None
        20     anna beats 7   -> counted anna@0 fresh, next 7
        20.001 bert claims    -> lost    anna@0 fresh, next 7
        40     bert claims    -> lost    anna@0 unknown, next 7
        40.001 bert claims    -> won     bert@4 fresh, next 7
    """)


def test_the_owners_second_claim_is_won_and_changes_nothing() -> None:
    play("""
        0   anna claims    -> won     anna@0 fresh, next None
        15  anna claims    -> won     anna@0 unknown, next None
        21  bert claims    -> won     bert@2 fresh, next None
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


def test_claims_that_lost_are_requests_until_somebody_else_owns_it() -> None:
    def requested(trace: str) -> list[tuple[str, int, int]]:
        claim = play(trace).claim_of(GROUP, TOPIC, 0)
        assert claim is not None
        return [(one.owner.client, one.at, one.time_ms) for one in claim.requests]

    trace = """
        0  anna claims      -> won     anna@0 fresh, next None
        1  bert claims      -> lost    anna@0 fresh, next None
        2  carl claims      -> lost    anna@0 fresh, next None
        3  bert claims      -> lost    anna@0 fresh, next None
        4  anna beats 9     -> counted anna@0 fresh, next 9"""
    assert requested(trace) == [("carl", 2, 2000), ("bert", 3, 3000)]
    trace += "\n5 anna releases 9 -> counted nobody, next 9"
    assert requested(trace) == [("carl", 2, 2000), ("bert", 3, 3000)]
    assert requested(trace + "\n6 bert claims -> won bert@6 fresh, next 9") == []


def test_requests_are_bounded() -> None:
    lines = ["0 anna claims -> won anna@0 fresh, next None"]
    lines += [f"0 c{number} claims -> lost anna@0 fresh, next None" for number in range(REQUESTS_KEPT + 5)]
    claim = play("\n".join(lines)).claim_of(GROUP, TOPIC, 0)
    assert claim is not None
    assert [one.owner.client for one in claim.requests] == [f"c{number}" for number in range(5, REQUESTS_KEPT + 5)]


# ---- heartbeats --------------------------------------------------------------------------------------


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


def test_a_new_instance_goes_on_as_long_as_the_claim_holds() -> None:
    """The document says fresh only; docs/marshal.md says why this is better."""
    play("""
        0   anna.1 claims    -> won     anna@0 fresh, next None
        15  bert claims      -> lost    anna@0 unknown, next None
        20  anna.2 beats 50  -> counted anna.2@2 fresh, next 50
    """)


def test_a_new_instance_is_too_late_once_the_claim_ran_out() -> None:
    play("""
        0   anna.1 claims    -> won     anna@0 fresh, next None
        20.001  anna.2 beats 50  -> ignored anna@0 stale, next None
        21      anna.2 claims    -> won     anna.2@2 fresh, next None
    """)


def test_an_instance_that_owned_it_before_takes_nothing_back_by_a_heartbeat() -> None:
    """It froze, or its heartbeat was late. A claim is the way back."""
    play("""
        0   anna.1 claims      -> won     anna@0 fresh, next None
        1   anna.2 beats 5     -> counted anna.2@1 fresh, next 5
        2   anna.2 releases 6  -> counted nobody, next 6
        3   anna.3 claims      -> won     anna.3@3 fresh, next 6
        4   anna.1 beats 7     -> ignored anna.3@3 fresh, next 6
        5   anna.2 beats 8     -> ignored anna.3@3 fresh, next 6
        30  anna.1 claims      -> won     anna@6 fresh, next 6
        31  anna.3 beats 8     -> ignored anna@6 fresh, next 6
        32  anna.4 beats 8     -> counted anna.4@8 fresh, next 8
        60  bert claims        -> won     bert@9 fresh, next 8
        90  anna.5 claims      -> won     anna.5@10 fresh, next 8
        91  anna.4 beats 9     -> ignored anna.5@10 fresh, next 8
        92  anna.1 beats 9     -> ignored anna.5@10 fresh, next 8
    """)


def test_former_owners_are_remembered_up_to_a_bound() -> None:
    world = World(INTERVAL_S)
    count = FORMER_KEPT + 2
    for number in range(count):
        world.apply(LogRecord(0, number, 30_000 * number, message(f"anna.{number + 1}", "claims", 0, 0)))
    now_ms = 30_000 * (count - 1)
    assert world.apply(LogRecord(0, count, now_ms, message("anna.2", "beats", 1, 0))) is Verdict.IGNORED
    assert world.apply(LogRecord(0, count + 1, now_ms, message("anna.1", "beats", 1, 0))) is Verdict.COUNTED


def test_the_owner_may_go_back() -> None:
    play("""
        0  anna claims    -> won     anna@0 fresh, next None
        1  anna beats 50  -> counted anna@0 fresh, next 50
        2  anna beats 20  -> counted anna@0 fresh, next 20
    """)


# ---- releases ----------------------------------------------------------------------------------------


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


# ---- the log's time ----------------------------------------------------------------------------------


def test_the_writers_clock_changes_nothing() -> None:
    """Ten minutes fast or slow, in the record's own seconds."""
    play("""
        1000  anna claims   skew -600   -> won     anna@0 fresh, next None
        1001  bert claims   skew 600    -> lost    anna@0 fresh, next None
        1002  anna beats 5  skew -600   -> counted anna@0 fresh, next 5
        1003  bert beats 9  skew 600    -> ignored anna@0 fresh, next 5
        1021  bert claims   skew -600   -> lost    anna@0 unknown, next 5
        1022  bert claims   skew 600    -> lost    anna@0 unknown, next 5
        1023  bert claims   skew 600    -> won     bert@6 fresh, next 5
    """)


def test_broker_times_that_go_back_do_not_turn_back_the_log() -> None:
    """A new leader whose clock is behind: the log waits for it, and nobody gets younger."""
    world = play("""
        100  anna claims    -> won     anna@0 fresh, next None
        50   bert claims    -> lost    anna@0 fresh, next None
        60   anna beats 5   -> counted anna@0 fresh, next 5
        115  bert claims    -> lost    anna@0 unknown, next 5
        90   bert claims    -> lost    anna@0 unknown, next 5
        121  bert claims    -> won     bert@5 fresh, next 5
    """)
    assert world.now_ms(0) == 121_000


def test_a_log_that_nobody_writes_to_stands_still_and_a_claim_moves_it() -> None:
    trace = """
        0  anna claims    -> won     anna@0 fresh, next None
        1  anna beats 5   -> counted anna@0 fresh, next 5
    """
    world = play(trace)
    bert = Owner("bert", "i1")
    assert world.freshness(GROUP, TOPIC, 0) is Freshness.FRESH
    assert world.foresee(GROUP, TOPIC, 0, bert) is Verdict.LOST
    assert world.foresee(GROUP, TOPIC, 0, bert, elapsed_ms=20_000) is Verdict.LOST
    assert world.foresee(GROUP, TOPIC, 0, bert, elapsed_ms=20_001) is Verdict.WON
    assert world.foresee(GROUP, TOPIC, 0, Owner("anna", "i1")) is Verdict.WON
    play(trace + "21.001 bert claims -> won bert@2 fresh, next 5")


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

"""Golden traces of logs that are trimmed, broken or misplaced, and ways to look at a world."""

from __future__ import annotations

import pytest

from keylane.core.claim_facts import (
    Began,
    Ended,
    Freshness,
    Key,
    LogRecord,
    Misplaced,
    Owner,
    Tenure,
    Verdict,
    overlaps,
)
from keylane.core.claim_records import (
    ClaimingPartition,
    Heartbeat,
    Placing,
    ReleasingPartition,
    coordinating_partition,
    encode,
)
from keylane.core.claim_rules import EVIDENCE_KEPT, VERDICTS_REMEMBERED
from keylane.core.world import World, replay
from keylane.errors import InvalidInput
from tests.core.claim_traces import GROUP, INTERVAL_S, KEY, TOPIC, message, play, told

# ---- a log trimmed by age ----------------------------------------------------------------------------


def test_in_a_trimmed_log_the_first_heartbeat_seen_makes_the_owner() -> None:
    world = play(
        """
        0   anna beats 50    -> counted anna@700 fresh, next 50
        1   bert beats 60    -> ignored anna@700 fresh, next 50
        2   bert claims      -> lost    anna@700 fresh, next 50
        21  bert claims      -> won     bert@703 fresh, next 50
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
        20      bert claims      -> unsure     nobody, next None
        40      carl claims      -> unsure     nobody, next None
        60.001  carl claims      -> won        carl@703 fresh, next None
        """,
        first=700,
    )
    play(
        """
        0       bert noise       -> unreadable nobody, next None
        20.001  bert claims      -> won        bert@701 fresh, next None
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
    with pytest.raises(InvalidInput, match="call begins before the first record"):
        world.begins(0, 0, 1)


# ---- what does not belong there ----------------------------------------------------------------------


def test_broken_records_are_counted_skipped_and_move_the_log() -> None:
    world = play("""
        0   anna claims   -> won        anna@0 fresh, next None
        5   bert noise    -> unreadable anna@0 fresh, next None
        21  bert noise    -> unreadable anna@0 stale, next None
        21  bert claims   -> won        bert@3 fresh, next None
    """)
    assert world.unreadable == 2
    assert [(broken.log_partition, broken.at, broken.unreadable.value) for broken in world.broken] == [
        (0, 1, b"what is this?"),
        (0, 2, b"what is this?"),
    ]


def on_subject(offset: int, value: bytes, subject: str) -> LogRecord:
    return LogRecord(0, offset, 1000 * offset, value, subject)


def test_a_record_on_another_keys_subject_is_skipped() -> None:
    claim, beat = message("anna", "claims", 0, 0), message("anna", "beats", 5, 0)
    own, other = "claims.billing.orders.0", "claims.billing.orders.1"
    world = World(INTERVAL_S)
    assert world.apply(on_subject(0, claim, other)) is Verdict.UNREADABLE
    assert world.claim_of(GROUP, TOPIC, 0) is None
    assert world.apply(on_subject(1, claim, own)) is Verdict.WON
    assert world.apply(on_subject(2, beat, other)) is Verdict.UNREADABLE, "also where its writer is known"
    assert world.apply(on_subject(3, beat, "pauses.billing")) is Verdict.UNREADABLE
    assert world.apply(on_subject(4, beat, own)) is Verdict.COUNTED
    assert world.apply(on_subject(5, message("admin", "pauses", 99, 0), own)) is Verdict.UNREADABLE
    assert world.pauses() == []
    assert world.apply(on_subject(6, message("admin", "pauses", 99, 0), "pauses.billing")) is Verdict.COUNTED
    assert world.unreadable == 4
    assert world.broken[0].unreadable.reason == f"its subject is {other}, and it belongs on {own}"
    assert world.newest_of(GROUP, TOPIC, 0) == 4


def test_a_negative_offset_is_a_sign_of_life_and_no_place() -> None:
    world = World(INTERVAL_S)
    for offset, value in enumerate(
        [
            b"ClaimingPartition/1/1/i/anna/billing/orders/0",
            b"Heartbeat/1/1/i/anna/billing/orders/0/7",
            b"Heartbeat/1/1/i/anna/billing/orders/0/-1",
            b"ClaimingMessages/1/1/i/anna/billing/orders/0/-1",
        ]
    ):
        world.apply(LogRecord(0, offset, 9000 * offset, value))
    claim = world.claim_of(GROUP, TOPIC, 0)
    assert claim is not None
    assert (claim.heartbeat_ms, claim.offset, claim.messages) == (18_000, 7, None)
    world.apply(LogRecord(0, 4, 28_000, b"ReleasingPartition/1/1/i/anna/billing/orders/0/-1"))
    claim = world.claim_of(GROUP, TOPIC, 0)
    assert claim is not None
    assert (claim.owner, claim.offset) == (None, 7)


def test_the_groups_of_a_log() -> None:
    world = World(INTERVAL_S, 4)
    assert world.groups() == []
    world.apply(LogRecord(world.where(TOPIC, 0), 0, 0, message("anna", "claims", 0, 0)))
    world.apply(LogRecord(0, 5, 0, b"ReleaseGroup/1/1/i/admin/audit//0/0"))
    assert world.groups() == ["audit", GROUP]


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
    assert world.misplaced_evidence[0] == Misplaced(wrong, 0, KEY, Owner("anna", "i"), right, True, 5000)
    assert world.other_hash() == Misplaced(wrong, 1, KEY, Owner("anna", "i"), right, True, 6000)
    assert world.claim_of(GROUP, TOPIC, 0) is None, "it makes no owner"
    assert world.now_ms(wrong) == 6000, "but it is a record of that partition"
    assert world.apply(LogRecord(right, 0, 5000, claim)) is Verdict.WON
    assert world.snapshot().misplaced == 2


def test_the_other_hash_is_in_use_for_as_long_as_its_user_may_live() -> None:
    world = World(INTERVAL_S, 64)
    wrong = coordinating_partition(TOPIC, 0, 64, placing="topic")
    world.apply(LogRecord(wrong, 0, 5000, encode(ClaimingPartition("i", "anna", GROUP, TOPIC, 0, 1))))
    assert world.other_hash(lambda _: 20_000) is not None
    assert world.other_hash(lambda _: 20_001) is None
    world.apply(LogRecord(wrong, 1, 25_000, b"noise"))
    assert world.other_hash() is not None
    world.apply(LogRecord(wrong, 2, 25_001, b"noise"))
    assert world.other_hash() is None, "what it claimed has run out"
    assert world.misplaced == 1


def test_a_record_where_no_hash_puts_it() -> None:
    world = World(INTERVAL_S, 64)
    wrong = ({0, 1, 2} - {world.where(TOPIC, 0), coordinating_partition(TOPIC, 0, 64, placing="topic")}).pop()
    beat = encode(Heartbeat("i", "anna", GROUP, TOPIC, 0, 1, 1))
    for offset in range(2):
        assert world.apply(LogRecord(wrong, offset, 0, beat)) is Verdict.MISPLACED
    assert not any(evidence.fits_other_hash for evidence in world.misplaced_evidence)
    assert world.other_hash() is None, "a stray record, and nobody's hash"


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


# ---- looking at it -----------------------------------------------------------------------------------


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
    world.apply(LogRecord(0, 3, 20_001, b"noise"))
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


def test_a_history_can_be_taken_as_it_comes() -> None:
    world = play("""
        0   anna claims      -> won     anna@0 fresh, next None
        1   anna releases 5  -> counted nobody, next 5
        2   bert claims      -> won     bert@2 fresh, next 5
    """)
    assert [(one.owner.client, one.ended) for one in world.take_ended(0)] == [("anna", Ended.RELEASED)]
    assert world.take_ended(0) == []
    assert [(one.owner.client, one.ended) for one in world.tenures()] == [("bert", None)]
    assert World(INTERVAL_S).take_ended(0) == [], "without a history there is nothing to take"


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

"""What the page shows and what it is told of changes, from overviews without a server."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as some

from keylane.overview import (
    AccountOverview,
    GroupOverview,
    MemberOverview,
    PartitionOverview,
    QueueOverview,
    StreamOverview,
)
from keylane.processing.dead_letters import DeadLetter
from keylane.web.given_up import ParkedKey
from keylane.web.merge_patch import merge_patch, patched
from keylane.web.page_view import account_view, group_view
from keylane.web.timeline import MOST_ENTRIES, AccountTimeline, changes

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)

values = some.recursive(
    some.integers(0, 3) | some.sampled_from(["", "x", True, [1], [1, 2]]),
    lambda inner: some.dictionaries(some.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
objects = some.dictionaries(some.sampled_from("abcd"), values, max_size=4)


def group(partitions: int = 4, members: tuple[str, ...] = ("a", "b"), **other: Any) -> GroupOverview:
    """An elastic group whose members take turns."""
    owners = {str(one): members[one % len(members)] if members else None for one in range(partitions)}
    plain = GroupOverview(
        kind="elastic",
        stream="S",
        name="g",
        lag=0,
        lag_s=0.0,
        in_flight=0,
        redelivered=0,
        dead_letters=0,
        parked_keys=0,
        parked_messages=0,
        members=tuple(
            MemberOverview(
                name=name,
                state="active",
                is_active=True,
                partitions=tuple(one for one, owner in owners.items() if owner == name),
                pin=f"pin of {name}",
            )
            for name in members
        ),
        partitions=tuple(
            PartitionOverview(id=one, assigned=owner, owner=owner, lag=0, lag_s=0.0) for one, owner in owners.items()
        ),
    )
    return replace(plain, **other)


def account(*groups: GroupOverview, at: datetime = NOON, streams: tuple[str, ...] = ("S",)) -> AccountOverview:
    found = tuple(
        StreamOverview(name=one, messages=1, bytes=10, first_sequence=1, last_sequence=1, consumers=0)
        for one in streams
    )
    return AccountOverview(read_at=at, groups=groups, streams=found)


@given(objects, objects)
def test_a_patch_makes_the_one_out_of_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    patch = merge_patch(before, after)
    assert patched(before, json.loads(json.dumps(patch))) == after
    assert (patch == {}) == (before == after)


def test_what_is_unknown_is_left_out_and_never_0() -> None:
    unknown = group(lag=None, lag_s=None, in_flight=None, dead_letters=None)
    view = group_view(unknown)
    assert not {"lag", "age", "in_flight", "dead_letter_count"} & view.keys()
    assert None not in walk(view)
    assert "lag unknown" in view["summary"]


def walk(value: Any) -> list[Any]:
    """Everything in a view that is neither an object nor a list."""
    if not isinstance(value, dict | list):
        return [value]
    return [each for one in (value.values() if isinstance(value, dict) else value) for each in walk(one)]


def test_the_account_has_a_sentence_for_each_group_and_hides_what_keylane_keeps() -> None:
    queue = QueueOverview(stream="S-g", messages=3, bytes=30, max_messages=None, max_bytes=None, source_lag=0)
    seen = account(group(lag=12, lag_s=0.44, queue=queue), streams=("S", "S-g", "S@dlq", "KV_x", "OTHER"))
    view = account_view(seen, server="here")
    assert list(view["streams"]) == ["S", "OTHER"]
    assert view["groups"]["elastic/S/g"]["summary"] == "g keeps up: 2 members, lag 12, 0.4 s"
    assert view["groups"]["elastic/S/g"]["standing"] == "good"
    assert view["groups"]["elastic/S/g"]["shares"] == [2, 2]
    nobody = group(members=(), partitions=0, problem="there is no stream 'S'")
    assert account_view(account(nobody), server="")["groups"]["elastic/S/g"]["standing"] == "unreadable"


def test_a_group_shows_owners_and_what_is_on_its_way() -> None:
    moving = PartitionOverview(id="0", assigned="b", owner="a", lag=7, lag_s=123.4, in_flight=2, token=9)
    view = group_view(replace(group(), partitions=(moving,)))
    assert view["partitions"]["0"] == {
        "place": 0,
        "owner": "a",
        "assigned": "b",
        "lag": 7,
        "age": 123.0,
        "in_flight": 2,
        "token": 9,
    }
    assert view["members"]["a"]["partitions"] == "0,2"


def letter(sequence: int, key: str, *, is_parked: bool) -> DeadLetter:
    return DeadLetter(
        sequence=sequence,
        time=NOON,
        stream="S",
        source_sequence=sequence,
        subject=f"s.{key}",
        group="g",
        partition=1,
        key=key,
        member="a",
        tries=3,
        error="ValueError: no",
        headers={},
        data=b"x" * sequence,
        traceback="Traceback\n  …",
        is_parked=is_parked,
    )


def test_messages_of_a_parked_key_are_one_entry_and_odd_bytes_can_be_sent() -> None:
    odd = "k\udcff"
    parked = ParkedKey(letter(1, "k", is_parked=True), messages=2, is_releasing=True)
    view = group_view(group(), dead_letters=[letter(3, odd, is_parked=False)], parked=[parked])
    assert (view["parked"]["k"]["messages"], view["parked"]["k"]["is_releasing"]) == (2, True)
    assert view["dead_letters"]["3"]["key"] == "k\ufffd"
    json.dumps(view).encode()


def test_the_timeline_says_who_came_what_moved_and_who_took_over() -> None:
    before = group()
    [came] = changes(before, group(members=("a", "b", "c")), NOON)
    assert (came.cause, came.text) == ("members", "c came")
    assert came.moves == ("2 from a to c", "3 from b to a")
    a, b = before.members
    other = replace(before, members=(replace(a, pin="another", host="h", pid=7), replace(b, is_active=False)))
    assert [(one.cause, one.text) for one in changes(before, other, NOON)] == [
        ("instance", "another instance of a took over on h, process 7"),
        ("instance", "b is not at work any more: no instance of it runs"),
    ]
    assert changes(before, before, NOON) == []
    [paused] = changes(before, replace(before, is_paused=True), NOON)
    assert (paused.cause, paused.text) == ("pause", "paused")


def test_a_day_of_changes_leaves_the_memory_flat() -> None:
    timeline = AccountTimeline()
    chance = random.Random(7)  # noqa: S311 - a repeatable day
    names = [f"m{one}" for one in range(6)]

    def hours(first: int, last: int) -> None:
        for second in range(first * 3600, last * 3600, 120):
            at = NOON + timedelta(seconds=second)
            members = tuple(sorted(chance.sample(names, 3)))
            busy = replace(group(8, members), name=f"g{second % 3}")
            timeline.see(account(busy, replace(group(), name=f"short-lived {second}"), at=at))

    hours(0, 2)
    tracemalloc.start()
    try:
        after_two, _ = tracemalloc.get_traced_memory()
        hours(2, 24)
        after_a_day, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(timeline._entries) == 2
    assert all(len(one) <= MOST_ENTRIES for one in timeline._entries.values())
    assert after_a_day - after_two < 500_000


def test_a_change_of_a_large_group_is_a_small_patch_made_quickly() -> None:
    members = tuple(f"member-{one}" for one in range(50))
    large = group(1000, members, lag=5000, lag_s=3.0)
    busy = [replace(one, lag=number, lag_s=number / 7) for number, one in enumerate(large.partitions)]
    before = group_view(replace(large, partitions=tuple(busy)))
    later = tuple(replace(one, lag_s=(one.lag_s or 0) + 2) if one.lag and one.lag < 300 else one for one in busy)
    began = time.perf_counter()
    after = group_view(replace(large, partitions=later))
    patch = json.dumps(merge_patch(before, after))
    assert time.perf_counter() - began < 0.2
    assert len(patch) < len(json.dumps(after)) / 3
    assert set(json.loads(patch)) == {"partitions"}
